"""Checks for quotient manifolds that you write yourself."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import jvp

from .base import QuotientManifold, standard_normal
from .checks import check_tensors
from .geodesics import GeodesicExitError

__all__ = ["ManifoldCheck", "ManifoldReport", "check_manifold"]

#: Step sizes of the slope tests, from 2⁻⁴ to 2⁻⁹.
_STEPS = tuple(2.0**-k for k in range(4, 10))
_ORDER = (
    "against the integrated geodesic the error must fall as t to the order + 1: it is not a retraction of this order, "
    "or acceleration is wrong away from x"
)


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
        Bound that an error must not exceed, or a slope must reach.
    kind : {"error", "slope"}
    hint : str
        The meaning of a failure.

    Examples
    --------
    >>> from quotient_manifolds.testing import ManifoldCheck
    >>> check = ManifoldCheck("retraction: slope of the error", 1.98, 2.9, "slope", "no retraction of order 2")
    >>> print(check)
    FAILED  retraction: slope of the error        slope 1.98 not ≥ 2.9
            no retraction of order 2
    """

    name: str
    value: float
    bound: float
    kind: str
    hint: str

    @property
    def ok(self) -> bool:
        """Whether the property holds."""
        return self.value <= self.bound if self.kind == "error" else self.value >= self.bound

    def __str__(self) -> str:
        found = f"{self.value:.1e} ≤ {self.bound:.0e}" if self.kind == "error" else f"{self.value:.2f} ≥ {self.bound:g}"
        if not self.ok:
            found = found.replace("≤", "not ≤").replace("≥", "not ≥")
        line = f"{'ok' if self.ok else 'FAILED':<8}{self.name:<38}{self.kind} {found}"
        return line if self.ok else f"{line}\n        {self.hint}"


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

    def raise_if_failed(self) -> None:
        """Raise an AssertionError with one line for each property if one does not hold."""
        if not self.ok:
            raise AssertionError(str(self))

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

    and retraction and exponential agree with the integrated geodesic to the order they claim; transport; distance.

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
        ``print(report)``; ``report.ok``; ``report.raise_if_failed()`` in a test.

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
        for check in itertools.chain(*(_checks(p, retraction_order) for p in points), _batch_check(manifold, points)):
            before = worst.setdefault(check.name, check)
            if not (check.value >= before.value if check.kind == "slope" else check.value <= before.value):  # NaN too
                worst[check.name] = check
    return ManifoldReport(str(manifold), tuple(x.shape), tuple(worst.values()))


def _checks(p: _RandomPoint, order: int) -> Iterator[ManifoldCheck]:
    """Check one property after the other, until a result is NaN, which the manifold's methods refuse."""
    try:
        yield from _checks_of_the_metric(p)
        yield from _checks_of_the_gradient(p)
        yield from _checks_of_geodesics(p, order)
    except ValueError as error:
        if "NaN or infinite" not in str(error):
            raise
        yield _error("results are finite", math.inf, 0.0, str(error))


def _error(name: str, value: float | Tensor, bound: float, hint: str) -> ManifoldCheck:
    return ManifoldCheck(name, float(value), bound, "error", hint)


