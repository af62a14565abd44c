"""The sharpness of a model on batches: the largest loss, or the mean loss, in balls around the weights."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import prod
from operator import and_
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, is_initialized
from tqdm.auto import tqdm

from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.weights import check_whole, plain_class, preserve_model_state

from .ascent import ASCENTS, Ascent
from .direction import Direction
from .distributed import World, check_alike
from .errors import blocks
from .losses import BatchLoss, LossFunction, Objective, RadiusError
from .measures import Measure, Search, checked_radii, get_measure
from .measuring import attached_space, direction_of, remarks_on
from .results import SharpnessResult
from .space import Unreached, WeightSpace
from .statistic import BatchResult, Statistic, WorstResult

__all__ = ["Worst"]

#: Bytes of directions that are kept by default.
_DIRECTIONS = 2 * 2**30
#: Number of times that the radius is halved to look for a larger loss inside the ball.
_HALVINGS = 12


def evaluate(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    measure: str | Measure = "geodesic-inv", rho: float | Iterable[float] | None = None,
    symmetries: Symmetries | None = None, micro_batch: int | None = None, keep_directions: bool | None = None,
    progress: bool = True, group: ProcessGroup | None = None, **search: Any,
) -> SharpnessResult:  # fmt: skip
    r"""Measure the sharpness of a model: how far the loss rises within a ball around its weights.

    .. math:: S(θ) = \operatorname{mean}_{\text{batches}}\; \max_{ξ \text{ horizontal},\, \|ξ\|_θ \le ρ}
              L_{\text{batch}}(R_θ(ξ)) - L_{\text{batch}}(θ)

    Parameters
    ----------
    model : nn.Module
        Its parameters with ``requires_grad`` are measured. Layers of unknown classes are examined on the first batch,
        which the result says, unless the measure divides out nothing; a sharded model cannot be examined.
    batches : iterable
        Dicts with labels for a transformers model, pairs (x, y), or any batches that ``loss_fn`` accepts.
    loss_fn : callable, optional
        ``loss_fn(model, batch)`` → scalar; by default ``model(**batch).loss``, or cross-entropy of ``model(x)`` and y.
    measure : str or Measure
        A name in :data:`MEASURES`: ``"geodesic-inv"``, ``"complete-inv"``, ``"adaptive"``, …; see :func:`get_measure`.
    rho : float or iterable of float, optional
        Radii in the measure's metric, by default its own. A point found in a smaller ball also counts for larger ones.
    symmetries : Symmetries, optional
        Those that are divided out, by default ``find(model)``, with the first batch if there is attention of an unknown
        class, which outside of given ones is a warning and a remark.
    micro_batch : int, optional
        Examples per pass: less memory, the same result.
    keep_directions : bool, optional
        Keep the worst directions, as large as the model, in main memory; by default the first ones, up to 2 GiB.
    progress : bool
        Show a progress bar; where there is no terminal, once a minute.
    group : ProcessGroup, optional
        Deal out the batches to these processes, each of which has the same weights and all batches, in one order, and
        returns the whole result, but the worst directions that it found. The processes of a sharded model share the
        examples of each batch instead.
    **search
        Attributes of :class:`Search`: steps, relative_tol, ascent, restarts, seed.

    Returns
    -------
    SharpnessResult
        ``result[rho]`` is that at one radius, ``float(result[rho])`` its sharpness; ``print(result)`` shows a table.

    Raises
    ------
    UnknownAttentionError
        No handler knows a module that computes attention, and it could not be examined, but the measure divides it.
    ValueError
        There is nothing to measure, the loss is NaN or random, an argument is out of range, or processes hold other
        batches or weights than each other.
    RuntimeError
        Another thread measures the model, or one that shares weights with it.
    RemoteError
        Another process of the group failed.

    Notes
    -----
    Paper, §5.2 and Algorithm 1. Afterwards the model is as before, bit for bit, even after an error. Meanwhile its
    weights move: no other thread may use it, and one that measures it too gets a RuntimeError. Threads may measure
    models of their own.

    Examples
    --------
    >>> import torch
    >>> result = evaluate(torch.nn.Linear(2, 2), [(torch.eye(2), torch.arange(2))], measure="adaptive", rho=[0.1, 0.5])
    >>> 0 < float(result[0.1]) < float(result[0.5])
    True
    """
    return statistic_of(
        Worst(Search(**search)), model, batches, loss_fn, measure=measure, rho=rho, symmetries=symmetries,
        micro_batch=micro_batch, keep_directions=keep_directions, progress=progress, group=group,
    )  # fmt: skip


class _Share(NamedTuple):
    """What one process found: its results, what its gradients did not reach, and checksums of what it was given."""

    results: list[BatchResult]
    unreached: Unreached
    contents: Mapping[str, int]


def statistic_of(
    statistic: Statistic, model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    measure: str | Measure = "geodesic-inv", rho: float | Iterable[float] | None = None,
    symmetries: Symmetries | None = None, micro_batch: int | None = None, keep_directions: bool | None = None,
    progress: bool = True, group: ProcessGroup | None = None,
) -> SharpnessResult:  # fmt: skip
    """Measure any statistic of a model on batches; all else as for :func:`evaluate`."""
    objective, sharded = Objective(loss_fn, micro_batch), check_whole(model, or_rows=True)
    measure = get_measure(measure)
    if not statistic.local:
        radii = checked_radii(measure, rho)
    elif rho is None:
        measure, radii = measure.at_weights, (0.0,)
    else:
        raise ValueError(f"the {statistic.name} is that at the weights, without a radius; leave rho out")
    if sharded and keep_directions:
        raise ValueError("a sharded model keeps no directions, which are as large as it is; leave keep_directions out")
    world = None  # of a process alone; those of a sharded model work on every batch together
    if sharded or group is not None or is_initialized():
        world = World(None if sharded else group)
    contents = {} if world is None else world.checksums(model)
    results: list[BatchResult] = []
    directions: dict[tuple[int, float], Direction] = {}
    count = -(-len(batches) // (1 if world is None else world.size)) if isinstance(batches, Sized) else 0
    state = preserve_model_state(model)
    with (
        nullcontext(list[_Share]()) if world is None else world.together() as shares,
        state,
        state,  # twice: the second exit repeats a restoration that an interrupt cut short
        progress_bar(count * len(radii) * prod(statistic.work) or None, measure.name, "step", progress=progress) as bar,
        attached_space(model, batches, measure, objective, symmetries, sharded=sharded) as (space, numbered),
    ):
        fit = 0 if sharded else _DIRECTIONS // max(space.dim * space.dtype.itemsize, 1)
        most = fit if keep_directions is None else sys.maxsize * bool(keep_directions)  # directions that are kept
        for index, batch in numbered if world is None else world.deal(numbered, contents):
            loss = BatchLoss(space, objective, batch, index)
            for result, direction in _over_radii(statistic, loss, radii, bar, most - len(directions)):
                results.append(result)
                if direction is not None:
                    directions[index, result.rho] = direction
        shares.append(_Share(results, space.unreached, contents))
    if world is not None:
        check_alike([share.contents for share in shares])
    unreached = reduce(and_, (share.unreached for share in shares))
    results = sorted((r for share in shares for r in share.results), key=lambda r: (r.batch, radii.index(r.rho)))
    return SharpnessResult(
        measure, statistic, radii, plain_class(model).__name__, *space.spectrum, len(unreached.pairs),
        tuple(results), remarks_on(space, unreached), space.divided, directions,
    )  # fmt: skip


def _over_radii(
    statistic: Statistic, loss: BatchLoss, radii: Sequence[float], bar: Any, room: int
) -> Iterator[tuple[BatchResult, Direction | None]]:
    """Measure a batch at every radius, the smallest first, and keep the best of several starts, and where it is.

    What was found in a ball counts for the larger ones around it, until there is a larger value. Directions are kept
    while there is ``room``, their number.
    """
    best: BatchResult | None = None
    direction: Direction | None = None
    starts, _ = statistic.work
    for rho in sorted(radii):
        began, before = time.perf_counter(), loss.passes
        best = best if statistic.nested else None
        for start in range(starts):
            last = (rho, start + 1) == (max(radii), starts)
            result, point = statistic.measure(loss, rho, start, bar, last=last)
            if best is None or result.value > best.value:
                best = result
                direction = direction_of(loss.space, point) if room > 0 and point is not None else None
            del point  # as large as the model
        assert best is not None
        best = best.inside(rho) if best.rho < rho else best
        passes, seconds = loss.passes - before + 1, time.perf_counter() - began  # with the pass at the weights
        best = replace(best, passes=passes, worst_error=loss.worst_error, seconds=seconds)
        yield best, direction
        room -= direction is not None


def progress_bar(total: int | None, what: str, unit: str, *, progress: bool = True) -> Any:
    """Return tqdm's bar, which a file or pipe gets once a minute, after the first."""
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be True or False, got {type(progress).__name__}")
    often: dict[str, Any] = {"leave": None}  # an inner one goes when it is done
    if sys.stderr is not None and not sys.stderr.isatty():
        often = {"delay": 60, "mininterval": 60, "miniters": 1, "leave": False}
    return tqdm(total=total, desc=what, unit=unit, disable=not progress or sys.stderr is None, **often)


