"""The space of a model that FSDP2 has sharded: every process holds its part of every vector."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.base import standard_normal
from quotient_manifolds.symmetries import PairStack, SymmetricPair, apply_random_symmetry_, stacks
from quotient_manifolds.symmetries.pairs import in_copy
from quotient_manifolds.symmetries.stacks import coverage
from quotient_manifolds.symmetries.whole import CanonicalForm, canonical_form
from quotient_manifolds.tangent import draw_gaussians

from .building import build_blocks, divide, with_constants
from .direction import Direction
from .distributed import World
from .losses import Objective, count_examples
from .measures import Block, ElementwiseBlock, Measure
from .perturb import Gradients, pointing_to
from .shards import ShardedState, Shards, reshard
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
        self._shards, self._examples = Shards(model), examples
        mesh = self._shards.world
        if examples.group is not None and examples.members != mesh.members:
            raise ValueError(
                f"group has the processes {examples.members}, but the model is sharded over {mesh.members}; pass the "
                "group of its mesh, so that each takes a share of the examples, or none, so that each takes all"
            )
        parameters = self._shards.twin.named_parameters()
        bad = next((name for name, p in parameters if not self._shards.local(p).isfinite().all()), None)
        if not mesh.all(bad is None):
            raise ValueError(
                f"parameter {bad or '(on another process)'!r} has NaN or infinite entries; load an intact checkpoint"
            )
        of_twin = None if pairs is None else in_copy(pairs, model, self._shards.twin)
        super().__init__(self._shards.twin, measure, of_twin, classes=classes, only=only, offload=offload)
        self.model, self.world, self.given = model, self._shards.world, pairs
        self.pairs = tuple(p for s in self._all_stacks for p in s.pairs)
        moving, trained = self._parameters.values(), (p for p in model.parameters() if p.requires_grad)
        self.gradients = Gradients([self._shards.parameter(p) for p in moving], trained, backward=True)

    def _build(
        self, pairs: Sequence[SymmetricPair] | None, *, only_some: bool
    ) -> tuple[CanonicalForm | None, list[Block]]:
        shards, form, state = self._shards, None, ShardedState(self._shards)
        if self.measure.form == "canonical":
            form = canonical_form(self.model, classes=self.classes, pairs=pairs, state=state)
        division = divide(
            self.model, self.measure, pairs, self._parameters, form=form, only_some=only_some,
            read=lambda p: state.of(p).to(p.dtype), cover=False,
        )  # fmt: skip
        self._all_stacks, constant = division.stacks, division.covered
        single = {p: division.leaves_some_of(p) for p in self._parameters.values()}
        for pairs_of_set in shards.place(division.stacks, {} if form is None else form.values):
            # The masks of one set at a time: all together they are as large as the weights of all pairs.
            division.covered = with_constants(coverage(stacks(pairs_of_set)), constant)
            single |= {p: division.leaves_some_of(p) for q in pairs_of_set for p in q.parameters()}
            constant |= {p: mask for p, mask in division.covered.items() if shards.is_mine(p)}
        self._drawn, division.covered = [p for p, some in single.items() if some], constant
        own = [[q for q in s.pairs if shards.is_mine(q.G[0].tensor)] for s in division.stacks]
        division.stacks = [PairStack(pairs) for pairs in own if pairs]
        division.covered = {p: shards.cut(p, mask) for p, mask in division.covered.items()}
        division.lengths = {p: shards.cut(p, length) for p, length in division.lengths.items()}
        nothing = torch.ones((), dtype=torch.bool)
        division.covered.update((p, nothing) for p in shards.owner if not shards.is_mine(p))
        # The twin was moved to the base point.
        return form, build_blocks(self.measure, self._parameters, self.dtype, division)

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
            shape = self._shards.parameter(p).shape
            drawn = standard_normal((shape.numel(),), xi, generator)
            if p in single:
                rows = self._shards.cut(p, drawn.view(shape)).flatten()
                parts[single[p]].copy_(single[p].project(rows.to(self.model_device)))
        stacks = iter(self._pair_blocks)
        for s in self._all_stacks:
            mine = [i for i, p in enumerate(s.pairs) if self._shards.is_mine(p.G[0].tensor)]
            size, like = s.point_like(self.dtype)
            gaussians = draw_gaussians(size, s.n, like, generator)
            if mine:
                pairs = next(stacks)
                parts[pairs].copy_(pairs.from_gaussians([e[mine] for e in gaussians]))
        return xi

    @torch.no_grad()
    def direction(self, xi: Tensor) -> Direction:
        """Return the tangent vector in terms of the full parameters, on the CPU of every process."""
        shards, found = self._shards, {p: torch.zeros_like(copy) for p, copy in self.copies.items()}
        for block, c in self.each(xi):
            block.vector_(found, c, at_model=True)
        rows = {p: torch.zeros_like(shards.local(p)) for p in self._parameters.values()}
        shards.spread(found, rows)
        rows |= {p: t for p, t in found.items() if p not in shards.owner}
        tensors = {name: shards.whole(p, rows[p]).cpu() for name, p in self._parameters.items()}
        pairs = tuple(in_copy(self.pairs, shards.twin, self.model))
        squares = self._places.squares(self.each(xi), self.world)
        return Direction(self.measure, tensors, self.norm(xi), squares, pairs, self.given, self.classes)

    @functools.cached_property
    def _places(self) -> Places:
        with pointing_to(self._shards.twin, self._shards.hollow()):
            found = Places(self._shards.twin, self._parameters)
        empty = torch.zeros((), dtype=torch.bool)
        elsewhere = {p for p in self._shards.owner if not self._shards.is_mine(p)}
        found.cut(lambda p, mask: empty if p in elsewhere else self._shards.cut(p, mask))
        return found

    # -- what the metric meets -----------------------------------------------------------------------------------

    def spectrum(self) -> tuple[float | None, int]:
        """Compute the spectrum of the pairs of all processes, see :meth:`WeightSpace.spectrum`."""
        values, absent = zip(*self.world.gather([super().spectrum()]), strict=True)
        return min((v for v in values if v is not None), default=None), sum(absent)

    def num_exited_pairs(self, xi: Tensor) -> int:
        """Count the pairs of all processes, see :meth:`WeightSpace.num_exited_pairs`."""
        return sum(self.world.gather([super().num_exited_pairs(xi)]))

    def residuals(self) -> dict[SymmetricPair, float]:
        """Collect the residuals of the pairs of all processes, see :meth:`WeightSpace.residuals`."""
        by_name = {p.name: p for p in self.pairs}
        own = [(p.name, r) for p, r in super().residuals().items()]
        return {by_name[name]: r for name, r in self.world.gather(own)}

    def uncertified(self) -> set[str]:
        """Collect the pairs of all processes that had no gradient yet."""
        return set(self.world.gather(sorted(super().uncertified())))

    # -- the model -----------------------------------------------------------------------------------------------

    def share(self, objective: Objective, batch: Any) -> list[tuple[float, Any]]:
        """Return the pieces of a batch that this process passes through the model; each process has equally many.

        FSDP's gradient is the mean over the processes. Where each has different pieces, their weights are multiplied
        by the number of processes.
        """
        size, rank = self._examples.size, self._examples.rank
        if size > 1 and objective.micro_batch is None:
            objective = replace(objective, micro_batch=-(-count_examples(batch) // size))
            objective.check_pieces(self.model, batch, all_of_them=False)
        pieces = objective.pieces(self.model, batch)
        if size == 1:
            return pieces
        mine = [(weight * size, piece) for weight, piece in pieces[rank::size]]
        return mine if len(mine) == -(-len(pieces) // size) else [*mine, (0.0, pieces[0][1])]

    def together(self, value: float, wrong: int, counted: int) -> tuple[float, int, int]:
        """Take the mean of the losses and the sums of the counts, to the same bits on every process."""
        found = torch.tensor([value, wrong, counted], dtype=torch.float64, device=self.model_device)
        value, wrong, counted = self.world.sum(found).tolist()
        return value / self.world.size, int(wrong), int(counted)

    @contextmanager
    def attached(self) -> Iterator[ShardedSpace]:
        """Let :meth:`move_to` write the shards; they are restored even after an error."""
        shards, moving = self._shards, self._parameters.values()
        rows = {p: shards.local(p) for p in [*moving, *self._base]}
        # Parameters that are processed by rows have a copy already.
        before = {
            t: p.data if p.requires_grad and p not in self._base and p not in shards.owner else t.clone()
            for p, t in rows.items()
        }

        def put_back() -> None:
            reshard(self.model)
            for t, value in before.items():
                t.copy_(value)

        try:
            try:
                with torch.no_grad():
                    for p, value in self._base.items():
                        rows[p].copy_(value)
                    whole = {
                        p: p.data.clone(memory_format=torch.contiguous_format) for p in moving if shards.is_mine(p)
                    }
                    self.copies = {**{p: rows[p] for p in moving if p not in shards.owner}, **whole}
                    self._rows = {p: rows[p] for p in moving if p in shards.owner}
                self.move_to(None)
                yield self
            finally:  # repeat what an interrupt has cut short
                put_back()
        finally:
            put_back()
            self.copies, self._at = {}, None

    def move_to(self, xi: Tensor | None) -> None:
        """Move the model to the retraction of a tangent vector, see :meth:`WeightSpace.move_to`."""
        super().move_to(xi)
        self._show_model()

    def _show_model(self) -> None:
        reshard(self.model)
        self._shards.spread(self.copies, self._rows)

    def move_along_orbit(self, pair: SymmetricPair) -> None:
        """Move by a random element of a pair's group, on the process that owns it."""
        if self._shards.is_mine(pair.G[0].tensor):
            with self._at_model():
                apply_random_symmetry_(self._shards.twin, pairs=[pair])
        self._show_model()

    def _at_model(self) -> AbstractContextManager[None]:
        """Give the twin's parameters, for the pairs that this process owns, the values that the model has now."""
        return pointing_to(self._shards.twin, {p: t for p, t in self.copies.items() if self._shards.is_mine(p)})

    def _certify(self, gradient: Mapping[Tensor, Tensor]) -> None:
        with self._at_model():
            super()._certify(gradient)

    def _differentiate(self, losses: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        found = self.gradients.sum_over(losses)
        if not found:
            raise ValueError(
                "no gradient reached the shards: FSDP2 is told not to exchange them; call "
                "model.set_requires_gradient_sync(True)"
            )
        rows = {p: found[q] for p in self._parameters.values() if (q := self._shards.parameter(p)) in found}
        return {**rows, **self._shards.collect(rows)}
