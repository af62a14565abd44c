"""The sharpness of a model on batches: the largest loss, or the mean loss, in balls around the weights."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import replace
from difflib import get_close_matches
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import ProcessGroup, is_initialized
from tqdm.auto import tqdm

from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.weights import check_whole, plain_class, preserve_model_state

from .batch_loss import BatchLoss
from .direction import Direction
from .distributed import World, check_alike
from .losses import LossFunction, Objective
from .measures import MEASURES, Measure, Search, checked_radii, get_measure
from .measuring import attached_space, remarks_on
from .other_statistics import Average, Curvature, GradientNorm
from .results import SharpnessResult
from .space import Unreached
from .statistic import BatchResult, Statistic, Worst

#: Bytes of directions that are kept by default.
_DIRECTIONS = 2 * 2**30


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


def average(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, num_samples: int = 20,
    seed: int = 0, **options: Any,
) -> SharpnessResult:  # fmt: skip
    r"""Measure the average sharpness of a model: by how much its loss rises in the mean over Gaussian directions.

    .. math:: \operatorname{mean}_{\text{batches}}\; \operatorname{mean}_{ξ \sim N(0, ρ^2)} L_{\text{batch}}(R_θ(ξ))
              - L_{\text{batch}}(θ)

    with independent coordinates in which the metric is the identity, each of standard deviation ρ.

    Parameters
    ----------
    model, batches, loss_fn, **options
        As :func:`evaluate` takes them: measure, rho, symmetries, micro_batch, group and so on.
    num_samples : int
        Number of directions, at one forward pass each.
    seed : int
        Seed of the directions, which depend only on (seed, batch, number of the direction).

    Returns
    -------
    SharpnessResult

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> result = sharpness.average(model, [batch], lambda f, x: f(x).square().sum(), measure="euclidean", rho=0.1)
    >>> len(result.batches[0].history)
    20
    """
    return statistic_of(Average(num_samples, seed), model, batches, loss_fn, **options)


def gradient_norm(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, **options: Any
) -> SharpnessResult:
    """Measure the length of the loss's gradient in a metric: the limit of sharpness/ρ for small ρ.

    Of several batches it is the mean of their lengths, not the length of the mean gradient, which is that of one batch
    of all examples; ``micro_batch`` divides it into passes.

    Parameters
    ----------
    model, batches, loss_fn, **options
        As :func:`evaluate` takes them: measure, symmetries, micro_batch, group and so on.

    Returns
    -------
    SharpnessResult

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    >>> float(sharpness.gradient_norm(model, [batch], lambda f, x: f(x).sum(), measure="euclidean"))
    5.0
    """
    return statistic_of(GradientNorm(), model, batches, loss_fn, **options)


def hessian(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, num_matvecs: int = 20, *,
    seed: int = 0, **options: Any,
) -> SharpnessResult:  # fmt: skip
    """Measure the largest eigenvalue and the trace of the Riemannian Hessian (``"euclidean"``: of the ordinary one).

    Of several batches it is the mean of their largest eigenvalues, which is at least that of the mean loss. For the
    latter pass one batch of all examples; ``micro_batch`` divides it into passes.

    Parameters
    ----------
    model, batches, loss_fn, **options
        As :func:`evaluate` takes them: measure, symmetries, micro_batch, group and so on.
    num_matvecs : int
        Products with the Hessian for its trace, rounded down to a multiple of 3.
    seed : int
        Seed of the random vectors.

    Returns
    -------
    SharpnessResult
        ``float(result)`` is the eigenvalue, ``result.trace`` the trace with ``result.std_error``.

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> loss = lambda f, x: (f(x)[0] - 2 * f(x)[1]).square().sum() / 2
    >>> result = sharpness.hessian(model, [batch], loss, measure="euclidean")
    >>> round(float(result), 4), round(result.trace, 4)
    (5.0, 5.0)
    """
    return statistic_of(Curvature(num_matvecs, seed), model, batches, loss_fn, **options)


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
    steps = count * len(radii) * statistic.work
    state = preserve_model_state(model)
    with (
        nullcontext(list[_Share]()) if world is None else world.together() as shares,
        state,
        state,  # twice: the second exit repeats a restoration that an interrupt cut short
        progress_bar(steps or None, measure.name, "step", progress=progress) as bar,
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
    for rho in sorted(radii):
        began, before = time.perf_counter(), loss.passes
        best = best if statistic.nested else None
        for start in range(statistic.starts):
            last = (rho, start + 1) == (max(radii), statistic.starts)
            result, point = statistic.measure(loss, rho, start, bar, last=last)
            if best is None or result.value > best.value:
                best = result
                direction = loss.space.direction(point) if room > 0 and point is not None else None
            del point  # as large as the model
        assert best is not None
        best = best.inside(rho) if best.rho < rho else best
        passes, seconds = loss.passes - before + 1, time.perf_counter() - began  # with the pass at the weights
        best = replace(best, passes=passes, worst_error=loss.worst_error, seconds=seconds)
        yield best, direction
        room -= direction is not None


#: Quantities at the weights by their names in ``sharpness run`` and sweeps: the measure, and the statistic for a seed.
LOCAL: dict[str, tuple[str, Callable[[int], Statistic]]] = {
    "gradient-norm": ("geodesic-inv", lambda _: GradientNorm()),
    "riemannian-hessian": ("geodesic-inv", lambda seed: Curvature(seed=seed)),
    "euclidean-hessian": ("euclidean", lambda seed: Curvature(seed=seed)),
}


def measure_of(name: str) -> Measure:
    """Return the measure with a name in MEASURES or LOCAL."""
    if name not in MEASURES and name not in LOCAL:
        close = "".join(f" (did you mean {other}?)" for other in get_close_matches(name, [*MEASURES, *LOCAL], 1))
        raise ValueError(f"unknown measure {name!r}{close}; choose one of {', '.join([*MEASURES, *LOCAL])}")
    return get_measure(LOCAL[name][0] if name in LOCAL else name)


def progress_bar(total: int | None, what: str, unit: str, *, progress: bool = True) -> Any:
    """Return tqdm's bar, which a file or pipe gets once a minute, after the first."""
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be True or False, got {type(progress).__name__}")
    often: dict[str, Any] = {"leave": None}  # an inner one goes when it is done
    if sys.stderr is not None and not sys.stderr.isatty():
        often = {"delay": 60, "mininterval": 60, "miniters": 1, "leave": False}
    return tqdm(total=total, desc=what, unit=unit, disable=not progress or sys.stderr is None, **often)
