"""Batches in, sharpness out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from quotient_manifolds import symmetries
from quotient_manifolds.symmetries import SymmetricPair

from . import distributed
from .ascent import ASCENTS
from .direction import Direction
from .losses import LossFunction, Objective, tensors
from .measures import Measure, measure_with
from .results import BatchResult, SharpnessResult
from .space import WeightSpace
from .undisturbed import undisturbed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
from .search import BatchLoss, Search

__all__ = ["checked_radii", "evaluate"]


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


def checked_radii(how: Measure, rho: float | Iterable[float] | None) -> tuple[tuple[float, ...], bool]:
    """Give the radii of a measure, and whether a single number was asked for; a ValueError says what is wrong."""
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
        search = Search(space, ascent=ascent, steps=steps, tol=tol, samples=samples, seed=seed, bar=bar)
        for index, batch in enumerate(itertools.chain([first], stream)):
            units = [(rho, start) for rho in radii for start in starts]
            mine = [u for i, u in enumerate(units, index * len(units)) if world.owns(i)]
            if not mine:
                continue
            _check_device(batch, index, space.device)
            task = BatchLoss(space, objective, batch, index, search.gradient)
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
