"""The loss and error rate of a batch, as a whole or in pieces that need less memory."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from quotient_manifolds.linalg import as_count, at_least_float32
from quotient_manifolds.passes import default_forward, eager, floats, tensors, tree_map
from quotient_manifolds.weights import plain_class

from .errors import naming

__all__ = ["LossFunction"]

#: ``loss_fn(model, batch) -> scalar tensor``
LossFunction = Callable[[nn.Module, Any], Tensor]
#: Losses below this are compared as if they were this large: they are differences of numbers of order one.
SMALL = 1e-3
#: The label that cross-entropy ignores, in torch and in transformers.
IGNORED = -100


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
    if classification and scores.dtype != (wide := at_least_float32(scores.dtype)):
        rough, scores = None if loss is None else float(loss.detach()), scores.to(wide)
        exact = F.cross_entropy(scores, labels)  # a mean in half precision has three digits
        loss = exact if rough is None or abs(float(exact.detach()) - rough) <= 0.02 * max(abs(rough), 1.0) else loss
    if not by_name:
        try:
            loss = F.cross_entropy(scores, labels)
        except Exception as error:
            with naming(f"the labels do not fit the scores of {plain_class(model).__name__}"):
                _explain(error, model)
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


def _explain(error: Exception, model: nn.Module) -> None:
    """Raise what says which rows an embedding lacks, or which labels are beyond the classes, if an error means that."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if isinstance(error, IndexError) else None):
        if frame.f_code is F.cross_entropy.__code__:
            scores, labels = frame.f_locals["input"], frame.f_locals["target"]
            found = labels[labels != IGNORED]
            raise ValueError(
                f"the labels go from {int(found.min())} to {int(found.max())}, but the classes of "
                f"{plain_class(model).__name__} from 0 to {scores.shape[1] - 1}; number them so ({IGNORED} marks "
                "labels that do not count)"
            ) from error
        if frame.f_code is F.embedding.__code__:
            ids, table = frame.f_locals["input"], frame.f_locals["weight"]
            path = next((name for name, p in model.named_parameters() if p is table), "an embedding")
            raise ValueError(
                f"rows {int(ids.min())} to {int(ids.max())} of {path} are asked for, but {plain_class(model).__name__} "
                f"has {len(table)} of them; use its own tokenizer, and inputs that are no longer than it has positions"
            ) from error


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
                _explain(error, model)
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
        parts = [_rows(batch, slice(i, i + size), count) for i in range(0, count, size)]
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
            piece, size = _rows(batch, slice(start, start + step), count), min(step, count - start)
            if count_labels(model, piece) == 0:
                continue
            labels = labels_of(piece)
            if labels is not None and labels.dim() == 1:  # by class: similar halves would not reveal class weights
                piece = _rows(piece, labels.argsort(stable=True), size)
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


@torch.no_grad()
def loss_of_guessing(model: nn.Module, batch: Any, micro_batch: int | None = None) -> float:
    """Return the cross-entropy of equal scores, log K for K classes; infinite where there are none."""
    objective = Objective(micro_batch=micro_batch)
    return math.log(objective(model, objective.pieces(model, batch)[0][1]).classes or math.inf)


# -- batches -----------------------------------------------------------------------------------------------------------


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


class _Roughest(TorchFunctionMode):
    """Note the largest rounding error of the numbers that a pass computes."""

    eps = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.eps = max(self.eps, *(torch.finfo(t.dtype).eps for t in floats(result)), 0.0)
        return result


def computed_in(run: Callable[[], Any]) -> float:
    """Return the rounding error of the roughest numbers that a pass computes: it may cast the weights, or autocast."""
    with eager(), _Roughest() as seen:
        run()
    return seen.eps


def to_float32(batch: Any) -> Any:
    """Convert half-precision tensors of a batch to float32, as half-precision models are while they are measured."""
    return tree_map(lambda t: t.to(at_least_float32(t.dtype)) if t.is_floating_point() else t, batch)


def labels_of(batch: Any) -> Tensor | None:
    """Return the labels of a batch, if it is a mapping or pair that has a tensor of them."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        labels = batch[1]
    return labels if isinstance(labels, Tensor) and labels.dim() else None


def count_examples(batch: Any) -> int:
    """Count the examples of a batch, from its labels or the first dimension of its tensors."""
    labels = labels_of(batch)
    counted = [labels] if labels is not None else [t for t in tensors(batch) if t.dim()]
    if not counted:
        raise ValueError("micro_batch needs batches of tensors, with the examples along the first dimension")
    return len(counted[0])


def _rows(batch: Any, chosen: slice | Tensor, count: int) -> Any:
    """Take some of the examples of a batch."""

    def cut(t: Tensor) -> Tensor:
        if t.dim() == 0:
            return t
        if len(t) != count:
            raise ValueError(
                f"micro_batch cannot split a batch of {count} examples that has a tensor of shape {tuple(t.shape)}; "
                "its first dimension must be the examples"
            )
        return t[chosen if isinstance(chosen, slice) else chosen.to(t.device)]

    return tree_map(cut, batch)


def count_labels(model: nn.Module, batch: Any) -> int:
    """Count the labels that have a weight in the loss."""
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return count_examples(batch)
    owner = next((m for m in model.modules() if getattr(m, "loss_function", None) is not None), None)
    causal = "CausalLM" in getattr(getattr(owner, "loss_function", None), "__name__", "")
    # Encoder-decoder models have the name of that loss too, but shift their inputs instead.
    if labels.dim() == 2 and causal and not getattr(getattr(owner, "config", None), "is_encoder_decoder", False):
        labels = labels[:, 1:]  # no token predicts the first one
    return int((labels != IGNORED).sum())
