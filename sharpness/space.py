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

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.symmetries import SymmetricPair

from .blocks import Elementwise, PairBlock, as_point, build_pair_block, coverage, pieces, stack_pairs
from .direction import Direction
from .measures import Measure
from .retractions import RETRACTIONS
from .weights import half_precision_rest, pointing_to, trainable, wide_buffers

__all__ = ["WeightSpace"]


class WeightSpace:
    """The space of a model's trainable weights under a measure, and the place where the model stands in it.

    Parameters
    ----------
    model : nn.Module
        Its trainable weights lie on one device.
    measure : Measure
        Metric and retraction; for example ``MEASURES["geodesic-inv"]``.
    pairs : sequence of SymmetricPair, optional
        The attention pairs; by default those that ``quotient_manifolds.symmetries.find_symmetric_pairs`` names.

    Attributes
    ----------
    dim : int
        Number of coordinates.
    dtype, device
        Of the coordinate vectors: the widest dtype among the weights, at least float32.
    pairs : tuple of SymmetricPair
        Those that are divided out.

    Raises
    ------
    ValueError
        No trainable weights, weights on several devices, not real floating-point, or not finite.

    Notes
    -----
    Paper, §5.2; the metric of single weights is that of adaptive sharpness. The weights themselves are never written
    to: while :meth:`attached`, the parameters point to copies.

    Examples
    --------
    The gradient's length is the same wherever on its orbit a model stands:

    >>> import torch
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import apply_random_symmetry_
    >>> from sharpness import MEASURES
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(4, 3, 8)
    >>> def slope():
    ...     space = WeightSpace(model, MEASURES["geodesic-inv"])
    ...     with space.attached():
    ...         return float(space.gradient((model(x) - x).square().mean()).norm())
    >>> before, moved = slope(), apply_random_symmetry_(model)
    >>> abs(slope() / before - 1) < 1e-3
    True
    """

    def __init__(self, model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None = None) -> None:
        if not isinstance(measure, Measure):
            raise TypeError(f"measure must be a Measure, as those in MEASURES, got {type(measure).__name__}")
        self.model, self.measure = model, measure
        self._parameters = trainable(model)
        self.device = next(iter(self._parameters.values())).device
        self.dtype = torch.float32
        for p in self._parameters.values():
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self._step = measure.metric_scale**-0.5
        self._data = {p: p.data for p in self._parameters.values()}
        found = stack_pairs(model, measure, pairs)
        covered = coverage(found)
        self._elementwise: list[Elementwise] = []
        self._pairs: list[PairBlock] = []
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
            self._elementwise.append(Elementwise(name, p, slice(start, start + p.numel()), scale))
            start += p.numel()
        for s in found:
            block = build_pair_block(s, measure, self.dtype, start)
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
        """Draw a standard Gaussian horizontal vector; equal at all representatives of an orbit.

        Parameters
        ----------
        generator : torch.Generator
            On the CPU, so that all devices draw alike.

        Returns
        -------
        Tensor
            (dim,)
        """
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
        """Give the tangent vector with coordinates xi in terms of the parameters.

        Parameters
        ----------
        xi : Tensor
            (dim,), horizontal.

        Returns
        -------
        Direction
            Its tensors on the CPU.
        """
        tensors = {
            name: torch.zeros_like(data, dtype=at_least_float32(data.dtype)) for name, data in self._named_data()
        }
        squares: dict[str, float] = {}
        of_pairs: list[float] = []
        for e in self._elementwise:
            scale = self._data[e.parameter] if e.scale is None else e.scale
            tensors[e.name] = (scale * e.view(xi) * self._step).to(tensors[e.name].dtype)
            squares[e.name] = float(e.view(xi).square().sum())
        by_parameter: dict[Tensor, Tensor] = {p: tensors[name] for name, p in self._parameters.items()}
        for b in self._pairs:
            b.stack.scatter_(b.to_model_gauge(self._vector(b, xi)), by_parameter)
            lengths = torch.linalg.vector_norm(b.view(xi), dim=tuple(range(1, b.point.dim()))).tolist()
            of_pairs += [length**2 for length in lengths]
        tensors = {name: t.cpu() for name, t in tensors.items()}
        return Direction(
            self.measure, tensors, float(torch.linalg.vector_norm(xi)), self.pairs, squares, tuple(of_pairs)
        )

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

        Yields
        ------
        WeightSpace
            Itself, with the model at the base point.
        """
        copies: dict[Tensor, Tensor] = {}
        for p, data in self._data.items():
            copies[p] = torch.empty_like(
                data, dtype=at_least_float32(data.dtype), memory_format=torch.contiguous_format
            )
        widened = half_precision_rest(self.model, copies) if self.half_precision else {}
        with pointing_to({**copies, **widened}), wide_buffers(self.model, self.half_precision):
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
        """Put the model, which must be attached, at the retraction of a tangent vector.

        Parameters
        ----------
        xi : Tensor or None
            (dim,), its coordinates, horizontal; they must not change before the gradient there is taken. None is the
            base point.
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
                end = b.tangent.retr_coordinates(self._coordinates(b, xi), out=as_point(b.point, self._scratch()))
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

    def _fused(self, b: PairBlock) -> bool:
        """Whether the tangent space can go from coordinates to points and back at once."""
        return b.back is not None and self.measure.geodesic == "second-order"

    def _coordinates(self, b: PairBlock, xi: Tensor) -> Tensor:
        c = b.view(xi).to(b.point.dtype)
        return c if self._step == 1 else c * self._step

    def _vector(self, b: PairBlock, xi: Tensor) -> Tensor:
        """Give the tangent vector of a stack at its point."""
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

        Raises
        ------
        ValueError
            The loss does not depend on a pair.
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

    def _pull_back(self, b: PairBlock, egrad: Tensor, out: Tensor) -> None:
        """Turn a Euclidean gradient where the model stands into coordinates of a horizontal vector at the base."""
        if self._at is not None and self._fused(b):
            b.tangent.pullback_coordinates(self._coordinates(b, self._at), egrad, self._step, out=out)
            return
        if self._at is not None:
            pull = RETRACTIONS[self.measure.geodesic][1]
            egrad = pull(b.tangent, self._vector(b, self._at), egrad, self.measure)
        out.copy_(b.frame.project_coordinates(b.frame.dual_coordinates(egrad) * self._step))

    def hessian_product(self, losses: Callable[[], Tensor | Iterable[Tensor]], v: Tensor) -> Tensor:
        """Multiply a vector by the Hessian of ξ → loss(R(ξ)) at 0, projected on horizontal vectors on both sides.

        Parameters
        ----------
        losses : callable
            Gives what :meth:`gradient` takes; called with the model at the base point, where it then stays.
        v : Tensor
            (dim,)

        Returns
        -------
        Tensor
            (dim,), horizontal.
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
        """Take the horizontal part."""
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
