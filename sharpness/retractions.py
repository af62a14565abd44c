"""How attention pairs move along a tangent vector, and the adjoint derivative of that."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quotient_manifolds import GLTangentSpace
from reproduction.rk4 import rk4

from .measures import Measure

__all__ = ["RETRACTIONS"]


def _rk4(t: GLTangentSpace, u: Tensor, measure: Measure) -> Tensor:
    return rk4(t, u, measure.substeps)


#: Share of its way to the manifold's boundary to which a geodesic is shortened that would leave.
_INSIDE = 0.99


def _exact(t: GLTangentSpace, u: Tensor, measure: Measure) -> Tensor:
    # The share is constant to autograd: beyond the boundary the retraction follows the vector's direction only.
    return t.expmap(u * (_INSIDE * t.exit_time(u.detach())).clamp_max(1)[..., None, None])


def _pull_by_autograd(
    retract: Callable[[GLTangentSpace, Tensor, Measure], Tensor],
    t: GLTangentSpace,
    u: Tensor,
    egrad: Tensor,
    measure: Measure,
) -> Tensor:
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        return torch.autograd.grad(retract(t, u, measure), u, egrad)[0]


#: By geodesic: the retraction (tangent space, vector, measure) → point, and its adjoint derivative, with the Euclidean
#: gradient at that point as a further argument before the measure.
RETRACTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "first-order": (lambda t, u, _: t.x + u, lambda t, u, egrad, _: egrad),
    "second-order": (lambda t, u, _: t.retr(u), lambda t, u, egrad, _: t.pullback(u, egrad)),
    "exact": (_exact, lambda t, u, egrad, measure: _pull_by_autograd(_exact, t, u, egrad, measure)),
    "rk4": (_rk4, lambda t, u, egrad, measure: _pull_by_autograd(_rk4, t, u, egrad, measure)),
}
