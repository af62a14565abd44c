"""The preconditioner for minimising a path's energy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..linalg import hermitian_power, weighted_sylvester
from .bent import Bent
from .metrics import Pair
from .path import Path, flat, hermitian, unflat, weights

__all__ = ["Preconditioner"]

#: Coefficients that follow the end. The others hardly would, and half of the time goes into this.
_FOLLOWING = 3


class Preconditioner:
    r"""An approximate inverse of the energy's second derivative.

    For the coefficients c_k, k ≥ 1, the second derivative is roughly the average weight W of the metric. The end moves
    along its orbit by Λ, and the first coefficients change with it as those of a bent path do. The skew-Hermitian part
    Ω of Λ rotates the end: where the spans of both ends are orthogonal, all rotated ends are equally far away, and the
    second derivative is small. With :math:`S_G = W^{1/2} G_1^H G_0 W^{1/2}` and :math:`T = S_G + S_H` (cosines of the
    angles), it is about :math:`\tfrac12(T'Ω + ΩT')` there, :math:`T' = θ \cot θ` for :math:`T = \cos θ`.
    """

    def __init__(self, path: Path) -> None:
        path = path.in_single()
        w = path.rule()[0]
        averages = [torch.einsum("q,bqij->bij", w.to(X.dtype), X.mH @ X) for X in path.points()]
        inverse = weights(path.metric, averages[0], averages[1], inverse=True)
        # Of paths that failed nothing counts, but what is not finite, or has no finite square, would stop the
        # decompositions of a whole batch.
        self._inverse = [hermitian(V).nan_to_num(0, 0, 0) / 2 for V in inverse]
        sane = path.y.abs() < torch.finfo(path.y.dtype).max ** 0.25
        ends, starts = path.split(torch.where(sane, path.y, 0)), path.split(path.x)
        roots = [hermitian_power(V, 0.5) for V in self._inverse]
        back = [torch.linalg.inv_ex(R)[0] for R in roots]
        grams = [X.mH @ X for X in ends]
        self._stretch = weighted_sylvester(grams[0], grams[1], roots[1], roots[0])
        T = hermitian(sum(R @ (Y.mH @ X) @ R for R, X, Y in zip(back, starts, ends, strict=True)))
        size = sum((R @ M @ R).diagonal(dim1=-2, dim2=-1).real.mean(-1) for R, M in zip(back, grams, strict=True))
        cosine, self._turn = torch.linalg.eigh((T / size[..., None, None]).nan_to_num(0, 0, 0))
        self.cosine, cosine = cosine[:, 0], cosine.clamp(0.01, 1 - 1e-6)
        stiffness = size.unsqueeze(-1) * cosine * cosine.arccos() / (1 - cosine**2).sqrt()
        self._stiffness = (stiffness.unsqueeze(-1) + stiffness.unsqueeze(-2)) / 2
        like = replace(path, c=path.c[:, :_FOLLOWING])
        self._later = path.c.shape[1] - like.c.shape[1]
        # Both factors are worked on as one batch; rows of zeros that make them equally large stay zero.
        self._rows = [X.shape[-2] for X in starts]
        self._bent = Bent(self._stacked(starts), self._stacked(ends), like)
        self._bent.prepare()
        # It is linear in Λ, so automatic differentiation gives the adjoint from one recorded graph.
        with torch.enable_grad():
            self._still = torch.zeros_like(T, requires_grad=True)
            self._followed = self._following(self._still)

    def _stacked(self, factors: Pair) -> Tensor:
        most = max(self._rows)
        return torch.cat([torch.nn.functional.pad(X, (0, 0, 0, most - X.shape[-2])) for X in factors])

    def _following(self, L: Tensor) -> Tensor:
        """Return the change of the coefficients when the end moves by Λ."""
        found = self._bent.following(torch.cat([L, -L.mH])).chunk(2)
        own = torch.cat([part[..., :rows, :] for part, rows in zip(found, self._rows, strict=True)], -2)
        return torch.nn.functional.pad(own, (0, 0, 0, 0, 0, self._later))

    def __call__(self, g: Tensor, path: Path) -> Tensor:
        """Apply the preconditioner to a gradient at a path with the same number of coefficients."""
        gc, K = unflat(g.to(self._turn.dtype), path)
        K = K + torch.autograd.grad(self._followed, self._still, gc, retain_graph=True)[0]
        Q = self._turn
        L = Q @ ((Q.mH @ ((K - K.mH) / 2) @ Q) / self._stiffness) @ Q.mH
        L = L + hermitian(self._stretch(hermitian(K)))
        own = [P @ V.unsqueeze(1) for P, V in zip(path.split(gc), self._inverse, strict=True)]
        return flat(torch.cat(own, -2) + self._following(L), L).to(g.dtype)
