"""The largest loss in a ball: ascents on its sphere from one or several starts, and inside it where needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .ascent import ASCENTS, Ascent
from .batch_loss import BatchLoss, RadiusError
from .search import Search
from .space import WeightSpace
from .statistic import BatchResult, known_of, random_direction, show

__all__ = ["Worst", "WorstResult"]

#: Number of times that the radius is halved to look for a larger loss inside the ball.
_HALVINGS = 12


@dataclass(frozen=True, kw_only=True)
class WorstResult(BatchResult):
    """The largest loss of a batch in a ball.

    Attributes
    ----------
    history : tuple of float
        Loss at every iterate of the best ascent.
    distance : float
        Distance of the worst point from the weights, in the ball's norm: ρ, or less where the loss is larger inside the
        ball.
    random_start : bool
        The gradient at the weights was zero to within rounding, so the ascent began in a random direction.
    fw_gap : float or None
        Frank–Wolfe gap: the first-order estimate of what a further step from the worst point can gain, see
        :class:`sharpness.ascent.Ascent`. None if it is not known, as for a worst point found in a smaller ball.
    converged : bool or None
        Whether the gap is known to be below the tolerance; None without a tolerance.
    num_exited_pairs : int
        Number of pairs whose exact mix geodesic to the worst point would have left the manifold and was shortened.
    """

    history: tuple[float, ...]
    distance: float
    random_start: bool
    fw_gap: float | None
    converged: bool | None
    num_exited_pairs: int

    def inside(self, rho: float) -> WorstResult:
        """Return what it says of a larger ball: how far the search got in its own says nothing of that."""
        return replace(self, rho=rho, fw_gap=None, converged=None if self.converged is None else False)


@dataclass(frozen=True)
class Worst:
    """The largest loss in the ball.

    Attributes
    ----------
    search : Search
        How it is looked for.

    Examples
    --------
    >>> Worst(Search(steps=10, restarts=2)).work
    30
    """

    search: Search = field(default_factory=Search)

    name: ClassVar[str] = "worst"
    title: ClassVar[str] = "sharpness"
    local: ClassVar[bool] = False
    nested: ClassVar[bool] = True

    @property
    def starts(self) -> int:
        """Number of ascents."""
        return self.search.restarts + 1

    @property
    def work(self) -> int:
        """Number of steps of all ascents."""
        return self.search.steps * self.starts

    def measure(
        self, loss: BatchLoss, rho: float, start: int, bar: Any, *, last: bool
    ) -> tuple[BatchResult, Tensor | None]:
        """Look for the largest loss, from the gradient at the weights or from a random direction."""
        space, info = loss.space, torch.finfo(loss.space.dtype)
        if rho > 0.1 * info.max:
            raise RadiusError(f"rho = {rho:g} is too large for {space.dtype}; use a smaller rho")
        flat = rho * loss.slope <= 10 * info.eps * abs(loss.base)
        at_weights = start == 0 and not flat
        climb = _Climb(loss, self.search, rho, bar, loss.base_gradient if at_weights else None)
        if last:
            loss.release_gradient()
        point = (
            space.empty().zero_() if at_weights else _onto(space, random_direction(loss, self.search.seed, start), rho)
        )
        best = climb.in_ball(point)
        point, value, gap, converged = best.point, best.value, best.fw_gap, best.converged
        if value < loss.base:  # the loss never rose from this start: the centre belongs to the ball
            point, value, gap = point.zero_(), loss.base, rho * loss.slope
            converged = flat if self.search.relative_tol else None
        result = WorstResult(
            **known_of(loss, rho), value=value - loss.base, worst_loss=value, history=best.history, fw_gap=gap,
            converged=converged, random_start=flat, distance=space.norm(point),
            num_exited_pairs=space.num_exited_pairs(point),
        )  # fmt: skip
        return result, point


class _Climb:
    """The ascents of the loss of a batch in a ball from one start; the gradient at the weights may be known."""

    def __init__(self, loss: BatchLoss, search: Search, rho: float, bar: Any, gradient: Tensor | None) -> None:
        self.loss, self.search, self.rho, self.bar = loss, search, rho, bar
        self._known = [] if gradient is None else [gradient]
        self._values: list[float] = []

    def in_ball(self, point: Tensor) -> Ascent:
        """Look on the sphere, and inside if the loss rises nowhere on it, or falls outwards at the best point.

        The search goes on on spheres of half the radius each time, since a bounded loss may oscillate, and by Auto-PGD
        in the whole ball from the best point of these.
        """
        space, base, search = self.loss.space, self.loss.base, self.search
        best, halving = self._ascend(search.ascent, point, self.rho), 0
        del point
        while best.value <= base or (best.slope is not None and best.slope < 0):
            if space.norm(best.point) == 0 or halving == _HALVINGS:
                break
            halving += 1
            radius = self.rho / 2**halving
            found = self._further(search.ascent, _onto(space, best.point.clone(), radius), radius)
            if found.value <= best.value and best.value > base:
                break
            best = found if found.value > best.value else best
        return self._further("apgd", best.point.clone(), self.rho) if halving else best

    def _further(self, ascent: str, point: Tensor, radius: float) -> Ascent:
        """Climb again, which no progress bar had foreseen."""
        self.bar.total = self.bar.total and self.bar.total + self.search.steps
        return self._ascend(ascent, point, radius)

    def _ascend(self, ascent: str, point: Tensor, radius: float) -> Ascent:
        search, base, world = self.search, self.loss.base, self.loss.space.world
        self._values.clear()
        found = ASCENTS[ascent](
            self._value, point, radius, search.steps, relative_tol=search.relative_tol, base=base, world=world
        )
        self.bar.update(search.steps + 1 - len(self._values))
        return found

    def _value(self, x: Tensor, out: Tensor | None) -> float:
        if self._known and out is not None:  # the pass at the weights was made before
            out.copy_(self._known.pop())
            value = self.loss.base
        else:
            value = self.loss(x, out)
        self._values.append(value)
        if len(self._values) > 1:  # the start is no step
            show(self.bar, self.rho, self._values)
        return value


def _onto(space: WeightSpace, x: Tensor, radius: float) -> Tensor:
    return x.mul_(radius / space.norm(x))
