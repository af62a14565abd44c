"""Points of geoopt's manifolds: parameters that move along their manifold and are measured in its metric."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import geoopt
import torch
from torch import Tensor

from quotient_manifolds._geoopt import ManifoldParameter
from quotient_manifolds.linalg import in_double, standard_normal
from quotient_manifolds.symmetries.slots import real_view

from .measures import Measure
from .patch import SinglePatch, Tensors

#: Numbers in the frames of a parameter's points, each the square of a point's size.
_LARGEST = 2**22
#: Of directions: no user's seed, or a point that he drew would be such a direction, whose tangential part is 0.
_SEED = 0x6A09E667F3BCC908 >> 1
#: Length at which the derivative of a retraction at 0 is taken: there itself, geoopt's divide by the length.
_NEAR = 1e-6


def check_points(measure: Measure, parameters: Mapping[str, Tensor]) -> None:
    """Raise if a measure would move a point of a manifold as flat weights; one of geoopt's Euclidean is no such."""
    for name, p in parameters.items():
        if (
            isinstance(p, ManifoldParameter)
            and not measure.takes_points
            and not isinstance(p.manifold, geoopt.Euclidean)
        ):
            raise ValueError(
                f"parameter {name!r} is a point of the manifold {p.manifold}, which the measure {measure.name!r} would "
                "move off it as flat weights; use 'geodesic-inv' or 'geodesic-mix', which measure points on their "
                "manifolds, or freeze it with requires_grad_(False)"
            )


