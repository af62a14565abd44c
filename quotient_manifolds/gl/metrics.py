r"""The two metrics of the GL(h) quotient: every formula in which they differ.

Notation of :mod:`quotient_manifolds.gl`. A formula is written for one factor, ``own``, given the ``other`` one; the
formula of the other factor is the same with the two exchanged. Everything is a function of h × h matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..linalg import symmetric_part_doubled as sym2

__all__ = ["INV", "METRICS", "MIX", "Gram", "Metric", "Motion", "Pair", "Pull"]

#: One tensor for each of the two factors.
Pair = tuple[Tensor, Tensor]


class Gram(NamedTuple):
    """The Gram matrix of a factor, the floored one that the metric uses, and the inverse of that."""

    exact: Tensor
    floored: Tensor
    inverse: Tensor


class Motion(NamedTuple):
    """The products of a factor X, floored inverse Gram matrix ``inverse``, that moves with velocity v."""

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
    def weight(self, own: Gram, other: Gram) -> Tensor:
        """Return W of the factor."""

    @abstractmethod
    def inverse_weight(self, own: Gram, other: Gram) -> Tensor:
        """Return W⁻¹ of the factor: a covector P is represented by the vector P W⁻¹."""

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

    def weight(self, own: Gram, other: Gram) -> Tensor:
        return own.inverse

    def inverse_weight(self, own: Gram, other: Gram) -> Tensor:
        return own.floored

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

    def weight(self, own: Gram, other: Gram) -> Tensor:
        return other.floored

    def inverse_weight(self, own: Gram, other: Gram) -> Tensor:
        return other.inverse

    def weight_slope(self, own: Gram, own_speed: Tensor, other_speed: Tensor) -> Tensor:
        return other_speed

    def equation(self, own: Motion, other: Motion) -> Pair:
        return other.vv @ other.inverse, -sym2(other.vX) @ other.inverse

    def adjoint(self, own: Pull, other: Pull) -> tuple[Tensor, Tensor, Tensor]:
        return -other.inverse @ sym2(other.vX), -sym2(own.inverse @ other.pv), sym2(own.inverse @ other.pX)


INV, MIX = _Inv(), _Mix()
METRICS: dict[str, Metric] = {m.name: m for m in (INV, MIX)}
