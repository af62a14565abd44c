"""The loss of a batch as a function of coordinates, and the loop over batches of every measurement."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quotient_manifolds import symmetries
from quotient_manifolds.batches import to_device
from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.modules import plain_class, plain_names
from quotient_manifolds.symmetries.pairs import CHANGES
from quotient_manifolds.symmetries.registry import candidates, handler_of
from quotient_manifolds.symmetries.stacks import PairList

from .building import trainable
from .distributed import World
from .losses import Objective, Outcome, to_float32
from .measures import Measure, get_measure
from .sharded import ShardedSpace
from .shards import is_sharded_model, resharded
from .space import WeightSpace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BatchLoss", "RadiusError", "measured", "without_gradient"]

#: Number of modules or weights that a remark names.
_NAMED = 12


class RadiusError(ValueError):
    """The loss is not finite somewhere in a ball, because the radius is too large."""


class BatchLoss:
    """The loss of a batch as a function of coordinates; radii and starts share the pass at the weights.

    Attributes
    ----------
    index : int
        Position of the batch.
    base : float
        Loss at the weights.
    base_gradient : Tensor
        (dim,), the gradient there.
    base_error, worst_error : float or None
        Fraction of misclassified examples: at the weights, and the largest since the last reset.
    passes : int
        Number of passes since the last reset.
    """

    def __init__(self, space: WeightSpace, objective: Objective, batch: Any, index: int) -> None:
        self.space, self.objective, self.index = space, objective, index
        batch = to_device(batch, space.model_device)
        if space.in_float32:
            batch = to_float32(batch)
        self.batch, self.pieces = batch, space.share(objective, batch)
        self.worst_error: float | None = None
        self.passes = 0
        self.parts: list[float] = []
        self.base, self.base_gradient = self.with_gradient(None)
        self._check_again()
        self._check_symmetries()
        if not space.world.all(bool(self.base_gradient.isfinite().all())):
            raise ValueError(
                f"the gradient of batch {index} at the weights has NaN or infinite entries although the loss is "
                f"{self.base:.6g}; check the model and loss_fn for a square root or logarithm at zero"
            )
        self.base_error = self.worst_error

    def __call__(self, xi: Tensor) -> float:
        """Evaluate the loss at the vector with coordinates xi."""
        self.space.move_to(xi)
        seen: list[tuple[float, float, Outcome]] = []
        with self.objective.only_values():
            for _ in self.losses(seen):
                pass
        return self._total(seen, xi)

    def with_gradient(self, xi: Tensor | None) -> tuple[float, Tensor]:
        """Evaluate also the gradient, at None that of the weights."""
        self.space.move_to(xi)
        seen: list[tuple[float, float, Outcome]] = []
        with torch.enable_grad():
            gradient = self.space.gradient(self.losses(seen))
        if xi is None:
            self.parts = [loss for _, loss, _ in seen]
        return self._total(seen, xi), gradient

    def losses(self, seen: list[tuple[float, float, Outcome]] | None = None) -> Iterator[Tensor]:
        """Iterate over the losses of the pieces, with their graphs; they add up to the loss of the batch.

        Each piece's weight, loss and outcome are appended to ``seen``.
        """
        for weight, piece in self.pieces:
            outcome = self.objective(self.space.model, piece)
            loss = outcome.loss
            if seen is not None:
                seen.append((weight, float(loss.detach()), replace(outcome, loss=loss.detach())))
            del outcome
            yield loss * weight if weight != 1 else loss

    def _total(self, seen: list[tuple[float, float, Outcome]], xi: Tensor | None) -> float:
        """Add up the losses and errors of the pieces of all processes, and count the pass."""
        self.passes += 1
        value, wrong, counted = 0.0, 0, 0
        for weight, loss, outcome in seen:
            value += weight * loss
            if weight:
                wrong, counted = wrong + (outcome.wrong or 0), counted + (outcome.counted or 0)
        value, wrong, counted = self.space.together(value, wrong, counted)
        if not math.isfinite(value):
            raise self._not_finite(value, xi)
        if counted:
            self.worst_error = max(wrong / counted, self.worst_error or 0.0)
        return value

    def reset(self) -> None:
        """Reset the counts of passes and errors."""
        self.worst_error, self.passes = self.base_error, 0

    def _check_again(self) -> None:
        """Raise if a second pass through the first piece differs, because the sharpness of noise is meaningless."""
        with self.objective.only_values():
            one, two = self.parts[0], float(self.objective(self.space.model, self.pieces[0][1]).loss.detach())
        eps = max(torch.finfo(p.dtype).eps for p in self.space.model.parameters() if p.is_floating_point())
        alike = abs(one - two) <= min(200 * eps, 1e-3) * max(abs(one), abs(two), 1e-3)
        if not self.space.world.all(alike):
            raise ValueError(
                f"two identical passes through batch {self.index} gave different losses ({one:.8g} and {two:.8g}): "
                "switch off dropout that ignores eval(), random augmentation and sampling inside the model or loss_fn"
            )
        if self.index > 0:  # all pieces of batch 0 were checked
            self.objective.check_pieces(self.space.model, self.batch, all_of_them=False)

    def _check_symmetries(self) -> None:
        """Raise for a pair that is not a symmetry by its gradient, if a move along its orbit confirms that.

        Near a minimum a gradient may be mostly rounding error, which does not affect moves of the weights. Residuals
        that all pairs share come from the precision of the model's computations.
        """
        residuals, tolerance = self.space.residuals(), self.space.tolerance
        places = {(p.module, p.kind) for p in residuals}
        least = min(residuals.values(), default=1.0)
        common = 3 * least if len(places) > 1 and least < 0.03 else 0.0  # at most 0.014 in half precision
        rounding, floor = max((0.1 * tolerance + 2e-5, 1e-3), (common, 1.0))
        failing = [p for p, r in residuals.items() if r > tolerance]
        for pair in sorted(failing, key=lambda p: (-residuals[p], p.name)):
            with self.objective.only_values():
                self.space.move_along_orbit(pair)
                moved = float(self.objective(self.space.model, self.pieces[0][1]).loss.detach())
                self.space.move_to(None)
            alike = abs(moved - self.parts[0]) <= rounding * max(abs(moved), abs(self.parts[0]), floor)
            if not self.space.world.all(alike):
                raise symmetries.NotASymmetryError(pair, residuals[pair], tolerance)

    def _not_finite(self, value: float, xi: Tensor | None) -> ValueError:
        distance = 0.0 if xi is None else self.space.norm(xi)
        if distance == 0:
            return ValueError(
                f"the loss of batch {self.index} is {value}; look for NaN in the data, or labels out of range"
            )
        word = "NaN" if math.isnan(value) else "infinite"
        return RadiusError(
            f"the loss of batch {self.index} became {word} at a distance of {distance:.4g} from the weights; "
            "use a smaller rho"
        )


@contextmanager
def measured(
    model: nn.Module, batches: Iterable[Any], measure: Measure, objective: Objective, *,
    pairs: Sequence[SymmetricPair] | None = None, only: str | None = None, group: ProcessGroup | None = None,
    offload: bool = False,
) -> Iterator[tuple[WeightSpace, Iterator[tuple[int, Any]]]]:  # fmt: skip
    """Attach the space of a model, which the first batch helps to find, and number the batches."""
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches is a single {type(batches).__name__}; wrap it in a list, or give any iterable of batches"
        )
    sharded = is_sharded_model(model)
    kind = partial(ShardedSpace, examples=World(group)) if sharded else WeightSpace
    make = partial(kind, only=only, offload=offload)
    together = World(None if sharded else group).failing_together()
    with together, resharded(model), torch.inference_mode(False), torch.enable_grad():
        stream = iter(batches)
        try:
            first = next(stream)
        except StopIteration:
            raise ValueError("batches is empty; pass at least one batch") from None
        first = to_device(first, next(iter(trainable(model, only, whole=False).values())).device)
        remarks: list[str] = []
        loss, known = _check_first(model, objective, first, pairs, remarks, divides=measure.divides)
        space = _space(make, model, measure, known, partial(objective.value, model), first, loss, remarks)
        space.remarks = remarks
        with space.attached():
            yield space, enumerate(itertools.chain([first], stream))


def _space(
    make: Callable[..., WeightSpace], model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None,
    run: Callable[[Any], float], batch: Any, loss: float, remarks: list[str],
) -> WeightSpace:  # fmt: skip
    """Build the space; at a canonical form the loss must be unchanged, with or without centred logits."""
    if measure.form == "own":
        return make(model, measure, pairs)
    found = loss
    for classes in (True, False):
        space = make(model, measure, pairs, classes=classes)
        if space.in_float32 and classes:
            batch = to_float32(batch)
            with make(model, get_measure("euclidean")).attached():
                loss = run(batch)
        with space.attached():
            found = run(batch)
            inside = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
        tolerance = max(1e4 * torch.finfo(space.dtype).eps, 4 * inside)
        if space.world.all(abs(found - loss) <= tolerance * max(abs(loss), 1e-2)):
            if space.form is not None and not space.form.wired and _moves_others(model, space.form.pairs):
                _warn(
                    f"no adapter describes how {plain_class(model).__name__} is wired, so {measure.name} divides out "
                    "its heads and key biases alone, and other symmetries move the result; describe it with "
                    "register_wiring, or use the measure 'geodesic-inv'", remarks,
                )  # fmt: skip
            return space
    raise ValueError(
        f"in the canonical form of {plain_class(model).__name__} the loss is {found:.8g} instead of {loss:.8g}: it is "
        "not wired, or not used, as its class says (hooks, replaced layers, unusual inputs?); register its wiring, or "
        "use the measure 'geodesic-inv'"
    )


def _warn(text: str, remarks: list[str]) -> None:
    """Warn of what also stands in the result, for a warning is easily lost."""
    warnings.warn(text, stacklevel=3)
    remarks.append(text)


def _moves_others(model: nn.Module, pairs: Sequence[SymmetricPair]) -> bool:
    """Tell whether weights outside pairs are trainable, as they are not where adapters alone are."""
    inside = {p for pair in pairs if pair.group is not None for p in pair.parameters()}
    return any(p.requires_grad and p not in inside for p in model.parameters())


def _check_first(
    model: nn.Module, objective: Objective, batch: Any, pairs: Sequence[SymmetricPair] | None, remarks: list[str], *,
    divides: bool,
) -> tuple[float, Sequence[SymmetricPair] | None]:  # fmt: skip
    """Check that the loss is finite, and examine layers of unknown classes unless pairs are given.

    Returns the loss, and the pairs: those given, those found by examination, or None if the model's classes name them.
    """
    run, given = partial(objective.value, model, batch), pairs is not None
    may_examine = divides and not given and not is_sharded_model(model)
    if may_examine and candidates(model):
        pairs = _examined(model, objective, batch, remarks)
    try:
        loss: float = symmetries.check_coverage(model, run, pairs or ()) if divides else run()
    except symmetries.UnknownAttentionError as error:
        if given:
            _warn(f"outside of the pairs that were given, {error}", remarks)
            loss = run()
        elif not may_examine or pairs is not None:
            raise
        else:
            pairs = _examined(model, objective, batch, remarks)
            loss = symmetries.check_coverage(model, run, pairs)
    if not math.isfinite(loss):
        raise ValueError(f"the loss of batch 0 is {loss}; a sharpness needs a finite loss to start from")
    objective.check_pieces(model, batch)
    return loss, pairs


def _examined(model: nn.Module, objective: Objective, batch: Any, remarks: list[str]) -> PairList:
    """Find pairs by an examination on the first batch, and remark what was examined and what came of it."""

    def losses(model: nn.Module, batch: Any) -> list[Tensor]:
        with objective.only_values():
            return [objective(model, part).loss for _, part in objective.pieces(model, batch)]

    pairs, plain = symmetries.find_symmetric_pairs(model, batch=batch, forward=losses), plain_names(model)
    classes = {plain(name): type(m).__name__ for name, m in model.named_modules() if handler_of(m) is None}
    found: dict[str, Counter[str]] = {}
    for p in pairs:
        if p.module in classes:
            found.setdefault(classes[p.module], Counter())[p.reason] += 1
    said = [f"{cls} ({n.pop('', 0)} pairs" + "".join(f"; {why}" for why in n) + ")" for cls, n in found.items()]
    if said:
        remarks.append(f"layers of classes without a handler were examined on the first batch: {', '.join(said)}")
    refused = [p.name for p in pairs if p.reason == CHANGES and p.module not in classes]
    if refused:
        remarks.append(f"left out, for {CHANGES}: {', '.join(refused)}")
    return pairs


def without_gradient(space: WeightSpace, unreached: Collection[str]) -> list[str]:
    """Say in a sentence which weights got no gradient from any batch, if there are any."""
    if not unreached:
        return []
    sizes = space.sizes()
    met = {part for name in sizes if name not in unreached for part in _within(name)}
    # A whole module that is not reached is one name.
    names = list(dict.fromkeys(next(m for m in _within(name) if m not in met) for name in sizes if name in unreached))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [
        f"{sum(sizes[name] for name in unreached):,} of {sum(sizes.values()):,} weights got no gradient from any "
        f"batch, so the result says nothing about them: {', '.join(names[:_NAMED])}{more}"
    ]


def _within(name: str) -> list[str]:
    """List the modules that hold a parameter, from the outside, and its own name."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))
