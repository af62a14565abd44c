"""What is measured on every batch, in balls around the weights or at the weights themselves; first the largest loss.

:mod:`sharpness.other_statistics` has the mean loss, the gradient norm, and the Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from .ascent import ASCENTS, Ascent
from .batch_loss import BatchLoss, RadiusError
from .errors import blocks
from .measures import Search
from .space import WeightSpace

__all__ = ["BatchResult", "Statistic", "Worst", "WorstResult"]

#: Number of times that the radius is halved to look for a larger loss inside the ball.
_HALVINGS = 12


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The result on one batch at one radius, or at the weights themselves (radius 0): of the gradient norm, its value.

    Attributes
    ----------
    batch : int
        Position of the batch.
    rho : float
        Radius of the ball; 0 for the gradient norm and the Hessian.
    value : float
        The sharpness: the worst or the mean perturbed loss, minus the base loss; or the gradient norm, or the largest
        eigenvalue of the Hessian.
    base_loss, worst_loss : float
        Loss at the weights, and the largest loss found.
    base_error, worst_error : float or None
        Fraction of the batch that is misclassified: at the weights, and the largest at any point evaluated. None if
        labels or scores are not known.
    passes : int
        Passes through the model for the batch and radius, including the one at the weights; a product with the Hessian
        counts as one.
    seconds : float
        Wall time.

    Examples
    --------
    The loss at the weights, how far it rises, and where that ends:

    >>> import torch, sharpness
    >>> model, batch = torch.nn.Linear(2, 2, bias=False), (torch.eye(2), torch.tensor([0, 1]))
    >>> model.weight.data = torch.eye(2)
    >>> found = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.5).batches[0]
    >>> print(f"{found.base_loss:.3f} + {found.value:.3f} = {found.worst_loss:.3f} in {found.passes} passes")
    0.313 + 0.108 = 0.421 in 2 passes
    """

    batch: int
    rho: float
    value: float
    base_loss: float
    worst_loss: float
    base_error: float | None
    worst_error: float | None = None
    passes: int = 1
    seconds: float = 0.0

    def inside(self, rho: float) -> BatchResult:
        """Return what it says of a larger ball around its own."""
        return replace(self, rho=rho)


class Statistic(Protocol):
    """What is measured on every batch.

    Attributes
    ----------
    name, title : str
        In files and messages; and before a number that is shown.
    local : bool
        It is that at the weights, without a radius.
    nested : bool
        What is found in a ball counts in a larger one.
    starts : int
        Number of times that it is measured at a radius; the largest value counts.
    work : int
        Steps that a progress bar shows for a radius.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    local: ClassVar[bool]
    nested: ClassVar[bool]

    @property
    def starts(self) -> int: ...  # noqa: D102

    @property
    def work(self) -> int: ...  # noqa: D102

    def measure(
        self, loss: BatchLoss, rho: float, start: int, bar: Any, *, last: bool
    ) -> tuple[BatchResult, Tensor | None]:
        """Measure it on a batch, and return where it was found too; it may be the batch's last start and radius."""
        ...


# -- the largest loss --------------------------------------------------------------------------------------------------


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
        known = [loss.base_gradient if last else loss.base_gradient.clone()] if at_weights else []
        if last:
            del loss.base_gradient
        if at_weights:
            point = torch.zeros(space.dim, dtype=space.dtype, device=space.device)
        else:
            point = _onto(space, random_direction(loss, self.search.seed, start), rho)
        best = self._in_ball(loss, rho, bar, point, known)
        point, value, gap, converged = best.point, best.value, best.fw_gap, best.converged
        if value < loss.base:  # the loss never rose from this start: the centre belongs to the ball
            point, value, gap = point.zero_(), loss.base, rho * loss.slope
            converged = flat if self.search.relative_tol else None
        result = WorstResult(
            **loss.known, rho=rho, value=value - loss.base, worst_loss=value, history=best.history, fw_gap=gap,
            converged=converged, random_start=flat, distance=space.norm(point),
            num_exited_pairs=space.num_exited_pairs(point) if space.measure.geodesic == "exact" else 0,
        )  # fmt: skip
        return result, point

    def _in_ball(self, loss: BatchLoss, rho: float, bar: Any, point: Tensor, known: list[Tensor]) -> Ascent:
        """Look on the sphere, and inside if the loss rises nowhere on it, or falls outwards at the best point.

        The search goes on on spheres of half the radius each time, since a bounded loss may oscillate, and by Auto-PGD
        in the whole ball from the best point of these.
        """
        space, base, name, climb = loss.space, loss.base, self.search.ascent, partial(self._ascend, loss, rho, bar)
        best, halving = climb(name, point, rho, known=known), 0
        del point
        while best.value <= base or (best.slope is not None and best.slope < 0):
            if space.norm(best.point) == 0 or halving == _HALVINGS:
                break
            halving += 1
            radius = rho / 2**halving
            found = climb(name, _onto(space, best.point.clone(), radius), radius)
            if found.value <= best.value and best.value > base:
                break
            best = found if found.value > best.value else best
        return climb("apgd", best.point.clone(), rho) if halving else best

    def _ascend(
        self, loss: BatchLoss, rho: float, bar: Any, name: str, point: Tensor, radius: float, *,
        known: list[Tensor] | None = None,
    ) -> Ascent:  # fmt: skip
        """Climb from a point; ``known`` has the gradient there, if it is, and is None for a further ascent."""
        search = self.search
        if known is None:  # the progress bar had not foreseen it
            bar.total = bar.total and bar.total + search.steps
        found = ASCENTS[name](
            loss, point, radius, search.steps, relative_tol=search.relative_tol, base=loss.base,
            world=loss.space.world, known=known, seen=partial(show, bar, rho),
        )  # fmt: skip
        bar.update(search.steps + 1 - len(found.history))
        return found


def _onto(space: WeightSpace, x: Tensor, radius: float) -> Tensor:
    return x.mul_(radius / space.norm(x))


# -- of all statistics -------------------------------------------------------------------------------------------------


def random_direction(loss: BatchLoss, seed: int, number: int) -> Tensor:
    """Draw the direction of a number, which is another one for each batch."""
    entropy = (seed, loss.index, number)
    own = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) % 2**63
    xi = loss.space.random(torch.Generator().manual_seed(own))
    if loss.space.norm(xi) == 0:
        raise ValueError(
            "there is no direction to move in: all trainable weights are zero or belong to pairs of rank 0 "
            "(LoRA's B = 0 before training); measure a trained model"
        )
    return xi


def show(bar: Any, rho: float, losses: list[float]) -> None:
    """Show the best loss of a radius, and the last ones."""
    bar.update()
    if not bar.disable:
        bar.set_postfix_str(f"rho={rho:g}, best={max(losses):.4f} {blocks(losses[-20:], min(losses))}", refresh=False)
