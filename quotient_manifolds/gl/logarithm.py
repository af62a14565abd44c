r"""Logarithm and distance on the GL(h) quotients, between any two orbits.

Results do not depend on the representatives, except that vectors are expressed at that of x. Points are first expressed
in orthonormal bases of the spans of their factors (2h rows). The geodesics between them stay in these spans, because a
reflection that fixes both points is an isometry.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..means import ConvergenceError
from .alignment import GLManifold, restrict_to_span
from .gauge import Gauge, canonical_gauge
from .metrics import Metric
from .shortest import SOLVED, Shortest, shortest

__all__ = ["distance", "logmap"]


def logmap(manifold: GLManifold, x: Tensor, y: Tensor, n_starts: int | None = None, on_error: str = "raise") -> Tensor:
    r"""Return the horizontal u at x for which the exact geodesic reaches the orbit of y at time 1.

    The search starts at the point with the smaller :math:`\sum_i σ_i`, so that the distance is symmetric. With the
    inv metric the manifold is the product of a line, with coordinate :math:`\sum_i \log σ_i`, and of the set of points
    where this sum is 0. On the line the logarithm is known, and the search is confined to the other factor.
    """
    if torch.is_inference_mode_enabled() or x.is_inference() or y.is_inference():  # the search differentiates
        with torch.inference_mode(False), torch.no_grad():
            return logmap(manifold, x.clone(), y.clone(), n_starts, on_error)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    full = manifold.tangent_space_at(x.expand(shape))
    manifold.tangent_space_at(y)  # the checks
    if not x.numel() or not y.numel():
        return torch.zeros(shape, dtype=x.dtype, device=x.device)
    small, (a, b), back = restrict_to_span(manifold, full.gauge.x, y.expand(shape))
    n = small.row_split()[0]
    here, there = (canonical_gauge(z[:, :n], z[:, n:]) for z in (v.reshape(-1, *v.shape[-2:]) for v in (a, b)))
    # Growth of the point along the line, in a unit of time.
    rate = (there.sigma.log() - here.sigma.log()).mean(-1)[:, None, None] / 2
    rate = rate if small.metric.complete else torch.zeros_like(rate)
    unit = torch.exp(here.sigma.log().mean(-1) / 2)[:, None, None]  # scaling is an isometry up to a factor
    a, b = here.x / unit, there.x * torch.exp(-rate) / unit
    turned = (here.sigma.sum(-1) > (there.sigma * torch.exp(-2 * rate[:, 0])).sum(-1))[:, None, None]
    apart = _apart(here, there)
    b = torch.where(apart[:, None, None], a, b)
    found = shortest(small, torch.where(turned, b, a), torch.where(turned, a, b), n_starts)
    found.residual[apart] = torch.inf
    u = (torch.where(turned, _returned(small, found, a), found.u) + rate * a) * unit
    if not bool((found.residual <= SOLVED).all()):
        if on_error == "raise":
            raise ConvergenceError(_reason(small.metric, found, apart), found.residual.reshape(shape[:-2]))
        u = torch.where((found.residual <= SOLVED)[:, None, None], u, torch.nan)
    u = torch.cat([z @ A for z, A in zip(u.split(small.row_split(), -2), (here.A, here.A_inv.mH), strict=True)], -2)
    return full.proju(full.from_gauge(*full.split(back(u.reshape(*shape[:-2], *u.shape[-2:])))))


def _returned(manifold: GLManifold, found: Shortest, x: Tensor) -> Tensor:
    """Reverse geodesics found towards x: return their velocities at x, where x_G = end_G B, x_H = end_H B⁻ᴴ."""
    rows = manifold.row_split()
    end, velocity = (z.nan_to_num() for z in (found.end, found.end_velocity))
    B = torch.linalg.lstsq(end.split(rows, -2)[0], x.split(rows, -2)[0]).solution
    P, R = velocity.split(rows, -2)
    return -torch.cat([P @ B, torch.linalg.solve_ex(B.mH, R, left=False)[0]], -2)


def _apart(x: Gauge, y: Gauge) -> Tensor:
    """Tell which points no path joins: real square factors, with determinants of G Hᴴ of different sign."""
    n, h = x.G.shape[-2:]
    if n != h or x.H.shape[-2] != h or x.x.is_complex():
        return torch.zeros(len(x.x), dtype=torch.bool, device=x.x.device)
    signs = [torch.linalg.det(g.U) * torch.linalg.det(g.V) for g in (x, y)]
    return signs[0] * signs[1] < 0


def _reason(metric: Metric, found: Shortest, apart: Tensor) -> str:
    """Explain why some items have no geodesic."""
    failed = ~(found.residual <= SOLVED)
    count = f"for {int(failed.sum())} of {failed.numel()} pairs"
    if bool(apart.any()):
        return (
            f"no path joins the points {count}: G Hᴴ is square, and determinants of different sign lie in "
            'different components; change the sign of a column of one factor, or pass on_error="nan"'
        )
    lowest, exits = found.lowest[failed].min().item(), found.exit[failed].min().item()
    if not metric.complete and (lowest < 0.5 or exits < 1):
        when = f"; the geodesic reaches rank deficiency at t = {exits:.3g}, before its end at 1" if exits < 1 else ""
        return (
            f"the shortest path leaves the manifold {count}: the smallest singular value of G Hᴴ falls to {lowest:.1e} "
            f'of its value at the ends{when}; the mix metric is not complete: use inv, or pass on_error="nan"'
        )
    worst = found.residual[failed].max().item()
    missing = f"{worst:.1e} of the length is missing" if isfinite(worst) else "no geodesic was found"
    return (
        f"logmap: {missing} {count}; where the singular values of G Hᴴ spread over 1e4 or more, points that are far "
        'apart are out of reach; otherwise increase n_starts, or pass on_error="nan"'
    )


class _Distance(torch.autograd.Function):
    """The length of the logarithm, with the derivatives that its definition implies."""

    @staticmethod
    def forward(ctx: Any, manifold: GLManifold, x: Tensor, y: Tensor, n_starts: int | None, on_error: str) -> Tensor:
        u = logmap(manifold, x, y, n_starts, on_error)
        space = manifold.tangent_space_at(x)
        lost = u.isnan().flatten(-2).any(-1)
        u = torch.where(lost[..., None, None], 0, u)  # whose length has the derivative 0
        d = space.norm(u)
        if any(ctx.needs_input_grad):
            end, velocity = space.geodesic(u)
            apart = d > 1e-10 * space.norm(x)  # else a rounding error, whose direction means nothing
            unit = torch.where(apart, 1 / d, torch.zeros_like(d))[..., None, None]
            P, R = space.split(manifold.tangent_space_at(end).to_covector(velocity * unit))
            y = torch.where(lost[..., None, None], end, y)
            # From the end of the geodesic to y, on its orbit: y_G = end_G B, y_H = end_H B⁻ᴴ.
            B = torch.linalg.lstsq(space.split(end)[0], space.split(y)[0]).solution
            at_y = manifold.pack_point(torch.linalg.solve(B.mH, P, left=False), R @ B)
            ctx.save_for_backward(-space.to_covector(u * unit), at_y)
        return torch.where(lost, torch.nan, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None, None]:
        at_x, at_y = ctx.saved_tensors
        grad = grad[..., None, None]
        return None, grad * at_x, grad * at_y, None, None


def distance(
    manifold: GLManifold, x: Tensor, y: Tensor, n_starts: int | None = None, on_error: str = "raise"
) -> Tensor:
    """Compute the distance of two orbits, once differentiable; (…), in the precision of the points."""
    found: Tensor = _Distance.apply(manifold, *torch.broadcast_tensors(x, y), n_starts, on_error)
    return found
