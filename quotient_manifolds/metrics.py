r"""The two metrics of the GL(h) quotient: every formula in which they differ.

Notation of :mod:`quotient_manifolds.manifold`. A formula is written for one factor, ``own``, given the ``other`` one;
the formula of the other factor is the same with the two exchanged. Everything is a function of h × h matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .linalg import sylvester

#: One tensor for each of the two factors.
Pair = tuple[Tensor, Tensor]


def sym2(C: Tensor) -> Tensor:
    """Return C + Cᴴ."""
    return C + C.mH


class Gram(NamedTuple):
    """The Gram matrix of a factor, and its inverse, which is 0 along absent directions."""

    matrix: Tensor
    inverse: Tensor


class Motion(NamedTuple):
    """The products of a factor X, inverse Gram matrix ``inverse``, that moves with velocity v."""

    inverse: Tensor
    vX: Tensor  # vᴴX
    vv: Tensor  # vᴴv


class Pull(NamedTuple):
    """The products of a factor with a covector p, for the adjoint; the large product vᴴv is not needed."""

    inverse: Tensor
    vX: Tensor
    pX: Tensor  # pᴴX
    pv: Tensor  # pᴴv


class Metric(ABC):
    r"""A metric :math:`\mathrm{Re\,Tr}(W_G ξ_G^H ζ_G + W_H ξ_H^H ζ_H)`."""

    name: ClassVar[str]
    #: p of the column scale σ̂^p that makes the metric the identity in canonical gauge.
    scale_exponent: ClassVar[float]
    #: Whether all geodesics exist for all times. Those of inv do, and have a closed form.
    complete: ClassVar[bool]

    @abstractmethod
    def weights(self, own: Gram, other: Gram) -> Pair:
        """Return W and W⁻¹ of the factor: a covector P is represented by the vector P W⁻¹."""

    @abstractmethod
    def weight_slope(self, own: Gram, own_speed: Tensor, other_speed: Tensor) -> Tensor:
        """Differentiate Tr(W_G ξ_Gᴴξ_G + W_H ξ_Hᴴξ_H) in the factor's Gram matrix, for given speeds ξᴴξ."""

    @abstractmethod
    def equation(self, own: Motion, other: Motion) -> Pair:
        """State the geodesic equation: (a, b) with Ẍ = X a + Ẋ b."""

    @abstractmethod
    def adjoint(self, own: Pull, other: Pull) -> tuple[Tensor, Tensor, Tensor]:
        """Return (e, a, b): the factor's part of (D equation)ᴴ(P, Q) is P e + X a + Ẋ b.

        It is derived by hand, so that the pull-back and the projection after it reduce to one sum of three products of
        the size of the weights. Automatic differentiation of the retraction takes 1.8 times as long (float32, on a
        CPU).
        """


class _Inv(Metric):
    r"""The inv metric (paper, §5.2 and App. B); the factors do not interact.

    .. math:: W_G = M^{-1}, \qquad \mathrm{grad}_G = \nabla_G M, \qquad
              \ddot G = \dot G M^{-1} (\dot G^H G + G^H \dot G) - G M^{-1} \dot G^H \dot G
    """

    name, scale_exponent, complete = "inv", 0.5, True

    def weights(self, own: Gram, other: Gram) -> Pair:
        return own.inverse, own.matrix

    def weight_slope(self, own: Gram, own_speed: Tensor, other_speed: Tensor) -> Tensor:
        return -own.inverse @ own_speed @ own.inverse

    def equation(self, own: Motion, other: Motion) -> Pair:
        return -own.inverse @ own.vv, own.inverse @ sym2(own.vX)

    def adjoint(self, own: Pull, other: Pull) -> tuple[Tensor, Tensor, Tensor]:
        return sym2(own.vX) @ own.inverse, sym2(own.pv @ own.inverse), -sym2(own.pX @ own.inverse)


class _Mix(Metric):
    r"""The mix metric (paper, §5.2 and Eq. 12); each factor weights the other.

    .. math:: W_G = N, \qquad \mathrm{grad}_G = \nabla_G N^{-1}, \qquad
              \ddot G = \big[ G \dot H^H \dot H - \dot G (\dot H^H H + H^H \dot H) \big] N^{-1}
    """

    name, scale_exponent, complete = "mix", -0.5, False

    def weights(self, own: Gram, other: Gram) -> Pair:
        return other.matrix, other.inverse

    def weight_slope(self, own: Gram, own_speed: Tensor, other_speed: Tensor) -> Tensor:
        return other_speed

    def equation(self, own: Motion, other: Motion) -> Pair:
        return other.vv @ other.inverse, -sym2(other.vX) @ other.inverse

    def adjoint(self, own: Pull, other: Pull) -> tuple[Tensor, Tensor, Tensor]:
        return -other.inverse @ sym2(other.vX), -sym2(own.inverse @ other.pv), sym2(own.inverse @ other.pX)