class PointPatch(SinglePatch):
    r"""A parameter that is a point of a geoopt manifold, or a batch of points, in the metric of the manifold.

    Coordinates have the shape of the parameter, (…, 2) if it is complex, and lie in a subspace of that. With the
    projected basis :math:`P_i` = ``proju(x, e_i)`` and its Gram matrix :math:`Γ_{ij} = \langle P_i, P_j \rangle_x`, the
    vector with coordinates c is :math:`\sum_{ij} P_i (Γ^{+})^{1/2}_{ij} c_j`. Where the metric is a number λ times the
    Euclidean one, that is ``proju(x, c)``/√λ, at any size. Points move by ``expmap``, or ``retr`` where there is none;
    the pull-back is autograd's. All is computed in float64.
    """

    quadratic = False

    def __init__(self, name: str, parameter: geoopt.ManifoldParameter, dtype: torch.dtype) -> None:
        self.name, self.names, self.dtype = name, (name,), dtype
        one = parameter[(0,) * (parameter.dim() - parameter.manifold.ndim)]
        size = one.numel() * (2 if one.is_complex() else 1)
        self.dim = real_view(parameter.detach()).numel()
        self._shape = self.dim // size, size
        self.x, self.manifold = in_double(parameter.data), parameter.manifold
        if self.x.device != parameter.device:  # the manifold's own numbers may be there
            self.manifold = copy.deepcopy(self.manifold).cpu()

    def at(self, weights: Mapping[str, Any], *, near: bool = False) -> PointPatch:
        """Return the patch at another value of the parameter."""
        return PointPatch(self.name, weights[self.name], self.dtype)

    # -- coordinates in which the metric is the identity -----------------------------------------------------------

    def _points(self, t: Tensor) -> Tensor:
        """View tensors of the parameter's shape, after other dimensions, as real vectors (…, points, size)."""
        return real_view(t).reshape(*t.shape[: t.dim() - self.x.dim()], *self._shape)

    def _shaped(self, points: Tensor) -> Tensor:
        """Invert :meth:`_points`."""
        t = points.reshape(*points.shape[:-2], *real_view(self.x).shape)
        return torch.view_as_complex(t.contiguous()) if self.x.is_complex() else t

    def _of_flat(self, c: Tensor) -> Tensor:
        return in_double(c).view(self._shape)

    def _proju(self, points: Tensor) -> Tensor:
        """Project vectors (k, points, size)."""
        vectors = self._shaped(points)
        return self._points(self.manifold.proju(self.x.expand_as(vectors), vectors))

    def _lowered(self, points: Tensor) -> Tensor:
        """Return the covectors ⟨P, ·⟩ of tangent vectors P, (k, points, size)."""
        with torch.enable_grad():
            P = points.detach().requires_grad_()
            vectors = self._shaped(P)
            square = self.manifold.inner(self.x.expand_as(vectors), vectors, keepdim=True).real.sum() / 2
            return torch.autograd.grad(square, P)[0]

    @cached_property
    def _frame(self) -> tuple[Tensor, Tensor | None]:
        """Return λ^-½, (points, 1), and None; or what makes vectors of coordinates, and their projector."""
        generator = torch.Generator().manual_seed(_SEED)
        points, size = self._shape
        drawn = standard_normal((3, points, size), real_view(self.x).new_empty(0), generator)
        P = self._proju(drawn)
        scale = (self._lowered(P) * P).sum(-1, keepdim=True) / P.square().sum(-1, keepdim=True)
        orthogonal = (P * (P - drawn)).sum(-1, keepdim=True).abs() <= 1e-9 * P.square().sum(-1, keepdim=True)
        if bool(((scale - scale[:1]).abs() <= 1e-9 * scale).all() and orthogonal.all()):
            return scale[0] ** -0.5, None
        if points * size**2 > _LARGEST:
            raise ValueError(
                f"parameter {self.name!r} has {points} points of {size} numbers on {self.manifold}, whose metric is no "
                f"multiple of the Euclidean one, so that coordinates take {points} · {size}² numbers, more than "
                f"{_LARGEST}; split it, or freeze it with requires_grad_(False)"
            )
        basis = torch.eye(size, dtype=drawn.dtype, device=drawn.device)
        P = self._proju(basis.unsqueeze(1).expand(size, points, size))
        gram = torch.einsum("ipk,jpk->pij", P, self._lowered(P))
        values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
        present = values > 1e-9 * values[..., -1:]
        if bool((values < -1e-9 * values[..., -1:]).any()):
            raise ValueError(f"parameter {self.name!r}: the metric of {self.manifold} is not positive at this point")
        power = torch.where(present, values, 1) ** -0.5 * present
        roots = (vectors * power.unsqueeze(-2)) @ vectors.mT
        return torch.einsum("ipk,pij->pkj", P, roots), (vectors * present.unsqueeze(-2)) @ vectors.mT

    def _vector(self, c: Tensor) -> Tensor:
        """Return the tangent vector with coordinates c, (points, size)."""
        frame, projector = self._frame
        return self._proju(c.unsqueeze(0))[0] * frame if projector is None else torch.einsum("pij,pj->pi", frame, c)

    def project(self, c: Tensor) -> Tensor:
        """Project on the coordinates of tangent vectors."""
        projector, points = self._frame[1], self._of_flat(c)
        found = self._proju(points.unsqueeze(0)) if projector is None else projector @ points.unsqueeze(-1)
        return found.flatten().to(c)

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian tangent vector, the same on all devices."""
        return self.project(standard_normal((self.dim,), real_view(self.x).new_empty(0, dtype=self.dtype), generator))

    def vector_(self, out: Tensors, c: Tensor, *, at_model: bool) -> None:
        """Write the tangent vector with coordinates c."""
        out[self.name].copy_(self._shaped(self._vector(self._of_flat(c))))

    # -- along the manifold ----------------------------------------------------------------------------------------

    def retract(self, u: Tensor) -> Tensor:
        """Follow a tangent vector of the parameter's shape; points along whose part of it is zero stay as they are."""
        try:
            end = self.manifold.expmap(self.x, u)
        except NotImplementedError:
            end = self.manifold.retr(self.x, u)
        still = (self._points(u) == 0).all(-1, keepdim=True)
        return self._shaped(torch.where(still, self._points(self.x), self._points(end)))

    def retract_(self, out: Tensors, c: Tensor | None) -> None:
        """Write the point R(c); for None the point at which the patch is."""
        end = self.x if c is None else self.retract(self._shaped(self._vector(self._of_flat(c))))
        out[self.name].copy_(end)

    def pull_back_(self, out: Tensor, gradient: Tensors, at: Tensor | None) -> None:
        """Write the gradient of c → ℓ(R(c)) at ``at`` (None: 0), from that of ℓ with respect to the point there."""
        egrad = gradient.get(self.name)
        if egrad is None:
            out.zero_()
            return
        points = self._of_flat(torch.zeros_like(out) if at is None else at)
        # Where a vector is 0, or its part in one manifold of a product, autograd divides 0 by 0 in many retractions.
        lost = (points == 0).all(-1, keepdim=True)
        if not bool(lost.all()):
            found = self._pulled(points, egrad)
            lost = lost | ~found.isfinite().all(-1, keepdim=True)
        if bool(lost.any()):  # the mean of both sides has an error of order _NEAR²
            near = self._of_flat(self.random(torch.Generator().manual_seed(_SEED)))
            near = near * (_NEAR / near.norm(dim=-1, keepdim=True))
            sides = [torch.where(lost, points + side, points) for side in (near, -near)]
            found = torch.stack([self._pulled(side, egrad) for side in sides]).mean(0)
        out.copy_(self.project(found.flatten()))

    def _pulled(self, points: Tensor, egrad: Tensor) -> Tensor:
        with torch.enable_grad():
            c = points.detach().requires_grad_()
            end = self.retract(self._shaped(self._vector(c)))
            return torch.autograd.grad(real_view(end), c, real_view(in_double(egrad)))[0]
