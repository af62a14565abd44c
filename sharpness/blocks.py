"""The blocks that the space of all weights is made of: parameters with an elementwise metric, and stacks of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import geoopt
import torch
from torch import Tensor, nn

from quotient_manifolds import GLTangentSpace, canonical_gauge
from quotient_manifolds.linalg import at_least_float32, in_double
from quotient_manifolds.symmetries import PairStack, SymmetricPair, find_symmetric_pairs, stacks
from quotient_manifolds.symmetries.pairs import check_pairs
from reproduction.additive import AdditiveTangentSpace

from .adaptive_norm import AdaptiveNorm
from .measures import Measure

__all__ = ["Elementwise", "PairBlock", "as_point", "build_pair_block", "coverage", "pieces", "stack_pairs"]


#: Elements of a stack of pairs that are worked on at a time on a CPU.
_PIECE = 2**20


@dataclass
class Elementwise:
    """A parameter (or what the pairs leave of it) with the elementwise metric."""

    name: str
    parameter: nn.Parameter
    where: slice
    scale: Tensor | None  # ξ = scale · ζ; None: the weight itself

    def view(self, flat: Tensor) -> Tensor:
        """See its part of a vector, (dim,), in the parameter's shape."""
        return flat[self.where].view(self.parameter.shape)


@dataclass
class PairBlock:
    """A stack of attention pairs: in canonical gauge, unless the measure depends on the representative."""

    stack: PairStack
    point: geoopt.ManifoldParameter
    tangent: GLTangentSpace
    frame: GLTangentSpace | AdaptiveNorm  # its coordinates make the measure's metric the identity
    sigma: Tensor
    present: Tensor
    back: tuple[Tensor, Tensor] | None  # (A, A⁻¹) in float64, from the canonical to the model's own representative
    where: slice

    def view(self, flat: Tensor) -> Tensor:
        """See its part of a vector, (dim,), in the shape of the stack's point."""
        return as_point(self.point, flat[self.where])

    def to_model_gauge(self, u: Tensor) -> Tensor:
        """Carry a vector to the model's own representative, in float64."""
        wide = in_double(u)
        if self.back is None:
            return wide
        (A, A_inv), n = self.back, self.stack.n
        return torch.cat([wide[..., :n, :] @ A, wide[..., n:, :] @ A_inv.mH], dim=-2)

    def from_model_gauge(self, u: Tensor) -> Tensor:
        """Invert :meth:`to_model_gauge`, in the dtype of u."""
        if self.back is None:
            return u
        (A, A_inv), n = (X.to(u.dtype) for X in self.back), self.stack.n
        return torch.cat([u[..., :n, :] @ A_inv, u[..., n:, :] @ A.mH], dim=-2)


def as_point(point: Tensor, numbers: Tensor) -> Tensor:
    """See the first so many real numbers as a tensor of a point's shape."""
    real = numbers[: point.numel() * (2 if point.is_complex() else 1)]
    return torch.view_as_complex(real.view(*point.shape, 2)) if point.is_complex() else real.view(point.shape)


def coverage(found: Sequence[PairStack]) -> dict[Tensor, Tensor]:
    """Tell, entry by entry of every parameter that pairs touch, which of them belong to pairs."""
    masks: dict[Tensor, Tensor] = {}
    for s in found:
        for p in s.parameters():
            masks.setdefault(p, torch.zeros(p.shape, dtype=torch.bool, device=p.device))
        s.mark_(masks)
    return masks


def pieces(s: PairStack) -> list[PairStack]:
    """Split a stack so that temporaries stay in a CPU's cache; fresh large ones cost more than the arithmetic."""
    count = max(1, _PIECE // ((s.n + s.m) * s.group.h))
    return [PairStack(s.pairs[i : i + count]) for i in range(0, len(s), count)]


def stack_pairs(model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None) -> list[PairStack]:
    """Stack the pairs that a measure takes modulo their symmetry."""
    if not measure.divides:
        return []
    found = find_symmetric_pairs(model) if pairs is None else check_pairs(pairs)
    return stacks(p for p in found if measure.symmetry in ("all", p.kind))


def build_pair_block(s: PairStack, measure: Measure, dtype: torch.dtype, start: int) -> PairBlock:
    """Factorise a stack, in float64; what is worked with in canonical gauge is then rounded to a dtype."""
    assert measure.pairs is not None
    with torch.no_grad():
        x = in_double(s.gather())
        floor = measure.relaxation_kind == "floor"
        manifold = s.manifold(measure.pairs, relaxation=measure.relaxation if floor else 0.0)
        gauge = canonical_gauge(*manifold.unpack_tensor(x))
        # A group move turns σ_i = 0 into rounding noise times its condition number, which mix would then divide by.
        tolerance = torch.finfo(at_least_float32(s.pairs[0].G[0].tensor.dtype)).eps ** 0.5
        present, back = gauge.present(tolerance), None
        frame: GLTangentSpace | AdaptiveNorm
        if not floor:
            frame = tangent = cast(GLTangentSpace, AdditiveTangentSpace(manifold, x, measure.relaxation))
        elif measure.norm == "adaptive":
            tangent = manifold.at_gauge(gauge, x, tolerance=tolerance)
            frame = AdaptiveNorm(tangent)
        else:
            frame = tangent = manifold.at_gauge(gauge.to(dtype), tolerance=tolerance)
            back = (gauge.A, gauge.A_inv)
        point = geoopt.ManifoldParameter(tangent.x, manifold=manifold, requires_grad=False)
        stop = start + point.numel() * (2 if point.is_complex() else 1)
        return PairBlock(s, point, tangent, frame, gauge.sigma, present, back, slice(start, stop))
