"""Parallel transport along the geodesics of the GL(h) quotients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.func import jvp

from ..linalg import pack, weighted_sylvester
from ..linalg import symmetric_part_doubled as sym2
from .alignment import GLManifold, restrict_to_span
from .geodesic import raise_on_exit
from .geodesic_ode import flat_state, integrate, unflat_state
from .local_metric import LocalMetric
from .metrics import Gram, Metric, Pair
from .tangent import GLTangentSpace

__all__ = ["parallel_transport"]

#: Length of an inv geodesic that is integrated at once.
_LEG = 12.0


def _local(metric: Metric, X: Pair, M: Tensor, N: Tensor) -> LocalMetric:
    return LocalMetric(metric, X, (Gram(M, M, torch.linalg.inv(M)), Gram(N, N, torch.linalg.inv(N))))


def _derivatives(metric: Metric, x: Pair, u: Pair, v: Pair) -> tuple[Pair, Pair]:
    r"""Return (ẍ, v̇) at x, where u = ẋ: :math:`\dot v = -Γ(\dot x, v) + (GΛ, -HΛ^H)`, Γ that of the total space.

    Λ is such that v stays horizontal: the derivative of :math:`S = G^H v_G W_G - W_H v_H^H H` vanishes, that is
    :math:`M Λ W_G + W_H Λ N = -\dot S_0`, with Ṡ₀ the derivative for Λ = 0.
    """
    (G, H), (p, q), (a, b) = x, u, v
    M, N = G.mH @ G, H.mH @ H
    here = _local(metric, x, M, N)
    plus, minus = here.acceleration((p + a, q + b)), here.acceleration((p - a, q - b))
    da, db = (plus[0] - minus[0]) / 4, (plus[1] - minus[1]) / 4  # −Γ(ẋ, v), by polarisation

    def moment(M: Tensor, N: Tensor, K: Tensor, J: Tensor) -> Tensor:
        W_G, W_H = _local(metric, x, M, N).weights()
        return K @ W_G - W_H @ J

    changes = sym2(G.mH @ p), sym2(H.mH @ q), p.mH @ a + G.mH @ da, db.mH @ H + b.mH @ q
    dS = jvp(moment, (M, N, G.mH @ a, b.mH @ H), changes)[1]
    V_G, V_H = here.inverse_weights()
    L = weighted_sylvester(M, N, torch.linalg.cholesky(V_H), torch.linalg.cholesky(V_G))(-dS)
    return here.acceleration(u), (da + G @ L, db - H @ L.mH)


@torch.no_grad()
def parallel_transport(manifold: GLManifold, space: GLTangentSpace, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Transport v along the geodesic with velocity u for unit time; return the end point and the transported vector.

    Long inv geodesics, along which singular values change by orders of magnitude, are cut into legs, each of which
    begins in its own canonical gauge; in mix such changes end with the manifold.
    """
    raise_on_exit(space.exit_time(u), 1.0)
    longest = float(space.norm(u).max()) if space.metric.complete and u.numel() else 0.0
    legs, x = max(1, math.ceil(longest / _LEG)), space.x
    u = u / legs
    for leg in range(legs):
        if leg:
            space = manifold.tangent_space_at(x)
            u, v = space.proju(u), space.proju(v)  # horizontal up to the error of the integration
        x, u, v = _leg(manifold, space, u, v)
    return x, v


def _leg(manifold: GLManifold, space: GLTangentSpace, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrate for unit time; return the end point, the velocity there, and the transported vector."""
    shape = torch.broadcast_shapes(space.x.shape, u.shape, v.shape)
    parts = (space.gauge.x, pack(*space.to_gauge(u)), pack(*space.to_gauge(v)))
    small, restricted, back = restrict_to_span(manifold, *(a.expand(shape) for a in parts))
    # Scale columns to unit size for the error control.
    sigma = space.gauge.sigma.unsqueeze(-2)
    scale = (sigma**0.5, *(2 * (sigma**space.metric.scale_exponent,)))

    def flat(state: Iterable[Tensor]) -> Tensor:
        return flat_state(tuple(k / s for k, s in zip(state, scale, strict=True)))

    def unflat(y: Tensor) -> list[Tensor]:
        state = unflat_state(y, shape[-1], restricted[0].is_complex(), 3)
        return [k * s for k, s in zip(state, scale, strict=True)]

    def derivative(y: Tensor) -> Tensor:
        x, velocity, w = unflat(y)
        ends = _derivatives(space.metric, *(k.split(small.row_split(), dim=-2) for k in (x, velocity, w)))
        return flat((velocity, *(torch.cat(k, dim=-2) for k in ends)))

    end = unflat(integrate(derivative, flat(restricted), 1e-11))
    x1, u1, v1 = (space.from_gauge(*space.split(back(k))) for k in end)
    return x1, u1, v1
