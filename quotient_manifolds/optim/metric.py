r"""The metric of the optimisers: its floor, the transport of moments, and inverse roots.

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

from ..linalg import has_double

__all__ = ["StepMetric", "inverse_root", "trace", "wide"]

#: A pair moves to another gauge if its H is larger or smaller than 1 by this factor: inverses would leave the range
#: of float32.
_SIZE = 1e12


def wide(X: Tensor) -> Tensor:
    """Widen to double precision, in which small matrices are computed, unless that means to leave the device."""
    return X.to(torch.complex128 if X.is_complex() else torch.float64) if has_double(X.device.type) else X


def on_cpu(X: Tensor) -> bool:
    """Return whether the host reads a tensor without waiting for a device."""
    return X.device.type == "cpu"


def trace(S: Tensor) -> Tensor:
    """Compute the real part of the trace, (…)."""
    return S.diagonal(dim1=-2, dim2=-1).real.sum(-1)


def eye_like(S: Tensor) -> Tensor:
    """Return the identity, (h, h), for matrices (…, h, h)."""
    return torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)


class Factorised:
    """S = L Lᴴ up to rounding, with its inverse; never fails on a semidefinite S ≠ 0."""

    def __init__(self, S: Tensor, eye: Tensor) -> None:
        self.S, raised = S, torch.addcmul(S, S, eye, value=torch.finfo(S.dtype).eps * S.shape[-1])
        self.L, self.info = torch.linalg.cholesky_ex(raised)
        self.L_inv = torch.linalg.solve_triangular(self.L, eye.expand_as(S), upper=False)
        self.inverse = self.L_inv.mH @ self.L_inv


class StepMetric:
    r"""The metric at a stack of points: what turns a gradient into a step.

    It is :math:`\mathrm{Re\,Tr}(W_G ξ_G^H ξ_G + W_H ξ_H^H ξ_H)` with :math:`(W_G, W_H) = (s^2 N, \hat M)`. With
    :math:`W = K K^H`, a covector ∇ has the coordinates :math:`\nabla K^{-H}` in an orthonormal basis, and coordinates d
    are those of the vector :math:`d K^{-1}`. Moving G along the orbit rotates the basis; nothing that is computed in it
    and mapped back depends on the rotation.

    Parameters
    ----------
    M, N : Tensor
        Gram matrices of G and H, (…, h, h), where H has full column rank.
    scale : float
        s.
    floor : Tensor, optional
        Multiple of :math:`N^{-1}` in :math:`\hat M`, (…, 1, 1), by default 1. With it the step of H is that of a ridge
        regression: 0 where the product has no singular value.

    Attributes
    ----------
    sound : Tensor
        Where H has full column rank, and everything is finite; (…).
    eye : Tensor
        The identity, (h, h).
    """

    def __init__(self, M: Tensor, N: Tensor, scale: float = 1.0, floor: Tensor | None = None) -> None:
        self._scale, self._M, self._floor, self.eye = scale, M, floor, eye_like(M)
        self._N = Factorised(N, self.eye)
        ridge = self._N.inverse if floor is None else floor * self._N.inverse
        self._W = Factorised(torch.add(ridge, M, alpha=scale**2), self.eye)
        self.sound = (self._N.info == 0) & (torch.linalg.matrix_norm(self._W.inverse) < torch.inf)

    @property
    def inverse_roots(self) -> Tensor:
        r"""K⁻¹ of G and of H, or :math:`R \hat M^{-1}` of H with :math:`s^2 M = R^H R`; (…, 2, h, h)."""
        of_H = self._W.L_inv
        if self._floor is not None:
            # R exists at M = 0, too; like all here what is added is a function of the orbit.
            least = torch.finfo(self._M.dtype).eps ** 0.75 * self._W.S
            raised = torch.add(least, self._M, alpha=self._scale**2)
            of_H = Factorised(raised, self.eye).L.mH @ self._W.inverse
        return torch.stack([self._N.L_inv / self._scale, of_H], dim=-3)

    def straight(self, condition: float) -> Tensor:
        """Return where a sound H is in range, and its columns are as near to orthonormal ones as a condition; (…)."""
        size, inverse = torch.linalg.matrix_norm(self._N.S), torch.linalg.matrix_norm(self._N.inverse)
        near = size * inverse <= condition**2 * self._N.S.shape[-1] ** 0.5
        return near & (torch.maximum(size, inverse) <= _SIZE**2) & self.sound

    def straightening(self, crooked: Tensor, largest: float) -> Tensor:
        r"""Return matrices, (…, 2, h, h), that turn crooked G and H into factors of the same product with N = I.

        With :math:`N = L L^H` they are :math:`(L, L^{-H})`; 1 elsewhere, or where a column of G L would have a norm
        above ``largest``.
        """
        L = self._N.L
        crooked = crooked & self.sound & (trace(L.mH @ self._M @ L).sqrt() <= largest)
        return torch.where(crooked[..., None, None, None], torch.stack([L, self._N.L_inv.mH], dim=-3), self.eye)

    def transport_covectors(self, N: Tensor, across: Tensor) -> Tensor:
        r"""Return (T_G, T_H), (…, 2, h, h): at another point covectors become :math:`\nabla_G T_G, \nabla_H T_H`.

        The coordinates of a covector are projected from the span of the old basis onto that of the new one. The bases
        are those of the column spaces of H and of :math:`(sG;\; H N^{-1})`, whose Gram matrix is :math:`\hat M` for the
        floor 1. N is that of the other point, and ``across`` has :math:`G^H G'` and :math:`H^H H'`, (…, 2, h, h).
        """
        across_G, across_H = across.unbind(-3)
        T_G = self._N.inverse @ across_H
        across_G = torch.add(T_G @ Factorised(N, self.eye).inverse, across_G, alpha=self._scale**2)
        return torch.stack([T_G, self._W.inverse @ across_G], dim=-3)


#: Coefficients (a, b, c) of s ↦ as + bs³ + cs⁵: the best compositions on [1e-3, 1] (Amsel et al. 2025, "Polar
#: Express"), then those of Newton and Schulz, which converge to third order.
_ROUNDS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
    (1.875, -1.25, 0.375),
)


def inverse_root(S: Tensor) -> Tensor:
    r"""Compute :math:`S^{-1/2}` of a positive semidefinite S, (…, h, h), where its eigenvalues are not negligible.

    With :math:`\hat S = S / \|S\|_F`, a polynomial q of products of :math:`\hat S`, and s² an eigenvalue of it:
    :math:`s\, q(s^2) = 1` to rounding for :math:`s \ge 10^{-3}`, and below that it falls to 0 with s. So
    :math:`X\, q(\hat S) / \|S\|_F^{1/2}`, :math:`S = X^H X`, is the polar factor of X except for singular values below
    1e-3 of the norm, which stay small, so that rounding errors are not taken for directions. 0 becomes 0, and so does
    any matrix so small (norm below 1e-40 in double precision) that its inverse root overflows in float32.
    """
    least = max(torch.finfo(S.dtype).tiny ** 0.5, 1e-40)  # callers multiply by large numbers too
    norm = torch.linalg.matrix_norm(S, keepdim=True)
    size = norm.clamp_min(least)
    S = (S / size).reshape(-1, *S.shape[-2:])
    Q = eye_like(S).expand_as(S)
    for i, (a, b, c) in enumerate(_ROUNDS):
        P = torch.baddbmm(S, S, S, beta=b, alpha=c)  # q = a I + P; Q becomes Q q, and S q S q
        Q = torch.baddbmm(Q, Q, P, beta=a)
        if i < len(_ROUNDS) - 1:
            S = torch.baddbmm(S, P, S, beta=a)
            S = torch.baddbmm(S, S, P, beta=a)
    return size.rsqrt() * (norm > least) * Q.reshape(*size.shape[:-2], *Q.shape[1:])