# -- the largest loss --------------------------------------------------------------------------------------------------


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
    (3, 10)
    """

    search: Search = field(default_factory=Search)

    name: ClassVar[str] = "worst"
    title: ClassVar[str] = "sharpness"
    local: ClassVar[bool] = False
    nested: ClassVar[bool] = True

    @property
    def work(self) -> tuple[int, int]:
        """Numbers of ascents, and of steps of each."""
        return self.search.restarts + 1, self.search.steps

    def measure(
        self, loss: BatchLoss, rho: float, start: int, bar: Any, *, last: bool
    ) -> tuple[BatchResult, Tensor | None]:
        """Look for the largest loss, from the gradient at the weights or from a random direction."""
        space, info = loss.space, torch.finfo(loss.space.dtype)
        if rho > 0.1 * info.max:
            raise RadiusError(f"rho = {rho:g} is too large for {space.dtype}; use a smaller rho")
        flat = rho * loss.slope <= 10 * info.eps * abs(loss.base)
        known = [loss.base_gradient if last else loss.base_gradient.clone()] if start == 0 and not flat else []
        if last:
            del loss.base_gradient
        seed = self.search.seed
        point = torch.zeros_like(known[0]) if known else _onto(space, random_direction(loss, seed, start), rho)
        best = self._ascend(loss, rho, bar, self.search.ascent, point, rho, known=known)
        if best.inward:
            del point  # as large as the model
            best = self._inside(loss, rho, bar, best)
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

    def _inside(self, loss: BatchLoss, rho: float, bar: Any, best: Ascent) -> Ascent:
        """Look inside the ball, as the loss rises nowhere on the sphere, or falls outwards at the best point.

        The search goes on on spheres of half the radius each time, since a bounded loss may oscillate, and by Auto-PGD
        in the whole ball from the best point of these.
        """
        space, halving, climb = loss.space, 0, partial(self._ascend, loss, rho, bar)
        while best.inward and space.norm(best.point) != 0 and halving < _HALVINGS:
            halving += 1
            radius = rho / 2**halving
            found = climb(self.search.ascent, _onto(space, best.point.clone(), radius), radius)
            if found.value <= best.value and best.value > loss.base:
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
