r"""All trainable weights of a model as one Riemannian space.

Attention pairs carry the inv or mix metric of the GL(h) quotient, every other weight w the metric
:math:`\|ξ \oslash |w|\|^2` (or the Euclidean one); squared norms add up. A tangent vector is held as one flat vector of
*coordinates in which the metric is the identity*: norms and inner products are plain sums, and the ball is a ball.

For a single weight the coordinate is ζ = ξ/w, an isometry of ξ/|w|, so that w + ξ = w + w ζ needs no division and zero
weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import geoopt
import torch
from torch import Tensor, nn

from quotient_manifolds import GLTangentSpace, canonical_gauge
from quotient_manifolds.additive import additive_tangent_space
from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.symmetries import PairStack, SymmetricPair, find, stacks

from .adaptive_norm import AdaptiveNorm
from .measures import Measure

__all__ = ["Direction", "WeightSpace", "perturbed"]

#: Elements of a stack of pairs that are worked on at a time on a CPU.
_PIECE = 2**20


@dataclass(frozen=True)
class Direction:
    """A tangent vector at a model's weights.

    Attributes
    ----------
    measure : Measure
        Says how to move along it.
    tensors : dict of str to Tensor
        One tensor a trainable parameter, of its shape and dtype (at least float32), by the parameter's name. For
        attention pairs it is the horizontal vector at the model's own representative.
    norm : float
        Length in the measure's metric.
    pairs : tuple of SymmetricPair
        The pairs that were divided out.
    """

    measure: Measure
    tensors: dict[str, Tensor] = field(repr=False)
    norm: float
    pairs: tuple[SymmetricPair, ...] = field(default=(), repr=False)


@dataclass
class _Elementwise:
    """A parameter (or what the pairs leave of it) with the elementwise metric."""

    name: str
    parameter: nn.Parameter
    where: slice
    scale: Tensor | None  # ξ = scale · ζ; None: the weight itself

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.where].view(self.parameter.shape)


@dataclass
class _Pairs:
    """A stack of attention pairs: in canonical gauge, unless the measure depends on the representative."""

    stack: PairStack
    point: geoopt.ManifoldParameter
    tangent: GLTangentSpace
    frame: GLTangentSpace | AdaptiveNorm  # its coordinates make the measure's metric the identity
    sigma: Tensor
    present: Tensor
    back: tuple[Tensor, Tensor] | None  # (A, A⁻¹) in float64, from the canonical to the model's own representative
    where: slice

    def view(self, flat: Tensor) -> Tensor:
        return _like(self.point, flat[self.where])

    def own(self, u: Tensor) -> Tensor:
        """Carry a vector to the model's own representative, in float64."""
        wide = u.to(torch.complex128 if u.is_complex() else torch.float64)
        if self.back is None:
            return wide
        (A, A_inv), n = self.back, self.stack.n
        return torch.cat([wide[..., :n, :] @ A, wide[..., n:, :] @ A_inv.mH], dim=-2)


def _like(point: Tensor, numbers: Tensor) -> Tensor:
    """See the first so many real numbers as a tensor of a point's shape."""
    real = numbers[: point.numel() * (2 if point.is_complex() else 1)]
    return torch.view_as_complex(real.view(*point.shape, 2)) if point.is_complex() else real.view(point.shape)


def _plain(name: str) -> str:
    """A parameter's name without the prefix of ``torch.compile``."""
    return name.replace("_orig_mod.", "")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {_plain(name): p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter, so there is nothing to perturb; "
            "set requires_grad_(True) on the weights to be measured"
        )
    devices = {p.device for p in found.values()}
    if len(devices) > 1:
        raise ValueError(f"the trainable parameters lie on several devices ({devices}); move the model to one")
    for name, p in found.items():
        if not p.is_floating_point():
            raise ValueError(f"parameter {name!r} has dtype {p.dtype}; only real floating-point weights are measured")
        if not bool(p.detach().isfinite().all()):
            raise ValueError(f"parameter {name!r} has NaN or infinite entries; load a sound checkpoint")
    return found


