"""Batches: their examples and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.passes import tensors, tree_map

#: The label that cross-entropy ignores, in torch and in transformers.
IGNORED = -100


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


def rows(batch: Any, chosen: slice | Tensor, count: int) -> Any:
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
