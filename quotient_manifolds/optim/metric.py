r"""The metric of the optimisers: its floor, the transport of moments, inverse roots, and gradients to measure by it.

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

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linalg import has_double

__all__ = ["Gradient", "StepMetric", "inverse_root", "trace", "wide"]

#: A pair moves to another gauge if its H is larger or smaller than 1 by this factor: inverses would leave the range
#: of float32.
_SIZE = 1e12
#: Gradients of a smaller norm count as of this one: squares of their entries are 0 in float32.
LEAST_NORM = 1e-18
#: The type of device of which the host reads numbers without waiting.
HOST = "cpu"
#: The names of what a rule averages, in the state.
MOMENTS = ("moment G", "moment H")


def wide(X: Tensor) -> Tensor:
    """Widen to double precision, in which small matrices are computed, unless that means to leave the device."""
    return X.to(torch.complex128 if X.is_complex() else torch.float64) if has_double(X.device.type) else X


def trace(S: Tensor) -> Tensor:
    """Compute the real part of the trace, (…)."""
    return S.diagonal(dim1=-2, dim2=-1).real.sum(-1)


class Factors(NamedTuple):
    """S = L Lᴴ up to rounding, its inverses, and where it has some rank: info is 0 there, as torch.linalg says it."""

    S: Tensor
    L: Tensor
    L_inv: Tensor
    inverse: Tensor
    info: Tensor


def factorised(S: Tensor, eye: Tensor) -> Factors:
    """Factorise S, given the identity, (h, h); never fails on a semidefinite S ≠ 0."""
    L, info = torch.linalg.cholesky_ex(torch.addcmul(S, S, eye, value=torch.finfo(S.dtype).eps * S.shape[-1]))
    L_inv = torch.linalg.solve_triangular(L, eye.expand_as(S), upper=False)
    return Factors(S, L, L_inv, L_inv.mH @ L_inv, info)


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
    condition : Tensor
        How far the columns of H are from orthonormal ones, √h for those: a bound of its squared condition, (…);
        not finite where H is not sound, or so large or small that inverses would leave the range of float32.
    eye : Tensor
        The identity, (h, h).
    """

    def __init__(self, M: Tensor, N: Tensor, scale: float = 1.0, floor: Tensor | None = None) -> None:
        self.eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        self._scale, self._M, self._floor, self._N = scale, M, floor, factorised(N, self.eye)
        ridge = self._N.inverse if floor is None else floor * self._N.inverse
        self._W = factorised(torch.add(ridge, M, alpha=scale**2), self.eye)
        self.sound = (self._N.info == 0) & (torch.linalg.matrix_norm(self._W.inverse) < torch.inf)
        size, inverse = torch.linalg.matrix_norm(N), torch.linalg.matrix_norm(self._N.inverse)
        self.condition = size * inverse / (self.sound & (torch.maximum(size, inverse) <= _SIZE**2))

    @property
    def inverse_roots(self) -> Tensor:
        r"""K⁻¹ of G and of H, or :math:`R \hat M^{-1}` of H with :math:`s^2 M = R^H R`; (…, 2, h, h)."""
        of_H = self._W.L_inv
        if self._floor is not None:
            # R exists at M = 0, too; like all here what is added is a function of the orbit.
            least = torch.finfo(self._M.dtype).eps ** 0.75 * self._W.S
            raised = torch.add(least, self._M, alpha=self._scale**2)
            of_H = factorised(raised, self.eye).L.mH @ self._W.inverse
        return torch.stack([self._N.L_inv / self._scale, of_H], dim=-3)

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
        across_G = torch.add(T_G @ factorised(N, self.eye).inverse, across_G, alpha=self._scale**2)
        return torch.stack([T_G, self._W.inverse @ across_G], dim=-3)


def refined(x: Tensor, M: Tensor, room: Tensor) -> Tensor:
    """Return the Gram matrix of rows in single precision as if it had been computed in double, given it as rounded.

    Columns that are nearly orthonormal are found first (Yamamoto et al. 2015, "CholeskyQR2").
    """
    raised = M.clone()
    raised.diagonal(dim1=-2, dim2=-1).add_(trace(M)[..., None].clamp_min(1e-24), alpha=1e-6)
    found = factorised(raised, torch.eye(M.shape[-1], dtype=M.dtype, device=M.device))
    Q = torch.bmm(x, found.L_inv.mH.to(x.dtype), out=room)
    return found.L @ wide(Q.mH @ Q) @ found.L.mH