class WeightSpace:
    """The space of a model's trainable weights under a measure, and the place where the model stands in it.

    Parameters
    ----------
    model : nn.Module
    measure : Measure
    pairs : sequence of SymmetricPair, optional
        The attention pairs; by default those that ``quotient_manifolds.symmetries.find`` names.

    Attributes
    ----------
    dim : int
        Number of coordinates.
    dtype, device
        Of the coordinate vectors: the widest dtype among the weights, at least float32.
    pairs : tuple of SymmetricPair
        Those that are divided out.

    Notes
    -----
    The weights themselves are never written to: while :meth:`attached`, the parameters point to copies.
    """

    def __init__(self, model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None = None) -> None:
        self.model, self.measure = model, measure
        self._parameters = trainable(model)
        self.device = next(iter(self._parameters.values())).device
        self.dtype = torch.float32
        for p in self._parameters.values():
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self._step = measure.metric_scale**-0.5
        self._data = {p: p.data for p in self._parameters.values()}
        found = divided(model, measure, pairs)
        covered = coverage(found)
        self._elementwise: list[_Elementwise] = []
        self._pairs: list[_Pairs] = []
        self.pairs: tuple[SymmetricPair, ...] = tuple(p for s in found for p in s.pairs)
        if self.device.type == "cpu":
            found = [piece for s in found for piece in pieces(s)]
        start = 0
        for name, p in self._parameters.items():
            mask = covered.get(p)
            if mask is not None and bool(mask.all()):
                continue
            scale = None
            if measure.elementwise == "euclidean":
                scale = p.detach().new_ones(()).expand(p.shape)
            if mask is not None:
                scale = (p.detach() if scale is None else scale).masked_fill(mask, 0)
            self._elementwise.append(_Elementwise(name, p, slice(start, start + p.numel()), scale))
            start += p.numel()
        for s in found:
            block = _hold(s, measure, self.dtype, start)
            self._pairs.append(block)
            start = block.where.stop
        self.dim = start
        self._work: dict[Tensor, Tensor] = {}
        self._at: Tensor | None = None
        self._spare: Tensor | None = None
        self._reentrant: bool | None = None
        self._pairs_checked = False

    # -- vectors -----------------------------------------------------------------------------------------------

    def zero(self) -> Tensor:
        """Give the zero vector, (dim,)."""
        return torch.zeros(self.dim, dtype=self.dtype, device=self.device)

    def empty(self) -> Tensor:
        """Give a vector with any content, (dim,)."""
        return torch.empty(self.dim, dtype=self.dtype, device=self.device)

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, (dim,); equal at all representatives of an orbit."""
        flat = torch.empty(self.dim, dtype=self.dtype)
        for e in self._elementwise:
            flat[e.where].normal_(generator=generator)
        flat = flat.to(self.device)
        for b in self._pairs:
            # Already horizontal but for rounding, which in coordinates of weak directions is worth another projection.
            c = b.frame.coordinates(b.frame.random(generator))
            b.view(flat).copy_(b.frame.project_coordinates(c))
        self._mask_(flat)
        return flat

    def _mask_(self, flat: Tensor) -> None:
        for e in self._elementwise:
            if e.scale is not None:
                e.view(flat).masked_fill_(e.scale == 0, 0)

    def direction(self, xi: Tensor) -> Direction:
        """Give the tangent vector with coordinates xi in terms of the parameters."""
        tensors = {
            name: torch.zeros_like(data, dtype=at_least_float32(data.dtype)) for name, data in self._named_data()
        }
        for e in self._elementwise:
            scale = self._data[e.parameter] if e.scale is None else e.scale
            tensors[e.name] = (scale * e.view(xi) * self._step).to(tensors[e.name].dtype)
        by_parameter: dict[Tensor, Tensor] = {p: tensors[name] for name, p in self._parameters.items()}
        for b in self._pairs:
            b.stack.scatter_(b.own(self._vector(b, xi)), by_parameter)
        tensors = {name: t.cpu() for name, t in tensors.items()}
        return Direction(self.measure, tensors, float(torch.linalg.vector_norm(xi)), self.pairs)

    def _named_data(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._parameters.items():
            yield name, self._data[p]

    def weakest(self) -> float | None:
        """Give σ_h, the smallest singular value that any pair's G Hᴴ has; None without pairs."""
        values = [b.sigma[b.present].min() for b in self._pairs if bool(b.present.any())]
        return float(min(values)) if values else None

    def absent(self) -> int:
        """Count the directions that count as absent, for want of a singular value above rounding."""
        return sum(int((~b.present).sum()) for b in self._pairs)

    def floored(self) -> int:
        """Count the directions that are present, but whose singular value the metric's floor replaces."""
        if self.measure.relaxation_kind != "floor":
            return 0
        return sum(int((b.present & (b.sigma < self.measure.relaxation * b.sigma[..., :1])).sum()) for b in self._pairs)

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[WeightSpace]:
        """Let the model's parameters point to copies that :meth:`move_to` writes; undone on every way out.

        Half-precision weights point to float32 copies, and with them all other half-precision tensors of the model:
        next to w, bfloat16 has no numbers closer than w (1 ± 2⁻⁸), so that nearly all of a small ξ would be rounded
        away, in the weights and again by autocast, which casts them before every product.
        """
        copies: dict[Tensor, Tensor] = {}
        for p, data in self._data.items():
            copies[p] = torch.empty_like(
                data, dtype=at_least_float32(data.dtype), memory_format=torch.contiguous_format
            )
        widened = _half_precision_rest(self.model, copies) if self.half_precision else {}
        with _pointing_to({**copies, **widened}), _wide_buffers(self.model, self.half_precision):
            self._work = copies
            try:
                self._move_to(None)
                yield self
            finally:
                self._work, self._at = {}, None

    @property
    def half_precision(self) -> bool:
        """Whether any weight is narrower than float32."""
        return any(data.dtype != at_least_float32(data.dtype) for data in self._data.values())

    @torch.no_grad()
    def move_to(self, xi: Tensor | None) -> None:
        """Put the model at the retraction of the vector with coordinates xi, (dim,); None is the base point.

        The vector must not change before the gradient there is taken.
        """
        with torch.autocast(self.device.type, enabled=False):
            self._move_to(xi)

    def _move_to(self, xi: Tensor | None) -> None:
        self._at = xi
        if xi is None:
            for p, data in self._data.items():
                self._work[p].copy_(data)
            for b in self._pairs:
                b.stack.scatter_(b.point, self._work)
            return
        for e in self._elementwise:
            base, out = self._data[e.parameter], self._work[e.parameter]
            scale = base if e.scale is None else e.scale
            if base.dtype == self.dtype == out.dtype:
                torch.addcmul(base, scale, e.view(xi), value=self._step, out=out)
            else:
                out.copy_(torch.addcmul(base.to(self.dtype), scale.to(self.dtype), e.view(xi), value=self._step))
        retract = RETRACTIONS[self.measure.geodesic][0]
        for b in self._pairs:
            if self._fused(b):
                end = b.tangent.retr_coordinates(self._coordinates(b, xi), out=_like(b.point, self._scratch()))
            else:
                end = retract(b.tangent, self._vector(b, xi), self.measure)
            b.stack.scatter_(end, self._work)

    def leaving(self) -> int:
        """Count the pairs whose exact geodesic was shortened where the model stands, lest it leave the manifold."""
        if self._at is None or self.measure.geodesic != "exact" or self.measure.pairs != "mix":
            return 0
        with torch.no_grad():
            return sum(int(b.tangent.exit_time(self._vector(b, self._at)).isfinite().sum()) for b in self._pairs)

    def _scratch(self) -> Tensor:
        """Memory for one stack that is used again and again: fresh memory costs more than the arithmetic."""
        if self._spare is None:
            size = max(p.point.numel() * (2 if p.point.is_complex() else 1) for p in self._pairs)
            self._spare = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._spare

    def _fused(self, b: _Pairs) -> bool:
        """Whether the tangent space can go from coordinates to points and back at once."""
        return b.back is not None and self.measure.geodesic == "second-order"

    def _coordinates(self, b: _Pairs, xi: Tensor) -> Tensor:
        c = b.view(xi).to(b.point.dtype)
        return c if self._step == 1 else c * self._step

    def _vector(self, b: _Pairs, xi: Tensor) -> Tensor:
        """The tangent vector of a stack at its point."""
        return b.frame.from_coordinates(self._coordinates(b, xi))

    def gradient(self, losses: Tensor | Iterable[Tensor], out: Tensor | None = None) -> Tensor:
        """Differentiate a loss of the model where it stands.

        Parameters
        ----------
        losses : Tensor or iterable of Tensor
            Scalar with a graph that reaches the parameters; or several whose sum is the loss, taken one after the
            other, so that a generator needs the memory of one of them.
        out : Tensor, optional
            Where the result is written, (dim,).

        Returns
        -------
        Tensor
            (dim,), horizontal: the gradient of ξ → loss(R(ξ)) in the tangent space at the base point.
        """
        found: dict[Tensor, Tensor] = {}
        summed: set[Tensor] = set()
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            if self._reentrant is None:  # walking the graph once is enough: the model does not change
                self._reentrant = _has_reentrant_checkpoint(loss)
            for p, g in _differentiate(loss, list(self._parameters.values()), self._reentrant).items():
                if p in summed:
                    found[p].add_(g)
                elif p in found:  # what autograd gives may share memory: not to be written to
                    found[p] = found[p] + g
                    summed.add(p)
                else:
                    found[p] = g
            del loss
        self._check_pairs(found)
        flat = torch.empty(self.dim, dtype=self.dtype, device=self.device) if out is None else out
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for e in self._elementwise:
                part, grad = e.view(flat), found.get(e.parameter)
                if grad is None:
                    part.zero_()
                    continue
                scale = self._data[e.parameter] if e.scale is None else e.scale
                torch.mul(grad.to(self.dtype), scale.to(self.dtype), out=part)
                if self._step != 1:
                    part.mul_(self._step)
            for b in self._pairs:
                egrad = b.stack.gather(found, out=self._scratch())
                self._pull_back(b, egrad.to(b.point.dtype), b.view(flat))
        return flat

    def _pull_back(self, b: _Pairs, egrad: Tensor, out: Tensor) -> None:
        """Turn a Euclidean gradient where the model stands into coordinates of a horizontal vector at the base."""
        if self._at is not None and self._fused(b):
            b.tangent.pullback_coordinates(self._coordinates(b, self._at), egrad, self._step, out=out)
            return
        if self._at is not None:
            pull = RETRACTIONS[self.measure.geodesic][1]
            egrad = pull(b.tangent, self._vector(b, self._at), egrad, self.measure)
        out.copy_(b.frame.project_coordinates(b.frame.dual_coordinates(egrad) * self._step))

    def hessian_product(self, losses: Callable[[], Tensor | Iterable[Tensor]], v: Tensor) -> Tensor:
        """Multiply v, (dim,), by the Hessian of ξ → loss(R(ξ)) at 0, projected on horizontal vectors on both sides.

        ``losses`` gives what :meth:`gradient` takes; the model is moved to the base point first.
        """
        self.move_to(None)
        v = self._projected(v)
        moving = {p: torch.zeros_like(work) for p, work in self._work.items()}
        with torch.no_grad():
            for e in self._elementwise:
                scale = self._data[e.parameter] if e.scale is None else e.scale
                moving[e.parameter].copy_(scale.to(self.dtype) * e.view(v) * self._step)
            vectors = [self._vector(b, v) for b in self._pairs]
            for b, u in zip(self._pairs, vectors, strict=True):
                b.stack.scatter_(u, moving)
        first: dict[Tensor, Tensor] = {}
        second: dict[Tensor, Tensor] = {}
        found = losses()
        parameters = list(self._parameters.values())
        for loss in [found] if isinstance(found, Tensor) else found:
            grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            known = [(p, g) for p, g in zip(parameters, grads, strict=True) if g is not None]
            slope = sum(((g * moving[p]).sum() for p, g in known), start=loss.new_zeros(()))
            twice: Sequence[Tensor | None] = [None] * len(parameters)
            if slope.requires_grad:
                twice = torch.autograd.grad(slope, parameters, allow_unused=True)
            for into, some in ((first, grads), (second, twice)):
                for p, g in zip(parameters, some, strict=True):
                    if g is not None:
                        into[p] = into[p] + g.detach() if p in into else g.detach()
        out = self.zero()
        with torch.no_grad():
            for e in self._elementwise:
                if e.parameter in second:
                    scale = self._data[e.parameter] if e.scale is None else e.scale
                    e.view(out).copy_(second[e.parameter].to(self.dtype) * scale.to(self.dtype) * self._step)
            for b, u in zip(self._pairs, vectors, strict=True):
                egrad = b.stack.gather(second).to(b.point.dtype)
                if self.measure.geodesic != "first-order":
                    at_base = b.stack.gather(first).to(b.point.dtype)
                    egrad = egrad + b.tangent.pullback(u, at_base) - at_base
                c = b.frame.dual_coordinates(egrad) * self._step
                b.view(out).copy_(b.frame.project_coordinates(c))
        return out

    def _projected(self, v: Tensor) -> Tensor:
        """The horizontal part."""
        v = v.clone()
        with torch.no_grad():
            self._mask_(v)
            for b in self._pairs:
                b.view(v).copy_(b.frame.project_coordinates(b.view(v)))
        return v

    def _check_pairs(self, found: dict[Tensor, Tensor]) -> None:
        """Refuse pairs without any gradient, at the first one: a layer that is left out, or bypassed."""
        if self._pairs_checked:
            return
        for pair in self.pairs:
            if not any(p in found for p in pair.parameters()):
                raise ValueError(
                    f"the pair {pair.name!r} gets no gradient: the loss does not depend on it; freeze its weights with "
                    "requires_grad_(False), or check that the layer takes part"
                )
        self._pairs_checked = True


