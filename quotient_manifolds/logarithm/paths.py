r"""Paths between two orbits as polynomials in time, and their energy.

A path in the total space, from :math:`x` to some representative of the orbit of :math:`y`, is given by the Legendre
coefficients of its velocity, :math:`\dot γ = \sum_k c_k φ_k(t)` with φ_k orthonormal on [0, 1], so that
:math:`c_0 = γ(1) - x`. The energy :math:`\int \langle \dot γ, \dot γ \rangle\,dt` (Gauss–Legendre) is minimal for a
shortest geodesic of the quotient. The end may move along its orbit, so the minimal path is
horizontal without a projection. Geodesics are analytic, so the coefficients decay exponentially and few are needed.

The search starts from *bent* paths, which are nearly shortest. With the polar decompositions :math:`X = UK, Y = VL` of
both ends and the angles :math:`\cos Θ = C = \tfrac12(U^H V + V^H U)`

.. math:: γ(t) = \big(U f_{1-t} + V f_t\big) \big((1-t) K + t L\big), \qquad f_t = \sin(tΘ) / \sin Θ

rotates the unitary factor at constant speed, where a straight path would pass near singular matrices. Between
independent random matrices its energy in the inv metric is within a thousandth of the minimum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..linalg import polar
from ..metrics import Gram, Metric, Pair

#: Condition number of Gram matrices up to which single precision is accurate enough.
_WELL_CONDITIONED = 1e4


@functools.cache
def _rule(count: int) -> tuple[np.ndarray, ...]:
    """Return weights w (q), φ_k (q, k) and their integrals (q, k) at Gauss nodes, q = k + 1; φ_k(0); fit; nodes.

    The fit (k - 1, q) maps points at the nodes to coefficients c_k, k ≥ 1.
    """
    legendre = np.polynomial.legendre
    s, w = legendre.leggauss(count + 1)
    scale = np.sqrt(2 * np.arange(count) + 1)
    integrals = np.stack([legendre.legval(s, legendre.legint(row, lbnd=-1)) / 2 for row in np.diag(scale)], -1)
    at_zero, fit = scale * (-1.0) ** np.arange(count), np.linalg.pinv(np.c_[np.ones(count + 1), integrals])[2:]
    return w / 2, legendre.legvander(s, count - 1) * scale, integrals, at_zero, fit, (s + 1) / 2


@dataclass(frozen=True)
class Path:
    """A batch of paths: start x and end y (b, n + m, h), coefficients c_1, c_2, … (b, k − 1, n + m, h)."""

    metric: Metric
    n: int
    x: Tensor
    y: Tensor
    c: Tensor

    def split(self, u: Tensor) -> Pair:
        """Split into the factors, views."""
        return u[..., : self.n, :], u[..., self.n :, :]

    def rule(self) -> list[Tensor]:
        """Return weights, φ, integrals, φ(0), fit and times as tensors."""
        dtype, device = self.x.dtype.to_real(), self.x.device
        return [torch.as_tensor(a, dtype=dtype, device=device) for a in _rule(self.c.shape[1] + 1)]

    def states(self) -> tuple[Tensor, list[Tensor]]:
        """Return the matrix from (x, c_0, c_1, …) to points and then velocities at the nodes, and those themselves.

        The matrix is (2q, k + 1); the factors are (b, 2q, n, h) and (b, 2q, m, h).
        """
        _, phi, integrals, *_ = self.rule()
        B = torch.cat([torch.nn.functional.pad(integrals, (1, 0), value=1), torch.nn.functional.pad(phi, (1, 0))])
        factors = zip(*map(self.split, (self.x.unsqueeze(1), (self.y - self.x).unsqueeze(1), self.c)), strict=True)
        return B, [combine(B, torch.cat(f, 1)) for f in factors]

    def points(self) -> Pair:
        """Return the factors of the points at the Gauss nodes, (b, q, n, h) and (b, q, m, h)."""
        B, (G, H) = self.states()
        return G[:, : len(B) // 2], H[:, : len(B) // 2]

    def start_velocity(self) -> Tensor:
        """Return the velocity at time 0, (b, n + m, h)."""
        at_zero = self.rule()[3]
        return combine(at_zero.unsqueeze(0), torch.cat([(self.y - self.x).unsqueeze(1), self.c], 1)).squeeze(1)

    def refined(self, count: int) -> Path:
        """Return the same paths with more coefficients, ``count`` of them including c_0."""
        more = count - 1 - self.c.shape[1]
        return replace(self, c=torch.nn.functional.pad(self.c, (0, 0, 0, 0, 0, more))) if more > 0 else self

    def in_single(self) -> Path:
        """Return the same paths in single precision, which takes half the time, if they are well conditioned."""
        dtype = torch.complex64 if self.x.is_complex() else torch.float32
        if self.x.dtype == dtype:
            return self
        ends = self.split(torch.stack([self.x, self.y], 1))
        for X in (torch.cat(Xs, 1) for Xs in zip(self.points(), ends, strict=True)):
            values = torch.linalg.eigvalsh((X.mH @ X).nan_to_num(0, 0, 0))
            if not bool((values[..., -1] < _WELL_CONDITIONED * values[..., 0]).all()):
                return self
        return replace(self, x=self.x.to(dtype), y=self.y.to(dtype), c=self.c.to(dtype))

    def __getitem__(self, index: Tensor) -> Path:
        return replace(self, x=self.x[index], y=self.y[index], c=self.c[index])

    def moved(self, d: Tensor) -> Path:
        """Move the coefficients, and the end along its orbit; d is (b, features), Λ last."""
        dc, L = unflat(d, self)
        return replace(self, c=self.c + dc, y=moved_end(self.n, self.y, L))


def combine(A: Tensor, C: Tensor) -> Tensor:
    """Return Σ_k A_qk C_k."""
    return (A.to(C.dtype) @ C.flatten(-2)).unflatten(-1, C.shape[-2:])


def moved_end(n: int, y: Tensor, L: Tensor) -> Tensor:
    """Move y by the group element exp(−Λ): (G e^Λ, H e^{−Λᴴ})."""
    G, H = y[..., :n, :], y[..., n:, :]
    A = torch.linalg.matrix_exp(L)
    return torch.cat([G @ A, H @ torch.linalg.inv_ex(A)[0].mH], dim=-2)


def flat(c: Tensor, L: Tensor) -> Tensor:
    """Write coefficients and Λ as one vector per item."""
    return torch.cat([c.flatten(1), L.flatten(1)], dim=1)


def unflat(d: Tensor, like: Path) -> Pair:
    """Invert :func:`flat`."""
    size, h = like.c[0].numel(), like.x.shape[-1]
    return d[:, :size].reshape(like.c.shape), d[:, size:].unflatten(-1, (h, h))


def weights(metric: Metric, M: Tensor, N: Tensor, inverse: bool) -> Pair:
    """Return the weights of the metric, or their inverses, which are not finite for a singular Gram matrix."""
    G, H = (Gram(K, torch.linalg.inv_ex(K)[0]) for K in (M, N))
    return metric.weights(G, H)[inverse], metric.weights(H, G)[inverse]


def energy(path: Path) -> tuple[Tensor, Tensor]:
    """Compute the energy (b) and its gradient, in the layout of :func:`flat`."""
    w, metric = path.rule()[0], path.metric
    B, (G, H) = path.states()
    (M, U), (N, V) = ((Z.mH @ Z).tensor_split(2, 1) for Z in (G, H))
    of_M, of_N = (Gram(K, torch.linalg.inv_ex(K)[0]) for K in (M, N))
    value, found = torch.zeros_like(path.x[:, 0, 0].real), []
    for Z, own, other, A, D in ((G, of_M, of_N, U, V), (H, of_N, of_M, V, U)):
        W, _ = metric.weights(own, other)
        value = value + (W.mT * A).real.sum((-2, -1)) @ w
        slopes = torch.cat([metric.weight_slope(own, A, D), W], 1)
        found.append(combine(torch.cat([2 * w, 2 * w]) * B.mT, Z @ slopes))
    (P, R), (G, H) = found, path.split(path.y)
    return value, flat(torch.cat([P[:, 2:], R[:, 2:]], -2), G.mH @ P[:, 1] - R[:, 1].mH @ H)


def hermitian(S: Tensor) -> Tensor:
    """Return the Hermitian part."""
    return (S + S.mH) / 2


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
