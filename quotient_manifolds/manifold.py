r"""The GL(h) quotient: pairs (G, H) that a network sees only through :math:`G H^H`.

Notation, as in the paper: :math:`x = (G, H)` with :math:`G \in K^{n \times h}`, :math:`H \in K^{m \times h}` of full
column rank, K the reals or the complex numbers; Gram matrices :math:`M = G^H G`, :math:`N = H^H H`; the group acts by
:math:`ψ(A, (G, H)) = (G A^{-1}, H A^H)`; vertical vectors are :math:`(GΛ, -HΛ^H)`.

All formulas are evaluated at the canonical representative of the point's orbit, where :math:`M = N = Σ` is diagonal:
vectors are transformed there by the (constant) group element, and the result is transformed back. By equivariance this
is exact, and no inverse depends on the condition number of the representative. Here is the interface; the tangent
space is in :mod:`quotient_manifolds.tangent`, and every formula in which the metrics differ in
:mod:`quotient_manifolds.metrics`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from . import means
from ._geoopt import ScalingInfo
from .base import QuotientManifold, check_vector, in_own_precision
from .linalg import (
    NotFiniteError,
    as_count,
    check_dtype,
    check_tensors,
    column_rank_ratio,
    exposed,
    finite,
    holds,
    in_double,
    largest,
    own_precision,
    pack,
    power_of_two,
    rank_tolerance,
    standard_normal,
)
from .metrics import INV, MIX, RANK_TOLERANCE, Gauge, Metric, gauge_in_units, svd
from .tangent import GLTangentSpace

_scaled = QuotientManifold.__scaling__.copy()


@in_own_precision
class GLQuotient(QuotientManifold):
    """Base class of the GL(h) quotients with the inv and the mix metric."""

    __scaling__ = _scaled
    metric: Metric

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        who = type(self).__name__
        self.n, self.m = as_count(f"{who}: n", n), as_count(f"{who}: m", m)

    def extra_repr(self) -> str:
        """Return the row counts, for ``repr``."""
        return f"n={self.n}, m={self.m}"

    def row_split(self) -> list[int]:
        """Return [n, m], the rows of G and H."""
        return [self.n, self.m]

    def _tangent_space(self, x: Tensor, differentiable: bool) -> GLTangentSpace:
        try:
            gauge, unit, tolerance = self._gauge(x.detach())
            space = GLTangentSpace(self.metric, gauge, x, unit=unit, tolerance=tolerance, moved=differentiable)
        except (ValueError, LinAlgError) as error:
            self._check_point(x.detach())
            raise ValueError(f"{self}: {error}") from error
        if not holds(space.present[..., -1]):  # then it is worth factorising each factor
            self._check_point(x.detach())
            raise ValueError(
                f"{self}: both factors of a point have full column rank, but the smallest singular value of G Hᴴ is "
                "rounding beside the largest, so that nothing could move along it; use fewer columns"
            )
        return space

    def _gauge(self, x: Tensor) -> tuple[Gauge, Tensor | None, float | None]:
        """Return the canonical gauge of x in units, the unit, and which singular values of G Hᴴ count as zero.

        In single precision the product would round σ_h away before the factors have lost it: then they are widened.
        """
        factors = x.split([self.n, self.m], dim=-2)
        gauge, unit = gauge_in_units(*factors)
        sigma, eps = gauge.sigma, torch.finfo(gauge.sigma.dtype).eps
        if sigma.dtype == torch.float64 or holds(sigma[..., -1] > eps**0.5 * sigma[..., 0]):
            return gauge, unit, None
        gauge, unit = gauge_in_units(*map(in_double, factors))
        tolerance = RANK_TOLERANCE * torch.finfo(gauge.sigma.dtype).eps
        return gauge.to(x.dtype, x.device), None if unit is None else unit.to(sigma), tolerance

    def act(self, x: Tensor, A: Tensor) -> Tensor:
        r"""Move x along its orbit to :math:`(G A^{-1}, H A^H)`, (…, n + m, h); A is (…, h, h), invertible."""
        G, H = self.unpack_tensor(x)
        _check_square(self, x, A)
        try:
            return pack(torch.linalg.solve(A, G, left=False), H @ A.mH)
        except LinAlgError as error:
            raise ValueError(f"{self}: a group element of shape {tuple(A.shape)} is singular") from error

    def vertical(self, x: Tensor, L: Tensor) -> Tensor:
        r"""Return the vertical vector :math:`(GΛ, -HΛ^H)`, (…, n + m, h); L is Λ, (…, h, h)."""
        G, H = self.unpack_tensor(x)
        _check_square(self, x, L)
        return pack(G @ L, -H @ L.mH)

    def random_algebra(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw Λ with Gaussian entries of variance 1/h, (…, h, h)."""
        self.unpack_tensor(x)  # the checks
        super()._check_point(x)
        return standard_normal((*x.shape[:-2], x.shape[-1], x.shape[-1]), x, generator) / x.shape[-1] ** 0.5

    def to_matrix(self, x: Tensor) -> Tensor:
        r"""Compute :math:`G H^H`, (…, n, m)."""
        G, H = self.unpack_tensor(x)
        return G @ H.mH

    def canonical(self, x: Tensor) -> Tensor:
        """Return the representative in canonical gauge, where GᴴG = HᴴH = Σ, (…, n + m, h); see :class:`Gauge`.

        Differentiable where the singular values of G Hᴴ are distinct; elsewhere a derivative that is asked for raises a
        ValueError, because the representative is not unique. A function of the product has one everywhere.
        """
        self.tangent_space_at(x.detach())  # the checks
        gauge, unit, _ = self._gauge(x)
        return gauge.x if unit is None else gauge.x * unit

    # -- between two points ---------------------------------------------------------------------------------------

    @_scaled(ScalingInfo(1))
    def logmap(self, x: Tensor, y: Tensor, *, on_error: str = "raise") -> Tensor:
        """Return the horizontal vector at x of the shortest geodesic found that reaches the orbit of y at time 1.

        It is computed in double precision and returned in the dtype of x. It is not differentiable; :meth:`dist` is.
        For h = 1 it has a closed form. Otherwise the search starts from the representative of y that fits x best and,
        for real points that are far apart and h ≤ 16, from its mirror image, which for larger h shortened lengths by at
        most 0.1 % in our tests.

        Parameters
        ----------
        x, y : Tensor
            Points, (…, n + m, h).
        on_error : {"raise", "nan"}
            Whether a pair without a geodesic raises an error or gets NaN as its result.

        Raises
        ------
        ConvergenceError
            With the ``residual`` of every pair: no path joins them (n = m = h and determinants of G Hᴴ of different
            sign), the shortest one leaves the manifold (mix, which is not complete), or none was found.
        """
        from . import logarithm  # few programs need it

        with torch.no_grad():
            unit, a, b = self._in_units(x, y, on_error)
            return (logarithm.logmap(self.metric, self.n, a, b, on_error) * unit).to(x)

    @_scaled(ScalingInfo(1))
    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False, on_error: str = "raise") -> Tensor:
        r"""Compute the distance of the orbits of x and y, real, (…) or (…, 1, 1); options as in :meth:`logmap`.

        .. math:: d(x, y) = \|\log_x y\|_x, \qquad \operatorname{grad}_x \tfrac12 d^2 = -\log_x y,\quad
                  \operatorname{grad}_y \tfrac12 d^2 = -\log_y x

        Once differentiable in both points; at distance 0 the derivative is defined as 0.
        """
        from . import logarithm

        unit, a, b = self._in_units(x, y, on_error)
        result = logarithm.distance(self.metric, self.n, a, b, on_error)[..., None, None]
        result = (result if self.metric.scale_exponent > 0 else result * unit * unit).to(x.real)
        return result if keepdim else result[..., 0, 0]

    def mean(self, points: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the Fréchet mean over the first dimension of (k, …, n + m, h); see :func:`frechet_mean`."""
        weights, (unit, _, wide) = means.checked_weights(self, points, weights), self._in_units(points[:1], points)
        return (means.frechet_mean(self, wide, weights).point * unit[0]).to(points)

    def _in_units(self, x: Tensor, y: Tensor, on_error: str = "raise") -> tuple[Tensor, Tensor, Tensor]:
        """Return the unit of x, (…, 1, 1), and both points in double precision and in units of it.

        They are checked in their own precision, whose rounding would count as rank in double precision.
        """
        check_vector(self, x, y, "y")
        if on_error not in ("raise", "nan"):
            raise ValueError(f'{self}: on_error must be "raise" or "nan", got {on_error!r}')
        spaces: list[Any] = [self.tangent_space_at(z.detach()) for z in (x, y)]
        unit = in_double(spaces[0].unit)
        return unit, in_double(x) / unit, in_double(y) / unit

    # -- geoopt's checks ---------------------------------------------------------------------------------------------

    def origin(self, *size: Any, dtype: Any = None, device: Any = None, seed: int | None = 42) -> Tensor:
        """Return the point G = [I; 0], H = [I; 0]; ``seed``, part of geoopt's interface, is ignored."""
        x = self._as_point(torch.zeros, size, dtype=dtype, device=device)
        for factor in self.unpack_tensor(x):
            factor.diagonal(dim1=-2, dim2=-1).fill_(1)
        return x

    def _projx(self, x: Tensor) -> Tensor:
        return x if self._check_point_on_manifold(x)[0] else pack(*map(_lifted, self.unpack_tensor(x)))

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        most = min(self.n, self.m)
        fits = len(shape) >= 2 and shape[-2] == self.n + self.m and 1 <= shape[-1] <= most
        needed = f"(…, {self.n} + {self.m}, h) and, for full column rank, 1 ≤ h ≤ min(n, m) = {most}"
        return fits, None if fits else f"{self}: '{name}' needs shape {needed}; got {tuple(shape)}"

    def _check_point(self, x: Tensor) -> None:
        super()._check_point(x)
        for name, X in zip("GH", self.unpack_tensor(x), strict=True):
            ratio = column_rank_ratio(X)
            if not holds(ratio > rank_tolerance(X)):
                raise ValueError(
                    f"{self}: factor {name} of the point of shape {tuple(x.shape)} does not have full column rank "
                    f"(smallest to largest singular value {exposed(ratio).min().item():.1e}); if it lost rank during "
                    "optimisation, lower the learning rate; a starting point needs full rank (LoRA's B = 0 lacks it) "
                    "or fewer columns"
                )


def _check_square(who: GLQuotient, x: Tensor, A: Tensor) -> None:
    """Raise unless A is a stack of h × h matrices that fits a point with h columns."""
    check_tensors(who, x=x, A=A)
    h = x.shape[-1]
    if A.dim() < 2 or A.shape[-2:] != (h, h):
        raise ValueError(f"{who}: a point of shape {tuple(x.shape)} needs matrices (…, {h}, {h}), got {tuple(A.shape)}")


def _lifted(X: Tensor) -> Tensor:
    """Raise the singular values of a factor until it has full rank."""
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    floor = 4 * rank_tolerance(X) * torch.where(s[..., :1] > 0, s[..., :1], 1)
    return torch.where((s < floor).any(-1)[..., None, None], (U * s.clamp_min(floor).unsqueeze(-2)) @ Vh, X)


class GLQuotientInv(GLQuotient):
    r"""The GL(h) quotient with the invariant metric.

    .. math:: \langle ξ, ζ \rangle = \mathrm{Re\,Tr}\big( M^{-1} ξ_G^H ζ_G + N^{-1} ξ_H^H ζ_H \big),
              \qquad M = G^H G,\; N = H^H H

    Horizontal vectors obey :math:`ξ_G^H G N = M H^H ξ_H`. The metric is complete.

    Parameters
    ----------
    n, m : int
        Rows of G and H. A point is one tensor (…, n + m, h), h ≤ min(n, m), of float32, float64 or complex dtype.

    Notes
    -----
    Paper, §5.2. The last factor of the printed H^inv must be ξ_H, not its transpose. The paper gives no exact
    geodesics; :meth:`geodesic` computes them in closed form.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientInv
    >>> manifold = GLQuotientInv(5, 4)
    >>> x = manifold.random(5 + 4, 2, dtype=torch.float64)
    >>> A = torch.tensor([[2.0, 1.0], [0.0, 0.5]], dtype=torch.float64)
    >>> y = manifold.act(x, A)
    >>> torch.allclose(manifold.to_matrix(x), manifold.to_matrix(y))
    True
    >>> u = manifold.proju(x, torch.ones_like(x))
    >>> torch.allclose(manifold.norm(x, u), manifold.norm(y, manifold.act(x + u, A) - y))
    True
    """

    name = "GLQuotientInv"
    metric = INV


class GLQuotientMix(GLQuotient):
    r"""The GL(h) quotient with the mixed metric.

    .. math:: \langle ξ, ζ \rangle = \mathrm{Re\,Tr}\big( N ξ_G^H ζ_G + M ξ_H^H ζ_H \big)
              = \mathrm{Re}\langle ξ_G H^H, ζ_G H^H \rangle + \mathrm{Re}\langle G ξ_H^H, G ζ_H^H \rangle

    Horizontal vectors obey :math:`G^H ξ_G N = M ξ_H^H H`. The metric is not complete: a geodesic can reach a
    rank-deficient matrix in finite time, and the ball of radius ρ stays on the manifold only while ρ < σ_h/√2.

    Parameters
    ----------
    n, m : int
        Rows of G and H. A point is one tensor (…, n + m, h), h ≤ min(n, m), of float32, float64 or complex dtype.

    Notes
    -----
    Paper, §5.2.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> manifold = GLQuotientMix(5, 4)
    >>> x = manifold.origin(5 + 4, 2)
    >>> u = manifold.proju(x, torch.ones_like(x))
    >>> space = manifold.tangent_space_at(x)
    >>> space.norm(u), space.exit_time(u), space.exit_time(-x)
    (tensor(4.2426), tensor(inf), tensor(0.5000))
    """

    name = "GLQuotientMix"
    metric = MIX


MANIFOLDS: dict[str, type[GLQuotientInv] | type[GLQuotientMix]] = {"inv": GLQuotientInv, "mix": GLQuotientMix}


@own_precision
def from_matrix(X: Tensor, h: int) -> Tensor:
    r"""Return the point whose product is the best approximation of rank h to a matrix.

    .. math:: X \approx U Σ V^H, \qquad G = U Σ^{1/2},\; H = V Σ^{1/2}

    Parameters
    ----------
    X : Tensor
        (…, n, m), float or complex; its rank is at least h.
    h : int
        Rank, at most min(n, m).

    Returns
    -------
    Tensor
        (…, n + m, h), in canonical gauge up to column phases. No matrix of rank h is nearer in the Frobenius norm
        (Eckart and Young 1936).

    Examples
    --------
    Start a LoRA adapter of rank 2 from a change of the full weight:

    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix, from_matrix
    >>> x = from_matrix(torch.diag(torch.tensor([4.0, 1.0, 0.25])), 2)
    >>> GLQuotientMix(3, 3).to_matrix(x).diagonal().abs()
    tensor([4., 1., 0.])
    """
    check_tensors("from_matrix", X=X)
    check_dtype("from_matrix", X)
    h = as_count("from_matrix: h", h)
    if X.dim() < 2 or not 1 <= h <= min(X.shape[-2:]):
        raise ValueError(f"a matrix of shape {tuple(X.shape)} has no point of rank {h}")
    if not finite(X):
        raise NotFiniteError(f"the matrix of shape {tuple(X.shape)} has NaN or infinite entries")
    unit = power_of_two(largest(X).sqrt())
    U, sigma, Vh = svd(X / unit / unit)
    sigma = sigma[..., :h]
    if not holds(sigma[..., -1] > RANK_TOLERANCE * torch.finfo(sigma.dtype).eps * sigma[..., 0]):
        raise ValueError(f"the matrix has rank below {h}, so it is not the product of any point of the manifold")
    return pack(U[..., :h], Vh.mH[..., :h]) * (sigma.sqrt().unsqueeze(-2) * unit)
