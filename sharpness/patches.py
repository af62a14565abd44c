r"""Patches: parts of a model's weights, each with a metric and a retraction, which together are its space.

A tangent vector is stored in *coordinates in which the metric is the identity*, so norms and inner products are plain
sums, and the ball is a Euclidean ball. A patch has the weights of one parameter (:class:`ElementwisePatch`; a point of
a manifold: :mod:`sharpness.points`), or a stack of symmetric pairs (:class:`PairPatch`). For another metric or motion
of pairs, derive from :class:`PairPatch`, and name the class as the ``pair_patch`` of a subclass of
:class:`sharpness.Measure`. From a model and a measure to patches lead :func:`trainable`, the weights that move;
:func:`known`, the symmetries that are divided out; :func:`stacks_of` and :func:`build_patches`.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds._geoopt import ManifoldParameter
from quotient_manifolds.linalg import at_least_float32, finite, in_double, standard_normal
from quotient_manifolds.metrics import METRICS, Gauge, gauge_of
from quotient_manifolds.symmetries import PairStack, Symmetries, stacks
from quotient_manifolds.symmetries.attention import unknown_attention
from quotient_manifolds.symmetries.found import check_names, check_symmetries
from quotient_manifolds.symmetries.pairs import coverage
from quotient_manifolds.symmetries.slots import real_view
from quotient_manifolds.tangent import GLTangentSpace
from quotient_manifolds.weights import check_whole, is_sharded, plain_names, trained, weights_of

from .measures import Measure, divides
from .patch import Patch, SinglePatch, Tensors
from .points import PointPatch

#: A geodesic that would leave the manifold is shortened to this share of its exit time.
_INSIDE = 0.99
#: Number of elements of a stack of pairs that are processed at a time on a CPU, because large temporaries are slow.
_PIECE = 2**20


class ElementwisePatch(SinglePatch):
    r"""A parameter, or its entries outside pairs, with the adaptive metric, the Euclidean one, or that of vectors.

    In the adaptive metric :math:`\|ξ \oslash |w|\|^2` the coordinate is ζ = ξ/w, which is as long as ξ over the size
    of w. So w + ξ = w + w ζ needs no division, and zero weights do not move. ``lengths``, the lengths of the vectors
    that the entries belong to, replace w if they are given.
    """

    quadratic = True

    def __init__(
        self, name: str, weight: Tensor, measure: Measure, dtype: torch.dtype, covered: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.name, self.names, self.dtype, self.dim = name, (name,), dtype, weight.numel()
        self._measure, self._covered, self._lengths, self._base = measure, covered, lengths, weight.data
        scale = self._base if measure.elementwise == "adaptive" else self._base.new_ones(()).expand(self._base.shape)
        scale = scale if self._lengths is None else self._lengths.expand(self._base.shape)
        self._scale = scale if self._covered is None else scale.masked_fill(self._covered, 0)  # ξ = scale · ζ

    def at(self, weights: Tensors, *, near: bool = False) -> ElementwisePatch:
        """Return the patch at another value of the weight."""
        return ElementwisePatch(self.name, weights[self.name], self._measure, self.dtype, self._covered, self._lengths)

    def vector_(self, out: Tensors, c: Tensor, *, at_model: bool) -> None:
        """Write the tangent vector with coordinates c, at the model's weights or at those from which it moves."""
        target, c = out[self.name], c.view(self._scale.shape)
        if self._scale.dtype == c.dtype == target.dtype:
            torch.mul(self._scale, c, out=target)
        else:
            target.copy_(self._scale * c)

    def project(self, c: Tensor) -> Tensor:
        """Return the horizontal part of a vector: remove what belongs to pairs, and what does not move, as zeros."""
        return c.masked_fill(self._scale.flatten() == 0, 0)

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, the same on all devices and at all representatives."""
        return self.project(standard_normal((self.dim,), self._base.new_empty(0, dtype=self.dtype), generator))

    def retract_(self, out: Tensors, c: Tensor | None) -> None:
        """Write the weights R(c) = w + scale · c; for None the weights at which the patch is."""
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


class PairPatch:
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
        self.stack, self.measure, self.names, self.pairs = stack, measure, stack.names, tuple(stack.pairs)
        #: What gradients that are absent, and zero, are like.
        self._like = weights[stack.names[0]].detach().flatten()[:0]
        with torch.no_grad():
            x = stack.gather(weights)
            self.dim = real_view(x).numel()
            # A group move turns σ_i = 0 into rounding error times its condition number, by which mix would then divide.
            self._tolerance = torch.finfo(at_least_float32(self._like.dtype)).eps ** 0.5
            gauge = gauge_of(*in_double(x).split([stack.n, stack.m], dim=-2))
            self.sigma, self.present = gauge.sigma, gauge.present(self._tolerance)
            rounded = gauge if at_model else gauge.to(dtype, x.device)
            self._to_model = None if at_model else (rounded.A, rounded.A_inv.mH)  # from the canonical representative
            self.tangent: Any = self.horizontal_space(rounded, in_double(x) if at_model else None)
        self.quadratic = type(self).retract is PairPatch.retract and measure.geodesic != "exact"
        # The second-order geodesic has a pull-back in closed form.
        self._fused = self.quadratic and measure.geodesic == "second-order" and type(self.tangent) is GLTangentSpace

    def horizontal_space(self, gauge: Gauge, x: Tensor | None) -> Any:
        """Return the horizontal space at a representative x, by default that of the gauge, where GᴴG = HᴴH = diag(σ).

        It has the attributes and methods of :class:`quotient_manifolds.GLTangentSpace` that are used here: ``x``,
        ``coordinates``, ``from_coordinates``, ``dual_coordinates``, ``project_coordinates`` and ``random``, and, unless
        geodesics are of first order, ``retr``, or ``geodesic`` and ``exit_time`` for exact ones.
        """
        metric = METRICS[str(self.stack.metric or self.measure.pair_metric)]
        return GLTangentSpace(metric, gauge, x, tolerance=self._tolerance)

    def _view(self, c: Tensor) -> Tensor:
        """View coordinates in the shape of the stack's point."""
        x = self.tangent.x
        return torch.view_as_complex(c.view(*x.shape, 2)) if x.is_complex() else c.view(x.shape)

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

    def retract(self, u: Tensor) -> Tensor:
        """Follow the tangent vector u, differentiably, by the geodesic that the measure names."""
        geodesic = self.measure.geodesic
        if geodesic == "first-order":
            return self.tangent.x + u
        needed = ("retr",) if geodesic == "second-order" else ("exit_time", "geodesic")
        if lost := next((name for name in needed if not hasattr(self.tangent, name)), None):
            raise ValueError(
                f"{type(self.tangent).__name__} has no {lost!r}, which geodesic={geodesic!r} needs: add the method, or "
                "give the measure geodesic='first-order'"
            )
        if geodesic == "second-order":
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
        found, c = self._view(out), None if at is None else self._view(at)
        egrad = self.stack.gather(gradient, self._like).to(self.tangent.x.dtype)
        if c is not None and self._fused:
            self.tangent.pullback_coordinates(c, egrad, out=found)
            return
        if at is not None:
            with torch.enable_grad():
                u = self._vector(at).detach().requires_grad_()
                (egrad,) = torch.autograd.grad(self.retract(u), u, egrad)
        found.copy_(self.tangent.project_coordinates(self.tangent.dual_coordinates(egrad)))

    @torch.no_grad()
    def at(self, weights: Tensors, *, near: bool = False) -> PairPatch:
        """Return the patch at the weights' own representative; near by, an older gauge is still well conditioned."""
        found = copy.copy(self)
        x, gauge = self.stack.gather(weights), self.tangent.gauge
        if not near or not bool(self.tangent.present.all()):
            gauge = gauge_of(*in_double(x).split([self.stack.n, self.stack.m], dim=-2)).to(x.dtype, x.device)
        found.tangent = GLTangentSpace(self.tangent.metric, gauge, x, tolerance=self._tolerance, moved=True)
        return found

    def steepest(self, gradient: Tensors, room: Tensors) -> tuple[Tensor, Tensor]:
        """Return the Riemannian gradient and its square."""
        u = self.tangent.egrad2rgrad(self.stack.gather(gradient, self._like))
        return u, self.tangent.inner(u).sum()

    def follow_(self, out: Tensors, u: Tensor) -> None:
        """Follow a tangent vector."""
        self.stack.scatter_(self.retract(u), out)

    def num_exited_pairs(self, c: Tensor) -> int:
        """Count the pairs whose exact geodesic along c is shortened."""
        return int(self.tangent.exit_time(self._vector(c)).isfinite().sum())


