"""Batches in, sharpness out."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quotient_manifolds import symmetries
from quotient_manifolds.batches import tensors, tree_map
from quotient_manifolds.symmetries import SymmetricPair

from . import distributed
from .ascent import ASCENTS
from .direction import Direction
from .losses import LossFunction, Objective
from .measures import Measure, measure_with
from .model_state import preserve_model_state
from .progress import bar as progress_bar
from .results import BatchResult, SharpnessResult
from .space import WeightSpace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
from .search import BatchLoss, Search

__all__ = ["checked_radii", "evaluate"]


#: Bytes of directions that are kept unasked.
_DIRECTIONS = 2 * 2**30


def _whole(name: str, value: Any, least: int, most: float = math.inf) -> int:
    """Check an argument that counts something."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number < most:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def _on(device: torch.device, batch: Any) -> Any:
    """Move a batch to a device; one that is there already is itself."""
    return batch if all(t.device == device for t in tensors(batch)) else tree_map(lambda t: t.to(device), batch)


def _verify(
    model: nn.Module, loss_fn: LossFunction | None, batch: Any, seed: int, pairs: Sequence[SymmetricPair] | None
) -> None:
    """Raise if a pair that is about to be divided out is no symmetry of the loss or of the outputs."""
    forward = symmetries.default_forward if loss_fn is None else loss_fn
    known = {p.name for p in symmetries.find_symmetric_pairs(model)}
    extra = [p for p in pairs or () if p.group is not None and p.name not in known]
    report = symmetries.verify(model, batch, seed, forward=forward, extra=extra)
    if not report.ok:
        raise ValueError(f"verify=True found weights that are no symmetry of {type(model).__name__}:\n{report}")