def _checks_of_the_metric(p: _RandomPoint) -> Iterator[ManifoldCheck]:
    """Check the group, the inner product and the projection."""
    manifold, x, y, u, v = p.manifold, p.x, p.y, p.u, p.v
    inner, proju, product, canonical = manifold.inner, manifold.proju, manifold.to_matrix, manifold.canonical
    moves = 0.0 if _difference(y, x) > 1e-6 else math.inf
    yield _error("act moves representatives", moves, 0.0, "act(x, A) is x itself: nothing is divided out")
    hint = "to_matrix(act(x, A)) differs from to_matrix(x): act is not a symmetry of what the network sees"
    yield _error("product is invariant", _difference(product(y), product(x)), 1e-9, hint)
    along, across = (jvp(product, (x,), (w,))[1].abs().max() for w in (p.vertical, u))
    yield _error(
        "vertical vectors keep the product", along / across, 1e-9, "vertical(x, L) is not tangent to the orbit"
    )
    value = _difference(product(canonical(x)), product(x))
    yield _error("canonical is one of the orbit", value, 1e-9, "canonical(x) lies in another orbit")
    value = _difference(canonical(y), canonical(x))
    yield _error("canonical is the same for all", value, 1e-7, "canonical(act(x, A)) differs from canonical(x)")
    hint = "projx moves a point of the manifold, and optimisers call it at every step"
    yield _error("projx leaves points alone", _difference(manifold.projx(x), x), 0.0, hint)
    odd = torch.stack([inner(x, u, v) - inner(x, v, u), inner(x, u, v) - (inner(x, u + v) - inner(x, u - v)) / 4])
    hint = "⟨u, v⟩ ≠ ⟨v, u⟩, or it does not agree with the norm"
    yield _error("inner is symmetric and bilinear", odd.abs().max(), 1e-9, hint)
    change = inner(y, p.moved(u), p.moved(v)) - inner(x, u, v)
    hint = "the metric depends on the representative: ⟨u, v⟩ changes when x, u and v are moved by one group element"
    yield _error("inner is invariant", change.abs().max(), 1e-8, hint)
    h = proju(x, u)
    yield _error("proju is a projection", _difference(proju(x, h), h), 1e-9, "proju(proju(u)) differs from proju(u)")
    rest = manifold.norm(x, proju(x, p.vertical)).max()
    yield _error("proju removes vertical vectors", rest, 1e-8, "a part of the vertical vectors remains")
    cosine = inner(x, proju(x, u), p.vertical).abs().max()
    yield _error("horizontal ⟂ vertical", cosine, 1e-8, "proju(u) is not orthogonal to the orbit in the metric")
    value = _difference(proju(y, p.moved(u)), p.moved(proju(x, u)))
    yield _error("proju is equivariant", value, 1e-8, "projecting and moving along the orbit do not commute")
    drawn = manifold.tangent_space_at(x).random(torch.Generator().manual_seed(0))
    value = _difference(proju(x, drawn), drawn) if bool(drawn.any()) else math.inf
    hint = "the tangent space's random() has a vertical part, or is zero"
    yield _error("random vectors are horizontal", value, 1e-8, hint)


def _checks_of_the_gradient(p: _RandomPoint) -> Iterator[ManifoldCheck]:
    manifold, x, u = p.manifold, p.x, p.horizontal
    gradient, value = manifold.egrad2rgrad(x, p.egrad(x)), p.function(x)
    length = float(manifold.norm(x, gradient).max() * manifold.norm(x, u).max())
    represented = manifold.inner(x, gradient, u).sum()
    off = abs(float(represented - (p.egrad(x).conj() * u).real.sum())) / length
    hint = "⟨egrad2rgrad(e), u⟩ differs from the derivative along u"
    yield _error("gradient represents the derivative", off, 1e-8, hint)
    off = _difference(manifold.egrad2rgrad(p.y, p.egrad(p.y)), p.moved(gradient))
    yield _error("gradient is equivariant", off, 1e-8, "equivalent points get different gradients")
    scale = max(length, abs(float(value)))
    slope = _slope_of(lambda t: p.function(manifold.retr(x, t * u)) - value - t * represented, scale)
    hint = "f(retr(tu)) − f(x) − t⟨grad, u⟩ must fall as t²: gradient and retraction do not fit"
    yield ManifoldCheck("gradient: slope of the remainder", slope, 1.9, "slope", hint)


def _checks_of_geodesics(p: _RandomPoint, order: int) -> Iterator[ManifoldCheck]:
    """Check acceleration, retraction, exponential, transport and distance."""
    manifold, x, u, v = p.manifold, p.x, p.horizontal, p.v
    # ⟨a, v⟩ = ½ D_v⟨u, u⟩ − D_u⟨u, v⟩ for every v.
    change = jvp(lambda z: manifold.inner(z, u, u).sum(), (x,), (v,))[1]
    turn = jvp(lambda z: manifold.inner(z, u, v).sum(), (x,), (u,))[1]
    by_metric = float(0.5 * change - turn)
    scale = max(float(manifold.norm(x, u).square().max()), abs(by_metric))
    off = abs(float(manifold.inner(x, manifold.acceleration(x, u), v).sum()) - by_metric) / scale
    yield _error("acceleration follows from the metric", off, 1e-7, "acceleration(x, u) is not −Γ(u, u) of inner")
    there = manifold.retr(x, 0.1 * u)
    off = _difference(manifold.retr(p.y, p.moved(0.1 * u)), manifold.act(there, p.A))
    yield _error("retraction is equivariant", off, 1e-8, "equivalent points move to different orbits")
    for name, step in (("retraction", manifold.retr), ("exponential", manifold.expmap)):
        yield ManifoldCheck(f"{name}: slope of the error", p.slope_of(step), order + 0.9, "slope", _ORDER)
    if bool(there.isfinite().all()):  # else the retraction has failed already
        carried = manifold.transp(x, there, v)
        off = _difference(manifold.proju(there, carried), carried)
        yield _error("transport arrives horizontal", off, 1e-8, "transp(x, y, v) has a vertical part at y")
    off = _difference(manifold.transp(x, x, u), u)
    yield _error("transport to the same point", off, 1e-8, "transp(x, x, v) changes a horizontal v")
    step = _STEPS[-1] * u
    try:
        length = manifold.dist(x, manifold.act(manifold.expmap(x, step), p.A))
    except NotImplementedError:
        return
    hint = "dist(x, y) differs from the length of a short geodesic to y's orbit"
    yield _error("distance of orbits", _difference(length, manifold.norm(x, step)), 1e-4, hint)