def in_memory_of(part: Tensor | None, like: Tensor) -> Tensor:
    """Return a tensor like another, with any content, in the memory of a part of a vector if that fits."""
    return torch.empty_like(like) if part is None or part.dtype != like.dtype else part.view(like.shape)


# -- from a model and a measure to patches -----------------------------------------------------------------------------


def trainable(model: nn.Module, *, whole: bool = True) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, after a check of their devices, dtypes and entries.

    They must be whole, unless the caller has made sure that they are, or that FSDP2 has sharded them.
    """
    if whole:
        check_whole(model)
    found = trained(weights_of(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter, so there is nothing to perturb; "
            "set requires_grad_(True) on the weights to be measured"
        )
    devices = {p.device for p in found.values()}
    if len(devices) > 1 or any(d.type == "meta" for d in devices):  # where there are no numbers
        raise ValueError(
            f"the trainable parameters lie on {', '.join(sorted(map(str, devices)))}; load the whole model on one "
            "device that holds numbers"
        )
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.is_meta:
            raise ValueError(f"{name!r} is on the device meta, without numbers; load the whole model")
    for name, p in found.items():
        measured = p.is_floating_point() or (isinstance(p, ManifoldParameter) and p.is_complex())
        if not measured or p.element_size() < 2:  # integers, float8
            raise ValueError(f"parameter {name!r} has dtype {p.dtype}; only real floating-point weights are measured")
        if p.is_inference():
            raise ValueError(
                f"parameter {name!r} was made under torch.inference_mode, where nothing can be differentiated; make "
                "the model outside of it"
            )
        if not is_sharded(p) and not finite(p):
            raise ValueError(f"parameter {name!r} has NaN or infinite entries; load an intact checkpoint")
    _check_memory(model, found)
    return found


def _check_memory(model: nn.Module, moving: dict[str, nn.Parameter]) -> None:
    """Refuse moving weights whose memory other tensors of the model share: they would be moved apart."""
    plain, by_storage = plain_names(model), dict[int, list[tuple[str, Tensor]]]()
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if not is_sharded(t) and t.layout == torch.strided and t.device.type != "meta" and t.numel():
            by_storage.setdefault(t.untyped_storage().data_ptr(), []).append((plain(name), t.detach()))
    for tensors in by_storage.values():
        for name, t in tensors:  # one number expanded to a whole weight stands in for a sharded one
            repeats = any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True))
            if name in moving and repeats and any(t.stride()):
                raise ValueError(f"parameter {name!r} is expanded: some of its entries are one number; clone it")
        storage = np.empty(tensors[0][1].untyped_storage().nbytes(), np.uint8)  # of which the addresses alone are used
        for (name, one), (other, two) in itertools.permutations(tensors, 2):
            if name in moving and np.shares_memory(_within(storage, one), _within(storage, two)):
                raise ValueError(
                    f"{name!r} and {other!r} share memory but are two tensors, so that a step would move them apart; "
                    "tie them as one Parameter (a.weight = b.weight, not a.weight.data = b.weight.data), or compute a "
                    "buffer from the weight in every forward pass"
                )


def _within(storage: np.ndarray, t: Tensor) -> np.ndarray:
    """Lay out an array in a storage as a tensor lies in its own."""
    size = t.element_size()
    strides = [size * stride for stride in t.stride()]
    return np.ndarray(tuple(t.shape), f"V{size}", storage, size * t.storage_offset(), strides)


def known(model: nn.Module, measure: Measure, given: Symmetries | None, *, classes: bool = False) -> Symmetries:
    """Return the symmetries that a measure divides out where all weights move.

    Parameters
    ----------
    model, measure : nn.Module, Measure
    given : Symmetries, optional
        By default those of heads and adapters that the model's classes name.
    classes : bool
        For measures at the canonical form: the loss uses the logits only through a softmax.
    """
    from quotient_manifolds.symmetries.discovery import PAIRS, claimed, with_wiring

    scope = PAIRS if divides(measure) else ("points",) if measure.takes_points else ()
    if given is None or not divides(measure):
        found = claimed(model, None, scope) if scope else Symmetries()
    else:
        check_symmetries(given)
        check_names(given, weights_of(model), type(model).__name__)
        found = given if not measure.takes_points else _with_points(model, given)
    return with_wiring(model, found, classes=classes) if measure.form == "canonical" and not found.actions else found


def _with_points(model: nn.Module, given: Symmetries) -> Symmetries:
    """Add the points that a user's pairs lack."""
    from quotient_manifolds.symmetries import find

    names = {p.name for p in given.pairs}
    return given.adding(*(p for p in find(model, scope=("points",)).pairs if p.name not in names))


