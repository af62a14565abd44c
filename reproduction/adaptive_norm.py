r"""Attention pairs on the quotient whose vectors are measured entry by entry, :math:`\|ξ \oslash |w|\|`.

The ablation "corrected norm off" of the paper's App. G: directions stay horizontal and geodesics are unchanged, but the
ball is that of adaptive sharpness. Its result depends on the representative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds import Gauge, GLTangentSpace
from sharpness.measures import Measure
from sharpness.patches import PairPatch

__all__ = ["AdaptiveNorm", "AdaptiveNormMeasure", "AdaptiveNormPatch"]


class AdaptiveNormPatch(PairPatch):
    """Pairs at the model's own representative, in the coordinates ξ/w."""

    def __init__(self, *arguments: Any, at_model: bool = True) -> None:
        super().__init__(*arguments, at_model=True)
        if self.measure.elementwise != "adaptive":
            raise ValueError('the adaptive norm of pairs needs elementwise="adaptive"')

    def horizontal_space(self, gauge: Gauge, x: Tensor | None) -> AdaptiveNorm:
        """Return the horizontal space in the coordinates ξ/w."""
        return AdaptiveNorm(super().horizontal_space(gauge, x))


class AdaptiveNormMeasure(Measure):
    """A measure whose pairs are such blocks."""

    pair_patch = AdaptiveNormPatch


class AdaptiveNorm:
    r"""A horizontal space in the coordinates ζ = ξ/w, in which the adaptive norm is the Euclidean one.

    Horizontal vectors are a linear subspace in these coordinates too, but the orthogonal projection onto it has no
    closed form: with :math:`k(Λ)` the coordinates of the covectors that vanish on it, :math:`ζ - k (k^* k)^{-1} k^* ζ`
    is found by conjugate gradients, for all pairs at once.

    Parameters
    ----------
    space : GLTangentSpace
        The tangent space at the representative whose entries define the norm.
    """

    def __init__(self, space: GLTangentSpace) -> None:
        self.space, self.x = space, space.x

    def __getattr__(self, name: str) -> Any:
        """Look up what does not depend on coordinates, such as the retraction."""
        return getattr(self.space, name)

    def _times(self, c: Tensor) -> Tensor:
        """Multiply by the weights; real and imaginary parts are separate weights."""
        if not self.x.is_complex():
            return c * self.x
        return torch.view_as_complex(torch.view_as_real(c.resolve_conj()) * torch.view_as_real(self.x))

    def from_coordinates(self, c: Tensor) -> Tensor:
        """Turn coordinates, shape of the stack's point, into a tangent vector, ξ = w ζ."""
        return self._times(c)

    def dual_coordinates(self, e: Tensor) -> Tensor:
        """Turn a Euclidean gradient into one with respect to the coordinates."""
        return self._times(e)

    def project_coordinates(self, c: Tensor) -> Tensor:
        """Project coordinates on those of horizontal vectors."""
        space = self.space

        (G, H), gauge = space.split(space.x), space.gauge

        def k(L: Tensor) -> Tensor:
            L = gauge.A_inv @ L @ gauge.A  # Λ belongs to the canonical representative, whatever the condition of x
            return self._times(space.to_covector(torch.cat([G @ L, -H @ L.mH], dim=-2)))

        def k_adjoint(z: Tensor) -> Tensor:
            P, R = space.split(space.to_covector(self._times(z)))
            return gauge.A_inv.mH @ (G.mH @ P - R.mH @ H) @ gauge.A.mH

        wide = c.to(self.x.dtype)
        tolerance = 10 * torch.finfo(c.dtype).eps
        return (wide - k(_conjugate_gradients(lambda L: k_adjoint(k(L)), k_adjoint(wide), tolerance))).to(c.dtype)

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a tangent vector with standard Gaussian coordinates, projected."""
        real = torch.view_as_real(self.x) if self.x.is_complex() else self.x
        z = torch.randn(real.shape, dtype=real.dtype, generator=generator).to(self.x.device)
        z = torch.view_as_complex(z) if self.x.is_complex() else z
        return self._times(self.project_coordinates(z))

    def coordinates(self, u: Tensor) -> Tensor:
        """Invert :meth:`from_coordinates`; 0 where the weight is 0."""
        real, weight = (torch.view_as_real(t) if t.is_complex() else t for t in (u, self.x))
        c = torch.where(weight != 0, real / weight, torch.zeros_like(real))
        return torch.view_as_complex(c) if self.x.is_complex() else c


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], b: Tensor, tolerance: float) -> Tensor:
    """Solve a stack of positive semidefinite systems whose right-hand sides lie in the range."""

    def dot(u: Tensor, v: Tensor) -> Tensor:
        return (u.conj() * v).real.sum(dim=(-2, -1), keepdim=True)

    def ratio(a: Tensor, c: Tensor) -> Tensor:
        return torch.where(c > 0, a / torch.where(c > 0, c, torch.ones_like(c)), torch.zeros_like(a))

    x, r = torch.zeros_like(b), b
    p, rr = r, dot(r, r)
    goal = tolerance**2 * rr
    for _ in range(10 * b.shape[-1] ** 2):
        if bool((rr <= goal).all()):
            break
        q = apply(p)
        a = ratio(rr, dot(p, q))
        x, r = x + a * p, r - a * q
        rr, before = dot(r, r), rr
        p = r + ratio(rr, before) * p
    return x
