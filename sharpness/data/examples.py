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
        Where they come from, for messages.
    size : int
        How many there are; also ``len(examples)``.
    batch : callable
        From a list of positions to a batch on the CPU, as :func:`sharpness.evaluate` takes it.
    classes : tuple of str or None
        Names of the classes, in the order of their numbers, where the files give them.

    Examples
    --------
    Data in memory, as what :func:`load_examples` gives:

    >>> import torch
    >>> x, y = torch.eye(3), torch.tensor([0, 1, 1])
    >>> found = Examples("memory", 3, lambda chosen: (x[list(chosen)], y[list(chosen)]), ("cat", "dog"))
    >>> found.batch([2, 0])
    (tensor([[0., 0., 1.], [1., 0., 0.]]), tensor([1, 0]))
    """

    source: str
    size: int
    batch: Callable[[Sequence[int]], Any] = field(repr=False)
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return self.size


def choose(size: int, count: int | None = None, seed: int | None = None) -> list[int]:
    """Choose examples: the first ``count``, or with a seed as many at random without replacement, in random order.

    Parameters
    ----------
    size : int
        How many there are.
    count : int, optional
        How many are wanted; by default all.
    seed : int, optional
        Of numpy's generator. With one seed, fewer are the first of more.

    Returns
    -------
    list of int
        Positions.

    Raises
    ------
    ValueError
        There are not so many.

    Examples
    --------
    >>> choose(10, 3)
    [0, 1, 2]
    >>> choose(10, 4, seed=0)[:2] == choose(10, 2, seed=0)
    True
    """
    count = size if count is None else count
    if not 1 <= count <= size:
        raise ValueError(f"{count} examples were asked for, but there are {size}")
    return list(range(count)) if seed is None else np.random.default_rng(seed).permutation(size)[:count].tolist()
