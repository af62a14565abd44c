r"""The metrics as the optimisers use them: where they are floored, and how moments are carried.

Notation as in :mod:`quotient_manifolds.gl`: :math:`M = G^H G`, :math:`N = H^H H`, σ the singular values of
:math:`G H^H`. Both metrics break down at :math:`G = 0`, where LoRA starts. Here M is replaced by

.. math:: \hat M = M + N^{-1},

which an element A of the group turns into :math:`A^{-H} \hat M A^{-1}`, as it does M: the floor depends on the orbit
only. In the gauge in which H has orthonormal columns it makes :math:`σ_i^2 + 1` of every :math:`σ_i^2`. A step of
length η thus moves G by about η where σ is small, in both metrics, as AdamW would, and H in proportion to σ; the part
of second order in the change of the product, :math:`ξ_G ξ_H^H`, is of the order of η², however small σ.

N stands as it is: the *anchor* H has full column rank, and where it has not (peft's embeddings start with A = 0) the
two factors change roles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg import in_double

__all__ = ["Frames", "gram", "wide"]


def wide(X: Tensor) -> Tensor:
    """Widen to double precision, in which the small matrices are worked out, where the device has it."""
    return X if X.device.type == "mps" else in_double(X)


def gram(X: Tensor, Y: Tensor | None = None) -> Tensor:
    """Return Xᴴ Y in double precision, (…, h, h)."""
    X = wide(X)
    return X.mH @ (X if Y is None else wide(Y))


def _cholesky(S: Tensor) -> tuple[Tensor, Tensor]:
    """Give L and L⁻¹ with S = L Lᴴ up to rounding; never fails on a semidefinite S ≠ 0."""
    diagonal = S.diagonal(dim1=-2, dim2=-1).real
    rounding = torch.finfo(S.dtype).eps * S.shape[-1]
    L, _ = torch.linalg.cholesky_ex(S + torch.diag_embed(diagonal * rounding).to(S.dtype))
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device).expand_as(S)
    return L, torch.linalg.solve_triangular(L, eye, upper=False)


@dataclass
class _Factor:
    """A positive definite h × h matrix S = L Lᴴ."""

    S: Tensor

    def __post_init__(self) -> None:
        self.L, self.L_inv = _cholesky(self.S)
        self.S_inv = self.L_inv.mH @ self.L_inv


class Frames:
    r"""The metric at a stack of points, and the orthonormal frames in which it is the identity.

    The metric is :math:`\mathrm{Re\,Tr}(W_G ξ_G^H ξ_G + W_H ξ_H^H ξ_H)` with :math:`(W_G, W_H) = (N, \hat M)` for mix
    and :math:`(\hat M^{-1}, N^{-1})` for inv. With :math:`W = K K^H`, a covector ∇ has the coordinates
    :math:`\nabla K^{-H}`, and coordinates d are those of the vector :math:`d K^{-1}`. Moving G along the orbit rotates
    the frame; nothing that is computed in it and carried back depends on the rotation.

    Parameters
    ----------
    metric : {"inv", "mix"}
    G, H : Tensor
        (…, n, h) and (…, m, h); H has full column rank.

    Examples
    --------
    The metric is finite at G = 0, where LoRA starts:

    >>> import torch
    >>> from quotient_manifolds.optim.frames import Frames
    >>> frames = Frames("mix", torch.zeros(3, 2), 2 * torch.eye(4, 2))
    >>> frames.sound(), frames.inverse_root("G").diagonal(), frames.inverse_root("H").diagonal()
    (tensor(True), tensor([0.5000, 0.5000], dtype=torch.float64), tensor([2., 2.], dtype=torch.float64))
    """

    def __init__(self, metric: str, G: Tensor, H: Tensor) -> None:
        self.metric = metric
        self.G, self.H = G, H
        self._N = _Factor(gram(H))
        self._M = _Factor(gram(G) + self._N.S_inv)

    def sound(self) -> Tensor:
        """Tell where H has full column rank, and everything is finite; (…)."""
        return self._N.L_inv.isfinite().all(-1).all(-1) & self._M.L_inv.isfinite().all(-1).all(-1)

    def inverse_root(self, factor: str) -> Tensor:
        """Return K⁻¹ of the factor ``"G"`` or ``"H"``, (…, h, h)."""
        own, other = (self._M, self._N) if factor == "G" else (self._N, self._M)
        return other.L_inv if self.metric == "mix" else own.L.mH

    def carry(self, to: Frames) -> tuple[Tensor, Tensor]:
        r"""Return (T_G, T_H): covectors at this point become :math:`\nabla_G T_G, \nabla_H T_H` at another one.

        The coordinates of the covector are projected from the span of the old frame on that of the new one. The frames
        are those of the column spaces of H, and of :math:`(G;\; H N^{-1})`, whose Gram matrix is :math:`\hat M`.
        """
        across_H = gram(self.H, to.H)
        across_G = gram(self.G, to.G) + self._N.S_inv @ across_H @ to._N.S_inv
        if self.metric == "mix":
            return self._N.S_inv @ across_H, self._M.S_inv @ across_G
        return across_G @ to._M.S_inv, across_H @ to._N.S_inv
