"""Parallel transport along the geodesics of the GL(h) quotients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..linalg import pack
from ..linalg import symmetric_part_doubled as sym2
from .geodesic import raise_on_exit
from .geodesic_ode import integrate
from .logarithm import GLManifold, compressed
from .tangent import GLTangentSpace

__all__ = ["parallel_transport"]


def _acceleration(metric: str, G: Tensor, H: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the geodesic acceleration in any gauge, of any ambient velocity."""

    def one(X: Tensor, v: Tensor, Y: Tensor, w: Tensor) -> Tensor:
        if metric == "inv":
            M = X.mH @ X
            return v @ torch.linalg.solve(M, sym2(X.mH @ v)) - X @ torch.linalg.solve(M, v.mH @ v)
        return torch.linalg.solve(Y.mH @ Y, X @ (w.mH @ w) - v @ sym2(Y.mH @ w), left=False)

    return one(G, p, H, q), one(H, q, G, p)


def parallel_transport(
    manifold: GLManifold, space: GLTangentSpace, u: Tensor, v: Tensor, *, tol: float = 1e-11
) -> tuple[Tensor, Tensor]:
    r"""Transport v along the geodesic with velocity u, for unit time, with the connection of the quotient.

    For horizontal lifts: :math:`\dot v = -Γ(\dot x, v) + (GΛ, -HΛ^H)`, Γ that of the total space, and Λ such that v
    stays horizontal: the derivative of the horizontality condition :math:`c(x, v) = 0` vanishes,

    - mix :math:`c = G^H v_G N - M v_H^H H`: :math:`2 M Λ N = -\dot c_0`;
    - inv :math:`c = v_G^H G N - M H^H v_H`: :math:`Λ^H M N + M N Λ^H = -\dot c_0`,

    with ċ₀ the derivative for Λ = 0. Returns the end point and the transported vector.
    """
    metric = space.metric
    raise_on_exit(space.exit_time(u), 1.0)
    shape = torch.broadcast_shapes(space.x.shape, u.shape, v.shape)
    base = space.gauge.x
    parts = [base, pack(*space.to_gauge(u)), pack(*space.to_gauge(v))]
    small, parts, back = compressed(manifold, *(a.expand(shape) for a in parts))
    # Columns of unit size for the error control.
    root = space.gauge.sigma.sqrt().unsqueeze(-2)
    scale = torch.stack([root, *(2 * (root if metric == "inv" else 1 / root,))], 0)
    y = torch.stack(parts) / scale
    is_complex = y.is_complex()

    def derivative(y: Tensor) -> Tensor:
        (G, p, a), (H, q, b) = (k.unbind(0) for k in (y * scale).split(small.row_split(), dim=-2))
        dp, dq = _acceleration(metric, G, H, p, q)
        plus, minus = (_acceleration(metric, G, H, p + k * a, q + k * b) for k in (1, -1))
        da, db = (plus[0] - minus[0]) / 4, (plus[1] - minus[1]) / 4  # −Γ(ẋ, v), by polarisation
        M, N, dM, dN = G.mH @ G, H.mH @ H, sym2(G.mH @ p), sym2(H.mH @ q)
        if metric == "mix":
            K, J = G.mH @ a, b.mH @ H
            dK, dJ = p.mH @ a + G.mH @ da, db.mH @ H + b.mH @ q
            dc = dK @ N + K @ dN - dM @ J - M @ dJ
            L = -torch.linalg.solve(N, torch.linalg.solve(M, dc), left=False) / 2
        else:
            K, J = a.mH @ G, H.mH @ b
            dK, dJ = da.mH @ G + a.mH @ p, q.mH @ b + H.mH @ db
            dc = dK @ N + K @ dN - dM @ J - M @ dJ
            R = torch.linalg.cholesky(M)  # M N = R (Rᴴ N R) R⁻¹
            s, W = torch.linalg.eigh(R.mH @ N @ R)
            T = W.mH @ torch.linalg.solve(R, dc @ R) @ W / (s.unsqueeze(-1) + s.unsqueeze(-2))
            L = -(torch.linalg.solve(R, R @ W @ T @ W.mH, left=False)).mH
        da, db = da + G @ L, db - H @ L.mH
        return torch.stack([torch.cat(k, -2) for k in ((p, q), (dp, dq), (da, db))]) / scale

    # The batch first, for the norm that looks at the worst item.
    def flat(y: Tensor) -> Tensor:
        y = y.movedim(0, -3).flatten(-3)
        return torch.view_as_real(y).flatten(-2) if is_complex else y

    def unflat(y: Tensor) -> Tensor:
        if is_complex:
            y = torch.complex(*y.reshape(*y.shape[:-1], -1, 2).unbind(-1))
        return y.reshape(*y.shape[:-1], 3, -1, shape[-1]).movedim(-3, 0)

    end = unflat(integrate(lambda _t, y: flat(derivative(unflat(y))), flat(y), 1.0, tol)) * scale
    x1, v1 = (space.from_gauge(*space.split(back(k))) for k in (end[0], end[2]))
    return x1, v1