def _differentiate(loss: Tensor, parameters: list[nn.Parameter], reentrant: bool) -> dict[Tensor, Tensor]:
    """Gradients by parameter, those absent left out; ``.grad`` is left alone."""
    if not reentrant:
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, parameters, allow_unused=True)
    else:  # autograd.grad cannot see through reentrant checkpoints: collect in .grad, and put back what was there
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            loss.backward()
            grads = tuple(p.grad for p in parameters)
        finally:
            for p, g in zip(parameters, before, strict=True):
                p.grad = g
    return {p: g.to_dense() if g.is_sparse else g for p, g in zip(parameters, grads, strict=True) if g is not None}


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    seen, queue = set(), [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        queue.extend(child for child, _ in node.next_functions)
    return False


def coverage(found: Sequence[PairStack]) -> dict[Tensor, Tensor]:
    masks: dict[Tensor, Tensor] = {}
    for s in found:
        for p in s.parameters():
            masks.setdefault(p, torch.zeros(p.shape, dtype=torch.bool, device=p.device))
        s.mark_(masks)
    return masks


def pieces(s: PairStack) -> list[PairStack]:
    """Split a stack so that temporaries stay in a CPU's cache; fresh large ones cost more than the arithmetic."""
    count = max(1, _PIECE // ((s.n + s.m) * s.group.h))
    return [PairStack(s.pairs[i : i + count]) for i in range(0, len(s), count)]


def divided(model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None) -> list[PairStack]:
    """The pairs that a measure takes modulo their symmetry."""
    if not measure.divides:
        return []
    found = find(model) if pairs is None else pairs
    return stacks(p for p in found if measure.symmetry in ("all", p.kind))


def _hold(s: PairStack, measure: Measure, dtype: torch.dtype, start: int) -> _Pairs:
    """Factorise a stack, in float64; what is worked with in canonical gauge is then rounded to a dtype."""
    assert measure.pairs is not None
    with torch.no_grad():
        x = s.gather().to(torch.complex128 if s.group.field == "complex" else torch.float64)
        floor = measure.relaxation_kind == "floor"
        manifold = s.manifold(measure.pairs, relaxation=measure.relaxation if floor else 0.0)
        gauge = canonical_gauge(*manifold.unpack_tensor(x))
        # A group move turns σ_i = 0 into rounding noise times its condition number, which mix would then divide by.
        tolerance = torch.finfo(at_least_float32(s.pairs[0].G[0].tensor.dtype)).eps ** 0.5
        present, back = gauge.present(tolerance), None
        frame: GLTangentSpace | AdaptiveNorm
        if not floor:
            frame = tangent = additive_tangent_space(manifold, x, measure.relaxation)
        elif measure.norm == "adaptive":
            tangent = manifold.at_gauge(gauge, x, tolerance=tolerance)
            frame = AdaptiveNorm(tangent)
        else:
            frame = tangent = manifold.at_gauge(gauge.to(dtype), tolerance=tolerance)
            back = (gauge.A, gauge.A_inv)
        point = geoopt.ManifoldParameter(tangent.x, manifold=manifold, requires_grad=False)
        stop = start + point.numel() * (2 if point.is_complex() else 1)
        return _Pairs(s, point, tangent, frame, gauge.sigma, present, back, slice(start, stop))


def _rk4(t: GLTangentSpace, u: Tensor, measure: Measure) -> Tensor:
    return t.rk4(u, measure.substeps)


#: Share of its way to the manifold's boundary to which a geodesic is shortened that would leave.
_INSIDE = 0.99


def _exact(t: GLTangentSpace, u: Tensor, measure: Measure) -> Tensor:
    # The share is constant to autograd: beyond the boundary the retraction follows the vector's direction only.
    return t.expmap(u * (_INSIDE * t.exit_time(u.detach())).clamp_max(1)[..., None, None])


def _pull_by_autograd(
    retract: Callable[[GLTangentSpace, Tensor, Measure], Tensor],
    t: GLTangentSpace,
    u: Tensor,
    egrad: Tensor,
    measure: Measure,
) -> Tensor:
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        return torch.autograd.grad(retract(t, u, measure), u, egrad)[0]


#: By geodesic: the retraction (tangent space, vector, measure) → point, and its adjoint derivative, with the Euclidean
#: gradient at that point as a further argument before the measure.
RETRACTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "first-order": (lambda t, u, _: t.x + u, lambda t, u, egrad, _: egrad),
    "second-order": (lambda t, u, _: t.retr(u), lambda t, u, egrad, _: t.pullback(u, egrad)),
    "exact": (_exact, lambda t, u, egrad, measure: _pull_by_autograd(_exact, t, u, egrad, measure)),
    "rk4": (_rk4, lambda t, u, egrad, measure: _pull_by_autograd(_rk4, t, u, egrad, measure)),
}


def _half_precision_rest(model: nn.Module, known: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Float32 copies of the parameters that are not among those known and are narrower."""
    return {
        p: p.data.to(at_least_float32(p.dtype))
        for p in model.parameters()
        if p not in known and p.is_floating_point() and p.dtype != at_least_float32(p.dtype)
    }


@contextmanager
def _wide_buffers(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Replace half-precision buffers by float32 ones for a while."""
    narrow = [
        (m, name, b)
        for m in (model.modules() if wanted else ())
        for name, b in m._buffers.items()
        if b is not None and b.is_floating_point() and b.dtype != at_least_float32(b.dtype)
    ]
    try:
        for m, name, b in narrow:
            m._buffers[name] = b.to(at_least_float32(b.dtype))
        yield
    finally:
        for m, name, b in narrow:
            m._buffers[name] = b


@contextmanager
def _pointing_to(data: dict[Tensor, Tensor]) -> Iterator[None]:
    """Let parameters point to other data; the original storage is untouched and comes back on every way out."""
    original = {p: p.data for p in data}
    try:
        for p, replacement in data.items():
            p.data = replacement
        yield
    finally:
        for p, before in original.items():
            p.data = before


def _same_pairs(model: nn.Module, direction: Direction) -> list[SymmetricPair]:
    """The direction's pairs in this model, which may be another copy of the one that was measured."""
    own = {id(m) for m in model.modules()}
    if all(id(b.module) in own for p in direction.pairs for b in p.G + p.H):
        return list(direction.pairs)
    found = {p.name: p for p in find(model, include_frozen=True)}
    missing = [p.name for p in direction.pairs if p.name not in found]
    if missing:
        raise ValueError(f"the direction moves the pair {missing[0]!r}, which {type(model).__name__} lacks")
    return [found[p.name] for p in direction.pairs]


@contextmanager
def perturbed(model: nn.Module, direction: Direction, t: float = 1.0) -> Iterator[nn.Module]:
    r"""Move a model along a direction for the time of a ``with`` block.

    The weights become :math:`R_θ(tξ)`: the measure's retraction for attention pairs, θ + tξ elsewhere.

    Parameters
    ----------
    model : nn.Module
        The model whose weights the direction belongs to.
    direction : Direction
        For example ``result.direction(0)``.
    t : float
        How far; at 1 the loss is the one that ``evaluate`` reports.

    Yields
    ------
    nn.Module
        The model. Its weights are restored, bit for bit, when the block ends, also by an exception. A half-precision
        model is a float32 one within the block (see :meth:`WeightSpace.attached`) and takes float32 inputs.

    Raises
    ------
    ValueError
        If the direction's parameters are not those of the model.
    """
    parameters = {_plain(name): p for name, p in model.named_parameters()}
    for name, v in direction.tensors.items():
        if name not in parameters or parameters[name].shape != v.shape:
            raise ValueError(
                f"the direction has a tensor {name!r} of shape {tuple(v.shape)}, which {type(model).__name__} lacks; "
                "it belongs to another model"
            )
    measure = direction.measure
    with torch.no_grad():
        moved: dict[Tensor, Tensor] = {
            parameters[name]: parameters[name].detach().to(v.dtype) + t * v.to(parameters[name].device)
            for name, v in direction.tensors.items()
        }
        if measure.divides and measure.geodesic != "first-order":
            vectors: dict[Tensor, Tensor] = {
                parameters[name]: v.to(parameters[name].device) for name, v in direction.tensors.items()
            }
            for s in stacks(_same_pairs(model, direction)):
                b = _hold(s, measure, torch.float64, 0)
                u = t * s.gather(vectors).to(b.point.dtype)
                if b.back is not None:
                    (A, A_inv), n = b.back, s.n
                    u = torch.cat([u[..., :n, :] @ A_inv, u[..., n:, :] @ A.mH], dim=-2)
                end = RETRACTIONS[measure.geodesic][0](b.tangent, u, measure)
                s.scatter_(b.own(end), moved)
        half = any(parameters[name].dtype != v.dtype for name, v in direction.tensors.items())
        if half:
            moved.update(_half_precision_rest(model, moved))
    with _pointing_to(moved), _wide_buffers(model, half):
        yield model
