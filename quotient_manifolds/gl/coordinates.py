r"""Coordinates in which the metric is the identity: :math:`ξ \hat Σ^{-1/2}` (inv), :math:`ξ \hat Σ^{1/2}` (mix).

They belong to the canonical representative, where M = N = Σ. The operations of every ascent step are done here in few
passes over the weights: all large tensors are sums of the point, the vector and the gradient, each times an h × h
matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg import pack
from .local_metric import LocalMetric
from .metrics import Motion, Pair

__all__ = ["Coordinates", "along_gradient", "row_power"]


def row_power(sigma: Tensor, present: Tensor, exponent: float) -> Tensor:
    """Return σ^exponent as a row (…, 1, h), with zeros for the absent directions of the point."""
    power = torch.where(present, sigma, 1) ** exponent
    return torch.where(present, power, 0).unsqueeze(-2)


def _add_product(out: Tensor, X: Tensor, A: Tensor) -> None:
    """Add X A to ``out``, for a small A."""
    if out.dim() == X.dim() == A.dim() == 3:
        out.baddbmm_(X, A)
    else:
        out += X @ A


def _sum_of_products(out: Tensor, first: tuple[Tensor, Tensor], *rest: tuple[Tensor, Tensor]) -> None:
    """Write Σ X A into ``out``, for small matrices A."""
    if out.dim() == first[0].dim() == first[1].dim() == 3:
        torch.bmm(*first, out=out)
    else:
        out.copy_(first[0] @ first[1])
    for X, A in rest:
        _add_product(out, X, A)


@dataclass(frozen=True)
class Coordinates:
    """The coordinates at one point; vectors and outputs are given factor by factor."""

    local: LocalMetric
    sigma_hat: Tensor
    present: Tensor

    @property
    def to_vector(self) -> Tensor:
        """The row that turns coordinates into a vector in canonical gauge."""
        return row_power(self.sigma_hat, self.present, self.local.metric.scale_exponent)

    @property
    def from_vector(self) -> Tensor:
        """The row that turns a vector in canonical gauge into coordinates."""
        return row_power(self.sigma_hat, self.present, -self.local.metric.scale_exponent)

    def retract(self, c: Pair, out: Pair) -> None:
        """Write the point that the second-order retraction reaches."""
        scale = self.to_vector
        equations = self.local.equations(*self.local.motions(c, scale))
        identity = torch.eye(scale.shape[-1], dtype=c[0].dtype, device=scale.device)
        for part, X, v, (a, b) in zip(out, self.local.factors, c, equations, strict=True):
            _sum_of_products(part, (X, identity + 0.5 * a), (v, scale.mT * (identity + 0.5 * b)))

    def pull_back(self, c: Pair, egrad: Pair, factor: float, out: Pair) -> None:
        """Write the coordinates of the horizontal part of the pulled-back gradient, times a factor."""
        scale, back = self.to_vector, self.from_vector
        pulls = self.local.pulls(c, egrad, scale)
        adjoints = self.local.adjoints(*pulls)
        # Q = P e + X a + ξ b is the pulled-back covector, and the projection needs Xᴴ Q = (PᴴX)ᴴ e + …
        inner = [
            s.pX.mH @ e + gram.exact @ a + s.vX.mH @ b
            for s, gram, (e, a, b) in zip(pulls, self.local.grams, adjoints, strict=True)
        ]
        L = self.local.vertical_part(inner[0] * scale**2, inner[1] * scale**2)
        parts = zip(out, self.local.factors, c, egrad, adjoints, (L, -L.mH), strict=True)
        for part, X, v, p, (e, a, b), V in parts:
            _sum_of_products(
                part, (p, factor * e * scale), (X, factor * (a * scale + V * back)), (v, factor * scale.mT * b * scale)
            )

    def project(self, c: Pair, out: Pair) -> None:
        """Write the coordinates of the horizontal part."""
        scale, back = self.to_vector, self.from_vector
        G_xi, H_eta = self.local.against_point(c)
        L = self.local.vertical_part(G_xi * scale, H_eta * scale)
        for part, v, X, V in zip(out, c, self.local.factors, (L, -L.mH), strict=True):
            torch.mul(v, self.present.unsqueeze(-2), out=part)
            _add_product(part, X, V * back)


def along_gradient(
    local: LocalMetric, present: Tensor, x: Pair, covector: Pair, ways: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Callable[[float], Tensor]]:
    """Return the squared length of a gradient in canonical gauge, and the retraction along it.

    ``x`` is the given representative, to which ``ways`` map vectors from canonical gauge (None: no change).
    """
    there = (present.unsqueeze(-1) & present.unsqueeze(-2)).to(covector[0].dtype)
    weights = [V * there for V in local.inverse_weights()]
    square, motions = [], []
    for X, P, V, gram in zip(local.factors, covector, weights, local.grams, strict=True):
        PP = P.mH @ P
        square.append((V.mT * PP).real.sum(dim=(-2, -1)))
        motions.append(Motion(gram.inverse, V.mH @ (P.mH @ X), V.mH @ PP @ V))
    equations = local.equations(*motions)

    def end(t: float) -> Tensor:
        out = pack(*x)
        rows = [X.shape[-2] for X in x]
        for part, X, P, V, (a, b), A in zip(
            out.split(rows, dim=-2), local.factors, covector, weights, equations, ways, strict=True
        ):
            of_point, of_vector = 0.5 * t**2 * a, V @ (t * torch.eye(b.shape[-1]).to(b) + 0.5 * t**2 * b)
            if A is not None:
                of_point, of_vector = of_point @ A, of_vector @ A
            _add_product(part, X, of_point)
            _add_product(part, P, of_vector)
        return out

    return square[0] + square[1], end
