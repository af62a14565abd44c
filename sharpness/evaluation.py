"""The sharpness of a model on batches: the largest loss, or the mean loss, in balls around the weights."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from tqdm.auto import tqdm

from quotient_manifolds.linalg import as_count
from quotient_manifolds.symmetries import Symmetries
from quotient_manifolds.weights import plain_class, preserve_model_state

from .ascent import ASCENTS, Ascent
from .curvature import HessianOperator
from .direction import Direction
from .distributed import World, checksum, is_sharded_model
from .errors import blocks, check_flags
from .losses import LossFunction, Objective
from .measures import Measure, checked_radii, get_measure
from .measuring import BatchLoss, RadiusError, attached_space, collected
from .options import Search
from .results import BatchResult, SharpnessResult

#: Bytes of directions that are kept by default.
_DIRECTIONS = 2 * 2**30
#: Number of times that the radius is halved to look for a larger loss inside the ball.
_HALVINGS = 12


def evaluate(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    measure: str | Measure = "geodesic-inv", rho: float | Iterable[float] | None = None, statistic: str = "worst",
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
    statistic : {"worst", "average", "gradient norm", "Hessian"}
        The maximum, or the mean over Gaussian directions with standard deviation ρ in every coordinate; the others are
        those of :func:`gradient_norm` and :func:`hessian`.
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
        Attributes of :class:`Search`: steps, relative_tol, ascent, restarts, num_samples, seed.

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
    objective = Objective(loss_fn, micro_batch)
    measure, radii, options = _checked(get_measure(measure), rho, statistic, search)
    return _evaluate(
        model, batches, measure, radii, statistic, options, objective, keep_directions, progress, group, symmetries
    )


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
    return evaluate(model, batches, loss_fn, statistic="gradient norm", **options)


def hessian(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, num_matvecs: int = 20, **options: Any
) -> SharpnessResult:
    """Measure the largest eigenvalue and the trace of the Riemannian Hessian (``"euclidean"``: of the ordinary one).

    Of several batches it is the mean of their largest eigenvalues, which is at least that of the mean loss. For the
    latter pass one batch of all examples; ``micro_batch`` divides it into passes.

    Parameters
    ----------
    model, batches, loss_fn, **options
        As :func:`evaluate` takes them: measure, symmetries, micro_batch, group, the random vectors' seed and so on.
    num_matvecs : int
        Products with the Hessian for its trace, rounded down to a multiple of 3.

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
    count = as_count("num_matvecs", num_matvecs)
    return evaluate(model, batches, loss_fn, statistic="Hessian", num_samples=count, **options)


