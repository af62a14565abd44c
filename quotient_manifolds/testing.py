"""Does a quotient manifold do what it says? Checks for manifolds of one's own."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp

from .base import QuotientManifold, check_tensors, standard_normal
from .gl.geodesic import GeodesicExitError

__all__ = ["ManifoldCheck", "ManifoldReport", "check_manifold"]

#: Step sizes of the slope tests, from 2⁻⁴ to 2⁻⁹.
_STEPS = tuple(2.0**-k for k in range(4, 10))


@dataclass(frozen=True)
class ManifoldCheck:
    """One property.

    Attributes
    ----------
    name : str
        What was looked at.
    value : float
        Largest relative error, or the slope of an error.
    bound : float
        What an error must not exceed, or a slope must reach.
    kind : {"error", "slope"}
    hint : str
        What a failure means.

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
    """What :func:`check_manifold` found; ``print`` gives a line a property.

    Attributes
    ----------
    manifold : str
        Its ``repr``.
    shape : tuple of int
        Of the point.
    checks : tuple of ManifoldCheck
        In the order of the tests.

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
        """Raise the report if a property does not hold.

        Raises
        ------
        AssertionError
            With one line for each property.
        """
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        state = "all properties hold" if self.ok else f"{len(self.failures)} of {len(self.checks)} properties FAILED"
        return "\n".join([f"{self.manifold} at a point of shape {self.shape}: {state}", *map(str, self.checks)])


class _Point:
    """A point with random vectors, and a random group element that moves all of them."""

    def __init__(self, manifold: QuotientManifold, x: Tensor, seed: int) -> None:
        self.manifold, self.x = manifold, x
        self._generator = torch.Generator().manual_seed(seed)
        self.A = manifold.random_element(x, self._generator)
        self.y = manifold.act(x, self.A)
        like = manifold.to_matrix(x)
        self._slope, self._bend = self._gaussian(like), self._gaussian(like)

    def _gaussian(self, like: Tensor) -> Tensor:
        return standard_normal(tuple(like.shape), like, self._generator)

    def ambient(self) -> Tensor:
        """Draw a vector of unit length."""
        v = self._gaussian(self.x)
        return v / self.manifold.norm(self.x, v, keepdim=True)

    def horizontal(self) -> Tensor:
        """Draw a horizontal vector on whose length a geodesic bends by about a fifth, and does not end."""
        manifold, x = self.manifold, self.x
        u = manifold.proju(x, self.ambient())
        u = u / manifold.norm(x, u, keepdim=True)
        if not bool(u.isfinite().all()):
            raise ValueError(f"{manifold}: no finite horizontal vector at the point; look at proju, inner and norm")
        bend, size = (manifold.norm(x, v, keepdim=True) for v in (manifold.acceleration(x, u), x))
        u = 0.2 * u * torch.minimum(torch.where(bend > 0, 1 / bend, torch.inf), size)
        for _ in range(60):
            try:
                manifold.expmap(x, 4 * u)
                return u
            except GeodesicExitError:
                u = u / 2
        raise ValueError(f"{manifold}: every geodesic ends at once; look at proju, norm and expmap")

    def vertical(self) -> Tensor:
        """Draw a vertical vector."""
        return self.manifold.vertical(self.x, self.manifold.random_algebra(self.x, self._generator))

    def moved(self, u: Tensor) -> Tensor:
        """Give the vector at y that the action makes of u."""
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


def _relative(a: Tensor, b: Tensor) -> float:
    """Give the largest difference relative to the size of both; inf where something is not finite."""
    scale = torch.maximum(a.abs().max(), b.abs().max())
    difference = float((a - b).abs().max() / scale) if float(scale) != 0 else 0.0
    return difference if math.isfinite(difference) else math.inf


def _slope(error: Callable[[float], Tensor], scale: float) -> float:
    """Give the order to which an error falls with the step; inf for one at rounding level throughout."""
    errors = [float(error(t).abs().max()) / (scale or 1.0) for t in _STEPS]
    if not all(math.isfinite(e) for e in errors):
        return -math.inf
    known = [(math.log2(t), math.log2(e)) for t, e in zip(_STEPS, errors, strict=True) if e > 1e-11]
    if len(known) < 2:
        return math.inf
    # Two orders may all but cancel somewhere on the way: the median of the slopes.
    return statistics.median((e0 - e1) / (t0 - t1) for (t0, e0), (t1, e1) in itertools.pairwise(known))


def _integrated(manifold: QuotientManifold, x: Tensor, u: Tensor, substeps: int = 8) -> Tensor:
    """Follow the geodesic equation for unit time by the classical Runge-Kutta method."""
    h = 1.0 / substeps
    for _ in range(substeps):
        a1 = manifold.acceleration(x, u)
        a2 = manifold.acceleration(x + h / 2 * u, u + h / 2 * a1)
        a3 = manifold.acceleration(x + h / 2 * u + h**2 / 4 * a1, u + h / 2 * a2)
        a4 = manifold.acceleration(x + h * u + h**2 / 2 * a2, u + h * a3)
        x, u = x + h * u + h**2 / 6 * (a1 + a2 + a3), u + h / 6 * (a1 + 2 * a2 + 2 * a3 + a4)
    return x


def _metric_derivative(manifold: QuotientManifold, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Differentiate x ↦ ⟨u, v⟩ with u and v held constant."""
    x = x.detach().requires_grad_()
    value = manifold.inner(x, u, v).sum()
    return torch.autograd.grad(value, x)[0] if value.requires_grad else torch.zeros_like(x)  # a flat metric


