"""Maximise a function over a ball around the origin of a Euclidean space. Knows nothing of networks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["ASCENTS", "Ascent", "Ball", "CubeBall", "RoundBall", "auto_pgd", "power"]

#: ``f(x, out) -> value``; writes the gradient at x into ``out`` unless that is None
Function = Callable[[Tensor, Tensor | None], float]
#: Elements of a vector that are worked on at a time on a CPU, so that they stay in its cache.
_CHUNK = 2**18


@dataclass(frozen=True)
class Ascent:
    r"""What an ascent found.

    Attributes
    ----------
    point : Tensor
        (dim,), the best iterate; dtype and device of the start.
    value : float
        The function there.
    history : tuple of float
        Values at all iterates, the start included.
    gap : float or None
        :math:`\max_{\|y\| \le ρ} \langle \nabla f(x), y - x \rangle` at the best iterate: what a first-order step
        still offers, 0 at a maximum over the ball (the Frank–Wolfe gap). None if the gradient there is not known,
        because the best iterate came last.
    converged : bool or None
        Whether the gap is below the tolerance; None if there was no tolerance.
    slope : float or None
        Derivative of f outwards, :math:`\langle \nabla f(x), x \rangle / \|x\|`, at the best point of the round ball
        where the gradient is known. Where it is negative, there are larger values inside the ball.

    Examples
    --------
    The largest value of :math:`x_1 + x_2` in the unit ball is √2; a gap of 0 says that no point of the ball is better
    to first order:

    >>> import torch
    >>> def f(x, out):
    ...     if out is not None:
    ...         out.fill_(1.0)
    ...     return float(x.sum())
    >>> found = power(f, torch.zeros(2), RoundBall(1.0), 20, tol=1e-3)
    >>> round(found.value, 4), len(found.history), abs(found.gap) < 1e-6, found.converged
    (1.4142, 2, True, True)
    """

    point: Tensor
    value: float
    history: tuple[float, ...]
    gap: float | None
    converged: bool | None
    slope: float | None = None


# -- balls -----------------------------------------------------------------------------------------------------------


class Ball(ABC):
    r"""A ball around the origin: what the ascents need of its shape.

    Parameters
    ----------
    radius : float
        ρ, in the norm whose ball it is.

    Notes
    -----
    All vectors are (dim,), of one dtype and device. Methods that end in an underscore write to their first tensor.

    Examples
    --------
    The same gradient offers more in the cube, which contains the round ball:

    >>> import torch
    >>> g = torch.tensor([3.0, -4.0])
    >>> RoundBall(0.5).reach(g), CubeBall(0.5).reach(g)
    (2.5, 3.5)
    """

    def __init__(self, radius: float) -> None:
        self.radius = radius

    @abstractmethod
    def norm(self, x: Tensor) -> float:
        """Measure a vector, (dim,), by the norm whose ball this is."""

    @abstractmethod
    def reach(self, g: Tensor) -> float:
        r"""Compute :math:`\max_{\|y\| \le ρ} \langle g, y \rangle`, ρ times the dual norm of g, (dim,)."""

    @abstractmethod
    def to_sphere_(self, x: Tensor) -> Tensor:
        """Move a vector other than 0 to the ball's surface, in place."""

    @abstractmethod
    def step_(self, out: Tensor, x: Tensor, previous: Tensor, g: Tensor, eta: float, alpha: float) -> None:
        r"""Write Auto-PGD's next iterate: :math:`z = P(x + η d)`, :math:`P(x + α(z - x) + (1 - α)(x - x_{prev}))`.

        d is the steepest direction of unit length, P the projection on the ball.

        Parameters
        ----------
        out : Tensor
            (dim,), where the iterate is written; may be ``previous``.
        x, previous : Tensor
            (dim,), the last two iterates.
        g : Tensor
            (dim,), the gradient at x.
        eta, alpha : float
            Step size η, and the weight α of the step against the momentum.
        """

    @abstractmethod
    def view(self, g: Tensor, best: Tensor, other: Tensor | None) -> View:
        """Look at the best point so far, its gradient and, if there was one, the best point before it.

        Parameters
        ----------
        g : Tensor
            (dim,), the gradient at ``best``.
        best : Tensor
            (dim,)
        other : Tensor or None
            (dim,), for the momentum.

        Returns
        -------
        View
        """


