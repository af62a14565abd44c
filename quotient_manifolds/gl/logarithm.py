r"""Logarithm, alignment and means on the GL(h) quotients, by shooting with the exact exponential.

Works with orbits: results do not depend on the representatives but for being expressed at that of x. Points are first
expressed in orthonormal bases of the spans of their factors (2h rows), in which the geodesics between them stay: a
reflection that fixes both points is an isometry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..linalg import real_dtype, weighted_sylvester
from .coordinates import row_power
from .gauge import Gauge, canonical_gauge
from .geodesic import GeodesicExitError
from .geodesic_ode import column
from .metrics import Pair
from .tangent import GLTangentSpace

__all__ = ["ConvergenceError", "align", "distance", "logmap", "mean", "restrict_to_span"]


class GLManifold(Protocol):
    """What is asked of a GL(h) quotient here: its points' products and tangent spaces, at other row counts too."""

    def tangent_space_at(self, x: Tensor) -> Any: ...
    def at_gauge(self, gauge: Gauge) -> GLTangentSpace: ...
    def to_matrix(self, x: Tensor) -> Tensor: ...
    def pack_point(self, *tensors: Tensor) -> Tensor: ...
    def unpack_tensor(self, tensor: Tensor) -> tuple[Tensor, ...]: ...
    def row_split(self) -> list[int]: ...
    def resized(self, n: int, m: int) -> Any: ...


class ConvergenceError(ArithmeticError):
    """An iteration did not converge: logarithm, alignment or mean on a GL(h) quotient.

    Attributes
    ----------
    residual : Tensor
        What is left, (…).

    Examples
    --------
    Random matrices are too far apart:

    >>> import torch
    >>> from quotient_manifolds import ConvergenceError, GLQuotientInv
    >>> manifold = GLQuotientInv(9, 8)
    >>> x, y = torch.randn(2, 9 + 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> try:
    ...     manifold.dist(x, y)
    ... except ConvergenceError as error:
    ...     print(bool(error.residual > 1e-3))
    True
    """

    def __init__(self, message: str, residual: Tensor) -> None:
        super().__init__(message)
        self.residual = residual


def restrict_to_span(
    manifold: GLManifold, *points: Tensor
) -> tuple[GLManifold, list[Tensor], Callable[[Tensor], Tensor]]:
    """Express points in orthonormal bases of the spans of their factors; the last result undoes it.

    Geodesics between the points stay in these spans: a reflection that fixes them is an isometry.
    """
    factors = list(zip(*(manifold.unpack_tensor(x) for x in points), strict=True))
    bases = [torch.linalg.qr(torch.cat(torch.broadcast_tensors(*f), dim=-1))[0] for f in factors]
    rows = [Q.shape[-1] for Q in bases]
    small = manifold.resized(*rows)
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


def _moved(space: GLTangentSpace, y: Tensor, L: Tensor) -> Tensor:
    """Move y by the group element exp(−Λ): (G e^Λ, H e^{−Λᴴ})."""
    G, H = space.split(y)
    return torch.cat([G @ torch.linalg.matrix_exp(L), H @ torch.linalg.matrix_exp(-L.mH)], dim=-2)


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
            trial = _moved(space, y, L)
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
    r"""Give the representative of y's orbit nearest to x in the metric at x.

    A local minimum over A of :math:`\|ψ(A, y) - x\|_x`, by Gauss–Newton with step halving; every step is one Sylvester
    equation. It starts from the canonical gauges of both points.
    """
    y = torch.broadcast_to(y, torch.broadcast_shapes(x.shape, y.shape))
    space = manifold.tangent_space_at(x.expand_as(y))
    flat = manifold.at_gauge(space.gauge)
    result, size = _aligned(flat, _gauge_start(flat, y), relative_tol, 500)
    if bool((size > max(relative_tol, 1e-5)).any()):
        raise ConvergenceError(f"align: steps of size {size.max().item():.1e} after 500 iterations", size)
    return space.from_gauge(*space.split(result))


