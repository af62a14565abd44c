"""Adam on the quotient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..symmetries.pairs import SymmetricPair
from .base import QuotientOptimizer
from .metric import eye_like, inverse_root
from .stacked import Step

__all__ = ["QuotientAdam"]

#: Multiple of the identity that is added to a second moment, relative to its Frobenius norm.
_LEAST = 1e-3
#: Rank at which an entry of d is a full step: that of peft's LoraConfig, where rates of AdamW are known.
_RANK = 8


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
    one learning rate serves for all. Those of AdamW at peft's defaults, rank and alpha 8, carry over.

    Parameters
    ----------
    params : iterable
        Parameters or parameter groups, as for any torch optimiser.
    pairs : iterable of SymmetricPair
        ``quotient_manifolds.symmetries.find_symmetric_pairs(model)``; for attention with ``key_bias="drop"``, see
        :func:`create_quotient_optimizer`. Pairs without a group, and pairs without a parameter among ``params``, are
        ignored. More can be added later by ``add_param_group({"params": …, "pairs": …})``.
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
        transformers' ``Trainer`` (where ``max_grad_norm=0`` turns it off), makes the run depend on the representative.
    maximize : bool
        Ascend.

    Raises
    ------
    ValueError
        An option is out of range; no pair is among the parameters; the parameters of a pair lie in several groups or
        are incomplete; one factor of a pair is frozen, or both factors lack full rank; parameters are sharded.

    Notes
    -----
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
    >>> from quotient_manifolds.symmetries import GL, block, pair
    >>> down, up = torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 4, bias=False)
    >>> p = pair([block(up, "weight")], [block(down, "weight", transpose=True)], GL(2))
    >>> optimizer = QuotientAdam([down.weight, up.weight], [p], lr=1e-2)
    >>> loss = up(down(torch.ones(1, 6))).square().sum()
    >>> loss.backward()
    >>> optimizer.step()
    >>> bool(up(down(torch.ones(1, 6))).square().sum() < loss)
    True
    """

    def __init__(
        self,
        params: Any,
        pairs: Iterable[SymmetricPair],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, pairs, defaults, max_grad_norm)

    _state_names = frozenset({"moment G", "moment H", "rows G", "rows H", "step", "matrix"})

    def _step_pairs(self, group: Mapping[str, Any], s: Step) -> None:
        (beta1, beta2), lr, K_inv = group["betas"], float(group["lr"]), s.metric.inverse_roots
        C = s.state.setdefault("matrix", torch.zeros_like(K_inv))
        step = s.state.setdefault("step", K_inv.real.new_zeros(len(K_inv)))
        first, second = ((1 - beta ** (step + 1))[:, None, None, None] for beta in (beta1, beta2))
        # C is a sum of ∇ᴴ∇; multiplied by K⁻¹ and K⁻ᴴ it is that of the gradients' coordinates.
        G, H = s.grams(map(s.g, s.parts)).unbind(-3)
        means = torch.stack([G / s.bucket.stack.n, H / s.bucket.stack.m], dim=-3)
        C.lerp_(s.only(means, C), 1 - beta2)
        V = K_inv @ (C / second) @ K_inv.mH
        root = inverse_root(V + _LEAST * torch.linalg.matrix_norm(V, keepdim=True) * eye_like(V))
        coordinates, basis = K_inv.mH @ root, K_inv * (-lr * (_RANK / K_inv.shape[-1]) ** 0.5) / first

        def directions() -> Iterator[Tensor]:
            for part in s.parts:
                g, m, r = s.g(part), s.rows("moment", part), s.rows("rows", part, 1)
                R = part.of(coordinates).to(g.dtype)
                size = torch.linalg.vector_norm(g @ R, dim=-1, keepdim=True).square() / g.shape[-1]
                m.lerp_(s.only(g, m, part), 1 - beta1)
                r.lerp_(s.only(size, r, part), 1 - beta2)
                yield (m @ R).div_((r / second[part.points, 0].to(r.dtype)).sqrt_().add_(group["eps"]))

        s.advance_(directions(), basis, lr * group["weight_decay"])
        step.add_(s.only(torch.ones_like(step), 0))
