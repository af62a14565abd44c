"""The horizontal space at one point of a GL(h) quotient.

All formulas are evaluated at the canonical representative, see :mod:`quotient_manifolds.manifold`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import geodesics
from .base import TangentSpace, in_own_precision
from .linalg import largest, power_of_two, root, row_power, standard_normal
from .metrics import Gauge, LocalMetric, Metric, Pair


@in_own_precision
class GLTangentSpace(TangentSpace):
    r"""The horizontal space at one point of a GL(h) quotient; ``manifold.tangent_space_at(x)`` makes it.

    From a known gauge nothing is factorised, and points may lack rank: directions with σ_i = 0 count as absent.

    Parameters
    ----------
    metric : Metric
        The inv or the mix metric, of :data:`quotient_manifolds.metrics.METRICS`.
    gauge : Gauge
        Canonical representative, and the group element that leads to it (:func:`quotient_manifolds.canonical_gauge`).
    x : Tensor, optional
        The point, (…, n + m, h); vectors are given and returned at this representative, by default the canonical one.
    unit : Tensor, optional
        By what the point was divided before its gauge was computed, (…, 1, 1).
    tolerance : float, optional
        ``present``, (…, h), are the directions with σ_i above it, relative to σ_1; by default above rounding.
    moved : bool
        x has moved since: ``inner``, ``acceleration`` and ``retr`` are exact, projections and coordinates are not.

    Examples
    --------
    One factorisation for a gradient and its length:

    >>> import torch
    >>> from quotient_manifolds import GLQuotientInv
    >>> manifold = GLQuotientInv(4, 3)
    >>> space = manifold.tangent_space_at(manifold.origin(4 + 3, 2))
    >>> gradient = space.egrad2rgrad(torch.ones(7, 2))
    >>> space.norm(gradient), space.coordinates(gradient).norm()
    (tensor(3.7417), tensor(3.7417))
    """

    def __init__(
        self,
        metric: Metric,
        gauge: Gauge,
        x: Tensor | None = None,
        *,
        unit: Tensor | None = None,
        tolerance: float | None = None,
        moved: bool = False,
    ) -> None:
        self.metric, self.x, self.present = metric, gauge.x if x is None else x, gauge.present(tolerance)
        self._gauge, self._unit, self._rows = gauge, unit, [gauge.n, gauge.x.shape[-2] - gauge.n]
        # The row that turns coordinates into a vector in canonical gauge, and its inverse.
        p, sigma, present = metric.scale_exponent, gauge.sigma, self.present
        self._scales: Pair = row_power(sigma, present, p), row_power(sigma, present, -p)
        # What maps vectors at x to the canonical representative, and back; None: x is canonical.
        self._maps: tuple[Pair | None, Pair | None] = (None, None) if x is None else _maps(gauge, None)
        # The same for the representative of x/unit, and up to a number that makes it an isometry.
        scaled: tuple[Pair | None, Pair | None] = self._maps if unit is None else _maps(gauge, unit)
        (self._to_gauge, self._from_gauge), (self._isometry, self._inverse_isometry) = scaled, scaled
        self._speed: Any = 1.0  # of a velocity's image, where that of its isometric image is 1
        if unit is not None and metric.scale_exponent < 0:
            self._isometry, self._inverse_isometry = _maps(gauge, 1 / unit)
            self._speed = 1 / unit / unit
        if moved:
            self._local = LocalMetric.moving(metric, self._times(self.x, self._to_gauge), self.present)
        else:
            self._local = LocalMetric.canonical(metric, gauge.x.split(self._rows, dim=-2), gauge.sigma, self.present)

    @property
    def gauge(self) -> Gauge:
        """The canonical gauge of the point."""
        return self._gauge if self._unit is None else self._gauge.times(self._unit)

    @property
    def unit(self) -> Tensor:
        """The power of two, (…, 1, 1), in units of which everything is computed: 1 for points of ordinary size."""
        return self._gauge.sigma.new_ones(1, 1) if self._unit is None else self._unit

    # -- between the representative at hand and the canonical one --------------------------------------------------

    def split(self, u: Tensor) -> Pair:
        """Split into (ξ_G, ξ_H), views (…, n, h) and (…, m, h)."""
        return self._times(u, None)

    def to_gauge(self, u: Tensor) -> Pair:
        """Map a tangent vector to canonical gauge: (ξ_G A⁻¹, ξ_H Aᴴ)."""
        return self._times(u, self._maps[0])

    def from_gauge(self, xi: Tensor, eta: Tensor) -> Tensor:
        """Map a tangent vector back from canonical gauge: (ξ_G A, ξ_H A⁻ᴴ), packed."""
        return _packed((xi, eta), self._maps[1])

    def _times(self, u: Tensor, maps: Pair | None) -> Pair:
        """Split, and multiply both parts from the right, by nothing for None."""
        xi, eta = u.split(self._rows, dim=-2)
        return (xi, eta) if maps is None else (xi @ maps[0], eta @ maps[1])

    def inner(self, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Compute Re Tr(W_G ξ_Gᴴ ζ_G + W_H ξ_Hᴴ ζ_H), W = (M⁻¹, N⁻¹) for inv, (N, M) for mix; (…) or (…, 1, 1)."""
        there = self._times(u, self._isometry)
        result = self._local.inner(there, there if v is None else self._times(v, self._isometry))
        return result[..., None, None] if keepdim else result

    def norm(self, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute ‖u‖ = √⟨u, u⟩, in units of u's size; its derivative at 0 is 0; (…) or (…, 1, 1)."""
        xi, eta = self._times(u, self._isometry)
        size = power_of_two(torch.maximum(largest(xi), largest(eta)))
        there = xi / size, eta / size
        result = root(self._local.inner(there, there)[..., None, None]) * size
        return result if keepdim else result[..., 0, 0]

    def proju(self, u: Tensor) -> Tensor:
        r"""Project on the horizontal space: :math:`(ξ_G + GΛ, ξ_H - HΛ^H)`; Λ depends on the metric."""
        # Only h × h matrices are mapped to the gauge: Ĝᴴ(ξ A⁻¹) = (Ĝᴴξ) A⁻¹, and (ĜΛ) A = Ĝ (ΛA).
        (xi, eta), (G, H), (to, back) = self._times(u, None), self._local.factors, self._maps
        G_xi, H_eta = G.mH @ xi, H.mH @ eta
        if to is None or back is None:
            L = self._local.vertical_part(G_xi, H_eta)
            return _sum((xi, eta), ((G, H), (L, -L.mH)))
        L = self._local.vertical_part(G_xi @ to[0], H_eta @ to[1])
        return _sum((xi, eta), ((G, H), (L @ back[0], -L.mH @ back[1])))

    def egrad2rgrad(self, u: Tensor) -> Tensor:
        r"""Turn a Euclidean gradient :math:`(\nabla_G, \nabla_H)` into the Riemannian one.

        inv: :math:`(\nabla_G M, \nabla_H N)`; mix: :math:`(\nabla_G N^{-1}, \nabla_H M^{-1})`. For a function of
        :math:`G H^H` these are horizontal already; for any other function the vertical part is removed.
        """
        maps = self._inverse_isometry
        (P, R), (G, H) = self._times(u, maps and _adjoint(maps)), self._local.factors
        V_G, V_H = self._local.inverse_weights
        L = self._local.vertical_part((G.mH @ P) @ V_G, (H.mH @ R) @ V_H)
        of_G, of_H = L, -L.mH
        if maps is not None:
            A, B = maps
            V_G, V_H, of_G, of_H = V_G @ A, V_H @ B, of_G @ A, of_H @ B
        return _sum((P @ V_G, R @ V_H), ((G, H), (of_G, of_H)))

    def to_covector(self, u: Tensor) -> Tensor:
        r"""Return the covector :math:`v \mapsto \langle u, v \rangle`, :math:`(ξ_G W_G, ξ_H W_H)` in gauge."""
        (xi, eta), (W_G, W_H) = self._times(u, self._isometry), self._local.weights
        return _packed((xi @ W_G, eta @ W_H), self._isometry and _adjoint(self._isometry))

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw a standard Gaussian horizontal vector.

        In coordinates that make the metric the identity it is the projection of :math:`(E_1 \hat V, E_2^H \hat U)`
        with Gaussian :math:`E_1, E_2 \in K^{n \times m}`, so it depends only on the orbit, and on no convention for the
        signs of singular vectors. For h = 1 fewer numbers suffice: it is :math:`φ (e_1, e_2)` with Gaussian
        :math:`e_1 \in K^n, e_2 \in K^m`, and φ the phase of :math:`e_3^H \hat U`.
        """
        *batch, rows, h = self.x.shape
        n, m = self._gauge.n, rows - self._gauge.n
        wanted = ((n, 1), (m, 1), (n, 1)) if h == 1 else ((n, m), (n, m))
        first, second, *third = [standard_normal((*batch, *size), self.x, generator) for size in wanted]
        inverse = row_power(self._gauge.sigma, self._gauge.sigma > 0, -0.5)
        U, V = self._gauge.G * inverse, self._gauge.H * inverse
        if h == 1:
            phase = (third[0].mH @ U).sgn()
            c_G, c_H = first * phase, second * phase
        else:
            c_G, c_H = first @ V, second.mH @ U
        return self.proju(self.from_coordinates(torch.cat([c_G, c_H], dim=-2)))

    # -- the second-order retraction -------------------------------------------------------------------------------

    def acceleration(self, u: Tensor) -> Tensor:
        r"""Compute :math:`-Γ(u, u)` for the velocity :math:`u = (\dot G, \dot H)`; paper, Eq. 12 and App. B."""
        (G, H), velocity = self._local.factors, self._times(u, self._to_gauge)
        (a, b), (c, d) = self._local.equations(velocity)
        if self._from_gauge is not None:
            A, B = self._from_gauge
            a, b, c, d = a @ A, b @ A, c @ B, d @ B
        return _sum((G @ a, H @ c), (velocity, (b, d)))

    # -- exact geodesics -------------------------------------------------------------------------------------------

    def geodesic(self, u: Tensor, t: Any = 1.0, *, tolerance: float | None = None) -> tuple[Tensor, Tensor]:
        """Follow the exact geodesic with horizontal velocity u: points and velocities at times t.

        Times, results and errors are those of :meth:`GLQuotientInv.geodesic
        <quotient_manifolds.GLQuotientInv.geodesic>`. ``tolerance`` is that of the solver for mix.
        """
        (X, xi), (Y, eta) = geodesics.geodesic(self.metric, *self._whitened(u), t, tolerance)
        (G, H), (row, _), absent = self._local.factors, self._scales, ~self.present.unsqueeze(-2)
        root = row_power(self._gauge.sigma, self.present, 0.5)
        point = X * root + G * absent, Y * root + H * absent
        return _packed(point, self._from_gauge), _packed((xi * row, eta * row), self._from_gauge)

    def exit_time(self, u: Tensor) -> Tensor:
        """Return the time in (0, 1] at which the geodesic leaves the manifold, inf where it does not; (…)."""
        return geodesics.exit_time(self.metric, *self._whitened(u))

    def _whitened(self, u: Tensor) -> tuple[Pair, Pair, Tensor]:
        """Return the point and a vector, whitened, and the scale of the columns: 0 for what is absent, and stays."""
        (G, H), (xi, eta), sigma = self._local.factors, self._times(u, self._to_gauge), self._gauge.sigma
        inverse = row_power(sigma, self.present, -0.5)
        row = row_power(sigma, self.present, -self.metric.scale_exponent)
        return (G * inverse, H * inverse), (xi * row, eta * row), torch.where(self.present, sigma, 0)

    # -- coordinates in which the metric is the identity -----------------------------------------------------------

    def coordinates(self, u: Tensor) -> Tensor:
        r"""Return coordinates in which the metric is the identity, :math:`\|u\|_x = \|c\|_F`.

        In canonical gauge they are :math:`ξ Σ^{-1/2}` (inv) or :math:`ξ Σ^{1/2}` (mix). Absent directions (σ_i = 0)
        have coordinate 0.
        """
        maps = self._isometry
        return (u if maps is None else _packed(u.split(self._rows, dim=-2), maps)) * self._scales[1]

    def from_coordinates(self, c: Tensor) -> Tensor:
        """Invert :meth:`coordinates`, except for absent directions; shape of c."""
        u, maps = c * self._scales[0], self._inverse_isometry
        return u if maps is None else _packed(u.split(self._rows, dim=-2), maps)

    def dual_coordinates(self, e: Tensor) -> Tensor:
        """Return the coordinates of a Euclidean gradient: ⟨dual_coordinates(e), coordinates(u)⟩_F = Re⟨e, u⟩."""
        maps = self._inverse_isometry
        return (e if maps is None else _packed(e.split(self._rows, dim=-2), _adjoint(maps))) * self._scales[0]

    # For every ascent step: large tensors are sums of point, vector and gradient, each times an h × h matrix.

    def project_coordinates(self, c: Tensor) -> Tensor:
        """Project coordinates onto those of horizontal vectors, in canonical gauge; shape of c."""
        (G, H), (xi, eta), (row, inverse) = self._local.factors, c.split(self._rows, dim=-2), self._scales
        L = self._local.vertical_part(G.mH @ xi * row, H.mH @ eta * row)
        out = c * self.present.unsqueeze(-2)
        for part, X, V in zip(out.split(self._rows, dim=-2), (G, H), (L, -L.mH), strict=True):
            _write_sum(part, (X, V * inverse), beta=1)
        return out

    def retr_coordinates(self, c: Tensor) -> Tensor:
        """Return ``retr(from_coordinates(c))``, in canonical gauge."""
        out, speed = torch.empty_like(c), self._scales[0] * self._speed
        one = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
        velocity = c.split(self._rows, dim=-2)
        parts = out.split(self._rows, dim=-2), self._local.factors, velocity, self._local.equations(velocity, speed)
        for part, X, v, (a, b) in zip(*parts, strict=True):
            _write_sum(part, (X, one + 0.5 * a), (v, speed.mT * (one + 0.5 * b)))
        return out if self._unit is None else out.mul_(self._unit)

    def pullback_coordinates(self, c: Tensor, egrad: Tensor, *, out: Tensor | None = None) -> Tensor:
        r"""Pull a Euclidean gradient at ``retr(u)``, u = ``from_coordinates(c)``, back to coordinates.

        They are those of the horizontal part of :math:`P + \tfrac12 (D\,\mathrm{acceleration}(u))^H P`, with the
        gradient P, in canonical gauge.
        """
        out, (row, inverse) = torch.empty_like(c) if out is None else out, self._scales
        part_of, velocity, covector = (t.split(self._rows, dim=-2) for t in (out, c, egrad))
        adjoints = self._local.adjoints(velocity, covector, speed := row * self._speed)
        L = self._local.vertical_part(*(XQ * row**2 for *_, XQ in adjoints))
        vectors = zip(part_of, self._local.factors, velocity, covector, strict=True)
        for (part, X, v, p), (e, a, b, _), V in zip(vectors, adjoints, (L, -L.mH), strict=True):
            _write_sum(part, (p, e * row), (X, a * row + V * inverse), (v, speed.mT * b * row))
        return out if self._unit is None else out.mul_(self._speed * self._unit)


def _maps(gauge: Gauge, unit: Tensor | None) -> tuple[Pair, Pair]:
    """Return what maps vectors (ξ_G, ξ_H) to canonical gauge, divided by a number, and what maps them back."""
    to, back = (gauge.A_inv, gauge.A.mH), (gauge.A, gauge.A_inv.mH)
    if unit is None:
        return to, back
    return (to[0] / unit, to[1] / unit), (back[0] * unit, back[1] * unit)


def _packed(u: Pair, maps: Pair | None) -> Tensor:
    """Multiply both factors from the right, by nothing for None, and stack their rows."""
    return torch.cat(u if maps is None else (u[0] @ maps[0], u[1] @ maps[1]), dim=-2)


def _sum(X: Pair, *products: tuple[Pair, Pair]) -> Tensor:
    """Return X + Σ Y A for both factors, packed; matrices of three dimensions need one pass."""
    for Y, A in products:
        if X[0].dim() == Y[0].dim() == A[0].dim() == 3 and len(X[0]) == len(Y[0]) == len(A[0]):
            X = torch.baddbmm(X[0], Y[0], A[0]), torch.baddbmm(X[1], Y[1], A[1])
        else:
            X = X[0] + Y[0] @ A[0], X[1] + Y[1] @ A[1]
    return torch.cat(X, dim=-2)


def _adjoint(by: Pair) -> Pair:
    return by[0].mH, by[1].mH


def _write_sum(out: Tensor, *products: Pair, beta: int = 0) -> None:
    """Write β out + Σ X A into ``out``, for small matrices A; matrices of three dimensions need one pass each."""
    for X, A in products:
        if out.dim() == X.dim() == A.dim() == 3 and len(out) == len(X) == len(A):
            out.baddbmm_(X, A, beta=beta)
        else:
            out.copy_(out + X @ A if beta else X @ A)
        beta = 1
