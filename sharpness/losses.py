"""The loss and error rate of a batch, whole or in pieces that need less memory; and as a function of coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.linalg import as_count, at_least_float32, finite
from quotient_manifolds.passes import default_forward, eager, to_device
from quotient_manifolds.symmetries import NotASymmetryError
from quotient_manifolds.symmetries.lora import zero_norm
from quotient_manifolds.weights import plain_class

from .batches import IGNORED, count_examples, count_labels, labels_of, rows, to_float32
from .errors import naming
from .space import HIDES, WeightSpace
from .watching import Reentrant, computed_in, explain

__all__ = ["LossFunction"]

#: ``loss_fn(model, batch) -> scalar tensor``
LossFunction = Callable[[nn.Module, Any], Tensor]
#: Up to this many roundings of the weights' dtype, and never above the second number, two equal passes may differ
#: relatively: threads add up in no fixed order.
_REPEATED, _ROUGHEST = 200, 1e-3
#: A residual that all pairs share is the precision of the computations, at most 0.014 in half precision; up to this it
#: is not the pairs' own, and losses may differ by three times as much.
_SHARED = 0.03
#: Losses below this are compared as if they were this large: they are differences of numbers of order one.
SMALL = 1e-3


class Outcome(NamedTuple):
    """One forward pass: its loss, a scalar with its graph; in classification numbers of errors, labels and classes."""

    loss: Tensor
    wrong: int = 0
    counted: int = 0
    classes: int = 0


def default_loss(model: nn.Module, batch: Any) -> Outcome:
    """Run a model and return its loss: ``.loss`` for a dict, else the cross-entropy of ``model(x)`` against ``y``.

    A batch is a mapping, inputs and labels of a transformers model by name, or a pair (x, y), with labels as
    ``torch.nn.functional.cross_entropy`` takes them. Labels of another form, and tokens or labels that the model does
    not have, raise a ValueError.
    """
    by_name = isinstance(batch, Mapping)
    if not by_name and not (isinstance(batch, (list, tuple)) and len(batch) == 2):
        raise ValueError(
            f"a batch is a dict for a transformers model or a pair (x, y), but this one is {type(batch).__name__}; "
            "pass loss_fn(model, batch) for anything else, and wrap a single batch in a list"
        )
    labels = batch.get("labels") if by_name else batch[1]
    if isinstance(labels, Tensor) and 0 in labels.shape:
        raise ValueError("a batch has no labels; leave it out")
    output = default_forward(model, batch)
    scores = scores_of(output)
    loss: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if (by_name and loss is None) or (not by_name and (scores is None or scores.shape[1:2] == (1,))):
        raise ValueError(f"{plain_class(model).__name__} {_without_loss(model, batch, output)}")
    classification = isinstance(scores, Tensor) and isinstance(labels, Tensor) and not labels.is_floating_point()
    classification = classification and (scores.dim(), labels.dim()) == (2, 1) and scores.shape[1] >= 2
    if classification and scores.element_size() < 4:
        rough, scores = None if loss is None else float(loss.detach()), scores.to(at_least_float32(scores.dtype))
        exact = F.cross_entropy(scores, labels)  # a mean in half precision has three digits
        loss = exact if rough is None or abs(float(exact.detach()) - rough) <= 0.02 * max(abs(rough), 1.0) else loss
    if not by_name:
        try:
            loss = F.cross_entropy(scores, labels)
        except Exception as error:
            with naming(f"the labels do not fit the scores of {plain_class(model).__name__}"):
                explain(error, model)
                raise
    if not classification:
        return Outcome(loss)
    counted = labels != IGNORED
    wrong = int(((scores.detach().argmax(1) != labels) & counted).sum())
    return Outcome(loss, wrong, int(counted.sum()), scores.shape[1])


def _without_loss(model: nn.Module, batch: Any, output: Any) -> str:
    """Say what a model returned instead of a loss, and what mends it."""
    if isinstance(batch, Mapping):
        fix = "load a class with a head for them, such as …ForSequenceClassification"
        if isinstance(output, tuple) and hasattr(model, "config"):
            fix = "set model.config.return_dict = True"
        elif "labels" not in batch:
            fix = "add the labels"
        return f"returned no loss for a dict with the keys {sorted(batch)}; {fix}, or pass loss_fn"
    if scores_of(output) is None:
        return f"returned {type(output).__name__} without logits; pass loss_fn"
    return (
        "returned one score per example, for which cross-entropy is always 0; for a regression pass loss_fn, or make "
        "batches dicts, for a model that returns its own loss"
    )


def scores_of(output: Any) -> Any:
    """Return the scores in a model's output: the output itself, or its ``logits``; None where there are none."""
    if isinstance(output, Tensor):
        return output
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)


