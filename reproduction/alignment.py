"""The representative of one orbit that is nearest to another point, to be compared with geodesics."""

from __future__ import annotations

import torch
from torch import Tensor

from quotient_manifolds import ConvergenceError, GLQuotientInv, GLQuotientMix, GLTangentSpace, canonical_gauge
from quotient_manifolds.linalg import in_double, polar, row_power, weighted_sylvester
from quotient_manifolds.logarithm.paths import moved_end

__all__ = ["align"]

#: Steps after which an alignment gives up, a few dozen suffice; conjugate gradients in each.
_STEPS, _INNER = 500, 100


@torch.no_grad()
def align(manifold: GLQuotientInv | GLQuotientMix, x: Tensor, y: Tensor, relative_tol: float = 1e-7) -> Tensor:
    r"""Return the representative of y's orbit that is nearest to x in the metric at x (a local minimum).

    .. math:: \min_A \|ψ(A, y) - x\|_x

    By Newton steps that are halved until the distance falls, from the unitary matrix that fits the canonical gauges of
    both points best. Computed in double precision and returned in the dtype of x.

    Parameters
    ----------
    manifold : GLQuotientInv or GLQuotientMix
    x, y : Tensor
        Points, (…, n + m, h).
    relative_tol : float
        Size of the last step.

    Returns
    -------
    Tensor
        (…, n + m, h).

    Raises
    ------
    ConvergenceError
        The steps are still long after 500 iterations.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> from reproduction.alignment import align
    >>> manifold = GLQuotientMix(4, 3)
    >>> x = manifold.origin(4 + 3, 2)
    >>> y = manifold.act(x, torch.tensor([[2.0, 1.0], [0.0, 0.5]]))
    >>> torch.allclose(align(manifold, x, y), x, atol=1e-5)
    True
    """
    dtype, (x, y) = x.dtype, torch.broadcast_tensors(in_double(x), in_double(y))
    space = manifold.tangent_space_at(x)
    flat = GLTangentSpace(manifold.metric, space.gauge)
    g, (G, H) = canonical_gauge(*flat.split(y)), flat.split(flat.x)
    # The unitary between the two canonical gauges, from both factors together.
    start = g.x @ polar(g.G.mH @ G + g.H.mH @ H)
    result, size = _aligned(flat, start, relative_tol)
    if bool((size > max(relative_tol, 1e-5)).any()):
        raise ConvergenceError(
            f"align: steps of size {size.max().item():.1e} after {_STEPS} iterations; where the singular values of G "
            "Hᴴ spread over 1e6, points that are far apart are out of reach",
            size,
        )
    return space.from_gauge(*flat.split(result)).to(dtype)


def _newton_step(space: GLTangentSpace, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute the Λ of a Newton step of :func:`align` at y = (G, H), in canonical gauge, and the slope along it.

    The second derivative of :math:`\tfrac12 \|ψ(e^{-Λ}, y) - x\|^2` is, with r = y − x and
    :math:`E = W r_G^H G + H^H r_H W`,

    .. math:: Λ \mapsto M Λ W + W Λ N + \tfrac12 (E Λ + Λ E)^H .

    The first two terms are those of Gauss and Newton, a Sylvester equation that preconditions conjugate gradients.
    Where points are far apart the last one is as large; a direction in which the sum is negative is followed.
    """
    (G, H), (r_G, r_H) = space.split(y), space.split(y - space.x)
    w = row_power(space.gauge.sigma, space.present, -2 * space.metric.scale_exponent)
    root = torch.diag_embed(w.squeeze(-2).rsqrt()).to(y.dtype)
    M, N, G_r, r_H_H = G.mH @ G, H.mH @ H, G.mH @ r_G * w, w.mT * (r_H.mH @ H)
    precondition, E = weighted_sylvester(M, N, root, root), (G_r + r_H_H).mH
    first = r = r_H_H - G_r
    p = z = precondition(r)
    square = start = _dot(r, z)
    enough = torch.minimum(start / space.inner(y - space.x), torch.full_like(start, 0.01)) * start
    L, going = torch.zeros_like(r), square > 0
    for _ in range(_INNER):
        Hp = M @ p * w + w.mT * (p @ N) + (E @ p + p @ E).mH / 2
        bend = _dot(p, Hp)
        length = torch.where(bend > 0, square / bend, 1 / torch.linalg.matrix_norm(p))
        step = torch.where(going, length, 0)[..., None, None]
        L, r, going = L + step * p, r - step * Hp, going & (bend > 0)
        z = precondition(r)
        last, square = square, _dot(r, z)
        going = going & (square > enough)
        if not bool(going.any()):
            break
        p = torch.where(going[..., None, None], z + (square / last)[..., None, None] * p, p)
    return L, -_dot(first, L)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).real.sum((-2, -1))


def _aligned(space: GLTangentSpace, y: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Align in canonical gauge; result, and the size of the last step relative to 1."""
    value = space.inner(y - space.x) / 2
    size, rounding = torch.full_like(value, torch.inf), 10 * torch.finfo(value.dtype).eps
    moving = torch.ones_like(value, dtype=torch.bool)
    for _ in range(_STEPS):
        L, slope = _newton_step(space, y)
        size = torch.where(moving, torch.linalg.matrix_norm(L), size)
        todo = moving & (size > tol)
        t = (y.shape[-1] ** 0.5 / size).clamp_max(1)
        moving = torch.zeros_like(moving)
        for _ in range(30):
            if not bool(todo.any()):
                break
            trial = moved_end(space.gauge.n, y, torch.where(todo, t, 0)[..., None, None] * L)
            new = space.inner(trial - space.x) / 2
            better = todo & (new <= value * (1 + rounding) + 1e-4 * t * slope)
            y = torch.where(better[..., None, None], trial, y)
            value, t = torch.where(better, new, value), t / 2
            moving, todo = moving | better, todo & ~better
        if not bool(moving.any()):
            break
    return y, size