def _euclidean(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).real.sum()


def _checks(p: _Point, order: int) -> Iterator[ManifoldCheck]:
    """Look at one property after the other, at one point."""
    manifold, x, y = p.manifold, p.x, p.y
    tight = 1e-9

    # -- the group -----------------------------------------------------------------------------------------------
    yield ManifoldCheck(
        "act moves representatives",
        0.0 if _relative(y, x) > 1e-6 else math.inf,
        0.0,
        "error",
        "act(x, A) is x itself: nothing is divided out",
    )
    yield ManifoldCheck(
        "product is invariant",
        _relative(manifold.to_matrix(y), manifold.to_matrix(x)),
        tight,
        "error",
        "to_matrix(act(x, A)) differs from to_matrix(x): act is no symmetry of what the network sees",
    )
    vertical, ambient = p.vertical(), p.ambient()
    vertical = vertical / manifold.norm(x, vertical, keepdim=True)
    along, across = (jvp(manifold.to_matrix, (x,), (v,))[1] for v in (vertical, ambient))
    yield ManifoldCheck(
        "vertical vectors keep the product",
        float(along.abs().max() / across.abs().max()),
        tight,
        "error",
        "vertical(x, L) is not tangent to the orbit",
    )
    yield ManifoldCheck(
        "canonical is one of the orbit",
        _relative(manifold.to_matrix(manifold.canonical(x)), manifold.to_matrix(x)),
        tight,
        "error",
        "canonical(x) lies in another orbit",
    )
    yield ManifoldCheck(
        "canonical is the same for all",
        _relative(manifold.canonical(y), manifold.canonical(x)),
        1e-7,
        "error",
        "canonical(act(x, A)) differs from canonical(x)",
    )
    yield ManifoldCheck(
        "projx leaves points alone",
        _relative(manifold.projx(x), x),
        0.0,
        "error",
        "projx moves a point of the manifold, and optimisers call it at every step",
    )

    # -- the metric and the projection ---------------------------------------------------------------------------
    u, v = p.ambient(), p.ambient()
    uv = manifold.inner(x, u, v)
    polarised = (manifold.inner(x, u + v) - manifold.inner(x, u - v)) / 4
    yield ManifoldCheck(
        "inner is symmetric and bilinear",
        float(torch.stack([uv - manifold.inner(x, v, u), uv - polarised]).abs().max()),
        tight,
        "error",
        "⟨u, v⟩ ≠ ⟨v, u⟩, or it does not go with the norm",
    )
    yield ManifoldCheck(
        "inner is invariant",
        float((manifold.inner(y, p.moved(u), p.moved(v)) - uv).abs().max()),
        1e-8,
        "error",
        "the metric depends on the representative: ⟨u, v⟩ changes when x, u and v are moved by one group element",
    )
    h = manifold.proju(x, u)
    yield ManifoldCheck(
        "proju is a projection",
        _relative(manifold.proju(x, h), h),
        tight,
        "error",
        "proju(proju(u)) differs from proju(u)",
    )
    yield ManifoldCheck(
        "proju removes vertical vectors",
        float(manifold.norm(x, manifold.proju(x, vertical)).max()),
        1e-8,
        "error",
        "a part of the vertical vectors is left",
    )
    yield ManifoldCheck(
        "horizontal ⟂ vertical",
        float(manifold.inner(x, h, vertical).abs().max()),
        1e-8,
        "error",
        "proju(u) is not orthogonal to the orbit in the metric",
    )
    yield ManifoldCheck(
        "proju is equivariant",
        _relative(manifold.proju(y, p.moved(u)), p.moved(h)),
        1e-8,
        "error",
        "projecting and moving along the orbit do not commute",
    )
    drawn = manifold.tangent_space_at(x).random(torch.Generator().manual_seed(0))
    yield ManifoldCheck(
        "random vectors are horizontal",
        _relative(manifold.proju(x, drawn), drawn) if bool(drawn.any()) else math.inf,
        1e-8,
        "error",
        "the tangent space's random() has a vertical part, or is zero",
    )

    # -- the gradient --------------------------------------------------------------------------------------------
    u = p.horizontal()
    egrad = p.egrad(x)
    rgrad = manifold.egrad2rgrad(x, egrad)
    directional, represented = _euclidean(egrad, u), manifold.inner(x, rgrad, u).sum()
    size = float(manifold.norm(x, rgrad).max() * manifold.norm(x, u).max())
    yield ManifoldCheck(
        "gradient represents the derivative",
        abs(float(represented - directional)) / size,
        1e-8,
        "error",
        "⟨egrad2rgrad(e), u⟩ differs from the derivative along u",
    )
    yield ManifoldCheck(
        "gradient is equivariant",
        _relative(manifold.egrad2rgrad(y, p.egrad(y)), p.moved(rgrad)),
        1e-8,
        "error",
        "equivalent points get different gradients",
    )
    value = p.function(x)
    yield ManifoldCheck(
        "gradient: slope of the remainder",
        _slope(lambda t: p.function(manifold.retr(x, t * u)) - value - t * represented, max(size, abs(float(value)))),
        1.9,
        "slope",
        "f(retr(tu)) − f(x) − t⟨grad, u⟩ must fall as t²: gradient and retraction do not fit",
    )

    # -- geodesics -----------------------------------------------------------------------------------------------
    # ⟨a, v⟩ = ½ D_v⟨u, u⟩ − D_u⟨u, v⟩ for every v.
    v = p.ambient()
    acceleration = manifold.acceleration(x, u)
    by_metric = 0.5 * _euclidean(_metric_derivative(manifold, x, u, u), v) - _euclidean(
        _metric_derivative(manifold, x, u, v), u
    )
    scale = max(float(manifold.norm(x, u).square().max()), abs(float(by_metric)))
    yield ManifoldCheck(
        "acceleration follows from the metric",
        abs(float(manifold.inner(x, acceleration, v).sum() - by_metric)) / scale,
        1e-7,
        "error",
        "acceleration(x, u) is not −Γ(u, u) of inner",
    )
    yield ManifoldCheck(
        "retraction is equivariant",
        _relative(manifold.retr(y, p.moved(0.1 * u)), manifold.act(manifold.retr(x, 0.1 * u), p.A)),
        1e-8,
        "error",
        "equivalent points move to different orbits",
    )
    unit = float(manifold.to_matrix(x).abs().max())
    for name, step in (("retraction", manifold.retr), ("exponential", manifold.expmap)):
        yield ManifoldCheck(
            f"{name}: slope of the error",
            _slope(
                lambda t, step=step: (  # type: ignore[misc]
                    manifold.to_matrix(step(x, t * u)) - manifold.to_matrix(_integrated(manifold, x, t * u))
                ),
                unit,
            ),
            order + 0.9,
            "slope",
            f"against the integrated geodesic the error must fall as t^{order + 1}: it is no retraction of "
            f"order {order}, or acceleration is wrong away from x",
        )
    w, there = p.ambient(), manifold.retr(x, 0.1 * u)
    if bool(there.isfinite().all()):  # else the retraction has failed already
        carried = manifold.transp(x, there, w)
        yield ManifoldCheck(
            "transport arrives horizontal",
            _relative(manifold.proju(there, carried), carried),
            1e-8,
            "error",
            "transp(x, y, v) has a vertical part at y",
        )
    yield ManifoldCheck(
        "transport to the same point",
        _relative(manifold.transp(x, x, u), u),
        1e-8,
        "error",
        "transp(x, x, v) changes a horizontal v",
    )
    step = _STEPS[-1] * u
    try:
        length = manifold.dist(x, manifold.act(manifold.expmap(x, step), p.A))
    except NotImplementedError:
        return
    yield ManifoldCheck(
        "distance of orbits",
        _relative(length, manifold.norm(x, step)),
        1e-4,
        "error",
        "dist(x, y) differs from the length of a short geodesic to y's orbit",
    )


