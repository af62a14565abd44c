"""Auto-PGD: maximise a function over a ball around the origin of a Euclidean space. Knows nothing of networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Ascent", "Buffers", "auto_pgd", "checkpoints"]

#: ``f(x, out) -> value``; writes the gradient at x into ``out`` unless that is None
Function = Callable[[Tensor, Tensor | None], float]
#: Elements of a vector that are worked on at a time on a CPU, so that they stay in its cache.
_CHUNK = 2**18


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
    buffers: Buffers | None = None,
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
        ``f(x, out) -> value``, which writes the gradient into ``out``, (dim,), unless it is None. If f has a natural
        subspace (horizontal vectors), gradients must lie in it: every iterate is then a linear combination of
        ``start`` and gradients, and needs no projection.
    start : Tensor
        (dim,), within the ball.
    radius, steps
        ρ and the number of steps; f is called steps + 1 times, once less with ``first``.
    first : (float, Tensor), optional
        Value and gradient at ``start``, if known.
    buffers : Buffers, optional
        Vectors to work in, kept from one ascent to the next. The result's point is taken out of them.
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
    work = Buffers(start) if buffers is None else buffers
    work.keep()
    xi = work.take()
    xi.copy_(start)
    if first is None:
        g = work.take()
        value = f(xi, g)
    else:
        value, g = first
    xx = _dots((xi,), xi)[0]
    gg, xg = _dots((g, xi), g)
    previous, pp, xp, pg = xi, xx, xx, xg
    best = (value, xi, g, xx, gg, xg)
    history = [value]
    eta = 2 * radius
    marks = set(checkpoints(steps))
    last_mark, raised, halved, best_at_mark = 0, 0, False, value
    # A point on the sphere is on it up to rounding: do not scale it again.
    slack = 1 + 4 * torch.finfo(start.dtype).eps
    for k in range(1, steps + 1):
        push = eta / (math.sqrt(gg) + 1e-12)
        z_norm = math.sqrt(max(xx + 2 * push * xg + push**2 * gg, 0.0))
        shrink = min(1.0, radius / z_norm) if z_norm > radius * slack else 1.0
        alpha = 1.0 if k == 1 else 0.75
        a, b, c = 2 - 2 * alpha + alpha * shrink, alpha - 1, alpha * shrink * push
        square = max(a * a * xx + b * b * pp + c * c * gg + 2 * (a * b * xp + a * c * xg + b * c * pg), 0.0)
        if math.sqrt(square) > radius * slack:
            scale = radius / math.sqrt(square)
            a, b, c, square = a * scale, b * scale, c * scale, radius**2
        new = previous if previous is not xi and previous is not best[1] else work.take()
        _combine_(new, (xi, a), (previous, b), (g, c))
        # Every norm and inner product of iterates follows from those of the vectors they are made of.
        previous, xi, pp, xp, xx = xi, new, xx, a * xx + b * xp + c * xg, square
        work.keep(xi, previous, best[1], best[2])
        last = k == steps
        g = best[2] if last else work.take()
        new_value = f(xi, None if last else g)
        raised += new_value > value
        value = new_value
        history.append(value)
        if not last:
            gg, xg, pg = _dots((g, xi, previous), g)
        if value > best[0]:
            best = (value, xi, g, xx, gg, xg)
        work.keep(xi, previous, g, best[1], best[2])
        if k in marks:
            stuck = not halved and best[0] == best_at_mark
            halved = raised < 0.75 * (k - last_mark) or stuck
            if halved:
                eta /= 2
                value, xi, g, xx, gg, xg = best
                previous, pp, xp, pg = xi, xx, xx, xg
                work.keep(xi, g)
            last_mark, raised, best_at_mark = k, 0, best[0]
        if callback is not None:
            callback(value, best[0])
    work.give(best[1])
    return Ascent(best[1], best[0], tuple(history))


class Buffers:
    """Vectors that are written again and again: large allocations cost as much as the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._all, self._free = like, list[Tensor](), list[Tensor]()

    def take(self) -> Tensor:
        """Give a vector with any content."""
        if not self._free:
            self._free.append(torch.empty_like(self._like))
            self._all.append(self._free[-1])
        return self._free.pop()

    def keep(self, *needed: Tensor) -> None:
        """Take back every vector but these."""
        ids = {id(t) for t in needed}
        self._free = [t for t in self._all if id(t) not in ids]

    def give(self, vector: Tensor) -> None:
        """Hand a vector over: it is not written again, until :meth:`adopt` brings it back."""
        self._all = [t for t in self._all if t is not vector]

    def adopt(self, vector: Tensor) -> None:
        """Take a vector over that nobody else needs any more."""
        self._all.append(vector)


def _chunks(count: int, device: torch.device) -> range:
    return range(0, count, _CHUNK if device.type == "cpu" else max(count, 1))


def _dots(vectors: tuple[Tensor, ...], y: Tensor) -> list[float]:
    """Inner products of several vectors with one, in one pass, summed over chunks in double precision."""
    steps = _chunks(y.numel(), y.device)
    size = steps.step
    totals = torch.zeros(len(vectors), dtype=torch.float64, device=y.device)
    for i in steps:
        part = y[i : i + size]
        totals += torch.stack([torch.dot(v[i : i + size], part) for v in vectors])
    return [float(t) for t in totals.tolist()]


def _combine_(out: Tensor, *terms: tuple[Tensor, float]) -> None:
    """Write a linear combination, in one pass; ``out`` may be one of its vectors."""
    steps = _chunks(out.numel(), out.device)
    size = steps.step
    first, *rest = sorted(terms, key=lambda t: t[0] is not out)
    for i in steps:
        part = out[i : i + size]
        torch.mul(first[0][i : i + size], first[1], out=part)
        for vector, weight in rest:
            if weight:
                part.add_(vector[i : i + size], alpha=weight)
