r"""Exact geodesics of the GL(h) quotients, on coefficients of size 2h × h.

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

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .linalg import choose, exposed, holds, row_power
from .metrics import MIX, Metric, Motion, Pair

#: The solver gives up after a path of this length in the inv metric.
_MAX_LENGTH = 1000
#: Number of steps of a leg after which a solver gives up, those of a geodesic take a dozen; and the shortest step.
_MAX_STEPS, _SHORTEST = 200, 1e-14


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


def raise_on_exit(times: Tensor, t: Tensor) -> None:
    """Raise a GeodesicExitError for exit times (k…, …), inf where there is none, on the way to the times t, (k…)."""
    if holds(times.isinf()):
        return
    times = times.reshape(-1, *times.shape[t.dim() :])
    times = exposed(times.gather(0, times.abs().argmin(0, keepdim=True))[0])
    first, until = times.flatten()[times.abs().argmin()].item(), exposed(t).abs().amax().item()
    raise GeodesicExitError(
        f"the mix geodesic leaves the manifold at t = {first:.6g}, before {until if first > 0 else -until:.6g}, "
        f"where the rank of G Hᴴ falls ({int(times.isfinite().sum())} of {times.numel()} in the batch do); use a "
        "shorter tangent vector, or retr",
        first,
        times,
    )


def as_times(t: Any, like: Tensor) -> Tensor:
    """Return times as a real tensor with the precision and device of another tensor."""
    if t.is_complex() if isinstance(t, Tensor) else np.asarray(t).dtype.kind not in "iuf":
        raise TypeError(f"times must be real numbers, got {t!r}")
    times = torch.as_tensor(t, dtype=like.dtype.to_real(), device=like.device)
    if not holds(times.isfinite()):
        raise ValueError(f"times must be finite, got {t!r}")
    return times


def column(t: Tensor, like: Tensor) -> Tensor:
    """Reshape times from (k…) to (k…, 1, …, 1), which multiplies a batch of matrices."""
    return t.reshape(t.shape + (1,) * like.dim())


def geodesic(
    metric: Metric, point: Pair, velocity: Pair, sigma: Tensor, t: Any, relative_tol: float | None
) -> tuple[Pair, Pair]:
    """Follow a whitened velocity from a whitened point: (X(t), ξ(t)) and (Y(t), η(t)), each (k…, …, rows, h).

    The scale ``sigma`` of the columns, (…, h), descends, and is 0 for directions that do not move.
    """
    t = as_times(t, sigma)
    if not metric.complete:
        return _mix_geodesic(point, velocity, sigma, t, relative_tol or _default_tolerance(sigma))
    return _inv_geodesic(point[0], velocity[0], t), _inv_geodesic(point[1], velocity[1], t)


def exit_time(metric: Metric, point: Pair, velocity: Pair, sigma: Tensor) -> Tensor:
    """Return the time in (0, 1] at which every geodesic leaves the manifold, inf where it stays; (…)."""
    with torch.no_grad():
        until = torch.ones_like(torch.linalg.matrix_norm(velocity[0]))
        if metric.complete or _certainly_inside(velocity, sigma, until):
            return torch.inf * until
        _, gram, here, until = _begin(point, velocity, sigma, until.new_ones(()))
        return _follow(gram, here, until, until, _default_tolerance(until))[1]


def _certainly_inside(velocity: Pair, sigma: Tensor, until: Tensor) -> bool:
    """Whether ρ < σ_h/√2, which keeps the geodesic on the manifold, holds for all items with a margin."""
    rho = (torch.linalg.matrix_norm(velocity[0]).square() + torch.linalg.matrix_norm(velocity[1]).square()) ** 0.5
    return holds(until * rho < torch.where(sigma > 0, sigma, torch.inf).amin(-1) / 4)


def _default_tolerance(like: Tensor) -> float:
    return 1e-12 if like.dtype == torch.float64 else 2e-6


def _nonzero(size: Tensor) -> Tensor:
    """Use a size as a unit: constant to autograd (results do not depend on it), and 1 where it is zero."""
    return torch.where(size > 0, size, 1).detach()


def _block_matrix(A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    return torch.cat([torch.cat([A, B], dim=-1), torch.cat([C, D], dim=-1)], dim=-2)


def _span(X: Tensor, xi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the basis [X, E/s], (…, n, 2h), its Gram matrix J, and the coefficients of X and ξ, (…, 2h, h)."""
    X, xi = torch.broadcast_tensors(X, xi)
    P = X.mH @ X
    # A zero column would make P singular. A unit vector orthogonal to all others takes its place: it stays constant
    # along the geodesic, and the other columns do not depend on it.
    P = P + torch.diag_embed((P.diagonal(dim1=-2, dim2=-1) == 0).to(P.dtype))
    C = torch.linalg.solve(P, X.mH @ xi)
    s = _nonzero(torch.linalg.matrix_norm(xi))[..., None, None]
    # A square X spans everything. Rounding errors in E would matter: mix geodesics are unstable in directions off X.
    E = (xi - X @ C) / s if X.shape[-2] > X.shape[-1] else torch.zeros_like(xi)
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device).expand_as(P)
    zero = torch.zeros_like(P)
    gram = _block_matrix(P, zero, zero, E.mH @ E)
    return torch.cat([X, E], dim=-1), gram, torch.cat([eye, zero], dim=-2), torch.cat([C, eye * s], dim=-2)


