r"""Paths between two orbits as polynomials in time, their energy, and what preconditions its minimisation.

A path in the total space, from :math:`x` to some representative of the orbit of :math:`y`, is given by the Legendre
coefficients of its velocity, :math:`\dot γ = \sum_k c_k φ_k(t)` with φ_k orthonormal on [0, 1], so that
:math:`c_0 = γ(1) - x`. The energy :math:`\int \langle \dot γ, \dot γ \rangle\,dt` (Gauss–Legendre) is least for a
shortest geodesic of the quotient, without a horizontal projection: where the end may move along its orbit, the least
path is horizontal. Geodesics are analytic, hence a few coefficients suffice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..linalg import hermitian_power, real_dtype, trace_product, weighted_sylvester
from .metrics import Gram, Metric, Pair

__all__ = ["Path", "Preconditioner", "energy", "first_path", "flat", "inner", "moved_end", "polar", "unflat"]


@functools.cache
def _rule(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Give weights w (q), φ_k (q, k) and their integrals (q, k) at Gauss nodes, and φ_k(0); q = k + 2."""
    legendre = np.polynomial.legendre
    s, w = legendre.leggauss(count + 2)
    scale = np.sqrt(2 * np.arange(count) + 1)
    integrals = [legendre.legval(s, legendre.legint(row, lbnd=-1)) / 2 for row in np.diag(scale)]
    return w / 2, legendre.legvander(s, count - 1) * scale, np.stack(integrals, -1), scale * (-1.0) ** np.arange(count)