def stacks_of(
    measure: Measure, symmetries: Symmetries, weights: Mapping[str, Tensor], *, pieces: bool = True
) -> list[PairStack]:
    """Stack the pairs that a measure divides out; on a CPU in pieces."""
    found = stacks([p for p in symmetries.pairs if divides(measure, p)], weights)
    if not pieces or any(weights[name].device.type != "cpu" for s in found[:1] for name in s.names[:1]):
        return found
    count = [max(1, _PIECE // ((s.n + s.m) * s.group.h)) for s in found]
    return [PairStack(s.pairs[i : i + k]) for s, k in zip(found, count, strict=True) for i in range(0, len(s.pairs), k)]


def build_patches(
    measure: Measure, moving: Mapping[str, Tensor], dtype: torch.dtype, found: Sequence[PairStack],
    constant: Mapping[str, Tensor], lengths: Mapping[str, Tensor],
) -> tuple[list[Patch], list[PairPatch]]:  # fmt: skip
    """Return the patches of the weights that move: of single ones, and of stacks of pairs.

    ``constant`` are masks of the entries that do not move, ``lengths`` those of the vectors that entries belong to.
    """
    covered = coverage(found, moving)
    for name, mask in constant.items():
        covered[name] = mask | covered[name] if name in covered else mask
    single: list[Patch] = [
        PointPatch(name, p, dtype) if isinstance(p, ManifoldParameter) and measure.takes_points
        else ElementwisePatch(name, p, measure, dtype, covered.get(name), lengths.get(name))
        for name, p in moving.items()
        if name not in covered or not bool(covered[name].all())
    ]  # fmt: skip
    own = measure.pair_patch or PairPatch  # not for points, whose metric is their own
    return single, [(PairPatch if s.metric else own)(s, moving, measure, dtype) for s in found]


def warn_of_unknown(model: nn.Module) -> None:
    """Say which trainable attention has no pairs because no handler knows its class, where no batch can tell."""
    if names := unknown_attention(model):
        warnings.warn(
            f"no handler knows the symmetries of {names}, and there is no batch yet to examine them on, so their "
            "weights move one by one; pass symmetries=find(model, batch)", stacklevel=3,
        )  # fmt: skip