def _gauge_start(flat: GLTangentSpace, y: Tensor) -> Tensor:
    """Take y to the representative whose first-order mismatch in both factors is balanced."""
    g = canonical_gauge(*flat.split(y))
    G, H = flat.split(flat.x)
    # The unitary between the two canonical gauges, from both factors together.
    P, _, Qh = torch.linalg.svd(g.G.mH @ G + g.H.mH @ H)
    rotation = P @ Qh
    return torch.cat([g.G @ rotation, g.H @ rotation], dim=-2)


#: Of the way that may be missing at the end of a logarithm, and the most shots.
_RESIDUAL, _SHOTS = 1e-11, 200


class _Anderson:
    """Anderson's acceleration of a fixed-point iteration c ← c + f, over the last ten steps of every batch item."""

    def __init__(self, c: Tensor) -> None:
        self._real = (lambda v: torch.view_as_real(v).flatten(-3)) if c.is_complex() else (lambda v: v.flatten(-2))
        self._memory = min(10, self._real(c).shape[-1])
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._history: list[tuple[Tensor, Tensor]] = []

    def step(self, c: Tensor, f: Tensor) -> Tensor:
        """Give the accelerated step from c, where the plain one is f."""
        self._history = [*self._history, (c, f)][-self._memory :]
        if len(self._history) == 1:
            return f
        dF = torch.stack([self._real(f - old) for _, old in self._history[:-1]], dim=-1)
        both = torch.stack([c - old_c + f - old for old_c, old in self._history[:-1]], dim=-1)
        q, r = torch.linalg.qr(dF)
        identity = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
        r = r + 1e-14 * torch.linalg.matrix_norm(r)[..., None, None] * identity
        gamma = torch.linalg.solve_triangular(r, q.mT @ self._real(f).unsqueeze(-1), upper=True).to(c.dtype)
        return f - (both @ gamma.unsqueeze(-3)).squeeze(-1)


def logmap(manifold: GLManifold, x: Tensor, y: Tensor) -> Tensor:
    r"""Give the horizontal u at x for which the exact geodesic reaches the orbit of y at time 1.

    Shooting: from the aligned difference, :math:`u \leftarrow u + P_x(r)`, r the horizontal part of what is missing at
    the end point z = exp_x(u) to the representative of y aligned with z; accelerated by Anderson's method. The result
    is *a* geodesic; one that is longer than the straight path between the aligned representatives is rejected. The
    residual is :math:`\|z - y\| / \|y - x\|` of the products :math:`G H^H` (‖y − x‖ at least 0.01 ‖y‖).
    """
    shape = torch.broadcast_shapes(x.shape, y.shape)
    full = manifold.tangent_space_at(x.expand(shape))
    manifold, (x, y), back = restrict_to_span(manifold, full.gauge.x, y.expand(shape))
    start = manifold.tangent_space_at(x)
    space = manifold.at_gauge(start.gauge)
    y, _ = _aligned(space, _gauge_start(space, y), 1e-3, 50)
    straight = _path_length(manifold, space.x, y)
    best, residual = _shoot(manifold, space, manifold.to_matrix(x), y)
    length = best.abs().square().sum((-2, -1)).sqrt()
    if bool((length > straight * 1.001 + 1e-6).any()):
        raise ConvergenceError("logmap: found a geodesic longer than the straight path; not the shortest", residual)
    u = start.from_gauge(*space.split(space.from_coordinates(best)))
    return full.from_gauge(*full.split(back(u)))


