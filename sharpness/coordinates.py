"""Vectors of coordinates on some blocks of weights, in which the metric is the identity; squared norms add up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.certificate import Certification

from .blocks import Block, PairBlock
from .distributed import World
from .vectors import gram_matrix

__all__ = ["Coordinates"]


class Coordinates:
    """The space of tangent vectors at some blocks: each vector is one flat tensor of coordinates, (dim,).

    Parameters
    ----------
    blocks : sequence of Block
    dtype, device
        Of the blocks.
    offload : bool
        Keep the vectors in main memory; blocks see their parts on the device one after the other.

    Attributes
    ----------
    dtype, device
        Of the vectors.
    dim : int
        Number of coordinates.
    pairs : tuple of SymmetricPair
        Those that are divided out.
    certification : Certification
        What gradients at the base point say of their symmetry.
    world : World
        The processes over which vectors are spread: by default this one alone.
    """

    def __init__(
        self, blocks: Sequence[Block], dtype: torch.dtype, device: torch.device, *, offload: bool = False
    ) -> None:
        self.dtype, self.world, self._offload, self._near = dtype, World(), offload, device
        self.device = torch.device("cpu") if offload else device
        self.dim, places = 0, dict[Block, slice]()
        for block in sorted(blocks, key=lambda b: b.dim % 2):  # complex numbers begin at even places
            places[block] = slice(self.dim, self.dim + block.dim)
            self.dim += block.dim
        self._blocks = [(block, places[block]) for block in blocks]
        self._pair_blocks = [b for b, _ in self._blocks if isinstance(b, PairBlock)]
        self.pairs: tuple[SymmetricPair, ...] = tuple(p for b in self._pair_blocks for p in b.stack.pairs)
        self.certification = Certification([b.stack for b in self._pair_blocks])

    def empty(self) -> Tensor:
        """Return a vector with any content, (dim,)."""
        return torch.empty(self.dim, dtype=self.dtype, device=self.device)

    @overload
    def _each(self, v: Tensor, *, read: bool = ..., write: bool = ...) -> Iterator[tuple[Block, Tensor]]: ...
    @overload
    def _each(self, v: Tensor | None) -> Iterator[tuple[Block, Tensor | None]]: ...
    def _each(self, v: Tensor | None, *, read: bool = True, write: bool = False) -> Iterator[tuple[Block, Any]]:
        """Yield each block with its part of the vector, copied to the block's device; None for a vector None."""
        for block, place in self._blocks:
            part = None if v is None else v[place]
            if part is None or not self._offload:
                yield block, part
                continue
            near = torch.empty_like(part, device=self._near)
            yield block, near.copy_(part) if read else near
            if write:
                part.copy_(near)
            del near

    @torch.no_grad()
    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, (dim,); equal at all representatives of an orbit.

        The generator is one of the CPU, so that all devices draw alike.
        """
        xi = self.empty()
        for block, c in self._each(xi, read=False, write=True):
            block.random_(c, generator)
        return xi

    def norm(self, v: Tensor) -> float:
        """Measure the length of a vector, (dim,)."""
        return math.sqrt(float(gram_matrix(v, world=self.world)[0, 0]))

    @torch.no_grad()
    def project(self, v: Tensor) -> Tensor:
        """Return the horizontal part of a vector, (dim,)."""
        v = v.clone()
        for block, c in self._each(v, write=True):
            block.project_(c)
        return v

    # -- what the metric meets -----------------------------------------------------------------------------------

    def spectrum(self) -> tuple[float | None, int, int]:
        """Return σ_h, the smallest singular value of any pair (None without pairs), and how many are absent or floored.

        Absent are those at rounding level; the metric's floor replaces others that are small.
        """
        blocks = self._pair_blocks
        values = [float(b.sigma[b.present].min()) for b in blocks if bool(b.present.any())]
        absent = sum(int((~b.present).sum()) for b in blocks)
        return min(values, default=None), absent, sum(b.num_clamped() for b in blocks)

    @torch.no_grad()
    def num_exited_pairs(self, xi: Tensor) -> int:
        """Count the pairs whose exact geodesic along xi is shortened."""
        return sum(b.num_exited_pairs(c) for b, c in self._each(xi) if isinstance(b, PairBlock))

    def residuals(self) -> dict[SymmetricPair, float]:
        """Return what the gradient at the base point said of the symmetry of those pairs that it reached first."""
        return {} if self.certification.last is None else dict(self.certification.last.residuals)

    def uncertified(self) -> set[str]:
        """Name the pairs that had no gradient yet."""
        return {p.name for p in self.certification.open}
