r"""The geodesic equations on :math:`2h \times h` coefficients, and their integration.

Notation of :mod:`quotient_manifolds.gl.geodesic`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..linalg import real_dtype
from ..linalg import symmetric_part_doubled as sym2

__all__ = [
    "Frame",
    "Reduced",
    "State",
    "as_times",
    "block_matrix",
    "column",
    "flat_state",
    "frame",
    "integrate",
    "nonzero",
    "unflat_state",
]


#: (a, p, b, q), see :class:`Reduced`; a tuple of four tensors.
State = tuple[Tensor, ...]


# -- the frame in which a factor moves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    r"""Basis [X, E/s] of span[X, ξ] (…, n, 2h), its Gram matrix J, and the coefficients of X and ξ (…, 2h, h)."""

    basis: Tensor
    gram: Tensor
    point: Tensor
    velocity: Tensor

    def __matmul__(self, a: Tensor) -> Tensor:
        """Give the n × h matrix with coefficients a, which may have more leading dimensions."""
        return self.basis @ a


def nonzero(size: Tensor) -> Tensor:
    """Use a size as a unit: constant to autograd (results do not depend on it), and 1 where it is zero."""
    size = size.detach()
    return torch.where(size > 0, size, torch.ones_like(size))


def block_matrix(rows: list[list[Tensor]]) -> Tensor:
    """Put a matrix together from blocks, broadcasting their batch dimensions."""
    return torch.cat([torch.cat(torch.broadcast_tensors(*row), dim=-1) for row in rows], dim=-2)


def frame(X: Tensor, xi: Tensor) -> Frame:
    """Build the frame; X, xi are (…, n, h), X well conditioned."""
    X, xi = torch.broadcast_tensors(X, xi)
    P = X.mH @ X
    # Columns that are zero count as unit vectors which nothing else meets: they neither move nor matter.
    P = P + torch.diag_embed((P.diagonal(dim1=-2, dim2=-1) == 0).to(P.dtype))
    C = torch.linalg.solve(P, X.mH @ xi)
    s = nonzero(torch.linalg.matrix_norm(xi))[..., None, None]
    # A square X spans everything. Rounding in E would matter: geodesics of mix are unstable in the directions off X.
    E = (xi - X @ C) / s if X.shape[-2] > X.shape[-1] else torch.zeros_like(xi)
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device).expand_as(P)
    zero = torch.zeros_like(P)
    return Frame(
        basis=torch.cat([X, E], dim=-1),
        gram=block_matrix([[P, zero], [zero, E.mH @ E]]),
        point=torch.cat([eye, zero], dim=-2),
        velocity=torch.cat([C, eye * s], dim=-2),
    )


def as_times(t: Any, like: Tensor) -> Tensor:
    """Give times as a real tensor of the precision and device of another."""
    if not isinstance(t, Tensor) and not np.issubdtype(np.asarray(t).dtype, np.number):
        raise TypeError(f"times must be numbers, got {t!r}")
    return torch.as_tensor(t, dtype=real_dtype(like.dtype), device=like.device)


def column(t: Tensor, like: Tensor) -> Tensor:
    """Give times of shape (k…) the shape (k…, 1, …, 1) that multiplies a batch of matrices."""
    return t.reshape(*t.shape, *(1,) * like.dim())


# -- right-hand sides of the geodesic equation on coefficients, shared by the solvers -------------------------------


@dataclass(frozen=True)
class Reduced:
    r"""The geodesic equation of one pair on coefficients: :math:`G = [X, E/s]\, a\, Σ^{1/2}`, likewise b for H.

    The velocities p, q are those of the whitened tangent vectors:
    inv :math:`\dot a = p,\ \dot b = q`; mix :math:`\dot a = p Σ^{-1},\ \dot b = q Σ^{-1}`. With
    :math:`M = a^H J_G a,\ N = b^H J_H b`, :math:`B_G = a^H J_G p`, :math:`A_G = p^H J_G p`, …

    - inv: :math:`\dot p = p M^{-1} (B_G + B_G^H) - a M^{-1} A_G`, likewise q with N;
    - mix: :math:`\dot p = [a A_H Σ^{-1} - p (Σ^{-1} B_H^H + B_H Σ^{-1})] N^{-1}`, likewise q with the roles exchanged.

    Written with p Σ^{-1} instead of ȧ no entry is multiplied by a ratio of singular values.
    """

    G: Frame
    H: Frame
    inverse_sigma: Tensor | None  # (…, h), 0 for directions that the point lacks; None for inv

    @classmethod
    def of(cls, metric: str, X: Tensor, xi: Tensor, Y: Tensor, eta: Tensor, sigma: Tensor) -> Reduced:
        """Set up the equation of a metric at a point with a vector."""
        problem = cls(frame(X, xi), frame(Y, eta), None)
        return problem if metric == "inv" else problem.scaled(sigma)

    def scaled(self, sigma: Tensor) -> Reduced:
        """Give the same equation (mix) for another scale σ of the columns."""
        inverse = torch.where(sigma > 0, 1 / torch.where(sigma > 0, sigma, 1), 0.0)
        return replace(self, inverse_sigma=inverse)

    def start(self) -> State:
        """Give the coefficients (a, p, b, q) at t = 0."""
        a, b = self.G.point, self.H.point
        if self.inverse_sigma is not None:
            present = (self.inverse_sigma > 0).unsqueeze(-2)
            a, b = a * present, b * present
        return a, self.G.velocity, b, self.H.velocity

    def _grams(self, f: Frame, a: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give M⁻¹, B, A of one factor."""
        Ja, Jp = f.gram @ a, f.gram @ p
        M = a.mH @ Ja
        if self.inverse_sigma is not None:
            M = M + torch.diag_embed((self.inverse_sigma == 0).to(M.dtype))
        return torch.linalg.inv(M), Ja.mH @ p, p.mH @ Jp

    def derivative(self, state: State) -> tuple[State, Tensor]:
        """Give the time derivative of (a, p, b, q), and the squared speed (…) in the inv metric."""
        a, p, b, q = state
        M1, B_G, A_G = self._grams(self.G, a, p)
        N1, B_H, A_H = self._grams(self.H, b, q)
        if self.inverse_sigma is None:
            w = torch.ones_like(M1[..., :1, :].real)
            dp = p @ (M1 @ sym2(B_G)) - a @ (M1 @ A_G)
            dq = q @ (N1 @ sym2(B_H)) - b @ (N1 @ A_H)
        else:
            w = self.inverse_sigma.unsqueeze(-2)  # ⋅ w is right multiplication by Σ⁻¹
            dp = a @ ((A_H * w) @ N1) - p @ (sym2(B_H * w) @ N1)
            dq = b @ ((A_G * w) @ M1) - q @ (sym2(B_G * w) @ M1)
        # Tr(M⁻¹ ȧᴴJȧ) + Tr(N⁻¹ ḃᴴJḃ)
        speed2 = ((M1.mT * A_G + N1.mT * A_H) * w * w.mT).real.sum((-2, -1))
        return (p * w, dp, q * w, dq), speed2

    def end(self, state: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Give the factors X(t), ξ(t), Y(t), η(t): whitened, as they came in."""
        a, p, b, q = state
        return self.G @ a, self.G @ p, self.H @ b, self.H @ q


# -- mix: reduced equation, adaptive solver -------------------------------------------------------------------------


def flat_state(state: State) -> Tensor:
    """Write the coefficients of both factors and their velocities as one real vector, for a solver."""
    y = torch.cat(torch.broadcast_tensors(*state), dim=-2)
    y = y.flatten(-2)
    return torch.view_as_real(y).flatten(-2) if y.is_complex() else y


def unflat_state(y: Tensor, h: int, is_complex: bool) -> State:
    """Invert :func:`flat_state`."""
    if is_complex:
        y = torch.complex(*y.unflatten(-1, (y.shape[-1] // 2, 2)).unbind(-1))
    return y.reshape(*y.shape[:-1], 8 * h, h).split(2 * h, dim=-2)


def _worst_item(error: Tensor) -> Tensor:
    """Take the root mean square of every batch item, then the largest: none is averaged away by the others.

    A step with a singular or overflowing stage counts as infinitely wrong, so that it is repeated with a smaller one.
    """
    rms = error.detach().square().mean(-1).sqrt()  # the choice of steps is constant to autograd
    return rms.nan_to_num(nan=1e9, posinf=1e9).amax()


def integrate(f: Callable[[Tensor, Tensor], Tensor], y: Tensor, end: float, tol: float) -> Tensor:
    """Solve ẏ = f(t, y) from 0 to ``end``; every batch item keeps the tolerance, and steps end exactly there."""
    if y.numel() == 0:  # a batch without items
        return y
    with torch.device("cpu"):  # only mix geodesics and parallel transport need it; its tables are made when imported
        from torchdiffeq import odeint

    t = torch.tensor([0.0, end], dtype=real_dtype(y.dtype), device=y.device)
    # step_t: a step ends exactly at the last time, the solver's dense output is only of fourth order.
    options = {"norm": _worst_item, "step_t": t[1:]}
    method = "dopri8" if tol < 1e-8 else "dopri5"
    return odeint(f, y, t, rtol=tol, atol=tol, method=method, options=options)[-1]
