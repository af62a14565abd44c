r"""Logarithm and distance on the GL(h) quotients, between any two orbits.

Results do not depend on the representatives, except that vectors are expressed at that of x. Points are first expressed
in orthonormal bases of the spans of their factors (2h rows). The geodesics between them stay in these spans, because a
reflection that fixes both points is an isometry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gauge import Gauge, canonical_gauge
from ..means import ConvergenceError
from ..metrics import Metric, Pair
from ..tangent import GLTangentSpace
from .search import SOLVED, Shortest, shortest

#: A distance and two covectors.
Trio = tuple[Tensor, Tensor, Tensor]


def logmap(metric: Metric, n: int, x: Tensor, y: Tensor, on_error: str) -> Tensor:
    r"""Return the horizontal u at x for which the exact geodesic reaches the orbit of y at time 1.

    The points are in double precision, of full rank and of ordinary size; n is the number of rows of G.
    """
    return _logarithms(metric, n, x, y, on_error)[0][0]


def _logarithms(metric: Metric, n: int, x: Tensor, y: Tensor, on_error: str) -> tuple[Pair, list[GLTangentSpace]]:
    r"""Return the logarithms of y at x and of x at y, of one geodesic followed either way, and the tangent spaces.

    The search starts at the point with the smaller :math:`\sum_i σ_i`, so that the distance is symmetric. With the
    inv metric the manifold is the product of a line, with coordinate :math:`\sum_i \log σ_i`, and of the set of points
    where this sum is 0. On the line the logarithm is known, and the search is confined to the other factor.
    """
    if torch.is_inference_mode_enabled() or x.is_inference() or y.is_inference():  # the search differentiates
        with torch.inference_mode(False), torch.no_grad():
            return _logarithms(metric, n, x.clone(), y.clone(), on_error)
    x, y = torch.broadcast_tensors(x, y)
    spaces = [GLTangentSpace(metric, canonical_gauge(z[..., :n, :], z[..., n:, :]), z) for z in (x, y)]
    if not x.numel():
        return (torch.zeros_like(x), torch.zeros_like(y)), spaces
    factors = [space.split(space.gauge.x) for space in spaces]
    bases = [torch.linalg.qr(torch.cat(both, dim=-1))[0] for both in zip(*factors, strict=True)]
    small = [[(Q.mH @ X).reshape(-1, Q.shape[-1], X.shape[-1]) for Q, X in zip(bases, f, strict=True)] for f in factors]
    here, there = canonical_gauge(*small[0]), canonical_gauge(*small[1])
    # Growth of the point along the line, in a unit of time.
    rate = (there.sigma.log() - here.sigma.log()).mean(-1)[:, None, None] / 2
    rate = rate if metric.complete else torch.zeros_like(rate)
    unit = torch.exp(here.sigma.log().mean(-1) / 2)[:, None, None]  # scaling is an isometry up to a factor
    a, b = here.x / unit, there.x * torch.exp(-rate) / unit
    turned = (here.sigma.sum(-1) > (there.sigma * torch.exp(-2 * rate[:, 0])).sum(-1))[:, None, None]
    apart = _apart(here, there)
    b = torch.where(apart[:, None, None], a, b)
    start, end = torch.where(turned, b, a), torch.where(turned, a, b)
    found = shortest(metric, here.n, start, end)
    found.residual[apart] = torch.inf
    lost = ~(found.residual <= SOLVED)
    if on_error == "raise" and bool(lost.any()):
        raise ConvergenceError(_reason(metric, found, apart), found.residual.reshape(x.shape[:-2]))
    returned = _returned(here.n, found, end)
    u, v = torch.where(turned, returned, found.u), torch.where(turned, found.u, returned)
    results = []
    for w, gauge, space in ((u + rate * a, here, spaces[0]), ((v - rate * b) * torch.exp(rate), there, spaces[1])):
        w = torch.where(lost[:, None, None], torch.nan, w * unit)
        parts = zip(bases, (w[:, : here.n], w[:, here.n :]), (gauge.A, gauge.A_inv.mH), strict=True)
        whole = (Q @ (z @ A).reshape(*x.shape[:-2], -1, x.shape[-1]) for Q, z, A in parts)
        results.append(space.proju(space.from_gauge(*whole)))
    return (results[0], results[1]), spaces


def _returned(n: int, found: Shortest, x: Tensor) -> Tensor:
    """Reverse geodesics found towards x: return their velocities at x, where x_G = end_G B, x_H = end_H B⁻ᴴ."""
    end, velocity = (z.nan_to_num() for z in (found.end, found.end_velocity))
    B = torch.linalg.lstsq(end[:, :n], x[:, :n]).solution
    return -torch.cat([velocity[:, :n] @ B, torch.linalg.solve_ex(B.mH, velocity[:, n:], left=False)[0]], -2)


def _apart(x: Gauge, y: Gauge) -> Tensor:
    """Return which points no path joins: real square factors, with determinants of G Hᴴ of different sign."""
    n, h = x.G.shape[-2:]
    if n != h or x.H.shape[-2] != h or x.x.is_complex():
        return torch.zeros(len(x.x), dtype=torch.bool, device=x.x.device)
    signs = [torch.linalg.slogdet(X).sign for g in (x, y) for X in (g.G, g.H)]
    return torch.stack(signs).prod(0) < 0


def _reason(metric: Metric, found: Shortest, apart: Tensor) -> str:
    """Explain why some items have no geodesic."""
    failed = ~(found.residual <= SOLVED)
    count = f"for {int(failed.sum())} of {failed.numel()} pairs"
    if bool(apart.any()):
        return (
            f"no path joins the points {count}: G Hᴴ is square, and determinants of different sign lie in "
            'different components; change the sign of a column of one factor, or pass on_error="nan"'
        )
    if not metric.complete:
        exits = found.exit[failed].min().item()
        when = f"; the geodesic reaches rank deficiency at t = {exits:.3g}, before its end at 1" if exits < 1 else ""
        return (
            f"no geodesic was found that stays on the manifold {count}{when}; the mix metric is not complete: use inv, "
            'or pass on_error="nan"'
        )
    worst = found.residual[failed].max().item()
    missing = f"{worst:.1e} of the length is missing" if worst < 1 else "no geodesic was found"
    return (
        f"logmap: {missing} {count}; where the singular values of G Hᴴ spread over 1e4 or more, points that are far "
        'apart are out of reach; pass on_error="nan"'
    )


class _Distance(torch.autograd.Function):
    """The length of the logarithm, and covectors at both points: the derivatives that its definition implies."""

    @staticmethod
    def forward(metric: Metric, n: int, x: Tensor, y: Tensor, on_error: str) -> Trio:
        logarithms, spaces = _logarithms(metric, n, x, y, on_error)
        d = spaces[0].norm(logarithms[0])
        apart = d > 1e-10 * spaces[0].norm(x)  # else a rounding error, whose direction means nothing; or NaN
        unit = torch.where(apart, -1 / d, 0)[..., None, None]
        at_x, at_y = (
            space.to_covector(torch.where(apart[..., None, None], u, 0) * unit)
            for space, u in zip(spaces, logarithms, strict=True)
        )
        return d, at_x, at_y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Trio) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])
        ctx.save_for_forward(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[None, None, Tensor, Tensor, None]:
        at_x, at_y = ctx.saved_tensors
        grad = grad[..., None, None]
        return None, None, grad * at_x, grad * at_y, None

    @staticmethod
    def jvp(ctx: Any, _metric: Any, _n: Any, dx: Tensor | None, dy: Tensor | None, *_: Any) -> tuple[Any, None, None]:
        at_x, at_y = ctx.saved_tensors
        change = sum((a.conj() * d).real.sum((-2, -1)) for a, d in ((at_x, dx), (at_y, dy)) if d is not None)
        return change, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], metric: Metric, n: int, x: Tensor, y: Tensor, *options: Any) -> Any:
        size = info.batch_size
        x, y = (
            z.unsqueeze(0).expand(size, *z.shape) if at is None else z.movedim(at, 0)
            for z, at in zip((x, y), in_dims[2:4], strict=True)
        )
        return _Distance.apply(metric, n, x, y, *options), (0, 0, 0)


def distance(metric: Metric, n: int, x: Tensor, y: Tensor, on_error: str) -> Tensor:
    """Compute the distance of two orbits, once differentiable; (…), in the precision of the points."""
    return _Distance.apply(metric, n, *torch.broadcast_tensors(x, y), on_error)[0]
