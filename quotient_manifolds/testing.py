"""Checks for quotient manifolds that you write yourself."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import jvp

from .base import QuotientManifold
from .geodesics import GeodesicExitError
from .linalg import NotFiniteError, check_tensors, standard_normal

__all__ = ["ManifoldCheck", "ManifoldReport", "check_manifold"]

#: Step sizes of the slope tests, from 2⁻⁴ to 2⁻⁹.
_STEPS = tuple(2.0**-k for k in range(4, 10))


@dataclass(frozen=True)
class ManifoldCheck:
    """The result of checking one property.

    Attributes
    ----------
    name : str
        The property that was checked.
    value : float
        Largest relative error, or the slope of an error.
    bound : float
        Bound below 1 that an error must not exceed, or above 1 that a slope must reach.

    Examples
    --------
    >>> from quotient_manifolds.testing import ManifoldCheck
    >>> print(ManifoldCheck("retraction: slope of the error", 1.98, 2.9))
    FAILED  retraction: slope of the error        slope 1.98 not ≥ 2.9
    """

    name: str
    value: float
    bound: float

    @property
    def excess(self) -> float:
        """By how much the bound is missed; not positive where it is kept, and inf for NaN."""
        excess = self.bound - self.value if self.bound > 1 else self.value - self.bound
        return math.inf if math.isnan(excess) else excess

    @property
    def ok(self) -> bool:
        """Whether the property holds."""
        return self.excess <= 0

    def __str__(self) -> str:
        kind, sign = ("slope", "≥") if self.bound > 1 else ("error", "≤")
        state, relation = ("ok", sign) if self.ok else ("FAILED", f"not {sign}")
        return f"{state:<8}{self.name:<38}{kind} {self.value:.3g} {relation} {self.bound:.3g}"


@dataclass(frozen=True)
class ManifoldReport:
    """The result of :func:`check_manifold`; ``print`` shows one line per property.

    Attributes
    ----------
    manifold : str
        Its ``repr``.
    shape : tuple of int
        Of the point.
    checks : tuple of ManifoldCheck
        The checks in the order in which they were made.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> from quotient_manifolds.testing import check_manifold
    >>> manifold = GLQuotientMix(3, 3)
    >>> x = torch.linspace(-1, 1, 12, dtype=torch.float64).sin().reshape(6, 2) + manifold.origin(3 + 3, 2)
    >>> report = check_manifold(manifold, x, retraction_order=3)
    >>> [check.name for check in report.failures]
    ['retraction: slope of the error']
    """

    manifold: str
    shape: tuple[int, ...]
    checks: tuple[ManifoldCheck, ...]

    @property
    def failures(self) -> tuple[ManifoldCheck, ...]:
        """The properties that do not hold."""
        return tuple(c for c in self.checks if not c.ok)

    @property
    def ok(self) -> bool:
        """Whether all properties hold."""
        return not self.failures

    def __str__(self) -> str:
        state = "all properties hold" if self.ok else f"{len(self.failures)} of {len(self.checks)} properties FAILED"
        return "\n".join([f"{self.manifold} at a point of shape {self.shape}: {state}", *map(str, self.checks)])


def check_manifold(
    manifold: QuotientManifold, x: Tensor, *, seed: int = 0, retraction_order: int = 2
) -> ManifoldReport:
    r"""Check that a quotient manifold satisfies its definition, at one point and in random directions.

    The group: :meth:`act` leaves :meth:`to_matrix` unchanged, and :meth:`vertical` is tangent to the orbit. The metric:
    it is an inner product, and the same for all representatives. The projection: idempotent, orthogonal, equivariant.
    The gradient: it represents the derivative, and :math:`f(R_x(tu)) - f(x) - t \langle \mathrm{grad} f, u \rangle`
    falls as :math:`t^2`. Geodesics: the acceleration is the metric's,

    .. math:: \langle a, v \rangle = \tfrac12 D_v \langle u, u \rangle - D_u \langle u, v \rangle
              \quad\text{for all } v,

    and the errors of retraction and exponential against the integrated geodesic fall as t to their order + 1 (if not,
    the acceleration may be wrong away from x); transport; distance.

    Parameters
    ----------
    manifold : QuotientManifold
        With :meth:`random_algebra` and, unless its group elements are matrix exponentials, :meth:`random_element`.
    x : Tensor
        Point, float64 or complex128, batch dimensions first; every number is the worst of the batch. Rounding errors
        grow with the condition number of the factors, so take points from ``manifold.random``. A point takes a fraction
        of a second.
    seed : int
        Seed of the directions and the group element.
    retraction_order : int
        2 for a retraction that agrees with geodesics to second order, as :meth:`QuotientManifold.retr` does; 1 for one
        that follows the direction only.

    Returns
    -------
    ManifoldReport
        ``print(report)``; in a test ``assert report.ok, report``.

    Raises
    ------
    ValueError
        The point is in single precision or not on the manifold, the batch is empty, or there is no horizontal vector.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientInv
    >>> from quotient_manifolds.testing import check_manifold
    >>> manifold = GLQuotientInv(5, 4)
    >>> report = check_manifold(manifold, manifold.random(3, 5 + 4, 2, dtype=torch.float64))
    >>> report.ok
    True
    >>> print(str(report).splitlines()[0])
    GLQuotientInv(n=5, m=4) manifold at a point of shape (3, 9, 2): all properties hold
    """
    check_tensors(manifold, x=x)
    if x.dtype not in (torch.float64, torch.complex128):
        raise ValueError(f"{manifold}: slopes and small errors need double precision; pass x.to(torch.float64)")
    if not x.numel():
        raise ValueError(f"{manifold}: a batch without points cannot be checked")
    manifold.assert_check_point_on_manifold(x)
    worst: dict[str, ManifoldCheck] = {}
    with torch.enable_grad():
        points = [_RandomPoint(manifold, item, seed) for item in x.detach().reshape(-1, *x.shape[-manifold.ndim :])]
        for check in _checks(manifold, points, retraction_order):
            worst[check.name] = max(worst.get(check.name, check), check, key=lambda c: c.excess)
    return ManifoldReport(str(manifold), tuple(x.shape), tuple(worst.values()))


def _checks(manifold: QuotientManifold, points: list[_RandomPoint], order: int) -> Iterator[ManifoldCheck]:
    """Measure every property at every point, until a result is NaN, which the manifold's methods refuse."""
    for p in points:
        try:
            for name, bound, value in itertools.chain(_of_the_metric(p), _of_curves(p, order)):
                yield ManifoldCheck(name, float(value), bound)
        except NotFiniteError as error:
            yield ManifoldCheck(f"results are finite: {error}", math.inf, 0)
    if len(points) > 1:
        x, u = torch.stack([p.x for p in points]), torch.stack([p.u for p in points])
        maps = (manifold.proju, manifold.retr, manifold.egrad2rgrad, manifold.inner)
        off = max(_difference(f(x, u), torch.stack([f(p.x, p.u) for p in points])) for f in maps)
        yield ManifoldCheck("a batch equals its single points", off, 1e-8)