INV, MIX = _Inv(), _Mix()
METRICS: dict[str, Metric] = {m.name: m for m in (INV, MIX)}


@dataclass(frozen=True)
class LocalMetric:
    """A metric at one representative (G, H), and everything that follows from its formulas there.

    ``weights`` and ``inverse_weights`` are (W_G, W_H) and (W_G⁻¹, W_H⁻¹).
    """

    metric: Metric
    factors: Pair
    grams: tuple[Gram, Gram]
    weights: Pair
    inverse_weights: Pair

    @classmethod
    def of(cls, metric: Metric, factors: Pair, M: Gram, N: Gram) -> LocalMetric:
        """Compute the weights from Gram matrices."""
        (W_G, V_G), (W_H, V_H) = metric.weights(M, N), metric.weights(N, M)
        return cls(metric, factors, (M, N), (W_G, W_H), (V_G, V_H))

    @classmethod
    def canonical(cls, metric: Metric, factors: Pair, sigma: Tensor, present: Tensor) -> LocalMetric:
        """Use that both Gram matrices are one and diagonal; nothing moves along absent directions."""
        dtype, inverse = factors[0].dtype, torch.where(present, 1 / sigma, 0)
        gram = Gram(torch.diag_embed(sigma).to(dtype), torch.diag_embed(inverse).to(dtype))
        W, V = metric.weights(gram, gram)
        return cls(metric, factors, (gram, gram), (W, W), (V, V))

    @classmethod
    def moving(cls, metric: Metric, factors: Pair, present: Tensor) -> LocalMetric:
        """Compute the Gram matrices of factors that move while the group element that made them canonical is constant.

        The formulas hold at every point nearby, where the Gram matrices are no longer diagonal: their derivatives are
        then exact, and no SVD is differentiated.
        """
        absent = torch.diag_embed(~present).to(factors[0].dtype)  # nothing has components there
        grams = [X.mH @ X for X in factors]
        return cls.of(metric, factors, *(Gram(M, torch.linalg.inv(M + absent)) for M in grams))

    def inner(self, u: Pair, v: Pair) -> Tensor:
        """Compute Re Tr(W_G ξ_Gᴴ ζ_G + W_H ξ_Hᴴ ζ_H), (…)."""
        (W_G, W_H), K_G, K_H = self.weights, u[0].mH @ v[0], u[1].mH @ v[1]
        return (W_G.mT * K_G + W_H.mT * K_H).real.sum(dim=(-2, -1))

    def vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        r"""Return Λ for which (ξ_G + GΛ, ξ_H − HΛᴴ) is horizontal, from Gᴴξ_G and Hᴴξ_H.

        Orthogonal to all vertical vectors means :math:`G^H ξ_G W_G = W_H ξ_H^H H`, which for Λ is
        :math:`W_H^{-1} M Λ + Λ N W_G^{-1} = ξ_H^H H W_G^{-1} - W_H^{-1} G^H ξ_G`. Paper, §5.2, which prints
        AΛ + ΛAᵀ = B for inv, which is right only for h = 1.
        """
        (M, N), (V_G, V_H) = self.grams, self.inverse_weights
        return sylvester(V_H @ M.matrix, N.matrix @ V_G, H_eta.mH @ V_G - V_H @ G_xi)

    def equations(self, u: Pair, scale: Tensor | None = None) -> tuple[Pair, Pair]:
        """State the geodesic equation of both factors, for the velocity u or, with a row ``scale``, u · scale."""
        motions = []
        for X, v, gram in zip(self.factors, u, self.grams, strict=True):
            vX, vv = v.mH @ X, v.mH @ v
            if scale is not None:
                vX, vv = scale.mT * vX, scale.mT * vv * scale
            motions.append(Motion(gram.inverse, vX, vv))
        G, H = motions
        return self.metric.equation(G, H), self.metric.equation(H, G)

    def adjoints(self, u: Pair, p: Pair, scale: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For each factor, return (e, a, b, XᴴQ): Q = P e + X a + ξ b pulls the covector P back along the retraction.

        The velocity ξ is u times the row ``scale``.
        """
        pulls = []
        for X, v, q, gram in zip(self.factors, u, p, self.grams, strict=True):
            pulls.append(Pull(gram.inverse, scale.mT * (v.mH @ X), q.mH @ X, (q.mH @ v) * scale))
        G, H = pulls
        one = torch.eye(scale.shape[-1], dtype=G.vX.dtype, device=scale.device)
        found = []
        for own, other, gram in ((G, H, self.grams[0]), (H, G, self.grams[1])):
            e, a, b = self.metric.adjoint(own, other)
            e, a, b = one + 0.5 * e, 0.5 * a, 0.5 * b
            found.append((e, a, b, own.pX.mH @ e + gram.matrix @ a + own.vX.mH @ b))
        return found