class View(ABC):
    """What the power method sees from the best point so far.

    Attributes
    ----------
    gap : float
        The Frank–Wolfe gap there.
    slope : float or None
        The derivative outwards there; None at the origin, and for balls that are not round.
    """

    gap: float
    slope: float | None = None

    @abstractmethod
    def propose_(self, out: Tensor, omega: float, *, momentum: bool) -> None:
        r"""Write the next iterate to ``out``, (dim,).

        :math:`y = \arg\max_{\|y\| \le ρ} \langle g, y \rangle`, pushed on by a quarter of best − other if asked for,
        then drawn towards the best point: :math:`ω y + (1 - ω)\, best`; each time back to the surface.
        """


#: Weight of the last move in the power iteration.
_MOMENTUM = 0.25


class RoundBall(Ball):
    r"""The ball :math:`\|x\|_2 \le ρ`.

    Every iterate is a linear combination of two earlier ones and a gradient, so all norms follow from their Gram
    matrix: a step is one pass for that and one that writes. Such combinations of horizontal vectors are horizontal.

    Parameters
    ----------
    radius : float
        ρ.

    Examples
    --------
    >>> import torch
    >>> RoundBall(0.5).to_sphere_(torch.tensor([3.0, 4.0]))
    tensor([0.3000, 0.4000])
    """

    def norm(self, x: Tensor) -> float:
        """Measure a vector by its Euclidean norm."""
        return math.sqrt(float(_gram(x)[0, 0]))

    def reach(self, g: Tensor) -> float:
        r"""Compute :math:`ρ \|g\|_2`."""
        return self.radius * self.norm(g)

    def to_sphere_(self, x: Tensor) -> Tensor:
        """Scale a vector other than 0 to length ρ, in place."""
        return x.mul_(self.radius / self.norm(x))

    def step_(self, out: Tensor, x: Tensor, previous: Tensor, g: Tensor, eta: float, alpha: float) -> None:
        """Write Auto-PGD's next iterate, see :meth:`Ball.step_`; the steepest direction is g/‖g‖."""
        gram = _gram(x, previous, g)

        def project(c: np.ndarray) -> np.ndarray:
            length = math.sqrt(max(c @ gram @ c, 0.0))
            return c * min(1.0, self.radius / length) if length > 0 else c

        here, before = np.array([1.0, 0, 0]), np.array([0, 1.0, 0])
        z = project(here + np.array([0, 0, eta / (math.sqrt(gram[2, 2]) + 1e-12)]))
        c = project(here + alpha * (z - here) + (1 - alpha) * (here - before))
        _combine_(out, (x, c[0]), (previous, c[1]), (g, c[2]))

    def view(self, g: Tensor, best: Tensor, other: Tensor | None) -> View:
        """Look at the best point so far, see :meth:`Ball.view`."""
        return _RoundView(self.radius, g, best, other)


class _RoundView(View):
    def __init__(self, radius: float, g: Tensor, best: Tensor, other: Tensor | None) -> None:
        self._radius = radius
        self._vectors = (g, best) if other is None else (g, best, other)
        self._gram = _gram(*self._vectors)
        self.gap = float(radius * math.sqrt(self._gram[0, 0]) - self._gram[0, 1])
        if self._gram[1, 1] > 0:
            self.slope = float(self._gram[0, 1] / math.sqrt(self._gram[1, 1]))

    def _onto(self, c: np.ndarray) -> np.ndarray:
        return c * (self._radius / (math.sqrt(max(c @ self._gram @ c, 0.0)) + 1e-300))

    def propose_(self, out: Tensor, omega: float, *, momentum: bool) -> None:
        unit = np.eye(len(self._vectors))
        largest = 0.1 * torch.finfo(self._vectors[0].dtype).max
        if not self._radius < largest * math.sqrt(self._gram[0, 0]):  # no gradient to speak of: nowhere to go
            out.copy_(self._vectors[1])
            return
        c = self._onto(unit[0])
        if momentum:
            c = self._onto(c + _MOMENTUM * (unit[1] - unit[2]))
        if omega < 1:
            mixed = omega * c + (1 - omega) * unit[1]
            if mixed @ self._gram @ mixed < (1e-3 * self._radius) ** 2:  # opposite points: halfway is no direction
                mixed = 0.5 * omega * c + (1 - 0.5 * omega) * unit[1]
            c = self._onto(mixed)
        _combine_(out, *zip(self._vectors, c.tolist(), strict=True))


