r"""The metric of the optimisers: its floor, and the transport of moments.

Notation as in the geometry: :math:`M = G^H G`, :math:`N = H^H H`; s is what the network multiplies the
product by, and σ are the singular values of :math:`s G H^H`. The mix metric of :math:`(sG, H)` measures a step by the
change of that matrix, with the weights :math:`s^2 N` for G and :math:`s^2 M` for H. It breaks down at :math:`G = 0`,
where LoRA starts. Here the weight of H is replaced by

.. math:: \hat M = s^2 M + N^{-1},

which an element A of the group transforms into :math:`A^{-H} \hat M A^{-1}`, like M, so the floor depends only on the
orbit. In the gauge in which H has orthonormal columns it replaces every :math:`σ_i^2` by :math:`σ_i^2 + 1`. Where σ is
small, a step of length η thus moves sG by about η, and H in proportion to σ. The second-order term in the change of the
product, :math:`s ξ_G ξ_H^H`, is of the order of η², however small σ is. Nothing depends on s if :math:`sG` stays.

N is not changed, because the *anchor* H has full column rank. Where it has not (peft's embeddings start with A = 0),
the two factors swap roles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import in_double

__all__ = ["Preconditioner", "RidgePreconditioner", "gram", "trace", "wide"]

#: Condition of H at which a pair moves to another gauge. Rounding to float32 then changes the product by about 1e-5.
_CONDITION = 1e2
#: So does a pair whose H is larger or smaller than 1 by this factor: inverses would leave the range of float32.
_SIZE = 1e12


def wide(X: Tensor) -> Tensor:
    """Widen to double precision, in which small matrices are computed, where the device supports it."""
    return X if X.device.type == "mps" else in_double(X)


def trace(S: Tensor) -> Tensor:
    """Compute the real part of the trace, (…)."""
    return S.diagonal(dim1=-2, dim2=-1).real.sum(-1)


def gram(X: Tensor, Y: Tensor | None = None) -> Tensor:
    """Return Xᴴ Y in double precision, (…, h, h)."""
    X = wide(X)
    return X.mH @ (X if Y is None else wide(Y))


class _Factorised:
    """S = L Lᴴ up to rounding, with its inverse; never fails on a semidefinite S ≠ 0."""

    def __init__(self, S: Tensor) -> None:
        diagonal = S.diagonal(dim1=-2, dim2=-1).real
        rounding = torch.finfo(S.dtype).eps * S.shape[-1]
        self.S = S
        self.L, self.info = torch.linalg.cholesky_ex(S + torch.diag_embed(diagonal * rounding).to(S.dtype))
        eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device).expand_as(S)
        self.L_inv = torch.linalg.solve_triangular(self.L, eye, upper=False)
        self.inverse = self.L_inv.mH @ self.L_inv


class Preconditioner:
    r"""The metric at a stack of points: what turns a gradient into a step.

    The metric is :math:`\mathrm{Re\,Tr}(W_G ξ_G^H ξ_G + W_H ξ_H^H ξ_H)` with :math:`(W_G, W_H) = (s^2 N, \hat M)`. With
    :math:`W = K K^H`, a covector ∇ has the coordinates :math:`\nabla K^{-H}` in an orthonormal basis, and coordinates d
    are those of the vector :math:`d K^{-1}`. Moving G along the orbit rotates the basis; nothing that is computed in it
    and mapped back depends on the rotation. M and N, (…, h, h), are the Gram matrices of G and H, where H has full
    column rank; ``scale`` is s; ``floor``, a number or (…, 1, 1), multiplies :math:`N^{-1}` in :math:`\hat M`.
    """

    def __init__(self, M: Tensor, N: Tensor, scale: float = 1.0, floor: Tensor | float = 1.0) -> None:
        self._scale, self._M = scale, M
        self._N = _Factorised(N)
        self._W = _Factorised(scale**2 * M + floor * self._N.inverse)

    def is_sound(self) -> Tensor:
        """Tell where H has full column rank, and everything is finite; (…)."""
        N, W = ((f.info == 0) & f.L_inv.isfinite().all(-1).all(-1) for f in (self._N, self._W))
        return N & W

    def is_skewed(self) -> Tensor:
        """Tell where a sound H has columns too far from orthonormal ones for the precision of the factors; (…)."""
        size, inverse = (torch.linalg.matrix_norm(S) for S in (self._N.S, self._N.inverse))
        bound = _CONDITION**2 * self._N.S.shape[-1] ** 0.5
        return ((size * inverse > bound) | (size > _SIZE**2) | (inverse > _SIZE**2)) & self.is_sound()

    def straightening(self, largest: float) -> Tensor:
        r"""Return matrices, (…, 2, h, h), that turn skewed G and H into factors of the same product with N = I.

        With :math:`N = L L^H` they are :math:`(L, L^{-H})`; 1 where nothing is skewed, or a column of G L would have a
        norm above ``largest``.
        """
        L = self._N.L
        found = torch.stack([L, self._N.L_inv.mH], dim=-3)
        columns = trace(L.mH @ self._M @ L).sqrt()
        eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        return torch.where((self.is_skewed() & (columns <= largest))[..., None, None, None], found, eye)

    @property
    def inverse_roots(self) -> Tensor:
        """K⁻¹ of G and of H, (…, 2, h, h)."""
        return torch.stack([self._N.L_inv / self._scale, self._W.L_inv], dim=-3)

    def transport_covectors(self, to: Preconditioner, across: Tensor) -> Tensor:
        r"""Return (T_G, T_H), (…, 2, h, h): at another point covectors become :math:`\nabla_G T_G, \nabla_H T_H`.

        The coordinates of a covector are projected from the span of the old basis onto that of the new one. The bases
        are those of the column spaces of H and of :math:`(sG;\; H N^{-1})`, whose Gram matrix is :math:`\hat M` for the
        floor 1. ``across`` has :math:`G^H G'` and :math:`H^H H'`, (…, 2, h, h).
        """
        across_G, across_H = across.unbind(-3)
        across_G = self._scale**2 * across_G + self._N.inverse @ across_H @ to._N.inverse
        return torch.stack([self._N.inverse @ across_H, self._W.inverse @ across_G], dim=-3)


class RidgePreconditioner(Preconditioner):
    r"""The metric whose step of H is that of a ridge regression: 0 where the product has no singular value."""

    @property
    def inverse_roots(self) -> Tensor:
        r"""K⁻¹ of G, and :math:`R \hat M^{-1}` of H with :math:`s^2 M = R^H R`, (…, 2, h, h)."""
        least = torch.finfo(self._M.dtype).eps ** 0.75  # R exists at M = 0, too; like all here a function of the orbit
        R = _Factorised(self._scale**2 * self._M + least * self._W.S).L.mH
        return torch.stack([self._N.L_inv / self._scale, R @ self._W.inverse], dim=-3)