def _inv_geodesic(X: Tensor, xi: Tensor, t: Tensor) -> Pair:
    r"""Follow the geodesic of one factor for the inv metric (the factors decouple).

    With :math:`Ω = ξ P^{-1} X^H - X P^{-1} ξ^H`, :math:`P = X^H X` and :math:`W = P^{-1} ξ^H X`

    .. math:: X(t) = e^{tΩ} X e^{tW}, \qquad \dot X(t) = e^{tΩ} ξ e^{tW},

    and :math:`Ω [X, E/s] = [X, E/s] K` with
    :math:`K = \begin{pmatrix} C - W & -P^{-1} E^H E / s \\ s I & 0 \end{pmatrix}`, so one exponential of size 2h and
    one of size h suffice. The paper (§5.2) says that neither metric has analytic geodesics; this one is the image of
    those of the right-invariant Frobenius metric on GL(n) under taking h columns.
    """
    basis, gram, _, velocity = _span(X, xi)
    h, t = X.shape[-1], column(t, gram)
    P, S = gram[..., :h, :h], gram[..., h:, h:]  # S = EᴴE/s²
    C, s = velocity[..., :h, :], velocity[..., h:, :]
    W = torch.linalg.solve(P, C.mH @ P)
    K = _block_matrix(C - W, -torch.linalg.solve(P, S) @ s, s, torch.zeros_like(P))
    rotation = torch.linalg.matrix_exp(t * K)
    right = torch.linalg.matrix_exp(t * W)
    return basis @ (rotation[..., :h] @ right), basis @ (rotation @ velocity @ right)


class _Waypoint(NamedTuple):
    r"""Mix geodesics (k…, …) at some time, in the canonical gauge of the points they have reached.

    The coefficients of the factors, :math:`G = [X, E/s]\, a\, Σ^{1/2}` and b of H, and of the whitened velocities,
    p and q, belong to the scale σ. In the gauge of the start they are :math:`a L,\ p R^{-H},\ b R,\ q L^{-H}`.
    """

    y: Tensor  # ((a, p), (b, q)), flattened, (…, 8h²)
    sigma: Tensor  # (…, h)
    turn: Tensor  # (L, R), (…, 2, h, h)
    elapsed: Tensor  # the time, whatever its sign, (…)

    def regauged(self, gram: Tensor, y: Tensor, elapsed: Tensor) -> _Waypoint:
        r"""Advance to y, and to the canonical gauge there.

        From Cholesky factors :math:`M = R_X^H R_X,\ N = R_Y^H R_Y` (one leg keeps M and N well conditioned) and
        :math:`R_X Σ R_Y^H = U Σ' V^H`: the step is :math:`L = U^H R_X,\ R = V^H R_Y`. It is constant to autograd.
        """
        a, p = y.unflatten(-1, (2, 2, -1, self.sigma.shape[-1])).unbind(-3)
        with torch.no_grad():
            present = self.sigma > 0
            absent = torch.diag_embed((~present).to(y.dtype)).unsqueeze(-3)
            roots = torch.linalg.cholesky(a.mH @ gram @ a + absent).mH
            R_X, R_Y = roots.unbind(-3)
            U, sigma, Vh = torch.linalg.svd((R_X * self.sigma.unsqueeze(-2)) @ R_Y.mH)
            sigma = torch.where(present, sigma, 0.0)  # both are in descending order
            turn = torch.stack([U.mH, Vh], -3) @ roots
        a, p = torch.linalg.solve(turn, a, left=False), p @ turn.flip(-3).mH
        return _Waypoint(torch.stack([a, p], -3).flatten(-4), sigma, turn @ self.turn, elapsed)

    def at_start_gauge(self, y: Tensor) -> Pair:
        """Return the coefficients (a, b) and (p, q) of y, each (…, 2, 2h, h), in the gauge of the start."""
        a, p = y.unflatten(-1, (2, 2, -1, self.sigma.shape[-1])).unbind(-3)
        return a @ self.turn, torch.linalg.solve(self.turn.flip(-3).mH, p, left=False)


