r"""Maximisation of a function over a ball around the origin of a Euclidean space, independent of networks.

The **generalised power method** moves to the point of the ball in the direction of the gradient g at the best point so
far,

.. math:: y = ρ\, g/\|g\|, \qquad y \leftarrow y + \tfrac14 (x - x_{prev}),\quad
          x^+ = ω y + (1 - ω) x \quad \text{(each time scaled to length ρ)}

(for the round ball; in general y is the ball's maximiser of ⟨g, y⟩), with the momentum term only after a rise. The
damping ω starts at 1, is halved after every decrease and multiplied by 1.2 after every increase. For a convex function
the plain iteration (no momentum, ω = 1) never decreases. The undamped iteration is that of Journée, Nesterov,
Richtárik, Sepulchre 2010.

**Auto-PGD**, with step size η (initially 2ρ), P the projection onto the ball, d the steepest direction of unit length
(g/‖g‖ for the round ball) and α = 1 at the first step, 0.75 after it, is

.. math:: z = P(x + η d), \qquad x^+ = P(x + α(z - x) + (1 - α)(x - x_{prev})).

At the check-points the step is halved, and the ascent restarts from the best iterate, if fewer than three in four steps
raised the function, or if neither the step nor the best value changed since the last check-point. Croce and Hein 2020,
Algorithm 1; paper, Algorithm 1, where lines 5–6 and 16–17 pair the loss with the wrong iterate and line 21 restarts the
weights instead of the tangent vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .balls import Ball, View
from .vectors import Buffers

__all__ = ["ASCENTS", "Ascent", "auto_pgd", "power"]

#: ``f(x, wanted) -> (value, gradient)``; the gradient is None unless it is wanted.
Function = Callable[[Tensor, bool], tuple[float, Tensor | None]]


@dataclass(frozen=True)
class Ascent:
    r"""The result of an ascent.

    Attributes
    ----------
    point : Tensor
        (dim,), the best iterate; dtype and device of the start.
    value : float
        The value of the function there.
    history : tuple of float
        Values at all iterates, including the start.
    fw_gap : float or None
        The Frank–Wolfe gap :math:`\max_{\|y\| \le ρ} \langle \nabla f(x), y - x \rangle` at the best iterate: the
        first-order estimate of the remaining increase, 0 at a maximum over the ball. None if the gradient there is not
        known, because the best iterate came last.
    converged : bool or None
        Whether the gap is below the tolerance; None without a tolerance.
    slope : float or None
        Outward derivative of f, :math:`\langle \nabla f(x), x \rangle / \|x\|`, at the best point of the round ball
        where the gradient is known. If it is negative, there are larger values inside the ball.

    Examples
    --------
    The largest value of :math:`x_1 + x_2` in the unit ball is √2; a gap of 0 says that no point of the ball is better
    to first order:

    >>> import torch
    >>> def f(x, wanted):
    ...     return float(x.sum()), torch.ones_like(x)
    >>> from sharpness.balls import RoundBall
    >>> found = power(f, torch.zeros(2), RoundBall(1.0), 20, relative_tol=1e-3)
    >>> round(found.value, 4), len(found.history), abs(found.fw_gap) < 1e-6, found.converged
    (1.4142, 2, True, True)
    """

    point: Tensor
    value: float
    history: tuple[float, ...]
    fw_gap: float | None
    converged: bool | None
    slope: float | None = None


def power(
    f: Function, start: Tensor, ball: Ball, steps: int, *,
    relative_tol: float = 0.0, base: float | None = None, first: tuple[float, Tensor] | None = None,
    buffers: Buffers | None = None, callback: Callable[[float, float], None] | None = None,
) -> Ascent:  # fmt: skip
    """Maximise f over a ball by the generalised power method, see :mod:`sharpness.ascent`.

    Parameters
    ----------
    f : callable
        ``f(x, wanted) -> (value, gradient)``; the gradient, (dim,), may be None unless it is wanted. Every iterate is a
        linear combination of ``start`` and gradients: where these are horizontal, no projection is needed.
    start : Tensor
        (dim,), the origin or a point of the ball's surface; copied, unless it is one of the buffers.
    ball : Ball
    steps : int
        Largest number of steps; f is called at most steps + 1 times, and once less with ``first``.
    relative_tol : float
        Stop once the Frank–Wolfe gap at the best iterate is below this share of the increase; 0 never stops.
    base : float, optional
        Value at the origin, relative to which the increase is measured; by default the value at ``start``.
    first : (float, Tensor), optional
        Value and gradient at ``start``, if known; a gradient that is one of the buffers is overwritten.
    buffers, callback : optional
        ``buffers`` holds vectors to work in, one of which becomes the result's point; f may take its gradients from
        there. ``callback`` is called with (value, best value) after every step.

    Returns
    -------
    Ascent

    Examples
    --------
    On the unit sphere the largest value of a quadratic form is its largest eigenvalue:

    >>> import torch
    >>> from sharpness.balls import RoundBall
    >>> a = torch.tensor([1.0, 2.0, 5.0])
    >>> def f(x, wanted):
    ...     return float(a @ x.square()), 2 * a * x
    >>> round(power(f, torch.ones(3) / 3**0.5, RoundBall(1.0), 20).value, 3)
    5.0
    """
    work, start, value, g = _begin(f, start, first, buffers)
    history, base = [value], value if base is None else base
    best = (value, start, g)
    view: View | None = (here := ball.view(g, start, None))
    # The origin is not on the surface: the first iterate replaces it, whatever its value.
    begun, other, momentum, omega, slope = ball.norm(start) > 0, None, False, 1.0, here.slope
    for k in range(1, steps + 1):
        assert view is not None
        if begun and _done(view.gap, best[0], base, relative_tol, start.dtype):
            break
        work.keep(best[1], best[2], *([] if other is None else [other]))
        x = work.take() if other is None else other  # the point before the best is not needed after this
        view.propose_(x, omega, momentum=momentum)
        work.keep(best[1], best[2], x)
        work.release()
        value, gradient = f(x, k < steps)
        history.append(value)
        if not begun or value > best[0]:
            other, momentum = (best[1], True) if begun else (None, False)
            omega = min(1.0, 1.2 * omega)
            best, begun = (value, x, best[2] if gradient is None else gradient), True
            view = None if k == steps else ball.view(best[2], x, other)
            slope = slope if view is None else view.slope
        else:
            other, momentum, omega = x, False, omega / 2
        if callback is not None:
            callback(value, best[0])
    return _finish(work, best, history, None if view is None else view.gap, base, relative_tol, slope)


def auto_pgd(
    f: Function,
    start: Tensor,
    ball: Ball,
    steps: int,
    *,
    relative_tol: float = 0.0,
    base: float | None = None,
    first: tuple[float, Tensor] | None = None,
    buffers: Buffers | None = None,
    callback: Callable[[float, float], None] | None = None,
) -> Ascent:
    """Maximise f over a ball by Auto-PGD, see :mod:`sharpness.ascent`.

    Parameters
    ----------
    f, start, ball, steps, relative_tol, base, first, buffers, callback
        As for :func:`power`; ``start`` may lie anywhere in the ball. The check-points depend on ``steps``.

    Returns
    -------
    Ascent
        With the best of all iterates.

    Examples
    --------
    A linear function is largest in the corner of a cube that its gradient points to:

    >>> import torch
    >>> from sharpness.balls import CubeBall
    >>> g = torch.tensor([1.0, -2.0])
    >>> def f(x, wanted):
    ...     return float(g @ x), g
    >>> auto_pgd(f, torch.zeros(2), CubeBall(0.1), steps=20).point
    tensor([ 0.1000, -0.1000])
    """
    work, x, value, g = _begin(f, start, first, buffers)
    history, base = [value], value if base is None else base
    previous = x
    best = (value, x, g)
    gap: float | None = None
    known = True  # the gradient at the best iterate
    slope: float | None = None
    eta = 2 * ball.radius
    marks = set(checkpoints(steps))
    last_mark, raised, halved, best_at_mark = 0, 0, False, value
    for k in range(1, steps + 1):
        if _done(gap, best[0], base, relative_tol, start.dtype):
            break
        work.keep(x, previous, g, best[1], best[2])
        new = work.take() if previous is x or previous is best[1] else previous
        ball.step_(new, x, previous, g, eta, 1.0 if k == 1 else 0.75)
        previous, x = x, new
        work.keep(x, previous, best[1], best[2])
        work.release()
        new_value, gradient = f(x, k < steps)
        g = best[2] if gradient is None else gradient
        raised += new_value > value
        value = new_value
        history.append(value)
        if value > best[0]:
            best, gap, known = (value, x, g), None, gradient is not None
            if known:
                view = ball.view(g, x, None)
                gap, slope = view.gap, view.slope
        if k in marks:
            stuck = not halved and best[0] == best_at_mark
            halved = raised < 0.75 * (k - last_mark) or stuck
            if halved:
                eta /= 2
                value, x, g = best
                previous = x
            last_mark, raised, best_at_mark = k, 0, best[0]
        if callback is not None:
            callback(value, best[0])
    if gap is None and known:
        gap = ball.view(best[2], best[1], None).gap
    return _finish(work, best, history, gap, base, relative_tol, slope)


#: The ascents by name.
ASCENTS: dict[str, Callable[..., Ascent]] = {"power": power, "apgd": auto_pgd}


def checkpoints(steps: int) -> list[int]:
    """Return the iterations at which Auto-PGD checks its step size.

    p₀ = 0, p₁ = 0.22, p_{j+1} = p_j + max(p_j − p_{j−1} − 0.03, 0.06), w_j = ⌈p_j N⌉, computed in hundredths (floating
    point gives a wrong 15 at N = 20).

    Examples
    --------
    >>> checkpoints(20)
    [5, 9, 12, 14, 16, 18, 19, 20]
    """
    before, now, found = 0, 22, []
    while now <= 100:
        found.append(-(-now * steps // 100))
        before, now = now, now + max(now - before - 3, 6)
    return found


def _begin(
    f: Function, start: Tensor, first: tuple[float, Tensor] | None, buffers: Buffers | None
) -> tuple[Buffers, Tensor, float, Tensor]:
    if buffers is None:
        work = Buffers(start)
        start = work.take().copy_(start)
    else:
        work = buffers
        work.keep(start, *([] if first is None else [first[1]]))
    value, g = f(start, True) if first is None else first
    assert g is not None
    return work, start, value, g


def _done(gap: float | None, top: float, base: float, relative_tol: float, dtype: torch.dtype) -> bool:
    """Tell whether the gap is below a share of the increase, or below rounding error."""
    if gap is None or relative_tol <= 0:
        return False
    noise = 4 * torch.finfo(dtype).eps * (abs(base) + abs(top))
    return gap <= relative_tol * (top - base) + noise


def _finish(
    work: Buffers,
    best: tuple[float, Tensor, Tensor],
    history: list[float],
    gap: float | None,
    base: float,
    relative_tol: float,
    slope: float | None,
) -> Ascent:
    value, point, _ = best
    work.give(point)
    converged = _done(gap, value, base, relative_tol, point.dtype) if relative_tol > 0 else None
    return Ascent(point, value, tuple(history), gap, converged, slope)
