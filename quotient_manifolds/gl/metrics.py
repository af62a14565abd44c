r"""The two metrics of the GL(h) quotient: every formula in which they differ, once.

Notation of :mod:`quotient_manifolds.gl`. A metric is its weights, the vertical part of a vector, and the geodesic
equation with its adjoint, all at the canonical representative, where the Gram matrices are diagonal.
"""

from __future__ import annotations

from torch import Tensor

from ..linalg import sylvester
from ..linalg import symmetric_part_doubled as sym2
from .tangent import GLTangentSpace, Products

__all__ = ["InvTangentSpace", "MixTangentSpace"]


class InvTangentSpace(GLTangentSpace):
    r"""The horizontal space of the inv metric.

    .. math:: W_G = M^{-1},\; W_H = N^{-1}, \qquad
              MN\,Λ^H + Λ^H MN = M H^H ξ_H - ξ_G^H G N, \qquad
              \mathrm{grad} = (\nabla_G M, \nabla_H N),
    .. math:: \ddot G = \dot G M^{-1} (\dot G^H G + G^H \dot G) - G M^{-1} \dot G^H \dot G
              \quad\text{(H likewise with N)}

    Notes
    -----
    Paper, §5.2 and App. B. The paper prints AΛ + ΛAᵀ = B, which is right only for h = 1.
    """

    metric = "inv"
    scale_exponent = 0.5

    def _weights(self) -> tuple[Tensor, Tensor]:
        return self.M_inv, self.N_inv

    def _inverse_weights(self) -> tuple[Tensor, Tensor]:
        return self.M_hat, self.N_hat

    def _vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        # (M̂N) X + X (MN̂) = M̂ Hᴴ ξ_H − ξ_Gᴴ G N̂ with X = Λᴴ
        B = self.M_hat @ H_eta - G_xi.mH @ self.N_hat
        return sylvester(self.M_hat @ self.N, self.M @ self.N_hat, B).mH

    def _acceleration_matrices(self, G: Products, H: Products) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def one(s: Products, gram_inv: Tensor) -> tuple[Tensor, Tensor]:
            return -gram_inv @ s.vv, gram_inv @ sym2(s.vX)

        return one(G, self.M_inv), one(H, self.N_inv)

    def _adjoint_matrices(self, G: Products, H: Products) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        def one(s: Products, gram_inv: Tensor) -> tuple[Tensor, ...]:
            return sym2(s.vX) @ gram_inv, sym2(s.pv @ gram_inv), -sym2(s.pX @ gram_inv)

        return one(G, self.M_inv), one(H, self.N_inv)


class MixTangentSpace(GLTangentSpace):
    r"""The horizontal space of the mix metric.

    .. math:: W_G = N,\; W_H = M, \qquad
              Λ = \tfrac12 \big( ξ_H^H H N^{-1} - M^{-1} G^H ξ_G \big), \qquad
              \mathrm{grad} = (\nabla_G N^{-1}, \nabla_H M^{-1}),
    .. math:: \ddot G = \big[ G \dot H^H \dot H - \dot G (\dot H^H H + H^H \dot H) \big] N^{-1}
              \quad\text{(H likewise with M)}

    Notes
    -----
    Paper, §5.2 and Eq. 12.
    """

    metric = "mix"
    scale_exponent = -0.5

    def _weights(self) -> tuple[Tensor, Tensor]:
        return self.N_hat, self.M_hat

    def _inverse_weights(self) -> tuple[Tensor, Tensor]:
        return self.N_inv, self.M_inv

    def _vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        # MΛN̂ + M̂ΛN = M̂ ξ_Hᴴ H − Gᴴ ξ_G N̂, divided by M̂ on the left and N̂ on the right.
        B = H_eta.mH @ self.N_inv - self.M_inv @ G_xi
        return sylvester(self.M_inv @ self.M, self.N @ self.N_inv, B)

    def _acceleration_matrices(self, G: Products, H: Products) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def one(other: Products, gram_inv: Tensor) -> tuple[Tensor, Tensor]:
            return other.vv @ gram_inv, -sym2(other.vX) @ gram_inv

        return one(H, self.N_inv), one(G, self.M_inv)

    def _adjoint_matrices(self, G: Products, H: Products) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        def one(other: Products, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
            # i is the inverse Gram matrix of the other factor, j that of the factor itself.
            return -i @ sym2(other.vX), -sym2(j @ other.pv), sym2(j @ other.pX)

        return one(H, self.N_inv, self.M_inv), one(G, self.M_inv, self.N_inv)
