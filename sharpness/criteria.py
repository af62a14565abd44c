"""Losses that add up, over labels, a function of scores whose second derivative is known to be positive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.passes import default_forward
from quotient_manifolds.weights import plain_class

from .batches import IGNORED, labels_of
from .losses import Objective, scores_of

#: Relative difference up to which a loss, or its gradient, is the one that a criterion computes.
_SAME, _SAME_GRADIENT = 1e-5, 1e-3

#: Scores, (terms, numbers), and targets: (terms,) classes, or (terms, numbers).
Terms = tuple[Tensor, Tensor]


def _of_tokens(scores: Tensor, labels: Tensor) -> Terms | None:
    """Read classes along the last dimension, as models of language give them."""
    if labels.is_floating_point() or scores.dim() < 2 or scores.shape[:-1] != labels.shape:
        return None
    return scores.flatten(0, -2), labels.flatten()


def _of_next_tokens(scores: Tensor, labels: Tensor) -> Terms | None:
    return _of_tokens(scores[:, :-1], labels[:, 1:]) if (scores.dim(), labels.dim()) == (3, 2) else None


def _of_pixels(scores: Tensor, labels: Tensor) -> Terms | None:
    """Read classes along the second dimension, as torch does."""
    return _of_tokens(scores.movedim(1, -1), labels) if scores.dim() > 2 else None


def _of_probabilities(scores: Tensor, labels: Tensor) -> Terms | None:
    return (scores, labels) if labels.is_floating_point() and scores.dim() == 2 == labels.dim() else None


def _of_numbers(scores: Tensor, labels: Tensor) -> Terms | None:
    if not labels.is_floating_point() or scores.numel() != labels.numel():
        return None
    return scores.reshape(len(labels), -1), labels.reshape(len(labels), -1)


@dataclass(frozen=True)
class Criterion:
    """How a loss is computed from scores: it is the mean over all terms of what ``loss`` adds up.

    Of a squared error it is the mean over all numbers; a term is the mean over those of an example.
    """

    read: Callable[[Tensor, Tensor], Terms | None]
    loss: nn.CrossEntropyLoss | nn.MSELoss

    def terms(self, model: nn.Module, batch: Any) -> Terms | None:
        """Return the terms of a batch, if it has labels and scores that fit each other."""
        labels, scores = labels_of(batch), scores_of(default_forward(model, batch))
        return self.read(scores, labels) if isinstance(scores, Tensor) and labels is not None else None

    def factor(self, targets: Iterable[Tensor], *, fisher: bool = False) -> float:
        """Return by what a sum over terms is multiplied; in a Fisher matrix each is a product of two terms."""
        if isinstance(self.loss, nn.CrossEntropyLoss):
            return 1 / sum(len(t) if t.is_floating_point() else int((t != IGNORED).sum()) for t in targets)
        sizes = [(t.numel(), t.shape[1]) for t in targets]
        return 1 / sum(size for size, _ in sizes) / (sizes[0][1] if fisher else 1)

    def value(self, model: nn.Module, batch: Any) -> Tensor | None:
        """Return the loss of a batch."""
        terms = self.terms(model, batch)
        try:
            return None if terms is None else self.loss(*terms) * self.factor([terms[1]])
        except (IndexError, RuntimeError, ZeroDivisionError):  # classes that the scores lack
            return None


#: Every criterion that is known.
CRITERIA = [
    *(Criterion(read, nn.CrossEntropyLoss(reduction="sum")) for read in (_of_tokens, _of_next_tokens, _of_pixels)),
    Criterion(_of_probabilities, nn.CrossEntropyLoss(reduction="sum")),
    Criterion(_of_numbers, nn.MSELoss(reduction="sum")),
]


def criterion_of(model: nn.Module, objective: Objective, batches: list[Any], *, fisher: bool = False) -> Criterion:
    """Return the criterion that gives the loss of all batches, and its gradient on the first; raise if none does."""
    found = [c for c in CRITERIA if not fisher or c.read is not _of_probabilities]
    for batch in batches:
        value = float(objective(model, batch, graph=False).loss.detach())
        with torch.no_grad():
            found = [c for c in found if _close(c.value(model, batch), value)]
    weights = [p for p in model.parameters() if p.requires_grad]
    for criterion in found:
        both: tuple[Any, Any] = criterion.value(model, batches[0]), objective(model, batches[0]).loss
        one, two = (torch.autograd.grad(loss, weights, materialize_grads=True) for loss in both)
        apart = sum(float((a - b).abs().square().sum()) for a, b in zip(one, two, strict=True)) ** 0.5
        if apart <= _SAME_GRADIENT * sum(float(b.abs().square().sum()) for b in two) ** 0.5 + 1e-12:
            return criterion
    known = "classes" if fisher else "classes or probabilities"
    raise ValueError(
        f"the loss of {plain_class(model).__name__} is neither the mean cross-entropy of its scores, with {known} as "
        "labels, nor their mean squared error; of other losses take matrix='hessian'"
    )


def _close(found: Tensor | None, value: float) -> bool:
    return found is not None and abs(float(found.detach()) - value) <= _SAME * max(abs(value), 1e-3)


class Scores(nn.Module):
    """The scores of a model, (terms, numbers), as a function of its batch."""

    def __init__(self, model: nn.Module, criterion: Criterion) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, batch: Any) -> Tensor:
        """Return them."""
        terms = self.criterion.terms(self.model, batch)
        assert terms is not None
        return terms[0]


@torch.no_grad()
def loss_of_guessing(model: nn.Module, batch: Any, micro_batch: int | None = None) -> float:
    """Return the cross-entropy of equal scores, log K for K classes; infinite where there are none."""
    objective = Objective(micro_batch=micro_batch)
    return math.log(objective(model, objective.pieces(model, batch)[0][1]).classes or math.inf)
