"""The sharpness of a model on batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.modules import plain_class

from .ball_search import BallSearch
from .batch_loss import BatchLoss, for_each_batch
from .direction import Direction
from .distributed import World
from .losses import LossFunction, Objective
from .measures import Measure, get_measure
from .progress import bar as progress_bar
from .results import BatchResult, SharpnessResult
from .search import Search
from .shards import is_sharded_model
from .space import WeightSpace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["checked_radii", "evaluate"]

#: Bytes of directions that are kept by default.
_DIRECTIONS = 2 * 2**30


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
        The parameters with ``requires_grad`` are measured. Layers of unknown classes are examined on the
        first batch, unless the measure divides out nothing, which the result says; a sharded model cannot be examined.
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
        attention of an unknown class. The weights of a pair without a group move as those outside pairs do. Attention
        of an unknown class outside of pairs that were given is a warning and a remark.
    only : str, optional
        A regular expression. Parameters whose names do not match it, and pairs that contain them, are not moved.
    normalize_logits : bool
        See :func:`sharpness.losses.normalized_logits`.
    micro_batch : int, optional
        Examples per pass through the model: less memory, the same result. Texts pass sorted by length, without padding.
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
        There is nothing to measure, the loss is NaN or random, or an argument is out of range or has no meaning.
    RemoteError
        Another process of the group failed.

    Notes
    -----
    Paper, §5.2 and Algorithm 1. Afterwards the model is as before, bit for bit, even after an error.

    Examples
    --------
    >>> import torch
    >>> batch = torch.eye(2), torch.tensor([0, 1])
    >>> result = evaluate(torch.nn.Linear(2, 2), [batch], measure="adaptive", rho=[0.1, 0.5])
    >>> 0 < float(result[0.1]) < float(result[0.5])
    True
    """
    objective = Objective(loss_fn, normalize_logits, micro_batch)
    work = _Evaluation(get_measure(measure), rho, statistic, _search(search), objective, keep_directions)
    with World(group).losing_others():
        return work.run(model, batches, pairs, only, progress, group, offload)


def _search(options: Mapping[str, Any]) -> Search:
    known = [f.name for f in dataclasses.fields(Search)]
    for name in options:
        if name not in known:
            raise TypeError(
                f"evaluate() has no argument {name!r}; those of the search are {', '.join(known)}; options of the "
                "measure belong to it, as in get_measure('geodesic-inv', geodesic='exact')"
            )
    return Search(**options)


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


