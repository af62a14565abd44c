"""The sharpness of a model on batches: the largest loss, or the mean loss, in balls around the weights."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.modules import plain_class

from .ascent import ASCENTS, Ascent, Search
from .direction import Direction
from .distributed import World
from .losses import LossFunction, Objective
from .measures import Measure, get_measure
from .measuring import BatchLoss, RadiusError, collected, measured
from .perturb import preserved
from .results import BatchResult, SharpnessResult
from .shards import is_sharded_model

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["checked_radii", "evaluate", "progress_bar"]

#: Bytes of directions that are kept by default.
_DIRECTIONS = 2 * 2**30
#: Number of times that the radius is halved to look for a larger loss inside the ball.
_HALVINGS = 12


def evaluate(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    measure: str | Measure = "geodesic-inv", rho: float | Iterable[float] | None = None, statistic: str = "worst",
    pairs: Sequence[SymmetricPair] | None = None, only: str | None = None, normalize_logits: bool = False,
    micro_batch: int | None = None, offload: bool = False, keep_directions: bool | None = None, progress: bool = True,
    group: ProcessGroup | None = None, **search: Any,
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
    statistic : {"worst", "average"}
        The maximum, or the mean over Gaussian directions with standard deviation ρ in every coordinate.
    pairs : sequence of SymmetricPair, optional
        The pairs that are divided out, by default ``find_symmetric_pairs(model)``, with the first batch if there is
        attention of an unknown class, which outside of given pairs is a warning and a remark.
    only : str, optional
        A regular expression: parameters whose names do not match it, and pairs with such, are not moved.
    normalize_logits : bool
        See :func:`sharpness.losses.normalized_logits`.
    micro_batch : int, optional
        Examples per pass: less memory, the same result. Texts pass sorted by length, without padding.
    offload : bool
        Keep the vectors of the search in main memory, to which parts of them go and from which they come at every step.
        A GPU then holds one copy of the trainable weights besides what a pass needs, instead of four or five.
    keep_directions : bool, optional
        Keep the worst directions, each as large as the model, in main memory; by default the first ones, up to 2 GiB.
    progress : bool
        Show a progress bar or, without a terminal, one line per minute.
    group : ProcessGroup, optional
        Spread the work over these processes of ``torch.distributed``; each of them returns the whole result, but for
        the worst directions, which stay with the process that found them.
    **search
        Attributes of :class:`Search`: steps, relative_tol, ascent, restarts, num_samples, seed.

    Returns
    -------
    SharpnessResult
        ``result[rho]`` is that at one radius, ``float(result[rho])`` its sharpness; ``print(result)`` shows a table.

    Raises
    ------
    UnknownAttentionError
        A module computes attention, no handler knows its class, and it could not be examined (for measures that divide
        out pairs).
    ValueError
        There is nothing to measure, the loss is NaN or random, or an argument is out of range.
    RemoteError
        Another process of the group failed.

    Notes
    -----
    Paper, §5.2 and Algorithm 1. Afterwards the model is as before, bit for bit, even after an error.

    Examples
    --------
    >>> import torch
    >>> result = evaluate(torch.nn.Linear(2, 2), [(torch.eye(2), torch.arange(2))], measure="adaptive", rho=[0.1, 0.5])
    >>> 0 < float(result[0.1]) < float(result[0.5])
    True
    """
    measure, objective = get_measure(measure), Objective(loss_fn, normalize_logits, micro_batch)
    return _evaluate(
        model, batches, measure, checked_radii(measure, rho), statistic, _search(search, statistic), objective,
        keep_directions, progress, group, pairs=pairs, only=only, offload=offload,
    )  # fmt: skip


