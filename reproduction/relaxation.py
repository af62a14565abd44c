"""Pairs with the paper's additive relaxation of the Gram matrices (Figure 9), as blocks of a measure."""

from __future__ import annotations

from typing import Any

from quotient_manifolds.additive import additive_tangent_space
from quotient_manifolds.linalg import in_double
from sharpness.blocks import PairBlock

__all__ = ["AdditiveBlock"]


class AdditiveBlock(PairBlock):
    """Pairs at the model's own representative; ε is the measure's ``relaxation``, and must be positive.

    A measure has them by ``pair_block="reproduction.relaxation:AdditiveBlock"``. Their geodesics are of second order.
    """

    closed_form = False

    def __init__(self, *arguments: Any, at_model: bool = True) -> None:
        super().__init__(*arguments, at_model=True)
        if self.measure.geodesic == "exact":
            raise ValueError("the additive relaxation has no geodesic equation; use second-order")
        x = in_double(self.stack.gather().detach())
        self.tangent = self.chart = additive_tangent_space(self.manifold, x, self.measure.relaxation)

    def num_clamped(self) -> int:
        """Count nothing: there is no floor."""
        return 0
