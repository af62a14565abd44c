"""A point with random vectors, and the quantities that are measured with them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.func import jvp

from ..base import QuotientManifold, standard_normal
from ..gl import GeodesicExitError

__all__ = [
    "STEPS",
    "RandomPoint",
    "error_slope",
    "euclidean",
    "integrate_geodesic",
    "metric_derivative",
    "relative_error",
]

#: Step sizes of the slope tests, from 2⁻⁴ to 2⁻⁹.
STEPS = tuple(2.0**-k for k in range(4, 10))


class RandomPoint:
    """A point with random vectors, and a random group element that moves all of them."""

    def __init__(self, manifold: QuotientManifold, x: Tensor, seed: int, order: int) -> None:
        self.manifold, self.x, self.order = manifold, x, order
        self._generator = torch.Generator().manual_seed(seed)
        self.A = manifold.random_element(x, self._generator)
        self.y = manifold.act(x, self.A)
        like = manifold.to_matrix(x)
        self.unit = float(like.abs().max())
        self._slope, self._bend = self._gaussian(like), self._gaussian(like)
        vertical = manifold.vertical(x, manifold.random_algebra(x, self._generator))
        self.vertical = vertical / manifold.norm(x, vertical, keepdim=True)
        self.u, self.v = self.ambient(), self.ambient()

    def _gaussian(self, like: Tensor) -> Tensor:
        return standard_normal(tuple(like.shape), like, self._generator)

    def ambient(self) -> Tensor:
        """Draw a vector of unit length."""
        v = self._gaussian(self.x)
        return v / self.manifold.norm(self.x, v, keepdim=True)

    @cached_property
    def horizontal(self) -> Tensor:
        """A horizontal vector along which a geodesic bends by about a fifth and does not end."""
        manifold, x = self.manifold, self.x
        u = manifold.proju(x, self.ambient())
        u = u / manifold.norm(x, u, keepdim=True)
        if not bool(u.isfinite().all()):
            raise ValueError(f"{manifold}: no finite horizontal vector at the point; check proju, inner and norm")
        bend, size = (manifold.norm(x, v, keepdim=True) for v in (manifold.acceleration(x, u), x))
        u = 0.2 * u * torch.minimum(torch.where(bend > 0, 1 / bend, torch.inf), size)
        for _ in range(60):
            try:
                manifold.expmap(x, 4 * u)
                return u
            except GeodesicExitError:
                u = u / 2
        raise ValueError(f"{manifold}: every geodesic ends at once; check proju, norm and expmap")

    def moved(self, u: Tensor) -> Tensor:
        """Return the image of u at y under the action."""
        found: Tensor = jvp(lambda z: self.manifold.act(z, self.A), (self.x,), (u,))[1]
        return found

    def function(self, z: Tensor) -> Tensor:
        """Evaluate a smooth function of the orbit."""
        product = self.manifold.to_matrix(z)
        linear = (self._slope.conj() * product).real.sum()
        return linear + 0.5 * (self._bend.conj() * product).real.square().sum()

    def egrad(self, z: Tensor) -> Tensor:
        """Differentiate the function."""
        z = z.detach().requires_grad_()
        return torch.autograd.grad(self.function(z), z)[0]

    @cached_property
    def rgrad(self) -> Tensor:
        """The Riemannian gradient of the function."""
        return self.manifold.egrad2rgrad(self.x, self.egrad(self.x))

    def error_of(self, step: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Return the order to which the orbits that a step reaches agree with those of the integrated geodesic."""
        exact, product = self._integrated, self.manifold.to_matrix
        return error_slope(lambda t: product(step(self.x, t * self.horizontal)) - exact[t], self.unit)

    @cached_property
    def _integrated(self) -> dict[float, Tensor]:
        """Products along the integrated geodesic, by time."""
        x, u, before, found = self.x, self.horizontal, 0.0, {}
        for t in reversed(STEPS):
            x, u = integrate_geodesic(self.manifold.acceleration, x, u, 4, t - before)
            found[t], before = self.manifold.to_matrix(x), t
        return found


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the size of both; inf where something is not finite."""
    scale = torch.maximum(a.abs().max(), b.abs().max())
    difference = float((a - b).abs().max() / scale) if float(scale) != 0 else 0.0
    return difference if math.isfinite(difference) else math.inf


def error_slope(error: Callable[[float], Tensor], scale: float) -> float:
    """Return the order to which an error falls with the step; inf for one at rounding level throughout."""
    errors = [float(error(t).abs().max()) / (scale or 1.0) for t in STEPS]
    if not all(math.isfinite(e) for e in errors):
        return -math.inf
    known = [(math.log2(t), math.log2(e)) for t, e in zip(STEPS, errors, strict=True) if e > 1e-11]
    if len(known) < 2:
        return math.inf
    # Terms of two orders may nearly cancel at some step size, so take the median of the slopes.
    return statistics.median((e0 - e1) / (t0 - t1) for (t0, e0), (t1, e1) in itertools.pairwise(known))


def metric_derivative(manifold: QuotientManifold, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Differentiate x ↦ ⟨u, v⟩ with u and v held constant."""
    x = x.detach().requires_grad_()
    value = manifold.inner(x, u, v).sum()
    return torch.autograd.grad(value, x)[0] if value.requires_grad else torch.zeros_like(x)  # a flat metric


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return Re⟨a, b⟩_F."""
    return (a.conj() * b).real.sum()


def integrate_geodesic(
    acceleration: Callable[[Tensor, Tensor], Tensor], x: Tensor, u: Tensor, steps: int, time: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Follow ẍ = acceleration(x, ẋ) from x with velocity u by the classical Runge–Kutta method: x and u at the end."""
    h = time / steps
    for _ in range(steps):
        a1 = acceleration(x, u)
        a2 = acceleration(x + h / 2 * u, u + h / 2 * a1)
        a3 = acceleration(x + h / 2 * u + h**2 / 4 * a1, u + h / 2 * a2)
        a4 = acceleration(x + h * u + h**2 / 2 * a2, u + h * a3)
        x, u = x + h * u + h**2 / 6 * (a1 + a2 + a3), u + h / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
    return x, u
