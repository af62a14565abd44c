"""Batches in, sharpness out."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from quotient_manifolds import symmetries
from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.symmetries import SymmetricPair

from . import distributed
from .ascent import ASCENTS, Ball, Buffers, CubeBall, RoundBall
from .direction import Direction
from .hessian import HessianOperator, hutch_plus_plus, largest_eigenvalues
from .losses import LossFunction, Objective, mapped, tensors
from .measures import Measure, measure_with
from .results import BatchResult, SharpnessResult
from .space import WeightSpace
from .undisturbed import undisturbed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["evaluate"]

#: Bytes of directions that are kept unasked.
_DIRECTIONS = 2 * 2**30


def _check_device(batch: Any, index: int, device: torch.device) -> None:
    for t in tensors(batch):
        if t.device != device:
            raise ValueError(
                f"batch {index} has a tensor on {t.device}, but the model's weights are on {device}; "
                f'move the batch with .to("{device}")'
            )


def _verify(
    model: nn.Module, loss_fn: LossFunction | None, batch: Any, seed: int, pairs: Sequence[SymmetricPair] | None
) -> None:
    """Raise if a pair that is about to be divided out is no symmetry of the loss or of the outputs."""
    forward = symmetries.default_forward if loss_fn is None else loss_fn
    known = {p.name for p in symmetries.find(model)}
    extra = [p for p in pairs or () if p.group is not None and p.name not in known]
    report = symmetries.verify(model, batch, seed, forward=forward, extra=extra)
    if not report.ok:
        raise ValueError(f"verify=True found weights that are no symmetry of {type(model).__name__}:\n{report}")


def _check_first(model: nn.Module, objective: Objective, batch: Any, *, coverage: bool) -> None:
    """Two identical passes must agree, and every attention layer must be known if pairs are divided out."""

    def run() -> float:
        # A loss of one's own may contain gradients.
        with torch.set_grad_enabled(objective.loss_fn is not None):
            parts = objective.pieces(model, batch)
            return sum(w * float(objective(model, part).loss.detach()) for w, part in parts)

    one = symmetries.check_coverage(model, run) if coverage else run()
    two = run()
    if not math.isfinite(one):
        raise ValueError(f"the loss of batch 0 is {one}; a sharpness needs a finite loss to start from")
    scale = max(abs(one), abs(two), 1e-3)
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    if abs(one - two) > min(200 * eps, 1e-3) * scale:
        raise ValueError(
            f"two identical passes gave different losses ({one:.8g} and {two:.8g}): switch off dropout that ignores "
            "eval(), random augmentation and sampling inside the model or loss_fn"
        )
    objective.check_pieces(model, batch)


def _generator(*entropy: int) -> torch.Generator:
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed % 2**63)


class _Batch:
    """A batch as a function of coordinates; shares the pass at the weights between radii and starts."""

    def __init__(self, space: WeightSpace, objective: Objective, batch: Any, index: int, gradient: Tensor) -> None:
        self.space, self.objective, self.index = space, objective, index
        if space.half_precision:
            batch = mapped(batch, lambda t: t.to(at_least_float32(t.dtype)) if t.is_floating_point() else t)
        self.pieces = objective.pieces(space.model, batch)
        self.worst_error: float | None = None
        self.passes = 0
        self.base_gradient = gradient
        self.base = self(None, gradient)
        if not bool(self.base_gradient.isfinite().all()):
            raise ValueError(
                f"the gradient of batch {index} at the weights has NaN or infinite entries although the loss is "
                f"{self.base:.6g}; look for a square root or logarithm at zero in the model or loss_fn"
            )
        self.base_error = self.worst_error

    def __call__(self, xi: Tensor | None, out: Tensor | None) -> float:
        self.space.move_to(xi)
        self.passes += 1
        value, wrong, counted = 0.0, 0, 0

        def losses() -> Iterator[Tensor]:
            nonlocal value, wrong, counted
            for weight, piece in self.pieces:
                outcome = self.objective(self.space.model, piece)
                part = float(outcome.loss.detach())
                if not math.isfinite(part):
                    raise ValueError(self._not_finite(part, xi))
                value += weight * part
                wrong += outcome.wrong or 0
                counted += outcome.counted or 0
                if out is not None and not outcome.loss.requires_grad:
                    raise ValueError(
                        "the loss does not depend on any trainable parameter; check loss_fn and requires_grad"
                    )
                yield outcome.loss * weight if weight != 1 else outcome.loss

        with torch.set_grad_enabled(out is not None or self.objective.loss_fn is not None):
            if out is None:
                for _ in losses():
                    pass
            else:
                self.space.gradient(losses(), out)
        if counted:
            self.worst_error = max(wrong / counted, self.worst_error or 0.0)
        return value

    def losses(self) -> Iterator[Tensor]:
        """Walk through the losses of the pieces, which add up to the batch's, with their graphs."""
        for weight, piece in self.pieces:
            yield self.objective(self.space.model, piece).loss * weight

    def _not_finite(self, value: float, xi: Tensor | None) -> str:
        distance = 0.0 if xi is None else float(torch.linalg.vector_norm(xi))
        if distance == 0:
            return f"the loss of batch {self.index} is {value}; look for NaN in the data, or labels out of range"
        word = "NaN" if math.isnan(value) else "infinite"
        return (
            f"the loss of batch {self.index} became {word} at a distance of {distance:.4g} from the weights; "
            "use a smaller rho"
        )