class _Evaluation:
    """One call of :func:`evaluate`: its jobs are (batch, radius, start), each independent of the others."""

    def __init__(
        self, measure: Measure, rho: Any, statistic: str, search: Search, objective: Objective, keep: bool | None
    ) -> None:  # fmt: skip
        if statistic not in ("worst", "average"):
            raise ValueError(f"statistic must be 'worst' or 'average', got {statistic!r}")
        if statistic == "average" and measure.ball_norm != 2:
            raise ValueError('statistic="average" draws Gaussian directions, for which ball_norm = inf has no meaning')
        if search.restarts and statistic != "worst":
            raise ValueError(f"restarts belong to statistic='worst'; omit them for {statistic!r}")
        self.measure, self.radii, self.statistic = measure, checked_radii(measure, rho), statistic
        self.search, self.objective, self.keep = search, objective, keep
        self.jobs = [(rho, start) for rho in self.radii for start in range(search.restarts + 1)]
        self.found: list[BatchResult] = []
        self.directions: dict[tuple[int, float], tuple[float, Direction]] = {}
        self._ball_search: BallSearch | None = None

    def run(
        self, model: nn.Module, batches: Iterable[Any], pairs: Sequence[SymmetricPair] | None, only: str | None,
        progress: bool, group: ProcessGroup | None, offload: bool,
    ) -> SharpnessResult:  # fmt: skip
        """Do all jobs and combine their results."""
        self.keep = False if self.keep is None and is_sharded_model(model) else self.keep
        effort = self.search.steps if self.statistic == "worst" else self.search.num_samples
        count = len(batches) if isinstance(batches, Sized) else None
        processes = 1 if is_sharded_model(model) else World(group).size
        total = None if count is None else -(-count * len(self.jobs) // processes) * effort
        with progress_bar(total, self.measure.name, "step", progress=progress) as self.bar:
            space, world = for_each_batch(
                model, batches, self.measure, self.objective, self._do_batch, pairs=pairs, only=only,
                group=group, jobs=len(self.jobs), offload=offload,
            )  # fmt: skip
        shares = world.gather([(self.found, space.uncertified(), space.unreached())])
        self.found = [r for found, _, _ in shares for r in found]
        uncertified = set.intersection(*(open_pairs for _, open_pairs, _ in shares))
        unreached = set.intersection(*(names for _, _, names in shares))
        best = [(r, r.rho) for r in self._best()]
        if self.statistic == "worst":
            best = sorted(
                _nested([r for r, _ in best]), key=lambda pair: (pair[0].batch, self.radii.index(pair[0].rho))
            )
        # Only the process that found a worst direction has it.
        directions = {
            (r.batch, r.rho): self.directions[r.batch, origin][1]
            for r, origin in best
            if self.directions.get((r.batch, origin), (None,))[0] == r.value
        }
        remarks = (*space.remarks, *space.without_gradient(unreached))
        return SharpnessResult(
            self.measure, self.statistic, self.radii, self.search, plain_class(model).__name__, *space.spectrum(),
            len(uncertified), tuple(r for r, _ in best), remarks, directions,
        )  # fmt: skip

    def _do_batch(self, space: WeightSpace, index: int, batch: Any, mine: list[int]) -> None:
        if self._ball_search is None:
            self._ball_search = BallSearch(space, self.search, self.statistic, self.bar)
        loss = BatchLoss(space, self.objective, batch, index, self._ball_search.new_gradient)
        for number in mine:
            rho, start = self.jobs[number]
            result, point = self._ball_search.run(loss, rho, start, last=number == mine[-1])
            self.found.append(result)
            if point is not None:
                self._keep(space, result, point)
                self._ball_search.free(point)

    def _keep(self, space: WeightSpace, result: BatchResult, point: Tensor) -> None:
        key = (result.batch, result.rho)
        size = space.dim * point.element_size()
        room = self.keep is None and (key in self.directions or len(self.directions) * size < _DIRECTIONS)
        if (self.keep or room) and (key not in self.directions or result.value > self.directions[key][0]):
            self.directions[key] = (result.value, space.direction(point))

    def _best(self) -> Iterator[BatchResult]:
        """Take the best start of every batch and radius, with passes and seconds of all starts and the worst error."""
        found = sorted(self.found, key=lambda r: (r.batch, self.radii.index(r.rho), r.start))
        for _, same in itertools.groupby(found, key=lambda r: (r.batch, r.rho)):
            starts = list(same)
            yield dataclasses.replace(
                max(starts, key=lambda r: r.value),
                passes=1 + sum(r.passes - 1 for r in starts),
                seconds=sum(r.seconds for r in starts),
                worst_error=_largest(r.worst_error for r in starts),
            )


def _largest(errors: Iterable[float | None]) -> float | None:
    return max((e for e in errors if e is not None), default=None)


def _nested(found: Sequence[BatchResult]) -> Iterator[tuple[BatchResult, float]]:
    """Replace each result by that of a smaller ball, with its radius, where that is worse: the ball contains it."""
    for _, same in itertools.groupby(found, key=lambda r: r.batch):
        inner, origin = None, 0.0
        for outer in sorted(same, key=lambda r: r.rho):
            error = _largest(r.worst_error for r in (inner, outer) if r is not None)
            if inner is None or outer.value >= inner.value:
                inner, origin = outer, outer.rho
            inner = dataclasses.replace(
                inner, rho=outer.rho, passes=outer.passes, seconds=outer.seconds, worst_error=error
            )
            yield inner, origin