@functools.cache
def _times(count: int) -> np.ndarray:
    """Give the Gauss nodes in [0, 1]."""
    return (np.polynomial.legendre.leggauss(count + 2)[0] + 1) / 2


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
        """Give weights, φ, integrals and φ(0) as tensors."""
        dtype, device = real_dtype(self.x.dtype), self.x.device
        return [torch.as_tensor(a, dtype=dtype, device=device) for a in _rule(self.c.shape[1] + 1)]

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Give points and velocities at the Gauss nodes, both (b, q, n + m, h)."""
        _, phi, integrals, _ = self.rule()
        C = torch.cat([(self.y - self.x).unsqueeze(1), self.c], 1)
        return self.x.unsqueeze(1) + _combine(integrals, C), _combine(phi, C)

    def start_velocity(self) -> Tensor:
        """Give the velocity at time 0, (b, n + m, h)."""
        at_zero = self.rule()[3]
        return _combine(at_zero.unsqueeze(0), torch.cat([(self.y - self.x).unsqueeze(1), self.c], 1)).squeeze(1)

    def refined(self, count: int) -> Path:
        """Give the same paths with more coefficients, ``count`` with c_0."""
        more = count - 1 - self.c.shape[1]
        return replace(self, c=torch.nn.functional.pad(self.c, (0, 0, 0, 0, 0, more))) if more > 0 else self

    def __getitem__(self, index: Tensor) -> Path:
        return replace(self, x=self.x[index], y=self.y[index], c=self.c[index])

    def moved(self, d: Tensor) -> Path:
        """Move the coefficients, and the end along its orbit; d is (b, features), Λ last."""
        dc, L = unflat(d, self)
        return replace(self, c=self.c + dc, y=moved_end(self.n, self.y, L))


def first_path(metric: Metric, n: int, x: Tensor, y: Tensor, count: int) -> Path:
    """Give the straight path, but for square factors, which it would make singular: those turn from x to y.

    A square factor goes along :math:`e^{tΩ} ((1-t) X + t e^{-Ω} Y)` with :math:`e^Ω` the unitary part of
    :math:`Y X^{-1}`, from a thousand roots of it: on the way its determinant has no zero.
    """
    path = Path(metric, n, x, y, x.new_zeros(len(x), count - 1, *x.shape[1:]))
    for part, (X, Y) in enumerate(zip(path.split(x), path.split(y), strict=True)):
        if X.shape[-2] == X.shape[-1]:
            path = path.refined(2 * count)
            path.split(path.c)[part].copy_(_turning(path, X, Y))
    return path


def _turning(path: Path, X: Tensor, Y: Tensor) -> Tensor:
    """Give the coefficients k ≥ 1 of the path that turns a square factor."""
    h, count = X.shape[-1], path.c.shape[1] + 1
    eye = torch.eye(h, dtype=X.dtype, device=X.device)
    skew = 1e-3 * (eye.roll(1, 0) - eye.roll(-1, 0))  # out of symmetric positions, where a root is not unique
    root = whole = polar(torch.linalg.solve(X, Y, left=False))
    for _ in range(10):
        root = polar(eye + root + skew)
        skew = 0 * skew
    generator = 2.0**9 * (root - root.mH)
    w, phi, *_ = path.rule()
    t = torch.as_tensor(_times(count), dtype=w.dtype, device=w.device)[:, None, None]
    turn, straight = torch.linalg.matrix_exp(t * generator.unsqueeze(1)), (whole.mH @ Y - X).unsqueeze(1)
    velocity = generator.unsqueeze(1) @ turn @ (X.unsqueeze(1) + t * straight) + turn @ straight
    return _combine((phi * w.unsqueeze(-1)).mT, velocity)[:, 1:]


def polar(X: Tensor) -> Tensor:
    """Give the unitary factor of X."""
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


def _combine(A: Tensor, C: Tensor) -> Tensor:
    """Give Σ_k A_qk C_k."""
    return (A.to(C.dtype) @ C.flatten(-2)).unflatten(-1, C.shape[-2:])


def moved_end(n: int, y: Tensor, L: Tensor) -> Tensor:
    """Move y by the group element exp(−Λ): (G e^Λ, H e^{−Λᴴ})."""
    G, H = y[..., :n, :], y[..., n:, :]
    return torch.cat([G @ torch.linalg.matrix_exp(L), H @ torch.linalg.matrix_exp(-L.mH)], dim=-2)


def flat(c: Tensor, L: Tensor) -> Tensor:
    """Write coefficients and Λ as one vector an item."""
    return torch.cat([c.flatten(1), L.flatten(1)], dim=1)


def unflat(d: Tensor, like: Path) -> Pair:
    """Invert :func:`flat`."""
    size, h = like.c[0].numel(), like.x.shape[-1]
    return d[:, :size].reshape(like.c.shape), d[:, size:].unflatten(-1, (h, h))


def _weights(metric: Metric, M: Tensor, N: Tensor, inverse: bool) -> Pair:
    """Give the weights of the metric, or their inverses; a singular Gram matrix gives what is not finite."""
    G, H = (Gram(K, K, torch.linalg.inv_ex(K)[0]) for K in (M, N))
    function = metric.inverse_weight if inverse else metric.weight
    return function(G, H), function(H, G)


def inner(path: Path, u: Tensor) -> Tensor:
    """Compute the square of a vector at the start of paths, (b)."""
    M, N = (X.mH @ X for X in path.split(path.x))
    (W_G, W_H), (P, R) = _weights(path.metric, M, N, inverse=False), path.split(u)
    return trace_product(W_G, P, P) + trace_product(W_H, R, R)


def energy(path: Path) -> tuple[Tensor, Tensor]:
    """Compute the energy (b) and its gradient, as :func:`flat` has it."""
    w, phi, integrals, _ = path.rule()
    x, v = path.nodes()
    points, velocities = path.split(x), path.split(v)
    # Automatic differentiation for h × h matrices only.
    grams = [(X.mH @ X).requires_grad_() for X in points] + [(u.mH @ u).requires_grad_() for u in velocities]
    with torch.enable_grad():
        M, N, A, B = grams
        W_G, W_H = _weights(path.metric, M, N, inverse=False)
        value = ((W_G.mT * A).real.sum((-2, -1)) + (W_H.mT * B).real.sum((-2, -1))) @ w
        slopes = [2 * _hermitian(s) for s in torch.autograd.grad(value.sum(), grams)]
    of_x = torch.cat([X @ s for X, s in zip(points, slopes[:2], strict=True)], -2)
    of_v = torch.cat([u @ s for u, s in zip(velocities, slopes[2:], strict=True)], -2)
    of_C = _combine(integrals.mT, of_x) + _combine(phi.mT, of_v)
    (G, H), (P, R) = path.split(path.y), path.split(of_C[:, 0])
    return value.detach(), flat(of_C[:, 1:], G.mH @ P - R.mH @ H)


def _hermitian(S: Tensor) -> Tensor:
    return (S + S.mH) / 2


class Preconditioner:
    r"""An approximate inverse of the energy's second derivative.

    The coefficients c_k, k ≥ 1, see little but the average weight of the metric. The end moves along its orbit by a
    Hermitian part S of Λ, which stretches the path, by :math:`t γ(t) S`, and a skew-Hermitian part Ω, which turns the
    part of it off the span of the start, by :math:`γ^⊥(t) Ω`. Where the spans of both ends are orthogonal all turned
    ends are equally far: these directions are soft. With :math:`S_G = W^{1/2} G_1^H G_0 W^{1/2}` and
    :math:`T = S_G + S_H` (cosines of the angles), the energy has about the second derivative
    :math:`\tfrac12(T'Ω + ΩT')` there, :math:`T' = θ \cot θ` for :math:`T = \cos θ`.
    """

    def __init__(self, path: Path) -> None:
        w, phi, integrals, _ = path.rule()
        averages = [torch.einsum("q,bqij->bij", w.to(X.dtype), X.mH @ X) for X in path.split(path.nodes()[0])]
        self._inverse = [_hermitian(V) / 2 for V in _weights(path.metric, averages[0], averages[1], inverse=True)]
        ends, starts = path.split(path.y), path.split(path.x)
        roots = [hermitian_power(V, 0.5) for V in self._inverse]
        back = [torch.linalg.inv(R) for R in roots]
        grams = [X.mH @ X for X in ends]
        self._stretch = weighted_sylvester(grams[0], grams[1], roots[1], roots[0])
        T = _hermitian(sum(R @ (Y.mH @ X) @ R for R, X, Y in zip(back, starts, ends, strict=True)))
        size = sum((R @ M @ R).diagonal(dim1=-2, dim2=-1).real.mean(-1) for R, M in zip(back, grams, strict=True))
        cosine, self._turn = torch.linalg.eigh(T / size[..., None, None])
        self.cosine, cosine = cosine[:, 0], cosine.clamp(0.01, 1 - 1e-6)
        stiffness = size.unsqueeze(-1) * cosine * cosine.arccos() / (1 - cosine**2).sqrt()
        self._stiffness = (stiffness.unsqueeze(-1) + stiffness.unsqueeze(-2)) / 2
        # What the coefficients become where the path follows: by C^⊥ for turns, by AC for stretches.
        bases = [torch.linalg.qr(X)[0].unsqueeze(1) for X in starts]
        turned = [C - Q @ (Q.mH @ C) for Q, C in zip(bases, path.split(path.c), strict=True)]
        t = torch.as_tensor(_times(path.c.shape[1] + 1), dtype=w.dtype, device=w.device).unsqueeze(-1)
        A = (phi * w.unsqueeze(-1)).mT @ (integrals + t * phi)
        stretched = path.split(_combine(A[1:], torch.cat([(path.y - path.x).unsqueeze(1), path.c], 1)))
        self._followers = list(zip(turned, stretched, roots, back, strict=True))

    def _following(self, L: Tensor) -> Tensor:
        """Give the change of the coefficients when the end moves by Λ: every factor turns and stretches."""
        found = []
        for (turned, stretched, R, back), moved in zip(self._followers, (L, -L.mH), strict=True):
            K = R @ moved @ back
            turn, stretch = back @ ((K - K.mH) / 2) @ R, back @ _hermitian(K) @ R
            found.append(turned @ turn.unsqueeze(1) + stretched @ stretch.unsqueeze(1))
        return torch.cat(found, -2)

    def _pulled(self, g: Pair) -> Tensor:
        """Apply the adjoint of :meth:`_following`."""
        found = []
        for (turned, stretched, R, back), v in zip(self._followers, g, strict=True):
            by_turn, by_stretch = (back @ (D.flatten(1, 2).mH @ v.flatten(1, 2)) @ R for D in (turned, stretched))
            found.append(R @ ((by_turn - by_turn.mH) / 2 + _hermitian(by_stretch)) @ back)
        return found[0] - found[1].mH

    def __call__(self, g: Tensor, path: Path) -> Tensor:
        """Apply it to a gradient at a path of as many coefficients."""
        gc, gL = unflat(g, path)
        P, R = path.split(gc)
        K, Q = gL + self._pulled((P, R)), self._turn
        L = Q @ ((Q.mH @ ((K - K.mH) / 2) @ Q) / self._stiffness) @ Q.mH
        L = L + _hermitian(self._stretch(_hermitian(K)))
        V_G, V_H = (V.unsqueeze(1) for V in self._inverse)
        return flat(torch.cat([P @ V_G, R @ V_H], -2) + self._following(L), L)