class CubeBall(Ball):
    r"""The ball :math:`\|x\|_\infty \le ρ`.

    With the adaptive metric it changes every weight by a fraction ρ of its size at most.

    Parameters
    ----------
    radius : float
        ρ.

    Notes
    -----
    Andriushchenko, Croce, Müller, Hein, Flammarion 2023 measure sharpness over this ball too.

    Examples
    --------
    >>> import torch
    >>> CubeBall(0.5).to_sphere_(torch.tensor([3.0, -4.0]))
    tensor([ 0.5000, -0.5000])
    """

    def norm(self, x: Tensor) -> float:
        """Measure a vector by its largest entry."""
        return float(torch.linalg.vector_norm(x, math.inf))

    def reach(self, g: Tensor) -> float:
        r"""Compute :math:`ρ \|g\|_1`."""
        return self.radius * float(torch.linalg.vector_norm(g, 1, dtype=torch.float64))

    def to_sphere_(self, x: Tensor) -> Tensor:
        """Move a vector to the corner ρ sign(x), in place."""
        return x.sign_().mul_(self.radius)

    def step_(self, out: Tensor, x: Tensor, previous: Tensor, g: Tensor, eta: float, alpha: float) -> None:
        """Write Auto-PGD's next iterate, see :meth:`Ball.step_`; the steepest direction is sign(g)."""
        for o, here, before, slope in _chunked(out, x, previous, g):
            z = (here + eta * slope.sign()).clamp_(-self.radius, self.radius)
            new = here + alpha * (z - here) + (1 - alpha) * (here - before)
            o.copy_(new.clamp_(-self.radius, self.radius))

    def view(self, g: Tensor, best: Tensor, other: Tensor | None) -> View:
        """Look at the best point so far, see :meth:`Ball.view`."""
        return _CubeView(self.radius, g, best, other, self.reach(g) - float(_gram(g, best)[0, 1]))


class _CubeView(View):
    def __init__(self, radius: float, g: Tensor, best: Tensor, other: Tensor | None, gap: float) -> None:
        self._radius, self._g, self._best, self._other, self.gap = radius, g, best, other, gap

    def propose_(self, out: Tensor, omega: float, *, momentum: bool) -> None:
        last = self._other if momentum and self._other is not None else self._best
        for o, slope, top, before in _chunked(out, self._g, self._best, last):
            y = (self._radius * slope.sign() + _MOMENTUM * (top - before)).clamp_(-self._radius, self._radius)
            o.copy_(torch.lerp(top, y, omega))


# -- ascents ---------------------------------------------------------------------------------------------------------


