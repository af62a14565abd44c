"""The elements of a group that bring one thing nearest to another: permutations, rotations, and GL(h) on pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from ...gauge import canonical_gauge
from ...linalg import column_rank_ratio, rank_tolerance
from .units import acted


def assigned(scores: Tensor) -> Tensor:
    """Return for every row its column in the assignment of the largest sum."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    return torch.as_tensor(linear_sum_assignment(scores.numpy(), maximize=True)[1])


def polar(C: Tensor) -> Tensor:
    """Return the unitary matrix nearest to C."""
    if C.shape[-1] == 1:
        return torch.where(C == 0, 1, C / C.abs().clamp_min(torch.finfo(C.dtype).tiny))
    U, _, Vh = torch.linalg.svd(C)
    return U @ Vh


def rotation(M: Tensor, centring: bool) -> Tensor:
    """Return the orthogonal Q with the largest tr(M Qᵀ); with Q 1 = 1 if norms centre."""
    if not centring:
        return polar(M)
    d = len(M)
    frame = torch.eye(d, dtype=M.dtype)
    frame[:, 0] = 1
    basis = torch.linalg.qr(frame).Q[:, 1:]
    return basis @ polar(basis.mT @ M @ basis) @ basis.mT + 1 / d


def permutation(M: Tensor, N: Tensor, signs: bool) -> Tensor:
    """Return the permutation Q with the largest tr(M Qᵀ) + tr(N |Q|ᵀ), its entries ±1 with ``signs``."""
    order = assigned((M.abs() if signs else M) + N)
    Q = torch.zeros_like(M)
    rows = torch.arange(len(M))
    sign = M[rows, order].sign() if signs else torch.ones(len(M), dtype=M.dtype)
    Q[rows, order] = torch.where(sign == 0, 1, sign)
    return Q


def balanced(x: Tensor, n: int) -> Tensor:
    """Return points in balanced gauge, GᴴG = HᴴH; those without full rank as they are."""
    G, H = x[..., :n, :], x[..., n:, :]
    if x.shape[-1] == 1:
        g, h = (torch.linalg.vector_norm(F, dim=-2, keepdim=True) for F in (G, H))
        s = torch.where((g > 0) & (h > 0), (h / g).sqrt(), 1)
        return torch.cat([G * s, H / s], dim=-2)
    sound = (column_rank_ratio(G) > rank_tolerance(G)) & (column_rank_ratio(H) > rank_tolerance(H))
    x = x.clone()
    x[sound] = canonical_gauge(G[sound], H[sound]).x
    return x


def fitted(x: Tensor, y: Tensor, n: int, A: Tensor, positive: bool) -> Tensor:
    """Lower ‖G_x − G_y A⁻¹‖² + ‖H_x − H_y Aᴴ‖² from A, point by point, by Gauss–Newton steps, cut until they help.

    A step A ← (1 + E) A solves the Sylvester equation GᴴG E + E HᴴH = R_Hᴴ H − Gᴴ R_G, where (G, H) is y moved by A,
    and R its difference from x.
    """

    def cost(A: Tensor) -> Tensor:
        square = (x - acted(y, n, A)).abs().square().sum((-2, -1))
        return torch.where(A[..., 0, 0].real > 0, square, torch.inf) if positive else square

    now = cost(A)
    for _ in range(20):
        z = acted(y, n, A)
        (G, H), (R, S) = ((t[..., :n, :], t[..., n:, :]) for t in (z, x - z))
        (p, U), (q, V) = torch.linalg.eigh(G.mH @ G), torch.linalg.eigh(H.mH @ H)
        weight = (p.unsqueeze(-1) + q.unsqueeze(-2)).clamp_min(torch.finfo(p.dtype).tiny)
        E = U @ ((U.mH @ (S.mH @ H - G.mH @ R) @ V) / weight) @ V.mH
        start, t = now, torch.ones_like(now)
        for _ in range(6):
            B = A + t[..., None, None] * (E @ A)
            lower = cost(B)
            better = lower < now
            A = torch.where(better[..., None, None], B, A)
            t = torch.where(better, 0, t / 2)
            now = torch.where(better, lower, now)
        if not bool((now < (1 - 1e-6) * start).any()):
            break
    return A
