r"""The geodesic equation of mix on :math:`2h \times h` coefficients, and their integration.

Notation of :mod:`quotient_manifolds.geodesics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .linalg import exposed, holds
from .metrics import MIX, Motion

__all__ = [
    "Frame",
    "Reduced",
    "State",
    "as_times",
    "block_matrix",
    "column",
    "flat",
    "frame",
    "integrate",
    "nonzero",
    "unflat",
]

#: Four tensors, (a, p, b, q) of :class:`Reduced` or (X, ξ, Y, η) of a geodesic.
State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Frame:
    r"""Basis [X, E/s] of span[X, ξ] (…, n, 2h), its Gram matrix J, and the coefficients of X and ξ (…, 2h, h)."""

    basis: Tensor
    gram: Tensor
    point: Tensor
    velocity: Tensor


def nonzero(size: Tensor) -> Tensor:
    """Use a size as a unit: constant to autograd (results do not depend on it), and 1 where it is zero."""
    return torch.where(size > 0, size, 1).detach()


def block_matrix(A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Assemble a matrix from four blocks, broadcasting their batch dimensions."""
    upper, lower = torch.broadcast_tensors(A, B), torch.broadcast_tensors(C, D)
    return torch.cat([torch.cat(upper, dim=-1), torch.cat(lower, dim=-1)], dim=-2)


def frame(X: Tensor, xi: Tensor) -> Frame:
    """Build the frame; X, xi are (…, n, h), X well conditioned."""
    X, xi = torch.broadcast_tensors(X, xi)
    P = X.mH @ X
    # A zero column would make P singular. A unit vector orthogonal to all others takes its place: it stays constant
    # along the geodesic, and the other columns do not depend on it.
    P = P + torch.diag_embed((P.diagonal(dim1=-2, dim2=-1) == 0).to(P.dtype))
    C = torch.linalg.solve(P, X.mH @ xi)
    s = nonzero(torch.linalg.matrix_norm(xi))[..., None, None]
    # A square X spans everything. Rounding errors in E would matter: mix geodesics are unstable in directions off X.
    E = (xi - X @ C) / s if X.shape[-2] > X.shape[-1] else torch.zeros_like(xi)
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device).expand_as(P)
    zero = torch.zeros_like(P)
    return Frame(
        basis=torch.cat([X, E], dim=-1),
        gram=block_matrix(P, zero, zero, E.mH @ E),
        point=torch.cat([eye, zero], dim=-2),
        velocity=torch.cat([C, eye * s], dim=-2),
    )


def as_times(t: Any, like: Tensor) -> Tensor:
    """Return times as a real tensor with the precision and device of another tensor."""
    if t.is_complex() if isinstance(t, Tensor) else np.asarray(t).dtype.kind not in "iuf":
        raise TypeError(f"times must be real numbers, got {t!r}")
    times = torch.as_tensor(t, dtype=like.dtype.to_real(), device=like.device)
    if not holds(times.isfinite()):
        raise ValueError(f"times must be finite, got {t!r}")
    return times


def column(t: Tensor, like: Tensor) -> Tensor:
    """Reshape times from (k…) to (k…, 1, …, 1), which multiplies a batch of matrices."""
    return t.reshape(*t.shape, *(1,) * like.dim())