def _check_first(model: nn.Module, objective: Objective, batch: Any, *, coverage: bool) -> None:
    """Look whether the loss is finite, and every attention layer known if pairs are divided out."""

    def run() -> float:
        # A loss of one's own may contain gradients.
        with torch.set_grad_enabled(objective.loss_fn is not None):
            parts = objective.pieces(model, batch)
            return sum(w * float(objective(model, part).loss.detach()) for w, part in parts)

    loss = symmetries.check_coverage(model, run) if coverage else run()
    if not math.isfinite(loss):
        raise ValueError(f"the loss of batch 0 is {loss}; a sharpness needs a finite loss to start from")
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
        if isinstance(rho, (str, bool, Mapping)):
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
        Any network whose attention layers are known (``quotient_manifolds.symmetries.find_symmetric_pairs``); any
        network at all for ``"adaptive"`` and ``"euclidean"``. Its trainable parameters are measured.
    batches : iterable
        Dicts with labels for a transformers model, pairs (x, y), or what ``loss_fn`` takes; tensors are moved to the
        model's device.
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
        measure's own, ``MEASURES[name].rho``. Every radius has its ascent from the weights; what is found at a smaller
        radius counts for the larger ones too, whose balls contain it, so that sharpness never falls with the radius.
    steps : int
        Upper bound on the steps of an ascent; one forward and one backward pass each. Where the loss falls outwards at
        the best point of the sphere, further ascents look inside the ball, on spheres of half the radius each.
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
        The pairs to divide out, for example ``find_symmetric_pairs(model, extra=[…])`` or
        ``find_symmetric_pairs(model, key_bias="drop")``; by default ``find_symmetric_pairs(model)``. A pair without a
        group counts as any other weight.
    verify : bool
        First act on every pair by a random group element and compare the outputs (``symmetries.verify``).
    keep_directions : bool, optional
        Keep the worst direction of every batch and radius for ``result.direction``, in main memory; each is as large
        as the model. By default the first ones, up to 2 GiB in all.
    progress : bool
        Show a progress bar; where there is no terminal, a line a minute.
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
        No batches, no trainable parameter, a loss that is NaN or differs between two
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
    >>> from quotient_manifolds.symmetries import apply_random_symmetry_
    >>> _ = torch.manual_seed(0)
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> batches = [(torch.randn(4, 3, 8), torch.arange(4))]
    >>> loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])
    >>> before = evaluate(layer, batches, loss, measure="geodesic-inv", rho=0.1).value
    >>> moved = apply_random_symmetry_(layer)
    >>> after = evaluate(layer, batches, loss, measure="geodesic-inv", rho=0.1).value
    >>> before > 0 and abs(after / before - 1) < 1e-3
    True
    """
    how = _switched(
        measure, geodesic=geodesic, norm=norm, symmetry=symmetry, relaxation=relaxation,
        relaxation_kind=relaxation_kind, case=case, p=p,
    )  # fmt: skip
    radii, scalar = checked_radii(how, rho)
    steps, restarts, samples = _whole("steps", steps, 1), _whole("restarts", restarts, 0), _whole("samples", samples, 1)
    seed = _whole("seed", seed, 0, 2**63)
    if isinstance(tol, bool) or not isinstance(tol, Real) or not 0 <= tol < math.inf:
        raise ValueError(f"tol must be a number of at least 0, got {tol!r}")
    if not isinstance(ascent, str) or ascent not in ASCENTS:
        raise ValueError(f"unknown ascent {ascent!r}; choose one of {', '.join(ASCENTS)}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, got {type(model).__name__}")
    if restarts and how.case != "worst":
        raise ValueError(f"restarts belong to case='worst'; leave them out for {how.case!r}")
    objective = Objective(loss_fn, normalize_logits, micro_batch)
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches is a single {type(batches).__name__}; wrap it in a list, or give any iterable of batches"
        )
    world = distributed.World(group)
    found: list[BatchResult] = []
    directions: dict[tuple[int, float], tuple[float, Direction]] = {}

    def work() -> WeightSpace:
        stream = iter(batches)
        try:
            first = next(stream)
        except StopIteration:
            raise ValueError("batches is empty; give at least one batch") from None
        space = WeightSpace(model, how, pairs)
        first = _on(space.device, first)
        _check_first(model, objective, first, coverage=how.divides and pairs is None)
        if verify and how.divides:
            _verify(model, loss_fn, first, seed, pairs)
        starts = range(restarts + 1)
        effort = {"worst": steps, "average": samples}.get(how.case, 0)
        count = len(batches) if isinstance(batches, Sized) else None
        total = None if count is None else len(world.share(count * len(radii) * len(starts))) * effort
        with space.attached(), progress_bar(total, how.name, "step", progress=progress) as shown:
            search = Search(space, ascent=ascent, steps=steps, tol=tol, samples=samples, seed=seed, bar=shown)
            for index, batch in enumerate(itertools.chain([first], stream)):
                units = [(rho, start) for rho in radii for start in starts]
                mine = [u for i, u in enumerate(units, index * len(units)) if world.owns(i)]
                if not mine:
                    continue
                task = BatchLoss(space, objective, _on(space.device, batch), index, search.gradient)
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
        return space

    with world.failing_together():
        space = preserve_model_state(model, work)
    units_found = sorted(world.gather(found), key=lambda r: (r.batch, radii.index(r.rho), r.start))
    best = [(r, r.rho) for r in _best(units_found)]
    if how.case == "worst":
        best = sorted(_nested([r for r, _ in best]), key=lambda pair: (pair[0].batch, radii.index(pair[0].rho)))
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
        batches=tuple(r for r, _ in best),
        scalar=scalar,
        # Only the process that found a worst direction has it.
        _directions={
            (r.batch, r.rho): directions[r.batch, origin][1]
            for r, origin in best
            if (r.batch, origin) in directions and directions[r.batch, origin][0] == r.value
        },
    )


def _nested(found: Sequence[BatchResult]) -> Iterator[tuple[BatchResult, float]]:
    """Count for every ball what was found in the smaller ones, which it contains; with the radius where it was."""
    for _, same in itertools.groupby(found, key=lambda r: r.batch):
        inner, origin = None, 0.0
        for outer in sorted(same, key=lambda r: r.rho):
            errors = [r.worst_error for r in (inner, outer) if r is not None and r.worst_error is not None]
            if inner is None or outer.value >= inner.value:
                inner, origin = outer, outer.rho
            inner = dataclasses.replace(
                inner, rho=outer.rho, passes=outer.passes, seconds=outer.seconds, worst_error=max(errors, default=None)
            )
            yield inner, origin


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