def power(
    f: Function,
    start: Tensor,
    ball: Ball,
    steps: int,
    *,
    tol: float = 0.0,
    base: float | None = None,
    first: tuple[float, Tensor] | None = None,
    buffers: Buffers | None = None,
    callback: Callable[[float, float], None] | None = None,
) -> Ascent:
    r"""Maximise f over a ball by the generalised power method.

    The next iterate is where the gradient at the best point so far points to,

    .. math:: y = ρ\, g/\|g\|, \qquad y \leftarrow y + \tfrac14 (x - x_{prev}),\quad
              x^+ = ω y + (1 - ω) x \quad \text{(each time scaled to length ρ)}

    (for the round ball; in general y is the ball's maximiser of ⟨g, y⟩), with the momentum term only after a rise. The
    damping ω, at first 1, is halved by every fall and recovers by 1.2 with every rise. For a convex f the plain
    iteration (no momentum, ω = 1) never falls.

    Parameters
    ----------
    f : callable
        ``f(x, out) -> value``, which writes the gradient into ``out``, (dim,), unless it is None. If f has a natural
        subspace (horizontal vectors), gradients must lie in it: every iterate is then a linear combination of
        ``start`` and gradients, and needs no projection.
    start : Tensor
        (dim,), the origin or a point of the ball's surface; its dtype and device are those of all vectors. One of the
        buffers if there are any; else it is copied.
    ball : Ball
        Where the maximum is sought.
    steps : int
        Upper bound; f is called steps + 1 times at most, once less with ``first``.
    tol : float
        Stop once the gap, see :class:`Ascent`, at the best iterate is below ``tol`` times the rise; 0 never stops.
    base : float, optional
        Value at the origin, from which the rise counts; by default the value at ``start``.
    first : (float, Tensor), optional
        Value and gradient at ``start``, if known. If the gradient is one of the buffers, it is overwritten.
    buffers : Buffers, optional
        Vectors to work in, kept from one ascent to the next; without them the ascent allocates its own. The result's
        point is taken out of them.
    callback : callable, optional
        Called with (value, best value) after every step.

    Returns
    -------
    Ascent
        With the best of all iterates but the origin.

    Notes
    -----
    Journée, Nesterov, Richtárik, Sepulchre 2010, for the undamped iteration; the gap is that of Frank and Wolfe 1956.
    An iterate depends on those before it alone, so a run of more steps continues one of fewer.

    Examples
    --------
    On the unit sphere the largest value of a quadratic form is its largest eigenvalue:

    >>> import torch
    >>> a = torch.tensor([1.0, 2.0, 5.0])
    >>> def f(x, out):
    ...     if out is not None:
    ...         torch.mul(2 * a, x, out=out)
    ...     return float(a @ x.square())
    >>> found = power(f, torch.ones(3) / 3**0.5, RoundBall(1.0), steps=20)
    >>> round(found.value, 3)
    5.0
    """
    work, start, value, g = _begin(f, start, first, buffers)
    history, base = [value], value if base is None else base
    best = (value, start, g)
    view: View | None = ball.view(g, start, None)
    # The origin is no point of the surface: the first iterate takes its place, whatever its value.
    begun = ball.norm(start) > 0
    other, momentum, omega = None, False, 1.0
    slope: float | None = None if view is None else view.slope
    for k in range(1, steps + 1):
        assert view is not None
        if begun and _done(view.gap, best[0], base, tol, start.dtype):
            break
        work.keep(best[1], best[2], *([] if other is None else [other]))
        x = work.take() if other is None else other  # the point before the best is not needed after this
        view.propose_(x, omega, momentum=momentum)
        work.keep(best[1], best[2], x)
        last = k == steps
        g = best[2] if last else work.take()
        value = f(x, None if last else g)
        history.append(value)
        if not begun or value > best[0]:
            other, momentum = (best[1], True) if begun else (None, False)
            omega = min(1.0, 1.2 * omega)
            best, begun = (value, x, g), True
            view = None if last else ball.view(g, x, other)
            slope = slope if view is None else view.slope
        else:
            other, momentum, omega = x, False, omega / 2
        if callback is not None:
            callback(value, best[0])
    return _finish(work, best, history, None if view is None else view.gap, base, tol, slope)


def auto_pgd(
    f: Function,
    start: Tensor,
    ball: Ball,
    steps: int,
    *,
    tol: float = 0.0,
    base: float | None = None,
    first: tuple[float, Tensor] | None = None,
    buffers: Buffers | None = None,
    callback: Callable[[float, float], None] | None = None,
) -> Ascent:
    r"""Maximise f over a ball by Auto-PGD.

    With step size η (at first 2ρ), P the projection on the ball, d the steepest direction of unit length (g/‖g‖ for the
    round ball) and α = 1 at the first step, 0.75 after it:

    .. math:: z = P(x + η d), \qquad x^+ = P(x + α(z - x) + (1 - α)(x - x_{prev})).

    At the check-points the step is halved, and the ascent restarts from the best iterate, if fewer than three in four
    steps raised f, or if neither the step nor the best value changed since the last check-point.

    Parameters
    ----------
    f, start, ball, steps, tol, base, first, buffers, callback
        As for :func:`power`; ``start`` may lie anywhere in the ball. The check-points depend on ``steps``.

    Returns
    -------
    Ascent
        With the best of all iterates.

    Notes
    -----
    Croce and Hein 2020, Algorithm 1; paper, Algorithm 1, where lines 5–6 and 16–17 pair the loss with the wrong
    iterate and line 21 restarts the weights in place of the tangent vector.

    Examples
    --------
    A linear function is largest in the corner of a cube that its gradient points to:

    >>> import torch
    >>> g = torch.tensor([1.0, -2.0])
    >>> def f(x, out):
    ...     if out is not None:
    ...         out.copy_(g)
    ...     return float(g @ x)
    >>> auto_pgd(f, torch.zeros(2), CubeBall(0.1), steps=20).point
    tensor([ 0.1000, -0.1000])
    """
    work, x, value, g = _begin(f, start, first, buffers)
    history, base = [value], value if base is None else base
    previous = x
    best = (value, x, g)
    gap: float | None = None
    slope: float | None = None
    eta = 2 * ball.radius
    marks = set(checkpoints(steps))
    last_mark, raised, halved, best_at_mark = 0, 0, False, value
    for k in range(1, steps + 1):
        if _done(gap, best[0], base, tol, start.dtype):
            break
        work.keep(x, previous, g, best[1], best[2])
        new = work.take() if previous is x or previous is best[1] else previous
        ball.step_(new, x, previous, g, eta, 1.0 if k == 1 else 0.75)
        previous, x = x, new
        work.keep(x, previous, best[1], best[2])
        last = k == steps
        g = best[2] if last else work.take()
        new_value = f(x, None if last else g)
        raised += new_value > value
        value = new_value
        history.append(value)
        if value > best[0]:
            best = (value, x, g)
            gap = None
            if not last:
                view = ball.view(g, x, None)
                gap, slope = view.gap if tol > 0 else None, view.slope
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
    if gap is None and best[1] is not x:  # else the gradient at the best iterate is not known
        gap = ball.view(best[2], best[1], None).gap
    return _finish(work, best, history, gap, base, tol, slope)


