"""Batches of model inputs: tensors in mappings, sequences and named tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["default_forward", "floats", "tensors", "to_device", "tree_map"]


def tensors(batch: Any) -> Iterator[Tensor]:
    """Walk through the tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for v in batch.values():
            yield from tensors(v)
    elif isinstance(batch, (list, tuple)):
        for v in batch:
            yield from tensors(v)


def floats(batch: Any) -> list[Tensor]:
    """List the floating-point tensors of a batch, or of what a model returns."""
    return [t for t in tensors(batch) if t.is_floating_point()]


def tree_map(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply a function to every tensor of a batch.

    Mappings become dicts; objects that are not containers are returned unchanged.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.batches import tree_map
    >>> tree_map(lambda t: t + 1, {"x": torch.zeros(2), "name": "first"})
    {'x': tensor([1., 1.]), 'name': 'first'}
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {k: tree_map(change, v) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(tree_map(change, v) for v in batch))
    if isinstance(batch, (list, tuple)):
        parts = [tree_map(change, v) for v in batch]
        return parts if isinstance(batch, list) else tuple(parts)
    return batch


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Call a model: ``model(**batch)`` for a mapping, ``model(x)`` for a pair (x, y), else ``model(batch)``.

    Parameters
    ----------
    model : nn.Module
    batch : mapping, sequence or Tensor

    Returns
    -------
    object
        What the model returns.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import default_forward
    >>> inputs, labels = torch.ones(8, 5), torch.zeros(8)
    >>> default_forward(torch.nn.Linear(5, 2), (inputs, labels)).shape
    torch.Size([8, 2])
    """
    if isinstance(batch, (Mapping, list, tuple)) and next(tensors(batch), None) is None:
        raise ValueError(f"the batch, of type {type(batch).__name__}, holds no tensor; give a mapping or a pair (x, y)")
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (list, tuple)):
        return model(batch[0])
    return model(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device; a batch that is already there is returned unchanged."""
    return batch if all(t.device == device for t in tensors(batch)) else tree_map(lambda t: t.to(device), batch)
