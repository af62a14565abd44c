r"""Blocks: the parts of a model's weights, each with a metric and a retraction.

A tangent vector is stored in *coordinates in which the metric is the identity*, so norms and inner products are plain
sums, and the ball is a Euclidean ball. A new metric or motion is a new class: see :class:`Block`, or
:class:`PairBlock` for another way to treat pairs, to which the ``pair_block`` of a :class:`~sharpness.Measure` is set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quotient_manifolds import canonical_gauge
from quotient_manifolds.base import standard_normal
from quotient_manifolds.linalg import at_least_float32, in_double
from quotient_manifolds.symmetries import PairStack

from .measures import Measure

__all__ = ["Block", "ElementwiseBlock", "PairBlock"]

#: Tensors by the parameter that they belong to.
Tensors = Mapping[Tensor, Tensor]
#: A geodesic that would leave the manifold is shortened to this share of its exit time.
_INSIDE = 0.99


class Block(ABC):
    r"""Some weights with a metric and a retraction R. All vectors c, ``at`` and ``out`` are flat, (dim,), real.

    Attributes
    ----------
    dim : int
        Number of coordinates.

    Notes
    -----
    Arguments of the type :data:`Tensors` have a tensor for each parameter; parameters without one are read as zero.
    Methods that end in an underscore write to their arguments, and only to entries that belong to the block.
    """

    dim: int

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Return the parameters of which entries belong to the block."""

    @abstractmethod
    def coordinates(self, vector: Tensors) -> Tensor:
        """Return the coordinates of a tangent vector at the model's weights."""

    @abstractmethod
    def vector_(self, out: Tensors, c: Tensor, *, at_model: bool) -> None:
        """Write the tangent vector with coordinates c, at the model's weights or at the start of :meth:`move_`."""

    @abstractmethod
    def project(self, c: Tensor) -> Tensor:
        """Return the horizontal part of a vector."""

    @abstractmethod
    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, the same at all representatives of an orbit."""

    @abstractmethod
    def move_(self, out: Tensors, c: Tensor | None) -> None:
        """Write the weights R(c); for None the weights at which the block is."""

    @abstractmethod
    def pull_back_(self, out: Tensor, gradient: Tensors, at: Tensor | None) -> None:
        """Write the gradient of c → ℓ(R(c)) at ``at`` (None: 0), from that of ℓ with respect to the weights there."""

    @abstractmethod
    def squares(self, c: Tensor) -> list[float]:
        """Return the squared lengths of a vector's parts: one in all, or one per pair."""


