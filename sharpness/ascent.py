"""Auto-PGD: maximise a function over a ball around the origin of a Euclidean space. Knows nothing of networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Ascent", "auto_pgd", "checkpoints"]

#: ``f(x, need_gradient) -> (value, gradient or None)``
Function = Callable[[Tensor, bool], tuple[float, Tensor | None]]


@dataclass(frozen=True)
class Ascent:
    """What an ascent found.

    Attributes
    ----------
    point : Tensor
        The best iterate.
    value : float
        The function there.
    history : tuple of float
        Values at all iterates, the start included.
    """

    point: Tensor
    value: float
    history: tuple[float, ...]


def checkpoints(steps: int) -> list[int]:
    """Give the iterations at which Auto-PGD reconsiders its step size.

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


def auto_pgd(
    f: Function,
    start: Tensor,
    radius: float,
    steps: int,
    *,
    first: tuple[float, Tensor] | None = None,
    callback: Callable[[float, float], None] | None = None,
) -> Ascent:
    r"""Maximise f over the ball of a radius by Auto-PGD (L2 form).

    With step size η (at first 2ρ), P the projection on the ball, and α = 1 at the first step, 0.75 after it:

    .. math:: z = P(ξ + η\, g/\|g\|), \qquad ξ^+ = P(ξ + α(z - ξ) + (1 - α)(ξ - ξ_{prev})).

    At the check-points the step is halved, and the ascent restarts from the best iterate, if fewer than three in four
    steps raised f, or if neither the step nor the best value changed since the last check-point.

    Parameters
    ----------
    f : callable
        ``f(x, need_gradient) -> (value, gradient)``. If f has a natural subspace (horizontal vectors), gradients must
        lie in it: every iterate is then a linear combination of ``start`` and gradients, and needs no projection.
    start : Tensor
        (dim,), within the ball.
    radius, steps
        ρ and the number of steps; f is called steps + 1 times, once less with ``first``.
    first : (float, Tensor), optional
        Value and gradient at ``start``, if known.
    callback : callable, optional
        Called with (value, best value) after every step.

    Returns
    -------
    Ascent

    Notes
    -----
    Croce and Hein 2020, Algorithm 1; paper, Algorithm 1, where lines 5–6 and 16–17 pair the loss with the wrong
    iterate and line 21 restarts the weights in place of the tangent vector.
    """
    xi = start
    if first is None:
        value, found = f(xi, True)
        assert found is not None
        g = found
    else:
        value, g = first
    best, best_value, best_g = xi, value, g
    history = [value]
    previous = xi
    eta = 2 * radius
    marks = set(checkpoints(steps))
    last_mark, raised, halved, best_at_mark = 0, 0, False, best_value
    # A point on the sphere is on it up to rounding: do not scale it again.
    slack = 1 + 4 * torch.finfo(xi.dtype).eps
    for k in range(1, steps + 1):
        gg, xx, pp = _dot(g, g), _dot(xi, xi), _dot(previous, previous)
        xg, pg, xp = _dot(xi, g), _dot(previous, g), _dot(xi, previous)
        push = eta / (math.sqrt(gg) + 1e-12)
        z_norm = math.sqrt(max(xx + 2 * push * xg + push**2 * gg, 0.0))
        shrink = min(1.0, radius / z_norm) if z_norm > radius * slack else 1.0
        alpha = 1.0 if k == 1 else 0.75
        a, b, c = 2 - 2 * alpha + alpha * shrink, alpha - 1, alpha * shrink * push
        square = a * a * xx + b * b * pp + c * c * gg + 2 * (a * b * xp + a * c * xg + b * c * pg)
        norm = math.sqrt(max(square, 0.0))
        if norm > radius * slack:
            a, b, c = (v * radius / norm for v in (a, b, c))
        new = torch.mul(xi, a).add_(g, alpha=c)
        if b:
            new.add_(previous, alpha=b)
        previous, xi = xi, new
        new_value, found = f(xi, k < steps)
        raised += new_value > value
        value = new_value
        g = found if found is not None else g
        history.append(value)
        if value > best_value:
            best, best_value, best_g = xi, value, g
        if k in marks:
            stuck = not halved and best_value == best_at_mark
            halved = raised < 0.75 * (k - last_mark) or stuck
            if halved:
                eta /= 2
                xi, value, g, previous = best, best_value, best_g, best
            last_mark, raised, best_at_mark = k, 0, best_value
        if callback is not None:
            callback(value, best_value)
    return Ascent(best, best_value, tuple(history))


def _dot(x: Tensor, y: Tensor) -> float:
    return float(torch.dot(x, y))
