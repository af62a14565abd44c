r"""Exact geodesics of the GL(h) quotients, in reduced coordinates.

Notation of :mod:`quotient_manifolds.gl`. In canonical gauge a point is :math:`G = X Σ^{1/2}, H = Y Σ^{1/2}` with
orthonormal columns in X and Y, and a tangent vector is

.. math:: ξ_G = ξ Σ^{1/2},\; ξ_H = η Σ^{1/2} \;\text{(inv)}, \qquad
          ξ_G = ξ Σ^{-1/2},\; ξ_H = η Σ^{-1/2} \;\text{(mix)},

which makes the metric the identity, :math:`\|(ξ, η)\|_F`. The functions below take X, ξ, Y, η, σ. They use that
:math:`X^H X` is well conditioned, not that it is the identity: with X a differentiable function of the point (and Σ a
constant scale) their derivatives are exact.

Along every geodesic G(t) stays in span[X, ξ], so everything happens on 2h × h coefficient matrices. The basis is
[X, E/s] with :math:`E = ξ - X C`, :math:`C = (X^H X)^{-1} X^H ξ`, Gram matrix
:math:`J = \mathrm{diag}(X^H X, E^H E/s^2)`. Unlike an orthonormal basis from a QR it is a polynomial in ξ,
hence differentiable at ξ = 0 and at vertical ξ. The number s = ‖ξ‖ only balances the two halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .geodesic_ode import (
    Reduced,
    State,
    as_times,
    block_matrix,
    column,
    flat_state,
    frame,
    integrate,
    nonzero,
    unflat_state,
)

__all__ = ["GeodesicExitError", "exit_time", "inv_geodesic", "mix_geodesic", "rk4"]


class GeodesicExitError(ValueError):
    """A geodesic leaves the manifold before the time asked for.

    Attributes
    ----------
    time : float
        First time at which a geodesic reaches the manifold's boundary.
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
        super().__init__(message)
        self.time, self.times = time, times


# -- inv: closed form -----------------------------------------------------------------------------------------------


def inv_geodesic(X: Tensor, xi: Tensor, t: Any = 1.0) -> tuple[Tensor, Tensor]:
    r"""Follow the geodesic of one factor for the inv metric (the factors decouple).

    With :math:`Ω = ξ P^{-1} X^H - X P^{-1} ξ^H`, :math:`P = X^H X` and :math:`W = P^{-1} ξ^H X`

    .. math:: X(t) = e^{tΩ} X e^{tW}, \qquad \dot X(t) = e^{tΩ} ξ e^{tW},

    and :math:`Ω [X, E/s] = [X, E/s] K` with
    :math:`K = \begin{pmatrix} C - W & -P^{-1} E^H E / s \\ s I & 0 \end{pmatrix}`, so one exponential of size 2h and
    one of size h suffice. The metric is complete: it exists for all t.

    Parameters
    ----------
    X, xi : Tensor
        Factor and tangent vector, (…, n, h); a common right multiplication by an invertible matrix may have been
        applied (whitening), and the result carries it too.
    t : float or Tensor
        Times, of any shape (k…).

    Returns
    -------
    tuple of Tensor
        X(t) and its velocity, (k…, …, n, h); dtype and device of X. Differentiable.

    Notes
    -----
    The paper (§5.2) says that neither metric has analytic geodesics; the inv metric has. It is the image of the
    right-invariant Frobenius metric on GL(n) under taking h columns.

    Examples
    --------
    On vectors the metric is :math:`|ξ|^2/|X|^2`, and unit circles are geodesics:

    >>> import math, torch
    >>> from quotient_manifolds.gl.geodesic import inv_geodesic
    >>> X, xi = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    >>> torch.cat(inv_geodesic(X, xi, math.pi / 3), dim=-1)
    tensor([[ 0.5000, -0.8660],
            [ 0.8660,  0.5000]])
    """
    f = frame(X, xi)
    h = X.shape[-1]
    t = column(as_times(t, X), f.gram)
    P, S = f.gram[..., :h, :h], f.gram[..., h:, h:]  # S = EᴴE/s²
    C, s = f.velocity[..., :h, :], f.velocity[..., h:, :]
    W = torch.linalg.solve(P, C.mH @ P)
    K = block_matrix([[C - W, -torch.linalg.solve(P, S) @ s], [s, torch.zeros_like(P)]])
    rotation = torch.linalg.matrix_exp(t * K)
    right = torch.linalg.matrix_exp(t * W)
    return f @ (rotation[..., :h] @ right), f @ (rotation @ f.velocity @ right)


