"""The canonical representative of an orbit of GL(h)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .linalg import (
    NotFiniteError,
    as_count,
    check_dtype,
    check_tensors,
    finite,
    holds,
    largest,
    own_precision,
    pack,
    power_of_two,
)

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
    U, sigma, Vh = _svd(R_G @ R_H.mH)
    V = Vh.mH
    U_hat, row = Q_G @ U, sigma.sqrt().unsqueeze(-2)
    peak = U_hat.gather(-2, U_hat.abs().argmax(dim=-2, keepdim=True))
    phase = peak.conj() / peak.abs()
    U, V, inverse = U * phase, V * phase, torch.where(row > 0, 1 / row, 0)
    A, A_inv = inverse.mT * (U.mH @ R_G), (R_H.mH @ V) * inverse
    if turn is not None:
        A, A_inv = A * turn, A_inv / turn
    return Gauge(torch.cat([U_hat * (phase * row), Q_H @ (V * row)], dim=-2), G.shape[-2], sigma, A, A_inv), unit


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
    U, sigma, Vh = _svd(X / unit / unit)
    sigma = sigma[..., :h]
    if not holds(sigma[..., -1] > RANK_TOLERANCE * torch.finfo(sigma.dtype).eps * sigma[..., 0]):
        raise ValueError(f"the matrix has rank below {h}, so it is not the product of any point of the manifold")
    return pack(U[..., :h], Vh.mH[..., :h]) * (sigma.sqrt().unsqueeze(-2) * unit)


def _svd(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