def _batch_check(manifold: QuotientManifold, points: list[_Point]) -> ManifoldCheck:
    """Compare a stack of points with its points one by one."""
    x, u = torch.stack([p.x for p in points]), torch.stack([p.ambient() for p in points])
    maps = (manifold.proju, manifold.retr, manifold.egrad2rgrad, manifold.inner)
    one_by_one = [torch.stack([f(p.x, v) for p, v in zip(points, u, strict=True)]) for f in maps]
    return ManifoldCheck(
        "a batch is its points one by one",
        max(_relative(f(x, u), each) for f, each in zip(maps, one_by_one, strict=True)),
        1e-8,
        "error",
        "proju, retr, egrad2rgrad or inner of a stack differ from those of its points",
    )


def _worst(same: Sequence[ManifoldCheck]) -> ManifoldCheck:
    """Give the check of one property whose point is worst; NaN is."""
    if same[0].kind == "slope":
        return min(same, key=lambda c: c.value)
    return max(same, key=lambda c: math.inf if math.isnan(c.value) else c.value)


def _until_not_finite(p: _Point, order: int) -> Iterator[ManifoldCheck]:
    """Look at one property after the other, until a result is NaN, which the manifold's methods do not take."""
    try:
        yield from _checks(p, order)
    except ValueError as error:
        if "NaN or infinite" not in str(error):
            raise
        yield ManifoldCheck("results are finite", math.inf, 0.0, "error", str(error))


