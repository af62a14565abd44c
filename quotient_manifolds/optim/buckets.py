"""Pairs of equal shape that take a step together: their state, and what one step needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..symmetries import PairStack, SymmetricPair
from .frames import Frames

__all__ = ["PairBucket", "PairStep", "trace"]


def trace(S: Tensor) -> Tensor:
    """Compute the real part of the trace, (…)."""
    return S.diagonal(dim1=-2, dim2=-1).real.sum(-1)


class PairBucket:
    """Pairs of equal shape in one parameter group, oriented so that H is the anchor: of full column rank.

    Attributes
    ----------
    stack : PairStack
    members : list of int
        Positions of the pairs among all of the optimiser's.
    flipped : bool
        The roles of G and H are changed.
    group : int
        Index of the parameter group.
    small : dict of str to Tensor
        State that does not have the shape of a parameter; first dimension: pairs.
    """

    def __init__(self, pairs: Sequence[SymmetricPair], members: Sequence[int], flipped: bool, group: int) -> None:
        self.stack = PairStack([replace(p, G=p.H, H=p.G) if flipped else p for p in pairs])
        self.members, self.flipped, self.group = list(members), flipped, group
        self.small: dict[str, Tensor] = {}
        first = self.stack.pairs[0]
        rows = [torch.full((b.rows,), float(len(b.shape) > 1)) for b in (*first.G, *first.H)]
        # 1 for rows of matrices, 0 for biases, which do not decay: (n + m, 1).
        self.decaying = torch.cat(rows).unsqueeze(-1)
        self._subsets: dict[tuple[int, ...], PairStack] = {}

    def active(self) -> tuple[PairStack, Tensor | None] | None:
        """Give the pairs that have a gradient, and their positions in the stack (None: all of them)."""
        found = []
        for i, p in enumerate(self.stack.pairs):
            without = [b for b in p.G + p.H if b.tensor.grad is None]
            if not without:
                found.append(i)
            elif len(without) < len(p.G + p.H):
                b = without[0]
                raise ValueError(
                    f"pair {p.name!r}: {b.attribute} of {type(b.module).__name__} has no gradient but the rest of the "
                    "pair has; train both factors, or give this pair to another optimiser"
                )
        if not found:
            return None
        if len(found) == len(self.stack):
            return self.stack, None
        key = tuple(found)
        if key not in self._subsets:
            self._subsets[key] = PairStack([self.stack.pairs[i] for i in found])
        return self._subsets[key], torch.tensor(found)


@dataclass
class PairStep:
    """One step of the pairs of a bucket that have gradients.

    Attributes
    ----------
    bucket : PairBucket
    stack : PairStack
    index : Tensor or None
        Positions in the bucket; None: all.
    frames : Frames
        Metric at the weights.
    gradients, grams : tuple of Tensor
        Of G and H: (pairs, …, n, h) and (pairs, …, m, h), and their Gram matrices in double precision.
    """

    bucket: PairBucket
    stack: PairStack
    index: Tensor | None
    frames: Frames
    gradients: tuple[Tensor, Tensor]
    grams: tuple[Tensor, Tensor]

    def read(self, name: str) -> Tensor:
        """Read the small state of these pairs."""
        whole = self.bucket.small[name]
        return whole if self.index is None else whole[self.index.to(whole.device)]

    def write(self, name: str, part: Tensor) -> None:
        """Write the small state of these pairs."""
        whole = self.bucket.small[name]
        if self.index is None:
            whole.copy_(part)
        else:
            whole[self.index.to(whole.device)] = part.to(whole.dtype)

    def scaled(self, factor: float) -> PairStep:
        """Give the step with smaller gradients."""
        if factor == 1:
            return self
        (a, b), (c, d) = self.gradients, self.grams
        return replace(self, gradients=(a * factor, b * factor), grams=(c * factor**2, d * factor**2))