def _evaluate(
    model: nn.Module, batches: Iterable[Any], measure: Measure, radii: tuple[float, ...], statistic: str,
    search: Search, objective: Objective, keep: bool | None, progress: bool, group: ProcessGroup | None, **which: Any,
) -> SharpnessResult:  # fmt: skip
    """Climb for every batch, radius and start; what is found in a ball also counts for the larger ones around it."""
    everybody, sharded = World(group), is_sharded_model(model)
    world = World() if sharded else everybody  # the processes of a sharded model work on every batch together
    total = -(-len(batches) // world.size) * len(radii) if isinstance(batches, Sized) else 0
    total *= search.steps * (search.restarts + 1) if statistic == "worst" else search.num_samples
    results: list[BatchResult] = []
    directions: dict[tuple[int, float], Direction] = {}
    state = preserved(model)
    with everybody.losing_others():
        with (
            state,
            state,
            progress_bar(total or None, measure.name, "step", progress=progress) as bar,
            measured(model, batches, measure, objective, group=group, **which) as (space, numbered),
        ):
            for index, batch in numbered:
                if not world.owns(index):
                    continue
                loss = BatchLoss(space, objective, batch, index)
                climb = _Climb(loss, search, bar)
                best: BatchResult | None = None
                direction: Direction | None = None
                for rho in sorted(radii):  # what was found in a smaller ball stays until there is a larger loss
                    began, loss.passes = time.perf_counter(), 0
                    if statistic == "average":
                        best = climb.average(rho)
                    for start in range(search.restarts + 1) if statistic == "worst" else ():
                        last = (rho, start) == (max(radii), search.restarts)
                        result, point = climb.worst(rho, start, last=last)
                        if best is None or result.value > best.value:
                            room = not sharded and len(directions) * space.dim * space.dtype.itemsize < _DIRECTIONS
                            best = result
                            direction = space.direction(point) if (room if keep is None else keep) else None
                        del point  # as large as the model
                    assert best is not None
                    seconds = time.perf_counter() - began
                    best = replace(best, rho=rho, passes=loss.passes + 1, worst_error=loss.worst_error, seconds=seconds)
                    results.append(best)
                    if direction is not None:
                        directions[index, rho] = direction
        results, uncertified, remarks = collected(space, world, results)
    results.sort(key=lambda r: (r.batch, radii.index(r.rho)))
    return SharpnessResult(
        measure, statistic, radii, search, plain_class(model).__name__, *space.spectrum(), uncertified, tuple(results),
        remarks, directions,
    )  # fmt: skip


def _search(options: Mapping[str, Any], statistic: str) -> Search:
    if statistic not in ("worst", "average"):
        raise ValueError(f"statistic must be 'worst' or 'average', got {statistic!r}")
    known = [f.name for f in fields(Search)]
    for name in options:
        if name not in known:
            raise TypeError(
                f"evaluate() has no argument {name!r}; those of the search are {', '.join(known)}; options of the "
                "measure belong to it, as in get_measure('geodesic-inv', geodesic='exact')"
            )
    found = Search(**options)
    if found.restarts and statistic != "worst":
        raise ValueError(f"restarts belong to statistic='worst'; omit them for {statistic!r}")
    return found


def checked_radii(measure: Measure, rho: float | Iterable[float] | None) -> tuple[float, ...]:
    """Return the radii of a measure; raise a ValueError for invalid ones."""
    if rho is None:
        if measure.rho is None:
            raise ValueError(f"pass a radius rho: the measure {measure.name!r} has no default")
        rho = measure.rho
    scalar = isinstance(rho, Real) or (isinstance(rho, Tensor) and rho.dim() == 0)
    try:
        if isinstance(rho, (str, bool, Mapping)):
            raise TypeError
        radii = tuple(float(r) for r in ([rho] if scalar else rho))  # type: ignore[union-attr, arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}") from None
    if not radii or any(not (math.isfinite(r) and r > 0) for r in radii):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}")
    if len(set(radii)) < len(radii):
        raise ValueError(f"rho names a radius twice: {rho!r}")
    return radii


