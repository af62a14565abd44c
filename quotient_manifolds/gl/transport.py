"""Parallel transport along the geodesics of the GL(h) quotients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jvp

from ..linalg import pack
from .geodesic import raise_on_exit
from .geodesic_ode import integrate
from .logarithm import GLManifold, restrict_to_span
from .tangent import GLTangentSpace

__all__ = ["parallel_transport"]


def parallel_transport(manifold: GLManifold, space: GLTangentSpace, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    r"""Transport v along the geodesic with velocity u, for unit time, with the connection of the quotient.

    For horizontal lifts the horizontal part of :math:`\dot v` is that of :math:`-Γ(\dot x, v)`, Γ that of the total
    space, and :math:`v = P_x v` along the way gives the rest:

    .. math:: \dot v = (D P_x[\dot x]) v - P_x Γ(\dot x, v), \qquad
              Γ(u, v) = \tfrac14 \big( Γ(u + v, u + v) - Γ(u - v, u - v) \big)

    Returns the end point and the transported vector.
    """
    raise_on_exit(space.exit_time(u), 1.0)
    shape = torch.broadcast_shapes(space.x.shape, u.shape, v.shape)
    parts = (space.gauge.x, pack(*space.to_gauge(u)), pack(*space.to_gauge(v)))
    small, restricted, back = restrict_to_span(manifold, *(a.expand(shape) for a in parts))
    n, m = small.row_split()
    small = small.resized(n, m, relaxation=0.0)
    # Columns of unit size for the error control.
    power = space.gauge.sigma.unsqueeze(-2)
    scale = torch.stack([power**0.5, *(2 * (power**space.metric.scale_exponent,))])
    is_complex = restricted[0].is_complex()

    # The batch first, for the norm that looks at the worst item.
    def flat(y: Tensor) -> Tensor:
        y = (y / scale).movedim(0, -3).flatten(-3)
        return torch.view_as_real(y).flatten(-2) if is_complex else y

    def unflat(y: Tensor) -> Tensor:
        if is_complex:
            y = torch.complex(*y.reshape(*y.shape[:-1], -1, 2).unbind(-1))
        return y.reshape(*y.shape[:-1], 3, -1, shape[-1]).movedim(-3, 0) * scale

    def derivative(_t: Tensor, y: Tensor) -> Tensor:
        x, velocity, w = unflat(y).unbind(0)
        here = small.tangent_space_at(x)
        turning = jvp(lambda z: small.proju(z, w), (x,), (velocity,))[1]
        bending = (here.acceleration(velocity + w) - here.acceleration(velocity - w)) / 4
        return flat(torch.stack([velocity, here.acceleration(velocity), turning + here.proju(bending)]))

    end = unflat(integrate(derivative, flat(torch.stack(restricted)), 1.0, 1e-11))
    x1, v1 = (space.from_gauge(*space.split(back(k))) for k in (end[0], end[2]))
    return x1, v1
