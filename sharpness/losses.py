"""The loss and error rate of a batch, as a whole or in pieces that need less memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.batches import default_forward, tensors, tree_map
from quotient_manifolds.checks import as_count
from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.symmetries.modules import plain_class

from .errors import failed_call, wrong_cast

__all__ = ["LossFunction", "normalized_logits"]

#: ``loss_fn(model, batch) -> scalar tensor``
LossFunction = Callable[[nn.Module, Any], Tensor]
#: The label that cross-entropy ignores, in torch and in transformers.
IGNORED = -100


@dataclass(frozen=True)
class Outcome:
    """One forward pass: its loss, a scalar with its graph, and in classification the numbers of errors and labels."""

    loss: Tensor
    wrong: int | None = None
    counted: int | None = None


def normalized_logits(scores: Tensor) -> Tensor:
    r"""Divide every example's logits by their standard deviation over the K classes.

    .. math:: \tilde f = f \Big/ \sqrt{\tfrac1K \sum_k (f_k - \bar f)^2}

    Networks that differ only in confidence then have the same loss.

    Parameters
    ----------
    scores : Tensor
        (examples, K), the logits f.

    Returns
    -------
    Tensor
        (examples, K), with the dtype and device of the scores; not finite if all logits of an example are equal.

    Notes
    -----
    Andriushchenko, Croce, Müller, Hein, Flammarion 2023; their code leaves out 1/K, so its logits are √K times smaller.

    Examples
    --------
    >>> import torch
    >>> scores = torch.tensor([[1.0, 2.0, 6.0]])
    >>> torch.allclose(normalized_logits(10 * scores), normalized_logits(scores))
    True
    """
    return scores / scores.std(dim=1, correction=0, keepdim=True)


def default_loss(model: nn.Module, batch: Any, normalize_logits: bool = False) -> Outcome:
    """Run a model and return its loss: ``.loss`` for a dict, else the cross-entropy of ``model(x)`` against ``y``.

    A batch is a mapping, inputs and labels of a transformers model by name, or a pair (x, y), with labels as
    ``torch.nn.functional.cross_entropy`` takes them. Labels of another form, and labels or token ids that the model
    does not have, raise a ValueError.
    """
    try:
        return _default_loss(model, batch, normalize_logits)
    except Exception as error:
        reason = _wrong_ids(model, batch, error) or _wrong_labels(model, batch, error)
        reason = reason or wrong_cast(error, (*model.parameters(), *model.buffers(), *tensors(batch)))
        if reason is None:
            raise
        raise ValueError(reason) from error


def _wrong_ids(model: nn.Module, batch: Any, error: BaseException) -> str | None:
    """Say which rows an embedding lacks, or that a text has more tokens than the model has positions."""
    name, call = plain_class(model).__name__, failed_call(error, F.embedding)
    if call and call["input"].numel():
        rows, asked = len(call["weight"]), [int(call["input"].min()), int(call["input"].max())]
        if asked[0] < 0 or asked[1] >= rows:
            path = next((n for n, p in model.named_parameters() if p is call["weight"]), "an embedding")
            return (
                f"rows {asked[0]} to {asked[1]} of {path} are asked for, but {name} has {rows} of them; use its own "
                "tokenizer, and inputs that are no longer than it has positions"
            )
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    size = ids.shape[-1] if isinstance(ids, Tensor) and ids.dim() else 0
    if most and size > most and {str(size), str(most)} <= set(re.findall(r"\d+", str(error))):
        return f"the inputs have {size} tokens, but {name} has {most} positions; use shorter inputs"
    return None


def _wrong_labels(model: nn.Module, batch: Any, error: BaseException) -> str | None:
    """Say how the labels do not fit the scores that a loss was given with them."""
    given = batch.get("labels") if isinstance(batch, Mapping) else batch[1] if isinstance(batch, (list, tuple)) else 0
    kind = type(given).__name__
    if isinstance(given, (list, tuple)) and kind in str(error) and all(isinstance(v, (int, float)) for v in given):
        return f"the labels are a {kind} of numbers; give a tensor, torch.tensor(labels)"
    call = failed_call(error, F.cross_entropy, F.binary_cross_entropy_with_logits)
    scores, labels, shown = call.get("input"), call.get("target"), _labels(batch)
    if not isinstance(scores, Tensor) or not isinstance(labels, Tensor) or shown is None or scores.dim() == 0:
        return None
    name, several = plain_class(model).__name__, "ignore_index" not in call
    if not several and labels.dtype == torch.int64 and labels.shape == scores.shape[:1] + scores.shape[2:]:
        classes, counted = scores.shape[1:2].numel(), labels[labels != call["ignore_index"]]
        if not counted.numel() or 0 <= int(counted.min()) <= int(counted.max()) < classes:
            return None
        return (
            f"the labels go from {int(counted.min())} to {int(counted.max())}, but {name} has {classes} classes; check "
            "that model and data belong together"
        )
    if labels.is_floating_point() and labels.shape == scores.shape:
        return None
    if isinstance(batch, Mapping) and len(scores) > len(labels) == len(shown):
        return (
            f"{name} scores every token ({len(scores)}), but there are {len(labels)} labels, one for each example; "
            "load a class such as …ForSequenceClassification, or label every token"
        )
    one = ' (with config.problem_type = "single_label_classification")' if several else ""
    return (
        f"the labels are {shown.dtype} of shape {tuple(shown.shape)}, but the loss of {name} takes floats of the "
        f"scores' shape {tuple(scores.shape)} for several classes of an example, labels.float(), or one int64 for each "
        f"example{one}, labels.long().flatten()"
    )


def _default_loss(model: nn.Module, batch: Any, normalize_logits: bool) -> Outcome:
    by_name, name = isinstance(batch, Mapping), plain_class(model).__name__
    if not by_name and not (isinstance(batch, (list, tuple)) and len(batch) == 2):
        raise ValueError(
            f"a batch is a dict for a transformers model or a pair (x, y), but this one is {type(batch).__name__}; "
            "pass loss_fn(model, batch) for anything else, and wrap a single batch in a list"
        )
    output = default_forward(model, batch)
    scores, labels = _scores(output), batch.get("labels") if by_name else batch[1]
    loss = _field(output, "loss")
    if by_name:
        if isinstance(output, tuple) and hasattr(model, "config"):
            raise ValueError(f"{name} returns tuples; set model.config.return_dict = True, or pass loss_fn")
        if loss is None and scores is None and "labels" in batch:
            raise ValueError(
                f"{name} has no head that gives a loss; load a folder saved from a class such as "
                "…ForSequenceClassification, or pass loss_fn"
            )
        if loss is None:
            add = "" if "labels" in batch else "add the labels, or "
            raise ValueError(f"{name} returned no loss for a dict with the keys {sorted(batch)}; {add}pass loss_fn")
    elif scores is None:
        raise ValueError(f"{name} returned {type(output).__name__} without logits; pass loss_fn")
    elif scores.dim() > 1 and scores.shape[1] == 1:
        raise ValueError(
            f"{name} returned one score per example, for which cross-entropy is always 0; pass loss_fn for a regression"
        )
    classification = _is_classification(scores, labels)
    if normalize_logits and not classification:
        raise ValueError(
            "normalize_logits needs one label and one row of scores per example, as in classification; leave it out"
        )
    if classification and scores.dtype != (wide := at_least_float32(scores.dtype)):
        scores, rough = scores.to(wide), None if loss is None else float(loss.detach())
        exact = F.cross_entropy(scores, labels)  # a mean in half precision has three digits
        loss = exact if rough is None or abs(float(exact.detach()) - rough) <= 0.02 * max(abs(rough), 1.0) else loss
    if normalize_logits or not by_name:
        loss = F.cross_entropy(normalized_logits(scores) if normalize_logits else scores, labels)
    if not classification:
        return Outcome(loss)
    counted = labels != IGNORED
    return Outcome(loss, int(((scores.detach().argmax(1) != labels) & counted).sum()), int(counted.sum()))


def scores_and_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor] | None:
    """Run a classifier: scores (examples, classes), with their graph, and labels; None if it is not a classification.

    The batch is as for :func:`default_loss`; the output is the scores, or has them as ``.logits``.
    """
    scores, labels = _scores(default_forward(model, batch)), _labels(batch)
    return (scores, labels) if labels is not None and _is_classification(scores, labels) else None


def _scores(output: Any) -> Any:
    return output if isinstance(output, Tensor) else _field(output, "logits")


def _field(output: Any, name: str) -> Any:
    """Look up a field of an output, which models return as an attribute or in a dict."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _is_classification(scores: Any, labels: Any) -> bool:
    if not (isinstance(scores, Tensor) and isinstance(labels, Tensor)):
        return False
    return scores.dim() == 2 and labels.dim() == 1 and scores.shape[1] >= 2 and not labels.is_floating_point()


