r"""The GL(h) quotient: pairs (G, H) that a network sees only through :math:`G H^H`.

Notation, as in the paper: :math:`x = (G, H)` with :math:`G \in K^{n \times h}`, :math:`H \in K^{m \times h}` of full
column rank, K the reals or the complex numbers; Gram matrices :math:`M = G^H G`, :math:`N = H^H H`; the group acts by
:math:`ψ(A, (G, H)) = (G A^{-1}, H A^H)`; vertical vectors are :math:`(GΛ, -HΛ^H)`.

All formulas are evaluated at the canonical representative of the point's orbit, where :math:`M = N = Σ` is diagonal:
vectors are carried there by the (constant) group element, and the result is carried back. Equivariance makes this
exact, and it keeps the condition number of the representative out of every inverse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from geoopt.manifolds.base import ScalingInfo
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from . import geodesics, logarithm, transport
from .base import QuotientManifold, TangentSpace, as_shape, standard_normal
from .gauge import Gauge, canonical_gauge
from .linalg import column_rank_ratio, pack, sylvester, trace_product
from .linalg import symmetric_part_doubled as sym2

__all__ = ["GLQuotientInv", "GLQuotientMix", "GLTangentSpace"]


class _Small:
    """The h × h products of a factor X, a tangent vector v and a covector p, computed when asked for.

    v = c · scale with a row ``scale``, or v = c · matrix.
    """

    def __init__(
        self, X: Tensor, c: Tensor, p: Tensor | None = None, scale: Tensor | None = None, matrix: Tensor | None = None
    ) -> None:
        self._X, self._c, self._p, self._scale, self._matrix = X, c, p, scale, matrix

    def _left(self, product: Tensor) -> Tensor:
        if self._matrix is not None:
            return self._matrix.mH @ product
        return product if self._scale is None else self._scale.mT * product

    def _right(self, product: Tensor) -> Tensor:
        if self._matrix is not None:
            return product @ self._matrix
        return product if self._scale is None else product * self._scale

    @cached_property
    def vX(self) -> Tensor:
        return self._left(self._c.mH @ self._X)

    @cached_property
    def cc(self) -> Tensor:
        return self._c.mH @ self._c

    @cached_property
    def vv(self) -> Tensor:
        return self._right(self._left(self.cc))

    @cached_property
    def pX(self) -> Tensor:
        assert self._p is not None
        return self._p.mH @ self._X

    @cached_property
    def pv(self) -> Tensor:
        assert self._p is not None
        return self._right(self._p.mH @ self._c)


def _sum_of_products(out: Tensor, *terms: tuple[Tensor, Tensor]) -> None:
    """Write Σ X A for matrices A that are small."""
    (X, A), *rest = terms
    if out.dim() != 3 or any(t.dim() != 3 for pair in terms for t in pair):
        out.copy_(X @ A + sum(Y @ B for Y, B in rest))
        return
    torch.bmm(X, A, out=out)
    for Y, B in rest:
        out.baddbmm_(Y, B)


class GLTangentSpace(TangentSpace):
    r"""The horizontal space at one point of a GL(h) quotient.

    Two kinds of Gram matrices occur. M and N are those of the factors. The metric uses :math:`\hat M, \hat N`, in
    which the singular values of :math:`G H^H` have the floor :math:`\hat σ_i = \max(σ_i, ε σ_1)` with ε the manifold's
    ``relaxation``; σ are invariants of the orbit, so the floor keeps the invariance, and G and H stay exact.

    Attributes
    ----------
    gauge : Gauge
        Canonical representative and the group element that leads there.
    present : Tensor
        (…, h), which of the directions the point has: σ_i above a tolerance relative to σ_1.
    G, H, M, N, M_hat, N_hat, M_inv, N_inv : Tensor
        At the canonical representative; the inverses are those of the metric's Gram matrices.
    """

    def __init__(
        self,
        manifold: _GLQuotient,
        x: Tensor,
        gauge: Gauge,
        *,
        at_canonical: bool = False,
        differentiable: bool = False,
        tolerance: float | None = None,
    ) -> None:
        self.manifold = manifold
        self.x = x
        self.gauge = gauge
        self._at_canonical = at_canonical
        self.present = gauge.present(tolerance)
        sigma = gauge.sigma
        self.sigma_hat = sigma.clamp_min(manifold.relaxation * sigma[..., :1])
        diagonal = torch.diag_embed(sigma).to(x.dtype)
        diagonal_hat = torch.diag_embed(self.sigma_hat).to(x.dtype)
        if differentiable:
            # With the group element held constant the formulas hold at every point nearby, where the Gram matrices
            # are no longer diagonal: their derivatives are then exact, and no SVD is differentiated.
            G0, H0 = x.split(manifold._row_split(), dim=-2)
            self.G, self.H = G0 @ gauge.A_inv, H0 @ gauge.A.mH
            self.M, self.N = self.G.mH @ self.G, self.H.mH @ self.H
            floor = diagonal_hat - diagonal
            self.M_hat, self.N_hat = self.M + floor, self.N + floor
            absent = torch.diag_embed(~self.present).to(x.dtype)  # nothing has components there
            self.M_inv, self.N_inv = torch.linalg.inv(self.M_hat + absent), torch.linalg.inv(self.N_hat + absent)
        else:
            self.G, self.H = gauge.G, gauge.H
            self.M = self.N = diagonal
            self.M_hat = self.N_hat = diagonal_hat
            # Nothing moves in directions that the point lacks.
            inverse = torch.where(self.present, 1 / self.sigma_hat, torch.zeros_like(sigma))
            self.M_inv = self.N_inv = torch.diag_embed(inverse).to(x.dtype)

    # -- between the representative at hand and the canonical one --------------------------------------------------

    def _split(self, u: Tensor) -> tuple[Tensor, Tensor]:
        first, second = u.split(self.manifold._row_split(), dim=-2)
        return first, second

    def _to_gauge(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Carry a tangent vector along: (ξ_G A⁻¹, ξ_H Aᴴ)."""
        xi, eta = self._split(u)
        return (xi, eta) if self._at_canonical else (xi @ self.gauge.A_inv, eta @ self.gauge.A.mH)

    def _from_gauge(self, xi: Tensor, eta: Tensor) -> Tensor:
        return pack(xi, eta) if self._at_canonical else pack(xi @ self.gauge.A, eta @ self.gauge.A_inv.mH)

    def _dual_to_gauge(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Carry a Euclidean gradient along: (e_G Aᴴ, e_H A⁻¹), so that Re⟨e, ξ⟩ stays."""
        P, R = self._split(e)
        return (P, R) if self._at_canonical else (P @ self.gauge.A.mH, R @ self.gauge.A_inv)

    def _dual_from_gauge(self, P: Tensor, R: Tensor) -> Tensor:
        return pack(P, R) if self._at_canonical else pack(P @ self.gauge.A_inv.mH, R @ self.gauge.A)

    # -- what the two metrics differ in, at the canonical representative ---------------------------------------------

    def _weights(self) -> tuple[Tensor, Tensor]:
        """(W_G, W_H) of the metric Re Tr(W_G ξ_Gᴴ ζ_G + W_H ξ_Hᴴ ζ_H)."""
        raise NotImplementedError

    def _vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        """Λ for which (ξ_G + GΛ, ξ_H − HΛᴴ) is horizontal, from Gᴴξ_G and Hᴴξ_H."""
        raise NotImplementedError

    def _inverse_weights(self) -> tuple[Tensor, Tensor]:
        """(W_G⁻¹, W_H⁻¹): a covector (P, R) is represented by the vector (P W_G⁻¹, R W_H⁻¹)."""
        raise NotImplementedError

    def _acceleration_matrices(self, G: _Small, H: _Small) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """((a, b), (c, d)) with acceleration = (G a + ξ_G b, H c + ξ_H d)."""
        raise NotImplementedError

    def _adjoint_matrices(self, G: _Small, H: _Small) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """((e, a, b), (f, c, d)) with (D acceleration)ᴴ(P, R) = (P e + G a + ξ_G b, R f + H c + ξ_H d)."""
        raise NotImplementedError

    #: "inv" or "mix".
    metric: str
    #: Exponent p of the column scale σ̂^p that makes the metric the identity in canonical gauge.
    _scale_exponent: float

    # -- public ----------------------------------------------------------------------------------------------------

    def inner(self, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        xi, eta = self._to_gauge(u)
        zeta, nu = (xi, eta) if v is None else self._to_gauge(v)
        W_G, W_H = self._weights()
        result = trace_product(W_G, xi, zeta) + trace_product(W_H, eta, nu)
        return result[..., None, None] if keepdim else result

    def proju(self, u: Tensor) -> Tensor:
        r"""Project on the horizontal space: :math:`(ξ_G + GΛ, ξ_H - HΛ^H)`; Λ depends on the metric.

        Notes
        -----
        Paper, §5.2, Λ^inv and Λ^mix; for inv the printed Sylvester equation is corrected, see
        :func:`quotient_manifolds.linalg.sylvester`.
        """
        # Only h × h matrices are carried to the gauge: Ĝᴴ(ξ A⁻¹) = (Ĝᴴξ) A⁻¹, and (ĜΛ) A = Ĝ (ΛA).
        xi, eta = self._split(u)
        G_xi, H_eta = self.G.mH @ xi, self.H.mH @ eta
        if self._at_canonical:
            L = self._vertical_part(G_xi, H_eta)
            return pack(xi + self.G @ L, eta - self.H @ L.mH)
        A, A_inv = self.gauge.A, self.gauge.A_inv
        L = self._vertical_part(G_xi @ A_inv, H_eta @ A.mH)
        return pack(xi + self.G @ (L @ A), eta - self.H @ (L.mH @ A_inv.mH))

    def egrad2rgrad(self, u: Tensor) -> Tensor:
        r"""Turn a Euclidean gradient :math:`(\nabla_G, \nabla_H)` into the Riemannian one.

        inv: :math:`(\nabla_G M, \nabla_H N)`; mix: :math:`(\nabla_G N^{-1}, \nabla_H M^{-1})`. For a function of
        :math:`G H^H` these are horizontal already; the vertical part that any other gradient has is removed.
        """
        P, R = (X @ W for X, W in zip(self._dual_to_gauge(u), self._inverse_weights(), strict=True))
        L = self._vertical_part(self.G.mH @ P, self.H.mH @ R)
        return self._from_gauge(P + self.G @ L, R - self.H @ L.mH)

    def along_gradient(self, egrad: Tensor) -> tuple[Tensor, Callable[[float], Tensor]]:
        """Give the squared length of a gradient, and where the retraction leads along it.

        Parameters
        ----------
        egrad : Tensor
            Euclidean gradient of a function of G Hᴴ, (…, n + m, h); its Riemannian gradient is horizontal as it is.

        Returns
        -------
        (Tensor, callable)
            Squared length (…); and t ↦ ``retr(t * egrad2rgrad(egrad))``, in half the products that this takes.
        """
        there = (self.present.unsqueeze(-1) & self.present.unsqueeze(-2)).to(egrad.dtype)
        covector, weights = self._dual_to_gauge(egrad), [W * there for W in self._inverse_weights()]
        small = [_Small(X, P, matrix=W) for X, P, W in zip((self.G, self.H), covector, weights, strict=True)]
        square = sum((W.mT * s.cc).real.sum(dim=(-2, -1)) for W, s in zip(weights, small, strict=True))
        accelerations = self._acceleration_matrices(*small)

        def end(t: float) -> Tensor:
            carriers = (None, None) if self._at_canonical else (self.gauge.A, self.gauge.A_inv.mH)
            out = torch.empty_like(self.x)
            for part, x, X, P, W, (a, b), A in zip(
                self._split(out), self._split(self.x), (self.G, self.H), covector, weights, accelerations, carriers,
                strict=True,
            ):  # fmt: skip
                of_point, of_vector = 0.5 * t**2 * a, W @ (t * torch.eye(b.shape[-1]).to(b) + 0.5 * t**2 * b)
                if A is not None:
                    of_point, of_vector = of_point @ A, of_vector @ A
                _sum_of_products(part, (X, of_point), (P, of_vector))
                part.add_(x)
            return out

        return cast(Tensor, square), end

    def acceleration(self, u: Tensor) -> Tensor:
        r"""Compute :math:`-Γ(u, u)` for the velocity :math:`u = (\dot G, \dot H)`.

        inv: :math:`\ddot G = \dot G M^{-1}(\dot G^H G + G^H \dot G) - G M^{-1} \dot G^H \dot G`, H likewise with N.
        mix: :math:`\ddot G = [G \dot H^H \dot H - \dot G(\dot H^H H + H^H \dot H)] N^{-1}`, H likewise with M.

        Notes
        -----
        Paper, Eq. 12 and App. B.
        """
        xi, eta = self._to_gauge(u)
        (a, b), (c, d) = self._acceleration_matrices(_Small(self.G, xi), _Small(self.H, eta))
        return self._from_gauge(self.G @ a + xi @ b, self.H @ c + eta @ d)

    def geodesic(self, u: Tensor, t: Any = 1.0, *, tol: float | None = None) -> tuple[Tensor, Tensor]:
        """Follow the exact geodesic with horizontal velocity u.

        inv: closed form; mix: the reduced ordinary differential equation. See :mod:`quotient_manifolds.geodesics`.

        Parameters
        ----------
        u : Tensor
            Horizontal, (…, n + m, h).
        t : float or Tensor
            Times of any shape (k…).
        tol : float, optional
            Relative tolerance of the solver for mix; by default 1e-12 in float64, 2e-6 in float32.

        Returns
        -------
        tuple of Tensor
            Points and velocities, (k…, …, n + m, h).

        Raises
        ------
        GeodesicExitError
            A mix geodesic reaches a rank-deficient matrix before the last time.

        Notes
        -----
        The metric's floor on σ (``relaxation``) is left out.
        """
        X, xi, Y, eta, sigma = self._whitened(u)
        if self.metric == "inv":
            return self._unwhitened(*geodesics.inv_geodesic(X, xi, t), *geodesics.inv_geodesic(Y, eta, t))
        return self._unwhitened(*geodesics.mix_geodesic(X, xi, Y, eta, sigma, t, tol=tol))

    def expmap(self, u: Tensor, *, tol: float | None = None) -> Tensor:
        """Give the end of the exact geodesic at time 1, (…, n + m, h); see :meth:`geodesic`."""
        return self.geodesic(u, tol=tol)[0]

    def rk4(self, u: Tensor, steps: int) -> Tensor:
        """Follow the geodesic to time 1 by steps of the classical Runge–Kutta method; never raises."""
        X, xi, Y, eta, sigma = self._whitened(u)
        return self._unwhitened(*geodesics.rk4(self.metric, X, xi, Y, eta, sigma, 1.0, steps))[0]

    def exit_time(self, u: Tensor, until: float = 1.0) -> Tensor:
        """Give the time in (0, until] at which the geodesic leaves the manifold, inf where it does not; (…)."""
        X, xi, Y, eta, sigma = self._whitened(u)
        if self.metric == "inv":  # the inv metric is complete
            return torch.full(xi.shape[:-2], torch.inf, dtype=sigma.dtype, device=u.device)
        return geodesics.exit_time(X, xi, Y, eta, sigma, until)

    def parallel_transport(self, u: Tensor, v: Tensor, *, tol: float = 1e-11) -> tuple[Tensor, Tensor]:
        """Transport v along the geodesic with velocity u; end point and vector. See the manifold's method."""
        return transport.parallel_transport(self, u, v, tol=tol)

    def _roots(self) -> tuple[Tensor, Tensor]:
        """√σ and 1/√σ as rows, both 0 for directions that the point lacks."""
        present = self.present.unsqueeze(-2)
        root = torch.where(
            present, self.gauge.sigma.unsqueeze(-2).sqrt(), torch.ones_like(self.sigma_hat).unsqueeze(-2)
        )
        return root * present, present / root

    def _whitened(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(X, ξ, Y, η, σ): factors with orthonormal columns, vectors whose metric is the identity, and the scale."""
        xi, eta = self._to_gauge(u)
        root, inverse = self._roots()
        scale = inverse if self.metric == "inv" else root
        sigma = torch.where(self.present, self.gauge.sigma, torch.zeros_like(self.gauge.sigma))
        return self.G * inverse, xi * scale, self.H * inverse, eta * scale, sigma

    def _unwhitened(self, X: Tensor, xi: Tensor, Y: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Undo :meth:`_whitened`: point and velocity at the representative at hand; what is lacking stays put."""
        root, inverse = self._roots()
        scale = root if self.metric == "inv" else inverse
        still = ~self.present.unsqueeze(-2)
        point = self._from_gauge(X * root + self.G * still, Y * root + self.H * still)
        return point, self._from_gauge(xi * scale, eta * scale)

    def pullback(self, u: Tensor, egrad: Tensor) -> Tensor:
        r"""Pull a Euclidean gradient at ``retr(u)`` back to one with respect to u.

        .. math:: \nabla_u \ell(R_x(u)) = P + \tfrac12 (D\,\mathrm{acceleration}(u))^H P,
                  \qquad P = \nabla \ell \text{ at } R_x(u)

        Parameters
        ----------
        u : Tensor
            Tangent vector, (…, n + m, h).
        egrad : Tensor
            Euclidean gradient at ``retr(u)``, same shape.

        Returns
        -------
        Tensor
            Euclidean gradient with respect to u, same shape; :meth:`egrad2rgrad` turns it into a tangent vector.
        """
        P, R = self._dual_to_gauge(egrad)
        xi, eta = self._to_gauge(u)
        (e, a, b), (f, c, d) = self._adjoint_matrices(_Small(self.G, xi, P), _Small(self.H, eta, R))
        return self._dual_from_gauge(P + 0.5 * (P @ e + self.G @ a + xi @ b), R + 0.5 * (R @ f + self.H @ c + eta @ d))

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw a standard Gaussian horizontal vector.

        In coordinates that make the metric the identity, :math:`(E_1 \hat V, E_2^H \hat U)` with Gaussian
        :math:`E_1, E_2 \in K^{n \times m}`, projected. Equal random numbers give the same vector of the quotient at
        every representative of an orbit, and no rule for the signs of singular vectors enters.
        """
        n, m = self.manifold._row_split()
        shape = (*self.x.shape[:-2], n, m)
        E1 = standard_normal(shape, self.x, generator)
        c_G = E1 @ self.gauge.V
        del E1
        E2 = standard_normal(shape, self.x, generator)
        u = self.from_coordinates(pack(c_G, E2.mH @ self.gauge.U))
        return self.proju(u)

    def vertical_moment(self, u: Tensor) -> Tensor:
        r"""Compute S with :math:`\langle u, v_Λ \rangle = \mathrm{Re}\langle S, Λ \rangle_F`, 0 if u is horizontal.

        :math:`v_Λ` is the vertical vector :math:`(GΛ, -HΛ^H)` at the canonical representative; S is (…, h, h).
        """
        xi, eta = self._to_gauge(u)
        W_G, W_H = self._weights()
        return self.G.mH @ (xi @ W_G) - (eta @ W_H).mH @ self.H

    def vertical_covector(self, L: Tensor) -> Tensor:
        r"""Give the Euclidean covector :math:`u \mapsto \langle v_Λ, u \rangle`, the adjoint of the vertical moment."""
        W_G, W_H = self._weights()
        return self._dual_from_gauge(self.G @ L @ W_G, -self.H @ L.mH @ W_H)

    def _scale(self, exponent: float) -> Tensor:
        """σ̂^exponent as a row, zero for directions that the point does not have."""
        s = self.sigma_hat
        power = torch.where(s > 0, s, torch.ones_like(s)) ** exponent
        return torch.where(self.present, power, torch.zeros_like(s)).unsqueeze(-2)

    def coordinates(self, u: Tensor) -> Tensor:
        r"""Give coordinates in which the metric is the identity, :math:`\|u\|_x = \|c\|_F`.

        In canonical gauge :math:`ξ \hat Σ^{-1/2}` (inv) or :math:`ξ \hat Σ^{1/2}` (mix). Directions that the point
        lacks (σ_i = 0) have coordinate 0.
        """
        return pack(*self._to_gauge(u)) * self._scale(-self._scale_exponent)

    def from_coordinates(self, c: Tensor) -> Tensor:
        """Invert :meth:`coordinates`."""
        return self._from_gauge(*self._split(c * self._scale(self._scale_exponent)))

    def dual_coordinates(self, e: Tensor) -> Tensor:
        """Give the coordinates of a Euclidean gradient: ⟨dual_coordinates(e), coordinates(u)⟩_F = Re⟨e, u⟩."""
        return pack(*self._dual_to_gauge(e)) * self._scale(self._scale_exponent)

    def retr_coordinates(self, c: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Give ``retr(from_coordinates(c))``, in canonical gauge, in fewer passes over c."""
        scale = self._scale(self._scale_exponent)
        xi, eta = self._split(c)
        accelerations = self._acceleration_matrices(_Small(self.G, xi, scale=scale), _Small(self.H, eta, scale=scale))
        identity = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
        out = torch.empty_like(c) if out is None else out
        for part, X, v, (a, b) in zip(self._split(out), (self.G, self.H), (xi, eta), accelerations, strict=True):
            _sum_of_products(part, (X, identity + 0.5 * a), (v, scale.mT * (identity + 0.5 * b)))
        return out

    def pullback_coordinates(
        self, c: Tensor, egrad: Tensor, factor: float = 1.0, *, out: Tensor | None = None
    ) -> Tensor:
        """Give the coordinates of the horizontal part of ``pullback(from_coordinates(c), egrad)``, times a factor.

        In canonical gauge, in fewer passes over c: all that is done is to add up multiples of the gradient, the point
        and c by h × h matrices, and what the projection needs follows from these.
        """
        scale = self._scale(self._scale_exponent)
        vectors, covectors, points = self._split(c), self._split(egrad), (self.G, self.H)
        small = [_Small(X, v, p, scale) for X, v, p in zip(points, vectors, covectors, strict=True)]
        identity = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
        # Q = P (I + e/2) + X a/2 + ξ b/2 is the pulled back covector, and Xᴴ Q = (PᴴX)ᴴ (I + e/2) + …
        matrices = [(identity + 0.5 * e, 0.5 * a, 0.5 * b) for e, a, b in self._adjoint_matrices(*small)]
        inner = [
            s.pX.mH @ e + gram @ a + s.vX.mH @ b
            for s, gram, (e, a, b) in zip(small, (self.M, self.N), matrices, strict=True)
        ]
        L = self._vertical_part(inner[0] * scale**2, inner[1] * scale**2)
        vertical, back = (L, -L.mH), self._scale(-self._scale_exponent)
        out = torch.empty_like(c) if out is None else out
        for part, X, v, p, (e, a, b), V in zip(
            self._split(out), points, vectors, covectors, matrices, vertical, strict=True
        ):
            _sum_of_products(
                part, (p, factor * e * scale), (X, factor * (a * scale + V * back)), (v, factor * scale.mT * b * scale)
            )
        return out

    def project_coordinates(self, c: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Project coordinates on those of horizontal vectors."""
        scale, back = self._scale(self._scale_exponent), self._scale(-self._scale_exponent)
        xi, eta = self._split(c)
        L = self._vertical_part((self.G.mH @ xi) * scale, (self.H.mH @ eta) * scale)
        out = torch.empty_like(c) if out is None else out
        for part, v, X, V in zip(self._split(out), (xi, eta), (self.G, self.H), (L, -L.mH), strict=True):
            torch.mul(v, self.present.unsqueeze(-2), out=part)
            if part.dim() == 3:
                part.baddbmm_(X, V * back)
            else:
                part += X @ (V * back)
        return out


class _InvTangentSpace(GLTangentSpace):
    metric = "inv"
    _scale_exponent = 0.5

    def _weights(self) -> tuple[Tensor, Tensor]:
        return self.M_inv, self.N_inv

    def _inverse_weights(self) -> tuple[Tensor, Tensor]:
        return self.M_hat, self.N_hat

    def _vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        # (M̂N) X + X (MN̂) = M̂ Hᴴ ξ_H − ξ_Gᴴ G N̂ with X = Λᴴ
        B = self.M_hat @ H_eta - G_xi.mH @ self.N_hat
        return sylvester(self.M_hat @ self.N, self.M @ self.N_hat, B).mH

    def _acceleration_matrices(self, G: _Small, H: _Small) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def one(s: _Small, gram_inv: Tensor) -> tuple[Tensor, Tensor]:
            return -gram_inv @ s.vv, gram_inv @ sym2(s.vX)

        return one(G, self.M_inv), one(H, self.N_inv)

    def _adjoint_matrices(self, G: _Small, H: _Small) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        def one(s: _Small, gram_inv: Tensor) -> tuple[Tensor, ...]:
            return sym2(s.vX) @ gram_inv, sym2(s.pv @ gram_inv), -sym2(s.pX @ gram_inv)

        return one(G, self.M_inv), one(H, self.N_inv)


class _MixTangentSpace(GLTangentSpace):
    metric = "mix"
    _scale_exponent = -0.5

    def _weights(self) -> tuple[Tensor, Tensor]:
        return self.N_hat, self.M_hat

    def _inverse_weights(self) -> tuple[Tensor, Tensor]:
        return self.N_inv, self.M_inv

    def _vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        # MΛN̂ + M̂ΛN = M̂ ξ_Hᴴ H − Gᴴ ξ_G N̂, divided by M̂ on the left and N̂ on the right.
        B = H_eta.mH @ self.N_inv - self.M_inv @ G_xi
        return sylvester(self.M_inv @ self.M, self.N @ self.N_inv, B)

    def _acceleration_matrices(self, G: _Small, H: _Small) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def one(other: _Small, gram_inv: Tensor) -> tuple[Tensor, Tensor]:
            return other.vv @ gram_inv, -sym2(other.vX) @ gram_inv

        return one(H, self.N_inv), one(G, self.M_inv)

    def _adjoint_matrices(self, G: _Small, H: _Small) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        def one(other: _Small, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
            # i is the inverse Gram matrix of the other factor, j that of the factor itself.
            return -i @ sym2(other.vX), -sym2(j @ other.pv), sym2(j @ other.pX)

        return one(H, self.N_inv, self.M_inv), one(G, self.M_inv, self.N_inv)


_scaled = QuotientManifold.__scaling__.copy()


class _GLQuotient(QuotientManifold):
    """What the inv and the mix metric share."""

    __scaling__ = _scaled
    _space_class: type[GLTangentSpace]

    def __init__(self, n: int, m: int, *, relaxation: float = 1e-12) -> None:
        if n < 1 or m < 1:
            raise ValueError(f"{type(self).__name__} needs positive row counts, got n = {n}, m = {m}")
        if not 0 <= relaxation < 1:
            raise ValueError(f"{type(self).__name__}: relaxation must lie in [0, 1), got {relaxation}")
        super().__init__()
        self.n, self.m, self.relaxation = int(n), int(m), float(relaxation)

    def extra_repr(self) -> str:
        return f"n={self.n}, m={self.m}"

    def _row_split(self) -> list[int]:
        return [self.n, self.m]

    def _tangent_space(self, x: Tensor, differentiable: bool) -> GLTangentSpace:
        G, H = x.detach().split(self._row_split(), dim=-2)
        gauge = None
        try:
            gauge = canonical_gauge(G, H)
            suspect = not bool(gauge.present()[..., -1].all())
        except LinAlgError:  # SVD of NaN or inf
            suspect = True
        if suspect:  # only then is it worth to factorise each factor on its own
            ok, reason = self._check_point_on_manifold(x.detach())
            if not ok or gauge is None:
                raise ValueError(reason)
        assert gauge is not None
        return self._space_class(self, x, gauge, differentiable=differentiable)

    def at_gauge(
        self, gauge: Gauge, x: Tensor | None = None, *, tolerance: float | None = None, moved: bool = False
    ) -> GLTangentSpace:
        """Give the tangent space at a point whose gauge is known, without factorising again.

        Parameters
        ----------
        gauge : Gauge
        x : Tensor, optional
            The representative that vectors belong to; by default the canonical one.
        tolerance : float, optional
            Directions with σ_i below it, relative to σ_1, count as absent in coordinates and random vectors; by
            default those at rounding level.
        moved : bool
            x has moved since its gauge was computed. Gram matrices are computed anew, in the frame that the old group
            element gives. :meth:`GLTangentSpace.inner`, ``acceleration``, ``retr`` and ``along_gradient`` are exact;
            ``proju``, ``coordinates`` and random vectors are not.

        Notes
        -----
        Unlike :meth:`at` it accepts rank-deficient points, whose missing directions count as absent.
        """
        if x is None:
            return self._space_class(self, gauge.x, gauge, at_canonical=True, tolerance=tolerance)
        return self._space_class(self, x, gauge, tolerance=tolerance, differentiable=moved)

    def act(self, x: Tensor, A: Tensor) -> Tensor:
        r"""Move x along its orbit: :math:`(G A^{-1}, H A^H)`; A is (…, h, h), invertible."""
        G, H = self.unpack_tensor(x)
        self._check_algebra(x, A)
        try:
            return pack(torch.linalg.solve(A, G, left=False), H @ A.mH)
        except LinAlgError as error:
            raise ValueError(f"{self}: a group element of shape {tuple(A.shape)} is singular") from error

    def vertical(self, x: Tensor, L: Tensor) -> Tensor:
        r"""Give the vertical vector :math:`(GΛ, -HΛ^H)`; L is Λ, (…, h, h)."""
        G, H = self.unpack_tensor(x)
        self._check_algebra(x, L)
        return pack(G @ L, -H @ L.mH)

    def _check_algebra(self, x: Tensor, A: Tensor) -> None:
        h = x.shape[-1]
        if A.dim() < 2 or A.shape[-2:] != (h, h):
            raise ValueError(
                f"{self}: a point of shape {tuple(x.shape)} needs matrices (…, {h}, {h}), got {tuple(A.shape)}"
            )
        self._check_same(x, A, "the point x", "the matrix")

    def product(self, x: Tensor) -> Tensor:
        r"""Compute :math:`G H^H`, (…, n, m)."""
        G, H = self.unpack_tensor(x)
        return G @ H.mH

    def canonical(self, x: Tensor) -> Tensor:
        """Give the representative in canonical gauge, where GᴴG = HᴴH = Σ; see :class:`Gauge`."""
        self.at(x)  # the checks
        G, H = self.unpack_tensor(x)
        return canonical_gauge(G, H).x

    def _gl_space(self, x: Tensor, u: Tensor) -> GLTangentSpace:
        space = self._vector_space(x, u)
        assert isinstance(space, GLTangentSpace)
        return space

    # -- exact geodesics ---------------------------------------------------------------------------------------------

    @_scaled(ScalingInfo(u=-1))
    def expmap(self, x: Tensor, u: Tensor, *, tol: float | None = None) -> Tensor:
        """Follow the exact geodesic from x with horizontal velocity u for unit time; shape of u.

        inv: closed form; mix: an adaptive solver with relative tolerance ``tol``. Differentiable. :meth:`retr` is the
        cheaper second-order approximation that optimisers use, and never raises.

        Raises
        ------
        GeodesicExitError
            A mix geodesic reaches a rank-deficient matrix before that time (``time``, and ``times`` item by item).
        """
        return self._gl_space(x, u).expmap(u, tol=tol)

    @_scaled(ScalingInfo.NotCompatible)
    def geodesic(self, x: Tensor, u: Tensor, t: Any, *, tol: float | None = None) -> tuple[Tensor, Tensor]:
        """Give points and velocities at many times of the geodesic from x with velocity u.

        Parameters
        ----------
        x, u : Tensor
            Point and horizontal vector, (…, n + m, h).
        t : float or Tensor
            Times of any shape (k…) and sign.
        tol : float, optional
            See :meth:`expmap`.

        Returns
        -------
        tuple of Tensor
            Both (k…, …, n + m, h).
        """
        return self._gl_space(x, u).geodesic(u, t, tol=tol)

    @_scaled(ScalingInfo.NotCompatible)
    def exit_time(self, x: Tensor, u: Tensor, until: float = 1.0) -> Tensor:
        """Give the time in (0, until] at which each geodesic leaves the manifold, inf where it stays; (…)."""
        return self._gl_space(x, u).exit_time(u, until)

    @_scaled(ScalingInfo(1))
    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Give the horizontal vector at x whose geodesic reaches the orbit of y at time 1, by shooting.

        Differs from 0 for y ≠ x on one orbit by rounding only. Not differentiable.

        Raises
        ------
        ConvergenceError
            The points are too far apart, or only a geodesic longer than the straight path between the aligned
            representatives was found. ``residual`` says how much of the way is missing.
        """
        self._check_vector(x, y, "y")
        with torch.no_grad():
            return logarithm.logmap(self, x, y)

    @_scaled(ScalingInfo(1))
    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Give the distance of the orbits of x and y, the length of :meth:`logmap`; (…) or (…, 1, 1)."""
        return self.norm(x, self.logmap(x, y), keepdim=keepdim)

    @_scaled(ScalingInfo.NotCompatible)
    def align(self, x: Tensor, y: Tensor) -> Tensor:
        """Give the representative of y's orbit nearest to x in the metric at x (a local minimum); shape of y."""
        self._check_vector(x, y, "y")
        with torch.no_grad():
            return logarithm.align(self, x, y)

    @_scaled(ScalingInfo.NotCompatible)
    def geodesic_between(self, x: Tensor, y: Tensor, t: Any) -> Tensor:
        """Interpolate: the points at times t of the geodesic from x (t = 0) to the orbit of y (t = 1); (k…, …)."""
        return self.geodesic(x, self.logmap(x, y), t)[0]

    @_scaled(ScalingInfo.NotCompatible)
    def mean(self, points: Tensor) -> Tensor:
        """Give the Fréchet mean over the first dimension, (…, n + m, h); raises as :meth:`logmap` does."""
        self._assert_check_shape(points.shape, "x")
        with torch.no_grad():
            return logarithm.mean(self, points)

    @_scaled(ScalingInfo.NotCompatible)
    def parallel_transport(self, x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Transport v parallel along the geodesic from x with velocity u, for unit time; end point and vector.

        With the connection of the quotient, so that inner products stay. :meth:`transp` is the cheaper projection.
        """
        return self._gl_space(x, u).parallel_transport(u, v)

    # -- geoopt's checks ---------------------------------------------------------------------------------------------

    def origin(self, *size: Any, dtype: Any = None, device: Any = None, seed: int | None = 42) -> Tensor:
        """Give the point G = [I; 0], H = [I; 0]; ``seed`` is accepted for geoopt's sake."""
        shape = as_shape(size)
        self._assert_check_shape(shape, "x")
        h = shape[-1]
        G = torch.eye(self.n, h, dtype=dtype, device=device)
        H = torch.eye(self.m, h, dtype=dtype, device=device)
        return torch.cat([G, H], dim=-2).expand(shape).clone()

    def _projx(self, x: Tensor) -> Tensor:
        if self._check_point_on_manifold(x)[0]:
            return x

        def lift(X: Tensor) -> Tensor:
            U, s, Vh = torch.linalg.svd(X, full_matrices=False)
            top = torch.where(s[..., :1] > 0, s[..., :1], torch.ones_like(s[..., :1]))
            floor = 4 * self._rank_tolerance(X) * top
            return torch.where((s < floor).any(-1)[..., None, None], (U * s.clamp_min(floor).unsqueeze(-2)) @ Vh, X)

        return pack(*(lift(X) for X in self.unpack_tensor(x)))

    @staticmethod
    def _rank_tolerance(X: Tensor) -> float:
        return max(X.shape[-2:]) * torch.finfo(X.dtype).eps

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        shape = tuple(shape)
        rows = self.n + self.m
        if len(shape) < 2 or shape[-2] != rows:
            return False, f"{self}: '{name}' needs shape (…, {self.n} + {self.m}, h), got {shape}"
        if not 1 <= shape[-1] <= min(self.n, self.m):
            return False, (
                f"{self}: '{name}' of shape {shape} has h = {shape[-1]} columns, but full column rank of both factors "
                f"needs 1 ≤ h ≤ min(n, m) = {min(self.n, self.m)}"
            )
        return True, None

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        ok, reason = self._check_dtype(x)
        if not ok:
            return ok, reason
        if not bool(x.isfinite().all()):
            return False, f"{self}: the point of shape {tuple(x.shape)} has NaN or infinite entries"
        for name, X in zip("GH", self.unpack_tensor(x.detach()), strict=True):
            ratio = column_rank_ratio(X)
            if bool((ratio <= self._rank_tolerance(X)).any()):
                return False, (
                    f"{self}: factor {name} of the point of shape {tuple(x.shape)} does not have full column rank "
                    f"(smallest to largest singular value {ratio.min().item():.1e}); start from a full-rank factor "
                    "(LoRA's B = 0 is none) or use fewer columns"
                )
        return True, None


class GLQuotientInv(_GLQuotient):
    r"""The GL(h) quotient with the invariant metric.

    .. math:: \langle ξ, ζ \rangle = \mathrm{Re\,Tr}\big( M^{-1} ξ_G^H ζ_G + N^{-1} ξ_H^H ζ_H \big),
              \qquad M = G^H G,\; N = H^H H

    Horizontal vectors obey :math:`ξ_G^H G N = M H^H ξ_H`. The metric is complete.

    Parameters
    ----------
    n, m : int
        Rows of G and H. A point is one tensor (…, n + m, h), h ≤ min(n, m), of float32, float64 or complex dtype.
    relaxation : float
        ε of the floor σ̂_i = max(σ_i, ε σ_1) on the singular values of G Hᴴ, in the metric only.

    Notes
    -----
    Paper, §5.2. The last factor of the printed H^inv is ξ_H, not its transpose.

    Examples
    --------
    >>> import torch
    >>> manifold = GLQuotientInv(5, 4)
    >>> x = manifold.random(5 + 4, 2, dtype=torch.float64)
    >>> A = torch.tensor([[2.0, 1.0], [0.0, 0.5]], dtype=torch.float64)
    >>> y = manifold.act(x, A)
    >>> torch.allclose(manifold.product(x), manifold.product(y))
    True
    >>> u = manifold.proju(x, torch.ones_like(x))
    >>> torch.allclose(manifold.norm(x, u), manifold.norm(y, manifold.act(x + u, A) - y))
    True
    """

    name = "GLQuotientInv"
    __scaling__ = _GLQuotient.__scaling__.copy()
    _space_class = _InvTangentSpace


class GLQuotientMix(_GLQuotient):
    r"""The GL(h) quotient with the mixed metric.

    .. math:: \langle ξ, ζ \rangle = \mathrm{Re\,Tr}\big( N ξ_G^H ζ_G + M ξ_H^H ζ_H \big)
              = \mathrm{Re}\langle ξ_G H^H, ζ_G H^H \rangle + \mathrm{Re}\langle G ξ_H^H, G ζ_H^H \rangle

    Horizontal vectors obey :math:`G^H ξ_G N = M ξ_H^H H`. The metric is not complete: a geodesic can reach a
    rank-deficient matrix in finite time, and the ball of radius ρ stays on the manifold only while ρ < σ_h/√2.

    Parameters
    ----------
    n, m : int
        Rows of G and H. A point is one tensor (…, n + m, h), h ≤ min(n, m), of float32, float64 or complex dtype.
    relaxation : float
        ε of the floor σ̂_i = max(σ_i, ε σ_1) on the singular values of G Hᴴ, in the metric only.

    Notes
    -----
    Paper, §5.2.

    Examples
    --------
    >>> import torch
    >>> manifold = GLQuotientMix(5, 4)
    >>> x = manifold.origin(5 + 4, 2)
    >>> round(manifold.norm(x, torch.ones_like(x)).item() ** 2, 4)
    18.0
    """

    name = "GLQuotientMix"
    __scaling__ = _GLQuotient.__scaling__.copy()
    _space_class = _MixTangentSpace
