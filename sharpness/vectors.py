"""Arithmetic on vectors as long as a model, in few passes and in reused memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .distributed import World

__all__ = ["Buffers", "Memory", "chunked", "combine_", "gram_matrix"]

#: Number of elements of a vector that are processed at a time on a CPU, so that they stay in its cache.
_CHUNK = 2**18


class Buffers:
    """Reusable vectors, because large allocations cost as much as the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._all, self._free = like, list[Tensor](), list[Tensor]()

    def take(self) -> Tensor:
        """Return a vector with arbitrary content."""
        if not self._free:
            self._free.append(torch.empty_like(self._like))
            self._all.append(self._free[-1])
        vector = self._free.pop()
        if not vector.untyped_storage().nbytes():  # released
            vector.untyped_storage().resize_(vector.nbytes)
        return vector

    def keep(self, *needed: Tensor) -> None:
        """Take back every vector but these."""
        ids = {id(t) for t in needed}
        self._free = [t for t in self._all if id(t) not in ids]

    def release(self) -> None:
        """Free the memory of the vectors that nobody uses; :meth:`take` allocates it again."""
        for vector in self._free:
            vector.untyped_storage().resize_(0)

    def give(self, vector: Tensor) -> None:
        """Give a vector away for good: it is not reused, unless :meth:`adopt` takes it back."""
        self._all = [t for t in self._all if t is not vector]
        self._free = [t for t in self._free if t is not vector]

    def adopt(self, vector: Tensor) -> None:
        """Take over a vector that is not needed elsewhere any more."""
        self._all.append(vector)
        self._free.append(vector)


def chunked(*vectors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut vectors into parts that stay in a CPU's cache; on a GPU they stay whole."""
    count, on_cpu = vectors[0].numel(), vectors[0].device.type == "cpu"
    step = _CHUNK if on_cpu else max(count, 1)
    return [tuple(v[i : i + step] for v in vectors) for i in range(0, count, step)]


def gram_matrix(*vectors: Tensor, world: World) -> np.ndarray:
    """Compute the inner products of all pairs, in one pass, summed over chunks and processes in double precision."""
    k = len(vectors)
    rows, columns = np.triu_indices(k)
    totals = torch.zeros(len(rows), dtype=torch.float64, device=vectors[0].device)
    for parts in chunked(*vectors):
        totals += torch.stack([torch.dot(parts[i], parts[j]) for i, j in zip(rows, columns, strict=True)])
    gram = np.zeros((k, k))
    gram[rows, columns] = gram[columns, rows] = world.sum(totals).tolist()
    return gram


def combine_(out: Tensor, *terms: tuple[Tensor, float]) -> None:
    """Write a linear combination, in one pass; ``out`` may be one of its vectors."""
    first, *rest = sorted(terms, key=lambda t: t[0] is not out)
    for part, head, *tail in chunked(out, first[0], *(v for v, _ in rest)):
        torch.mul(head, first[1], out=part)
        for vector, (_, weight) in zip(tail, rest, strict=True):
            if weight:
                part.add_(vector, alpha=weight)


class Memory:
    """Reusable memory for one stack, because allocating memory costs more than the arithmetic."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._held = torch.empty(0, dtype=dtype, device=device)

    def get(self, size: int) -> Tensor:
        """Return memory for at least so many numbers, with arbitrary content."""
        if len(self._held) < size:
            self._held = self._held.new_empty(size)
        return self._held