@dataclass(frozen=True)
class Objective:
    """The function that is maximised on a batch: ``loss_fn(model, batch)``, or by default :func:`default_loss`.

    With ``micro_batch`` a batch is divided into pieces of that many examples, which need less memory:

    >>> objective, model = Objective(micro_batch=2), nn.Linear(2, 3)
    >>> batch = torch.randn(4, 2), torch.tensor([0, 2, 1, -100])  # a padded label, −100, has no weight
    >>> parts = objective.pieces(model, batch)
    >>> whole = F.cross_entropy(model(batch[0]), batch[1])
    >>> torch.allclose(sum(weight * objective(model, part).loss for weight, part in parts), whole)
    True
    """

    loss_fn: LossFunction | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loss_fn, nn.Module) or not (self.loss_fn is None or callable(self.loss_fn)):
            raise ValueError(
                f"loss_fn is called as loss_fn(model, batch), so {type(self.loss_fn).__name__} cannot be one; write "
                "lambda model, batch: criterion(model(batch[0]), batch[1])"
            )
        if self.micro_batch is not None:
            object.__setattr__(self, "micro_batch", as_count("micro_batch", self.micro_batch))

    def __call__(self, model: nn.Module, batch: Any, *, graph: bool = True) -> Outcome:
        """Run the model on a batch, or on a piece of one; for its value alone without a graph."""
        if self.loss_fn is None:
            try:
                with nullcontext() if graph else torch.no_grad():
                    outcome = default_loss(model, batch)
            except IndexError as error:
                explain(error, model)
                raise
        else:
            with nullcontext() if graph else torch.enable_grad():  # it may contain gradients
                outcome = Outcome(self.loss_fn(model, batch))
            if not isinstance(outcome.loss, Tensor):
                raise ValueError(f"loss_fn must return a scalar tensor, but it returned {type(outcome.loss).__name__}")
        if outcome.loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, but it has shape {tuple(outcome.loss.shape)}; take the mean")
        return outcome

    def value(self, model: nn.Module, batch: Any) -> float:
        """Compute the loss of a batch, piece by piece."""
        return sum(w * float(self(model, part, graph=False).loss.detach()) for w, part in self.pieces(model, batch))

    def pieces(self, model: nn.Module, batch: Any) -> list[tuple[float, Any]]:
        """Split a batch into pieces with weights for their losses: the shares of the labels that are not ignored."""
        if self.micro_batch is None:
            return [(1.0, batch)]
        count, size = count_examples(batch), self.micro_batch
        parts = [rows(batch, slice(i, i + size), count) for i in range(0, count, size)]
        weights = [count_labels(model, part) for part in parts]
        total = sum(weights)
        if total == 0:
            raise ValueError("all labels of a batch are ignored (-100); leave the batch out")
        return [(w / total, part) for w, part in zip(weights, parts, strict=True) if w]

    def check_pieces(self, model: nn.Module, batch: Any, *, all_of_them: bool = True) -> None:
        """Raise if the weighted losses of the parts of a piece are not the loss of the piece.

        That happens for a loss that is not a mean over examples or labels, or is random, and for a layer that mixes
        examples. Every piece (or only the first, at the cost of its own pass) is compared with two halves of it, split
        by class where classes are known; where pieces are single examples, neighbours are taken together.
        """
        assert self.micro_batch is not None
        count, step = count_examples(batch), max(2, self.micro_batch)
        starts = range(0, count - 1, step if self.micro_batch > 1 else 1)
        for start in starts if all_of_them else starts[:1]:
            piece, size = rows(batch, slice(start, start + step), count), min(step, count - start)
            if count_labels(model, piece) == 0:
                continue
            labels = labels_of(piece)
            if labels is not None and labels.dim() == 1:  # by class: similar halves would not reveal class weights
                piece = rows(piece, labels.argsort(stable=True), size)
            both = replace(self, micro_batch=None).value(model, piece)
            with naming("micro_batch makes pieces that the model does not take; leave it out"):
                apart = replace(self, micro_batch=-(-size // 2)).value(model, piece)
            bound = max(1e-5, min(1e3 * rounding_error(model), 1e-2)) * max(abs(both), abs(apart), 1e-3)
            if math.isfinite(both) and abs(both - apart) > bound:
                raise ValueError(
                    f"micro_batch changes the loss: {size} examples give {both:.8g} together and {apart:.8g} as two "
                    "halves; the loss must be a mean over examples or labels without weights of its own, it must not "
                    "be random, and no layer may mix examples; leave micro_batch out, or let loss_fn take the mean"
                )


def check_batches(batches: object) -> None:
    """Raise for a single batch, and for what cannot be iterated over."""
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches is a single {type(batches).__name__}; wrap it in a list, or give any iterable of batches"
        )


def as_list(batches: Iterable[Any]) -> list[Any]:
    """List batches, of which there must be one at least."""
    check_batches(batches)
    found = list(batches)
    if not found:
        raise ValueError("batches is empty; pass at least one batch")
    return found


def rounding_error(model: nn.Module) -> float:
    """Return that of the model's roughest weights."""
    return max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point() or p.is_complex())


