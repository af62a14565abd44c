"""The horizontal space at one point of a GL(h) quotient.

All formulas are evaluated at the canonical representative, see :mod:`quotient_manifolds.gl`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import TangentSpace, standard_normal
from ..linalg import in_own_precision, largest, pack, power_of_two, root
from . import geodesic as geodesics
from .coordinates import Coordinates, along_gradient
from .gauge import Gauge
from .local_metric import canonical_metric, moving_metric
from .metrics import Pair

__all__ = ["GLTangentSpace", "draw_gaussians"]


@in_own_precision
class GLTangentSpace(TangentSpace):
    r"""The horizontal space at one point of a GL(h) quotient.

    Two kinds of Gram matrices occur. M and N are those of the factors. The metric uses :math:`\hat M, \hat N`, in
    which the singular values of :math:`G H^H` have the floor :math:`\hat σ_i = \max(σ_i, ε σ_1)` with ε the manifold's
    ``relaxation``; σ are invariants of the orbit, so the floor preserves the invariance, and G and H stay exact.

    Attributes
    ----------
    manifold : GLQuotientInv or GLQuotientMix
    x : Tensor
        The point, (…, n + m, h); vectors are given and returned at this representative.
    gauge : Gauge
        Canonical representative, and the group element that leads to it.
    sigma_hat : Tensor
        σ̂, (…, h).
    present : Tensor
        (…, h), which directions are present: those with σ_i above a tolerance relative to σ_1.

    Notes
    -----
    It is made by ``manifold.tangent_space_at(x)``, or from a known gauge by ``manifold.at_gauge``. The paper relaxes
    Gram matrices to GᴴG + εI (§5.2), which depends on the representative.

    Examples
    --------
    One factorisation for a gradient, its length, and a step:

    >>> import torch
    >>> from quotient_manifolds import GLQuotientInv
    >>> manifold = GLQuotientInv(4, 3)
    >>> space = manifold.tangent_space_at(manifold.origin(4 + 3, 2))
    >>> gradient = space.egrad2rgrad(torch.ones(7, 2))
    >>> space.norm(gradient), space.coordinates(gradient).norm()
    (tensor(3.7417), tensor(3.7417))
    >>> y = space.expmap(-0.1 * gradient)
    """

    def __init__(
        self,
        manifold: Any,
        x: Tensor,
        gauge: Gauge,
        *,
        unit: Tensor | None = None,
        at_canonical: bool = False,
        differentiable: bool = False,
        tolerance: float | None = None,
    ) -> None:
        metric, relaxation = manifold.metric, manifold.relaxation
        self.manifold, self.metric, self.x, self._gauge = manifold, metric, x, gauge
        # All is computed at x/unit, to which u/unit (inv) or u unit (mix), that is u · stretch, is an isometry.
        self._unit = unit
        self._per_unit: Any = unit
        self._stretch: Any = unit
        self._shrink: Any = unit
        if unit is not None:
            self._per_unit = 1 / unit
            pair = (self._per_unit, unit) if metric.scale_exponent > 0 else (unit, self._per_unit)
            self._stretch, self._shrink = pair
        self._at_canonical = at_canonical
        self.present = gauge.present(tolerance)
        self._sigma_hat = gauge.sigma.clamp_min(relaxation * gauge.sigma[..., :1])
        self._local = (
            moving_metric(metric, x if unit is None else x / unit, gauge, relaxation, self.present)
            if differentiable
            else canonical_metric(metric, gauge, self._sigma_hat, self.present)
        )
        self._coordinates = Coordinates(self._local, self._sigma_hat, self.present)

    @property
    def gauge(self) -> Gauge:
        """The canonical gauge of the point."""
        return self._gauge if self._unit is None else self._gauge.times(self._unit)

    @property
    def unit(self) -> Tensor:
        """The power of two, (…, 1, 1), in units of which everything is computed: 1 for points of ordinary size."""
        return self._gauge.sigma.new_ones(1, 1) if self._unit is None else self._unit

    @property
    def sigma_hat(self) -> Tensor:
        """The floored singular values, (…, h)."""
        return self._sigma_hat if self._unit is None else self._sigma_hat * self._unit[..., 0] * self._unit[..., 0]

    # -- between the representative at hand and the canonical one --------------------------------------------------

    def split(self, u: Tensor) -> Pair:
        """Split into (ξ_G, ξ_H), views (…, n, h) and (…, m, h)."""
        first, second = u.split(self.manifold.row_split(), dim=-2)
        return first, second

    def to_gauge(self, u: Tensor, by: Tensor | None = None) -> Pair:
        """Map a tangent vector to canonical gauge: (ξ_G A⁻¹, ξ_H Aᴴ), times a number (…, 1, 1) if there is one."""
        (xi, eta), (A, A_inv) = self.split(u), self._element(by)
        return (xi, eta) if self._at_canonical else (xi @ A_inv, eta @ A.mH)

    def from_gauge(self, xi: Tensor, eta: Tensor, by: Tensor | None = None) -> Tensor:
        """Map a tangent vector back from canonical gauge: (ξ_G A, ξ_H A⁻ᴴ), packed."""
        A, A_inv = self._element(by)
        return pack(xi, eta) if self._at_canonical else pack(xi @ A, eta @ A_inv.mH)

    def _dual_to_gauge(self, e: Tensor, by: Tensor | None = None) -> Pair:
        """Map a Euclidean gradient to canonical gauge: (e_G Aᴴ, e_H A⁻¹), which preserves Re⟨e, ξ⟩."""
        (P, R), (A, A_inv) = self.split(e), self._element(by)
        return (P, R) if self._at_canonical else (P @ A.mH, R @ A_inv)

    def _dual_from_gauge(self, P: Tensor, R: Tensor, by: Tensor | None = None) -> Tensor:
        """Map a Euclidean gradient back from canonical gauge: (P A⁻ᴴ, R A), packed."""
        A, A_inv = self._element(by)
        return pack(P, R) if self._at_canonical else pack(P @ A_inv.mH, R @ A)

    def _element(self, by: Tensor | None) -> Pair:
        A, A_inv = self._gauge.A, self._gauge.A_inv
        return (A, A_inv) if by is None else (A * by, A_inv * by)

    # -- metric and projection -------------------------------------------------------------------------------------

    def inner(self, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Compute Re Tr(W_G ξ_Gᴴ ζ_G + W_H ξ_Hᴴ ζ_H), W = (M̂⁻¹, N̂⁻¹) for inv, (N̂, M̂) for mix; (…) or (…, 1, 1)."""
        there = self.to_gauge(u, self._stretch)
        result = self._local.inner(there, there if v is None else self.to_gauge(v, self._stretch))
        return result[..., None, None] if keepdim else result

    def norm(self, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Compute ‖u‖ = √⟨u, u⟩, in units of u's size; its derivative at 0 is 0; (…) or (…, 1, 1)."""
        xi, eta = self.to_gauge(u, self._stretch)
        size = power_of_two(torch.maximum(largest(xi), largest(eta)))
        there = xi / size, eta / size
        result = root(self._local.inner(there, there)[..., None, None]) * size
        return result if keepdim else result[..., 0, 0]

    def proju(self, u: Tensor) -> Tensor:
        r"""Project on the horizontal space: :math:`(ξ_G + GΛ, ξ_H - HΛ^H)`; Λ depends on the metric."""
        if self._at_canonical:
            return pack(*self._local.horizontal(self.split(u)))
        # Only h × h matrices are mapped to the gauge: Ĝᴴ(ξ A⁻¹) = (Ĝᴴξ) A⁻¹, and (ĜΛ) A = Ĝ (ΛA).
        (xi, eta), (G, H), A, A_inv = self.split(u), self._local.factors, self._gauge.A, self._gauge.A_inv
        G_xi, H_eta = self._local.against_point((xi, eta))
        L = self._local.vertical_part(G_xi @ A_inv, H_eta @ A.mH)
        return pack(xi + G @ (L @ A), eta - H @ (L.mH @ A_inv.mH))

    def egrad2rgrad(self, u: Tensor) -> Tensor:
        r"""Turn a Euclidean gradient :math:`(\nabla_G, \nabla_H)` into the Riemannian one.

        inv: :math:`(\nabla_G M, \nabla_H N)`; mix: :math:`(\nabla_G N^{-1}, \nabla_H M^{-1})`. For a function of
        :math:`G H^H` these are horizontal already; for any other function the vertical part is removed.
        """
        (P, R), (V_G, V_H) = self._dual_to_gauge(u, self._shrink), self._local.inverse_weights()
        return self.from_gauge(*self._local.horizontal((P @ V_G, R @ V_H)), self._shrink)

    def to_covector(self, u: Tensor) -> Tensor:
        r"""Return the covector :math:`v \mapsto \langle u, v \rangle`, :math:`(ξ_G W_G, ξ_H W_H)` in gauge."""
        (xi, eta), (W_G, W_H) = self.to_gauge(u, self._stretch), self._local.weights()
        return self._dual_from_gauge(xi @ W_G, eta @ W_H, self._stretch)

    def vertical_moment(self, u: Tensor) -> Tensor:
        r"""Compute S with :math:`\langle u, v_Λ \rangle = \mathrm{Re}\langle S, Λ \rangle_F`, 0 if u is horizontal.

        :math:`v_Λ` is the vertical vector :math:`(GΛ, -HΛ^H)` at the canonical representative; S is (…, h, h).
        """
        (xi, eta), (W_G, W_H), (G, H) = self.to_gauge(u, self._stretch), self._local.weights(), self._local.factors
        S = G.mH @ (xi @ W_G) - (eta @ W_H).mH @ H
        return S if self._unit is None else S * self._unit * self._stretch

    def vertical_covector(self, L: Tensor) -> Tensor:
        r"""Return the Euclidean covector :math:`u \mapsto \langle v_Λ, u \rangle`, adjoint to the vertical moment."""
        (W_G, W_H), (G, H) = self._local.weights(), self._local.factors
        L = L if self._unit is None else L * self._unit * self._stretch
        return self._dual_from_gauge(G @ L @ W_G, -H @ L.mH @ W_H, self._stretch)

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw a standard Gaussian horizontal vector.

        Equal random numbers give the same vector of the quotient at every representative of an orbit, see
        :func:`draw_gaussians`.
        """
        return self.from_gaussians(draw_gaussians(tuple(self.x.shape), self.manifold.row_split()[0], self.x, generator))

    def from_gaussians(self, drawn: Sequence[Tensor]) -> Tensor:
        """Make a standard Gaussian horizontal vector from the numbers of :func:`draw_gaussians`."""
        first, second, *_ = drawn
        if len(drawn) == 2:
            c_G, c_H = first @ self._gauge.V, second.mH @ self._gauge.U
        else:
            phase = (drawn[2].mH @ self._gauge.U).sgn()
            c_G, c_H = first * phase, second * phase
        return self.proju(self.from_coordinates(pack(c_G, c_H)))

    # -- the second-order retraction -------------------------------------------------------------------------------

    def acceleration(self, u: Tensor) -> Tensor:
        r"""Compute :math:`-Γ(u, u)` for the velocity :math:`u = (\dot G, \dot H)`; paper, Eq. 12 and App. B."""
        return self.from_gauge(*self._local.acceleration(self.to_gauge(u, self._per_unit)), self._unit)

    def along_gradient(self, egrad: Tensor) -> tuple[Tensor, Callable[[float], Tensor]]:
        """Return the squared length (…) of a gradient, and t ↦ ``retr(t * egrad2rgrad(egrad))``, at half the cost.

        ``egrad`` is the Euclidean gradient of a function of G Hᴴ, whose Riemannian gradient is horizontal already.
        """
        if self._unit is not None:
            gradient = self.egrad2rgrad(egrad)
            return self.inner(gradient), lambda t: self.retr(t * gradient)
        ways = (None, None) if self._at_canonical else (self._gauge.A, self._gauge.A_inv.mH)
        return along_gradient(self._local, self.present, self.split(self.x), self._dual_to_gauge(egrad), ways)

    # -- exact geodesics -------------------------------------------------------------------------------------------

    def geodesic(self, u: Tensor, t: Any = 1.0, *, relative_tol: float | None = None) -> tuple[Tensor, Tensor]:
        """Follow the exact geodesic with horizontal velocity u, without the floor on σ (``relaxation``).

        Times, tolerance, results and errors are those of :meth:`GLQuotientInv.geodesic
        <quotient_manifolds.GLQuotientInv.geodesic>`.
        """
        point, velocity = geodesics.geodesic(self._whitened(u), t, relative_tol)
        return self.from_gauge(*point, self._unit), self.from_gauge(*velocity, self._unit)

    def expmap(self, u: Tensor, *, relative_tol: float | None = None) -> Tensor:
        """Return the end of the exact geodesic at time 1, (…, n + m, h); see :meth:`geodesic`."""
        return self.geodesic(u, relative_tol=relative_tol)[0]

    def exit_time(self, u: Tensor, until: float = 1.0) -> Tensor:
        """Return the time in (0, until] at which the geodesic leaves the manifold, inf where it does not; (…)."""
        return geodesics.exit_time(self._whitened(u), until)

    def _whitened(self, u: Tensor) -> geodesics.Whitened:
        return geodesics.Whitened.of(self._local, self.to_gauge(u, self._per_unit), self._gauge.sigma, self.present)

    # -- coordinates in which the metric is the identity -----------------------------------------------------------

    def coordinates(self, u: Tensor) -> Tensor:
        r"""Return coordinates in which the metric is the identity, :math:`\|u\|_x = \|c\|_F`.

        In canonical gauge they are :math:`ξ \hat Σ^{-1/2}` (inv) or :math:`ξ \hat Σ^{1/2}` (mix). Absent directions
        (σ_i = 0) have coordinate 0.
        """
        return pack(*self.to_gauge(u, self._stretch)) * self._coordinates.from_vector

    def from_coordinates(self, c: Tensor) -> Tensor:
        """Invert :meth:`coordinates`, except for absent directions; shape of c."""
        return self.from_gauge(*self.split(c * self._coordinates.to_vector), self._shrink)

    def dual_coordinates(self, e: Tensor) -> Tensor:
        """Return the coordinates of a Euclidean gradient: ⟨dual_coordinates(e), coordinates(u)⟩_F = Re⟨e, u⟩."""
        return pack(*self._dual_to_gauge(e, self._shrink)) * self._coordinates.to_vector

    def project_coordinates(self, c: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Project coordinates onto those of horizontal vectors, in canonical gauge; shape of c."""
        out = torch.empty_like(c) if out is None else out
        self._coordinates.project(self.split(c), self.split(out))
        return out

    def retr_coordinates(self, c: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return ``retr(from_coordinates(c))``, in canonical gauge, in fewer passes over c."""
        out = torch.empty_like(c) if out is None else out
        self._coordinates.retract(self.split(self._paced(c)), self.split(out))
        return out if self._unit is None else out.mul_(self._unit)

    def pullback_coordinates(
        self, c: Tensor, egrad: Tensor, factor: float = 1.0, *, out: Tensor | None = None
    ) -> Tensor:
        r"""Pull a Euclidean gradient at ``retr(u)``, u = ``from_coordinates(c)``, back to coordinates, times a factor.

        They are those of the horizontal part of :math:`P + \tfrac12 (D\,\mathrm{acceleration}(u))^H P`, with the
        gradient P, in canonical gauge.
        """
        out = torch.empty_like(c) if out is None else out
        self._coordinates.pull_back(self.split(self._paced(c)), self.split(egrad), factor, self.split(out))
        return out if self._unit is None else out.mul_(self._shrink)

    def _paced(self, c: Tensor) -> Tensor:
        """Return the coordinates at x/unit of the vector u/unit."""
        return c if self._unit is None else c * self._per_unit * self._shrink


def draw_gaussians(
    shape: tuple[int, ...], n: int, like: Tensor, generator: torch.Generator | None = None
) -> list[Tensor]:
    r"""Draw the numbers from which :meth:`GLTangentSpace.from_gaussians` makes a vector at a point of this shape.

    In coordinates that make the metric the identity the vector is the projection of :math:`(E_1 \hat V, E_2^H \hat U)`
    with Gaussian :math:`E_1, E_2 \in K^{n \times m}`, so it depends only on the orbit, and on no convention for the
    signs of singular vectors. For h = 1 fewer numbers suffice: it is :math:`φ (e_1, e_2)` with Gaussian :math:`e_1 \in
    K^n, e_2 \in K^m`, and φ the phase of :math:`e_3^H \hat U`.

    Parameters
    ----------
    shape : tuple of int
        (…, n + m, h).
    n : int
        Rows of G.
    like : Tensor
        A tensor with the dtype and device of the point.
    generator : torch.Generator, optional

    Returns
    -------
    list of Tensor
    """
    *batch, rows, h = shape
    m = rows - n
    wanted = ((n, 1), (m, 1), (n, 1)) if h == 1 else ((n, m), (n, m))
    return [standard_normal((*batch, *size), like, generator) for size in wanted]