def _shoot(manifold: GLManifold, space: GLTangentSpace, origin: Tensor, y: Tensor) -> Pair:
    """Give coordinates and residual of the vector at ``space``, of product ``origin``, that leads to the aligned y."""
    target = manifold.to_matrix(y)
    size = torch.linalg.matrix_norm(target)
    size = torch.linalg.matrix_norm(target - origin).clamp(0.01 * size, size)
    c = space.coordinates(space.proju(y - space.x))
    anderson = _Anderson(c)
    best, best_residual, stalled = c, torch.full_like(size, torch.inf), 0
    for _ in range(_SHOTS):
        if stalled >= 15:
            break
        stalled += 1
        try:
            z = space.expmap(space.from_coordinates(c))
            there = manifold.tangent_space_at(z)
        except GeodesicExitError as error:
            times = torch.full_like(size, error.time) if error.times is None else error.times
            c = c * torch.where(times.isfinite(), 0.8 * times, torch.ones_like(times))[..., None, None]
            anderson.forget()
            continue
        except (ValueError, RuntimeError):  # not a point, not finite, no end
            break
        residual = torch.linalg.matrix_norm(manifold.to_matrix(z) - target) / size
        improved = residual < best_residual
        if bool((improved & (best_residual > _RESIDUAL)).any()):
            stalled = 0
        best = torch.where(improved[..., None, None], c, best)
        best_residual = torch.where(improved, residual, best_residual)
        if bool((best_residual <= _RESIDUAL).all()):
            break
        flat = manifold.at_gauge(there.gauge)
        moved, _ = _aligned(flat, torch.cat(there.to_gauge(y), -2), 1e-12, 3)
        y = there.from_gauge(*flat.split(moved))
        missing = there.from_gauge(*flat.split(flat.proju(moved - flat.x)))
        step = anderson.step(c, space.coordinates(space.proju(missing)))
        c = space.project_coordinates(torch.where((best_residual > _RESIDUAL)[..., None, None], c + step, c))
    if bool((best_residual > 10 * _RESIDUAL).any()):
        worst = best_residual.max().item()
        raise ConvergenceError(
            f"logmap: {worst:.1e} of the way is missing; the points are too far apart", best_residual
        )
    return best, best_residual


class _Distance(torch.autograd.Function):
    """The length of the logarithm, with the derivatives that its definition implies."""

    @staticmethod
    def forward(ctx: Any, manifold: GLManifold, x: Tensor, y: Tensor) -> Tensor:
        u = logmap(manifold, x, y)
        space = manifold.tangent_space_at(x)
        d = space.norm(u)
        if any(ctx.needs_input_grad):
            end, velocity = space.geodesic(u)
            apart = d > 1e-10 * space.norm(x)  # else rounding, of which no direction is worth anything
            unit = torch.where(apart, 1 / d, torch.zeros_like(d))[..., None, None]
            P, R = space.split(manifold.tangent_space_at(end).to_covector(velocity * unit))
            # From the end of the geodesic to y, on its orbit: y_G = end_G B, y_H = end_H B⁻ᴴ.
            B = torch.linalg.lstsq(space.split(end)[0], space.split(y)[0]).solution
            at_y = manifold.pack_point(torch.linalg.solve(B.mH, P, left=False), R @ B)
            ctx.save_for_backward(-space.to_covector(u * unit), at_y)
        return d

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        at_x, at_y = ctx.saved_tensors
        grad = grad[..., None, None]
        return None, grad * at_x, grad * at_y


def distance(manifold: GLManifold, x: Tensor, y: Tensor) -> Tensor:
    """Compute the distance of two orbits, once differentiable; (…), in the precision of the points."""
    found: Tensor = _Distance.apply(manifold, *torch.broadcast_tensors(x, y))
    return found


def _path_length(manifold: GLManifold, x: Tensor, y: Tensor, nodes: int = 12) -> Tensor:
    """Give the length on the quotient of the straight path between two representatives (Gauss–Legendre)."""
    rule = np.polynomial.legendre.leggauss(nodes)
    points, weights = (torch.as_tensor(a, dtype=real_dtype(x.dtype), device=x.device) for a in rule)
    path = x + column((points + 1) / 2, x) * (y - x)
    space = manifold.tangent_space_at(path)
    return (column(weights / 2, x[..., 0, 0]) * space.norm(space.proju((y - x).expand_as(path)))).sum(0)


def mean(manifold: GLManifold, points: Tensor) -> Tensor:
    """Give the Fréchet mean over the first dimension: m ← exp_m(mean of log_m(points)), started from the first."""
    m, steps = points[0], 50
    for _ in range(steps):
        u = logmap(manifold, m.expand_as(points), points).mean(0)
        space = manifold.tangent_space_at(m)
        size = space.norm(u)
        if bool((size <= 1e-10).all()):
            return m
        m = space.expmap(u)
    raise ConvergenceError(f"mean: gradient of {size.max().item():.1e} after {steps} steps", size)