# -- as a function of coordinates --------------------------------------------------------------------------------------


class RadiusError(ValueError):
    """The loss is not finite somewhere in a ball, because the radius is too large."""


class BatchLoss:
    """The loss of a batch as a function of coordinates; radii and starts share the pass at the weights.

    Before anything is measured, the loss must be the same in a second pass and along the orbits of pairs that are not
    certified by their gradient, and the gradient must be finite.

    Attributes
    ----------
    index : int
        Position of the batch.
    base : float
        Loss at the weights.
    base_gradient : Tensor
        (dim,), the gradient there, until it is released.
    slope : float
        Its length.
    base_error, worst_error : float or None
        Fraction of misclassified examples: at the weights, and the largest so far.
    known : dict
        What every result on the batch says.
    passes : int
        Number of passes.
    """

    def __init__(self, space: WeightSpace, objective: Objective, batch: Any, index: int) -> None:
        batch = to_device(batch, space.device)
        batch = to_float32(batch) if space.in_float32 else batch
        self.space, self.objective, self.index, self.passes = space, objective, index, 0
        one = space.world is None
        self.pieces = objective.pieces(space.model, batch) if one else _share(space, objective, batch)
        self.worst_error: float | None = None
        self.base_gradient = torch.empty(space.dim, dtype=space.dtype, device=space.device)
        self.base = self(None, self.base_gradient)
        self.base_error, first = self.worst_error, self._first
        self._check_second_pass(first)
        if objective.micro_batch is not None:
            objective.check_pieces(space.model, batch, all_of_them=index == 0)
        if any(residual > space.tolerance for residual in space.residuals.values()):
            self._check_symmetries(first)
        self.slope = space.norm(self.base_gradient)
        if not math.isfinite(self.slope) and not space.agree(finite(self.base_gradient)):  # it may have overflowed
            raise ValueError(
                f"the gradient of batch {index} at the weights has NaN or infinite entries although the loss is "
                f"{self.base:.6g}; "
                f"{zero_norm(space.model) or 'check the model and loss_fn for a square root or logarithm at zero'}"
            )
        self.known: dict[str, Any] = {"batch": index, "base_loss": self.base, "base_error": self.base_error}

    def forget_errors(self) -> None:
        """Count only misclassified examples at the weights, and from here on."""
        self.worst_error = self.base_error

    def __call__(self, xi: Tensor | None, out: Tensor | None = None) -> float:
        """Evaluate the loss at a vector (None: at the weights), and write the gradient there to ``out``, if given."""
        space, gradient = self.space, dict[str, Tensor]()
        space.move_to(xi)
        if out is None:
            for _ in self.losses(graph=False):
                pass
        else:
            with torch.enable_grad():
                gradient = space.differentiate(self.losses())
            if xi is None:
                space.see(gradient)
        sums = self._sums if space.world is None else space.world.sum(self._sums)
        value, wrong, counted = sums.tolist()
        value = value if space.world is None else value / space.world.size
        if not math.isfinite(value):
            self._refuse(value, xi)
        if counted:
            self.worst_error = max(wrong / counted, self.worst_error or 0.0)
        if out is not None:
            space.pull_back_from_copies(gradient, xi, out)
        return value

    def losses(self, *, graph: bool = True) -> Iterator[Tensor]:
        """Iterate over the losses of the pieces, with their graphs if asked; they add up to the loss of the batch."""
        self.passes += 1
        self._sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        for k, (weight, piece) in enumerate(self.pieces):
            loss, wrong, counted, _ = self.objective(self.space.model, piece, graph=graph)
            value = float(loss.detach())
            if k == 0:
                self._first = value
            if weight:
                self._sums += torch.tensor([weight * value, wrong, counted], dtype=torch.float64, device="cpu")
            yield loss * weight if weight != 1 else loss

    def _refuse(self, value: float, xi: Tensor | None) -> NoReturn:
        """Raise for a loss that is not finite."""
        distance = 0.0 if xi is None else self.space.norm(xi)
        if distance == 0:
            raise ValueError(
                f"the loss of batch {self.index} is {value}; "
                f"{zero_norm(self.space.model) or 'look for NaN in the data, or labels out of range'}"
            )
        raise RadiusError(
            f"the loss of batch {self.index} became {'NaN' if math.isnan(value) else 'infinite'} at a distance of "
            f"{distance:.4g} from the weights; use a smaller rho"
        )

    def _check_second_pass(self, one: float) -> None:
        """Raise if a second pass through the first piece differs, because the sharpness of noise is meaningless."""
        run = partial(self.objective.value, self.space.model, self.pieces[0][1])
        if self.space.unreached.weights:
            with eager(), Reentrant() as seen:
                two = run()
            if seen.hidden:
                raise ValueError(HIDES)
        else:
            two = run()

        apart = abs(one - two) / max(abs(one), abs(two), SMALL)
        if self.space.agree(apart == 0 or apart <= min(_REPEATED * rounding_error(self.space.model), _ROUGHEST)):
            return
        if not self.space.agree(apart <= min(_REPEATED * computed_in(run), _ROUGHEST)):
            raise ValueError(
                f"two identical passes through batch {self.index} gave different losses ({one:.8g} and {two:.8g}): "
                "switch off dropout that ignores eval(), random augmentation and sampling inside the model or loss_fn"
            )

    def _check_symmetries(self, before: float) -> None:
        """Raise for a pair that is not a symmetry by its gradient, if a move along its orbit confirms that.

        Near a minimum a gradient may be mostly rounding error, which does not affect moves of the weights. Residuals
        that all pairs share come from the precision of the model's computations.
        """
        residuals, tolerance = self.space.residuals, self.space.tolerance
        least = min(residuals.values())
        several = len({(p.module, p.kind) for p in residuals}) > 1
        shared = 3 * least if several and least < _SHARED else 0.0
        rounding, floor = 0.1 * tolerance + 2e-5, SMALL
        if shared >= rounding:
            rounding, floor = shared, 1.0
        failing = [p for p, r in residuals.items() if r > tolerance]
        for pair in sorted(failing, key=lambda p: (-residuals[p], p.name)):
            self.space.move_along_orbit(pair)
            after = self.objective.value(self.space.model, self.pieces[0][1])
            self.space.move_to(None)
            alike = abs(after - before) <= rounding * max(abs(after), abs(before), floor)
            if not self.space.agree(alike):
                raise NotASymmetryError(pair, residuals[pair], tolerance)


def _share(space: WeightSpace, objective: Objective, batch: Any) -> list[tuple[float, Any]]:
    """Return the pieces of a batch that this process passes through a sharded model; each process has equally many.

    FSDP's gradient is the mean over the processes. Where each has different pieces, their weights are multiplied by the
    number of processes.
    """
    assert space.world is not None
    size, rank = space.world.size, space.world.rank
    if size > 1 and objective.micro_batch is None:
        objective = replace(objective, micro_batch=-(-count_examples(batch) // size))
        objective.check_pieces(space.model, batch, all_of_them=False)
    pieces = objective.pieces(space.model, batch)
    if size == 1:
        return pieces
    mine = [(weight * size, piece) for weight, piece in pieces[rank::size]]
    return mine if len(mine) == -(-len(pieces) // size) else [*mine, (0.0, pieces[0][1])]