class ElementwiseBlock(Block):
    r"""A parameter, or its entries outside pairs, with the adaptive metric, the Euclidean one, or that of vectors.

    In the adaptive metric :math:`\|ξ \oslash |w|\|^2` the coordinate is ζ = ξ/w, which is as long as ξ over the size
    of w. So w + ξ = w + w ζ needs no division, and zero weights do not move. ``lengths``, the lengths of the vectors
    that the entries belong to, replace w if they are given.
    """

    def __init__(
        self, name: str, parameter: Tensor, measure: Measure, dtype: torch.dtype, covered: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.name, self.parameter, self.dtype, self.dim = name, parameter, dtype, parameter.numel()
        self._adaptive, self._covered, self._lengths = measure.elementwise == "adaptive", covered, lengths
        self.refresh()

    def refresh(self) -> None:
        """Go to the parameter's present value."""
        self._base = self.parameter.data
        scale = self._base if self._adaptive else self._base.new_ones(()).expand(self._base.shape)
        scale = scale if self._lengths is None else self._lengths.expand(self._base.shape)
        self._scale = scale if self._covered is None else scale.masked_fill(self._covered, 0)  # ξ = scale · ζ

    def parameters(self) -> list[Tensor]:
        """Return the parameter."""
        return [self.parameter]

    def coordinates(self, vector: Tensors) -> Tensor:
        """Divide by the scale; 0 where that is 0."""
        u, scale = vector[self.parameter].to(self.dtype), self._scale.to(self.dtype)
        return torch.where(scale != 0, u / scale, torch.zeros_like(u)).flatten()

    def vector_(self, out: Tensors, c: Tensor, *, at_model: bool) -> None:
        """Multiply by the scale."""
        out[self.parameter].copy_(self._scale * c.view(self._scale.shape))

    def project(self, c: Tensor) -> Tensor:
        """Remove what belongs to pairs."""
        return c if self._covered is None else c.masked_fill(self._scale.flatten() == 0, 0)

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw Gaussians, the same on all devices."""
        return self.project(standard_normal((self.dim,), self._base.new_empty(0, dtype=self.dtype), generator))

    def move_(self, out: Tensors, c: Tensor | None) -> None:
        """Write w + scale · ζ."""
        target = out[self.parameter]
        if c is None:
            target.copy_(self._base)
        elif self._base.dtype == self.dtype == target.dtype:
            torch.addcmul(self._base, self._scale, c.view(self._scale.shape), out=target)
        else:
            base, scale = self._base.to(self.dtype), self._scale.to(self.dtype)
            target.copy_(torch.addcmul(base, scale, c.view(self._scale.shape)))

    def pull_back_(self, out: Tensor, gradient: Tensors, at: Tensor | None) -> None:
        """Multiply the gradient by the scale."""
        g = gradient.get(self.parameter)
        if g is None:
            out.zero_()
        else:
            torch.mul(g.to(self.dtype), self._scale.to(self.dtype), out=out.view(self._scale.shape))

    def squares(self, c: Tensor) -> list[float]:
        """Return the squared length."""
        return [float(c.square().sum())]


class PairBlock(Block):
    """A stack of pairs modulo their symmetry, with the inv or the mix metric.

    It works at the canonical representative, in the requested dtype; or, with ``at_model``, in float64 at the model's
    own representative, for callers that read the weights and for metrics that depend on the representative. A subclass
    may replace :meth:`retract`, or set ``chart`` to other coordinates of the horizontal space (``coordinates``,
    ``from_coordinates``, ``dual_coordinates``, ``project_coordinates`` and ``random``, as in
    :class:`quotient_manifolds.GLTangentSpace`).

    Attributes
    ----------
    stack : PairStack
    sigma : Tensor
        Singular values of the products G Hᴴ, (pairs, h), float64.
    present : Tensor
        (pairs, h), which of them are above rounding.
    """

    #: Whether the retraction is that of the tangent space, which has a pull-back in closed form.
    closed_form = True

    def __init__(self, stack: PairStack, measure: Measure, dtype: torch.dtype, *, at_model: bool = False) -> None:
        assert measure.pair_metric is not None
        if measure.relaxation and self.closed_form:
            raise ValueError(f"measure {measure.name!r}: relaxation must be 0 where the metric of pairs is exact")
        self.stack, self.measure = stack, measure
        self.manifold = stack.manifold(measure.pair_metric)
        # A group move turns σ_i = 0 into rounding error times its condition number, by which mix would then divide.
        self._tolerance = torch.finfo(at_least_float32(stack.pairs[0].G[0].tensor.dtype)).eps ** 0.5
        with torch.no_grad():
            x = in_double(stack.gather())
            gauge = canonical_gauge(*self.manifold.unpack_tensor(x))
            self.sigma, self.present = gauge.sigma, gauge.present(self._tolerance)
            rounded = gauge.to(dtype)
            self._to_model = None if at_model else (rounded.A, rounded.A_inv.mH)  # from the canonical representative
            own = (gauge, x) if at_model else (rounded.at_canonical(),)
            self.tangent = self.chart = self.manifold.at_gauge(*own, tolerance=self._tolerance)
        self.dim = x.numel() * (2 if x.is_complex() else 1)
        self._fused = self.closed_form and not at_model and measure.geodesic == "second-order"

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all pairs."""
        return self.stack.parameters()

    # -- coordinates ---------------------------------------------------------------------------------------------------

    def _view(self, c: Tensor) -> Tensor:
        """View the first ``dim`` numbers in the shape of the stack's point."""
        x = self.tangent.x
        real = c[: self.dim].view(*x.shape, 2) if x.is_complex() else c[: self.dim].view(x.shape)
        return torch.view_as_complex(real) if x.is_complex() else real

    def _flat(self, x: Tensor) -> Tensor:
        return (torch.view_as_real(x) if x.is_complex() else x).flatten()

    def _vector(self, c: Tensor) -> Tensor:
        return self.chart.from_coordinates(self._view(c).to(self.tangent.x.dtype))

    def coordinates(self, vector: Tensors) -> Tensor:
        """Return the coordinates of a tangent vector at the model's own representative."""
        assert self._to_model is None, "vectors are read at the model's own representative"
        c = self.chart.coordinates(self.stack.gather(vector).to(self.tangent.x.dtype))
        return self._flat(c)

    def vector_(self, out: Tensors, c: Tensor, *, at_model: bool) -> None:
        """Write the tangent vector, mapped to the model's own representative if requested."""
        u = self._vector(c)
        if at_model and self._to_model is not None:
            parts = u.split([self.stack.n, self.stack.m], dim=-2)
            u = torch.cat([part @ A for part, A in zip(parts, self._to_model, strict=True)], dim=-2)
        self.stack.scatter_(u, out)

    def project(self, c: Tensor) -> Tensor:
        """Project on the horizontal space."""
        return self._flat(self.chart.project_coordinates(self._view(c)))

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a vector that depends on the orbit alone."""
        return self._projected(self.chart.random(generator))

    def from_gaussians(self, drawn: Sequence[Tensor]) -> Tensor:
        """Make such a vector from the numbers of :func:`quotient_manifolds.tangent.draw_gaussians`."""
        return self._projected(self.tangent.from_gaussians(drawn))

    def _projected(self, u: Tensor) -> Tensor:
        # It is horizontal up to rounding, which weak directions amplify: project once more.
        return self._flat(self.chart.project_coordinates(self.chart.coordinates(u)))

    def squares(self, c: Tensor) -> list[float]:
        """Return the squared length of every pair's part."""
        c = self._view(c)
        lengths: list[float] = torch.linalg.vector_norm(c, dim=tuple(range(1, c.dim()))).tolist()
        return [length**2 for length in lengths]

    # -- motion --------------------------------------------------------------------------------------------------------

    def retract(self, u: Tensor) -> Tensor:
        """Follow the tangent vector u, differentiably, by the geodesic that the measure names."""
        if self.measure.geodesic == "first-order":
            return self.tangent.x + u
        if self.measure.geodesic == "second-order":
            return self.tangent.retr(u)
        # The share is constant to autograd: beyond the boundary the retraction depends only on the vector's direction.
        share = (_INSIDE * self.tangent.exit_time(u.detach())).clamp_max(1)
        return self.tangent.expmap(u * share[..., None, None])

    def move_(self, out: Tensors, c: Tensor | None) -> None:
        """Retract, and write the factors of every pair."""
        if c is None:
            end = self.tangent.x
        elif self._fused:
            end = self.tangent.retr_coordinates(self._view(c))
        else:
            end = self.retract(self._vector(c))
        self.stack.scatter_(end, out)

    def pull_back_(self, out: Tensor, gradient: Tensors, at: Tensor | None) -> None:
        """Pull back through the retraction, by its closed form or by autograd, and project."""
        egrad = self.stack.gather(gradient).to(self.tangent.x.dtype)
        if at is not None and self._fused:
            self.tangent.pullback_coordinates(self._view(at), egrad, out=self._view(out))
            return
        if at is not None:
            with torch.enable_grad():
                u = self._vector(at).detach().requires_grad_()
                (egrad,) = torch.autograd.grad(self.retract(u), u, egrad)
        self._view(out).copy_(self.chart.project_coordinates(self.chart.dual_coordinates(egrad)))

    @torch.no_grad()
    def refresh(self, *, factorise: bool) -> None:
        """Go to the model's own representative. The gauge may be an older one: any that is well conditioned will do."""
        x, gauge = self.stack.gather(), self.tangent.gauge
        if factorise or not bool(self.tangent.present.all()):
            gauge = canonical_gauge(*self.manifold.unpack_tensor(in_double(x))).to(x.dtype)
        self.tangent = self.manifold.at_gauge(gauge, x, tolerance=self._tolerance, moved=True)

    # -- what the metric meets -----------------------------------------------------------------------------------------

    @property
    def quadratic(self) -> bool:
        """Whether the retraction is a quadratic function of the vector, as the Hessian needs."""
        return self.measure.geodesic != "exact"

    def num_exited_pairs(self, c: Tensor) -> int:
        """Count the pairs whose exact geodesic along c was shortened so that it stays on the manifold."""
        if self.measure.geodesic != "exact":
            return 0
        return int(self.tangent.exit_time(self._vector(c)).isfinite().sum())