def _of_the_metric(p: _RandomPoint) -> Iterator[tuple[str, float, float | Tensor]]:
    """Measure the group, the inner product and the projection."""
    manifold, x, y, u, v = p.manifold, p.x, p.y, p.u, p.v
    inner, proju, product, canonical = manifold.inner, manifold.proju, manifold.to_matrix, manifold.canonical
    yield "act moves representatives", 0, 0 if _difference(y, x) > 1e-6 else math.inf
    yield "product is invariant", 1e-9, _difference(product(y), product(x))
    along, across = (jvp(product, (x,), (w,))[1].abs().max() for w in (p.vertical, u))
    yield "vertical vectors keep the product", 1e-9, along / across
    yield "canonical is one of the orbit", 1e-9, _difference(product(canonical(x)), product(x))
    yield "canonical is the same for all", 1e-7, _difference(canonical(y), canonical(x))
    yield "projx leaves points alone", 0, _difference(manifold.projx(x), x)
    odd = inner(x, u, v) - inner(x, v, u), inner(x, u, v) - (inner(x, u + v) - inner(x, u - v)) / 4
    yield "inner is symmetric and bilinear", 1e-9, torch.stack(odd).abs().max()
    yield "inner is invariant", 1e-8, (inner(y, p.moved(u), p.moved(v)) - inner(x, u, v)).abs().max()
    yield "proju is a projection", 1e-9, _difference(proju(x, proju(x, u)), proju(x, u))
    yield "proju removes vertical vectors", 1e-8, manifold.norm(x, proju(x, p.vertical)).max()
    yield "horizontal ⟂ vertical", 1e-8, inner(x, proju(x, u), p.vertical).abs().max()
    yield "proju is equivariant", 1e-8, _difference(proju(y, p.moved(u)), p.moved(proju(x, u)))
    drawn = manifold.tangent_space_at(x).random(torch.Generator().manual_seed(0))
    yield "random vectors are horizontal", 1e-8, _difference(proju(x, drawn), drawn) if bool(drawn.any()) else math.inf