def _evaluate(
    model: nn.Module, batches: Iterable[Any], measure: Measure, radii: tuple[float, ...], statistic: str,
    search: Search, objective: Objective, keep: bool | None, progress: bool, group: ProcessGroup | None,
    symmetries: Symmetries | None,
) -> SharpnessResult:  # fmt: skip
    """Climb for every batch, radius and start; what is found in a ball also counts for the larger ones around it."""
    sharded = is_sharded_model(model)
    if sharded and keep:
        raise ValueError("a sharded model keeps no directions, which are as large as it is; leave keep_directions out")
    if sharded and statistic == "Hessian":
        raise ValueError(
            "the Hessian of a sharded model is not measured: FSDP2 has no second derivatives; load it whole"
        )
    world = World(None if sharded else group)  # the processes of a sharded model work on every batch together
    starts = search.restarts + 1 if statistic == "worst" else 0
    total = -(-len(batches) // world.size) * len(radii) if isinstance(batches, Sized) else 0
    total *= {"worst": search.steps * starts, "average": search.num_samples}.get(statistic, 1)
    weights = model.state_dict() if world.size > 1 else {}
    contents = {f"{name!r} of the model": checksum(t) for name, t in weights.items()}
    results: list[BatchResult] = []
    directions: dict[tuple[int, float], Direction] = {}
    state = preserve_model_state(model)
    with (
        world.together() as shares,
        state,
        state,  # twice: the second exit repeats a restoration that an interrupt cut short
        progress_bar(total or None, measure.name, "step", progress=progress) as bar,
        attached_space(model, batches, measure, objective, symmetries) as (space, numbered),
    ):
        for index, batch in numbered:
            if world.size > 1:
                contents[f"batch {index}"] = checksum(batch)
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
                elif statistic != "worst":
                    best = climb.at_weights(hessian=statistic == "Hessian")
                for start in range(starts):
                    result, point = climb.worst(rho, start, last=(rho, start + 1) == (max(radii), starts))
                    if best is None or result.value > best.value:
                        size = (len(directions) + 1) * space.dim * space.dtype.itemsize  # with this one
                        best = result
                        wanted = not sharded and size <= _DIRECTIONS if keep is None else keep
                        direction = space.direction(point) if wanted else None
                    del point  # as large as the model
                assert best is not None
                if best.rho < rho:  # how far the search got there says nothing of this ball
                    best = replace(best, fw_gap=None, converged=None if best.converged is None else False)
                seconds = time.perf_counter() - began
                best = replace(best, rho=rho, passes=loss.passes + 1, worst_error=loss.worst_error, seconds=seconds)
                results.append(best)
                if direction is not None:
                    directions[index, rho] = direction
        shares.append((results, *space.evidence.missing(), contents))
    results, uncertified, remarks = collected(space, shares)
    results.sort(key=lambda r: (r.batch, radii.index(r.rho)))
    return SharpnessResult(
        measure, statistic, radii, search, plain_class(model).__name__, *space.spectrum(), uncertified, tuple(results),
        remarks, space.divided, directions,
    )  # fmt: skip


def _checked(
    measure: Measure, rho: float | Iterable[float] | None, statistic: str, options: Mapping[str, Any]
) -> tuple[Measure, tuple[float, ...], Search]:
    """Return the measure, its radii, 0 at the weights themselves, and the options of the search."""
    if statistic not in ("worst", "average", "gradient norm", "Hessian"):
        raise ValueError(f"statistic must be 'worst', 'average', 'gradient norm' or 'Hessian', got {statistic!r}")
    search = Search(**options)
    if search.restarts and statistic != "worst":
        raise ValueError(f"restarts belong to statistic='worst'; omit them for {statistic!r}")
    if statistic in ("worst", "average"):
        return measure, checked_radii(measure, rho), search
    if rho is not None:
        raise ValueError(f"the {statistic} is that at the weights, without a radius; leave rho out")
    if measure.divides and measure.geodesic == "exact":  # the same Hessian
        measure = replace(measure, geodesic="second-order")
    return measure, (0.0,), search


class _Climb:
    """The search for the largest loss of a batch, or for its mean, in balls around the weights."""

    def __init__(self, loss: BatchLoss, search: Search, bar: Any) -> None:
        self.loss, self.space, self.search, self.bar = loss, loss.space, search, bar
        self._result = partial(BatchResult, batch=loss.index, base_loss=loss.base, base_error=loss.base_error)

    def at_weights(self, *, hessian: bool) -> BatchResult:
        """Measure the gradient's length, or the Hessian."""
        loss, trace, error = self.loss, None, None
        value = self.space.norm(loss.base_gradient)
        if hessian:
            operator = HessianOperator(self.space, loss.losses)
            value = operator.largest_eigenvalue(seed=self.search.seed)
            trace, error = operator.trace(self.search.num_samples, seed=self.search.seed)
            loss.passes += operator.num_matvecs
        self.bar.update()
        return self._result(rho=0.0, value=value, worst_loss=loss.base, trace=trace, std_error=error)

    def average(self, rho: float) -> BatchResult:
        """Average the loss over Gaussian directions."""
        loss, losses = self.loss, list[float]()
        loss.worst_error = loss.base_error
        for sample in range(self.search.num_samples):
            losses.append(loss(self._random(sample).mul_(rho)))
            self._show(rho, losses)
        value = statistics.fmean(losses) - loss.base
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
        return self._result(rho=rho, value=value, worst_loss=max(losses), history=tuple(losses), std_error=error)

    def worst(self, rho: float, start: int, *, last: bool) -> tuple[BatchResult, Tensor]:
        """Look for the largest loss, and return also where it is.

        If the loss rises nowhere on the sphere, or falls outwards at the best point, the search goes on inside the
        ball: on spheres of half the radius each time, since a bounded loss may oscillate, and by Auto-PGD in the whole
        ball from the best point of these. ``last`` says that no other ascent of the batch follows, so that the gradient
        at the weights may be freed.
        """
        loss, space, search, info = self.loss, self.space, self.search, torch.finfo(self.space.dtype)
        if rho > 0.1 * info.max:
            raise RadiusError(f"rho = {rho:g} is too large for {space.dtype}; use a smaller rho")
        gap_at_weights = rho * space.norm(loss.base_gradient)
        flat = gap_at_weights <= 10 * info.eps * abs(loss.base)
        at_weights = start == 0 and not flat
        known = [loss.base_gradient] if at_weights else []  # the pass at the weights was made before
        if last:
            del loss.base_gradient
        values: list[float] = []

        def f(x: Tensor, out: Tensor | None) -> float:
            if known and out is not None:
                out.copy_(known.pop())
                value = loss.base
            else:
                value = loss(x, out)
            values.append(value)
            if len(values) > 1:  # the start is no step
                self._show(rho, values)
            return value

        def climb(ascent: str, point: Tensor, radius: float, *, further: bool = True) -> Ascent:
            if further:
                self.bar.total = self.bar.total and self.bar.total + search.steps
            found = ASCENTS[ascent](
                f, point, radius, search.steps, relative_tol=search.relative_tol, base=loss.base, world=space.world
            )
            self.bar.update(search.steps + 1 - len(values))
            values.clear()
            return found

        point = space.empty().zero_() if at_weights else self._to_sphere(self._random(start), rho)
        best, halving = climb(search.ascent, point, rho, further=False), 0
        while best.value <= loss.base or (best.slope is not None and best.slope < 0):
            if space.norm(best.point) == 0 or halving == _HALVINGS:
                break
            halving += 1
            point = self._to_sphere(best.point.clone(), rho / 2**halving)
            found = climb(search.ascent, point, rho / 2**halving)
            if found.value <= best.value and best.value > loss.base:
                break
            best = found if found.value > best.value else best
        if halving:
            best = climb("apgd", best.point.clone(), rho)
        point, value, gap, converged = best.point, best.value, best.fw_gap, best.converged
        if value < loss.base:  # the loss never rose from this start: the centre belongs to the ball
            point, value, gap = point.zero_(), loss.base, gap_at_weights
            converged = flat if search.relative_tol else None
        result = self._result(
            rho=rho, value=value - loss.base, worst_loss=value, history=best.history, fw_gap=gap, converged=converged,
            random_start=flat, distance=space.norm(point), num_exited_pairs=space.num_exited_pairs(point),
        )  # fmt: skip
        return result, point

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

    def _show(self, rho: float, losses: list[float]) -> None:
        self.bar.update()
        if not self.bar.disable:
            best = f"rho={rho:g}, best={max(losses):.4f} {blocks(losses[-20:], min(losses))}"
            self.bar.set_postfix_str(best, refresh=False)


def progress_bar(total: int | None, what: str, unit: str, *, progress: bool = True) -> Any:
    """Return tqdm's bar, which a file or pipe gets once a minute, after the first."""
    check_flags(progress=progress)
    often: dict[str, Any] = {"leave": None}  # an inner one goes when it is done
    if sys.stderr is not None and not sys.stderr.isatty():
        often = {"delay": 60, "mininterval": 60, "miniters": 1, "leave": False}
    return tqdm(total=total, desc=what, unit=unit, disable=not progress or sys.stderr is None, **often)
