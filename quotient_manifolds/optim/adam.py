"""Adam on the quotient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..symmetries import SymmetricPair
from .base import QuotientOptimizer, is_number
from .buckets import PairStep, trace
from .preconditioner import wide

__all__ = ["QuotientAdam"]

#: Least eigenvalue of a second moment relative to its largest.
_LEAST = 1e-3


def _by_pair(numbers: Tensor, like: Tensor) -> Tensor:
    """Give one number a pair in the precision and the number of dimensions of what they multiply."""
    return numbers.to(like.device, like.real.dtype).view(-1, *[1] * (like.dim() - 1))


def _rows(s: PairStep, like: Tensor) -> Tensor:
    """Count the rows of G and of H, (2, 1, 1)."""
    return torch.tensor([s.stack.n, s.stack.m], dtype=like.real.dtype, device=like.device).view(2, 1, 1)


class QuotientAdam(QuotientOptimizer):
    r"""Adam for pairs (G, H), the same whichever equivalent factors it starts from; AdamW for everything else.

    For each factor, here G, with K the root of its metric's weight, :math:`W = K K^H`, see
    :mod:`quotient_manifolds.optim.preconditioner`:

    .. math::
        \bar g &= \nabla_G K^{-H} \\
        m &\leftarrow β_1 m + (1 - β_1) \bar g, \qquad
        C \leftarrow β_2 C + (1 - β_2)\, \bar g^H \bar g / n \\
        r_i &\leftarrow β_2 r_i + (1 - β_2)\, \tfrac1h \| (\bar g\, \hat C^{-1/2})_i \|^2 \\
        d_i &= \frac{(\hat m\, (\hat C^{1/2} + ε)^{-1})_i}{\sqrt{\hat r_i} + ε}, \qquad
        G \leftarrow \sqrt{1 - ηλ}\, G - η\, d K^{-1}

    Then m and C are transported to the new point. C is an h × h matrix, r one number a row, both the same for
    all representatives but for a rotation of the basis that d undoes. ``second_moment="scalar"`` has one number in
    place of both, the mean of :math:`|\bar g|^2`. A step changes the product by about η in each of its directions, so
    that the learning rates of AdamW carry over.

    Parameters
    ----------
    params : iterable
        Parameters or parameter groups, as for any torch optimiser.
    pairs : iterable of SymmetricPair
        ``quotient_manifolds.symmetries.find_symmetric_pairs(model)``; for attention with ``key_bias="drop"``, see
        :func:`create_quotient_optimizer`. Those without a group are passed over, and those none of whose parameters are
        among ``params``. More may come later: ``add_param_group({"params": …, "pairs": …})``.
    lr : float
        η.
    betas : (float, float)
        β₁, β₂.
    eps : float
        ε.
    weight_decay : float
        λ. The product of a pair becomes (1 - ηλ) times itself; a bias does not decay.
    metric : {"mix", "inv"}
        W_G is the Gram matrix of H (mix), or the inverse of that of G (inv).
    second_moment : {"matrix", "scalar"}
    max_grad_norm : float, optional
        Clip the norm of the whole gradient, that of pairs in the metric. Clipping elsewhere, as in transformers'
        ``Trainer`` (``max_grad_norm=0`` turns it off there), makes the run depend on the representative.
    maximize : bool
        Ascend.
    foreach : bool, optional
        Of torch's AdamW, for what belongs to no pair; pairs of one shape always step together.

    Raises
    ------
    ValueError
        An option out of range; no pair among the parameters; a pair whose parameters lie in several groups or are not
        all there; a pair with one frozen factor, or with two factors that both lack rank; sharded parameters.

    Notes
    -----
    Kingma and Ba (2015); Loshchilov and Hutter (2019) for the decay. LoRA-RITE (Yen et al., 2024) too keeps a matrix
    second moment in a basis of the other factor and projects it on the next one; it has no numbers by row, adds
    what the projection loses as a multiple of the identity, and takes the mean of directions, not of gradients.

    C and r have h² + n numbers in place of AdamW's nh, which is less for n ≫ h. Invariance holds from the first step,
    also where G = 0. Where gradients lack rank, the directions they leave out hold rounding only; C counts its least
    eigenvalue as 1e-3 of its largest, lest that be blown up.

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
        metric: str = "mix",
        second_moment: str = "matrix",
        max_grad_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "metric": metric,
            "second_moment": second_moment, "max_grad_norm": max_grad_norm, "maximize": maximize, "foreach": foreach,
        }  # fmt: skip
        super().__init__(params, pairs, defaults)

    def _check_options(self, group: Mapping[str, Any]) -> None:
        super()._check_options(group)
        if group["second_moment"] not in ("matrix", "scalar"):
            raise ValueError(f'second_moment must be "matrix" or "scalar", got {group["second_moment"]!r}')
        betas = group["betas"]
        if (
            not isinstance(betas, (tuple, list))
            or len(betas) != 2
            or not all(is_number(b) and 0 <= b < 1 for b in betas)
        ):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
        if not (is_number(group["eps"]) and 0 < group["eps"] < math.inf):
            raise ValueError(
                f"eps must be positive, got {group['eps']!r}: a factor without gradient yet is divided by it"
            )

    def _step_pairs(self, group: Mapping[str, Any], s: PairStep) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        if not s.bucket.state:
            self._make_room(group, s)
        K_inv = s.preconditioner.inverse_roots
        count = s.read("step") + 1
        correction1, correction2 = (_by_pair(1 - beta**count, K_inv) for beta in (beta1, beta2))
        m = torch.lerp(s.read("moment"), s.gradient, 1 - beta1)
        if group["second_moment"] == "scalar":
            squares = trace(K_inv @ s.grams @ K_inv.mH) / _rows(s, K_inv).view(2) / K_inv.shape[-1]
            v = torch.lerp(s.read("scalar").to(squares.dtype), squares, 1 - beta2)
            root = (v[..., None, None] / correction2).sqrt() + eps
            s.move_(s.times(m, K_inv.mH @ K_inv / root / correction1), lr, weight_decay)
            s.write(step=count, moment=s.times(m, s.transport()), scalar=v)
            return
        # C is kept as a sum of ∇ᴴ∇; between K⁻¹ and K⁻ᴴ it is that of the gradients' coordinates.
        C = torch.lerp(s.read("matrix"), s.grams / _rows(s, K_inv), 1 - beta2)
        values, vectors = torch.linalg.eigh(K_inv @ (C / correction2) @ K_inv.mH)
        values = torch.maximum(values, _LEAST * values[..., -1:]).clamp_min(0)
        halfway = K_inv.mH @ (vectors / (values.sqrt() + eps).unsqueeze(-2))  # K⁻ᴴ C^(-1/2), turned
        squares = s.times(s.gradient, halfway).abs().square().mean(-1, keepdim=True)
        r = torch.lerp(s.read("rows"), squares, 1 - beta2)
        d = m / ((r / _by_pair(correction2, r)).sqrt() + eps)
        s.move_(s.times(d, halfway @ (vectors.mH @ K_inv) / correction1), lr, weight_decay)
        T = s.transport()
        s.write(step=count, moment=s.times(m, T), matrix=T.mH @ C @ T, rows=r)

    def _make_room(self, group: Mapping[str, Any], s: PairStep) -> None:
        """Begin the state of a bucket with zeros."""
        zeros, state = s.gradient.new_zeros(len(s.bucket.stack), *s.gradient.shape[1:]), s.bucket.state
        state["step"], state["moment"] = torch.zeros(len(zeros), dtype=torch.float64), zeros
        *batch, _, h = zeros.shape
        if group["second_moment"] == "matrix":
            state["matrix"] = wide(zeros.new_zeros(*batch, 2, h, h))
            state["rows"] = zeros.real[..., :1].clone()
        else:
            state["scalar"] = zeros.real.new_zeros(*batch, 2)

    def _step_others(self, group: Mapping[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        for p in params:
            state = self.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(p)
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
        states = [self.state[p] for p in params]
        adamw(
            params,
            gradients,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            foreach=group["foreach"],
            maximize=False,  # the gradients have their sign already
        )
