r"""Nearly shortest paths between two matrices, and how they change with their end points.

With the polar decompositions :math:`X = UK, Y = VL` and the angles :math:`\cos Θ = C = \tfrac12(U^H V + V^H U)`

.. math:: γ(t) = \big(U f_{1-t} + V f_t\big) \big((1-t) K + t L\big), \qquad f_t = \sin(tΘ) / \sin Θ

rotates the unitary factor at constant speed, where a straight path would pass near singular matrices. Between
independent random matrices its energy in the inv metric is within a thousandth of the minimum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .metrics import Metric
from .path import Path, combine, hermitian

__all__ = ["Bent", "first_path", "polar"]


def polar(X: Tensor) -> Tensor:
    """Return the unitary factor of X; of a failed path any, so that the others do not fail with it."""
    U, _, Vh = torch.linalg.svd(X.nan_to_num(0, 0, 0), full_matrices=False)
    return U @ Vh


class Bent:
    """The bent paths from X to Y, (b, rows, h), as coefficients c_k, k ≥ 1, of their velocities, as many as ``like``.

    Everything is written in the columns of UQ and VQ, Q the eigenvectors of C.
    """

    def __init__(self, X: Tensor, Y: Tensor, like: Path) -> None:
        U, V = polar(X), polar(Y)
        *_, self._fit, self._times = like.rule()
        self._K, self._L, self._overlap = U.mH @ X, hermitian(V.mH @ Y), U.mH @ V
        C, self._Q = torch.linalg.eigh(hermitian(self._overlap))
        self._C = C.clamp(-0.95, 1 - 1e-6).unsqueeze(1)
        self._angle = self._C.arccos()
        self._frame = torch.cat([U @ self._Q, V @ self._Q], -1).unsqueeze(1)
        self._back = torch.cat([self._Q, self._Q], -1).mH.unsqueeze(1)

    def _f(self, t: Tensor) -> Tensor:
        """Return the eigenvalues of f_t, (b, q, h)."""
        return (t[:, None] * self._angle).sin() / self._angle.sin()

    def _slopes(self, t: Tensor) -> Tensor:
        """Return the divided differences of f_t as a function of C, (b, q, h, h)."""
        c, angle, f, t = self._C, self._angle, self._f(t), t[:, None]
        slope = (c * (t * angle).sin() - t * (t * angle).cos() * angle.sin()) / angle.sin() ** 3
        gap = c.unsqueeze(-1) - c.unsqueeze(-2)
        mean = (slope.unsqueeze(-1) + slope.unsqueeze(-2)) / 2
        return torch.where(gap.abs() > 1e-6, (f.unsqueeze(-1) - f.unsqueeze(-2)) / gap, mean)

    def coefficients(self) -> Tensor:
        """Return the coefficients, (b, k - 1, rows, h)."""
        t = self._times
        turned = torch.cat([self._f(1 - t), self._f(t)], -1).unsqueeze(-1) * self._back
        size = self._K.unsqueeze(1) + t[:, None, None] * (self._L - self._K).unsqueeze(1)
        return combine(self._fit, self._frame @ turned @ size)

    def prepare(self) -> None:
        """Compute what :meth:`following` needs."""
        t, Q, fit = self._times, self._Q, self._fit
        # Dimensions: item, k, of U or V, row, column.
        self._of_C = torch.stack([combine(fit, self._slopes(s)) for s in (1 - t, t)], 2)
        K, L = (Q.mH @ z for z in (self._K, self._L))
        V, V_grown = ((f @ self._f(t)).unsqueeze(-1) for f in (fit, fit * t))
        self._of_V = V * K.unsqueeze(1) + V_grown * (L - K).unsqueeze(1)
        self._grown = ((fit * t) @ torch.cat([self._f(1 - t), self._f(t)], -1)).unsqueeze(-1)
        values, E = torch.linalg.eigh(self._L)
        self._sums, self._E, self._into = values.unsqueeze(-1) + values.unsqueeze(-2), E, Q.mH @ E
        self._E_L, self._Q_L, self._Q_S = E.mH @ self._L, L, Q.mH @ self._overlap @ Q
        self._middle = ((K + L) / 2).unsqueeze(1)

    def following(self, m: Tensor) -> Tensor:
        r"""Return the change of the coefficients for an end that moves by Y m, (b, k - 1, rows, h); linear in m.

        From :math:`L m = ΩL + dL` with Ω skew-Hermitian and dL Hermitian: V turns to V(1 + Ω), L grows by dL. The
        change of f vanishes at both ends, so it is multiplied by the mean (K + L)/2 instead of (1-t) K + t L.
        """
        B = self._E_L @ m @ self._E
        turn = self._into @ ((B - B.mH) / self._sums) @ self._into.mH
        dC, dL = hermitian(self._Q_S @ turn), self._Q_L @ m - turn @ self._Q_L
        bent = (self._of_C * dC[:, None, None]).flatten(2, 3) @ self._middle
        turned = turn.unsqueeze(1) @ self._of_V
        grown = self._grown * torch.cat([dL, dL], -2).unsqueeze(1)
        return self._frame @ (bent + grown + torch.nn.functional.pad(turned, (0, 0, turned.shape[-2], 0)))


def first_path(metric: Metric, n: int, x: Tensor, y: Tensor, count: int) -> Path:
    """Return the path with bent factors; square factors rotate from x to y instead, so that none becomes singular."""
    path = Path(metric, n, x, y, x.new_zeros(len(x), count - 1, *x.shape[1:]))
    if x.shape[-1] in (n, x.shape[-2] - n):
        path = path.refined(2 * count)
    for part, X, Y in zip(path.split(path.c), path.split(x), path.split(y), strict=True):
        part.copy_(_turning(X, Y, path) if X.shape[-2] == X.shape[-1] else Bent(X, Y, path).coefficients())
    return path


def _turning(X: Tensor, Y: Tensor, like: Path) -> Tensor:
    """Return the coefficients of the path between square matrices :math:`e^{tΩ} ((1-t) X + t e^{-Ω} Y)`.

    :math:`e^Ω` is the unitary part of :math:`Y X^{-1}`, and Ω comes from a thousandth root of it. The determinant has
    no zero on the way.
    """
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)
    upper = torch.ones_like(eye).triu(1)
    skew = 1e-3 * (1j * eye if eye.is_complex() else upper - upper.mT)  # move away from where the root is not unique
    root = whole = polar(torch.linalg.solve(X, Y, left=False))
    for _ in range(10):
        root = polar(eye + root + skew)
        skew = 0 * skew
    *_, fit, t = like.rule()
    turn = torch.linalg.matrix_exp(t[:, None, None] * (2.0**9 * (root - root.mH)).unsqueeze(1))
    return combine(fit, turn @ (X.unsqueeze(1) + t[:, None, None] * (whole.mH @ Y - X).unsqueeze(1)))
