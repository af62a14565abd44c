r"""The canonical representative of an orbit of GL(h), and the two metrics there: every formula in which they differ.

Notation of :mod:`quotient_manifolds.manifold`. A formula of a metric is written for one factor, ``own``, given the
``other`` one; the formula of the other factor is the same with the two exchanged. It is a function of h × h matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .linalg import (
    NotFiniteError,
    check_dtype,
    check_tensors,
    finite,
    holds,
    largest,
    own_precision,
    power_of_two,
    sylvester,
)

#: One tensor for each of the two factors.
Pair = tuple[Tensor, Tensor]
#: Singular values of G Hᴴ below this many units of rounding, relative to the largest, count as zero.
RANK_TOLERANCE = 10.0
#: Factors whose largest entries are between the inverse of this and itself are not rescaled.
_ORDINARY = 2.0**16


@dataclass(frozen=True)
class Gauge:
    r"""A point in canonical gauge, and the group element that moves it there.

    With the thin QR factorisations :math:`G = Q_G R_G`, :math:`H = Q_H R_H` and the small singular value
    decomposition :math:`R_G R_H^H = U Σ V^H`,

    .. math:: \hat U = Q_G U,\quad \hat V = Q_H V,\quad \hat G = \hat U Σ^{1/2} = G A^{-1},\quad
              \hat H = \hat V Σ^{1/2} = H A^H,\qquad \hat G^H \hat G = \hat H^H \hat H = Σ .

    No Gram matrix of the given factors is formed, so the condition number is not squared.

    Attributes
    ----------
    x : Tensor
        The canonical representative, Ĝ above Ĥ, (…, n + m, h).
    n : int
        Rows of Ĝ.
    sigma : Tensor
        Singular values of G Hᴴ in descending order, (…, h), real: the invariants of the orbit.
    A, A_inv : Tensor
        Group element and its inverse, (…, h, h); rows of A and columns of A_inv that belong to σ_i = 0 are zero.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import canonical_gauge
    >>> G, H = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 0.5]])
    >>> gauge = canonical_gauge(G, H)
    >>> gauge.sigma
    tensor([6.0000, 1.5000])
    >>> torch.allclose(gauge.G, G @ gauge.A_inv), torch.allclose(gauge.G.mT @ gauge.G, gauge.sigma.diag())
    (True, True)
    """

    x: Tensor
    n: int
    sigma: Tensor
    A: Tensor
    A_inv: Tensor

    @property
    def G(self) -> Tensor:
        """First factor of the canonical representative, Û Σ^{1/2}, a view."""
        return self.x[..., : self.n, :]

    @property
    def H(self) -> Tensor:
        """Second factor of the canonical representative, V̂ Σ^{1/2}, a view."""
        return self.x[..., self.n :, :]

    def present(self, tolerance: float | None = None) -> Tensor:
        """Tell which directions are present: σ_i above ``tolerance`` σ_1, by default above rounding error; (…, h)."""
        tolerance = RANK_TOLERANCE * torch.finfo(self.sigma.dtype).eps if tolerance is None else tolerance
        return self.sigma > tolerance * self.sigma[..., :1]

    def times(self, unit: Tensor) -> Gauge:
        """Return the gauge of the point times a number, (…, 1, 1)."""
        sigma = self.sigma * unit.squeeze(-1) * unit.squeeze(-1)
        if not holds(sigma.isfinite() & ((sigma >= torch.finfo(sigma.dtype).tiny) | ~self.present())):
            raise ValueError(f"the singular values of G Hᴴ over- or underflow in {sigma.dtype}; rescale the pair")
        return Gauge(self.x * unit, self.n, sigma, self.A, self.A_inv)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Gauge:
        """Round to another precision, and move; real stays real and complex stays complex."""
        real = dtype.to_real()
        cast = real.to_complex() if self.x.is_complex() else real
        x, A, A_inv = (t.to(cast).to(device or t.device) for t in (self.x, self.A, self.A_inv))
        return Gauge(x, self.n, self.sigma.to(real).to(x.device), A, A_inv)


def canonical_gauge(G: Tensor, H: Tensor) -> Gauge:
    r"""Bring a pair into canonical gauge.

    Parameters
    ----------
    G, H : Tensor
        Factors of shape (…, n, h) and (…, m, h), float or complex, h ≤ min(n, m).

    Returns
    -------
    Gauge
        The canonical representative. Column phases are fixed so that the entry of largest modulus in every column of
        Û is real and positive: two representatives of one orbit give the same tensors wherever the singular values
        are distinct.

    Notes
    -----
    Dtype and device are those of the factors; half precision has no QR and SVD in torch. Rounding grows with the
    condition number of the representative: in float32 about 2e-4 of the largest entry at 1e4, so pass float64 factors
    and round with :meth:`Gauge.to`.

    Examples
    --------
    Two LoRA adapters with the same product have the same representative:

    >>> import torch
    >>> from quotient_manifolds import canonical_gauge
    >>> B, A = torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0, 2.0], [1.0, 1.0, 0.0]])
    >>> R = torch.tensor([[2.0, 1.0], [0.0, 0.5]])
    >>> one, other = canonical_gauge(B, A.mT), canonical_gauge(B @ R, (torch.linalg.inv(R) @ A).mT)
    >>> torch.allclose(one.x, other.x, atol=1e-5)
    True
    """
    check_tensors("a pair", G=G, H=H)
    check_dtype("a pair", G)
    if min(G.dim(), H.dim()) < 2 or G.shape[-1] != H.shape[-1] or G.shape[-1] > min(G.shape[-2], H.shape[-2]):
        shapes = f"{tuple(G.shape)} and {tuple(H.shape)}"
        raise ValueError(f"a pair has shapes (…, n, h) and (…, m, h) with h ≤ min(n, m), got {shapes}")
    return gauge_of(G, H)


@own_precision
def gauge_of(G: Tensor, H: Tensor) -> Gauge:
    """Return the :func:`canonical_gauge` of what is known to be a pair."""
    gauge, unit = gauge_in_units(G, H)
    return gauge if unit is None else gauge.times(unit)


def gauge_in_units(G: Tensor, H: Tensor) -> tuple[Gauge, Tensor | None]:
    """Return the canonical gauge of (G, H)/unit, and the power of two ``unit``, (…, 1, 1), or None for 1.

    All operations are homogeneous, so that those at (G, H) follow without over- or underflow. The sizes of G and H, of
    which the unit is the geometric mean, may differ by any factor: it becomes a part of the group element.
    """
    sizes = torch.stack(torch.broadcast_tensors(largest(G), largest(H)))
    unit = turn = None
    if not holds((sizes > 1 / _ORDINARY) & (sizes < _ORDINARY)):
        if not holds(sizes.isfinite()):
            raise NotFiniteError(f"the pair of shapes {tuple(G.shape)}, {tuple(H.shape)} has NaN or infinite entries")
        size_G, size_H = power_of_two(sizes.sqrt())  # of its root, so that the root of their product is one too
        G, H, unit, turn = G / size_G / size_G, H / size_H / size_H, size_G * size_H, size_G / size_H
    Q_G, R_G = torch.linalg.qr(G)
    Q_H, R_H = torch.linalg.qr(H)
    U, sigma, Vh = svd(R_G @ R_H.mH)
    V = Vh.mH
    U_hat, row = Q_G @ U, sigma.sqrt().unsqueeze(-2)
    peak = U_hat.gather(-2, U_hat.abs().argmax(dim=-2, keepdim=True))
    phase = peak.conj() / peak.abs()
    U, V, inverse = U * phase, V * phase, torch.where(row > 0, 1 / row, 0)
    A, A_inv = inverse.mT * (U.mH @ R_G), (R_H.mH @ V) * inverse
    if turn is not None:
        A, A_inv = A * turn, A_inv / turn
    return Gauge(torch.cat([U_hat * (phase * row), Q_H @ (V * row)], dim=-2), G.shape[-2], sigma, A, A_inv), unit


def svd(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition, or raise; some libraries return NaN for one that failed."""
    if X.grad_fn is not None:
        X = X.view_as(X)
        X.register_hook(_has_derivative)
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    if not finite(sigma):
        raise ValueError(f"the singular value decomposition of a matrix of shape {tuple(X.shape)} failed")
    return U, sigma, Vh


def _has_derivative(grad: Tensor | None) -> None:
    if grad is not None and not finite(grad):
        raise ValueError(
            "a canonical representative has no derivative where singular values are equal or 0; differentiate a "
            "function of the product G Hᴴ instead"
        )


# -- the two metrics ---------------------------------------------------------------------------------------------------


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
