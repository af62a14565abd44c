"""The properties of a quotient manifold that are checked, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp

from .random_point import STEPS, RandomPoint, error_slope, euclidean, metric_derivative, relative_error

__all__ = ["PROPERTIES"]

#: Returns the error or the slope at a point, or None where the property is not defined.
_Measure = Callable[[RandomPoint], "float | Tensor | None"]
PROPERTIES: list[tuple[str, float | None, str, str, _Measure]] = []


def _property(name: str, bound: float | None, hint: str, kind: str = "error") -> Callable[[_Measure], _Measure]:
    """Add a property to the list; a slope without a bound is checked against the retraction's order."""

    def put(measure: _Measure) -> _Measure:
        PROPERTIES.append((name, bound, hint, kind, measure))
        return measure

    return put


# -- the group -------------------------------------------------------------------------------------------------------


@_property("act moves representatives", 0.0, "act(x, A) is x itself: nothing is divided out")
def _(p: RandomPoint) -> float:
    return 0.0 if relative_error(p.y, p.x) > 1e-6 else math.inf


@_property(
    "product is invariant",
    1e-9,
    "to_matrix(act(x, A)) differs from to_matrix(x): act is not a symmetry of what the network sees",
)
def _(p: RandomPoint) -> float:
    return relative_error(p.manifold.to_matrix(p.y), p.manifold.to_matrix(p.x))


@_property("vertical vectors keep the product", 1e-9, "vertical(x, L) is not tangent to the orbit")
def _(p: RandomPoint) -> Tensor:
    along, across = (jvp(p.manifold.to_matrix, (p.x,), (v,))[1] for v in (p.vertical, p.u))
    return along.abs().max() / across.abs().max()


@_property("canonical is one of the orbit", 1e-9, "canonical(x) lies in another orbit")
def _(p: RandomPoint) -> float:
    return relative_error(p.manifold.to_matrix(p.manifold.canonical(p.x)), p.manifold.to_matrix(p.x))


@_property("canonical is the same for all", 1e-7, "canonical(act(x, A)) differs from canonical(x)")
def _(p: RandomPoint) -> float:
    return relative_error(p.manifold.canonical(p.y), p.manifold.canonical(p.x))


@_property(
    "projx leaves points alone", 0.0, "projx moves a point of the manifold, and optimisers call it at every step"
)
def _(p: RandomPoint) -> float:
    return relative_error(p.manifold.projx(p.x), p.x)


# -- the metric and the projection -----------------------------------------------------------------------------------


@_property("inner is symmetric and bilinear", 1e-9, "⟨u, v⟩ ≠ ⟨v, u⟩, or it does not agree with the norm")
def _(p: RandomPoint) -> Tensor:
    inner, x, u, v = p.manifold.inner, p.x, p.u, p.v
    polarised = (inner(x, u + v) - inner(x, u - v)) / 4
    return torch.stack([inner(x, u, v) - inner(x, v, u), inner(x, u, v) - polarised]).abs().max()


@_property(
    "inner is invariant",
    1e-8,
    "the metric depends on the representative: ⟨u, v⟩ changes when x, u and v are moved by one group element",
)
def _(p: RandomPoint) -> Tensor:
    return (p.manifold.inner(p.y, p.moved(p.u), p.moved(p.v)) - p.manifold.inner(p.x, p.u, p.v)).abs().max()


@_property("proju is a projection", 1e-9, "proju(proju(u)) differs from proju(u)")
def _(p: RandomPoint) -> float:
    h = p.manifold.proju(p.x, p.u)
    return relative_error(p.manifold.proju(p.x, h), h)


@_property("proju removes vertical vectors", 1e-8, "a part of the vertical vectors remains")
def _(p: RandomPoint) -> Tensor:
    return p.manifold.norm(p.x, p.manifold.proju(p.x, p.vertical)).max()


@_property("horizontal ⟂ vertical", 1e-8, "proju(u) is not orthogonal to the orbit in the metric")
def _(p: RandomPoint) -> Tensor:
    return p.manifold.inner(p.x, p.manifold.proju(p.x, p.u), p.vertical).abs().max()


@_property("proju is equivariant", 1e-8, "projecting and moving along the orbit do not commute")
def _(p: RandomPoint) -> float:
    return relative_error(p.manifold.proju(p.y, p.moved(p.u)), p.moved(p.manifold.proju(p.x, p.u)))


