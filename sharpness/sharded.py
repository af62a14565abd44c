"""A model that FSDP2 has sharded: a twin with full parameter shapes, and its space, whose vectors are sharded too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import finite, in_double
from quotient_manifolds.processes import exchange
from quotient_manifolds.symmetries import PairStack, SymmetricPair, Symmetries, canonical_form
from quotient_manifolds.symmetries.actions import State
from quotient_manifolds.weights import is_sharded, reshard, trained, weights_of

from .distributed import World, twin_of, world_of
from .lengths import vector_lengths
from .measures import Measure
from .patch import Patch
from .patches import PairPatch, build_patches, stacks_of
from .space import Unreached, WeightSpace


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
    weights : dict of str to Tensor
        The twin's parameters, by name.
    of : dict of str to Tensor
        The model's parameters that are sharded, by name.
    owner : dict of str to int
        The rank that works on a weight; those without one are worked on in rows.

    Raises
    ------
    ValueError
        The model is sharded in another way, or weights are cast to another precision in every pass.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self.world, whole = world_of(model), weights_of(model)
        self.of: dict[str, Any] = {name: p for name, p in whole.items() if is_sharded(p)}
        moving = trained(whole)
        stand_ins: dict[Tensor, nn.Parameter] = {
            p: nn.Parameter(self._stand_in(name, p), requires_grad=name in moving) for name, p in whole.items()
        }
        self.twin = twin_of(model, stand_ins, {})
        self.weights: dict[str, Tensor] = dict(weights_of(self.twin))
        self.owner: dict[str, int] = {}

    # -- the twin ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _stand_in(self, name: str, p: Any) -> Tensor:
        if not is_sharded(p):
            return p.detach()
        hollow = p.to_local().detach().new_zeros(()).expand(p.shape)  # the whole shape, without memory
        return self.whole(name, p.to_local()) if p.dim() < 2 else hollow

    # -- rows ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def local(self, name: str) -> Tensor:
        """Return this process's rows of a weight, as a view of what the model reads."""
        rows: Tensor = self.of[name].to_local() if name in self.of else self.weights[name].data
        return rows

    def rows(self, name: str, rank: int | None = None) -> slice:
        """Return which rows lie on a process, by default on this one; the last processes may have fewer, or none."""
        step = -(-self.of[name].shape[0] // self.world.size)
        start = step * (self.world.rank if rank is None else rank)
        return slice(start, start + step)

    def is_mine(self, name: str) -> bool:
        """Return whether this process works on the whole weight."""
        return self.owner.get(name) == self.world.rank

    def cut(self, name: str, t: Tensor) -> Tensor:
        """Take this process's part of a tensor that broadcasts to a weight."""
        if name in self.owner or name not in self.of or t.dim() == 0 or len(t) < self.of[name].shape[0]:
            return t
        return t[self.rows(name)].clone()  # a view would keep the whole

    def whole(self, name: str, rows: Tensor) -> Tensor:
        """Gather the rows of all processes on each of them."""
        from torch.distributed.tensor import DTensor  # which takes long to load

        q = self.of[name]
        found = DTensor.from_local(rows, q.device_mesh, q.placements, shape=q.shape, stride=q.stride())
        return found.full_tensor()

    # -- owners --------------------------------------------------------------------------------------------------------

    def place(self, found: Iterable[PairStack], values: Mapping[str, Tensor]) -> None:
        """Assign to every weight of a pair the process that owns it, and give that process its whole values.

        The sets of pairs that share weights are spread over the processes, the largest first. ``values`` are rows that
        replace those of the model.
        """
        together: dict[str, list[str]] = {}
        for pair in (p for s in found for p in s.pairs):
            joined = list(dict.fromkeys(q for name in pair.names for q in together.get(name, [name])))
            together.update((name, joined) for name in joined)
        load, sizes = [0] * self.world.size, {name: p.numel() for name, p in self.weights.items()}
        for one in sorted({id(s): s for s in together.values()}.values(), key=lambda s: -sum(map(sizes.get, s))):  # type: ignore[arg-type]
            rank = load.index(min(load))
            load[rank] += sum(sizes[name] for name in one)
            self.owner.update((name, rank) for name in one)
        start, moving = {name: values.get(name, self.local(name)) for name in self.of}, trained(self.weights)
        for name, whole in self.collect(start).items():
            self.weights[name].data = whole
        for name, rows in start.items():
            if name not in self.owner and name in moving:
                self.weights[name].data = rows.clone() if name not in values else rows

    def collect(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send the rows of weights to their owners; return the full weights that this process owns.

        All processes have rows of the same weights; those without an owner are left out.
        """
        whole = {name: t.new_empty(self.of[name].shape) for name, t in rows.items() if self.is_mine(name)}
        self.exchange(rows, whole, to_owners=True)
        return whole

    @torch.no_grad()
    def exchange(self, rows: Mapping[str, Tensor], whole: Mapping[str, Tensor], *, to_owners: bool) -> None:
        """Fill the full weights of their owners from ``rows``, which every process has, or these from those."""
        moving, ranks = [name for name in rows if name in self.owner], range(self.world.size)
        if not moving:
            return
        theirs = [[rows[name] for name in moving if self.owner[name] == rank] for rank in ranks]
        mine = [[whole[name][self.rows(name, rank)] for name in moving if self.is_mine(name)] for rank in ranks]
        sent, filled = (theirs, mine) if to_owners else (mine, theirs)
        exchange(sent, filled, torch.cat([rows[name].flatten()[:0] for name in moving]), self.world.group)


class ShardedState(State):
    """The values of a sharded model's parameters: this process's rows of the changed ones, which are read in full."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards.weights)
        self._shards = shards

    def __getitem__(self, name: str) -> Tensor:
        """Return the whole value of a weight."""
        if name not in self._shards.of or (name not in self and self.weights[name].dim() < 2):
            return super().__getitem__(name)
        rows = super().__getitem__(name) if name in self else self._shards.local(name)
        return in_double(self._shards.whole(name, rows))

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value[self._shards.rows(name)].clone() if name in self._shards.of else value)


class ShardedSpace(WeightSpace):
    """The space of a model after ``fully_shard``, the same on all processes of its mesh, see :class:`Shards`.

    A vector, (dim,), holds the coordinates of this process: of the rows that lie here, and of the pairs that it owns.
    Its methods are collective: every process has to call them, in the same order. The shards are written in place,
    because FSDP reads nothing else, and are restored afterwards.

    Parameters
    ----------
    model, measure, symmetries, classes
        As for :class:`WeightSpace`.
    """

    world: World

    def __init__(
        self, model: nn.Module, measure: Measure, symmetries: Symmetries | None = None, *, classes: bool = False
    ) -> None:
        if measure.pair_patch is not None:
            raise ValueError(f"{type(measure).__name__} works on whole models, and this one is sharded; load it whole")
        self._shards = shards = Shards(model)
        bad = next((name for name in shards.weights if not finite(shards.local(name))), None)
        if not shards.world.all(bad is None):
            raise ValueError(
                f"parameter {bad or '(on another process)'!r} has NaN or infinite entries; load an intact checkpoint"
            )
        super().__init__(shards.twin, measure, symmetries, classes=classes)
        self.model, self.world, self.pairs = model, shards.world, self._all_pairs
        self.agree = self.world.all
        smallest, absent = zip(*self.world.gather([self.spectrum]), strict=True)
        self.spectrum = min((value for value in smallest if value is not None), default=None), sum(absent)
        self.unreached = self.unreached._replace(pairs=set(range(len(self.pairs))))

    def _build(self) -> tuple[list[Patch], list[PairPatch]]:
        shards, state, symmetries = self._shards, ShardedState(self._shards), self.symmetries
        constant, lengths = dict[str, Tensor](), dict[str, Tensor]()
        if self.measure.form == "canonical":
            self.form = canonical_form(self.weights, symmetries, state=state)
            symmetries, constant = self.form.symmetries, self.form.constant
        if self.measure.elementwise == "vector":
            lengths = vector_lengths(self.model, symmetries, lambda name: state[name].to(self.weights[name]))
        found = stacks_of(self.measure, symmetries, self.weights)
        self._all_pairs = tuple(p for s in found for p in s.pairs)
        shards.place(found, {} if self.form is None else self.form.values)
        mine = [[q for q in s.pairs if shards.is_mine(q.G[0].name)] for s in found]
        constant, lengths = ({name: shards.cut(name, t) for name, t in of.items()} for of in (constant, lengths))
        here = {name: p for name, p in self.parameters.items() if name not in shards.owner or shards.is_mine(name)}
        stacks = [PairStack(pairs) for pairs in mine if pairs]
        return build_patches(self.measure, here, self.dtype, stacks, constant, lengths)  # the twin is at the base point

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a standard Gaussian horizontal vector, of which each process draws its own part."""
        seed = int(torch.randint(2**62, (), generator=generator)) + self.world.rank
        return super().random(torch.Generator().manual_seed(seed))

    # -- of all processes ------------------------------------------------------------------------------------------

    def num_exited_pairs(self, xi: Tensor) -> int:
        """Count the pairs of all processes whose exact geodesic along xi is shortened."""
        return sum(self.world.gather([super().num_exited_pairs(xi)]))

    def see(self, gradient: Mapping[str, Tensor]) -> None:
        """Take note of a gradient, with the pairs of all processes, and of weights that none reached on any."""
        super().see(gradient)
        number = {pair: i for i, pair in enumerate(self.pairs)}
        residuals = self.world.gather([(number[pair], residual) for pair, residual in self.residuals.items()])
        self.residuals = {self.pairs[i]: residual for i, residual in residuals}
        pairs, *weights = zip(*self.world.gather([self.unreached]), strict=True)
        self.unreached = Unreached(set().union(*pairs), *(set.intersection(*names) for names in weights))

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[WeightSpace]:
        """Let :meth:`move_to` write the shards; they are restored even after an error."""
        shards = self._shards
        self._rows = {name: shards.local(name) for name in [*self.parameters, *self._base]}
        # Weights that are processed by rows have a copy already.
        copied = {name for name in self.parameters if name not in self._base and name not in shards.owner}
        before = {t: self.weights[name].data if name in copied else t.clone() for name, t in self._rows.items()}

        def put_back() -> None:
            reshard(self.model)
            for t, value in before.items():
                t.copy_(value)

        with ExitStack() as stack:
            for _ in range(2):  # the second finishes what an interrupt has cut short
                stack.callback(put_back)
            for name, value in self._base.items():
                self._rows[name].copy_(value)
            with super().attached():
                yield self

    def _copies(self) -> dict[str, Tensor]:
        """Copy the pairs that this process owns; all else is moved where its rows lie."""
        owned = {name: self.weights[name].data for name in self._rows if self._shards.is_mine(name)}
        mine = {name: t.clone(memory_format=torch.contiguous_format) for name, t in owned.items()}
        return {name: self._rows[name] for name in self.parameters if name not in self._shards.owner} | mine

    def move_to(self, xi: Tensor | None) -> None:
        """Move the model to the retraction of a tangent vector, see :meth:`WeightSpace.move_to`."""
        super().move_to(xi)
        self._show_model()

    def move_along_orbit(self, pair: SymmetricPair) -> None:
        """Move by a random element of a pair's group, on the process that owns it."""
        if self._shards.is_mine(pair.G[0].name):
            super().move_along_orbit(pair)
        self._show_model()

    def _show_model(self) -> None:
        reshard(self.model)
        rows = {name: self._rows[name] for name in self.parameters if name in self._shards.owner}
        self._shards.exchange(rows, self.copies, to_owners=False)

    def differentiate(self, losses: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the rows that lie here, and of the pairs that this process owns.

        FSDP2 leaves gradients in ``.grad`` alone, which is put back afterwards.
        """
        with ExitStack() as stack:
            for p in map(self._shards.of.__getitem__, self.parameters):
                stack.callback(setattr, p, "grad", p.grad)
                p.grad = None
            for loss in losses:
                loss.backward()
            found: dict[str, Any] = {name: self._shards.of[name].grad for name in self.parameters}
        rows = {name: g.to_local() for name, g in found.items() if g is not None}
        if not rows:
            raise ValueError(
                "no gradient reached the shards: FSDP2 is told not to exchange them; call "
                "model.set_requires_gradient_sync(True)"
            )
        return {**rows, **self._shards.collect(rows)}
