"""Checks for quotient manifolds that you write yourself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..base import QuotientManifold
from ..checks import check_tensors
from .properties import PROPERTIES
from .random_point import RandomPoint, relative_error
from .report import ManifoldCheck, ManifoldReport

__all__ = ["ManifoldCheck", "ManifoldReport", "check_manifold"]


def _checks(p: RandomPoint) -> Iterator[ManifoldCheck]:
    """Check one property after the other, until a result is NaN, which the manifold's methods refuse."""
    for name, bound, hint, kind, measure in PROPERTIES:
        try:
            value = measure(p)
        except ValueError as error:
            if "NaN or infinite" not in str(error):
                raise
            yield ManifoldCheck("results are finite", math.inf, 0.0, "error", str(error))
            return
        if value is not None:
            yield ManifoldCheck(name, float(value), p.order + 0.9 if bound is None else bound, kind, hint)


def _batch_check(manifold: QuotientManifold, points: list[RandomPoint]) -> ManifoldCheck:
    """Compare a stack of points with its single points."""
    x, u = torch.stack([p.x for p in points]), torch.stack([p.u for p in points])
    maps = (manifold.proju, manifold.retr, manifold.egrad2rgrad, manifold.inner)
    one_by_one = [torch.stack([f(p.x, v) for p, v in zip(points, u, strict=True)]) for f in maps]
    return ManifoldCheck(
        "a batch equals its single points",
        max(relative_error(f(x, u), each) for f, each in zip(maps, one_by_one, strict=True)),
        1e-8,
        "error",
        "proju, retr, egrad2rgrad or inner of a stack differ from those of its points",
    )


def _worst(same: Sequence[ManifoldCheck]) -> ManifoldCheck:
    """Return the check of one property at the worst point; NaN counts as worst."""
    if same[0].kind == "slope":
        return min(same, key=lambda c: c.value)
    return max(same, key=lambda c: math.inf if math.isnan(c.value) else c.value)


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

    and retraction and exponential agree with the integrated geodesic to the order they claim. Transport and distance,
    if they exist.

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
    x = x.detach()
    manifold.assert_check_point_on_manifold(x)
    with torch.enable_grad():
        points = [
            RandomPoint(manifold, item, seed, retraction_order) for item in x.reshape(-1, *x.shape[-manifold.ndim :])
        ]
        found: dict[str, list[ManifoldCheck]] = {}
        for check in itertools.chain.from_iterable(map(_checks, points)):
            found.setdefault(check.name, []).append(check)
        checks = [_worst(same) for same in found.values()]
        if len(points) > 1:
            checks.append(_batch_check(manifold, points))
    return ManifoldReport(str(manifold), tuple(x.shape), tuple(checks))