@dataclass(frozen=True)
class Objective:
    """The function that is maximised on a batch: ``loss_fn(model, batch)``, or by default :func:`default_loss`.

    With ``micro_batch`` a batch is divided into pieces of that many examples, which need less memory; texts of similar
    length share a piece, without the padding that none of them needs:

    >>> objective, model = Objective(micro_batch=2), nn.Linear(2, 3)
    >>> batch = torch.randn(4, 2), torch.tensor([0, 2, 1, -100])  # a padded label, −100, has no weight
    >>> parts = objective.pieces(model, batch)
    >>> whole = F.cross_entropy(model(batch[0]), batch[1])
    >>> torch.allclose(sum(weight * objective(model, part).loss for weight, part in parts), whole)
    True
    """

    loss_fn: LossFunction | None = None
    normalize_logits: bool = False
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loss_fn, nn.Module):
            raise ValueError(
                f"loss_fn is called as loss_fn(model, batch), so {type(self.loss_fn).__name__} cannot be one; write "
                "lambda model, batch: criterion(model(batch[0]), batch[1])"
            )
        if not isinstance(self.normalize_logits, bool):
            raise ValueError(f"normalize_logits must be True or False, got {self.normalize_logits!r}")
        if self.normalize_logits and self.loss_fn is not None:
            raise ValueError("normalize_logits applies to the default loss; normalise the logits inside loss_fn")
        if self.micro_batch is not None:
            object.__setattr__(self, "micro_batch", as_count("micro_batch", self.micro_batch))
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ValueError(f"loss_fn must be a function (model, batch) -> loss, got {self.loss_fn!r}")

    def only_values(self) -> AbstractContextManager[None]:
        """Let passes whose value alone is used build no graph, unless a user's loss may contain gradients."""
        return torch.set_grad_enabled(self.loss_fn is not None)

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Run the model on a batch, or on a piece of one."""
        if self.loss_fn is None:
            found = default_loss(model, batch, self.normalize_logits)
        else:
            loss = self.loss_fn(model, batch)
            if not isinstance(loss, Tensor):
                raise ValueError(f"loss_fn must return a scalar tensor, but it returned {type(loss).__name__}")
            found = Outcome(loss)
        if found.loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, but it has shape {tuple(found.loss.shape)}; take the mean")
        return found

    def value(self, model: nn.Module, batch: Any) -> float:
        """Compute the loss of a batch, piece by piece."""
        with self.only_values():
            return sum(w * float(self(model, part).loss.detach()) for w, part in self.pieces(model, batch))

    def pieces(self, model: nn.Module, batch: Any) -> list[tuple[float, Any]]:
        """Split a batch into pieces with weights for their losses: the shares of the labels that are not ignored."""
        if self.micro_batch is None:
            return [(1.0, batch)]
        count, lengths, size = count_examples(batch), _lengths(batch), self.micro_batch
        if lengths is None:  # views
            parts = [_rows(batch, slice(i, i + size), count) for i in range(0, count, size)]
        else:
            chosen = lengths.argsort(stable=True).split(size)
            parts = [_without_padding(_rows(batch, part, count)) for part in chosen]
        weights = [_counted_labels(model, part) for part in parts]
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
        if self.micro_batch is None:
            return
        for name, m in model.named_modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None:
                raise ValueError(
                    f"micro_batch would change what the layer {name!r} ({type(m).__name__} without running "
                    "statistics) computes; leave micro_batch out"
                )
        count, step = count_examples(batch), max(2, self.micro_batch)
        for start in range(0, count - 1, step if self.micro_batch > 1 else 1):
            self._check_halves(model, _rows(batch, slice(start, start + step), count), min(step, count - start))
            if not all_of_them:
                return

    def _check_halves(self, model: nn.Module, piece: Any, count: int) -> None:
        whole, halves = replace(self, micro_batch=None), replace(self, micro_batch=-(-count // 2))
        if count < 2 or _counted_labels(model, piece) == 0:
            return
        labels = _labels(piece)
        if labels is not None and labels.dim() == 1:  # by class: similar halves would not reveal class weights
            piece = _rows(piece, labels.argsort(stable=True), count)
        both, apart = whole.value(model, piece), halves.value(model, piece)
        eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
        size = max(abs(both), abs(apart), 1e-3)
        if math.isfinite(both) and abs(both - apart) > max(1e-5, min(1e3 * eps, 1e-2)) * size:
            raise ValueError(
                f"micro_batch changes the loss: {count} examples give {both:.8g} together and {apart:.8g} as two "
                "halves; the loss must be a mean over examples or labels without weights of its own, it must not be "
                "random, and no layer may mix examples or read padding; leave micro_batch out, or let loss_fn take the "
                "mean"
            )


def to_float32(batch: Any) -> Any:
    """Convert half-precision tensors of a batch to float32, as half-precision models are while they are measured."""
    return tree_map(lambda t: t.to(at_least_float32(t.dtype)) if t.is_floating_point() else t, batch)


def _labels(batch: Any) -> Tensor | None:
    found = None
    if isinstance(batch, Mapping):
        found = batch.get("labels")
    elif isinstance(batch, (list, tuple)) and len(batch) == 2:
        found = batch[1]
    return found if isinstance(found, Tensor) and found.dim() else None


def count_examples(batch: Any) -> int:
    """Count the examples of a batch, from its labels or the first dimension of its tensors."""
    labels = _labels(batch)
    found = [labels] if labels is not None else [t for t in tensors(batch) if t.dim()]
    if not found:
        raise ValueError("micro_batch needs batches of tensors, with the examples along the first dimension")
    return len(found[0])


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


def _lengths(batch: Any) -> Tensor | None:
    """Return the lengths of texts without the padding at their ends, or None if there is no mask of it."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    labels = _labels(batch)
    masks = [t for name, t in batch.items() if name.endswith("mask") and isinstance(t, Tensor)]
    masks += [] if labels is None else [labels != IGNORED]
    used = torch.stack([m != 0 for m in masks if m.shape == mask.shape]).any(0)
    return (used * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)


def _without_padding(batch: Any) -> Any:
    """Cut the padding at the end that all texts of a batch have, from every tensor (examples, tokens, …)."""
    lengths = _lengths(batch)
    if lengths is None:
        return batch
    shape, longest = batch["attention_mask"].shape, max(1, int(lengths.max()))
    return tree_map(lambda t: t[:, :longest].contiguous() if t.shape[:2] == shape else t, dict(batch))


def _counted_labels(model: nn.Module, batch: Any) -> int:
    labels = _labels(batch)
    if labels is None or labels.is_floating_point():
        return count_examples(batch)
    if labels.dim() == 2 and _predicts_next_token(model):
        labels = labels[:, 1:]  # no token predicts the first one
    return int((labels != IGNORED).sum())


def _predicts_next_token(model: nn.Module) -> bool:
    for m in model.modules():
        loss = getattr(m, "loss_function", None)
        if loss is not None:  # encoder-decoder models have the name of that loss too, but shift their inputs instead
            shifted = not getattr(getattr(m, "config", None), "is_encoder_decoder", False)
            return shifted and "CausalLM" in getattr(loss, "__name__", "")
    return False
