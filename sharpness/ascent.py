r"""Maximisation of a function over the ball :math:`\|x\|_2 \le ρ` of a Euclidean space, independent of networks.

The **generalised power method** moves to the point of the ball in the direction of the gradient g at the best point so
far,

.. math:: y = ρ\, g/\|g\|, \qquad y \leftarrow y + \tfrac14 (x - x_{prev}),\quad
          x^+ = ω y + (1 - ω) x \quad \text{(each time scaled to length ρ)}

with the momentum term only after a rise. The damping ω starts at 1, is halved after every decrease and multiplied by
1.2 after every increase. For a convex function the plain iteration (no momentum, ω = 1) never decreases. The undamped
iteration is that of Journée, Nesterov, Richtárik, Sepulchre 2010.

**Auto-PGD**, with step size η (initially 2ρ), P the projection onto the ball, and α = 1 at the first step, 0.75 after
it, is

.. math:: z = P(x + η\, g/\|g\|), \qquad x^+ = P(x + α(z - x) + (1 - α)(x - x_{prev})).

At the check-points the step is halved, and the ascent restarts from the best iterate, if fewer than three in four steps
raised the function, or if neither the step nor the best value changed since the last check-point. Croce and Hein 2020,
Algorithm 1; paper, Algorithm 1, where lines 5–6 and 16–17 pair the loss with the wrong iterate and line 21 restarts the
weights instead of the tangent vector.

Every iterate is a linear combination of the last two and a gradient, so all lengths follow from their Gram matrix: a
step takes one pass over the vectors to compute that and one to write. Combinations of horizontal vectors are
horizontal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller

import numpy as np
import torch
from torch import Tensor

from .distributed import World

__all__ = ["ASCENTS", "Ascent", "auto_pgd", "power"]

#: ``f(x, out) -> value``, which writes the gradient to ``out``, (dim,), unless that is None.
Function = Callable[[Tensor, Tensor | None], float]
#: Number of elements of a vector that are processed at a time on a CPU, so that they stay in its cache.
_CHUNK = 2**18
#: Momentum of the power iteration.
_MOMENTUM = 0.25


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
        Outward derivative of f, :math:`\langle \nabla f(x), x \rangle / \|x\|`, at the best point where the gradient is
        known.
    inward : bool
        Whether there may be larger values inside the ball: the slope is negative, or f rose nowhere above its value at
        the origin.

    Examples
    --------
    The largest value of :math:`x_1 + x_2` in the unit ball is √2; a gap of 0 says that no point of the ball is better
    to first order:

    >>> import torch
    >>> def f(x, out):
    ...     return float(x.sum()) if out is None else float(out.fill_(1) @ x)
    >>> found = power(f, torch.zeros(2), 1.0, 20, relative_tol=1e-3)
    >>> round(found.value, 4), len(found.history), abs(found.fw_gap) < 1e-6, found.converged
    (1.4142, 2, True, True)
    """

    point: Tensor
    value: float
    history: tuple[float, ...]
    fw_gap: float | None
    converged: bool | None
    slope: float | None
    inward: bool