#: The ascents by name.
ASCENTS: dict[str, Callable[..., Ascent]] = {"power": power, "apgd": auto_pgd}


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


def _begin(
    f: Function, start: Tensor, first: tuple[float, Tensor] | None, buffers: Buffers | None
) -> tuple[Buffers, Tensor, float, Tensor]:
    if buffers is None:
        work = Buffers(start)
        start = work.take().copy_(start)
    else:
        work = buffers
        work.keep(start, *([] if first is None else [first[1]]))
    if first is None:
        g = work.take()
        value = f(start, g)
    else:
        value, g = first
    return work, start, value, g


def _done(gap: float | None, top: float, base: float, tol: float, dtype: torch.dtype) -> bool:
    """Tell whether a first-order step offers less than ``tol`` of the rise, or than rounding allows to be seen."""
    if gap is None or tol <= 0:
        return False
    noise = 4 * torch.finfo(dtype).eps * (abs(base) + abs(top))
    return gap <= tol * (top - base) + noise


def _finish(
    work: Buffers,
    best: tuple[float, Tensor, Tensor],
    history: list[float],
    gap: float | None,
    base: float,
    tol: float,
    slope: float | None,
) -> Ascent:
    value, point, _ = best
    work.give(point)
    converged = _done(gap, value, base, tol, point.dtype) if tol > 0 else None
    return Ascent(point, value, tuple(history), gap, converged, slope)


# -- vectors ---------------------------------------------------------------------------------------------------------


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
        self._free = [t for t in self._free if t is not vector]

    def adopt(self, vector: Tensor) -> None:
        """Take a vector over that nobody else needs any more."""
        self._all.append(vector)
        self._free.append(vector)


def _chunks(count: int, device: torch.device) -> range:
    return range(0, count, _CHUNK if device.type == "cpu" else max(count, 1))


def _chunked(*vectors: Tensor) -> list[tuple[Tensor, ...]]:
    steps = _chunks(vectors[0].numel(), vectors[0].device)
    return [tuple(v[i : i + steps.step] for v in vectors) for i in steps]


def _gram(*vectors: Tensor) -> np.ndarray:
    """Inner products of all pairs, in one pass, summed over chunks in double precision."""
    k = len(vectors)
    rows, columns = np.triu_indices(k)
    totals = torch.zeros(len(rows), dtype=torch.float64, device=vectors[0].device)
    for parts in _chunked(*vectors):
        totals += torch.stack([torch.dot(parts[i], parts[j]) for i, j in zip(rows, columns, strict=True)])
    gram = np.zeros((k, k))
    gram[rows, columns] = gram[columns, rows] = totals.tolist()
    return gram


def _combine_(out: Tensor, *terms: tuple[Tensor, float]) -> None:
    """Write a linear combination, in one pass; ``out`` may be one of its vectors."""
    first, *rest = sorted(terms, key=lambda t: t[0] is not out)
    for part, head, *tail in _chunked(out, first[0], *(v for v, _ in rest)):
        torch.mul(head, first[1], out=part)
        for vector, (_, weight) in zip(tail, rest, strict=True):
            if weight:
                part.add_(vector, alpha=weight)