class Gradient:
    r"""The gradients of a stack of pairs, as a rule gets them, and memory in which it may work.

    Where a point waits, as an expert without tokens does, what a rule computes is dropped.

    Parameters
    ----------
    rows : list of Tensor
        :math:`\nabla_G` and :math:`\nabla_H`, (points, n, h) and (points, m, h). A rule may overwrite them.
    counts : Tensor, optional
        n and m, (2, 1, 1).

    Attributes
    ----------
    sizes : Tensor
        The norms of both, (2,), as they were read.
    mask : Tensor, optional
        Where points take their step, () or (points,); None where all do.
    room : list of Tensor
        Memory for what is as large as the rows of G or of H; both are one.
    on_cpu : bool
        The host reads numbers without waiting for a device.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim.metric import Gradient
    >>> Gradient([torch.ones(1, 3, 2), torch.ones(1, 5, 2)]).read().grams().round().tolist()
    [[[[3.0, 3.0], [3.0, 3.0]], [[5.0, 5.0], [5.0, 5.0]]]]
    """

    def __init__(self, rows: list[Tensor], counts: Tensor | None = None) -> None:
        room = rows[0].new_empty(max(g.numel() for g in rows))
        self.rows, self.room = rows, [room.as_strided(g.shape, g.stride()) for g in rows]
        self.on_cpu = room.device.type == HOST
        self.counts = torch.tensor([g.shape[1] for g in rows])[:, None, None] if counts is None else counts
        self.mask: Tensor | None = None

    def read(self) -> Gradient:
        """Note the sizes of gradients that were written to the rows; points whose gradients are 0 wait."""
        norms = torch.stack([torch.linalg.vector_norm(g, dim=(1, 2)) for g in self.rows])
        mask = norms.any(0)  # also where one is NaN
        self.mask = None if self.on_cpu and bool(mask.all()) else mask
        self.sizes = torch.linalg.vector_norm(norms, dim=1).clamp_min(LEAST_NORM)
        return self

    def only(self, value: Tensor, otherwise: Any, out: Tensor | None = None) -> Tensor:
        """Return values for those points that take their step, and others for the rest."""
        if self.mask is None:
            return value
        mask = self.mask.view(-1, *[1] * (value.dim() - 1))
        return torch.where(mask, value, otherwise) if out is None else torch.where(mask, value, otherwise, out=out)

    def restrict(self, mask: Tensor) -> None:
        """Let fewer points take their step."""
        self.mask = mask if self.mask is None else self.mask & mask

    def grams(self, K_inv: Tensor | None = None) -> Tensor:
        r"""Return Gram matrices :math:`\nabla^H \nabla`, or of coordinates :math:`\nabla K^{-H}`; (points, 2, h, h).

        Rows are divided by their size lest squares leave the range of float32, also if K⁻¹ is large.
        """
        sizes, found = [*self.sizes], list[Tensor]()
        sides = () if K_inv is None else K_inv.mH.to(self.rows[0].dtype).unbind(1)
        for i, (g, u) in enumerate(zip(self.rows, self.room, strict=True)):
            if sides:
                g = torch.bmm(g, sides[i], out=u)
                sizes[i] = torch.linalg.vector_norm(g, dim=(1, 2), keepdim=True).clamp_min(LEAST_NORM)
            torch.div(g, sizes[i], out=u)
            found.append(u.mH @ u)
        back = torch.stack(sizes, dim=1) if sides else self.sizes[:, None, None]
        return wide(torch.stack(found, dim=1)).mul_(back).mul_(back)  # whose squares float32 may not hold

    def row_squares(self, R: Tensor) -> Tensor:
        r"""Return the squared norms of the rows of :math:`\nabla R`, first those of G; (points, n + m, 1)."""
        found = self.rows[0].real.new_empty(len(R), sum(g.shape[1] for g in self.rows), 1)
        parts = found.split([g.shape[1] for g in self.rows], dim=1)
        for g, r, room, part in zip(self.rows, R.to(self.rows[0].dtype).unbind(1), self.room, parts, strict=True):
            u = torch.bmm(g, r, out=room)
            u = torch.view_as_real(u).flatten(-2) if u.is_complex() else u
            torch.sum(u.mul_(u), -1, keepdim=True, out=part)  # vector_norm is slow along rows that are not contiguous
        return found

    def average_(
        self, state: Mapping[str, Tensor], names: Iterable[str], values: list[Tensor], weight: float
    ) -> list[Tensor]:
        """Let means in a state go a share of the way to values, in place, which takes no memory; return them.

        Points that wait keep theirs, which is written to their values too.
        """
        means = [state[name] for name in names]
        for mean, value in zip(means, values, strict=True):
            self.only(value, mean, out=value)
        torch._foreach_lerp_(means, values, weight)
        return means


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


def inverse_root(S: Tensor, eye: Tensor) -> Tensor:
    r"""Compute :math:`S^{-1/2}` of a positive semidefinite S, (…, h, h), where its eigenvalues are not negligible.

    With :math:`\hat S = S / \|S\|_F`, a polynomial q of products of :math:`\hat S`, and s² an eigenvalue of it:
    :math:`s\, q(s^2) = 1` to rounding for :math:`s \ge 10^{-3}`, and below that it falls to 0 with s. So
    :math:`X\, q(\hat S) / \|S\|_F^{1/2}`, :math:`S = X^H X`, is the polar factor of X except for singular values below
    1e-3 of the norm, which stay small, so that rounding errors are not taken for directions. 0 becomes 0, and so does
    any matrix so small (norm below 1e-40 in double precision) that its inverse root overflows in float32. ``eye`` is
    the identity, (h, h).
    """
    least = max(torch.finfo(S.dtype).tiny ** 0.5, 1e-40)  # callers multiply by large numbers too
    norm = torch.linalg.matrix_norm(S, keepdim=True)
    size = norm.clamp_min(least)
    S = (S / size).reshape(-1, *S.shape[-2:])
    Q = eye.expand_as(S)
    for i, (a, b, c) in enumerate(_ROUNDS):
        P = torch.baddbmm(S, S, S, beta=b, alpha=c)  # q = a I + P; Q becomes Q q, and S q S q
        Q = torch.baddbmm(Q, Q, P, beta=a)
        if i < len(_ROUNDS) - 1:
            S = torch.baddbmm(S, P, S, beta=a)
            S = torch.baddbmm(S, S, P, beta=a)
    return size.rsqrt() * (norm > least) * Q.reshape(*size.shape[:-2], *Q.shape[1:])
