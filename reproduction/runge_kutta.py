"""Pairs that follow the geodesic equation by steps of the classical Runge–Kutta method, as blocks of a measure."""

from __future__ import annotations

from torch import Tensor

from sharpness.blocks import PairBlock

__all__ = ["RungeKuttaBlock"]


class RungeKuttaBlock(PairBlock):
    """Pairs whose retraction takes ``substeps`` steps; ``pair_block="reproduction.runge_kutta:RungeKuttaBlock"``."""

    closed_form = False
    substeps = 4

    def retract(self, u: Tensor) -> Tensor:
        """Follow the geodesic with velocity u to time 1; never raises."""
        return self.tangent.rk4(u, self.substeps)
