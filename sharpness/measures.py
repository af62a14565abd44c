r"""Measures: a metric on all weights of a model and a retraction; and the blocks of weights that compute them.

A tangent vector is stored in *coordinates in which the metric is the identity*, so norms and inner products are plain
sums, and the ball is a Euclidean ball. A block has the weights of one parameter (:class:`ElementwiseBlock`; a point of
a manifold: :mod:`sharpness.points`), or a stack of symmetric pairs (:class:`PairBlock`). For another metric or motion
of pairs, derive from :class:`PairBlock`, and name the class as the ``pair_block`` of a subclass of :class:`Measure`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from quotient_manifolds import Gauge, GLTangentSpace, canonical_gauge
from quotient_manifolds.linalg import at_least_float32, in_double, standard_normal
from quotient_manifolds.metrics import METRICS
from quotient_manifolds.symmetries import PairStack
from quotient_manifolds.symmetries.slots import real_view

#: Tensors by the names of weights.
Tensors = Mapping[str, Tensor]
#: A geodesic that would leave the manifold is shortened to this share of its exit time.
_INSIDE = 0.99


@dataclass(frozen=True)
class Measure:
    r"""A metric on all weights of a model, and a retraction.

    Attributes
    ----------
    name : str
        Shown in results; a name in :data:`MEASURES` can be passed instead of the measure.
    pair_metric : {"inv", "mix", None}
        Metric of the symmetric pairs; None treats their weights like all others.
    elementwise : {"adaptive", "euclidean", "vector"}
        Metric of every other weight w: :math:`\|ξ \oslash |w|\|^2` or :math:`\|ξ\|^2`; or, of every vector v in the
        residual stream (a neuron's row with its bias, a column of a layer that writes, a row of an embedding),
        :math:`\|ξ_v\|^2 / \|v\|^2`.
    form : {"own", "canonical"}
        Whether to measure at the model's own weights or at their canonical form
        (:mod:`quotient_manifolds.symmetries.whole`), which is the same for all equivalent weights.
    geodesic : {"second-order", "first-order", "exact"}
        How pairs move along ξ: x + ξ + ½ acceleration(ξ); the straight line x + ξ; or the exact geodesic (mix: where it
        would leave the manifold, shortened to 0.99 of its exit time).
    symmetry : {"all", "qk", "vo", "none"}
        The kinds of pairs that are divided out; with "none" the measure is the elementwise one.
    rho : float or None
        Default radius.
    pair_block : type or None
        Of the class: the class of the pairs' blocks, if it is not :class:`PairBlock`; a subclass of
        the measure sets it, for a metric or motion of your own.

    Raises
    ------
    ValueError
        A value is not among those named. Numbers are checked where they are used.

    Notes
    -----
    Paper, §5.2 (inv and mix). "adaptive" is adaptive sharpness (Kwon et al. 2021; Andriushchenko et al. 2023),
    "euclidean" the inner maximum of SAM (Foret et al. 2021).

    Examples
    --------
    A measure of one's own, along exact geodesics:

    >>> import torch
    >>> from sharpness import Measure, evaluate
    >>> mine = Measure("exact-inv", pair_metric="inv", geodesic="exact", rho=0.05)
    >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> result = evaluate(model, [torch.ones(2, 3, 4)], lambda f, x: f(x)[..., 0].square().mean(), measure=mine)
    >>> float(result) > 0
    True
    """

    name: str
    pair_metric: Literal["inv", "mix", None] = None
    elementwise: Literal["adaptive", "euclidean", "vector"] = "adaptive"
    form: Literal["own", "canonical"] = "own"
    geodesic: Literal["second-order", "first-order", "exact"] = "second-order"
    symmetry: Literal["all", "qk", "vo", "none"] = "all"
    rho: float | None = None
    pair_block: ClassVar[Any] = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Measure).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise ValueError(f"measure {self.name!r}: {name} must be one of {get_args(kind)}, got {value!r}")

    @property
    def divides(self) -> bool:
        """Whether pairs are taken modulo their symmetry."""
        return self.pair_metric is not None and self.symmetry != "none"

    @property
    def takes_points(self) -> bool:
        """Whether every ``geoopt.ManifoldParameter`` moves along its manifold, in the metric that it states."""
        return self.pair_metric is not None and self.form == "own"


#: The measures by name.
MEASURES: dict[str, Measure] = {
    "geodesic-inv": Measure("geodesic-inv", pair_metric="inv", rho=0.1),
    "geodesic-mix": Measure("geodesic-mix", pair_metric="mix", rho=0.1),
    "complete-inv": Measure("complete-inv", pair_metric="inv", elementwise="vector", form="canonical", rho=0.1),
    "complete-mix": Measure("complete-mix", pair_metric="mix", elementwise="vector", form="canonical", rho=0.1),
    "adaptive": Measure("adaptive", rho=0.5),
    "euclidean": Measure("euclidean", elementwise="euclidean", rho=0.05),
}


def get_measure(measure: str | Measure, **changes: Any) -> Measure:
    """Look up a measure by name, and change some of its fields.

    Parameters
    ----------
    measure : str or Measure
        A name in :data:`MEASURES`, or a :class:`Measure`.
    **changes
        Fields of :class:`Measure`.

    Returns
    -------
    Measure

    Raises
    ------
    ValueError
        A name or value is unknown, or the combination has no meaning, such as a geodesic for "adaptive".

    Examples
    --------
    >>> get_measure("geodesic-inv", geodesic="exact").geodesic
    'exact'
    """
    if not isinstance(measure, Measure):
        if not isinstance(measure, str) or measure not in MEASURES:
            raise ValueError(f"unknown measure {measure!r}; choose one of {', '.join(MEASURES)}, or pass a Measure")
        measure = MEASURES[measure]
    if measure.pair_metric is None:
        for key in ("geodesic", "symmetry"):
            if key in changes and changes[key] != "none":
                raise ValueError(
                    f"{key} says how symmetric pairs are treated, but the measure {measure.name!r} treats them like "
                    f"any other weight; leave {key} out, or use a geodesic measure"
                )
    return replace(measure, **changes)


def checked_radii(measure: Measure, rho: float | Iterable[float] | None) -> tuple[float, ...]:
    """Return the radii of a measure; raise a ValueError for invalid ones."""
    if rho is None:
        if measure.rho is None:
            raise ValueError(f"pass a radius rho: the measure {measure.name!r} has no default")
        rho = measure.rho
    several = isinstance(rho, Iterable) and getattr(rho, "ndim", 1) > 0
    try:
        radii = () if isinstance(rho, (str, bool, Mapping)) else tuple(map(float, rho if several else [rho]))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        radii = ()
    if not radii or not all(0 < r < math.inf for r in radii):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}")
    if len(set(radii)) < len(radii):
        raise ValueError(f"rho names a radius twice: {rho!r}")
    return radii


class ElementwiseBlock:
    r"""A parameter, or its entries outside pairs, with the adaptive metric, the Euclidean one, or that of vectors.

    In the adaptive metric :math:`\|ξ \oslash |w|\|^2` the coordinate is ζ = ξ/w, which is as long as ξ over the size
    of w. So w + ξ = w + w ζ needs no division, and zero weights do not move. ``lengths``, the lengths of the vectors
    that the entries belong to, replace w if they are given.

    All blocks have the methods below (that of pairs says in ``refresh`` whether to factorise), and ``names`` of the
    weights of which entries belong to the block. Vectors c, ``at`` and ``out`` are flat, (dim,), real; arguments of the
    type :data:`Tensors` have a tensor for each weight, and those without one are read as zero. Methods that end in an
    underscore write to their arguments, and only to entries that belong to the block.
    """

    def __init__(
        self, name: str, weight: Tensor, measure: Measure, dtype: torch.dtype, covered: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.name, self.names, self.dtype, self.dim = name, (name,), dtype, weight.numel()
        self._adaptive, self._covered, self._lengths = measure.elementwise == "adaptive", covered, lengths
        self.refresh({name: weight})

    def refresh(self, weights: Tensors) -> None:
        """Go to the present value of the weight."""
        self._base = weights[self.name].data
        scale = self._base if self._adaptive else self._base.new_ones(()).expand(self._base.shape)
        scale = scale if self._lengths is None else self._lengths.expand(self._base.shape)
        self._scale = scale if self._covered is None else scale.masked_fill(self._covered, 0)  # ξ = scale · ζ

    def vector_(self, out: Tensors, c: Tensor, *, at_model: bool) -> None:
        """Write the tangent vector with coordinates c, at the model's weights or at those from which it moves."""
        out[self.name].copy_(self._scale * c.view(self._scale.shape))

    def project(self, c: Tensor) -> Tensor:
        """Return the horizontal part of a vector: remove what belongs to pairs, and what does not move, as zeros."""
        return c.masked_fill(self._scale.flatten() == 0, 0)

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, the same on all devices and at all representatives."""
        return self.project(standard_normal((self.dim,), self._base.new_empty(0, dtype=self.dtype), generator))

    def retract_(self, out: Tensors, c: Tensor | None) -> None:
        """Write the weights R(c) = w + scale · c; for None the weights at which the block is."""
        target = out[self.name]
        if c is None:
            target.copy_(self._base)
        elif self._base.dtype == self.dtype == target.dtype:
            torch.addcmul(self._base, self._scale, c.view(self._scale.shape), out=target)
        else:
            base, scale = self._base.to(self.dtype), self._scale.to(self.dtype)
            target.copy_(torch.addcmul(base, scale, c.view(self._scale.shape)))

    def pull_back_(self, out: Tensor, gradient: Tensors, at: Tensor | None) -> None:
        """Write the gradient of c → ℓ(R(c)) at ``at`` (None: 0), from that of ℓ with respect to the weights there."""
        g = gradient.get(self.name)
        if g is None:
            out.zero_()
        else:
            torch.mul(g.to(self.dtype), self._scale.to(self.dtype), out=out.view(self._scale.shape))


class PairBlock:
    """A stack of pairs modulo their symmetry, with the inv or the mix metric.

    It works at the canonical representative; with ``at_model`` in float64 at the model's own, for callers that read the
    weights and for metrics that depend on the representative. A subclass may replace :meth:`retract`, or
    :meth:`horizontal_space`.

    Attributes
    ----------
    stack : PairStack
    tangent : GLTangentSpace
        What :meth:`horizontal_space` returned.
    sigma : Tensor
        Singular values of the products G Hᴴ, (pairs, h), float64.
    present : Tensor
        (pairs, h), which of them are above rounding.
    """

    def __init__(
        self, stack: PairStack, weights: Tensors, measure: Measure, dtype: torch.dtype, *, at_model: bool = False
    ) -> None:
        assert measure.pair_metric is not None
        self.stack, self.measure, self.names = stack, measure, stack.names
        self._like = weights[stack.names[0]].detach().flatten()[:0]
        # A group move turns σ_i = 0 into rounding error times its condition number, by which mix would then divide.
        self._tolerance = torch.finfo(at_least_float32(self._like.dtype)).eps ** 0.5
        with torch.no_grad():
            x = stack.gather(weights)
            gauge = canonical_gauge(*in_double(x).split([stack.n, stack.m], dim=-2))
            self.sigma, self.present = gauge.sigma, gauge.present(self._tolerance)
            rounded = gauge if at_model else gauge.to(dtype, x.device)
            self._to_model = None if at_model else (rounded.A, rounded.A_inv.mH)  # from the canonical representative
            self.tangent: Any = self.horizontal_space(rounded, in_double(x) if at_model else None)
        self.dim = real_view(x).numel()
        #: Whether the retraction is a quadratic function of the vector, as the Hessian needs.
        self.quadratic = type(self).retract is PairBlock.retract and measure.geodesic != "exact"
        # The second-order geodesic has a pull-back in closed form.
        self._fused = self.quadratic and measure.geodesic == "second-order" and type(self.tangent) is GLTangentSpace

    def horizontal_space(self, gauge: Gauge, x: Tensor | None) -> Any:
        """Return the horizontal space at a representative x, by default the canonical one, with its coordinates.

        It has the attributes and methods of :class:`quotient_manifolds.GLTangentSpace` that are used here: ``x``,
        ``retr``, ``coordinates``, ``from_coordinates``, ``dual_coordinates``, ``project_coordinates`` and ``random``.
        """
        metric = METRICS[str(self.stack.metric or self.measure.pair_metric)]
        return GLTangentSpace(metric, gauge, x, tolerance=self._tolerance)

    def _view(self, c: Tensor) -> Tensor:
        """View coordinates in the shape of the stack's point."""
        x = self.tangent.x
        return torch.view_as_complex(c.view(*x.shape, 2)) if x.is_complex() else c.view(x.shape)

    def gather(self, gradient: Tensors) -> Tensor:
        """Stack gradients; those that are absent are zero."""
        return self.stack.gather(gradient, self._like)

    def _vector(self, c: Tensor) -> Tensor:
        return self.tangent.from_coordinates(self._view(c).to(self.tangent.x.dtype))

    def vector_(self, out: Tensors, c: Tensor, *, at_model: bool) -> None:
        """Write the tangent vector, mapped to the model's own representative if requested."""
        u = self._vector(c)
        if at_model and self._to_model is not None:
            parts = u.split([self.stack.n, self.stack.m], dim=-2)
            u = torch.cat([part @ A for part, A in zip(parts, self._to_model, strict=True)], dim=-2)
        self.stack.scatter_(u, out)

    def project(self, c: Tensor) -> Tensor:
        """Project on the horizontal space."""
        return real_view(self.tangent.project_coordinates(self._view(c))).flatten()

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a vector that depends on the orbit alone."""
        # It is horizontal up to rounding, which weak directions amplify: project once more.
        c = self.tangent.coordinates(self.tangent.random(generator))
        return real_view(self.tangent.project_coordinates(c)).flatten()

    def squares(self, c: Tensor) -> list[float]:
        """Return the squared length of every pair's part."""
        return list(c.view(len(self.stack), -1).square().sum(1).tolist())

    def retract(self, u: Tensor) -> Tensor:
        """Follow the tangent vector u, differentiably, by the geodesic that the measure names."""
        if self.measure.geodesic == "first-order":
            return self.tangent.x + u
        if self.measure.geodesic == "second-order":
            return self.tangent.retr(u)
        # The share is constant to autograd: beyond the boundary the retraction depends only on the vector's direction.
        share = (_INSIDE * self.tangent.exit_time(u.detach())).clamp_max(1)
        return self.tangent.geodesic(u * share[..., None, None])[0]

    def retract_(self, out: Tensors, c: Tensor | None) -> None:
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
        egrad = self.gather(gradient).to(self.tangent.x.dtype)
        if at is not None and self._fused:
            self.tangent.pullback_coordinates(self._view(at), egrad, out=self._view(out))
            return
        if at is not None:
            with torch.enable_grad():
                u = self._vector(at).detach().requires_grad_()
                (egrad,) = torch.autograd.grad(self.retract(u), u, egrad)
        self._view(out).copy_(self.tangent.project_coordinates(self.tangent.dual_coordinates(egrad)))

    @torch.no_grad()
    def refresh(self, weights: Tensors, *, factorise: bool) -> None:
        """Go to the weights' own representative. The gauge may be an older one: any well conditioned one will do."""
        x, gauge = self.stack.gather(weights), self.tangent.gauge
        if factorise or not bool(self.tangent.present.all()):
            gauge = canonical_gauge(*in_double(x).split([self.stack.n, self.stack.m], dim=-2)).to(x.dtype, x.device)
        self.tangent = GLTangentSpace(self.tangent.metric, gauge, x, tolerance=self._tolerance, moved=True)

    def num_exited_pairs(self, c: Tensor) -> int:
        """Count the pairs whose exact geodesic along c was shortened so that it stays on the manifold."""
        if self.measure.geodesic != "exact":
            return 0
        return int(self.tangent.exit_time(self._vector(c)).isfinite().sum())
