"""Examples that are read when they are asked for, and which of them are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Examples", "choose"]


@dataclass(frozen=True)
class Examples:
    """Examples that are read when asked for.

    Attributes
    ----------
    source : str
    size : int
    batch : callable
        From a list of positions to a batch, as :func:`sharpness.evaluate` takes it.
    classes : tuple of str or None
        Names of the classes, in the order of their numbers, where the files give them.
    """

    source: str
    size: int
    batch: Callable[[Sequence[int]], Any] = field(repr=False)
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return self.size


def choose(size: int, count: int | None = None, seed: int | None = None) -> list[int]:
    """Choose examples: the first ``count``, or with a seed as many at random without replacement, in random order.

    Raises
    ------
    ValueError
        There are not so many.
    """
    count = size if count is None else count
    if not 1 <= count <= size:
        raise ValueError(f"{count} examples were asked for, but there are {size}")
    return list(range(count)) if seed is None else np.random.default_rng(seed).permutation(size)[:count].tolist()
