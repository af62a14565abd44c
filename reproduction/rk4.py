"""Geodesics by a fixed number of steps of the classical Runge–Kutta method, to be compared with exact ones."""

from __future__ import annotations

import torch
from torch import Tensor

from quotient_manifolds import Gauge, GLTangentSpace
from quotient_manifolds.testing import integrate_geodesic
from sharpness.measures import Measure
from sharpness.patches import PairPatch

__all__ = ["RungeKuttaMeasure", "RungeKuttaPatch", "rk4"]


def rk4(space: GLTangentSpace, u: Tensor, steps: int) -> Tensor:
    """Follow the geodesic to time 1 by ``steps`` equal Runge–Kutta steps.

    Parameters
    ----------
    space : GLTangentSpace
        At the start of the geodesic.
    u : Tensor
        Horizontal, (…, n + m, h).
    steps : int
        Number of steps.

    Returns
    -------
    Tensor
        End point, (…, n + m, h), differentiable in u. It never raises: after an exit from the manifold the result is
        infinite, NaN or meaningless.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> from reproduction.rk4 import rk4
    >>> space, u = GLQuotientMix(1, 1).tangent_space_at(torch.ones(2, 1)), torch.ones(2, 1)
    >>> [round(rk4(space, u, n)[0].item(), 3) for n in (1, 2, 8)], round(space.geodesic(u)[0][0].item(), 3)
    ([1.694, 1.729, 1.732], 1.732)
    """
    identity = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    start, there, n = space.gauge.x, space.present, space.gauge.n
    # In canonical gauge small columns combine only with small ones; absent directions do not move.
    gauge = Gauge(start, n, torch.where(there, space.gauge.sigma, 0), identity, identity)
    velocity = torch.cat(space.to_gauge(u), dim=-2) * there.unsqueeze(-2)

    def acceleration(x: Tensor, v: Tensor) -> Tensor:
        return GLTangentSpace(space.metric, gauge, x, moved=True).acceleration(v)

    return space.from_gauge(*space.split(integrate_geodesic(acceleration, start, velocity, steps)[0]))


class RungeKuttaPatch(PairPatch):
    """Pairs whose retraction takes ``substeps`` steps."""

    substeps = 4

    def retract(self, u: Tensor) -> Tensor:
        """Follow the geodesic with velocity u to time 1, or the straight line if requested; never raise."""
        if self.measure.geodesic == "first-order":
            return super().retract(u)
        return rk4(self.tangent, u, self.substeps)


class RungeKuttaMeasure(Measure):
    """A measure whose pairs are such blocks."""

    pair_patch = RungeKuttaPatch