def power(
    f: Function, start: Tensor, radius: float, steps: int, *,
    relative_tol: float = 0.0, base: float | None = None, world: World | None = None,
    known: list[Tensor] | None = None, seen: Callable[[list[float]], None] | None = None,
) -> Ascent:  # fmt: skip
    """Maximise f over a ball by the generalised power method, see :mod:`sharpness.ascent`.

    Parameters
    ----------
    f : callable
        ``f(x, out) -> value``, which writes the gradient to ``out``, (dim,), unless that is None. Every iterate is a
        linear combination of ``start`` and gradients: where these are horizontal, no projection is needed.
    start : Tensor
        (dim,), the origin or a point of the ball's surface; it may be overwritten.
    radius : float
        ρ.
    steps : int
        Largest number of steps; f is called at most steps + 1 times, first at ``start``.
    relative_tol : float
        Stop once the Frank–Wolfe gap at the best iterate is below this share of the increase; 0 never stops.
    base : float, optional
        Value at the origin, relative to which the increase is measured; by default the value at ``start``.
    world : World, optional
        The processes over which vectors are spread.
    known : list of Tensor, optional
        With the gradient at ``start``, where f is ``base``, if that is known; it is taken out, and may be overwritten.
    seen : callable, optional
        Gets the values so far after every step.

    Returns
    -------
    Ascent

    Examples
    --------
    On the unit sphere the largest value of a quadratic form is its largest eigenvalue:

    >>> import torch
    >>> a = torch.tensor([1.0, 2.0, 5.0])
    >>> def f(x, out):
    ...     return float(a @ x.square()) if out is None else float(torch.mul(2 * a, x, out=out) @ x / 2)
    >>> round(power(f, torch.ones(3) / 3**0.5, 1.0, 20).value, 3)
    5.0
    """
    top, g = (base, known.pop()) if known and base is not None else _begin(f, start)
    best, history, base = start, [top], top if base is None else base
    gram = gram_matrix(g, best, world=world)
    # The origin is not on the surface: the first iterate replaces it, whatever its value.
    begun, momentum, omega = gram[1, 1] > 0, False, 1.0
    gap: float | None
    gap, slope, done = _optimality(gram, radius, top, base, relative_tol, best.dtype)
    # After a rise the best point before this one, else memory alone, of weight 0; each vector is as large as the model.
    others = [] if begun else [start]
    for k in range(1, steps + 1):
        if begun and done:
            break
        weights = _power_weights(gram, radius, omega, momentum=momentum, dtype=best.dtype)
        x = _combine_(others[0] if others else torch.empty_like(best), (g, best, *others), weights)
        out = torch.empty_like(best) if k < steps else None  # kept, it would take memory beside the pass's activations
        value = f(x, out)
        history.append(value)
        if seen is not None:
            seen(history)
        if not begun or value > top:
            others, momentum = ([best], True) if begun else ([], False)
            omega, begun, best, top, gap, done = min(1.0, 1.2 * omega), True, x, value, None, False
            if out is not None:
                g = out
                gram = gram_matrix(g, best, *others, world=world)
                gap, slope, done = _optimality(gram, radius, top, base, relative_tol, best.dtype)
        else:
            others, momentum, omega = [x], False, omega / 2
    converged, inward = done if relative_tol > 0 else None, top <= base or (slope is not None and slope < 0)
    return Ascent(best, top, tuple(history), gap, converged, slope, inward)


def _power_weights(gram: np.ndarray, radius: float, omega: float, *, momentum: bool, dtype: torch.dtype) -> list[float]:
    """Return the weights of the gradient, the best point and, with momentum, the one before it in the next iterate."""
    gradient, best, *before = np.eye(len(gram))

    def onto(c: np.ndarray) -> np.ndarray:
        return c * (radius / (math.sqrt(max(c @ gram @ c, 0.0)) + 1e-300))

    if not radius < 0.1 * torch.finfo(dtype).max * math.sqrt(gram[0, 0]):  # the gradient is practically zero
        return list(best)
    c = gradient * (radius / math.sqrt(gram[0, 0]))
    if momentum:
        c = onto(c + _MOMENTUM * (best - before[0]))
    if omega < 1:
        mixed = omega * c + (1 - omega) * best
        if mixed @ gram @ mixed < (1e-3 * radius) ** 2:  # opposite points: their midpoint has no direction
            mixed = 0.5 * omega * c + (1 - 0.5 * omega) * best
        c = onto(mixed)
    return list(c)


def auto_pgd(
    f: Function, start: Tensor, radius: float, steps: int, *,
    relative_tol: float = 0.0, base: float | None = None, world: World | None = None,
    known: list[Tensor] | None = None, seen: Callable[[list[float]], None] | None = None,
) -> Ascent:  # fmt: skip
    """Maximise f over a ball by Auto-PGD, see :mod:`sharpness.ascent`.

    Parameters
    ----------
    f, start, radius, steps, relative_tol, base, world, known, seen
        As for :func:`power`; ``start`` may lie anywhere in the ball. The check-points depend on ``steps``.

    Returns
    -------
    Ascent
        With the best of all iterates.

    Examples
    --------
    A linear function is largest where its gradient points to:

    >>> import torch
    >>> g = torch.tensor([3.0, -4.0])
    >>> def f(x, out):
    ...     return float(g @ x) if out is None else float(out.copy_(g) @ x)
    >>> auto_pgd(f, torch.zeros(2), 0.5, steps=20).point
    tensor([ 0.3000, -0.4000])
    """
    x = previous = best = start
    value, g = (base, known.pop()) if known and base is not None else _begin(f, start)
    gradients, best_g, top, top_at_mark = (g, torch.empty_like(start)), g, value, value  # of the last and best iterates
    history, base = [value], value if base is None else base
    fits, gap, slope, done = True, None, None, False  # whether best_g belongs to the best iterate; what it says
    eta, marks = 2 * radius, set(checkpoints(steps))
    last_mark, raised, halved = 0, 0, False
    for k in range(1, steps + 1):
        if done:
            break
        weights = _pgd_weights(gram_matrix(x, previous, g, world=world), radius, eta, alpha=1.0 if k == 1 else 0.75)
        out = torch.empty_like(x) if previous is x or previous is best else previous
        previous, x = x, _combine_(out, (x, previous, g), weights)
        del out  # what is not needed is freed: each vector is as large as the model
        wanted = k < steps
        g = gradients[int(best_g is gradients[0])] if wanted else best_g
        new = f(x, g if wanted else None)
        raised += new > value
        value = new
        history.append(value)
        if seen is not None:
            seen(history)
        if value > top:
            best, top, best_g, fits, gap, done = x, value, g, wanted, None, False
            if fits:
                gram = gram_matrix(g, x, world=world)
                gap, slope, done = _optimality(gram, radius, top, base, relative_tol, x.dtype)
        if k in marks:
            stuck = not halved and top == top_at_mark
            halved = raised < 0.75 * (k - last_mark) or stuck
            if halved:
                eta /= 2
                value, x, previous, g = top, best, best, best_g
            last_mark, raised, top_at_mark = k, 0, top
    if gap is None and fits:
        gram = gram_matrix(best_g, best, world=world)
        gap, slope, done = _optimality(gram, radius, top, base, relative_tol, x.dtype)
    converged, inward = done if relative_tol > 0 else None, top <= base or (slope is not None and slope < 0)
    return Ascent(best, top, tuple(history), gap, converged, slope, inward)