def _of_curves(p: _RandomPoint, order: int) -> Iterator[tuple[str, float, float | Tensor]]:
    """Measure gradient, acceleration, retraction, exponential, transport and distance."""
    manifold, x, u, v, product, egrad = p.manifold, p.x, p.horizontal, p.v, p.manifold.to_matrix, p.egrad(p.x)
    gradient, value = manifold.egrad2rgrad(x, egrad), p.function(x)
    length = float(manifold.norm(x, gradient).max() * manifold.norm(x, u).max())
    represented = manifold.inner(x, gradient, u).sum()
    yield "gradient represents the derivative", 1e-8, (represented - (egrad.conj() * u).real.sum()).abs() / length
    yield "gradient is equivariant", 1e-8, _difference(manifold.egrad2rgrad(p.y, p.egrad(p.y)), p.moved(gradient))
    # Of the two sides one has terms of even and odd orders with equal signs, which do not cancel.
    sides = {t: [p.function(manifold.retr(x, s * u)) - value - s * represented for s in (t, -t)] for t in _STEPS}
    rest = {t: torch.stack(both) for t, both in sides.items()}
    yield "gradient: slope of the remainder", 1.9, _slope(rest, max(length, abs(float(value))))
    # ⟨a, v⟩ = ½ D_v⟨u, u⟩ − D_u⟨u, v⟩ for every v.
    change = jvp(lambda z: manifold.inner(z, u, u).sum(), (x,), (v,))[1]
    by_metric = 0.5 * change - jvp(lambda z: manifold.inner(z, u, v).sum(), (x,), (u,))[1]
    off = (manifold.inner(x, manifold.acceleration(x, u), v).sum() - by_metric).abs()
    yield "acceleration follows from the metric", 1e-7, off / torch.maximum(manifold.inner(x, u).max(), by_metric.abs())
    there = manifold.retr(x, 0.1 * u)
    moved = manifold.retr(p.y, p.moved(0.1 * u))
    yield "retraction is equivariant", 1e-8, _difference(moved, manifold.act(there, p.A))
    exact, z, w, before = {}, x, u, 0.0
    for t in reversed(_STEPS):
        z, w = integrate_geodesic(manifold.acceleration, z, w, 4, t - before)
        exact[t], before = product(z), t
    for name, step in (("retraction", manifold.retr), ("exponential", manifold.expmap)):
        errors = {t: product(step(x, t * u)) - exact[t] for t in _STEPS}
        yield f"{name}: slope of the error", order + 0.9, _slope(errors, float(product(x).abs().max()))
    if bool(there.isfinite().all()):  # else the retraction has failed already
        transported = manifold.transp(x, there, v)
        yield "transport arrives horizontal", 1e-8, _difference(manifold.proju(there, transported), transported)
    yield "transport to the same point", 1e-8, _difference(manifold.transp(x, x, u), u)
    short = _STEPS[-1] * u
    with contextlib.suppress(NotImplementedError):
        distance = manifold.dist(x, manifold.act(manifold.expmap(x, short), p.A))
        yield "distance of orbits", 1e-4, _difference(distance, manifold.norm(x, short))


class _RandomPoint:
    """A point with random vectors, and a random group element that moves all of them."""

    def __init__(self, manifold: QuotientManifold, x: Tensor, seed: int) -> None:
        self.manifold, self.x, generator = manifold, x, torch.Generator().manual_seed(seed)
        self.A = manifold.random_element(x, generator)
        self.y, product = manifold.act(x, self.A), manifold.to_matrix(x)
        self._slope, self._bend = (standard_normal(tuple(product.shape), product, generator) for _ in range(2))
        vertical = manifold.vertical(x, manifold.random_algebra(x, generator))
        vectors = [vertical, *(standard_normal(tuple(x.shape), x, generator) for _ in range(3))]
        self.vertical, self.u, self.v, self._w = (w / manifold.norm(x, w, keepdim=True) for w in vectors)

    @cached_property
    def horizontal(self) -> Tensor:
        """A horizontal vector along which a geodesic bends by about a fifth and does not end."""
        manifold, x = self.manifold, self.x
        u = manifold.proju(x, self._w)
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
        return jvp(lambda z: self.manifold.act(z, self.A), (self.x,), (u,))[1]

    def function(self, z: Tensor) -> Tensor:
        """Evaluate a smooth function of the orbit."""
        product = self.manifold.to_matrix(z)
        linear = (self._slope.conj() * product).real.sum()
        return linear + 0.5 * (self._bend.conj() * product).real.square().sum()

    def egrad(self, z: Tensor) -> Tensor:
        """Differentiate the function."""
        z = z.detach().requires_grad_()
        return torch.autograd.grad(self.function(z), z)[0]


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the size of both; inf where something is not finite."""
    scale = torch.maximum(a.abs().max(), b.abs().max())
    difference = float((a - b).abs().max() / scale) if float(scale) != 0 else 0.0
    return difference if math.isfinite(difference) else math.inf


def _slope(errors: dict[float, Tensor], scale: float) -> float:
    """Return the order to which errors fall with the step; inf for those at rounding level throughout."""
    sizes = {t: float(error.abs().max()) / (scale or 1.0) for t, error in errors.items()}
    if not all(map(math.isfinite, sizes.values())):
        return -math.inf
    known = [(math.log2(t), math.log2(size)) for t, size in sizes.items() if size > 1e-11]
    # Terms of two orders may nearly cancel at some step size, so take the median of the slopes.
    slopes = [(e0 - e1) / (t0 - t1) for (t0, e0), (t1, e1) in itertools.pairwise(known)]
    return statistics.median(slopes) if slopes else math.inf


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
