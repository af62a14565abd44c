"""Clipping by the norm of the whole gradient, in which pairs count by the metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .metric import trace
from .parameters import Store
from .stack import Stack


def clipped(bound: float, running: Sequence[Stack], outside: Mapping[str, Tensor], store: Store) -> dict[str, Tensor]:
    """Multiply all gradients so that their common norm, in which pairs count by the metric, is at most a bound."""
    squares = list[Tensor]()
    for s in running:
        if store.rank == 0 or s.own != slice(None):  # every process steps a pair that is not sharded
            K_inv = s.metric.inverse_roots
            squares.append(s.g.only(trace(K_inv @ s.g.grams() @ K_inv.mH), 0).sum())
    factor = (bound / (store.total(squares, outside.values(), squares=True).sqrt() + 1e-12)).clamp_max(1.0)
    for s in running:
        torch._foreach_mul_(s.g.rows, factor.to(s.g.sizes.device, s.dtype))
    return {name: g * factor.to(g.device) for name, g in outside.items()}