class _Climb:
    """The search for the largest loss of a batch, or for its mean, in balls around the weights."""

    def __init__(self, loss: BatchLoss, search: Search, bar: Any) -> None:
        self.loss, self.space, self.search, self.bar = loss, loss.space, search, bar

    def average(self, rho: float) -> BatchResult:
        """Average the loss over Gaussian directions."""
        loss, losses = self.loss, list[float]()
        loss.worst_error = loss.base_error
        for sample in range(self.search.num_samples):
            losses.append(loss(self._random(sample).mul_(rho)))
            self._show(rho, losses[-1], max(losses))
        return BatchResult(
            batch=loss.index, rho=rho, value=statistics.fmean(losses) - loss.base, base_loss=loss.base,
            worst_loss=max(losses), base_error=loss.base_error, history=tuple(losses),
            std_error=statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None,
        )  # fmt: skip

    def worst(self, rho: float, start: int, *, last: bool) -> tuple[BatchResult, Tensor]:
        """Look for the largest loss, and return also where it is.

        ``last`` says that no other ascent of the batch follows, so that the gradient at the weights may be freed.
        """
        loss, space, info = self.loss, self.space, torch.finfo(self.space.dtype)
        if rho > 0.1 * info.max:
            raise RadiusError(f"rho = {rho:g} is too large for {space.dtype}; use a smaller rho")
        flat = rho * space.norm(loss.base_gradient) <= 10 * info.eps * abs(loss.base)
        at_weights = start == 0 and not flat
        first = space.empty().zero_() if at_weights else self._to_sphere(self._random(start), rho)
        found = self._inwards(self._ascend(first, rho, at_weights=at_weights, last=last), rho)
        point, value = found.point, found.value
        if value < loss.base:  # the loss never rose from this start: the centre belongs to the ball
            point, value = point.zero_(), loss.base
        result = BatchResult(
            batch=loss.index, rho=rho, start=start, value=value - loss.base, base_loss=loss.base, worst_loss=value,
            base_error=loss.base_error, history=found.history, fw_gap=found.fw_gap, converged=found.converged,
            random_start=flat, distance=space.norm(point), num_exited_pairs=space.num_exited_pairs(point),
        )  # fmt: skip
        return result, point

    def _ascend(self, start: Tensor, rho: float, *, at_weights: bool = False, last: bool = False) -> Ascent:
        """Climb from a point; the pass at the weights was made before."""
        loss, top, begun = self.loss, -math.inf, False
        known = [(loss.base, loss.base_gradient)] if at_weights else []
        if last:
            del loss.base_gradient

        def f(x: Tensor, wanted: bool) -> tuple[float, Tensor | None]:
            nonlocal top, begun
            value, gradient = known.pop() if known else loss.with_gradient(x) if wanted else (loss(x), None)
            top = max(top, value)
            if begun:  # the start is no step
                self._show(rho, value, top)
            begun = True
            return value, gradient

        found = ASCENTS[self.search.ascent](
            f, start, rho, self.search.steps, relative_tol=self.search.relative_tol, base=loss.base,
            world=self.space.world,
        )  # fmt: skip
        self.bar.update(self.search.steps + 1 - len(found.history))
        return found

    def _inwards(self, found: Ascent, rho: float) -> Ascent:
        """Look for a larger loss inside the ball, on spheres whose radius is halved each time.

        This is done if the loss rose nowhere on the sphere, or falls outwards at the best point: a bounded loss may
        oscillate.
        """
        if self.space.norm(found.point) == 0:
            return found
        for _ in range(_HALVINGS):
            if found.value > self.loss.base and not (found.slope is not None and found.slope < 0):
                break
            rho /= 2
            if self.bar.total is not None:
                self.bar.total += self.search.steps
            inner = self._ascend(self._to_sphere(found.point.clone(), rho), rho)
            if inner.value <= found.value and found.value > self.loss.base:
                break
            found = inner if inner.value > found.value else found
        return found

    def _to_sphere(self, x: Tensor, rho: float) -> Tensor:
        return x.mul_(rho / self.space.norm(x))

    def _random(self, number: int) -> Tensor:
        entropy = (self.search.seed, self.loss.index, number)
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) % 2**63
        xi = self.space.random(torch.Generator().manual_seed(seed))
        if self.space.norm(xi) == 0:
            raise ValueError(
                "there is no direction to move in: all trainable weights are zero or belong to pairs of rank 0 "
                "(LoRA's B = 0 before training); measure a trained model"
            )
        return xi

    def _show(self, rho: float, value: float, top: float) -> None:
        self.bar.update()
        self.bar.set_postfix(rho=rho, loss=f"{value:.4f}", best=f"{top:.4f}", refresh=False)


# -- what is shown meanwhile -----------------------------------------------------------------------------------------


class _Lines:
    """A stream on which every state of a bar becomes a line."""

    def write(self, text: str) -> None:
        """Write everything but bare carriage returns."""
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing, because every line was flushed when it was written."""


def progress_bar(total: int | None, what: str, unit: str, *, progress: bool = True) -> Any:
    """Return tqdm's bar for a terminal, and for a file or pipe one that writes a line per minute, after the first."""
    if not progress or (sys.stderr is not None and sys.stderr.isatty()):
        return tqdm(total=total, desc=what, unit=unit, disable=not progress)
    form = "{desc}: {n_fmt}" + ("" if total is None else " of {total_fmt}") + " {unit}s in {elapsed}"
    form += ("" if total is None else ", {remaining} left") + "{postfix}"
    return tqdm(
        total=total, desc=what, unit=unit, file=_Lines(), delay=60, mininterval=60, miniters=1, leave=False,
        bar_format=form, ascii=True, disable=sys.stderr is None,
    )  # fmt: skip
