"""Means of points on any manifold that has a logarithm."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .linalg import check_tensors, choose, in_double

#: Steps from one start, and the length of the mean logarithm below which a point counts as a mean.
_STEPS, _TOLERANCE = 200, 1e-9


class ConvergenceError(ArithmeticError):
    """An iteration did not converge: logarithm, alignment or mean.

    Attributes
    ----------
    residual : Tensor
        The remaining error, (…).

    Examples
    --------
    No path joins square matrices whose determinants differ in sign:

    >>> import torch
    >>> from quotient_manifolds import ConvergenceError, GLQuotientInv
    >>> manifold = GLQuotientInv(2, 2)
    >>> x = manifold.origin(2 + 2, 2)
    >>> try:
    ...     manifold.dist(x, manifold.pack_point(torch.eye(2), torch.eye(2).flip(0)))
    ... except ConvergenceError as error:
    ...     print(error.residual)
    tensor(inf, dtype=torch.float64)
    """

    def __init__(self, message: str, residual: Tensor) -> None:
        super().__init__(message, residual)  # both, so that pickle can make it anew
        self.residual = residual

    def __str__(self) -> str:
        return str(self.args[0])


class FrechetMean(NamedTuple):
    r"""A mean, with a certificate of its accuracy.

    Attributes
    ----------
    point : Tensor
        The mean, (…).
    certificate : Tensor
        Length of the mean logarithm at the point, :math:`\|\sum_i w_i \log_m x_i\|`, which vanishes at a mean; batch
        shape.
    variance : Tensor
        :math:`\sum_i w_i d(m, x_i)^2`; batch shape.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import RescaleQuotient, frechet_mean
    >>> found = frechet_mean(RescaleQuotient("mix"), torch.tensor([[[1.0], [1.0]], [[1.0], [3.0]]]))
    >>> f"{float(found.point.prod()):.3f}, {float(found.variance):.3f}"
    '2.000, 0.500'
    """

    point: Tensor
    certificate: Tensor
    variance: Tensor


def frechet_mean(manifold: Any, points: Tensor, weights: Tensor | None = None) -> FrechetMean:
    r"""Compute the weighted Fréchet mean over the first dimension.

    .. math:: \min_m \sum_i w_i d(m, x_i)^2, \qquad m \leftarrow \exp_m\Big(s \sum_i w_i \log_m x_i\Big)

    The step s is that of Barzilai and Borwein (1988), halved until the sum of squares falls. The start does not depend
    on order or representatives: it is the point whose product is nearest to the mean of the products. Points that are
    far apart may have several local means.

    Parameters
    ----------
    manifold : QuotientManifold
        A manifold of this package, or any with ``logmap``, ``expmap``, ``inner``, ``norm`` and ``to_matrix``.
    points : Tensor
        (k, …, rows, h).
    weights : Tensor, optional
        (k,), not negative; divided by their sum. Equal by default.

    Returns
    -------
    FrechetMean
        The ``point``, in the dtype of the points, at the representative of the point from which it was reached; the
        ``certificate`` and the ``variance``, computed in double precision (on the CPU if the points' device has none).

    Raises
    ------
    ConvergenceError
        The mean logarithm is still longer than 1e-9 (mix: of the size of the products), or a logarithm was not found.
    ValueError
        There are no points, or the weights are negative, all zero, or too few or too many.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientInv, frechet_mean
    >>> manifold = GLQuotientInv(5, 4)
    >>> points = manifold.random(3, 5 + 4, 1, dtype=torch.float64)
    >>> found = frechet_mean(manifold, points)
    >>> bool(found.certificate < 1e-8)
    True
    """
    weights = checked_weights(manifold, points, weights)
    wide = in_double(points)
    with torch.no_grad():
        # The size of a point, of which the point as a vector has √(2h) times the length; 1 if scaling is isometric.
        sizes = manifold.norm(wide, wide) / (2 * wide.shape[-1]) ** 0.5
        tolerance = _TOLERANCE * torch.einsum("k,k...->...", weights, sizes.square()).sqrt()
        nearest = _from_mean_product(manifold, wide, weights).argmin(0)
        start = wide.gather(0, nearest[None, ..., None, None].expand(1, *wide.shape[1:]))[0]
        mean = _descend(manifold, start, wide, weights, tolerance)
    if not bool((mean.certificate <= tolerance).all()):
        raise ConvergenceError(
            f"mean: the mean logarithm still has length {mean.certificate.max().item():.1e} after {_STEPS} steps; pass "
            "points that are closer together",
            mean.certificate,
        )
    return mean._replace(point=mean.point.to(points))


def checked_weights(manifold: Any, points: Tensor, weights: Tensor | None) -> Tensor:
    """Check the arguments, and return weights of sum 1."""
    if not hasattr(manifold, "logmap"):
        raise TypeError(f"manifold must be one with logarithms, as GLQuotientMix(n, m), got {type(manifold).__name__}")
    check_tensors(manifold, points=points)
    if points.dim() < 3 or len(points) == 0:
        raise ValueError(f"{manifold}: points of a mean are (k, …, rows, h) with k ≥ 1, got {tuple(points.shape)}")
    if weights is None:
        return in_double(points.real.new_ones(len(points))) / len(points)
    check_tensors(manifold, weights=weights)
    usable = weights.shape == points.shape[:1] and weights.device == points.device and not weights.is_complex()
    if not (usable and bool((weights >= 0).all()) and 0 < float(weights.sum()) < torch.inf):
        raise ValueError(
            f"{manifold}: {len(points)} points need as many weights on their device, finite, none negative and not all "
            "zero"
        )
    return in_double(weights) / in_double(weights).sum()


def _from_mean_product(manifold: Any, points: Tensor, weights: Tensor) -> Tensor:
    """Return squared distances of products from their mean, (k, …), set by set: a product has n × m entries."""
    found = [points.new_zeros(len(points), 0).real] if 0 in points.shape else []
    for x in points.flatten(1, -3).unbind(1) if points.dim() > 3 else [points]:
        products = manifold.to_matrix(x).flatten(1)
        found.append((products - weights.to(products.dtype) @ products).abs().square().sum(-1))
    return torch.stack(found, -1).reshape(points.shape[:-2])


def _descend(manifold: Any, start: Tensor, points: Tensor, weights: Tensor, tolerance: Tensor) -> FrechetMean:
    """Go from one start to where the mean logarithm vanishes, or as close as the steps lead."""
    m, shape = start, points.shape[1:-2]
    unknown = torch.full(shape, torch.inf, dtype=weights.dtype, device=start.device)
    best = FrechetMean(start, unknown, unknown)
    way, step = torch.zeros_like(start), torch.ones_like(best.certificate)
    for _ in range(_STEPS):
        u = manifold.logmap(m.expand_as(points), points)
        direction = torch.einsum("k,k...->...", weights.to(u.dtype), u)
        variance = torch.einsum("k,k...->...", weights, manifold.inner(m, u))
        now = FrechetMean(m, manifold.norm(m, direction), variance)
        # Where the variance has not fallen, go back and take half the step; else the next one by Barzilai and Borwein's
        # rule. The sum of logarithms may grow all the way down: it jumps where another geodesic becomes the shortest.
        falls = now.variance < best.variance - 1e-4 * step * best.certificate**2
        flat = (now.variance < best.variance * (1 + 1e-10)) & (now.certificate < best.certificate)
        nearer = falls | flat | best.variance.isinf()
        turn = step * manifold.inner(m, way) / manifold.inner(m, way, way - direction)
        rule = torch.where(turn.isfinite() & (turn > 0), turn, 1).clamp(0.2, 5)
        best = FrechetMean(*(choose(nearer, a, b) for a, b in zip(now, best, strict=True)))
        way, step = choose(nearer, direction, way), torch.where(nearer, rule, step / 2)
        if bool(((best.certificate <= tolerance) | (step < 1e-3)).all()):
            break
        m = manifold.expmap(best.point, step.reshape(shape + (1,) * (way.dim() - step.dim())) * way)
    return best