def _begin(
    start: Pair, velocity: Pair, sigma: Tensor, t: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, _Waypoint, Tensor]:
    """Return the bases of both spans, their Gram matrices (…, 2, 2h, 2h), and starts and times of shape (k…, …)."""
    bases, grams, points, velocities = zip(*map(_span, start, velocity), strict=True)
    point = torch.stack(points, -3) * (sigma > 0)[..., None, None, :]
    y = torch.stack([point, torch.stack(velocities, -3)], -3).flatten(-4)
    t = column(t, y[..., 0]).expand(t.shape + y.shape[:-1])
    eye = torch.eye(sigma.shape[-1], dtype=y.dtype, device=y.device)
    here = y.expand(*t.shape, -1), sigma.expand(*t.shape, -1), eye.expand(*t.shape, 2, -1, -1), torch.zeros_like(t)
    return bases, torch.stack(grams, -3), _Waypoint(*here), t


def _mix_geodesic(start: Pair, velocity: Pair, sigma: Tensor, t: Tensor, tol: float) -> tuple[Pair, Pair]:
    """Integrate the equation to the times t, (k…), of either sign: (X(t), ξ(t)), then (Y(t), η(t))."""
    bases, gram, here, goal = _begin(start, velocity, sigma, t)
    until, direction = goal.detach().abs(), goal.detach().sgn()
    if not _certainly_inside(velocity, sigma, until):
        here, exits = _follow(gram, here, until, direction, tol)
        raise_on_exit(torch.where(exits.isinf(), exits, direction * exits), t)
    equation, rest = _equation(gram, here.sigma), (goal - direction * here.elapsed).unsqueeze(-1)
    y = _integrate(lambda y: equation(y)[0] * rest, here.y, tol)
    (a, b), (p, q) = (z.unbind(-3) for z in here.at_start_gauge(y))
    return (bases[0] @ a, bases[0] @ p), (bases[1] @ b, bases[1] @ q)


def _equation(gram: Tensor, sigma: Tensor) -> Callable[[Tensor], Pair]:
    r"""State the geodesic equation of mix on coefficients: :math:`G = [X, E/s]\, a\, Σ^{1/2}`, likewise b for H.

    The velocities are those of the whitened tangent vectors, :math:`\dot a = p Σ^{-1},\ \dot b = q Σ^{-1}`. With
    :math:`N = b^H J_H b`, :math:`B_H = b^H J_H q`, :math:`A_H = q^H J_H q` the equation of the metric reads
    :math:`\dot p = [a A_H Σ^{-1} - p (Σ^{-1} B_H^H + B_H Σ^{-1})] N^{-1}`, likewise q with the roles exchanged: written
    with p Σ^{-1} instead of ȧ no entry is multiplied by a ratio of singular values.

    It maps coefficients (…, 8h²) to their time derivative and the squared speed (…) in the inv metric.
    """
    w = row_power(sigma, sigma > 0, -1).unsqueeze(-3)
    absent = torch.diag_embed((sigma == 0).to(gram.dtype)).unsqueeze(-3)

    def derivative(y: Tensor) -> Pair:
        # Both factors at once, (…, 2, 2h, h): half as many operations on small matrices.
        state = y.unflatten(-1, (2, 2, gram.shape[-1], -1))
        (a, p), (Ja, Jp) = state.unbind(-3), (gram.unsqueeze(-3) @ state).unbind(-3)
        A, M = p.mH @ Jp, a.mH @ Ja + absent
        own = Motion(torch.linalg.inv(M), (Ja.mH @ p * w).mH, A * w)
        of_a, of_p = MIX.equation(own, Motion(*(k.flip(-3) for k in own)))
        # Tr(M⁻¹ ȧᴴJȧ) + Tr(N⁻¹ ḃᴴJḃ)
        speed2 = (own.inverse.mT * own.vv * w.mT).real.sum((-3, -2, -1))
        return torch.stack([p * w, a @ of_a + p @ of_p], -3).flatten(-4), speed2

    return derivative


@torch.no_grad()
def _inv_speed(gram: Tensor, here: _Waypoint) -> Tensor:
    return _equation(gram, here.sigma)(here.y)[1].sqrt()


