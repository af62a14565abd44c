"""The optimisers on the quotient: Adam, Muon and gradient descent, each a rule with its options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..symmetries.found import Symmetries
from ..symmetries.pairs import SymmetricPair
from .base import QuotientOptimizer
from .metric import StepMetric, refined
from .rules import adam, adam_state, muon, muon_metric, sgd, sgd_state
from .stack import Stack

Pairs = Symmetries | Iterable[SymmetricPair]
Betas = tuple[float, float]


class QuotientAdam(QuotientOptimizer):
    r"""Adam for pairs (G, H), independent of which equivalent factors it starts from; AdamW for all other parameters.

    For each factor, here G, with K the root of its metric's weight, :math:`W_G = s^2 H^H H = K K^H` and for H
    :math:`s^2 G^H G + (H^H H)^{-1}` (:mod:`quotient_manifolds.optim.metric`):

    .. math::
        \bar g &= \nabla_G K^{-H} \\
        m &\leftarrow β_1 m + (1 - β_1) \bar g, \qquad
        C \leftarrow β_2 C + (1 - β_2)\, \bar g^H \bar g / n \\
        R &= (\hat C + 10^{-3} \|\hat C\|_F\, I)^{-1/2}, \qquad
        r_i \leftarrow β_2 r_i + (1 - β_2)\, \tfrac1h \| (\bar g R)_i \|^2 \\
        d_i &= \frac{(\hat m R)_i}{\sqrt{\hat r_i} + ε}, \qquad
        G \leftarrow \sqrt{1 - ηλ}\, G - η \sqrt{8/h}\, d K^{-1}

    where hats divide by 1 - βᵗ. Then m and C are transported to the new point. C is an h × h matrix, and r has one
    number per row. Both are the same for all representatives up to a rotation of the basis, which d undoes.
    A row of d has a norm of at most about √h, so through each factor a step changes the weight that the network sees, s
    times the product, by at most about :math:`η \sqrt{8n}` in the Frobenius norm, whatever the rank h and the scale s:
    one learning rate served ranks 4 to 64 in our study. It is of the order of AdamW's at peft's defaults, rank and
    alpha 8; on three tasks three times AdamW's best was best.

    Parameters
    ----------
    params : iterable
        Named parameters, ``model.named_parameters()``, or groups of them, as for any torch optimiser.
    symmetries : Symmetries or iterable of SymmetricPair
        ``quotient_manifolds.symmetries.find(model)``; for attention ``find(model).without_null()``, see
        :func:`create_quotient_optimizer`. Pairs without a parameter among ``params`` are ignored. More can be added
        later by ``add_param_group({"params": …})`` and :meth:`add_pairs`.
    lr : float
        η.
    betas : (float, float)
        β₁, β₂.
    eps : float
        ε.
    weight_decay : float
        λ. Every step multiplies the product of a pair by 1 - ηλ; a bias does not decay.
    max_grad_norm : float, optional
        Clip the norm of the whole gradient, in which pairs count by the metric. Clipping elsewhere, such as in
        transformers' ``Trainer`` (to 1 by default; ``max_grad_norm=0`` turns it off), makes the run depend on the
        representative.
    others : str or dict, optional
        What trains parameters outside pairs: a class of ``torch.optim``, or of another library with its module, or a
        dict of its ``name`` and options, such as ``{"name": "SGD", "momentum": 0.9}``. It has its own defaults, but the
        rate and the decay of the pairs; a parameter group may have another one. By default AdamW, with ``betas`` and
        ``eps``.
    within : Module, optional
        The model in which the parameters lie. It knows the names of those that have none; and a step raises if one has
        left it, or if a LoRA adapter in it is merged or has another scale.

    Raises
    ------
    ValueError
        An option is out of range; parameters have no names; no pair is among them, or one in several groups; both
        factors of a pair lack full rank; parameters are sharded.

    Warnings
    --------
    Do not average factors over steps (EMA, SWA, ``AveragedModel``, means of checkpoints): now and then a step turns a
    pair to other factors of the same product, so that an average mixes two gauges. Average products.

    Notes
    -----
    A pair whose gradient is zero in both factors, such as an expert without tokens, stays as it is, moments too.

    Kingma and Ba (2015); Loshchilov and Hutter (2019) for the decay. LoRA-RITE (Yen et al., 2024) also keeps a matrix
    second moment in a basis of the other factor and projects it onto the next basis. It has no second moment per row,
    adds what the projection loses as a multiple of the identity, and averages directions instead of gradients.

    C and r have h² + n numbers instead of AdamW's nh, which is less for n ≫ h. Invariance holds from the first step,
    also where G = 0. Where gradients lack rank, the missing directions contain only rounding errors. 1e-3 of the norm
    of C is added to its eigenvalues, so that these errors are not amplified.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim import QuotientAdam
    >>> from quotient_manifolds.symmetries import GL, pair, slot
    >>> model = torch.nn.Sequential(torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 4, bias=False))
    >>> p = pair([slot(model, "1.weight")], [slot(model, "0.weight", transpose=True)], GL(2))
    >>> optimizer = QuotientAdam(model.named_parameters(), [p], lr=1e-2)
    >>> loss = model(torch.ones(1, 6)).square().sum()
    >>> loss.backward()
    >>> optimizer.step()
    >>> bool(model(torch.ones(1, 6)).square().sum() < loss)
    True
    """

    rule, new_state, shared = staticmethod(adam), staticmethod(adam_state), ("betas", "eps")

    def __init__(
        self,
        params: Any,
        symmetries: Pairs = (),
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        super().__init__(params, symmetries, lr, {"betas": betas, "eps": eps}, **options)


class QuotientMuon(QuotientOptimizer):
    r"""Muon for pairs (G, H), independent of which equivalent factors it starts from; AdamW for all other parameters.

    For each factor, here G, with :math:`W_G = s^2 H^H H = K K^H`, the metric's weight, and polar(X) = U Vᴴ for
    :math:`X = U Σ V^H`:

    .. math::
        m \leftarrow μ m + (1 - μ) \nabla_G, \qquad u = (1 - μ) \nabla_G + μ m, \qquad
        G \leftarrow \sqrt{1 - ηλ}\, G - \frac{η}{2}\, \mathrm{polar}(u K^{-H})\, K^{-1}

    Among all steps with :math:`\|s ξ_G H^H\|_2 \le η/2` and :math:`\|s G ξ_H^H\|_2 \le η/2` this one descends fastest
    along u. To first order, the weight that the network sees, s times the product, thus changes by at most η in
    any direction, whatever the rank and scale of an adapter. Nothing depends on the representative, and there is no
    second moment: the state is one number per weight.

    Parameters
    ----------
    params, symmetries, max_grad_norm, others, within
        As for :class:`~quotient_manifolds.optim.QuotientAdam`.
    lr : float
        η, the size of a step of the product, so not AdamW's rate. .02 is a starting point, not a tuned value.
    momentum : float
        μ.
    weight_decay : float
        λ. Every step multiplies the product of a pair by 1 - ηλ; a bias does not decay.
    betas, eps
        Options of AdamW, for parameters outside pairs, by default its own. They have the learning rate η/20, or that of
        their group if it has one of its own. With ``others``, its options.

    Raises
    ------
    ValueError
        As for :class:`~quotient_manifolds.optim.QuotientAdam`.

    Warnings
    --------
    As for :class:`~quotient_manifolds.optim.QuotientAdam`: do not average factors over steps (EMA, SWA).

    Notes
    -----
    Muon: Jordan et al. (2024), Bernstein and Newhouse (2024). For the product of two factors this is LoRA-Muon (Cesista
    et al. 2026) with Nesterov's momentum and the adapter's scale. It differs where the product lacks full rank, as at G
    = 0, where LoRA starts, where batches have fewer examples than the adapter has dimensions, and where the answer has
    a lower rank: for :math:`K^{-1}` of H it takes

    .. math:: F = R\,\hat M^{-1}, \qquad R^H R = s^2 G^H G, \qquad \hat M = s^2 G^H G + δ (H^H H)^{-1}, \qquad
              δ = \left(\frac{η}{4 (1 - μ)}\right)^2 + 10^{-6} \|s G H^H\|_F^2 ,

    a ridge regression, which depends only on the orbit. H turns by at most 1 - μ radian, so that it does not outgrow
    its momentum, the second-order term :math:`s ξ_G ξ_H^H` is at most (1 - μ) η/2, and H does not move while G = 0.

    No singular value or eigenvalue is computed: a Newton-Schulz iteration finds the inverse root of the h × h matrix in
    :math:`\mathrm{polar}(X) = X (X^H X)^{-1/2}` (Amsel et al. 2025). It makes singular values of :math:`u K^{-H}` below
    3e-4 of its norm smaller than 1, so that rounding errors are not taken for directions.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim import QuotientMuon
    >>> from quotient_manifolds.symmetries import GL, pair, slot
    >>> model = torch.nn.Sequential(torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 4, bias=False))
    >>> p = pair([slot(model, "1.weight")], [slot(model, "0.weight", transpose=True)], GL(2))
    >>> optimizer = QuotientMuon(model.named_parameters(), [p], lr=0.02)
    >>> before = (model[1].weight @ model[0].weight).detach()
    >>> model(torch.randn(3, 6)).square().sum().backward()
    >>> optimizer.step()
    >>> round(float(torch.linalg.matrix_norm((model[1].weight @ model[0].weight).detach() - before, 2)), 2) <= 0.02
    True
    """

    rule, transports = staticmethod(muon), False
    rest = 1 / 20  # .001 instead of .02

    def __init__(
        self, params: Any, symmetries: Pairs = (), lr: float = 0.02, momentum: float = 0.9, **options: Any
    ) -> None:
        if theirs := {name: options.pop(name) for name in ("betas", "eps") if name in options}:
            if "others" in options:
                name = min(theirs)
                raise TypeError(f"with others, {name} is one of its options: others={{'name': …, {name!r}: …}}")
            options["others"] = {"name": self.others, **theirs}
        super().__init__(params, symmetries, lr, {"momentum": momentum}, **options)

    def _metric(self, s: Stack, grams: Tensor) -> StepMetric:
        group, (M, N) = self.param_groups[s.group], grams.unbind(-3)
        if s.dtype == torch.float32:  # Rounding of M to single precision is a singular value of G, and a step of H.
            M = refined(s.x[0], M, s.g.room[0])
        return muon_metric(M, N, s.scale, lr=float(group["lr"]), momentum=group["momentum"])


class QuotientSGD(QuotientOptimizer):
    r"""Riemannian gradient descent with momentum for pairs (G, H); plain SGD for all other parameters.

    .. math:: m \leftarrow μ m + \nabla_G, \qquad G \leftarrow \sqrt{1 - ηλ}\, G - η\, m W_G^{-1}

    with the metric's weight :math:`W_G = s^2 H^H H`, and :math:`W_H = s^2 G^H G + (H^H H)^{-1}`; the covector m is
    transported. The run is the same from all equivalent factors.

    Parameters
    ----------
    params, symmetries, max_grad_norm, others, within
        As for :class:`~quotient_manifolds.optim.QuotientAdam`.
    lr : float
        η.
    momentum : float
        μ, as it is at each step.
    weight_decay : float
        λ, decoupled: every step multiplies the product of a pair, and any other parameter, by 1 - ηλ.

    Raises
    ------
    ValueError
        As for :class:`~quotient_manifolds.optim.QuotientAdam`.

    Warnings
    --------
    As for :class:`~quotient_manifolds.optim.QuotientAdam`: do not average factors over steps (EMA, SWA).

    Notes
    -----
    Where G = 0 the metric has the floor of :mod:`quotient_manifolds.optim.metric`.

    Examples
    --------
    Factors of very different size, but of one product, take the same step:

    >>> import torch
    >>> from quotient_manifolds.optim import QuotientSGD
    >>> from quotient_manifolds.symmetries import factor_pair
    >>> def stepped(scale):
    ...     G, H = (torch.nn.Parameter(c * torch.eye(3, 2)) for c in (scale, 1 / scale))
    ...     (G @ H.T).sum(1).square().sum().backward()
    ...     QuotientSGD([("G", G), ("H", H)], [factor_pair(G, H)], lr=0.1).step()
    ...     return G @ H.T
    >>> torch.allclose(stepped(1.0), stepped(100.0), atol=1e-5)
    True
    """

    rule, new_state = staticmethod(sgd), staticmethod(sgd_state)
    others, shared = "SGD", ("momentum",)

    def __init__(
        self, params: Any, symmetries: Pairs = (), lr: float = 1e-3, momentum: float = 0.0, **options: Any
    ) -> None:
        super().__init__(params, symmetries, lr, {"momentum": momentum}, **options)