@dataclass(frozen=True)
class Reduced:
    r"""The geodesic equation of mix on coefficients: :math:`G = [X, E/s]\, a\, Σ^{1/2}`, likewise b for H.

    The velocities are those of the whitened tangent vectors, :math:`\dot a = p Σ^{-1},\ \dot b = q Σ^{-1}`. With
    :math:`N = b^H J_H b`, :math:`B_H = b^H J_H q`, :math:`A_H = q^H J_H q` the equation of the metric reads
    :math:`\dot p = [a A_H Σ^{-1} - p (Σ^{-1} B_H^H + B_H Σ^{-1})] N^{-1}`, likewise q with the roles exchanged: written
    with p Σ^{-1} instead of ȧ no entry is multiplied by a ratio of singular values.
    """

    G: Frame
    H: Frame
    inverse_sigma: Tensor  # (…, 1, h), 0 for absent directions
    gram: Tensor  # of both frames, (…, 2, 2h, 2h)

    @classmethod
    def of(cls, G: Frame, H: Frame, sigma: Tensor) -> Reduced:
        """Set up the equation for the scale σ of the columns, (…, h)."""
        inverse = torch.where(sigma > 0, 1 / torch.where(sigma > 0, sigma, 1), 0.0).unsqueeze(-2)
        return cls(G, H, inverse, torch.stack([G.gram, H.gram], -3))

    def start(self) -> State:
        """Return the coefficients (a, p, b, q) at t = 0."""
        present = self.inverse_sigma > 0
        return self.G.point * present, self.G.velocity, self.H.point * present, self.H.velocity

    def derivative(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the time derivative of (a, p, b, q), flattened, and the squared speed (…) in the inv metric."""
        h, w = self.gram.shape[-1] // 2, self.inverse_sigma.unsqueeze(-3)
        # Both factors at once, (…, 2, 2h, h): half as many operations on small matrices.
        state = y.unflatten(-1, (2, 2, 2 * h, h))
        (a, p), (Ja, Jp) = state.unbind(-3), (self.gram.unsqueeze(-3) @ state).unbind(-3)
        A = p.mH @ Jp
        M = a.mH @ Ja + torch.diag_embed((w.squeeze(-2) == 0).to(a.dtype))
        own = Motion(torch.linalg.inv(M), (Ja.mH @ p * w).mH, A * w)
        of_a, of_p = MIX.equation(own, Motion(*(k.flip(-3) for k in own)))
        # Tr(M⁻¹ ȧᴴJȧ) + Tr(N⁻¹ ḃᴴJḃ)
        speed2 = (own.inverse.mT * own.vv * w.mT).real.sum((-3, -2, -1))
        return torch.stack([p * w, a @ of_a + p @ of_p], -3).flatten(-4), speed2

    def end(self, state: State) -> State:
        """Return the factors X(t), ξ(t), Y(t), η(t), whitened like the input."""
        a, p, b, q = state
        return self.G.basis @ a, self.G.basis @ p, self.H.basis @ b, self.H.basis @ q


def flat(state: State) -> Tensor:
    """Write (a, p, b, q), the batch first, as one vector for a solver, (…, 8h²)."""
    return torch.cat(torch.broadcast_tensors(*state), dim=-2).flatten(-2)


def unflat(y: Tensor, h: int) -> State:
    """Invert :func:`flat` for coefficients with h columns."""
    return y.unflatten(-1, (-1, h)).chunk(4, dim=-2)


#: Number of steps after which a solver gives up, geodesics take a few dozen; and the shortest step.
_MAX_STEPS, _SHORTEST = 20_000, 1e-14


def integrate(f: Callable[[Tensor], Tensor], y: Tensor, tol: float) -> Tensor:
    """Solve ẏ = f(y) over unit time; every batch item keeps the tolerance.

    Dormand and Prince's methods, of order 5 and, below a tolerance of 1e-8, of order 8 with Hairer's error estimate
    (Hairer, Nørsett and Wanner, II.5 and II.10). The choice of steps is constant to autograd, whose modes all see sums
    and products alone.
    """
    if y.numel() == 0:  # a batch without items
        return y
    from scipy.integrate import DOP853, RK45  # slow to import

    method, order = (DOP853, 8) if tol < 1e-8 else (RK45, 5)
    stages, whole = y.new_tensor(method.A), y.new_tensor(method.B)
    estimates = [y.new_tensor(e) for e in ((method.E5, method.E3) if method is DOP853 else (method.E,))]
    slope, time = f(y), 0.0

    def worst(error: Tensor) -> float:
        """Take the root mean square of every batch item, then the largest; infinitely wrong where it is not finite."""
        return float(exposed(error.abs().square().mean(-1).sqrt()).nan_to_num(nan=1e9, posinf=1e9).amax())

    step = (0.01 / max(worst(slope / (tol * (1 + y.abs()))), 0.01)) ** (1 / order)
    for _ in range(_MAX_STEPS):
        step = min(step, 1 - time)
        k = [slope]
        for a in stages[1:]:
            k.append(f(y + step * torch.tensordot(a[: len(k)], torch.stack(k), 1)))
        new = y + step * torch.tensordot(whole, torch.stack(k), 1)
        k.append(f(new))
        every, unit = torch.stack(k).detach(), tol * (1 + torch.maximum(y.abs(), new.abs()))
        errors = [worst(torch.tensordot(e, every, 1) / unit) for e in estimates]
        ratio = step * errors[0] ** 2 / max(math.hypot(errors[0], *(0.1 * e for e in errors[1:])), 1e-150)
        if ratio <= 1:
            y, slope, time = new, k[-1], time + step
            if time >= 1 - _SHORTEST:
                return y
        step *= min(max(0.9 * max(ratio, 1e-10) ** (-1 / order), 0.2), 10)
        if step < _SHORTEST:
            break
    raise ArithmeticError(
        f"the geodesic equation cannot be solved here (steps of {step:.0e} at time {time:.3g}); rescale the factors"
    )