def _follow(gram: Tensor, here: _Waypoint, until: Tensor, direction: Tensor, tol: float) -> tuple[_Waypoint, Tensor]:
    r"""Follow mix geodesics for the time ``until``, forwards or backwards, or to where they leave the manifold.

    The independent variable is r with :math:`dr = \sqrt{v^2 + \mathrm{until}^{-2}}\,dt`, v the speed in the *inv*
    metric. That metric is complete: where the rank falls at T, v grows like 1/(T − t), T is approached exponentially
    in r and never crossed, and the batch items advance at equal relative rates whatever their singular values are.
    Every unit of r is one leg, after which the current point is brought to its own canonical gauge, so that condition
    numbers do not accumulate. Returns the last points between legs that are not beyond the time, and the exit times
    (…), inf where there is none.
    """
    slowest, speed = _nonzero(until).reciprocal(), _inv_speed(gram, here)
    least, sign = slowest**2, direction.unsqueeze(-1)
    exits = torch.full_like(until, torch.inf)
    active = torch.ones_like(until, dtype=torch.bool)
    for _ in range(_MAX_LENGTH):
        equation, moving, unit = _equation(gram, here.sigma), active.unsqueeze(-1), (slowest + speed).unsqueeze(-1)

        def slope(y: Tensor, equation: Any = equation, moving: Tensor = moving, unit: Tensor = unit) -> Tensor:
            dy, speed2 = equation(y[..., :-1])
            rate = torch.where(moving, 1 / (least + speed2).sqrt().unsqueeze(-1), 0.0)
            # One more feature: the time since the start of the leg, in units of its initial speed.
            return torch.cat([dy * (sign * rate), unit * rate], dim=-1)

        y = _integrate(slope, torch.cat([here.y, torch.zeros_like(unit)], dim=-1), tol)
        there = here.regauged(gram, y[..., :-1], here.elapsed + (y[..., -1:].real / unit).squeeze(-1))
        with torch.no_grad():
            last_speed, speed = speed, _inv_speed(gram, there)
            # 1/v falls linearly to 0 at the exit.
            left = (there.elapsed - here.elapsed) / (speed / last_speed - 1)
            # Very close to a rank-deficient point, rounding decides on which side it is passed.
            near = (left > 0) & (left < torch.finfo(left.dtype).eps ** 0.375 * there.elapsed)
            gone = active & near & (there.elapsed + left <= until)
            exits = torch.where(gone, there.elapsed + left, exits)
            active = active & ~near & (there.elapsed < until)
        here = _Waypoint(*(choose(there.elapsed <= until, a, b) for a, b in zip(there, here, strict=True)))
        if holds(~active):
            return here, exits
    raise ArithmeticError(f"mix geodesic: {int(active.sum())} not finished after an inv length of {_MAX_LENGTH}")


def _integrate(f: Callable[[Tensor], Tensor], y: Tensor, tol: float) -> Tensor:
    """Solve ẏ = f(y) over unit time; every batch item keeps the tolerance.

    Dormand and Prince's methods, of order 5 and, below a tolerance of 1e-8, of order 8 with Hairer's error estimate
    (Hairer, Nørsett and Wanner, II.5 and II.10). The choice of steps is constant to autograd, whose modes all see sums
    and products alone.
    """
    if y.numel() == 0:  # a batch without items
        return y
    from scipy.integrate import DOP853, RK45  # slow to import

    method, order = (DOP853, 8) if tol < 1e-8 else (RK45, 5)
    stages, whole = y.new_tensor(method.A), y.new_tensor(method.B)
    estimates = [y.new_tensor(e) for e in ((method.E5, method.E3) if method is DOP853 else (method.E,))]
    slope, time = f(y), 0.0

    def worst(error: Tensor) -> float:
        """Take the root mean square of every batch item, then the largest; infinitely wrong where it is not finite."""
        return float(exposed(error.abs().square().mean(-1).sqrt()).nan_to_num(nan=1e9, posinf=1e9).amax())

    step = (0.01 / max(worst(slope / (tol * (1 + y.abs()))), 0.01)) ** (1 / order)
    for _ in range(_MAX_STEPS):
        step = min(step, 1 - time)
        k = [slope]
        for a in stages[1:]:
            k.append(f(y + step * torch.tensordot(a[: len(k)], torch.stack(k), 1)))
        new = y + step * torch.tensordot(whole, torch.stack(k), 1)
        k.append(f(new))
        every, unit = torch.stack(k).detach(), tol * (1 + torch.maximum(y.abs(), new.abs()))
        errors = [worst(torch.tensordot(e, every, 1) / unit) for e in estimates]
        ratio = step * errors[0] ** 2 / max(math.hypot(errors[0], *(0.1 * e for e in errors[1:])), 1e-150)
        if ratio <= 1:
            y, slope, time = new, k[-1], time + step
            if time >= 1 - _SHORTEST:
                return y
        step *= min(max(0.9 * max(ratio, 1e-10) ** (-1 / order), 0.2), 10)
        if step < _SHORTEST:
            break
    raise ArithmeticError(
        f"the geodesic equation cannot be solved here (steps of {step:.0e} at time {time:.3g}); rescale the factors"
    )
