"""A metric at one representative (G, H), and everything that follows from its formulas there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg import holds, is_differentiated, lifted_spectrum, sylvester, trace_product
from .gauge import Gauge
from .metrics import Gram, Metric, Motion, Pair, Pull

__all__ = ["LocalMetric", "canonical_metric", "moving_metric"]


@dataclass(frozen=True)
class LocalMetric:
    """A metric at one representative (G, H)."""

    metric: Metric
    factors: Pair
    grams: tuple[Gram, Gram]

    def weights(self) -> Pair:
        """Return (W_G, W_H)."""
        M, N = self.grams
        return self.metric.weight(M, N), self.metric.weight(N, M)

    def inverse_weights(self) -> Pair:
        """Return (W_G⁻¹, W_H⁻¹)."""
        M, N = self.grams
        return self.metric.inverse_weight(M, N), self.metric.inverse_weight(N, M)

    def inner(self, u: Pair, v: Pair) -> Tensor:
        """Compute Re Tr(W_G ξ_Gᴴ ζ_G + W_H ξ_Hᴴ ζ_H), (…)."""
        W_G, W_H = self.weights()
        return trace_product(W_G, u[0], v[0]) + trace_product(W_H, u[1], v[1])

    def against_point(self, u: Pair) -> Pair:
        """Return (Gᴴξ_G, Hᴴξ_H)."""
        return self.factors[0].mH @ u[0], self.factors[1].mH @ u[1]

    def vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        r"""Return Λ for which (ξ_G + GΛ, ξ_H − HΛᴴ) is horizontal, from Gᴴξ_G and Hᴴξ_H.

        Orthogonal to all vertical vectors means :math:`G^H ξ_G W_G = W_H ξ_H^H H`, which for Λ is
        :math:`W_H^{-1} M Λ + Λ N W_G^{-1} = ξ_H^H H W_G^{-1} - W_H^{-1} G^H ξ_G`. Paper, §5.2, which prints
        AΛ + ΛAᵀ = B for inv, which is right only for h = 1.
        """
        (M, N), (V_G, V_H) = self.grams, self.inverse_weights()
        return sylvester(V_H @ M.exact, N.exact @ V_G, H_eta.mH @ V_G - V_H @ G_xi)

    def horizontal(self, u: Pair) -> Pair:
        """Project on the horizontal space."""
        (G, H), L = self.factors, self.vertical_part(*self.against_point(u))
        return u[0] + G @ L, u[1] - H @ L.mH

    def motions(self, u: Pair, scale: Tensor | None = None) -> tuple[Motion, Motion]:
        """Return the products of both factors, for the velocity u or, with a row ``scale``, u · scale."""
        found = []
        for X, v, gram in zip(self.factors, u, self.grams, strict=True):
            vX, vv = v.mH @ X, v.mH @ v
            if scale is not None:
                vX, vv = scale.mT * vX, scale.mT * vv * scale
            found.append(Motion(gram.inverse, vX, vv))
        return found[0], found[1]

    def equations(self, G: Motion, H: Motion) -> tuple[Pair, Pair]:
        """State the geodesic equation of both factors."""
        return self.metric.equation(G, H), self.metric.equation(H, G)

    def acceleration(self, u: Pair) -> Pair:
        """Compute (G̈, Ḧ) = −Γ(u, u)."""
        (G, H), ((a, b), (c, d)) = self.factors, self.equations(*self.motions(u))
        return G @ a + u[0] @ b, H @ c + u[1] @ d

    def pulls(self, u: Pair, p: Pair, scale: Tensor | None = None) -> tuple[Pull, Pull]:
        """Return the products of both factors, also with a covector, for the velocity u or u · scale."""
        found = []
        for X, v, q, gram in zip(self.factors, u, p, self.grams, strict=True):
            vX, pv = v.mH @ X, q.mH @ v
            if scale is not None:
                vX, pv = scale.mT * vX, pv * scale
            found.append(Pull(gram.inverse, vX, q.mH @ X, pv))
        return found[0], found[1]

    def adjoints(self, G: Pull, H: Pull) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """For each factor, return (e, a, b): P e + X a + ξ b pulls the covector P back along the retraction."""
        identity = torch.eye(G.vX.shape[-1], dtype=G.vX.dtype, device=G.vX.device)
        (e, a, b), (f, c, d) = self.metric.adjoint(G, H), self.metric.adjoint(H, G)
        return (identity + 0.5 * e, 0.5 * a, 0.5 * b), (identity + 0.5 * f, 0.5 * c, 0.5 * d)


def canonical_metric(metric: Metric, gauge: Gauge, sigma_hat: Tensor, present: Tensor) -> LocalMetric:
    """Use that all Gram matrices are diagonal; nothing moves along absent directions."""
    inverse = torch.where(present, 1 / sigma_hat, 0)
    gram = Gram(*(torch.diag_embed(s).to(gauge.x.dtype) for s in (gauge.sigma, sigma_hat, inverse)))
    return LocalMetric(metric, (gauge.G, gauge.H), (gram, gram))


def moving_metric(metric: Metric, x: Tensor, gauge: Gauge, relaxation: float, present: Tensor) -> LocalMetric:
    """Compute the Gram matrices of x with the group element held constant.

    The formulas hold at every point nearby, where the Gram matrices are no longer diagonal: their derivatives are then
    exact, and no SVD is differentiated.
    """
    sigma, G, H = gauge.sigma, x[..., : gauge.n, :] @ gauge.A_inv, x[..., gauge.n :, :] @ gauge.A.mH
    sigma_hat, M, N = sigma.clamp_min(relaxation * sigma[..., :1]), G.mH @ G, H.mH @ H
    if is_differentiated(x) and not holds(sigma_hat <= sigma):
        phi = lifted_spectrum(M @ N, sigma, relaxation)
        M_hat, N_hat = phi @ M, N @ phi
    else:  # the floor does nothing, or its derivative is not needed
        floor = torch.diag_embed(sigma_hat - sigma).to(x.dtype)
        M_hat, N_hat = M + floor, N + floor
    absent = torch.diag_embed(~present).to(x.dtype)  # nothing has components there
    M_inv, N_inv = torch.linalg.inv(M_hat + absent), torch.linalg.inv(N_hat + absent)
    return LocalMetric(metric, (G, H), (Gram(M, M_hat, M_inv), Gram(N, N_hat, N_inv)))
