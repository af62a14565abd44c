"""All trainable weights of a model as one Riemannian space, made of blocks; squared norms add up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import at_least_float32, own_precision
from quotient_manifolds.symmetries import SymmetricPair, apply_random_symmetry_
from quotient_manifolds.symmetries.certificate import HALF_PRECISION
from quotient_manifolds.symmetries.whole import CanonicalForm, canonical_form

from .blocks import Block
from .building import build_blocks, divide
from .coordinates import Coordinates
from .direction import Direction
from .losses import Objective
from .measures import Measure
from .perturb import Gradients, becomes_float32, pointing_to, stands_on_narrow_base
from .shares import Places
from .weights import trainable

__all__ = ["WeightSpace"]

#: Number of modules or weights that a remark names.
_NAMED = 12


class WeightSpace(Coordinates):
    """The space of a model's trainable weights under a measure, and the model's current point in it.

    A tangent vector is one flat vector of coordinates in which the metric is the identity, see :mod:`sharpness.blocks`.

    Parameters
    ----------
    model : nn.Module
        A model whose trainable weights lie on one device.
    measure : Measure
        Metric and retraction; for example ``MEASURES["geodesic-inv"]``.
    pairs : sequence of SymmetricPair, optional
        The symmetric pairs; by default those that ``quotient_manifolds.symmetries.find_symmetric_pairs`` names.
    classes : bool
        For measures at the canonical form: the loss uses the logits only through a softmax.
    only : str, optional
        A regular expression. Parameters whose names do not match it are not moved.
    offload : bool
        Keep coordinate vectors in main memory, so that the model's device holds those of one block at a time.

    Attributes
    ----------
    dtype, device
        Of the coordinate vectors: the widest dtype among the weights, at least float32.
    model_device : torch.device
        That of the weights, to which batches belong.
    remarks : list of str
        What a reader of the result has to know, in sentences.

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
    >>> from quotient_manifolds.symmetries import apply_random_symmetry_
    >>> from sharpness import MEASURES
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(4, 3, 8)
    >>> def slope():
    ...     space = WeightSpace(model, MEASURES["geodesic-inv"])
    ...     with space.attached():
    ...         return float(space.gradient((model(x) - x).square().mean()).norm())
    >>> before, _ = slope(), apply_random_symmetry_(model)
    >>> abs(slope() / before - 1) < 1e-3
    True
    """

    def __init__(
        self, model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None = None, *,
        classes: bool = False, only: str | None = None, offload: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(measure, Measure):
            raise TypeError(f"measure must be a Measure, such as those in MEASURES, got {type(measure).__name__}")
        self.model, self.measure, self.classes, self.given = model, measure, classes, pairs
        self._parameters: dict[str, Tensor] = dict(trainable(model, only))
        self.model_device = next(iter(self._parameters.values())).device
        self.dtype = functools.reduce(torch.promote_types, (p.dtype for p in self._parameters.values()), torch.float32)
        self._above_base = stands_on_narrow_base(model, list(self._parameters.values()))
        #: Whether the whole half-precision model is in float32 while attached.
        self.in_float32 = becomes_float32(model, list(self._parameters.values()))
        self.form, blocks = self._build(pairs, only_some=bool(only))
        self._base = {} if self.form is None else self.form.values
        super().__init__(blocks, self.dtype, self.model_device, offload=offload)
        self._last_used = _last_used(blocks)
        self._gradients = Gradients(list(self._parameters.values()), (p for p in model.parameters() if p.requires_grad))
        self._copies: dict[Tensor, Tensor] = {}
        self._at: Tensor | None = None
        self._unreached = set(self._parameters)
        self.remarks: list[str] = []

    def _build(
        self, pairs: Sequence[SymmetricPair] | None, *, only_some: bool
    ) -> tuple[CanonicalForm | None, list[Block]]:
        canonical = self.measure.form == "canonical"
        form = canonical_form(self.model, classes=self.classes, pairs=pairs) if canonical else None
        with pointing_to(self.model, {} if form is None else form.values):
            division = divide(self.model, self.measure, pairs, self._parameters, form=form, only_some=only_some)
            return form, build_blocks(self.measure, self._parameters, self.dtype, division)

    # -- vectors -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def direction(self, xi: Tensor) -> Direction:
        """Return the tangent vector with horizontal coordinates xi, (dim,), in terms of the parameters, on the CPU."""
        found = self._copies_like(torch.zeros_like)
        for block, c in self._each(xi):
            block.vector_(found, c, at_model=True)
        tensors = {name: found[p].cpu() for name, p in self._parameters.items()}
        squares = self._places.squares(self._each(xi), self.world)
        return Direction(self.measure, tensors, self.norm(xi), squares, self.pairs, self.given, self.classes)

    @functools.cached_property
    def _places(self) -> Places:  # finding pairs takes seconds, and there are many directions
        return Places(self.model, self._parameters)

    def _copies_like(self, make: Callable[..., Tensor]) -> dict[Tensor, Tensor]:
        make = functools.partial(make, memory_format=torch.contiguous_format)
        return {p: make(p.data, dtype=at_least_float32(p.dtype)) for p in self._parameters.values()}

    @property
    def tolerance(self) -> float:
        """Residuals up to this count as rounding."""
        rough = self._above_base or torch.is_autocast_enabled(self.model_device.type)
        return HALF_PRECISION / 3 if rough else 1e-4

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[WeightSpace]:
        """Let the model's parameters point to copies that :meth:`move_to` writes; this is undone even after an error.

        Half-precision weights point to float32 copies, and so do the others, except a frozen base that is larger than
        the moving weights, see :func:`sharpness.perturb.pointing_to`.
        Yields the space itself, with the model at the base point.
        """
        # Start from the base point: entries that belong to no block keep these values.
        empty = self._copies_like(torch.empty_like)
        copies = {p: copy.copy_(self._base.get(p, p.data)) for p, copy in empty.items()}
        with pointing_to(self.model, {**self._base, **copies}):
            self._copies = copies
            try:
                self.move_to(None)
                yield self
            finally:
                self._copies, self._at = {}, None

    @own_precision
    @torch.no_grad()
    def move_to(self, xi: Tensor | None) -> None:
        """Move the model, which must be attached, to the retraction of a tangent vector.

        Parameters
        ----------
        xi : Tensor or None
            (dim,), its coordinates, horizontal; they must not change before the gradient there is taken. None is the
            base point.
        """
        self._at = xi
        for block, c in self._each(xi):
            block.move_(self._copies, c)

    def move_along_orbit(self, pair: SymmetricPair) -> None:
        """Move the model, which must be attached, by a random element of a pair's group, until :meth:`move_to`."""
        apply_random_symmetry_(self.model, pairs=[pair])

    def share(self, objective: Objective, batch: Any) -> list[tuple[float, Any]]:
        """Return the pieces of a batch that this process passes through the model, with their weights: all of them."""
        return objective.pieces(self.model, batch)

    def together(self, value: float, wrong: int, counted: int) -> tuple[float, int, int]:
        """Combine the results of all processes for their pieces: loss, number of errors, and number of labels."""
        return value, wrong, counted

    def _differentiate(self, losses: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        return self._gradients.sum_over(losses)

    def gradient(self, losses: Tensor | Iterable[Tensor], room: Callable[[], Tensor] | None = None) -> Tensor:
        """Differentiate a loss at the model's current weights.

        Parameters
        ----------
        losses : Tensor or iterable of Tensor
            Scalar with a graph; or several whose sum is the loss, so that a generator needs the memory of one of them.
        room : callable, optional
            Gives the tensor to which the result is written, (dim,); it is called when the losses' graphs are freed.

        Returns
        -------
        Tensor
            (dim,), horizontal: the gradient of ξ → loss(R(ξ)) in the tangent space at the base point.

        Raises
        ------
        ValueError
            The loss depends on none of the weights.
        """
        found = self._differentiate([losses] if isinstance(losses, Tensor) else losses)
        if not found:
            raise ValueError(
                "the loss depends on none of the weights that are measured, which get no gradient; check only=, "
                "requires_grad, and what the model does with them (detach, no_grad, copies made earlier)"
            )
        if self._at is None:
            self._certify(found)
            sizes = {
                name: torch.linalg.vector_norm(found[p], 1).to(self.dtype)
                for name in self._unreached if (p := self._parameters[name]) in found and p.numel()
            }  # fmt: skip
            if sizes:
                self._unreached -= set(itertools.compress(sizes, torch.stack([*sizes.values()]).tolist()))
        out = self.empty() if room is None else room()
        self._pull_back_(out, found, self._at, spend=True)
        return out

    def _certify(self, gradient: Mapping[Tensor, Tensor]) -> None:
        self.certification.see(gradient, tolerance=self.tolerance)

    def unreached(self) -> set[str]:
        """Name the weights that had no gradient yet."""
        return set.intersection(*self.world.gather([self._unreached]))

    def without_gradient(self, unreached: Collection[str]) -> list[str]:
        """Say in a sentence which weights had no gradient, if there are any."""
        if not unreached:
            return []
        sizes = {name: p.numel() for name, p in self._parameters.items()}
        met = {part for name in sizes if name not in unreached for part in _within(name)}
        # A whole module that is not reached is one name.
        names = list(
            dict.fromkeys(next(m for m in _within(name) if m not in met) for name in sizes if name in unreached)
        )
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return [
            f"{sum(sizes[name] for name in unreached):,} of {sum(sizes.values()):,} weights got no gradient from any "
            f"batch, so the result says nothing about them: {', '.join(names[:_NAMED])}{more}"
        ]

    @own_precision
    @torch.no_grad()
    def _pull_back_(
        self, out: Tensor, gradient: dict[Tensor, Tensor], at: Tensor | None, *, spend: bool = False
    ) -> None:
        """Pull a gradient back, block by block; ``spend`` frees each of its tensors after its last block."""
        places = zip(self._each(out, read=False, write=True), self._each(at), self._last_used, strict=True)
        for (block, part), (_, c), last_used in places:
            block.pull_back_(part, gradient, c)
            for p in last_used if spend else ():
                gradient.pop(p, None)

    def hessian_product(self, losses: Callable[[], Tensor | Iterable[Tensor]], v: Tensor) -> Tensor:
        r"""Multiply a vector by the Hessian of ξ → ℓ(R(ξ)) at 0, projected on horizontal vectors on both sides.

        With J(ξ) the derivative of R, which is linear in ξ for the retractions of first and second order,
        :math:`J(0)^* \nabla^2 ℓ\, J(0) v + (J(v) - J(0))^* \nabla ℓ`.

        Parameters
        ----------
        losses : callable
            Function that returns losses as for :meth:`gradient`; it is called with the model at the base point, where
            it then stays.
        v : Tensor
            (dim,)

        Returns
        -------
        Tensor
            (dim,), horizontal.
        """
        if not all(b.quadratic for b in self._pair_blocks):
            raise ValueError(
                "the Hessian needs a quadratic retraction; use geodesic='second-order', which has the same Hessian"
            )
        self.move_to(None)
        v = self.project(v)
        moving = {p: torch.zeros_like(copy) for p, copy in self._copies.items()}
        with torch.no_grad():
            for block, c in self._each(v):
                block.vector_(moving, c, at_model=False)
        found = losses()
        first, second = self._gradients.with_hessian_product([found] if isinstance(found, Tensor) else found, moving)
        out, curved, straight = self.empty(), self.empty(), self.empty()
        for into, gradient, at in ((out, second, None), (curved, first, v), (straight, first, None)):
            self._pull_back_(into, gradient, at)
        return out.add_(curved).sub_(straight)


def _last_used(blocks: Sequence[Block]) -> list[list[Tensor]]:
    """List, for every block, the parameters that no later block has."""
    last = {p: i for i, block in enumerate(blocks) for p in block.parameters()}
    found: list[list[Tensor]] = [[] for _ in blocks]
    for p, i in last.items():
        found[i].append(p)
    return found


def _within(name: str) -> list[str]:
    """List the modules that hold a parameter, from the outside, and its own name."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))
