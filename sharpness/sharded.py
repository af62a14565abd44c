"""The space of a model that FSDP2 has sharded: every process holds its part of every vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from quotient_manifolds.base import standard_normal
from quotient_manifolds.symmetries import PairStack, SymmetricPair, find_symmetric_pairs, stacks
from quotient_manifolds.symmetries.pairs import in_copy
from quotient_manifolds.symmetries.stacks import coverage
from quotient_manifolds.symmetries.whole import canonical_form
from quotient_manifolds.tangent import draw_gaussians

from .building import build_blocks, divide, with_constants
from .direction import Direction
from .distributed import World
from .measures import Block, ElementwiseBlock, Measure
from .perturb import Gradients, pointing_to
from .shards import ShardedState, Shards, hollow, reshard
from .shares import Places
from .space import WeightSpace

__all__ = ["ShardedSpace"]


class ShardedSpace(WeightSpace):
    """The space of a model after ``fully_shard``, the same on all processes of its mesh, see :mod:`sharpness.shards`.

    A vector, (dim,), holds the coordinates of this process: of the rows that lie here, and of the pairs that it owns.
    Its methods are collective: every process has to call them, in the same order. The shards are written in place,
    because FSDP reads nothing else, and are restored afterwards.

    Parameters
    ----------
    model, measure, pairs, classes, only, offload
        As for :class:`WeightSpace`.
    examples : World
        The processes over which the examples of a batch are spread: those of the mesh, or only this one.
    """

    def __init__(
        self, model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None = None, *,
        classes: bool = False, only: str | None = None, offload: bool = False, examples: World,
    ) -> None:  # fmt: skip
        if measure.pair_block is not None:
            raise ValueError(f"{type(measure).__name__} works on whole models only, and this one is sharded")
        self._shards = shards = Shards(model)
        if examples.group is not None and examples.members != shards.world.members:
            raise ValueError(
                f"group has the processes {examples.members}, but the model is sharded over {shards.world.members}; "
                "pass the group of its mesh, so that each takes a part of the examples, or none, so that each takes all"
            )
        parameters = shards.twin.named_parameters()
        bad = next((name for name, p in parameters if not shards.local(p).isfinite().all()), None)
        if not shards.world.all(bad is None):
            raise ValueError(
                f"parameter {bad or '(on another process)'!r} has NaN or infinite entries; load an intact checkpoint"
            )
        of_twin = None if pairs is None else in_copy(pairs, model, shards.twin)
        super().__init__(shards.twin, measure, of_twin, classes=classes, only=only, offload=offload)
        self.model, self.world, self.examples, self.given = model, shards.world, examples, pairs
        self.pairs = tuple(p for s in self._all_stacks for p in s.pairs)
        moving, trained = self.parameters.values(), (p for p in model.parameters() if p.requires_grad)
        self.gradients = Gradients([shards.of[p] for p in moving], trained, backward=True)

    def _build(self, pairs: Sequence[SymmetricPair] | None, *, only_some: bool) -> list[Block]:
        shards, form, state = self._shards, None, ShardedState(self._shards)
        if self.measure.form == "canonical":
            self.form = form = canonical_form(self.model, classes=self.classes, pairs=pairs, state=state)
        division = divide(
            self.model, self.measure, pairs, self.parameters, form=form, only_some=only_some,
            read=lambda p: state.of(p).to(p.dtype), cover=False,
        )  # fmt: skip
        self._all_stacks, constant = division.stacks, division.covered
        single = {p: division.leaves_some_of(p) for p in self.parameters.values()}
        for pairs_of_set in shards.place(division.stacks, {} if form is None else form.values):
            # The masks of one set at a time: all together they are as large as the weights of all pairs.
            division.covered = with_constants(coverage(stacks(pairs_of_set)), constant)
            single |= {p: division.leaves_some_of(p) for q in pairs_of_set for p in q.parameters()}
            constant |= {p: mask for p, mask in division.covered.items() if shards.is_mine(p)}
        self._drawn = [p for p, some in single.items() if some]
        own = [[q for q in s.pairs if shards.is_mine(q.G[0].tensor)] for s in division.stacks]
        division.stacks = [PairStack(pairs) for pairs in own if pairs]
        division.covered = {p: shards.cut(p, mask) for p, mask in constant.items()}
        division.lengths = {p: shards.cut(p, length) for p, length in division.lengths.items()}
        here = {name: p for name, p in self.parameters.items() if p not in shards.owner or shards.is_mine(p)}
        return build_blocks(self.measure, here, self.dtype, division)  # the twin was moved to the base point

    # -- vectors -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, the same as for the unsharded model; keep this process's part.

        Every process therefore draws as many numbers as the model has weights.
        """
        xi = self.empty()
        parts = dict(zip(self.blocks, xi.split(self._sizes), strict=True))
        single = {b.parameter: b for b in parts if isinstance(b, ElementwiseBlock)}
        for p in self._drawn:
            shape = self._shards.of[p].shape
            drawn = standard_normal((shape.numel(),), xi, generator)
            if p in single:
                rows = self._shards.cut(p, drawn.view(shape)).flatten()
                parts[single[p]].copy_(single[p].project(rows.to(self.model_device)))
        pair_blocks = iter(self._pair_blocks)
        for s in self._all_stacks:
            mine = [i for i, p in enumerate(s.pairs) if self._shards.is_mine(p.G[0].tensor)]
            size, like = s.point_like(self.dtype)
            gaussians = draw_gaussians(size, s.n, like, generator)
            if mine:
                block = next(pair_blocks)
                parts[block].copy_(block.from_gaussians([e[mine] for e in gaussians]))
        return xi

    @torch.no_grad()
    def direction(self, xi: Tensor) -> Direction:
        """Return the tangent vector in terms of the full parameters, on the CPU of every process."""
        shards, found = self._shards, {p: torch.zeros_like(copy) for p, copy in self.copies.items()}
        for block, c in self.each(xi):
            block.vector_(found, c, at_model=True)
        rows = {p: torch.zeros_like(shards.local(p)) for p in self.parameters.values()}
        shards.spread(found, rows)
        rows |= {p: t for p, t in found.items() if p not in shards.owner}
        tensors = {name: shards.whole(p, rows[p]).cpu() for name, p in self.parameters.items()}
        pairs = tuple(in_copy(self.pairs, self._home, self.model))
        if self._places is None:
            with pointing_to(self._home, {p: hollow(q) for p, q in shards.of.items()}):
                all_pairs = find_symmetric_pairs(self._home, include_frozen=True)
                self._places = Places(self._home, self.parameters, all_pairs)
        each = (
            (b, shards.among_zeros(b.parameter, c) if isinstance(b, ElementwiseBlock) else c) for b, c in self.each(xi)
        )
        squares = self._places.squares(each, self.world)
        return Direction(self.measure, tensors, self.norm(xi), squares, pairs, self.given, self.classes)

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[WeightSpace]:
        """Let :meth:`move_to` write the shards; they are restored even after an error."""
        shards = self._shards
        self._rows = {p: shards.local(p) for p in [*self.parameters.values(), *self._base]}
        # Parameters that are processed by rows have a copy already.
        copied = {p for p in self._rows if p.requires_grad and p not in self._base and p not in shards.owner}
        before = {t: p.data if p in copied else t.clone() for p, t in self._rows.items()}

        def put_back() -> None:
            reshard(self.model)
            for t, value in before.items():
                t.copy_(value)

        with ExitStack() as stack:
            for _ in range(2):  # the second finishes what an interrupt has cut short
                stack.callback(put_back)
            for p, value in self._base.items():
                self._rows[p].copy_(value)
            with super().attached():
                yield self

    def _copies(self) -> dict[Tensor, Tensor]:
        """Copy the pairs that this process owns; all else is moved where its rows lie."""
        mine = {p: p.data.clone(memory_format=torch.contiguous_format) for p in self._rows if self._shards.is_mine(p)}
        return {p: rows for p, rows in self._rows.items() if p.requires_grad and p not in self._shards.owner} | mine

    def move_to(self, xi: Tensor | None) -> None:
        """Move the model to the retraction of a tangent vector, see :meth:`WeightSpace.move_to`."""
        super().move_to(xi)
        self._show_model()

    def move_along_orbit(self, pair: SymmetricPair) -> None:
        """Move by a random element of a pair's group, on the process that owns it."""
        if self._shards.is_mine(pair.G[0].tensor):
            super().move_along_orbit(pair)
        self._show_model()

    def _show_model(self) -> None:
        reshard(self.model)
        moving = self.parameters.values()
        self._shards.spread(self.copies, {p: self._rows[p] for p in moving if p in self._shards.owner})

    def differentiate(self, losses: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Return the gradient of the rows that lie here, and of the pairs that this process owns."""
        found = self.gradients.sum_over(losses)
        if not found:
            raise ValueError(
                "no gradient reached the shards: FSDP2 is told not to exchange them; call "
                "model.set_requires_gradient_sync(True)"
            )
        rows = {p: found[q] for p in self.parameters.values() if (q := self._shards.of[p]) in found}
        return {**rows, **self._shards.collect(rows)}