def _batch_check(manifold: QuotientManifold, points: list[_RandomPoint]) -> Iterator[ManifoldCheck]:
    """Compare a stack of points with its single points."""
    if len(points) > 1:
        x, u = torch.stack([p.x for p in points]), torch.stack([p.u for p in points])
        maps = (manifold.proju, manifold.retr, manifold.egrad2rgrad, manifold.inner)
        off = max(_difference(f(x, u), torch.stack([f(p.x, p.u) for p in points])) for f in maps)
        hint = "proju, retr, egrad2rgrad or inner of a stack differ from those of its points"
        yield _error("a batch equals its single points", off, 1e-8, hint)


class _RandomPoint:
    """A point with random vectors, and a random group element that moves all of them."""

    def __init__(self, manifold: QuotientManifold, x: Tensor, seed: int) -> None:
        self.manifold, self.x = manifold, x
        self._generator = torch.Generator().manual_seed(seed)
        self.A = manifold.random_element(x, self._generator)
        self.y = manifold.act(x, self.A)
        like = manifold.to_matrix(x)
        self.unit = float(like.abs().max())
        self._slope, self._bend = self._gaussian(like), self._gaussian(like)
        vertical = manifold.vertical(x, manifold.random_algebra(x, self._generator))
        self.vertical = vertical / manifold.norm(x, vertical, keepdim=True)
        self.u, self.v = self._unit_vector(), self._unit_vector()

    def _unit_vector(self) -> Tensor:
        v = self._gaussian(self.x)
        return v / self.manifold.norm(self.x, v, keepdim=True)

    def _gaussian(self, like: Tensor) -> Tensor:
        return standard_normal(tuple(like.shape), like, self._generator)

    @cached_property
    def horizontal(self) -> Tensor:
        """A horizontal vector along which a geodesic bends by about a fifth and does not end."""
        manifold, x = self.manifold, self.x
        u = manifold.proju(x, self._unit_vector())
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

    def slope_of(self, step: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Return the order to which the orbits that a step reaches agree with those of the integrated geodesic."""
        exact, product = self._integrated, self.manifold.to_matrix
        return _slope_of(lambda t: product(step(self.x, t * self.horizontal)) - exact[t], self.unit)

    @cached_property
    def _integrated(self) -> dict[float, Tensor]:
        """Products along the integrated geodesic, by time."""
        x, u, before, found = self.x, self.horizontal, 0.0, {}
        for t in reversed(_STEPS):
            x, u = integrate_geodesic(self.manifold.acceleration, x, u, 4, t - before)
            found[t], before = self.manifold.to_matrix(x), t
        return found


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the size of both; inf where something is not finite."""
    scale = torch.maximum(a.abs().max(), b.abs().max())
    difference = float((a - b).abs().max() / scale) if float(scale) != 0 else 0.0
    return difference if math.isfinite(difference) else math.inf


def _slope_of(error: Callable[[float], Tensor], scale: float) -> float:
    """Return the order to which an error falls with the step; inf for one at rounding level throughout."""
    errors = [float(error(t).abs().max()) / (scale or 1.0) for t in _STEPS]
    if not all(math.isfinite(e) for e in errors):
        return -math.inf
    known = [(math.log2(t), math.log2(e)) for t, e in zip(_STEPS, errors, strict=True) if e > 1e-11]
    if len(known) < 2:
        return math.inf
    # Terms of two orders may nearly cancel at some step size, so take the median of the slopes.
    return statistics.median((e0 - e1) / (t0 - t1) for (t0, e0), (t1, e1) in itertools.pairwise(known))


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