def check_manifold(
    manifold: QuotientManifold, x: Tensor, *, seed: int = 0, retraction_order: int = 2
) -> ManifoldReport:
    r"""Check that a quotient manifold does what it says, at one point and in random directions.

    The group: :meth:`act` leaves :meth:`to_matrix` as it is, and :meth:`vertical` is tangent to the orbit. The metric: it
    is an inner product, the same for all representatives. The projection: idempotent, orthogonal, equivariant. The
    gradient: it represents the derivative, and :math:`f(R_x(tu)) - f(x) - t \langle \mathrm{grad} f, u \rangle` falls
    as :math:`t^2`. Geodesics: the acceleration is the metric's,

    .. math:: \langle a, v \rangle = \tfrac12 D_v \langle u, u \rangle - D_u \langle u, v \rangle
              \quad\text{for all } v,

    and retraction and exponential agree with the integrated geodesic to the order they claim. Transport and distance,
    if there is one.

    Parameters
    ----------
    manifold : QuotientManifold
        With :meth:`random_algebra` and, unless its group elements are matrix exponentials, :meth:`random_element`.
    x : Tensor
        Point, float64 or complex128, batch dimensions first; every number is the worst of the batch. Rounding grows
        with the condition number of the factors: take points as ``manifold.random`` gives them.
        A point takes a fraction of a second.
    seed : int
        Of the directions and the group element.
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
        A point in single precision, one that is not on the manifold, an empty batch; no horizontal vector.

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
    x = x.detach()
    manifold.assert_check_point_on_manifold(x)
    with torch.enable_grad():
        points = [_Point(manifold, item, seed) for item in x.reshape(-1, *x.shape[-manifold.ndim :])]
        found: dict[str, list[ManifoldCheck]] = {}
        for check in itertools.chain.from_iterable(_until_not_finite(p, retraction_order) for p in points):
            found.setdefault(check.name, []).append(check)
        checks = [_worst(same) for same in found.values()]
        if len(points) > 1:
            checks.append(_batch_check(manifold, points))
    return ManifoldReport(str(manifold), tuple(x.shape), tuple(checks))
