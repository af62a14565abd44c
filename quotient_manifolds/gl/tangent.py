r"""The horizontal space at one point of a GL(h) quotient: what the inv and the mix metric share.

Notation of :mod:`quotient_manifolds.gl`, where the formulas of the two metrics stand. All of them are evaluated at the
canonical representative of the point's orbit, where :math:`M = N = Σ` is diagonal: vectors are carried there by the
(constant) group element, and the result is carried back. Equivariance makes this exact, and it keeps the condition
number of the representative out of every inverse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ..base import QuotientManifold, TangentSpace, is_differentiated, standard_normal
from ..linalg import holds, in_own_precision, lifted_spectrum, pack, trace_product
from . import geodesic as geodesics
from .gauge import Gauge

__all__ = ["GLTangentSpace", "Products"]


class Products:
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
        """Compute vᴴX."""
        return self._left(self._c.mH @ self._X)

    @cached_property
    def cc(self) -> Tensor:
        """Compute cᴴc."""
        return self._c.mH @ self._c

    @cached_property
    def vv(self) -> Tensor:
        """Compute vᴴv."""
        return self._right(self._left(self.cc))

    @cached_property
    def pX(self) -> Tensor:
        """Compute pᴴX."""
        assert self._p is not None
        return self._p.mH @ self._X

    @cached_property
    def pv(self) -> Tensor:
        """Compute pᴴv."""
        assert self._p is not None
        return self._right(self._p.mH @ self._c)


def _sum_of_products(out: Tensor, *terms: tuple[Tensor, Tensor]) -> None:
    """Write Σ X A into ``out``, for matrices A that are small."""
    (X, A), *rest = terms
    if out.dim() != 3 or any(t.dim() != 3 for pair in terms for t in pair):
        out.copy_(X @ A + sum(Y @ B for Y, B in rest))
        return
    torch.bmm(X, A, out=out)
    for Y, B in rest:
        out.baddbmm_(Y, B)


@in_own_precision
class GLTangentSpace(TangentSpace):
    r"""The horizontal space at one point of a GL(h) quotient.

    Two kinds of Gram matrices occur. M and N are those of the factors. The metric uses :math:`\hat M, \hat N`, in
    which the singular values of :math:`G H^H` have the floor :math:`\hat σ_i = \max(σ_i, ε σ_1)` with ε the manifold's
    ``relaxation``; σ are invariants of the orbit, so the floor keeps the invariance, and G and H stay exact.

    Attributes
    ----------
    manifold : GLQuotientInv or GLQuotientMix
    x : Tensor
        The point, (…, n + m, h), at whose representative vectors are given and returned.
    gauge : Gauge
        Canonical representative and the group element that leads there.
    sigma_hat : Tensor
        σ̂, (…, h).
    present : Tensor
        (…, h), which of the directions the point has: σ_i above a tolerance relative to σ_1.
    G, H, M, N, M_hat, N_hat, M_inv, N_inv : Tensor
        At the canonical representative; the inverses are those of the metric's Gram matrices.

    Notes
    -----
    Made by ``manifold.tangent_space_at(x)``, or from a known gauge by :meth:`GLQuotientInv.at_gauge
    <quotient_manifolds.GLQuotientInv.at_gauge>`. The paper relaxes Gram matrices to GᴴG + εI (§5.2), which depends on
    the representative; see :func:`quotient_manifolds.additive.additive_tangent_space`.

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
        manifold: QuotientManifold,
        x: Tensor,
        gauge: Gauge,
        *,
        relaxation: float = 0.0,
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
        self.sigma_hat = sigma.clamp_min(relaxation * sigma[..., :1])
        diagonal = torch.diag_embed(sigma).to(x.dtype)
        diagonal_hat = torch.diag_embed(self.sigma_hat).to(x.dtype)
        if differentiable:
            # With the group element held constant the formulas hold at every point nearby, where the Gram matrices
            # are no longer diagonal: their derivatives are then exact, and no SVD is differentiated.
            G0, H0 = x.split(manifold.row_split(), dim=-2)
            self.G, self.H = G0 @ gauge.A_inv, H0 @ gauge.A.mH
            self.M, self.N = self.G.mH @ self.G, self.H.mH @ self.H
            if is_differentiated(x) and not holds(self.sigma_hat <= sigma, unseen=False):
                phi = lifted_spectrum(self.M @ self.N, sigma, relaxation)
                self.M_hat, self.N_hat = phi @ self.M, self.N @ phi
            else:  # the floor does nothing, or its derivative is not asked for
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

    def split(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Split into (ξ_G, ξ_H), views (…, n, h) and (…, m, h)."""
        first, second = u.split(self.manifold.row_split(), dim=-2)
        return first, second

    def to_gauge(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Carry a tangent vector along: (ξ_G A⁻¹, ξ_H Aᴴ)."""
        xi, eta = self.split(u)
        return (xi, eta) if self._at_canonical else (xi @ self.gauge.A_inv, eta @ self.gauge.A.mH)

    def from_gauge(self, xi: Tensor, eta: Tensor) -> Tensor:
        """Carry a tangent vector back: (ξ_G A, ξ_H A⁻ᴴ), packed."""
        return pack(xi, eta) if self._at_canonical else pack(xi @ self.gauge.A, eta @ self.gauge.A_inv.mH)

    def dual_to_gauge(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """Carry a Euclidean gradient along: (e_G Aᴴ, e_H A⁻¹), so that Re⟨e, ξ⟩ stays."""
        P, R = self.split(e)
        return (P, R) if self._at_canonical else (P @ self.gauge.A.mH, R @ self.gauge.A_inv)

    def dual_from_gauge(self, P: Tensor, R: Tensor) -> Tensor:
        """Carry a Euclidean gradient back: (P A⁻ᴴ, R A), packed."""
        return pack(P, R) if self._at_canonical else pack(P @ self.gauge.A_inv.mH, R @ self.gauge.A)

    # -- what the two metrics differ in, at the canonical representative ---------------------------------------------

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Give (W_G, W_H) of the metric Re Tr(W_G ξ_Gᴴ ζ_G + W_H ξ_Hᴴ ζ_H)."""
        raise NotImplementedError

    def _vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        """Give Λ for which (ξ_G + GΛ, ξ_H − HΛᴴ) is horizontal, from Gᴴξ_G and Hᴴξ_H."""
        raise NotImplementedError

    def _inverse_weights(self) -> tuple[Tensor, Tensor]:
        """Give (W_G⁻¹, W_H⁻¹): a covector (P, R) is represented by the vector (P W_G⁻¹, R W_H⁻¹)."""
        raise NotImplementedError

    def _acceleration_matrices(self, G: Products, H: Products) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Give ((a, b), (c, d)) with acceleration = (G a + ξ_G b, H c + ξ_H d)."""
        raise NotImplementedError

    def _adjoint_matrices(self, G: Products, H: Products) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Give ((e, a, b), (f, c, d)) with (D acceleration)ᴴ(P, R) = (P e + G a + ξ_G b, R f + H c + ξ_H d)."""
        raise NotImplementedError

    #: "inv" or "mix".
    metric: str
    #: Exponent p of the column scale σ̂^p that makes the metric the identity in canonical gauge.
    scale_exponent: float

    # -- public ----------------------------------------------------------------------------------------------------

    def inner(self, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Compute Re Tr(W_G ξ_Gᴴ ζ_G + W_H ξ_Hᴴ ζ_H), W = (M̂⁻¹, N̂⁻¹) for inv, (N̂, M̂) for mix; (…) or (…, 1, 1)."""
        xi, eta = self.to_gauge(u)
        zeta, nu = (xi, eta) if v is None else self.to_gauge(v)
        W_G, W_H = self._weights()
        result = trace_product(W_G, xi, zeta) + trace_product(W_H, eta, nu)
        return result[..., None, None] if keepdim else result

    def proju(self, u: Tensor) -> Tensor:
        r"""Project on the horizontal space: :math:`(ξ_G + GΛ, ξ_H - HΛ^H)`; Λ depends on the metric.

        Notes
        -----
        Paper, §5.2, Λ^inv and Λ^mix. For inv the paper prints AΛ + ΛAᵀ = B, which is right only for h = 1; the
        equation is AΛᴴ + ΛᴴA = B with the same A = MN and B.
        """
        # Only h × h matrices are carried to the gauge: Ĝᴴ(ξ A⁻¹) = (Ĝᴴξ) A⁻¹, and (ĜΛ) A = Ĝ (ΛA).
        xi, eta = self.split(u)
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
        P, R = (X @ W for X, W in zip(self.dual_to_gauge(u), self._inverse_weights(), strict=True))
        L = self._vertical_part(self.G.mH @ P, self.H.mH @ R)
        return self.from_gauge(P + self.G @ L, R - self.H @ L.mH)

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
        covector, weights = self.dual_to_gauge(egrad), [W * there for W in self._inverse_weights()]
        small = [Products(X, P, matrix=W) for X, P, W in zip((self.G, self.H), covector, weights, strict=True)]
        square = sum((W.mT * s.cc).real.sum(dim=(-2, -1)) for W, s in zip(weights, small, strict=True))
        accelerations = self._acceleration_matrices(*small)

        def end(t: float) -> Tensor:
            carriers = (None, None) if self._at_canonical else (self.gauge.A, self.gauge.A_inv.mH)
            out = torch.empty_like(self.x)
            for part, x, X, P, W, (a, b), A in zip(
                self.split(out), self.split(self.x), (self.G, self.H), covector, weights, accelerations, carriers,
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
        xi, eta = self.to_gauge(u)
        (a, b), (c, d) = self._acceleration_matrices(Products(self.G, xi), Products(self.H, eta))
        return self.from_gauge(self.G @ a + xi @ b, self.H @ c + eta @ d)

    def geodesic(self, u: Tensor, t: Any = 1.0, *, tol: float | None = None) -> tuple[Tensor, Tensor]:
        """Follow the exact geodesic with horizontal velocity u.

        inv: closed form; mix: the reduced ordinary differential equation. See :mod:`quotient_manifolds.gl.geodesic`.

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
        """Follow the geodesic to time 1 by steps of the classical Runge–Kutta method, (…, n + m, h); never raises."""
        X, xi, Y, eta, sigma = self._whitened(u)
        return self._unwhitened(*geodesics.rk4(self.metric, X, xi, Y, eta, sigma, 1.0, steps))[0]

    def exit_time(self, u: Tensor, until: float = 1.0) -> Tensor:
        """Give the time in (0, until] at which the geodesic leaves the manifold, inf where it does not; (…)."""
        X, xi, Y, eta, sigma = self._whitened(u)
        if self.metric == "inv":  # the inv metric is complete
            return torch.full(xi.shape[:-2], torch.inf, dtype=sigma.dtype, device=u.device)
        return geodesics.exit_time(X, xi, Y, eta, sigma, until)

    def _roots(self) -> tuple[Tensor, Tensor]:
        """Give √σ and 1/√σ as rows, both 0 for directions that the point lacks."""
        present = self.present.unsqueeze(-2)
        root = torch.where(
            present, self.gauge.sigma.unsqueeze(-2).sqrt(), torch.ones_like(self.sigma_hat).unsqueeze(-2)
        )
        return root * present, present / root

    def _whitened(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Give (X, ξ, Y, η, σ): orthonormal columns, vectors whose metric is the identity, and the scale."""
        xi, eta = self.to_gauge(u)
        root, inverse = self._roots()
        scale = inverse if self.metric == "inv" else root
        sigma = torch.where(self.present, self.gauge.sigma, torch.zeros_like(self.gauge.sigma))
        return self.G * inverse, xi * scale, self.H * inverse, eta * scale, sigma

    def _unwhitened(self, X: Tensor, xi: Tensor, Y: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """Undo :meth:`_whitened`: point and velocity at the representative at hand; what is lacking stays put."""
        root, inverse = self._roots()
        scale = root if self.metric == "inv" else inverse
        still = ~self.present.unsqueeze(-2)
        point = self.from_gauge(X * root + self.G * still, Y * root + self.H * still)
        return point, self.from_gauge(xi * scale, eta * scale)

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
        P, R = self.dual_to_gauge(egrad)
        xi, eta = self.to_gauge(u)
        (e, a, b), (f, c, d) = self._adjoint_matrices(Products(self.G, xi, P), Products(self.H, eta, R))
        return self.dual_from_gauge(P + 0.5 * (P @ e + self.G @ a + xi @ b), R + 0.5 * (R @ f + self.H @ c + eta @ d))

    def to_covector(self, u: Tensor) -> Tensor:
        r"""Give the Euclidean covector :math:`v \mapsto \langle u, v \rangle`, :math:`(ξ_G W_G, ξ_H W_H)` in gauge."""
        xi, eta = self.to_gauge(u)
        W_G, W_H = self._weights()
        return self.dual_from_gauge(xi @ W_G, eta @ W_H)

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        r"""Draw a standard Gaussian horizontal vector.

        In coordinates that make the metric the identity, :math:`(E_1 \hat V, E_2^H \hat U)` with Gaussian
        :math:`E_1, E_2 \in K^{n \times m}`, projected. Equal random numbers give the same vector of the quotient at
        every representative of an orbit, and no rule for the signs of singular vectors enters.
        """
        n, m = self.manifold.row_split()
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
        xi, eta = self.to_gauge(u)
        W_G, W_H = self._weights()
        return self.G.mH @ (xi @ W_G) - (eta @ W_H).mH @ self.H

    def vertical_covector(self, L: Tensor) -> Tensor:
        r"""Give the Euclidean covector :math:`u \mapsto \langle v_Λ, u \rangle`, the adjoint of the vertical moment."""
        W_G, W_H = self._weights()
        return self.dual_from_gauge(self.G @ L @ W_G, -self.H @ L.mH @ W_H)

    def scale(self, exponent: float) -> Tensor:
        """Give σ̂^exponent as a row (…, 1, h), zero for directions that the point does not have."""
        s = self.sigma_hat
        power = torch.where(s > 0, s, torch.ones_like(s)) ** exponent
        return torch.where(self.present, power, torch.zeros_like(s)).unsqueeze(-2)

    def coordinates(self, u: Tensor) -> Tensor:
        r"""Give coordinates in which the metric is the identity, :math:`\|u\|_x = \|c\|_F`.

        In canonical gauge :math:`ξ \hat Σ^{-1/2}` (inv) or :math:`ξ \hat Σ^{1/2}` (mix). Directions that the point
        lacks (σ_i = 0) have coordinate 0.
        """
        return pack(*self.to_gauge(u)) * self.scale(-self.scale_exponent)

    def from_coordinates(self, c: Tensor) -> Tensor:
        """Invert :meth:`coordinates`, but for the directions that the point lacks; shape of c."""
        return self.from_gauge(*self.split(c * self.scale(self.scale_exponent)))

    def dual_coordinates(self, e: Tensor) -> Tensor:
        """Give the coordinates of a Euclidean gradient: ⟨dual_coordinates(e), coordinates(u)⟩_F = Re⟨e, u⟩."""
        return pack(*self.dual_to_gauge(e)) * self.scale(self.scale_exponent)

    def retr_coordinates(self, c: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Give ``retr(from_coordinates(c))``, in canonical gauge, in fewer passes over c."""
        scale = self.scale(self.scale_exponent)
        xi, eta = self.split(c)
        accelerations = self._acceleration_matrices(
            Products(self.G, xi, scale=scale), Products(self.H, eta, scale=scale)
        )
        identity = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
        out = torch.empty_like(c) if out is None else out
        for part, X, v, (a, b) in zip(self.split(out), (self.G, self.H), (xi, eta), accelerations, strict=True):
            _sum_of_products(part, (X, identity + 0.5 * a), (v, scale.mT * (identity + 0.5 * b)))
        return out

    def pullback_coordinates(
        self, c: Tensor, egrad: Tensor, factor: float = 1.0, *, out: Tensor | None = None
    ) -> Tensor:
        """Give the coordinates of the horizontal part of ``pullback(from_coordinates(c), egrad)``, times a factor.

        In canonical gauge, in fewer passes over c: all that is done is to add up multiples of the gradient, the point
        and c by h × h matrices, and what the projection needs follows from these.
        """
        scale = self.scale(self.scale_exponent)
        vectors, covectors, points = self.split(c), self.split(egrad), (self.G, self.H)
        small = [Products(X, v, p, scale) for X, v, p in zip(points, vectors, covectors, strict=True)]
        identity = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
        # Q = P (I + e/2) + X a/2 + ξ b/2 is the pulled back covector, and Xᴴ Q = (PᴴX)ᴴ (I + e/2) + …
        matrices = [(identity + 0.5 * e, 0.5 * a, 0.5 * b) for e, a, b in self._adjoint_matrices(*small)]
        inner = [
            s.pX.mH @ e + gram @ a + s.vX.mH @ b
            for s, gram, (e, a, b) in zip(small, (self.M, self.N), matrices, strict=True)
        ]
        L = self._vertical_part(inner[0] * scale**2, inner[1] * scale**2)
        vertical, back = (L, -L.mH), self.scale(-self.scale_exponent)
        out = torch.empty_like(c) if out is None else out
        for part, X, v, p, (e, a, b), V in zip(
            self.split(out), points, vectors, covectors, matrices, vertical, strict=True
        ):
            _sum_of_products(
                part, (p, factor * e * scale), (X, factor * (a * scale + V * back)), (v, factor * scale.mT * b * scale)
            )
        return out

    def project_coordinates(self, c: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Project coordinates on those of horizontal vectors, in canonical gauge; shape of c."""
        scale, back = self.scale(self.scale_exponent), self.scale(-self.scale_exponent)
        xi, eta = self.split(c)
        L = self._vertical_part((self.G.mH @ xi) * scale, (self.H.mH @ eta) * scale)
        out = torch.empty_like(c) if out is None else out
        for part, v, X, V in zip(self.split(out), (xi, eta), (self.G, self.H), (L, -L.mH), strict=True):
            torch.mul(v, self.present.unsqueeze(-2), out=part)
            if part.dim() == 3:
                part.baddbmm_(X, V * back)
            else:
                part += X @ (V * back)
        return out
