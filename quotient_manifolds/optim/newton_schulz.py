r"""Inverse square roots of small matrices by products only: no eigenvalues, no branches, no reads by the host."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inverse_root"]

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
    size = torch.linalg.matrix_norm(S, keepdim=True)
    S = S / size.clamp_min(least)
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    Q = torch.where(size > least, size.rsqrt(), 0).to(S.dtype) * eye
    for a, b, c in _ROUNDS:
        q = a * eye + b * S + c * (S @ S)
        Q, S = Q @ q, q @ S @ q
    return Q
