"""Examples that are read on demand, and the choice of some of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Examples", "class_number", "is_sorted"]


@dataclass(frozen=True)
class Examples:
    """A source of examples: its size, and ``batch``, from positions to a batch on the CPU.

    ``classes`` are the names of the classes, in the order of their numbers, where the files give them; ``sorted`` says
    that the examples stand class by class, see :func:`is_sorted`; ``remarks`` say what a listing left out.
    """

    size: int
    batch: Callable[[Sequence[int]], Any] = field(repr=False)
    classes: tuple[str, ...] | None = None
    sorted: bool = False
    remarks: tuple[str, ...] = ()

    def choose(self, count: int | None = None, seed: int | None = None) -> list[int]:
        """Choose the first ``count`` examples or, with a seed, as many at random, in random order.

        Sorted ones are always chosen at random, because the first ones are of one class. With the same seed, a smaller
        choice is the beginning of a larger one.
        """
        count, seed = self.size if count is None else count, 0 if seed is None and self.sorted else seed
        if not 1 <= count <= self.size:
            raise ValueError(
                f"{count} examples were asked for, but there are {self.size}; choose from 1 to {self.size}"
            )
        order = range(self.size) if seed is None else np.random.default_rng(seed).permutation(self.size).tolist()
        return list(order[:count])

    def __len__(self) -> int:
        return self.size


def is_sorted(labels: Sequence[int]) -> bool:
    """Tell whether examples stand class by class, as in a folder of classes: the first ones are of one class."""
    runs = [label for label, _ in itertools.groupby(labels)]
    return 1 < len(set(runs)) == len(runs) < len(labels)


def class_number(name: str, known: Mapping[str, int]) -> int | None:
    """Return the number of a class by its name: as it is or, if that is unique, whatever the case; None if unknown."""
    if name in known:
        return known[name]
    alike = [number for other, number in known.items() if other.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None
