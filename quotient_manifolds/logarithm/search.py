r"""Logarithm and distance on the GL(h) quotients: the shortest geodesic between any two orbits.

Results do not depend on the representatives, except that vectors are expressed at that of x. Points are first expressed
in orthonormal bases of the spans of their factors (2h rows). The geodesics between them stay in these spans, because a
reflection that fixes both points is an isometry.

Starting from two representatives of the end point, the energy of a path with few coefficients is minimised, with a
small random step on the way, which leaves saddle points. The shortest path found is refined until the exact geodesic
with its initial velocity ends at the orbit of y: the distance by which the geodesic misses is added to the end of the
path, and coefficients are added where that does not help.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..geodesics import GeodesicExitError
from ..linalg import polar
from ..means import ConvergenceError
from ..metrics import Gauge, Metric, Pair, canonical_gauge
from ..tangent import GLTangentSpace
from .columns import one_column
from .minimise import Minimiser
from .paths import Path, first_path

#: A distance and two covectors.
Trio = tuple[Tensor, Tensor, Tensor]
#: Share of the length by which a geodesic may miss its end: the goal, and what still counts as solved.
_AIM, SOLVED = 2e-10, 1e-9
#: Real numbers that are worked on at once, to fit the caches; coefficients of the first paths, and of refined paths
#: with the error to which those are minimised.
_CHUNK, _FIRST, _REFINED = 2**18, 4, ((6, 1e-5), (10, 1e-8), (16, 3e-11), (26, 1e-11))
#: Tolerance of geodesics, and the random step as a share of the size of a point.
_EXACT, _KICK = 1e-11, 0.03
#: If every cosine is above it, another representative of the end is not searched: it is farther away.
_NEAR = 0.3
#: Columns up to which the mirror image is tried by default: it flips one of many, which hardly changes the length.
_MIRRORED = 16


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
    # Reversed, at their end.
    returned = -_moved_along(here.n, found.end.nan_to_num(), end, found.end_velocity.nan_to_num())
    u, v = torch.where(turned, returned, found.u), torch.where(turned, found.u, returned)
    results = []
    for w, gauge, space in ((u + rate * a, here, spaces[0]), ((v - rate * b) * torch.exp(rate), there, spaces[1])):
        w = torch.where(lost[:, None, None], torch.nan, w * unit)
        parts = zip(bases, (w[:, : here.n], w[:, here.n :]), (gauge.A, gauge.A_inv.mH), strict=True)
        whole = (Q @ (z @ A).reshape(*x.shape[:-2], -1, x.shape[-1]) for Q, z, A in parts)
        results.append(space.proju(space.from_gauge(*whole)))
    return (results[0], results[1]), spaces


def _moved_along(n: int, start: Tensor, near: Tensor, z: Tensor) -> Tensor:
    """Move z by the group element B that brings the first factor of ``start`` nearest to another: (z_G B, z_H B⁻ᴴ)."""
    B = torch.linalg.lstsq(start[:, :n], near[:, :n].nan_to_num()).solution
    return torch.cat([z[:, :n] @ B, torch.linalg.solve_ex(B.mH, z[:, n:], left=False)[0]], -2)


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


# -- the search -------------------------------------------------------------------------------------------------------


@dataclass
class Shortest:
    """What was found for a batch (b): geodesics with velocity u from x, their ends and the velocities there.

    ``residual`` is the share of the length by which the end is missed, and ``exit`` the time at which the last geodesic
    tried leaves the manifold.
    """

    u: Tensor
    end: Tensor
    end_velocity: Tensor
    residual: Tensor
    length: Tensor
    exit: Tensor

    @classmethod
    def nothing(cls, x: Tensor) -> Shortest:
        """Return a result without any geodesic yet."""
        unknown = torch.full(x.shape[:1], torch.inf, dtype=x.dtype.to_real(), device=x.device)
        nan = torch.full_like(x, torch.nan)
        return cls(nan, nan.clone(), nan.clone(), unknown, unknown.clone(), unknown.clone())

    def put(self, index: Tensor, other: Shortest) -> None:
        """Write what was found for some items."""
        for name, value in vars(other).items():
            getattr(self, name)[index] = value

    def improve(self, index: Tensor, other: Shortest) -> None:
        """Write what was found for some items where it is better: shorter, or the same path with a smaller residual."""
        old = self[index]
        same = (other.length - old.length).abs() <= 1e-4 * old.length
        nearer = (other.residual < old.residual) | (~old.residual.isfinite() & other.exit.isfinite())
        shorter = (other.residual <= SOLVED) & (other.length < old.length)
        better = torch.where((old.residual <= SOLVED) & ~same, shorter, nearer)
        self.put(index[better], other[better])

    def __getitem__(self, index: Tensor) -> Shortest:
        return Shortest(**{name: value[index] for name, value in vars(self).items()})


def shortest(metric: Metric, n: int, x: Tensor, y: Tensor) -> Shortest:
    """Find the shortest geodesics between the orbits of x and y, (b, n + m, h); x is in canonical gauge."""
    found = Shortest.nothing(x)
    size = max(1, _CHUNK // (_FIRST * x[0].numel() if len(x) else 1))
    for index in torch.arange(len(x), device=x.device).split(size):
        found.put(index, _OrbitSearch(metric, n, x[index], y[index]).best())
    return found


class _OrbitSearch:
    """The search for one chunk of a batch."""

    def __init__(self, metric: Metric, n: int, x: Tensor, y: Tensor) -> None:
        self.metric, self.n, self.m = metric, n, x.shape[-2] - n
        # Use x as it is: where singular values are equal there are several canonical representatives.
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
        self.gauge = Gauge(x, n, x[:, :n].abs().square().sum(-2), eye, eye)
        self._of_y = canonical_gauge(*self._split(y))
        self.x, self.y = x, self._of_y.x
        self.target = self._product(self.y)
        size = torch.linalg.matrix_norm(self.target)
        self.size = torch.linalg.matrix_norm(self.target - self._product(x)).clamp(0.01 * size, size)

    def _split(self, u: Tensor) -> Pair:
        return u[..., : self.n, :], u[..., self.n :, :]

    def _product(self, x: Tensor) -> Tensor:
        return x[..., : self.n, :] @ x[..., self.n :, :].mH

    def best(self) -> Shortest:
        """Refine the paths of several starts, the shortest first."""
        if self.x.shape[-1] == 1:
            return self._found(*one_column(self.metric, self.n, self.x, self.y))
        if self.n == self.m == self.x.shape[-1] and not self.metric.complete:
            return self._straight()
        starts = self._starts()
        values, order = torch.stack([s.value for s in starts]).sort(0)
        found = Shortest.nothing(self.x)
        for rank, value in enumerate(values):
            # Refine another start if the best one fails, or if the other may turn out shorter: lengths of unrefined
            # paths are accurate to one per cent. Two starts of the same length have found the same path.
            unsolved = ~(found.residual <= SOLVED)
            another = (value > 1.0001 * values[rank - 1]) if rank else torch.ones_like(unsolved)
            todo = value.isfinite() & another & (unsolved | (value < 1.01 * values[0]))
            for k, start in enumerate(starts):
                at = (todo & (order[rank] == k)).nonzero().squeeze(1)
                if len(at):
                    found.improve(at, self._refined(at, start.path[at]))
        return found

    def _straight(self) -> Shortest:
        r"""Return the geodesics of mix between square factors, along which the product moves on a straight line.

        With D = Y − X the velocity is :math:`\tfrac12 (D H^{-H}, (G^{-1} D)^H)`, at both ends. No path is shorter than
        :math:`\|D\|_F / \sqrt 2`, and the line leaves the manifold at :math:`-1/z`, z a real eigenvalue of X⁻¹D.
        """
        D = self.target - self._product(self.x)
        u, velocity = (
            torch.cat([torch.linalg.solve(H.mH, D, left=False), torch.linalg.solve(G, D).mH], -2) / 2
            for G, H in map(self._split, (self.x, self.y))
        )
        z = torch.linalg.eigvals(torch.linalg.solve(self._product(self.x), D))
        real = z.imag.abs() <= 10 * torch.finfo(z.real.dtype).eps * z.abs()
        return self._found(u, self.y, velocity, torch.where(real & (z.real <= -1), -1 / z.real, torch.inf).amin(-1))

    def _found(self, u: Tensor, end: Tensor, velocity: Tensor, exits: Tensor) -> Shortest:
        """Return geodesics in closed form; those that leave the manifold, at finite times, are none."""
        residual = torch.where(exits.isfinite(), torch.inf, 0.0).to(exits)
        return Shortest(u, end, velocity, residual, GLTangentSpace(self.metric, self.gauge).norm(u), exits)

    # -- starts ------------------------------------------------------------------------------------------------------

    def _starts(self) -> list[Minimiser]:
        """Minimise the energy of paths with few coefficients to one or two representatives of the end.

        They are the one that fits x best and, for real points, its mirror image.
        """
        (G, H), h = self._split(self.x), self.x.shape[-1]
        by_G, by_H = self._of_y.G.mH @ G, self._of_y.H.mH @ H
        P, _, Qh = torch.linalg.svd(by_G + by_H)
        starts = [self._start(self.y @ self._in_component(P @ Qh))]
        near = starts[0].cosine > _NEAR
        if self.x.is_complex() or h > _MIRRORED or bool(near.all()):
            return starts
        if min(self.n, self.m) > h:
            starts.append(self._start(self.y @ (_mirrored(P) @ Qh)))
        else:
            # A square factor determines the component: rotate the columns so that this factor fits best.
            starts.append(self._start(self.y @ self._in_component(polar(by_G if self.n == h else by_H))))
        # Where no column turns far, the paths to other representatives are longer.
        starts[1].value[near] = torch.inf
        return starts

    def _in_component(self, R: Tensor) -> Tensor:
        """Mirror a column where a square real factor would change its orientation."""
        h = self.x.shape[-1]
        if self.x.is_complex() or min(self.n, self.m) > h:
            return R
        X, Y = (self._split(z)[0 if self.n == h else 1] for z in (self.x, self.y))
        wrong = torch.linalg.det(polar(X)) * torch.linalg.det(polar(Y) @ R) < 0
        return torch.where(wrong[:, None, None], _mirrored(R), R)

    def _start(self, y: Tensor) -> Minimiser:
        """Minimise the energy of paths to y; the value of those that fail is infinite."""
        minimiser = Minimiser(first_path(self.metric, self.n, self.x, y, _FIRST))
        minimiser.run(6, 1e-2)
        minimiser = Minimiser(minimiser.disturbed(_KICK))
        minimiser.run(60, 1e-3)
        minimiser.value = torch.where(minimiser.error < 0.05, minimiser.value, torch.inf)
        return minimiser

    # -- refinement ----------------------------------------------------------------------------------------------------

    def _refined(self, at: Tensor, path: Path) -> Shortest:
        """Refine paths until the exact geodesic with their first velocity ends at the orbit of y."""
        found = Shortest.nothing(path.x)
        for count, tol in _REFINED:
            minimiser = Minimiser(replace(path, y=self._representative(at, path.y)).refined(count))
            path = minimiser.run(100, tol)
            todo, last = torch.arange(len(at), device=at.device), torch.ones_like(found.length)
            for _ in range(8):
                shot = self._followed(at[todo], minimiser.path)
                found.improve(todo, shot)
                going = (shot.residual > _AIM) & (shot.residual < 0.3 * last)
                if not bool(going.any()):
                    break
                if not bool(going.all()):
                    todo, shot, minimiser = todo[going], shot[going], Minimiser(minimiser.path[going])
                last = shot.residual
                missing = self._representative(at[todo], shot.end) - shot.end
                minimiser.follow(missing, torch.maximum(0.3 * _AIM / last, last.clamp(1e-3, 0.05)))
            if bool((found.residual <= SOLVED).all()):
                break
        return found

    def _followed(self, at: Tensor, path: Path) -> Shortest:
        """Follow the geodesics with the first velocities of paths."""
        gauge = self.gauge
        space = GLTangentSpace(self.metric, Gauge(gauge.x[at], gauge.n, gauge.sigma[at], gauge.A[at], gauge.A_inv[at]))
        u = space.proju(path.start_velocity())
        u = torch.where(u.isfinite().all(-1).all(-1)[:, None, None], u, 0)
        exits = torch.full_like(space.norm(u), torch.inf)
        try:
            end, velocity = space.geodesic(u, tolerance=_EXACT)
        except GeodesicExitError as error:
            exits = exits if error.times is None else error.times
            end, velocity = space.geodesic(torch.where(exits.isfinite()[:, None, None], 0, u), tolerance=_EXACT)
        except ArithmeticError:  # the equation cannot be solved for some: the others are followed one by one
            found = Shortest.nothing(u)
            for i in torch.arange(len(at), device=at.device).split(1) if len(at) > 1 else ():
                found.put(i, self._followed(at[i], path[i]))
            return found
        missing = torch.linalg.matrix_norm(self._product(end) - self.target[at]) / self.size[at]
        residual = torch.where(exits.isfinite(), torch.inf, missing)
        return Shortest(u, end, velocity, residual, space.norm(u), exits)

    def _representative(self, at: Tensor, near: Tensor) -> Tensor:
        """Return the representatives of y whose first factor is nearest to that of other points."""
        return _moved_along(self.n, self.y[at], near, self.y[at])


def _mirrored(R: Tensor) -> Tensor:
    """Change the sign of the last column."""
    return torch.cat([R[..., :-1], -R[..., -1:]], -1)
