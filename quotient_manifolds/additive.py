r"""The paper's additive relaxation of the Gram matrices, :math:`G^H G + εI`.

Kept to redo the paper's Figure 9: unlike the floor of :class:`quotient_manifolds.GLQuotientInv` it depends on the
representative, so nothing here is invariant along orbits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import standard_normal
from .gl.gauge import Gauge
from .gl.manifold import GLQuotient
from .gl.metrics import InvTangentSpace, MixTangentSpace
from .gl.tangent import GLTangentSpace
from .linalg import hermitian_power, in_double, pack, real_dtype

__all__ = ["additive_tangent_space"]


class _Additive(GLTangentSpace):
    """Evaluates the metric's formulas at the representative at hand, with M̂ = M + εI and N̂ = N + εI."""

    # W^{1/2} and W^{-1/2} of the metric's two weights, and the bases that make its Sylvester equation diagonal.
    _root_G: Tensor
    _root_H: Tensor
    _rise_G: Tensor
    _rise_H: Tensor
    _left: Tensor
    _right: Tensor

    def __init__(self, manifold: GLQuotient, x: Tensor, epsilon: float, dtype: torch.dtype) -> None:
        self.manifold, self._at_canonical = manifold, True  # no vector is carried anywhere
        wide = in_double(x)
        G, H = wide.split(manifold.row_split(), dim=-2)
        M, N = G.mH @ G, H.mH @ H
        identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        small = {"M": M, "N": N, "M_hat": M + epsilon * identity, "N_hat": N + epsilon * identity}
        small["M_inv"], small["N_inv"] = (torch.linalg.inv(small[k]) for k in ("M_hat", "N_hat"))
        for name, value in small.items():
            setattr(self, name, value)
        W_G, W_H = self._weights()
        small["_root_G"], small["_root_H"] = hermitian_power(W_G, 0.5), hermitian_power(W_H, 0.5)
        small["_rise_G"], small["_rise_H"] = hermitian_power(W_G, -0.5), hermitian_power(W_H, -0.5)
        d1, Q1 = torch.linalg.eigh(small["_rise_G"] @ N @ small["_rise_G"])
        d2, Q2 = torch.linalg.eigh(small["_rise_H"] @ M @ small["_rise_H"])
        small["_left"], small["_right"] = small["_rise_G"] @ Q1, small["_rise_H"] @ Q2
        cast = real_dtype(dtype).to_complex() if x.is_complex() else real_dtype(dtype)
        for name, value in small.items():
            setattr(self, name, value.to(cast))
        self._denominator = (d1.unsqueeze(-1) + d2.unsqueeze(-2)).to(real_dtype(dtype))
        self.x = x.to(cast)
        self.G, self.H = self.split(self.x)
        sigma = torch.linalg.svdvals(hermitian_power(M, 0.5) @ hermitian_power(N, 0.5))
        self.sigma_hat = sigma
        self.present = torch.ones_like(sigma, dtype=torch.bool)
        self.gauge = Gauge(self.x, manifold.n, sigma, identity, identity)

    def _inverse_weights(self) -> tuple[Tensor, Tensor]:
        return self._rise_G @ self._rise_G, self._rise_H @ self._rise_H

    def _vertical_part(self, G_xi: Tensor, H_eta: Tensor) -> Tensor:
        # W_G X M + N X W_H = Hᴴ ξ_H W_H − W_G ξ_Gᴴ G with X = Λᴴ, in the bases that make all four diagonal.
        W_G, W_H = self._weights()
        B = H_eta @ W_H - W_G @ G_xi.mH
        Y = (self._left.mH @ B @ self._right) / self._denominator
        return (self._left @ Y @ self._right.mH).mH

    def coordinates(self, u: Tensor) -> Tensor:
        xi, eta = self.split(u)
        return pack(xi @ self._root_G, eta @ self._root_H)

    def from_coordinates(self, c: Tensor) -> Tensor:
        xi, eta = self.split(c)
        return pack(xi @ self._rise_G, eta @ self._rise_H)

    def dual_coordinates(self, e: Tensor) -> Tensor:
        return self.from_coordinates(e)  # the roots are Hermitian

    def project_coordinates(self, c: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = self.coordinates(self.proju(self.from_coordinates(c)))
        return result if out is None else out.copy_(result)

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        return self.proju(self.from_coordinates(standard_normal(tuple(self.x.shape), self.x, generator)))


class _AdditiveInv(_Additive, InvTangentSpace):
    """The inv metric."""


class _AdditiveMix(_Additive, MixTangentSpace):
    """The mix metric."""


def additive_tangent_space(
    manifold: GLQuotient, x: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> GLTangentSpace:
    r"""Give the tangent space at x with the paper's relaxed Gram matrices.

    .. math:: \hat M = G^H G + εI, \qquad \hat N = H^H H + εI

    in the place of M and N in the metric and its inverses; the vertical space stays :math:`(GΛ, -HΛ^H)`.

    Parameters
    ----------
    manifold : GLQuotientInv or GLQuotientMix
    x : Tensor
        The representative, (…, n + m, h). Another one of its orbit gives other distances.
    epsilon : float
        ε > 0, in units of squared weights.
    dtype : torch.dtype, optional
        Precision to work in; by default that of x. The set-up is done in float64.

    Returns
    -------
    GLTangentSpace

    Raises
    ------
    ValueError
        ε is not positive.

    Notes
    -----
    Paper, §5.2 and Figure 9.

    Examples
    --------
    Lengths depend on the representative, here of the product 1:

    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> from quotient_manifolds.additive import additive_tangent_space
    >>> manifold, x = GLQuotientMix(1, 1), torch.tensor([[[1.0], [1.0]], [[2.0], [0.5]]])
    >>> additive_tangent_space(manifold, x, 0.1).norm(x)
    tensor([1.4832, 1.5572])
    >>> manifold.norm(x, x)
    tensor([1.4142, 1.4142])
    """
    if not epsilon > 0:
        raise ValueError(f"the additive relaxation must be positive, got {epsilon}")
    kind = _AdditiveInv if manifold.space_class is InvTangentSpace else _AdditiveMix
    return kind(manifold, x, epsilon, x.dtype if dtype is None else dtype)
