"""The elements of a group that bring one thing nearest to another: permutations, rotations, and GL(h) on pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ...linalg import choose, column_rank_ratio, polar, rank_tolerance
from ...metrics import canonical_gauge
from .units import Cell, Move, Part

#: Gauss–Newton steps at most.
_STEPS = 20


def assigned(scores: Tensor) -> Tensor:
    """Return for every row its column in the assignment of the largest sum."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    return torch.as_tensor(linear_sum_assignment(scores.numpy(), maximize=True)[1])


def rotation(M: Tensor, centring: bool) -> Tensor:
    """Return the orthogonal Q with the largest tr(M Qᵀ); with Q 1 = 1 if norms centre."""
    if not centring:
        return polar(M)
    basis = torch.linalg.svd(torch.ones_like(M[:1])).Vh[1:].mT  # of what is orthogonal to 1
    return basis @ polar(basis.mT @ M @ basis) @ basis.mT + 1 / len(M)


def permutation(M: Tensor, N: Tensor, signs: bool) -> Tensor:
    """Return the permutation Q with the largest tr(M Qᵀ) + tr(N |Q|ᵀ), its entries ±1 with ``signs``."""
    sign = torch.where(M < 0, -1, 1) if signs else torch.ones_like(M)
    return torch.eye(len(M), dtype=M.dtype)[assigned(M * sign + N)] * sign


def turned(rows: Tensor, Q: Tensor) -> Tensor:
    """Return rows Qᵀ; a permutation needs no products."""
    Q = Q.to(rows.device)
    if int(Q.count_nonzero()) > len(Q):
        return rows @ Q.mT
    order = Q.abs().argmax(1)
    return rows[:, order] * Q.sum(1)


def matched(cell: Cell, X: Sequence[Tensor], Y: Sequence[Tensor]) -> Move:
    """Assign units to units, and within each pair queries to queries.

    Where a group acts, units are compared with the best unitary elements of it. Scores are in single precision: whether
    a match helps is for the caller to see.
    """
    U, R = cell.units, cell.queries
    X, Y = ([x.to(torch.complex64 if x.is_complex() else torch.float32) for x in side] for side in (X, Y))
    queries = torch.arange(R).expand(U, U, R).clone()
    if R > 1:
        grouped = (each for each in zip(cell.parts, X, Y, strict=True) if each[0].queries is not None)
        alike = torch.stack([_queries(*each) for each in grouped]).sum(0)
        for i, j in product(range(U), repeat=2):
            queries[i, j] = assigned(alike[i, j])
    scores = torch.zeros(U, U)
    for part, x, y in zip(cell.parts, X, Y, strict=True):
        for at in [slice(0, U)] if part.queries is None else [slice(i, i + 1) for i in range(U)]:
            z = part.arranged(y, Move(torch.arange(U), queries[at.start]))
            C = torch.einsum("uprh,vprk->uvphk", x[at].conj(), z)
            scores[at] += _fit(C, part.n > 0 and not part.group.positive)
    order = assigned(scores)
    return Move(order, queries[torch.arange(U), order])


def _fit(C: Tensor, free: bool) -> Tensor:
    """Return max Re⟨X, Y Aᴴ⟩ over unitary A, or for A = 1 unless ``free``, from C = Xᴴ Y; (…, planes, h, h) → (…)."""
    if free:
        return (C[..., 0].abs() if C.shape[-1] == 1 else torch.linalg.svdvals(C)).sum((-2, -1)).cpu()
    return C.diagonal(dim1=-2, dim2=-1).real.sum((-2, -1)).cpu()


def _queries(part: Part, x: Tensor, y: Tensor) -> Tensor:
    """Return inner products of queries' products with what they share; (units, units, queries, queries)."""
    assert part.queries is not None
    a, b = x[:, :, part.queries].conj(), y[:, :, part.queries]
    common = torch.ones(x.shape[2], dtype=torch.bool).index_fill_(0, part.queries.flatten(), False)
    C = torch.einsum("uprh,vprk->uvphk", x[:, :, common], y[:, :, common].conj())
    return torch.einsum("upaqh,vpbqk,uvphk->uvab", a, b, C).real.cpu()


def refined(cell: Cell, X: Sequence[Tensor], Y: Sequence[Tensor], move: Move) -> Move:
    """Choose the group elements of a move: from those that it has, or from the best unitary ones."""
    inner = dict(move.inner)
    for k, part in enumerate(cell.parts):
        if part.n:
            y, positive = part.arranged(Y[k], move), part.group.positive
            if k not in inner or part.signs:
                A = polar(X[k].mH @ y)
                inner[k] = A.abs() if positive else A
            inner[k] = inner[k] if part.signs else fitted(X[k], y, part.n, inner[k], positive)
    return replace(move, inner=inner)


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
    and R its difference from x. All of it follows from h × h matrices.
    """
    G, H = y[..., :n, :].mH, y[..., n:, :].mH
    P, Q, C, D = G @ G.mH, H @ H.mH, G @ x[..., :n, :], H @ x[..., n:, :]

    def cost(A: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of squares, without that of x, and A⁻¹."""
        X = torch.linalg.inv_ex(A).inverse
        square = (X.conj() * (P @ X - 2 * C) + A * (A @ Q - 2 * D.mH).conj()).real.sum((-2, -1))
        return (torch.where(A[..., 0, 0].real > 0, square, torch.inf) if positive else square), X

    now, X = cost(A)
    for _ in range(_STEPS):
        (p, U), (q, V) = torch.linalg.eigh(X.mH @ P @ X), torch.linalg.eigh(A @ Q @ A.mH)
        weight = (p.unsqueeze(-1) + q.unsqueeze(-2)).clamp_min(torch.finfo(p.dtype).tiny)
        E = U @ ((U.mH @ ((D.mH - A @ Q) @ A.mH - X.mH @ (C - P @ X)) @ V) / weight) @ V.mH
        start, t = now, torch.ones_like(now)
        while bool((t > 0.01).any()):
            B = A + t[..., None, None] * (E @ A)
            lower, Y = cost(B)
            better = lower < now
            A, X, now = choose(better, B, A), choose(better, Y, X), choose(better, lower, now)
            t = torch.where(better, 0, t / 2)
        if not bool((start - now > 1e-6 * start.abs()).any()):
            break
    return A