def rk4(
    metric: str, X: Tensor, xi: Tensor, Y: Tensor, eta: Tensor, sigma: Tensor, t: Any = 1.0, steps: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the geodesic by the classical Runge–Kutta method with ``steps`` equal steps.

    Never raises: after an exit the result is not finite or meaningless.

    Parameters
    ----------
    metric : {"inv", "mix"}
    X, xi, Y, eta : Tensor
        Whitened factors and tangent vectors, (…, n, h) and (…, m, h).
    sigma : Tensor
        Scale of the columns, (…, h); only mix uses it.
    t : float or Tensor
        Times of any shape (k…), of either sign.
    steps : int
        Equal steps for every time.

    Returns
    -------
    tuple of Tensor
        X(t), ξ(t), Y(t), η(t), each (k…, …, rows, h).

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.gl.geodesic import mix_geodesic, rk4
    >>> one = torch.ones(1, 1)
    >>> start = one, one, one, one, torch.ones(1)
    >>> [round(rk4("mix", *start, steps=n)[0].item(), 3) for n in (1, 2, 8)], round(mix_geodesic(*start)[0].item(), 3)
    ([1.694, 1.729, 1.732], 1.732)
    """
    problem = Reduced.of(metric, X, xi, Y, eta, sigma)
    step = column(as_times(t, X), problem.G.gram) / steps

    def shifted(state: State, slope: State, factor: Any) -> State:
        return tuple(y + factor * k for y, k in zip(state, slope, strict=True))

    state: State = tuple(torch.broadcast_tensors(y, step)[0] for y in problem.start())
    for _ in range(steps):
        k1, _v = problem.derivative(state)
        k2, _v = problem.derivative(shifted(state, k1, step / 2))
        k3, _v = problem.derivative(shifted(state, k2, step / 2))
        k4, _v = problem.derivative(shifted(state, k3, step))
        total: State = tuple(a + 2 * b + 2 * c + d for a, b, c, d in zip(k1, k2, k3, k4, strict=True))
        state = shifted(state, total, step / 6)
    return problem.end(state)


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
        y = flat_state(state)
        eye = torch.eye(sigma.shape[-1], dtype=state[0].dtype, device=y.device).expand(*y.shape[:-1], -1, -1)
        return cls(y, sigma.expand(*y.shape[:-1], -1), eye, eye, torch.zeros_like(y[..., 0]))

    def regauged(self, problem: Reduced, y: Tensor, time: Tensor) -> _Waypoint:
        r"""Go on to y, and to the canonical gauge there.

        From Cholesky factors :math:`M = R_X^H R_X,\ N = R_Y^H R_Y` (one leg keeps M and N well conditioned) and
        :math:`R_X Σ R_Y^H = U Σ' V^H`: the step is :math:`L = U^H R_X,\ R = V^H R_Y`. It is constant to autograd.
        """
        h, is_complex = self.sigma.shape[-1], self.L.is_complex()
        a, p, b, q = unflat_state(y, h, is_complex)
        with torch.no_grad():
            present = self.sigma > 0
            absent = torch.diag_embed((~present).to(a.dtype))
            R_X = torch.linalg.cholesky(a.mH @ problem.G.gram @ a + absent).mH
            R_Y = torch.linalg.cholesky(b.mH @ problem.H.gram @ b + absent).mH
            U, sigma, Vh = torch.linalg.svd((R_X * self.sigma.unsqueeze(-2)) @ R_Y.mH)
            sigma = torch.where(present, sigma, 0.0)  # both are in descending order
            L, R = U.mH @ R_X, Vh @ R_Y
        a, b = torch.linalg.solve(L, a, left=False), torch.linalg.solve(R, b, left=False)
        return _Waypoint(flat_state((a, p @ R.mH, b, q @ L.mH)), sigma, L @ self.L, R @ self.R, time)

    def at_start_gauge(self, y: Tensor) -> State:
        """Give the coefficients y in the gauge of the start."""
        a, p, b, q = unflat_state(y, self.sigma.shape[-1], self.L.is_complex())
        return (
            a @ self.L,
            torch.linalg.solve(self.R.mH, p, left=False),
            b @ self.R,
            torch.linalg.solve(self.L.mH, q, left=False),
        )


def _follow(
    problem: Reduced, sigma: Tensor, until: Tensor, tol: float, max_length: int
) -> tuple[list[_Waypoint], Tensor]:
    r"""Follow mix geodesics until they have passed the time ``until`` or left the manifold.

    The independent variable is r with :math:`dr = \sqrt{v^2 + \mathrm{until}^{-2}}\,dt`, v the speed in the *inv*
    metric. That metric is complete: where the rank falls at T, v grows like 1/(T − t), T is approached exponentially
    in r and never crossed, and the batch items advance at equal relative rates whatever their singular values are.
    Every unit of r is one leg, after which the point reached is brought to its own canonical gauge: conditions do not
    build up.

    Returns
    -------
    list of _Waypoint
    Tensor
        Exit times (…), inf where there is none.
    """
    here = _Waypoint.start(problem, sigma)
    h, is_complex = here.L.shape[-1], here.L.is_complex()

    def inv_speed(w: _Waypoint) -> Tensor:
        return problem.scaled(w.sigma).derivative(unflat_state(w.y, h, is_complex))[1].sqrt()

    with torch.no_grad():
        speed = inv_speed(here)
        slowest = nonzero(until).reciprocal()
    waypoints = [here]
    exit_time = torch.full_like(here.time, torch.inf)
    active = torch.ones_like(exit_time, dtype=torch.bool)
    for _ in range(max_length):
        leg, moving = problem.scaled(here.sigma), active.unsqueeze(-1)
        unit = (slowest + speed).unsqueeze(-1)

        def slope(_r: Tensor, y: Tensor, leg: Reduced = leg, moving: Tensor = moving, unit: Tensor = unit) -> Tensor:
            dy, speed2 = leg.derivative(unflat_state(y[..., :-1], h, is_complex))
            rate = torch.where(moving, 1 / (slowest**2 + speed2).sqrt().unsqueeze(-1), 0.0)
            # One more feature: the time since the start of the leg, in units of its first speed.
            return torch.cat([flat_state(dy) * rate, unit * rate], dim=-1)

        y = integrate(slope, torch.cat([here.y, torch.zeros_like(unit)], dim=-1), 1.0, tol)
        previous, last_speed = here, speed
        here = previous.regauged(problem, y[..., :-1], previous.time + (y[..., -1:] / unit).squeeze(-1))
        waypoints.append(here)
        with torch.no_grad():
            speed = inv_speed(here)
            # 1/v falls linearly to 0 at the exit.
            left = (here.time - previous.time) / (speed / last_speed - 1)
            # Very close to a rank-deficient point, the side on which it is passed is rounding.
            near = (left > 0) & (left < torch.finfo(left.dtype).eps ** 0.375 * here.time)
            gone = active & near & (here.time + left <= until)
            exit_time = torch.where(gone, here.time + left, exit_time)
            active = active & ~near & (here.time < until)
        if not bool(active.any()):
            return waypoints, exit_time
    raise RuntimeError(f"mix geodesic: {int(active.sum())} still under way after {max_length} units of inv length")


def _default_tolerance(x: Tensor) -> float:
    return 1e-12 if torch.finfo(x.dtype).bits == 64 else 2e-6


def _certainly_inside(xi: Tensor, eta: Tensor, sigma: Tensor, until: float) -> bool:
    """Tell whether ρ < σ_h/√2, which keeps the geodesic on the manifold, holds for all items with a margin."""
    rho = (torch.linalg.matrix_norm(xi).square() + torch.linalg.matrix_norm(eta).square()).sqrt()
    lowest = torch.where(sigma > 0, sigma, torch.inf).amin(-1)
    return bool((until * rho < lowest / 4).all())


def exit_time(
    X: Tensor,
    xi: Tensor,
    Y: Tensor,
    eta: Tensor,
    sigma: Tensor,
    until: float = 1.0,
    *,
    tol: float | None = None,
    max_length: int = 1000,
) -> Tensor:
    """Give the time at which every mix geodesic leaves the manifold.

    Parameters
    ----------
    X, xi, Y, eta : Tensor
        Whitened factors and tangent vectors, (…, n, h) and (…, m, h).
    sigma : Tensor
        Scale of the columns, (…, h), descending.
    until : float
        Look no further than this time, > 0.
    tol : float, optional
        Relative tolerance of a step; by default 1e-12 in float64 and 2e-6 in float32.
    max_length : int
        Give up after this length of the path in the inv metric.

    Returns
    -------
    Tensor
        (…), in (0, until], inf where the geodesic stays; not differentiable.

    Raises
    ------
    RuntimeError
        A geodesic is longer than ``max_length``.

    Notes
    -----
    The metric is not complete: for a scalar pair the product is :math:`β_0 (1 + 2Bt)`, see
    :class:`~quotient_manifolds.RescaleQuotient`. A geodesic of length ρ stays while ρ < σ_h/√2.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.gl.geodesic import exit_time
    >>> one = torch.ones(3, 1, 1)
    >>> velocity = torch.tensor([-1.0, -0.1, 1.0]).reshape(3, 1, 1)
    >>> exit_time(one, velocity, one, velocity, torch.ones(3, 1))
    tensor([0.5000,    inf,    inf])
    """
    with torch.no_grad():
        if _certainly_inside(xi, eta, sigma, until):
            return torch.full_like(torch.linalg.matrix_norm(xi), torch.inf)
        problem = Reduced.of("mix", X, xi, Y, eta, sigma)
        return _follow(problem, sigma, as_times(until, X), tol or _default_tolerance(X), max_length)[1]


def mix_geodesic(
    X: Tensor,
    xi: Tensor,
    Y: Tensor,
    eta: Tensor,
    sigma: Tensor,
    t: Any = 1.0,
    *,
    tol: float | None = None,
    max_length: int = 1000,
) -> State:
    r"""Follow the geodesic of a pair for the mix metric.

    Integrates the equation of :class:`Reduced` with an adaptive Runge–Kutta pair (Dormand–Prince, of order 8 for
    tolerances below 1e-8, else 5), see :func:`_follow`.

    Parameters
    ----------
    X, xi, Y, eta : Tensor
        Whitened factors and tangent vectors, (…, n, h) and (…, m, h).
    sigma : Tensor
        (…, h), the constant scale of the columns, descending; 0 for directions that the point lacks.
    t : float or Tensor
        Times of any shape (k…), of either sign.
    tol : float, optional
        Relative tolerance of a step, held by every batch item; by default 1e-12 in float64 and 2e-6 in float32.
    max_length : int
        Give up after this length of the path in the inv metric.

    Returns
    -------
    tuple of Tensor
        X(t), ξ(t), Y(t), η(t), each (k…, …, rows, h).

    Raises
    ------
    GeodesicExitError
        The rank falls before a time asked for. ``time`` is the first such time of the batch, ``times`` (…) holds them
        all (inf: none).
    RuntimeError
        A geodesic is longer than ``max_length``.

    Notes
    -----
    The paper (§5.2) follows this equation to second order only. Where n = m = h and the start is horizontal,
    X(t) Σ Y(t)ᴴ moves on a straight line.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.gl.geodesic import mix_geodesic
    >>> one = torch.ones(1, 1)
    >>> X, _, Y, _ = mix_geodesic(one, one / 2, one, one / 2, torch.ones(1), torch.tensor([0.0, 1.0, 2.0]))
    >>> (X * Y).flatten()
    tensor([1.0000, 2.0000, 3.0000])
    """
    shape = as_times(t, X).shape
    t = as_times(t, X).reshape(-1)
    if bool((t < 0).any()):
        forward = mix_geodesic(X, xi, Y, eta, sigma, t.clamp_min(0), tol=tol, max_length=max_length)
        back = mix_geodesic(X, -xi, Y, -eta, sigma, (-t).clamp_min(0), tol=tol, max_length=max_length)
        negative = column(t, forward[0][0]) < 0
        pairs = zip((1, -1, 1, -1), back, forward, strict=True)
        result = tuple(torch.where(negative, sign * b, f) for sign, b, f in pairs)
        return tuple(r.reshape(*shape, *r.shape[1:]) for r in result)
    tol = tol or _default_tolerance(X)
    problem = Reduced.of("mix", X, xi, Y, eta, sigma)
    last = t.detach().amax()
    if _certainly_inside(xi.detach(), eta.detach(), sigma, last.item()):
        waypoints = [_Waypoint.start(problem, sigma)]
    else:
        waypoints, times = _follow(problem, sigma, last, tol, max_length)
        raise_on_exit(times, last.item())
    # For every time asked for the last way-point before it.
    goal = column(t, waypoints[0].time)
    passed = torch.stack([w.time.detach() for w in waypoints])
    index = (passed.unsqueeze(1) <= goal.detach()).sum(0).clamp_min(1) - 1

    def pick(name: str) -> Tensor:
        values = torch.stack([getattr(w, name) for w in waypoints])
        i = index.reshape(*index.shape, *(1,) * (values.dim() - index.dim()))
        return values.gather(0, i.expand(*index.shape, *values.shape[index.dim() :]))

    here = _Waypoint(pick("y"), pick("sigma"), pick("L"), pick("R"), pick("time"))
    h, is_complex = X.shape[-1], X.is_complex()
    leg, span = problem.scaled(here.sigma), (goal - here.time).unsqueeze(-1)

    def slope(_theta: Tensor, y: Tensor) -> Tensor:
        return flat_state(leg.derivative(unflat_state(y, h, is_complex))[0]) * span

    y = integrate(slope, here.y, 1.0, tol)
    result = problem.end(here.at_start_gauge(y))
    return tuple(r.reshape(*shape, *r.shape[1:]) for r in result)


def raise_on_exit(times: Tensor, until: float) -> None:
    """Raise a GeodesicExitError if one of the exit times is finite."""
    leaving = int(times.isfinite().sum())
    if leaving:
        first = times.min().item()
        raise GeodesicExitError(
            f"the mix geodesic leaves the manifold at t = {first:.6g} < {until:.6g}, where the rank of G Hᴴ falls "
            f"({leaving} of {times.numel()} in the batch do); use a shorter tangent vector, or retr",
            first,
            times,
        )
