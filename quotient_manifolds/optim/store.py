"""Where the weights of an optimiser lie: here whole, in this process; :mod:`.sharded` has those that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..weights import is_sharded
from .stack import Stack

#: Tensors by the names of parameters.
Tensors = Mapping[str, Tensor]


def full(t: Any) -> Tensor:
    """Return a tensor that is sharded as a whole one, which all processes must ask for, and others as they are."""
    found: Tensor = t.full_tensor() if is_sharded(t) else t
    return found


def cut(p: Any, whole: Tensor) -> Any:
    """Shard a tensor that all processes have as a parameter of its shape is, if it is."""
    if not is_sharded(p):
        return whole
    from torch.distributed.tensor import DTensor  # which takes long to load

    return DTensor.from_local(whole, p.device_mesh).redistribute(placements=p.placements)


class Store:
    """Pairs whose weights lie whole in this process, which is the first of those that step them."""

    rank = 0

    def read(self, weights: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return all gradients; and weights and gradients, of which those of this process's pairs are whole."""
        gradients = {name: p.grad for name, p in weights.items() if p.grad is not None}
        return gradients, {**weights}, gradients

    def write_(self, whole: Tensors, weights: Tensors) -> None:
        """Write to the weights what has become of those that were read."""

    def once(self, tensors: Iterable[Any], *, copies: bool = False) -> Iterable[Tensor]:
        """List parts of tensors such that all processes together have each of their entries once, or every copy."""
        return map(full, tensors)

    def sum(self, numbers: Iterable[Tensor]) -> Tensor:
        """Sum all entries of some tensors in all processes."""
        found = [*numbers]
        return torch.cat([n.to(found[0].device).flatten() for n in found]).sum()

    def whole_state(self, s: Stack) -> dict[str, Tensor]:
        """Return the state of all pairs of a stack, from all processes."""
        return s.state
