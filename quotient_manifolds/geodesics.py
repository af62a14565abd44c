r"""Exact geodesics of the GL(h) quotients, in reduced coordinates.

Notation of :mod:`quotient_manifolds.manifold`. In canonical gauge a point is :math:`G = X Σ^{1/2}, H = Y Σ^{1/2}` with
orthonormal columns in X and Y, and a tangent vector is

.. math:: ξ_G = ξ Σ^{1/2},\; ξ_H = η Σ^{1/2} \;\text{(inv)}, \qquad
          ξ_G = ξ Σ^{-1/2},\; ξ_H = η Σ^{-1/2} \;\text{(mix)},

which makes the metric the identity, :math:`\|(ξ, η)\|_F`. The formulas need :math:`X^H X` to be well conditioned, not
to be the identity: where X is a differentiable function of the point (and Σ a constant scale), derivatives are exact.

Along every geodesic G(t) stays in span[X, ξ], so everything happens on 2h × h coefficient matrices. The basis is
[X, E/s] with :math:`E = ξ - X C`, :math:`C = (X^H X)^{-1} X^H ξ`, Gram matrix
:math:`J = \mathrm{diag}(X^H X, E^H E/s^2)`. Unlike an orthonormal basis from a QR it is a polynomial in ξ,
hence differentiable at ξ = 0 and at vertical ξ. The number s = ‖ξ‖ only balances the two halves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .geodesic_ode import Reduced, State, as_times, block_matrix, column, flat, frame, integrate, nonzero, unflat
from .linalg import exposed, holds, row_power
from .metrics import LocalMetric, Metric, Pair

__all__ = ["GeodesicExitError", "Whitened", "exit_time", "geodesic", "raise_on_exit"]

#: The solver gives up after a path of this length in the inv metric.
_MAX_LENGTH = 1000


class GeodesicExitError(ValueError):
    """A geodesic leaves the manifold before the requested time.

    Attributes
    ----------
    time : float
        First time at which a geodesic reaches the manifold's boundary; negative if it is followed backwards.
    times : Tensor or None
        That time for every item of a batch, inf where there is none.

    Examples
    --------
    With the mix metric the product of a scalar pair moves on a straight line, here from 1 to 0 at t = ½:

    >>> import torch
    >>> from quotient_manifolds import GeodesicExitError, GLQuotientMix
    >>> manifold, x = GLQuotientMix(1, 1), torch.ones(2, 1)
    >>> try:
    ...     manifold.expmap(x, -x)
    ... except GeodesicExitError as error:
    ...     print(f"{error.time:.4f}")
    0.5000
    """

    def __init__(self, message: str, time: float, times: Tensor | None = None) -> None:
        super().__init__(message, time, times)  # all of them, so that pickle can make it anew
        self.time, self.times = time, times

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Whitened:
    """A point and a tangent vector, whitened."""

    metric: Metric
    X: Tensor
    xi: Tensor
    Y: Tensor
    eta: Tensor
    sigma: Tensor  # (…, h), descending, 0 for absent directions
    present: Tensor
    lacking: Pair  # the part that does not move

    @classmethod
    def of(cls, local: LocalMetric, u: Pair, sigma: Tensor, present: Tensor) -> Whitened:
        """Whiten, in canonical gauge."""
        (G, H), still = local.factors, ~present.unsqueeze(-2)
        inverse, scale = row_power(sigma, present, -0.5), row_power(sigma, present, -local.metric.scale_exponent)
        moving, lacking = torch.where(present, sigma, 0), (G * still, H * still)
        return cls(local.metric, G * inverse, u[0] * scale, H * inverse, u[1] * scale, moving, present, lacking)

    def undo(self, X: Tensor, xi: Tensor, Y: Tensor, eta: Tensor) -> tuple[Pair, Pair]:
        """Return point and velocity, in the canonical gauge of the starting point."""
        root = row_power(self.sigma, self.present, 0.5)
        scale = row_power(self.sigma, self.present, self.metric.scale_exponent)
        return (X * root + self.lacking[0], Y * root + self.lacking[1]), (xi * scale, eta * scale)

    def certainly_inside(self, until: float) -> bool:
        """Tell whether ρ < σ_h/√2, which keeps the geodesic on the manifold, holds for all items with a margin."""
        rho = (torch.linalg.matrix_norm(self.xi).square() + torch.linalg.matrix_norm(self.eta).square()).sqrt()
        lowest = torch.where(self.present, self.sigma, torch.inf).amin(-1)
        return holds(until * rho < lowest / 4)


def geodesic(start: Whitened, t: Any, relative_tol: float | None) -> tuple[Pair, Pair]:
    """Return points and velocities at times t of any shape (k…), each (k…, …, rows, h), in canonical gauge."""
    t = as_times(t, start.X)
    if start.metric.complete:
        return start.undo(*_inv_geodesic(start.X, start.xi, t), *_inv_geodesic(start.Y, start.eta, t))
    times = t.reshape(-1) if t.numel() else t.new_zeros(1)
    found = _mix_geodesic(start, times, relative_tol or _default_tolerance(start.X))
    return start.undo(*(r[: t.numel()].reshape(*t.shape, *r.shape[1:]) for r in found))


def exit_time(start: Whitened, until: float = 1.0) -> Tensor:
    """Return the time in (0, until] at which every geodesic leaves the manifold, inf where it stays; (…)."""
    if isinstance(until, bool) or not isinstance(until, (int, float)) or not 0 < until < torch.inf:
        raise ValueError(f"until must be a positive number, got {until!r}")
    with torch.no_grad():
        if start.metric.complete or start.certainly_inside(until):
            return torch.full_like(torch.linalg.matrix_norm(start.xi), torch.inf)
        problem = Reduced.of(frame(start.X, start.xi), frame(start.Y, start.eta), start.sigma)
        return _follow(problem, start.sigma, as_times(until, start.X), _default_tolerance(start.X))[1]


def _inv_geodesic(X: Tensor, xi: Tensor, t: Tensor) -> Pair:
    r"""Follow the geodesic of one factor for the inv metric (the factors decouple).

    With :math:`Ω = ξ P^{-1} X^H - X P^{-1} ξ^H`, :math:`P = X^H X` and :math:`W = P^{-1} ξ^H X`

    .. math:: X(t) = e^{tΩ} X e^{tW}, \qquad \dot X(t) = e^{tΩ} ξ e^{tW},

    and :math:`Ω [X, E/s] = [X, E/s] K` with
    :math:`K = \begin{pmatrix} C - W & -P^{-1} E^H E / s \\ s I & 0 \end{pmatrix}`, so one exponential of size 2h and
    one of size h suffice. The paper (§5.2) says that neither metric has analytic geodesics; this one is the image of
    those of the right-invariant Frobenius metric on GL(n) under taking h columns.
    """
    f = frame(X, xi)
    h = X.shape[-1]
    t = column(t, f.gram)
    P, S = f.gram[..., :h, :h], f.gram[..., h:, h:]  # S = EᴴE/s²
    C, s = f.velocity[..., :h, :], f.velocity[..., h:, :]
    W = torch.linalg.solve(P, C.mH @ P)
    K = block_matrix(C - W, -torch.linalg.solve(P, S) @ s, s, torch.zeros_like(P))
    rotation = torch.linalg.matrix_exp(t * K)
    right = torch.linalg.matrix_exp(t * W)
    return f.basis @ (rotation[..., :h] @ right), f.basis @ (rotation @ f.velocity @ right)


@dataclass(frozen=True)
class _Waypoint:
    r"""A mix geodesic at some time, in the canonical gauge of the point it has reached.

    The coefficients are those of :class:`Reduced` for the scale σ; in the gauge of the start they are
    :math:`a L,\ p R^{-H},\ b R,\ q L^{-H}`.
    """

    y: Tensor  # flattened (a, p, b, q), (…, features)
    sigma: Tensor  # (…, h)
    L: Tensor  # (…, h, h)
    R: Tensor
    time: Tensor  # (…)

    @classmethod
    def start(cls, problem: Reduced, sigma: Tensor) -> _Waypoint:
        state = problem.start()
        y = flat(state)
        eye = torch.eye(sigma.shape[-1], dtype=state[0].dtype, device=y.device).expand(*y.shape[:-1], -1, -1)
        return cls(y, sigma.expand(*y.shape[:-1], -1), eye, eye, torch.zeros_like(y[..., 0].real))

    def regauged(self, problem: Reduced, y: Tensor, time: Tensor) -> _Waypoint:
        r"""Advance to y, and to the canonical gauge there.

        From Cholesky factors :math:`M = R_X^H R_X,\ N = R_Y^H R_Y` (one leg keeps M and N well conditioned) and
        :math:`R_X Σ R_Y^H = U Σ' V^H`: the step is :math:`L = U^H R_X,\ R = V^H R_Y`. It is constant to autograd.
        """
        a, p, b, q = unflat(y, self.sigma.shape[-1])
        with torch.no_grad():
            present = self.sigma > 0
            absent = torch.diag_embed((~present).to(a.dtype))
            R_X = torch.linalg.cholesky(a.mH @ problem.G.gram @ a + absent).mH
            R_Y = torch.linalg.cholesky(b.mH @ problem.H.gram @ b + absent).mH
            U, sigma, Vh = torch.linalg.svd((R_X * self.sigma.unsqueeze(-2)) @ R_Y.mH)
            sigma = torch.where(present, sigma, 0.0)  # both are in descending order
            L, R = U.mH @ R_X, Vh @ R_Y
        a, b = torch.linalg.solve(L, a, left=False), torch.linalg.solve(R, b, left=False)
        return _Waypoint(flat((a, p @ R.mH, b, q @ L.mH)), sigma, L @ self.L, R @ self.R, time)

    def at_start_gauge(self, y: Tensor) -> State:
        """Return the coefficients y in the gauge of the start."""
        a, p, b, q = unflat(y, self.sigma.shape[-1])
        return (
            a @ self.L,
            torch.linalg.solve(self.R.mH, p, left=False),
            b @ self.R,
            torch.linalg.solve(self.L.mH, q, left=False),
        )


def _follow(problem: Reduced, sigma: Tensor, until: Tensor, tol: float) -> tuple[list[_Waypoint], Tensor]:
    r"""Follow mix geodesics until they have passed the time ``until`` or left the manifold.

    The independent variable is r with :math:`dr = \sqrt{v^2 + \mathrm{until}^{-2}}\,dt`, v the speed in the *inv*
    metric. That metric is complete: where the rank falls at T, v grows like 1/(T − t), T is approached exponentially
    in r and never crossed, and the batch items advance at equal relative rates whatever their singular values are.
    Every unit of r is one leg, after which the current point is brought to its own canonical gauge, so that condition
    numbers do not accumulate. The second result holds the exit times (…), inf where there is none.
    """
    here = _Waypoint.start(problem, sigma)

    def inv_speed(w: _Waypoint) -> Tensor:
        return Reduced.of(problem.G, problem.H, w.sigma).derivative(w.y)[1].sqrt()

    with torch.no_grad():
        speed = inv_speed(here)
        slowest = nonzero(until).reciprocal()
    waypoints = [here]
    exit_time = torch.full_like(here.time, torch.inf)
    active = torch.ones_like(exit_time, dtype=torch.bool)
    for _ in range(_MAX_LENGTH):
        leg, moving = Reduced.of(problem.G, problem.H, here.sigma), active.unsqueeze(-1)
        unit = (slowest + speed).unsqueeze(-1)

        def slope(y: Tensor, leg: Reduced = leg, moving: Tensor = moving, unit: Tensor = unit) -> Tensor:
            dy, speed2 = leg.derivative(y[..., :-1])
            rate = torch.where(moving, 1 / (slowest**2 + speed2).sqrt().unsqueeze(-1), 0.0)
            # One more feature: the time since the start of the leg, in units of its initial speed.
            return torch.cat([dy * rate, unit * rate], dim=-1)

        y = integrate(slope, torch.cat([here.y, torch.zeros_like(unit)], dim=-1), tol)
        previous, last_speed = here, speed
        here = previous.regauged(problem, y[..., :-1], previous.time + (y[..., -1:].real / unit).squeeze(-1))
        waypoints.append(here)
        with torch.no_grad():
            speed = inv_speed(here)
            # 1/v falls linearly to 0 at the exit.
            left = (here.time - previous.time) / (speed / last_speed - 1)
            # Very close to a rank-deficient point, rounding decides on which side it is passed.
            near = (left > 0) & (left < torch.finfo(left.dtype).eps ** 0.375 * here.time)
            gone = active & near & (here.time + left <= until)
            exit_time = torch.where(gone, here.time + left, exit_time)
            active = active & ~near & (here.time < until)
        if holds(~active):
            return waypoints, exit_time
    raise ArithmeticError(f"mix geodesic: {int(active.sum())} not finished after an inv length of {_MAX_LENGTH}")


def _default_tolerance(x: Tensor) -> float:
    return 1e-12 if torch.finfo(x.dtype).bits == 64 else 2e-6


def _mix_geodesic(start: Whitened, t: Tensor, tol: float, direction: int = 1) -> State:
    """Integrate the equation of :class:`Reduced` to the times t, (k,), of either sign: X(t), ξ(t), Y(t), η(t)."""
    if not holds(t >= 0):
        forward = _mix_geodesic(start, t.clamp_min(0), tol)
        reverse = replace(start, xi=-start.xi, eta=-start.eta)
        back = _mix_geodesic(reverse, (-t).clamp_min(0), tol, -1)
        negative = column(t, forward[0][0]) < 0
        signs = (1, -1, 1, -1)
        return tuple(torch.where(negative, s * b, f) for s, b, f in zip(signs, back, forward, strict=True))
    problem = Reduced.of(frame(start.X, start.xi), frame(start.Y, start.eta), start.sigma)
    last = exposed(t).amax()
    if start.certainly_inside(last.item()):
        waypoints = [_Waypoint.start(problem, start.sigma)]
    else:
        waypoints, times = _follow(problem, start.sigma, last, tol)
        raise_on_exit(direction * times, last.item())
    # For every requested time, the last way-point before it.
    goal = column(t, waypoints[0].time)
    passed = torch.stack([w.time.detach() for w in waypoints])
    index = (passed.unsqueeze(1) <= goal.detach()).sum(0).clamp_min(1) - 1

    def pick(name: str) -> Tensor:
        values = torch.stack([getattr(w, name) for w in waypoints])
        i = index.reshape(*index.shape, *(1,) * (values.dim() - index.dim()))
        return values.gather(0, i.expand(*index.shape, *values.shape[index.dim() :]))

    here = _Waypoint(pick("y"), pick("sigma"), pick("L"), pick("R"), pick("time"))
    leg, span = Reduced.of(problem.G, problem.H, here.sigma), (goal - here.time).unsqueeze(-1)

    def slope(y: Tensor) -> Tensor:
        return leg.derivative(y)[0] * span

    return problem.end(here.at_start_gauge(integrate(slope, here.y, tol)))


def raise_on_exit(times: Tensor, until: float) -> None:
    """Raise a GeodesicExitError if one of the exit times, which may be negative, is finite."""
    times = exposed(times)
    leaving = int(times.isfinite().sum())
    if leaving:
        first = times.flatten()[times.abs().argmin()].item()
        raise GeodesicExitError(
            f"the mix geodesic leaves the manifold at t = {first:.6g}, before {until if first > 0 else -until:.6g}, "
            f"where the rank of G Hᴴ falls ({leaving} of {times.numel()} in the batch do); use a shorter tangent "
            "vector, or retr",
            first,
            times,
        )