class _Search:
    """Runs the units of work: (batch, radius, start), each independent of the others."""

    def __init__(
        self, space: WeightSpace, *, ascent: str, steps: int, tol: float, samples: int, seed: int, bar: tqdm[Any]
    ) -> None:
        self.space, self.how, self.ascend, self.bar = space, space.measure, ASCENTS[ascent], bar
        self.steps, self.tol, self.samples, self.seed = steps, tol, samples, seed
        self.gradient = space.empty()
        self.buffers = Buffers(self.gradient)

    def run(self, batch: _Batch, rho: float, start: int, *, last: bool) -> tuple[BatchResult, Tensor | None]:
        """Do one unit, the last of its batch or not; the worst vector comes with it where one is sought."""
        began = time.perf_counter()
        batch.worst_error, batch.passes = batch.base_error, 0
        if self.how.case == "gradient-norm":
            norm = float(torch.linalg.vector_norm(batch.base_gradient))
            return self._result(batch, rho, start, began, value=norm, history=(batch.base,)), None
        if self.how.case == "hessian":
            return self._hessian(batch, rho, start, began), None
        if self.how.case == "average":
            return self._average(batch, rho, start, began), None
        if last:  # nobody needs the gradient at the weights after this: work in its memory
            self.buffers.adopt(self.gradient)
        found = self._worst(batch, rho, start, began)
        if last:
            self.buffers.keep(found[1])
            self.gradient = self.buffers.take()
            self.buffers.give(self.gradient)
        return found

    def _result(self, batch: _Batch, rho: float, start: int, began: float, **found: Any) -> BatchResult:
        values: dict[str, Any] = {
            "batch": batch.index, "rho": rho, "start": start, "base_loss": batch.base, "worst_loss": batch.base,
            "base_error": batch.base_error, "worst_error": batch.worst_error, "random_start": False,
            # The pass at the weights is shared, but every unit needs it.
            "passes": batch.passes + 1, "gap": None, "converged": None, "spread": None, "trace": None, "leaving": 0,
        }  # fmt: skip
        return BatchResult(**{**values, **found}, seconds=time.perf_counter() - began)

    def _hessian(self, batch: _Batch, rho: float, start: int, began: float) -> BatchResult:
        operator = HessianOperator(self.space, batch.losses)
        top = float(largest_eigenvalues(operator, seed=self.seed)[0])
        trace, spread = hutch_plus_plus(operator, self.samples, seed=self.seed)
        batch.passes += operator.products
        return self._result(batch, rho, start, began, value=top, history=(batch.base,), trace=trace, spread=spread)

    def _average(self, batch: _Batch, rho: float, start: int, began: float) -> BatchResult:
        losses = []
        for sample in range(self.samples):
            xi = self._random(batch, sample).mul_(rho)
            losses.append(batch(xi, None))
            self._show(rho, losses[-1], max(losses))
        mean = statistics.fmean(losses)
        spread = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
        return self._result(
            batch, rho, start, began, value=mean - batch.base, worst_loss=max(losses), history=tuple(losses),
            spread=spread,
        )  # fmt: skip

    def _random(self, batch: _Batch, number: int) -> Tensor:
        xi = self.space.random(_generator(self.seed, batch.index, number))
        if not bool(xi.any()):
            raise ValueError(
                "there is no direction to move in: all trainable weights are zero or belong to pairs of rank 0 "
                "(LoRA's B = 0 before training); measure a trained model"
            )
        return xi

    def _worst(self, batch: _Batch, rho: float, start: int, began: float) -> tuple[BatchResult, Tensor]:
        ball: Ball = RoundBall(rho) if self.how.p == 2 else CubeBall(rho)
        flat = ball.reach(batch.base_gradient) <= 10 * torch.finfo(self.space.dtype).eps * abs(batch.base)
        self.buffers.keep(batch.base_gradient)
        xi, known = self.buffers.take(), None
        if start == 0 and not flat:
            xi.zero_()
            known = (batch.base, batch.base_gradient)
        else:
            ball.to_sphere_(xi.copy_(self._random(batch, start)))
        found = self.ascend(
            batch, xi, ball, self.steps, tol=self.tol, base=batch.base, first=known, buffers=self.buffers,
            callback=lambda value, top: self._show(rho, value, top),
        )  # fmt: skip
        self.bar.update(self.steps + 1 - len(found.history))
        point, value = found.point, found.value
        if value < batch.base:  # a start that never rose: the centre belongs to the ball
            point, value = point.zero_(), batch.base
        rise = value - batch.base
        leaving = 0
        if self.how.geodesic == "exact" and self.how.pairs == "mix":
            self.space.move_to(point)
            leaving = self.space.leaving()
        return self._result(
            batch, rho, start, began, value=rise, worst_loss=value, history=found.history, gap=found.gap,
            converged=found.converged, random_start=flat, leaving=leaving,
        ), point  # fmt: skip

    def _show(self, rho: float, value: float, top: float) -> None:
        self.bar.update()
        self.bar.set_postfix(rho=rho, loss=f"{value:.4f}", best=f"{top:.4f}", refresh=False)


