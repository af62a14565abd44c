"""Examples that are read on demand, and the choice of some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Examples", "choose"]


@dataclass(frozen=True)
class Examples:
    """A source of examples: its size, and ``batch``, from positions to a batch on the CPU.

    ``classes`` are the names of the classes, in the order of their numbers, where the files give them.
    """

    size: int
    batch: Callable[[Sequence[int]], Any] = field(repr=False)
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return self.size


def choose(size: int, count: int | None = None, seed: int | None = None) -> list[int]:
    """Choose the first ``count`` of ``size`` examples or, with a seed, as many at random, in random order.

    With the same seed, a smaller choice is the beginning of a larger one.
    """
    count = size if count is None else count
    if not 1 <= count <= size:
        raise ValueError(f"{count} examples were asked for, but there are {size}; choose from 1 to {size}")
    return list(range(count)) if seed is None else np.random.default_rng(seed).permutation(size)[:count].tolist()