def _pgd_weights(gram: np.ndarray, radius: float, eta: float, *, alpha: float) -> list[float]:
    """Return the weights of the last two iterates and the gradient in the next one."""

    def project(c: np.ndarray) -> np.ndarray:
        length = math.sqrt(max(c @ gram @ c, 0.0))
        return c * min(1.0, radius / length) if length > 0 else c

    here, before, gradient = np.eye(3)
    z = project(here + eta / (math.sqrt(gram[2, 2]) + 1e-12) * gradient)
    return list(project(here + alpha * (z - here) + (1 - alpha) * (here - before)))


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


def _begin(f: Function, start: Tensor) -> tuple[float, Tensor]:
    """Return the value and the gradient at the start."""
    gradient = torch.empty_like(start)
    return f(start, gradient), gradient


def _optimality(
    gram: np.ndarray, radius: float, top: float, base: float, relative_tol: float, dtype: torch.dtype
) -> tuple[float, float | None, bool]:
    """Return what the Gram matrix of a gradient and its point says.

    That is the Frank–Wolfe gap, the slope, and whether the gap is below a share of the increase, or below rounding
    error.
    """
    slope = float(gram[0, 1] / math.sqrt(gram[1, 1])) if gram[1, 1] > 0 else None
    gap = float(radius * math.sqrt(gram[0, 0]) - gram[0, 1])
    noise = 4 * torch.finfo(dtype).eps * (abs(base) + abs(top))
    return gap, slope, relative_tol > 0 and gap <= relative_tol * (top - base) + noise


# -- arithmetic on vectors as long as a model, in few passes -----------------------------------------------------------


def _chunks(*vectors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut vectors into parts that stay in a CPU's cache; on a GPU they stay whole."""
    step = _CHUNK if vectors[0].device.type == "cpu" else max(len(vectors[0]), 1)
    return list(zip(*map(methodcaller("split", step), vectors), strict=True))


def gram_matrix(*vectors: Tensor, world: World | None = None) -> np.ndarray:
    """Compute the inner products of all pairs, in one pass, summed over chunks and processes in double precision."""
    k = len(vectors)
    rows, columns = np.triu_indices(k)
    pairs, gram = list(zip(rows, columns, strict=True)), np.zeros((k, k))
    products = torch.stack([torch.dot(parts[i], parts[j]) for parts in _chunks(*vectors) for i, j in pairs])
    totals = products.cpu().double().view(-1, len(pairs)).sum(0)
    gram[rows, columns] = gram[columns, rows] = (totals if world is None else world.sum(totals)).tolist()
    return gram


def _combine_(out: Tensor, vectors: tuple[Tensor, ...], weights: list[float]) -> Tensor:
    """Write a linear combination, in one pass; ``out`` may be a vector, and those without a weight count 0."""
    vectors = vectors[: len(weights)]
    head = next((k for k, vector in enumerate(vectors) if vector is out), 0)  # what is overwritten is read first
    for part, *parts in _chunks(out, *vectors):
        torch.mul(parts[head], weights[head], out=part)
        for k, vector in enumerate(parts):
            if k != head and weights[k]:
                part.add_(vector, alpha=weights[k])
    return out
