"""What a patch is: a part of a model's weights with a metric and a retraction; :mod:`sharpness.patches` has those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.slots import real_view

P = TypeVar("P", bound="Patch")
#: Tensors by the names of weights.
Tensors = Mapping[str, Tensor]


class Patch(Protocol):
    """Some of a model's weights, at the point where they are.

    Vectors c, ``at`` and ``out`` are flat, (dim,), real; arguments of the type :data:`Tensors` have a tensor for each
    weight, and those without one are read as zero. Methods that end in an underscore write to their arguments, and
    only to entries that belong to the patch.

    Attributes
    ----------
    names : tuple of str
        The weights of which entries belong to it.
    dim : int
        Number of coordinates.
    pairs : sequence of SymmetricPair
        The pairs that it consists of, whose coordinates follow each other; none for weights of other kinds.
    quadratic : bool
        Whether the retraction is a quadratic function of the coordinates.
    """

    names: tuple[str, ...]
    dim: int
    pairs: tuple[SymmetricPair, ...]
    quadratic: bool

    def at(self: P, weights: Tensors, *, near: bool = False) -> P:
        """Return the patch at other values of its weights; near the present ones pairs need no new factorisation."""
        ...

    def vector_(self, out: Tensors, c: Tensor, *, at_model: bool) -> None:
        """Write the tangent vector with coordinates c, at the model's weights or at those from which it moves."""

    def project(self, c: Tensor) -> Tensor:
        """Return the horizontal part of a vector."""
        ...

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, the same on all devices and at all representatives."""
        ...

    def retract_(self, out: Tensors, c: Tensor | None) -> None:
        """Write the weights R(c); for None the weights at which the patch is."""

    def pull_back_(self, out: Tensor, gradient: Tensors, at: Tensor | None) -> None:
        """Write the gradient of c → ℓ(R(c)) at ``at`` (None: 0), from that of ℓ with respect to the weights there."""

    def steepest(self, gradient: Tensors, room: Tensors) -> tuple[Tensor, Tensor]:
        """Return the gradient as a vector for :meth:`follow_`, perhaps in the memory of ``room``, and its square."""
        ...

    def follow_(self, out: Tensors, u: Tensor) -> None:
        """Write the weights at the end of a vector, a multiple of what :meth:`steepest` returns."""


class SinglePatch:
    """What patches of one parameter share: ``steepest`` returns coordinates."""

    names: tuple[str, ...]
    pairs: tuple[SymmetricPair, ...] = ()

    def steepest(self: Any, gradient: Tensors, room: Tensors) -> tuple[Tensor, Tensor]:
        """Return the gradient's coordinates and its square."""
        c = real_view(room[self.names[0]]).contiguous().view(-1)  # that memory, if it may be
        self.pull_back_(c, gradient, None)
        return c, torch.linalg.vector_norm(c).square()

    def follow_(self: Any, out: Tensors, u: Tensor) -> None:
        """Retract."""
        self.retract_(out, u)
