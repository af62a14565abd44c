"""A model that FSDP2 has sharded: a twin with full parameter shapes, and its space, whose vectors are sharded too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import finite, in_double
from quotient_manifolds.optim.sharded import exchange
from quotient_manifolds.symmetries import PairStack, SymmetricPair
from quotient_manifolds.symmetries.pairs import in_copy
from quotient_manifolds.symmetries.whole import State, canonical_form
from quotient_manifolds.weights import is_sharded, reshard

from .building import build_blocks, divide
from .distributed import twin_of, world_of
from .measures import Measure
from .points import WeightBlock
from .space import WeightSpace


class Shards:
    """The weights of a model after ``torch.distributed.fsdp.fully_shard``: rows of every parameter on every process.

    Its *twin* has the same modules, with their classes before sharding, and substitutes for the parameters: full
    vectors, and matrices of the full shape without memory. :meth:`place` gives memory to those that this process
    works on.
    A parameter of a symmetric pair is worked on whole, by one process, its *owner*; all parameters of a pair have the
    same. Every other parameter is worked on where it lies, row by row.

    Parameters
    ----------
    model : nn.Module
        A model whose trainable parameters are all sharded along their first dimension, over the processes of one mesh.

    Attributes
    ----------
    twin : nn.Module
    world : World
        The processes of the mesh.
    of : dict of Tensor to Tensor
        The model's parameters by those of the twin that stand for them.
    owner : dict of Tensor to int
        The rank that works on a parameter of the twin; those without one are worked on in rows.

    Raises
    ------
    ValueError
        The model is sharded in another way, or weights are cast to another precision in every pass.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self.of: dict[Tensor, Any] = {}
        self.world = world_of(model)
        stand_ins: dict[Tensor, nn.Parameter] = {p: self._stand_in(p) for p in model.parameters()}
        self.twin = twin_of(model, stand_ins, {})
        self.owner: dict[Tensor, int] = {}

    # -- the twin ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _stand_in(self, p: Any) -> nn.Parameter:
        if not is_sharded(p):
            return nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        hollow = p.to_local().detach().new_zeros(()).expand(p.shape)  # the whole shape, without memory
        found = nn.Parameter(hollow, requires_grad=p.requires_grad)
        self.of[found] = p
        if p.dim() < 2:
            found.data = self.whole(found, self.local(found))
        return found

    # -- rows ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def local(self, p: Tensor) -> Tensor:
        """Return this process's rows of a parameter of the twin, as a view of what the model reads."""
        rows: Tensor = self.of[p].to_local() if p in self.of else p.data
        return rows

    def rows(self, p: Tensor, rank: int | None = None) -> slice:
        """Return which rows lie on a process, by default on this one; the last processes may have fewer, or none."""
        step = -(-self.of[p].shape[0] // self.world.size)
        start = step * (self.world.rank if rank is None else rank)
        return slice(start, start + step)

    def is_mine(self, p: Tensor) -> bool:
        """Return whether this process works on the whole parameter."""
        return self.owner.get(p) == self.world.rank

    def cut(self, p: Tensor, t: Tensor) -> Tensor:
        """Take this process's part of a tensor that broadcasts to a parameter."""
        if p in self.owner or p not in self.of or t.dim() == 0 or len(t) < self.of[p].shape[0]:
            return t
        return t[self.rows(p)].clone()  # a view would keep the whole

    def whole(self, p: Tensor, rows: Tensor) -> Tensor:
        """Gather the rows of all processes on each of them."""
        from torch.distributed.tensor import DTensor  # which takes long to load

        q = self.of[p]
        found = DTensor.from_local(rows, q.device_mesh, q.placements, shape=q.shape, stride=q.stride())
        return found.full_tensor()

    # -- owners --------------------------------------------------------------------------------------------------------

    def place(self, found: Iterable[PairStack], values: Mapping[Tensor, Tensor]) -> None:
        """Assign to every parameter of a pair the process that owns it, and give that process its whole values.

        The sets of pairs that share parameters are spread over the processes, the largest first. ``values`` are rows
        that replace those of the model.
        """
        together: dict[Tensor, list[Tensor]] = {}
        for pair in (p for s in found for p in s.pairs):
            joined = list(dict.fromkeys(q for p in pair.parameters() for q in together.get(p, [p])))
            together.update((p, joined) for p in joined)
        load = [0] * self.world.size
        for one in sorted({id(s): s for s in together.values()}.values(), key=lambda s: -sum(p.numel() for p in s)):
            rank = load.index(min(load))
            load[rank] += sum(p.numel() for p in one)
            self.owner.update((p, rank) for p in one)
        start = {p: values.get(p, self.local(p)) for p in self.of}
        for p, whole in self.collect(start).items():
            p.data = whole
        for p, rows in start.items():
            if p not in self.owner and p.requires_grad:
                p.data = rows.clone() if p not in values else rows

    def collect(self, rows: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Send the rows of parameters to their owners; return the full parameters that this process owns.

        All processes have rows of the same parameters; those without an owner are left out.
        """
        whole = {p: t.new_empty(self.of[p].shape) for p, t in rows.items() if self.is_mine(p)}
        self.exchange(rows, whole, to_owners=True)
        return whole

    @torch.no_grad()
    def exchange(self, rows: Mapping[Tensor, Tensor], whole: Mapping[Tensor, Tensor], *, to_owners: bool) -> None:
        """Fill the full parameters of their owners from ``rows``, which every process has, or these from those."""
        moving, ranks = [p for p in rows if p in self.owner], range(self.world.size)
        if not moving:
            return
        theirs = [[rows[p] for p in moving if self.owner[p] == rank] for rank in ranks]
        mine = [[whole[p][self.rows(p, rank)] for p in moving if self.is_mine(p)] for rank in ranks]
        sent, filled = (theirs, mine) if to_owners else (mine, theirs)
        exchange(sent, filled, torch.cat([rows[p].flatten()[:0] for p in moving]), self.world.group)


class ShardedState(State):
    """The values of a sharded model's parameters: this process's rows of the changed ones, which are read in full."""

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self._shards = shards

    def of(self, p: Tensor) -> Tensor:
        """Return the whole value of a parameter."""
        if p not in self._shards.of or (p not in self and p.dim() < 2):
            return super().of(p)
        rows = self[p] if p in self else self._shards.local(p)
        return in_double(self._shards.whole(p, rows))

    def __setitem__(self, p: Tensor, value: Tensor) -> None:
        super().__setitem__(p, value[self._shards.rows(p)].clone() if p in self._shards.of else value)


class ShardedSpace(WeightSpace):
    """The space of a model after ``fully_shard``, the same on all processes of its mesh, see :class:`Shards`.

    A vector, (dim,), holds the coordinates of this process: of the rows that lie here, and of the pairs that it owns.
    Its methods are collective: every process has to call them, in the same order. The shards are written in place,
    because FSDP reads nothing else, and are restored afterwards.

    Parameters
    ----------
    model, measure, pairs, classes
        As for :class:`WeightSpace`.
    """

    def __init__(
        self, model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None = None, *,
        classes: bool = False,
    ) -> None:  # fmt: skip
        if measure.pair_block is not None:
            raise ValueError(f"{type(measure).__name__} works on whole models, and this one is sharded; load it whole")
        self._shards = shards = Shards(model)
        parameters = shards.twin.named_parameters()
        bad = next((name for name, p in parameters if not finite(shards.local(p))), None)
        if not shards.world.all(bad is None):
            raise ValueError(
                f"parameter {bad or '(on another process)'!r} has NaN or infinite entries; load an intact checkpoint"
            )
        of_twin = None if pairs is None else in_copy(pairs, model, shards.twin)
        super().__init__(shards.twin, measure, of_twin, classes=classes)
        self.model, self.world, self.given, self.pairs = model, shards.world, pairs, self._all_pairs

    def _build(self, pairs: Sequence[SymmetricPair] | None) -> list[WeightBlock]:
        shards, form, state = self._shards, None, ShardedState(self._shards)
        if self.measure.form == "canonical":
            self.form = form = canonical_form(self.model, classes=self.classes, pairs=pairs, state=state)
        found, constant, lengths = divide(
            self.model, self.measure, pairs, self.parameters, form=form,
            read=lambda p: state.of(p).to(p.device, p.dtype),
        )  # fmt: skip
        self._all_pairs = tuple(p for s in found for p in s.pairs)
        shards.place(found, {} if form is None else form.values)
        mine = [[q for q in s.pairs if shards.is_mine(q.G[0].tensor)] for s in found]
        constant, lengths = ({p: shards.cut(p, t) for p, t in of.items()} for of in (constant, lengths))
        here = {name: p for name, p in self.parameters.items() if p not in shards.owner or shards.is_mine(p)}
        stacks = [PairStack(pairs) for pairs in mine if pairs]
        return build_blocks(self.measure, here, self.dtype, stacks, constant, lengths)  # the twin is at the base point

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, of which each process draws its own part."""
        seed = int(torch.randint(2**62, (), generator=generator)) + self.world.rank
        return super().random(torch.Generator().manual_seed(seed))

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
        rows = {p: self._rows[p] for p in moving if p in self._shards.owner}
        self._shards.exchange(rows, self.copies, to_owners=False)

    def differentiate(self, losses: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Return the gradient of the rows that lie here, and of the pairs that this process owns.

        FSDP2 leaves gradients in ``.grad`` alone, which is put back afterwards.
        """
        with ExitStack() as stack:
            for p in (p for p in self.model.parameters() if p.requires_grad):
                stack.callback(setattr, p, "grad", p.grad)
                p.grad = None
            for loss in losses:
                loss.backward()
            found: dict[Tensor, Any] = {p: self._shards.of[p].grad for p in self.parameters.values()}
        rows = {p: g.to_local() for p, g in found.items() if g is not None}
        if not rows:
            raise ValueError(
                "no gradient reached the shards: FSDP2 is told not to exchange them; call "
                "model.set_requires_gradient_sync(True)"
            )
        return {**rows, **self._shards.collect(rows)}