@_property("random vectors are horizontal", 1e-8, "the tangent space's random() has a vertical part, or is zero")
def _(p: RandomPoint) -> float:
    drawn = p.manifold.tangent_space_at(p.x).random(torch.Generator().manual_seed(0))
    return relative_error(p.manifold.proju(p.x, drawn), drawn) if bool(drawn.any()) else math.inf


# -- the gradient ----------------------------------------------------------------------------------------------------


def _length(p: RandomPoint) -> float:
    return float(p.manifold.norm(p.x, p.rgrad).max() * p.manifold.norm(p.x, p.horizontal).max())


@_property("gradient represents the derivative", 1e-8, "⟨egrad2rgrad(e), u⟩ differs from the derivative along u")
def _(p: RandomPoint) -> float:
    directional = euclidean(p.egrad(p.x), p.horizontal)
    return abs(float(p.manifold.inner(p.x, p.rgrad, p.horizontal).sum() - directional)) / _length(p)


@_property("gradient is equivariant", 1e-8, "equivalent points get different gradients")
def _(p: RandomPoint) -> float:
    return relative_error(p.manifold.egrad2rgrad(p.y, p.egrad(p.y)), p.moved(p.rgrad))


@_property(
    "gradient: slope of the remainder",
    1.9,
    "f(retr(tu)) − f(x) − t⟨grad, u⟩ must fall as t²: gradient and retraction do not fit",
    "slope",
)
def _(p: RandomPoint) -> float:
    u, value = p.horizontal, p.function(p.x)
    represented = p.manifold.inner(p.x, p.rgrad, u).sum()
    scale = max(_length(p), abs(float(value)))
    return error_slope(lambda t: p.function(p.manifold.retr(p.x, t * u)) - value - t * represented, scale)


# -- geodesics -------------------------------------------------------------------------------------------------------


@_property("acceleration follows from the metric", 1e-7, "acceleration(x, u) is not −Γ(u, u) of inner")
def _(p: RandomPoint) -> float:
    # ⟨a, v⟩ = ½ D_v⟨u, u⟩ − D_u⟨u, v⟩ for every v.
    manifold, x, u, v = p.manifold, p.x, p.horizontal, p.v
    change, turn = (metric_derivative(manifold, x, u, w) for w in (u, v))
    by_metric = float(0.5 * euclidean(change, v) - euclidean(turn, u))
    scale = max(float(manifold.norm(x, u).square().max()), abs(by_metric))
    return abs(float(manifold.inner(x, manifold.acceleration(x, u), v).sum()) - by_metric) / scale


@_property("retraction is equivariant", 1e-8, "equivalent points move to different orbits")
def _(p: RandomPoint) -> float:
    u = 0.1 * p.horizontal
    return relative_error(p.manifold.retr(p.y, p.moved(u)), p.manifold.act(p.manifold.retr(p.x, u), p.A))


_ORDER = (
    "against the integrated geodesic the error must fall as t to the order + 1: it is not a retraction of this order, "
    "or "
    "acceleration is wrong away from x"
)


@_property("retraction: slope of the error", None, _ORDER, "slope")
def _(p: RandomPoint) -> float:
    return p.error_of(p.manifold.retr)


@_property("exponential: slope of the error", None, _ORDER, "slope")
def _(p: RandomPoint) -> float:
    return p.error_of(p.manifold.expmap)


@_property("transport arrives horizontal", 1e-8, "transp(x, y, v) has a vertical part at y")
def _(p: RandomPoint) -> float | None:
    there = p.manifold.retr(p.x, 0.1 * p.horizontal)
    if not bool(there.isfinite().all()):  # the retraction has failed already
        return None
    carried = p.manifold.transp(p.x, there, p.v)
    return relative_error(p.manifold.proju(there, carried), carried)


@_property("transport to the same point", 1e-8, "transp(x, x, v) changes a horizontal v")
def _(p: RandomPoint) -> float:
    return relative_error(p.manifold.transp(p.x, p.x, p.horizontal), p.horizontal)


@_property("distance of orbits", 1e-4, "dist(x, y) differs from the length of a short geodesic to y's orbit")
def _(p: RandomPoint) -> float | None:
    step = STEPS[-1] * p.horizontal
    try:
        length = p.manifold.dist(p.x, p.manifold.act(p.manifold.expmap(p.x, step), p.A))
    except NotImplementedError:
        return None
    return relative_error(length, p.manifold.norm(p.x, step))
