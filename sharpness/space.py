"""All trainable weights of a model as one Riemannian space, and the model's point in it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from quotient_manifolds._geoopt import ManifoldParameter
from quotient_manifolds.linalg import at_least_float32, differentiated
from quotient_manifolds.passes import operations
from quotient_manifolds.symmetries import SymmetricPair, Symmetries
from quotient_manifolds.symmetries.found import HALF_PRECISION, certify
from quotient_manifolds.weights import pointing_to, weights_of

from .ascent import gram_matrix
from .direction import WeightParts
from .measures import Measure, divides
from .patch import Patch
from .patches import PairPatch, build_patches, in_memory_of, known, stacks_of, trainable
from .points import check_points

if TYPE_CHECKING:
    from quotient_manifolds.symmetries import CanonicalForm

    from .distributed import World

#: Residuals up to this are rounding of gradients that were computed in float32 or wider, of which they show up to 3e-6.
_IN_FLOAT32 = 1e-4
#: A vector, whole or as the list of its parts.
V = TypeVar("V", Tensor, list[Tensor])
HIDES = "checkpoint(…, use_reentrant=True) hides weights; pass use_reentrant=False, or freeze weights without use"


class Unreached(NamedTuple):
    """The numbers of pairs, and the names of weights, that no gradient has reached yet."""

    pairs: set[int]  # which nothing certifies
    weights: set[str]  # on which no loss depends
    flat: set[str]  # these weights, and those whose gradient was 0

    def __and__(self, other: Unreached) -> Unreached:
        """Name what neither of two processes has reached."""
        return Unreached(self.pairs & other.pairs, self.weights & other.weights, self.flat & other.flat)


class WeightSpace:
    """The space of a model's trainable weights under a measure, and the model's current point in it.

    A tangent vector is one flat vector of coordinates in which the metric is the identity.

    Parameters
    ----------
    model : nn.Module
        A model whose trainable weights lie on one device.
    measure : Measure
        Metric and retraction; for example ``MEASURES["geodesic-inv"]``.
    symmetries : Symmetries, optional
        By default those of heads and adapters that ``quotient_manifolds.symmetries.find`` finds.
    classes : bool
        For measures at the canonical form: the loss uses the logits only through a softmax.
    moving : mapping of str to Tensor, optional
        The trainable weights by name, where they have been checked.

    Attributes
    ----------
    dtype, device
        Of the coordinate vectors: the widest dtype among the weights, at least float32; and the weights' device, to
        which batches belong.
    dim : int
        Number of coordinates.
    patches : list of Patch
        Squared norms add up over them.
    parameters : dict of str to Tensor
        Those that move, by name.
    copies : dict of str to Tensor
        While attached, the moving weights, by name.
    symmetries : Symmetries
        Those that are divided out.
    pairs : tuple of SymmetricPair
        Those that are divided out.
    world : World or None
        The processes over which vectors are spread; None: this one alone has all of them.
    spectrum : tuple of (float or None) and int
        σ_h, the smallest singular value of any pair (None without pairs), and how many are rounding.
    unreached : Unreached
        What no gradient at the base point has reached yet.
    residuals : dict of SymmetricPair to float
        By how much the last gradient at the base point violated the symmetry of those pairs that it reached first.
    tolerance : float
        Residuals up to this count as rounding.
    known : Symmetries
        Those that are divided out where all weights move.
    parts : dict of str to WeightParts
        Where weights lie in the network, by name, once :func:`sharpness.direction_of` was asked for a direction.

    Raises
    ------
    ValueError
        There are no trainable weights, or weights are on several devices, not real floating-point, or not finite.

    Notes
    -----
    Paper, §5.2; the metric of single weights is that of adaptive sharpness. The weights themselves are never written
    to: while :meth:`attached`, the parameters point to copies.

    Examples
    --------
    The gradient's length is the same wherever on its orbit a model stands:

    >>> import torch
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import move_
    >>> from sharpness import MEASURES
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(4, 3, 8)
    >>> def slope():
    ...     space = WeightSpace(model, MEASURES["geodesic-inv"])
    ...     with space.attached():
    ...         return float(space.gradient((model(x) - x).square().mean()).norm())
    >>> before, _ = slope(), move_(model)
    >>> abs(slope() / before - 1) < 1e-3
    True
    """

    def __init__(
        self, model: nn.Module, measure: Measure, symmetries: Symmetries | None = None, *, classes: bool = False,
        moving: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(measure, Measure):
            raise TypeError(f"measure must be a Measure, such as those in MEASURES, got {type(measure).__name__}")
        self.model, self.measure, self.given = model, measure, symmetries
        self.world: World | None = None
        #: Whether something holds on every process that has a part of the model.
        self.agree: Callable[[bool], bool] = bool
        self._home = model  # whose parameters move: a sharded model has a twin for that
        self.parameters: dict[str, Tensor] = dict(trainable(model) if moving is None else moving)
        #: All weights of the model whose parameters move.
        self.weights: Mapping[str, Tensor] = weights_of(model)
        parameters = list(self.parameters.values())
        if any(isinstance(p, ManifoldParameter) for p in parameters):
            check_points(measure, self.parameters)
        self.device = parameters[0].device
        self.dtype = functools.reduce(torch.promote_types, (p.dtype.to_real() for p in parameters), torch.float32)
        self._dtypes = {name: at_least_float32(p.dtype) for name, p in self.parameters.items()}  # those of copies
        narrow = {p for p in model.parameters() if p.dtype != at_least_float32(p.dtype)}
        #: Whether the whole half-precision model is in float32 while attached.
        self.in_float32 = any(p.is_floating_point() for p in narrow.intersection(parameters))
        rough = any(not (self.in_float32 and p.is_floating_point()) for p in narrow)  # some are narrow even then
        self.tolerance = HALF_PRECISION / 3 if rough or torch.is_autocast_enabled(self.device.type) else _IN_FLOAT32
        self.form: CanonicalForm | None = None
        #: These, and those that frozen weights keep from being divided out.
        self.known = known(model, measure, symmetries, classes=classes)
        self.symmetries = self.known.restricted(self.parameters).of_full_rank()
        #: The symmetries that are divided out.
        self.divided = replace(self.symmetries, pairs=tuple(p for p in self.symmetries.pairs if divides(measure, p)))
        single, self._pair_patches = self._build()
        self._in_order = [*single, *self._pair_patches]
        self._base: dict[str, Tensor] = {} if self.form is None else self.form.values
        # Complex numbers must begin at even places.
        self.patches: list[Patch] = sorted(self._in_order, key=lambda p: p.dim % 2)
        self._sizes = [p.dim for p in self.patches]
        self.dim = sum(self._sizes)
        last = {name: p for p in self._in_order for name in p.names}
        self._last_used = [[name for name in p.names if last[name] is p] for p in self._in_order]
        self.pairs: tuple[SymmetricPair, ...] = tuple(pair for p in self._pair_patches for pair in p.pairs)
        least = [float(p.sigma[p.present].min()) for p in self._pair_patches if bool(p.present.any())]
        self.spectrum = min(least, default=None), sum(int((~p.present).sum()) for p in self._pair_patches)
        self.residuals: dict[SymmetricPair, float] = {}
        self._uncertified, every = set(self.pairs), set(self.parameters)
        self.unreached = Unreached(set(range(len(self.pairs))), every, every)
        self.copies: dict[str, Tensor] = {}
        self._at: Tensor | None = None
        self._moved = True
        self.remarks: list[str] = []
        #: Where weights lie in the network, by name, once that was asked.
        self.parts: dict[str, WeightParts] = {}
        #: What examines attention of unknown classes, for the parts of directions of a measure that divides nothing.
        self.examine: Callable[[], Iterable[SymmetricPair]] = tuple

    def _build(self) -> tuple[list[Patch], list[PairPatch]]:
        """Return the patches at the base point, the model's own or its canonical form."""
        symmetries, constant = self.symmetries, dict[str, Tensor]()
        if self.measure.form == "canonical":
            from quotient_manifolds.symmetries import canonical_form

            self.form = canonical_form(self.weights, symmetries)
            symmetries, constant = self.form.symmetries, self.form.constant
        with nullcontext() if self.form is None else pointing_to(self.model, self.form.values):
            found = stacks_of(self.measure, symmetries, self.weights)
            lengths = dict[str, Tensor]()
            if self.measure.elementwise == "vector":
                from .lengths import vector_lengths

                lengths = vector_lengths(self.model, symmetries)
            return build_patches(self.measure, self.parameters, self.dtype, found, constant, lengths)

    def each(self, v: Tensor | Sequence[Tensor] | None) -> Iterator[tuple[Patch, Any]]:
        """Iterate over the patches, each with its part of a vector, (dim,); with None for None, the base point.

        The vector may come as the list of its parts. Pairs come last: a patch of a whole weight writes where they have
        a part of it.
        """
        each = [None] * len(self.patches) if v is None else v.split(self._sizes) if isinstance(v, Tensor) else v
        parts = dict(zip(self.patches, each, strict=True))
        return zip(self._in_order, map(parts.__getitem__, self._in_order), strict=True)

    @torch.no_grad()
    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, (dim,), equal on all devices and at all points of an orbit."""
        drawn = {patch: patch.random(generator) for patch in self._in_order}
        return torch.cat([drawn[patch].to(self.device, self.dtype) for patch in self.patches])

    def norm(self, v: Tensor) -> float:
        """Measure the length of a vector, (dim,)."""
        return math.sqrt(gram_matrix(v, world=self.world)[0, 0])

    @torch.no_grad()
    def project(self, v: Tensor) -> Tensor:
        """Return the horizontal part of a vector, (dim,)."""
        return torch.cat([patch.project(c) for patch, c in zip(self.patches, v.split(self._sizes), strict=True)])

    @torch.no_grad()
    def num_exited_pairs(self, xi: Tensor) -> int:
        """Count the pairs whose geodesic along xi, an exact one, is shortened so that it stays on the manifold."""
        parts = dict(self.each(xi))
        return sum(p.num_exited_pairs(parts[p]) for p in self._pair_patches)

    # -- what gradients at the base point say, over all batches ----------------------------------------------------

    def see(self, gradient: Mapping[str, Tensor]) -> None:
        """Take note of a gradient with respect to the weights, at the base point."""
        stacks = (p.stack for p in self._pair_patches)
        seen = certify(stacks, self.weights, gradient, tolerance=self.tolerance, waiting=self._uncertified)
        self.residuals = seen.residuals
        flat = {name for name in self.unreached.flat if name not in gradient or not bool(gradient[name].any())}
        pairs = {i for i, pair in enumerate(self.pairs) if pair in self._uncertified}
        self.unreached = Unreached(pairs, self.unreached.weights - gradient.keys(), flat)

    # -- the model's point -----------------------------------------------------------------------------------------

    def _copies(self) -> dict[str, Tensor]:
        """Copy the moving weights at the base point: entries that belong to no patch keep these values."""
        found = dict[str, Tensor]()
        for name, p in self.parameters.items():
            empty = torch.empty(p.shape, dtype=self._dtypes[name], device=p.device)
            found[name] = empty.copy_(self._base.get(name, p.data))
        return found

    @contextmanager
    def attached(self) -> Iterator[WeightSpace]:
        """Let the model's parameters point to copies that :meth:`move_to` writes; this is undone even after an error.

        The copies are float32 at least, and so is a half-precision model of which weights move, see
        :func:`~quotient_manifolds.weights.pointing_to`. Yields the space itself, with the model at the base
        point.
        """
        copies = self._copies()
        with pointing_to(self._home, {**self._base, **copies}):
            self.copies, self._moved = copies, True
            try:
                self.move_to(None)
                yield self
            finally:
                self.copies, self._at = {}, None

    @torch.no_grad()
    def move_to(self, xi: Tensor | None) -> None:
        """Move the model, which must be attached, to the retraction of a tangent vector; None is the base point.

        Its coordinates, (dim,), horizontal, must not change before the gradient there is taken. A model that is at the
        base point stays there.
        """
        if xi is None and not self._moved:
            return
        self._at, self._moved = xi, True
        with torch.autocast(self.device.type, enabled=False):
            for patch, c in self.each(xi):
                patch.retract_(self.copies, c)
        self._moved = xi is not None

    def move_along_orbit(self, pair: SymmetricPair) -> None:
        """Move the model, which must be attached, by a random element of a pair's group, until :meth:`move_to`."""
        from quotient_manifolds.symmetries import move_

        self._moved = True
        move_(self._home, Symmetries((pair,)))

    def differentiate(self, losses: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the sum of losses with respect to the weights that get one, by name."""
        moving, total = list(self.parameters.values()), dict[str, Tensor]()
        for loss in losses:  # one after the other, so that a generator needs the memory of only one of them
            gradients = torch.autograd.grad(loss, moving, allow_unused=True) if differentiated(loss) else ()
            for name, g in zip(self.parameters, gradients, strict=False):
                if g is not None:  # it may share memory and must not be written to
                    g = g.to_dense() if g.is_sparse else g
                    total[name] = total[name] + g if name in total else g
            # Every batch is differentiated at the base point first, so the graph is read there alone.
            if self._at is None and len(total) < len(moving) and "CheckpointFunctionBackward" in operations(loss):
                raise ValueError(HIDES)
            del loss, gradients
        if not total:
            raise ValueError(
                "the loss depends on none of the weights that are measured, which get no gradient; check loss_fn, "
                "requires_grad, and what the model does with them (detach, no_grad, copies made earlier)"
            )
        return total

    def gradient(self, losses: Tensor | Iterable[Tensor]) -> Tensor:
        """Differentiate a loss at the model's current weights.

        Parameters
        ----------
        losses : Tensor or iterable of Tensor
            Scalar with a graph; or several whose sum is the loss, so that a generator needs the memory of one of them.

        Returns
        -------
        Tensor
            (dim,), horizontal: the gradient of ξ → loss(R(ξ)) in the tangent space at the base point.

        Raises
        ------
        ValueError
            The loss depends on none of the weights.
        """
        gradient = self.differentiate([losses] if isinstance(losses, Tensor) else losses)
        out = torch.empty(self.dim, dtype=self.dtype, device=self.device)
        return self.pull_back_from_copies(gradient, self._at, out)

    @torch.no_grad()
    def push_forward_to_copies(self, v: Tensor | Sequence[Tensor], room: Tensor | None = None) -> dict[str, Tensor]:
        """Return the velocity of the attached model's weights at the base point, by name, along a vector, (dim,).

        It belongs to :attr:`copies`, whose factors are canonical, as derivatives of the attached model do; not to the
        model's own weights, to which a :class:`Direction` belongs. Its adjoint is :meth:`pull_back_from_copies` at
        None. Where it can, it lies in the memory of ``room``, (dim,).
        """
        parts = {patch.names[0]: part for patch, part in self.each(room) if not patch.pairs}  # of whole weights
        out = {n: in_memory_of(parts[n], t) if n in parts else torch.zeros_like(t) for n, t in self.copies.items()}
        with torch.autocast(self.device.type, enabled=False):
            for patch, c in self.each(v):  # single entries that do not move have no velocity
                patch.vector_(out, patch.project(c) if patch.pairs else c, at_model=False)
        return out

    @torch.no_grad()
    def pull_back_from_copies(self, gradient: dict[str, Tensor], at: Tensor | None, out: V) -> V:
        """Pull a gradient with respect to the attached model's weights at R(at) back to ``out``, (dim,), or its parts.

        Each tensor of the gradient is freed after its last patch.
        """
        with torch.autocast(self.device.type, enabled=False):
            for (patch, part), (_, c), last in zip(self.each(out), self.each(at), self._last_used, strict=True):
                patch.pull_back_(part, gradient, c)
                for name in last:
                    gradient.pop(name, None)
        return out
