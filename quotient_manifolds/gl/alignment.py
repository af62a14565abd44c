"""Matching representatives: orthonormal bases for the span of several points, and alignment along orbits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..linalg import weighted_sylvester
from ..means import ConvergenceError
from .bent import polar
from .coordinates import row_power
from .gauge import Gauge, canonical_gauge
from .metrics import Metric
from .path import moved_end
from .tangent import GLTangentSpace

__all__ = ["GLManifold", "align", "restrict_to_span"]


class GLManifold(Protocol):
    """What is needed of a GL(h) quotient here: products and tangent spaces, also for other numbers of rows."""

    metric: Metric

    def __init__(self, n: int, m: int) -> None: ...
    def tangent_space_at(self, x: Tensor) -> Any: ...  # noqa: D102
    def at_gauge(self, gauge: Gauge) -> GLTangentSpace: ...  # noqa: D102
    def to_matrix(self, x: Tensor) -> Tensor: ...  # noqa: D102
    def pack_point(self, *tensors: Tensor) -> Tensor: ...  # noqa: D102
    def unpack_tensor(self, tensor: Tensor) -> tuple[Tensor, ...]: ...  # noqa: D102
    def row_split(self) -> list[int]: ...  # noqa: D102


def restrict_to_span(
    manifold: GLManifold, *points: Tensor
) -> tuple[GLManifold, list[Tensor], Callable[[Tensor], Tensor]]:
    """Express points in orthonormal bases of the spans of their factors; the last result is the inverse map.

    Geodesics between the points stay in these spans: a reflection that fixes them is an isometry.
    """
    factors = list(zip(*(manifold.unpack_tensor(x) for x in points), strict=True))
    bases = [torch.linalg.qr(torch.cat(torch.broadcast_tensors(*f), dim=-1))[0] for f in factors]
    rows = [Q.shape[-1] for Q in bases]
    small = type(manifold)(*rows)
    restricted = [
        small.pack_point(*(Q.mH @ X for Q, X in zip(bases, x, strict=True))) for x in zip(*factors, strict=True)
    ]

    def back(u: Tensor) -> Tensor:
        return manifold.pack_point(*(Q @ X for Q, X in zip(bases, u.split(rows, dim=-2), strict=True)))

    return small, restricted, back


def _alignment_step(space: GLTangentSpace, y: Tensor) -> Tensor:
    r"""Compute the Λ of a Gauss–Newton step of :func:`align` at y = (G, H), in canonical gauge.

    Minimises :math:`\|(r_G + GΛ) W^{1/2}\|^2 + \|(r_H - HΛ^H) W^{1/2}\|^2`, r = y − x:
    :math:`M Λ W + W Λ N = W r_H^H H - G^H r_G W`.
    """
    (G, H), (r_G, r_H) = space.split(y), space.split(y - space.x)
    w = row_power(space.sigma_hat, space.present, -2 * space.metric.scale_exponent)
    root = torch.diag_embed(w.squeeze(-2).rsqrt()).to(y.dtype)
    return weighted_sylvester(G.mH @ G, H.mH @ H, root, root)(w.mT * (r_H.mH @ H) - (G.mH @ r_G) * w)


def _aligned(space: GLTangentSpace, y: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Tensor]:
    """Align in canonical gauge; result, and the size of the last step relative to 1."""
    y = y.clone()
    value = space.norm(y - space.x)
    size = torch.full_like(value, torch.inf)
    for _ in range(max_iter):
        L = _alignment_step(space, y)
        size = torch.linalg.matrix_norm(L)
        if bool((size <= tol).all()):
            break
        L = L * (1 / size).clamp_max(1)[..., None, None]
        todo = torch.ones_like(value, dtype=torch.bool)
        for _ in range(30):
            trial = moved_end(space.gauge.n, y, L)
            new = space.norm(trial - space.x)
            better = todo & (new <= value)
            y = torch.where(better[..., None, None], trial, y)
            value = torch.where(better, new, value)
            todo = todo & ~better
            if not bool(todo.any()):
                break
            L = torch.where(todo[..., None, None], L / 2, 0)
        if bool(todo.all()):
            break
    return y, size


def align(manifold: GLManifold, x: Tensor, y: Tensor, relative_tol: float) -> Tensor:
    r"""Return the representative of y's orbit nearest to x in the metric at x.

    A local minimum over A of :math:`\|ψ(A, y) - x\|_x`, by Gauss–Newton with step halving; every step is one Sylvester
    equation. It starts from the canonical gauges of both points.
    """
    y = torch.broadcast_to(y, torch.broadcast_shapes(x.shape, y.shape))
    space = manifold.tangent_space_at(x.expand_as(y))
    flat = manifold.at_gauge(space.gauge)
    g, (G, H) = canonical_gauge(*flat.split(y)), flat.split(flat.x)
    # The unitary between the two canonical gauges, from both factors together.
    start = g.x @ polar(g.G.mH @ G + g.H.mH @ H)
    result, size = _aligned(flat, start, relative_tol, 500)
    if bool((size > max(relative_tol, 1e-5)).any()):
        raise ConvergenceError(f"align: steps of size {size.max().item():.1e} after 500 iterations", size)
    return space.from_gauge(*space.split(result))
