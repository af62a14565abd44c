"""The rules of the optimisers: pure functions of stacked tensors, which know no optimiser, no parameter and no model.

A rule is ``rule(metric, g, state, **options) -> (update, state)``:

- ``metric`` is the :class:`~quotient_manifolds.optim.metric.StepMetric` at a stack of points. Its ``inverse_roots``
  are K⁻¹ of G and of H, one tensor (points, 2, h, h), where W = K Kᴴ is the weight of the metric.
- ``g`` is the :class:`~quotient_manifolds.optim.metric.Gradient` there. ``g.rows`` are ∇_G and ∇_H, each
  (points, rows, h); the rule may overwrite them.
- ``state`` is a dict of tensors whose first dimension runs over points. ``"moment G"`` and ``"moment H"`` are
  covectors, and ``"matrix"`` is a sum of products ∇ᴴ∇, (points, 2, h, h). The optimiser carries these to the next
  point. All else must be the same for all representatives.
- ``options`` are numbers, such as ``betas``.
- The :class:`Update` is a vector, along which the optimiser steps.

G A⁻¹ and H Aᴴ have A K Q in place of K, where Q is unitary. So a rule is invariant if it computes with the coordinates
∇ K⁻ᴴ, and what comes out turns with Q as they do. ``docs/howto/optimizer.md`` writes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .metric import MOMENTS, Gradient, StepMetric, inverse_root, trace, wide

__all__ = ["Update", "adam", "adam_state", "moments", "muon", "muon_metric", "sgd", "sgd_state"]

State = dict[str, Tensor]
#: Multiple of the identity that is added to a second moment, relative to its Frobenius norm.
_LEAST = 1e-3
#: Rank at which an entry of d is a full step: that of peft's LoraConfig, where rates of AdamW are known.
_RANK = 8
#: Singular values of the product count as at least this share of its Frobenius norm, at any learning rate.
_LEAST_PRODUCT = 1e-3


class Update(NamedTuple):
    r"""A vector at each point of a stack, in factors: a step is :math:`X \leftarrow \sqrt{1 - ηλ}\, X - η\, c\, d A`.

    Attributes
    ----------
    rows : sequence of Tensor
        d of G and of H, each (points, rows, h).
    matrices : Tensor
        A of G and of H, (points, 2, h, h).
    factor : float
        c.

    Examples
    --------
    Riemannian gradient descent, ∇ W⁻¹:

    >>> from quotient_manifolds.optim.rules import Update
    >>> def descent(metric, g, state):
    ...     K_inv = metric.inverse_roots
    ...     return Update(g.rows, K_inv.mH @ K_inv), state
    """

    rows: Sequence[Tensor]
    matrices: Tensor
    factor: float = 1.0


Rule = Callable[..., tuple[Update, State]]


def moments(rows: Sequence[Tensor], **_: object) -> State:
    """Return a state of two moments that are 0.

    Parameters
    ----------
    rows : sequence of Tensor
        Tensors (points, n, h) and (points, m, h), which become the moments.

    Returns
    -------
    dict

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim.rules import moments
    >>> {name: tuple(m.shape) for name, m in moments([torch.empty(1, 5, 2), torch.empty(1, 4, 2)]).items()}
    {'moment G': (1, 5, 2), 'moment H': (1, 4, 2)}
    """
    return {name: x.zero_() for name, x in zip(MOMENTS, rows, strict=True)}


def adam_state(rows: Sequence[Tensor], **_: object) -> State:
    """Return the state of :func:`adam` before the first step: moments, C, r, and the number of steps.

    Parameters
    ----------
    rows : sequence of Tensor
        Tensors (points, n, h) and (points, m, h), which become the moments.

    Returns
    -------
    dict

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim.rules import adam_state
    >>> state = adam_state([torch.empty(1, 5, 2), torch.empty(1, 4, 2)])
    >>> tuple(state["matrix"].shape), tuple(state["rows"].shape), int(state["step"])
    ((1, 2, 2, 2), (1, 9, 1), 0)
    """
    (size, n, h), m = rows[0].shape, rows[1].shape[1]
    like = wide(rows[0][:0])
    small = {"matrix": like.new_zeros(size, 2, h, h), "step": like.real.new_zeros(size)}
    return {**moments(rows), **small, "rows": rows[0].real.new_zeros(size, n + m, 1)}


def adam(
    metric: StepMetric, g: Gradient, state: State, *, betas: tuple[float, float], eps: float
) -> tuple[Update, State]:
    r"""Compute the update of :class:`~quotient_manifolds.optim.QuotientAdam`, whose formulas and names these are.

    Parameters
    ----------
    metric : StepMetric
        The metric at a stack of points.
    g : Gradient
        The gradients there, which are overwritten.
    state : dict
        As from :func:`adam_state`; what is averaged is written in place.
    betas : (float, float)
        β₁, β₂.
    eps : float
        ε.

    Returns
    -------
    update : Update
    state : dict

    Notes
    -----
    C is kept as a mean of ∇ᴴ∇, which K⁻¹ and K⁻ᴴ turn into that of coordinates, and m as one of ∇, so that both can be
    transported; r is h times that of the formula.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim.metric import Gradient, StepMetric
    >>> from quotient_manifolds.optim.rules import adam, adam_state
    >>> G, H = (torch.ones(1, rows, 1, dtype=torch.float64) for rows in (5, 4))
    >>> metric, g = StepMetric(G.mH @ G, H.mH @ H), Gradient([3 * G, 3 * H]).read()
    >>> state = adam_state([torch.empty_like(G), torch.empty_like(H)])
    >>> update, state = adam(metric, g, state, betas=(0.9, 0.999), eps=1e-8)
    >>> (update.factor * update.rows[0] @ update.matrices[:, 0])[0, 0].round(decimals=3).item()
    1.414
    """
    K_inv, step = metric.inverse_roots, state["step"] + 1
    correction_1, correction_2 = (1 - beta ** step[:, None, None] for beta in betas)
    # C ← β₂ C + (1 − β₂) ∇ᴴ∇ / n;  R = (Ĉ + 10⁻³ ‖Ĉ‖ I)^(−1/2), where Ĉ is that of coordinates ∇ K⁻ᴴ
    (C,) = g.average_(state, ["matrix"], [g.grams() / g.counts], 1 - betas[1])
    C_hat = K_inv @ (C / correction_2[:, None]) @ K_inv.mH
    C_hat.diagonal(dim1=-2, dim2=-1).add_(torch.linalg.matrix_norm(C_hat)[..., None], alpha=_LEAST)
    R = K_inv.mH @ inverse_root(C_hat, metric.eye)  # K⁻ᴴ R: for gradients in place of their coordinates
    # r ← β₂ r + (1 − β₂) ‖(∇ K⁻ᴴ R)ᵢ‖²;  √r̂ + ε, both times √h, which takes √h from the rate
    squares = g.row_squares(R)
    (r,) = g.average_(state, ["rows"], [squares], 1 - betas[1])
    sizes = torch.div(r, correction_2, out=squares).sqrt_().add_(eps * R.shape[-1] ** 0.5)  # in the rows' precision
    # m ← β₁ m + (1 − β₁) ∇;  d = m / (√r̂ + ε), for dividing rows commutes with R, which goes to the update's matrices
    parts = sizes.split([x.shape[1] for x in g.rows], dim=1)
    for d, m, size in zip(g.rows, g.average_(state, MOMENTS, g.rows, 1 - betas[0]), parts, strict=True):
        torch.div(m, size, out=d)
    return Update(g.rows, R @ (K_inv / correction_1[:, None]), _RANK**0.5), {**state, "step": step}


def muon(metric: StepMetric, g: Gradient, state: State, *, momentum: float) -> tuple[Update, State]:
    r"""Compute the update of :class:`~quotient_manifolds.optim.QuotientMuon`, at the metric of :func:`muon_metric`.

    Parameters
    ----------
    metric : StepMetric
        The metric at a stack of points.
    g : Gradient
        The gradients there, which are overwritten.
    state : dict
        As from :func:`moments`; what is averaged is written in place.
    momentum : float
        μ.

    Returns
    -------
    update : Update
    state : dict

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim.metric import Gradient, StepMetric
    >>> from quotient_manifolds.optim.rules import muon, moments
    >>> G, H = (torch.ones(1, rows, 1, dtype=torch.float64) for rows in (5, 4))
    >>> metric, g = StepMetric(G.mH @ G, H.mH @ H), Gradient([3 * G, 3 * H]).read()
    >>> state = moments([torch.empty_like(G), torch.empty_like(H)])
    >>> update, state = muon(metric, g, state, momentum=0.9)
    >>> (update.factor * update.rows[0] @ update.matrices[:, 0])[0, 0].round(decimals=3).item()
    0.112
    """
    K_inv, m = metric.inverse_roots, g.average_(state, MOMENTS, g.rows, 1 - momentum)  # m ← μ m + (1 − μ) ∇
    torch._foreach_lerp_(g.rows, m, momentum)  # u = (1 − μ) ∇ + μ m, in the rows of g
    # polar(u K⁻ᴴ) = u K⁻ᴴ (K⁻¹ uᴴu K⁻ᴴ)^(−1/2). Where the product lacks rank K⁻¹ of H is large, and u small, so they
    # are multiplied before their Gram matrix is taken.
    to_polar = K_inv.mH @ inverse_root(g.grams(K_inv), metric.eye)
    return Update(g.rows, to_polar @ K_inv, 1 / 2), state


def muon_metric(M: Tensor, N: Tensor, scale: float, *, lr: float, momentum: float) -> StepMetric:
    r"""Return the metric of :class:`~quotient_manifolds.optim.QuotientMuon`, whose floor δ depends on the rate.

    Parameters
    ----------
    M, N : Tensor
        Gram matrices of G and of H, (points, h, h), in double precision.
    scale : float
        s.
    lr, momentum : float
        η, μ.

    Returns
    -------
    StepMetric

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim.rules import muon_metric
    >>> bool(muon_metric(torch.zeros(1, 2, 2), torch.eye(2)[None], 1.0, lr=0.02, momentum=0.9).sound)
    True
    """
    step = lr / (4 * (1 - momentum))
    floor = (_LEAST_PRODUCT * scale) ** 2 * trace(M @ N)[..., None, None] + step**2
    # 0 for a learning rate of 0 at G = 0
    return StepMetric(M, N, scale, torch.where(floor > 0, floor, 1))


def sgd_state(rows: Sequence[Tensor], *, momentum: float) -> State:
    """Return the state of :func:`sgd` before the first step, which without momentum is empty.

    Parameters
    ----------
    rows : sequence of Tensor
        Tensors (points, n, h) and (points, m, h), which become the moments.
    momentum : float
        μ.

    Returns
    -------
    dict

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim.rules import sgd_state
    >>> [len(sgd_state([torch.empty(1, 5, 2), torch.empty(1, 4, 2)], momentum=m)) for m in (0.0, 0.9)]
    [0, 2]
    """
    return moments(rows) if momentum else {}


def sgd(metric: StepMetric, g: Gradient, state: State, *, momentum: float) -> tuple[Update, State]:
    r"""Compute the update of :class:`~quotient_manifolds.optim.QuotientSGD`.

    Parameters
    ----------
    metric : StepMetric
        The metric at a stack of points.
    g : Gradient
        The gradients there, which are overwritten.
    state : dict
        As from :func:`sgd_state`; what is averaged is written in place.
    momentum : float
        μ.

    Returns
    -------
    update : Update
    state : dict

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim.metric import Gradient, StepMetric
    >>> from quotient_manifolds.optim.rules import sgd, sgd_state
    >>> G, H = (torch.ones(1, rows, 1, dtype=torch.float64) for rows in (5, 4))
    >>> metric, g = StepMetric(G.mH @ G, H.mH @ H), Gradient([3 * G, 3 * H]).read()
    >>> state = sgd_state([torch.empty_like(G), torch.empty_like(H)], momentum=0.9)
    >>> update, state = sgd(metric, g, state, momentum=0.9)
    >>> (update.factor * update.rows[0] @ update.matrices[:, 0])[0, 0].round(decimals=3).item()
    0.75
    """
    K_inv = metric.inverse_roots
    torch._foreach_div_(g.rows, 1 - momentum)  # m ← μ m + ∇ is the mean of m and ∇ / (1 - μ)
    d = g.average_(state, MOMENTS, g.rows, 1 - momentum) if state else g.rows
    return Update(d, K_inv.mH @ K_inv), state  # W⁻¹ = K⁻ᴴ K⁻¹
