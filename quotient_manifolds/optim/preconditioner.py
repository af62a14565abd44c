r"""The metric of the optimisers: its floor, and the transport of moments.

Notation as in :mod:`quotient_manifolds.gl`: :math:`M = G^H G`, :math:`N = H^H H`; s is what the network multiplies the
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

__all__ = ["Factorised", "Preconditioner", "gram", "wide"]

#: Condition of the anchor above which the pair moves to another gauge, and so does a size beyond this or its inverse.
_CONDITION, _SIZE = 1e2, 1e4


def wide(X: Tensor) -> Tensor:
    """Widen to double precision, in which small matrices are computed, where the device supports it."""
    return X if X.device.type == "mps" else in_double(X)


def gram(X: Tensor, Y: Tensor | None = None) -> Tensor:
    """Return Xᴴ Y in double precision, (…, h, h)."""
    X = wide(X)
    return X.mH @ (X if Y is None else wide(Y))


class Factorised:
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
        self._scale, self._M_plain = scale, M
        self._N = Factorised(N)
        self._M = Factorised(scale**2 * M + floor * self._N.inverse)

    def is_sound(self) -> Tensor:
        """Tell where H has full column rank, and everything is finite; (…)."""
        found = [(f.info == 0) & f.L_inv.isfinite().all(-1).all(-1) for f in (self._N, self._M)]
        return found[0] & found[1]

    @property
    def on_cpu(self) -> bool:
        """Whether the host reads numbers without waiting."""
        return self._N.S.device.type == "cpu"

    def is_skewed(self) -> Tensor:
        """Tell where the columns of H are too far from orthonormal ones for the precision of the factors; (…)."""
        size, inverse = (torch.linalg.matrix_norm(S) for S in (self._N.S, self._N.inverse))
        bound = _CONDITION**2 * self._N.S.shape[-1] ** 0.5
        return (size * inverse > bound) | (size > _SIZE**2) | (inverse > _SIZE**2)

    def straightening(self) -> Tensor:
        """Return the matrices, (…, 2, h, h), by which G and H become factors of the same product with N = I."""
        return torch.stack([self._N.L, self._N.L_inv.mH], dim=-3)

    @property
    def inverse_roots(self) -> Tensor:
        """K⁻¹ of G and of H, (…, 2, h, h)."""
        return torch.stack([self._N.L_inv / self._scale, self._M.L_inv], dim=-3)

    def transport_covectors(self, to: Preconditioner, across: Tensor) -> Tensor:
        r"""Return (T_G, T_H), (…, 2, h, h): at another point covectors become :math:`\nabla_G T_G, \nabla_H T_H`.

        The coordinates of a covector are projected from the span of the old basis onto that of the new one. The bases
        are those of the column spaces of H and of :math:`(sG;\; H N^{-1})`, whose Gram matrix is :math:`\hat M` for the
        floor 1. ``across`` has :math:`G^H G'` and :math:`H^H H'`, (…, 2, h, h).
        """
        across_G, across_H = across.unbind(-3)
        across_G = self._scale**2 * across_G + self._N.inverse @ across_H @ to._N.inverse
        return torch.stack([self._N.inverse @ across_H, self._M.inverse @ across_G], dim=-3)