def checked_radii(how: Measure, rho: float | Iterable[float] | None) -> tuple[tuple[float, ...], bool]:
    if how.local:
        if rho is not None:
            raise ValueError(f"case={how.case!r} has no radius; leave rho out")
        return (0.0,), True
    if rho is None:
        if how.rho is None:
            raise ValueError(f"give a radius rho: the measure {how.name!r} has no default")
        rho = how.rho
    scalar = isinstance(rho, Real) or (isinstance(rho, Tensor) and rho.dim() == 0)
    try:
        if isinstance(rho, str):
            raise TypeError
        radii = tuple(float(r) for r in ([rho] if scalar else rho))  # type: ignore[union-attr, arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}") from None
    if not radii or any(not (math.isfinite(r) and r > 0) for r in radii):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}")
    if len(set(radii)) < len(radii):
        raise ValueError(f"rho names a radius twice: {rho!r}")
    return radii, scalar


def _switched(measure: str | Measure, **switches: Any) -> Measure:
    how = measure_with(measure, **switches)
    if how.case == "average" and how.p != 2:
        raise ValueError('case="average" draws Gaussian directions, for which p = inf means nothing; use p=2')
    return how


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    measure: str | Measure = "geodesic-inv",
    rho: float | Iterable[float] | None = None,
    steps: int = 20,
    tol: float = 3e-4,
    ascent: str = "power",
    restarts: int = 0,
    samples: int = 20,
    seed: int = 0,
    geodesic: str | None = None,
    norm: str | None = None,
    symmetry: str | None = None,
    relaxation: float | None = None,
    relaxation_kind: str | None = None,
    case: str | None = None,
    p: float | None = None,
    normalize_logits: bool = False,
    micro_batch: int | None = None,
    pairs: Sequence[SymmetricPair] | None = None,
    verify: bool = False,
    keep_directions: bool | None = None,
    progress: bool = True,
    group: ProcessGroup | None = None,
) -> SharpnessResult:
    r"""Measure the sharpness of a model: the worst rise of the loss within a ball around its weights.

    .. math:: S(θ) = \operatorname{mean}_{\text{batches}}\; \max_{ξ \text{ horizontal},\, \|ξ\|_θ \le ρ}
              L_{\text{batch}}(R_θ(ξ)) - L_{\text{batch}}(θ)

    Parameters
    ----------
    model : nn.Module
        Any network whose attention layers are known (``quotient_manifolds.symmetries.find``); any network at all for
        ``"adaptive"`` and ``"euclidean"``. Its trainable parameters are measured.
    batches : iterable
        Batches on the model's device: dicts with labels for a transformers model, pairs (x, y), or what ``loss_fn``
        takes.
    loss_fn : callable, optional
        ``loss_fn(model, batch)`` → scalar tensor. By default ``model(**batch).loss`` for a dict, else the
        cross-entropy of ``model(x)`` against y.
    measure : str or Measure
        ``"geodesic-inv"``, ``"geodesic-mix"`` (attention pairs on the GL(h) quotient, every other weight in units of
        its own size), ``"adaptive"`` (every weight in units of its own size), ``"euclidean"``, or ``"gradient-norm"``
        (geodesic-inv for small ρ), ``"riemannian-hessian"`` (λ_max as the value, and the trace) or
        ``"euclidean-hessian"``, its baseline.
    rho : float or iterable of float, optional
        Radius of the ball in the measure's metric; for "adaptive" a fraction of the weights' size. By default the
        measure's own, ``MEASURES[name].rho``. Every radius has its ascent from the weights, which share only the pass
        there, so its result does not depend on the others.
    steps : int
        Upper bound on the steps of an ascent; one forward and one backward pass each.
    tol : float
        Stop an ascent when a first-order step offers less than this share of the rise found so far; 0 takes all steps.
    ascent : {"power", "apgd"}
        The generalised power method or Auto-PGD, see :mod:`sharpness.ascent`.
    restarts : int
        Further ascents from random directions; the best counts.
    samples : int
        Random directions of ``case="average"``, one forward pass each; or products of the Hessian for its trace,
        rounded down to a multiple of 3.
    seed : int
        The random directions depend on (seed, batch, number of the start or sample) alone.
    geodesic, norm, symmetry, relaxation, relaxation_kind, case, p : optional
        Switches of the measure, see :class:`Measure`.
    normalize_logits : bool
        Divide every example's logits by their spread before the cross-entropy
        (:func:`sharpness.losses.normalized_logits`).
    micro_batch : int, optional
        Examples that pass through the model at a time; the result is that of the whole batch, with less memory.
    pairs : sequence of SymmetricPair, optional
        The pairs to divide out, for example ``symmetries.find(model, extra=[…])`` or ``find(model,
        key_bias="drop")``; by default ``find(model)``. A pair without a group counts as any other weight.
    verify : bool
        First act on every pair by a random group element and compare the outputs (``symmetries.verify``).
    keep_directions : bool, optional
        Keep the worst direction of every batch and radius for ``result.direction``, in main memory; each is as large
        as the model. By default the first ones, up to 2 GiB in all.
    progress : bool
        Show a progress bar (on a terminal only).
    group : ProcessGroup, optional
        Spread the work over these processes of ``torch.distributed``, all of which make the same call; every one
        returns the whole result. Without it nothing is communicated.

    Returns
    -------
    SharpnessResult
        ``value`` is a float, or a dict by radius if ``rho`` is not a number; ``print`` gives a table.

    Raises
    ------
    UnknownAttentionError
        A module computes attention and no adapter knows it (geodesic measures only).
    ValueError
        No batches, a batch on another device, no trainable parameter, a loss that is NaN or differs between two
        identical passes, an argument out of range, or switches whose combination means nothing.
    RemoteError
        Another process of the group failed; a ``RuntimeError``.

    Notes
    -----
    Paper, §5.2 and Algorithm 1. The model is measured in evaluation mode; weights, gradients, modes, buffers and
    ``requires_grad`` are as before afterwards, bit for bit, whatever happens: the weights are never written to.
    Half-precision models are measured in float32, see :meth:`sharpness.space.WeightSpace.attached`.

    Examples
    --------
    The sharpness of an attention layer, and of an equivalent one whose heads are moved along their symmetry:

    >>> import torch
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import act_randomly_
    >>> _ = torch.manual_seed(0)
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> batches = [(torch.randn(4, 3, 8), torch.arange(4))]
    >>> loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])
    >>> before = evaluate(layer, batches, loss, measure="geodesic-inv", rho=0.1).value
    >>> moved = act_randomly_(layer)
    >>> after = evaluate(layer, batches, loss, measure="geodesic-inv", rho=0.1).value
    >>> before > 0 and abs(after / before - 1) < 1e-3
    True
    """
    how = _switched(
        measure, geodesic=geodesic, norm=norm, symmetry=symmetry, relaxation=relaxation,
        relaxation_kind=relaxation_kind, case=case, p=p,
    )  # fmt: skip
    radii, scalar = checked_radii(how, rho)
    if steps < 1 or restarts < 0:
        raise ValueError(
            f"steps must be at least 1 and restarts at least 0, got steps = {steps}, restarts = {restarts}"
        )
    if samples < 1 or not tol >= 0:
        raise ValueError(f"samples must be at least 1 and tol at least 0, got samples = {samples}, tol = {tol}")
    if ascent not in ASCENTS:
        raise ValueError(f"unknown ascent {ascent!r}; choose one of {', '.join(ASCENTS)}")
    if restarts and how.case != "worst":
        raise ValueError(f"restarts belong to case='worst'; leave them out for {how.case!r}")
    objective = Objective(loss_fn, normalize_logits, micro_batch)
    if isinstance(batches, Mapping):
        raise ValueError("batches is a single dict; wrap it in a list")
    world = distributed.World(group)
    found: list[BatchResult] = []
    directions: dict[tuple[int, float], tuple[float, Direction]] = {}
    with world.failing_together(), ExitStack() as stack:
        stream = iter(batches)
        try:
            first = next(stream)
        except StopIteration:
            raise ValueError("batches is empty; give at least one batch") from None
        stack.enter_context(undisturbed(model))
        space = WeightSpace(model, how, pairs)
        _check_device(first, 0, space.device)
        _check_first(model, objective, first, coverage=how.divides and pairs is None)
        if verify and how.divides:
            _verify(model, loss_fn, first, seed, pairs)
        stack.enter_context(space.attached())
        starts = range(restarts + 1)
        effort = {"worst": steps, "average": samples}.get(how.case, 0)
        count = len(batches) if isinstance(batches, Sized) else None
        bar = tqdm(
            total=None if count is None else len(world.share(count * len(radii) * len(starts))) * effort,
            desc=how.name, unit="step", disable=None if progress else True,
        )  # fmt: skip
        stack.enter_context(bar)
        search = _Search(space, ascent=ascent, steps=steps, tol=tol, samples=samples, seed=seed, bar=bar)
        for index, batch in enumerate(itertools.chain([first], stream)):
            units = [(rho, start) for rho in radii for start in starts]
            mine = [u for i, u in enumerate(units, index * len(units)) if world.owns(i)]
            if not mine:
                continue
            _check_device(batch, index, space.device)
            task = _Batch(space, objective, batch, index, search.gradient)
            for number, (r, start) in enumerate(mine, 1):
                result, point = search.run(task, r, start, last=number == len(mine))
                found.append(result)
                if point is None:
                    continue
                key = (index, r)
                size = space.dim * point.element_size()
                room = keep_directions is None and (key in directions or len(directions) * size < _DIRECTIONS)
                if (keep_directions or room) and (key not in directions or result.value > directions[key][0]):
                    directions[key] = (result.value, space.direction(point))
                search.buffers.adopt(point)
    units_found = sorted(world.gather(found), key=lambda r: (r.batch, radii.index(r.rho), r.start))
    best = _best(units_found)
    return SharpnessResult(
        how,
        radii,
        steps,
        tol,
        ascent,
        restarts,
        samples,
        seed,
        type(model).__name__,
        space.weakest(),
        space.absent(),
        space.floored(),
        batches=best,
        scalar=scalar,
        # Only the process that found a worst direction has it.
        _directions={
            (r.batch, r.rho): directions[r.batch, r.rho][1]
            for r in best
            if (r.batch, r.rho) in directions and directions[r.batch, r.rho][0] == r.value
        },
    )


def _best(units: list[BatchResult]) -> tuple[BatchResult, ...]:
    """Take the best start of every batch and radius, with the passes and seconds of all and the worst error of any."""
    found = []
    for _, same in itertools.groupby(units, key=lambda r: (r.batch, r.rho)):
        starts = list(same)
        best = max(starts, key=lambda r: r.value)
        errors = [r.worst_error for r in starts if r.worst_error is not None]
        found.append(
            dataclasses.replace(
                best,
                passes=1 + sum(r.passes - 1 for r in starts),
                seconds=sum(r.seconds for r in starts),
                worst_error=max(errors) if errors else None,
            )
        )
    return tuple(found)
