"""A model whose weights FSDP2 has sharded: a twin with full parameter shapes, and the communication between the two."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import PairStack, SymmetricPair
from quotient_manifolds.symmetries.modules import is_sharded, plain_class
from quotient_manifolds.symmetries.whole import State

from .distributed import World

__all__ = ["ShardedState", "Shards", "is_sharded_model", "reshard"]


def reshard(model: nn.Module) -> None:
    """Let no module keep weights that FSDP2 has gathered: what is written to the shards would not be seen."""
    for m in model.modules():
        if hasattr(m, "reshard"):
            m.reshard()  # type: ignore[operator]


def is_sharded_model(model: nn.Module) -> bool:
    """Tell whether any parameter is a DTensor, as FSDP2 makes them; no module keeps gathered weights after this."""
    if not isinstance(model, nn.Module):  # which is said elsewhere
        return False
    reshard(model)
    return any(type(p).__name__ == "DTensor" for p in model.parameters())


def hollow(p: Any) -> Tensor:
    """Return a tensor of a sharded parameter's whole shape, without memory."""
    found: Tensor = p.to_local().detach().new_zeros(()).expand(p.shape)
    return found


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
    modules : dict of Module to Module
        The twin's modules by those of the model.
    owner : dict of Tensor to int
        The rank that works on a parameter of the twin; those without one are worked on in rows.

    Raises
    ------
    ValueError
        The model is sharded in another way, or weights are cast to another precision in every pass.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        _check(model)
        self.of: dict[Tensor, Tensor] = {}
        self.world = World(next(p for p in model.parameters() if is_sharded(p)).device_mesh.get_group())  # type: ignore[attr-defined]
        stand_ins: dict[Tensor, nn.Parameter] = {p: self._stand_in(p) for p in model.parameters()}
        self.modules: dict[nn.Module, nn.Module] = {}
        self.twin = self._copy(model, stand_ins)
        self.owner: dict[Tensor, int] = {}

    # -- the twin ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _stand_in(self, p: Tensor) -> nn.Parameter:
        if not is_sharded(p):
            return nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        found = nn.Parameter(hollow(p), requires_grad=p.requires_grad)
        self.of[found] = p
        if p.dim() < 2:
            found.data = self.whole(found, self.local(found))
        return found

    def _copy(self, module: nn.Module, stand_ins: Mapping[Tensor, nn.Parameter]) -> nn.Module:
        if module in self.modules:
            return self.modules[module]
        twin: nn.Module = object.__new__(plain_class(module))
        self.modules[module] = twin
        own = dict(module.__dict__)
        own["_parameters"] = {k: None if p is None else stand_ins[p] for k, p in own["_parameters"].items()}
        own["_modules"] = {k: None if m is None else self._copy(m, stand_ins) for k, m in own["_modules"].items()}
        for name, hooks in own.items():
            if isinstance(hooks, OrderedDict) and name.endswith("_hooks"):
                own[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_of_torch(hook))
        twin.__dict__.update(own)
        return twin

    # -- rows ----------------------------------------------------------------------------------------------------------

    def local(self, p: Tensor) -> Tensor:
        """Return this process's rows of a parameter of the twin, as a view of what the model reads."""
        if p not in self.of:
            return p.data
        with torch.no_grad():
            found: Tensor = self.of[p].to_local()  # type: ignore[attr-defined]
            return found

    def rows(self, p: Tensor, rank: int | None = None) -> slice:
        """Tell which rows lie on a process; by default on this one."""
        rank, count, step = self.world.rank if rank is None else rank, self.of[p].shape[0], self._step(p)
        return slice(min(rank * step, count), min((rank + 1) * step, count))

    def is_mine(self, p: Tensor) -> bool:
        """Tell whether this process works on the whole parameter."""
        return self.owner.get(p) == self.world.rank

    def cut(self, p: Tensor, t: Tensor) -> Tensor:
        """Take this process's part of a tensor that broadcasts to a parameter."""
        if p in self.owner or p not in self.of or t.dim() == 0 or len(t) < self.of[p].shape[0]:
            return t
        return t[self.rows(p)].clone()  # a view would keep the whole

    def among_zeros(self, p: Tensor, rows: Tensor) -> Tensor:
        """Return the flat numbers of this process in a tensor of a parameter's whole shape, which is zero elsewhere."""
        found = rows.new_zeros(self.of[p].shape)
        here = found if p in self.owner else found[self.rows(p)]
        here.copy_(rows.view(here.shape))
        return found

    def whole(self, p: Tensor, rows: Tensor) -> Tensor:
        """Gather the rows of all processes on each of them."""
        padded = rows.new_zeros((self._step(p), *rows.shape[1:]))
        padded[: len(rows)] = rows
        return self.world.stack(padded).flatten(0, 1)[: self.of[p].shape[0]]

    def _step(self, p: Tensor) -> int:
        """Return the number of rows of every process but the last ones, which may have fewer."""
        return -(-self.of[p].shape[0] // self.world.size)

    # -- owners --------------------------------------------------------------------------------------------------------

    def place(self, found: Iterable[PairStack], values: Mapping[Tensor, Tensor]) -> list[list[SymmetricPair]]:
        """Assign to every parameter of a pair the process that owns it, and give that process its whole values.

        ``values`` are rows that replace those of the model. Returns the sets of pairs that share parameters.
        """
        pairs = [p for s in found for p in s.pairs]
        sets = self._own(pairs)
        start = {p: values.get(p, self.local(p)) for p in self.of}
        for p, whole in self.collect(start).items():
            p.data = whole
        for p, rows in start.items():
            if p not in self.owner and p.requires_grad:
                p.data = rows.clone() if p not in values else rows
        return sets

    def _own(self, pairs: Sequence[SymmetricPair]) -> list[list[SymmetricPair]]:
        """Spread the pairs over the processes, the largest sets that hang together first."""
        home: dict[Tensor, list[Tensor]] = {}
        for pair in pairs:
            together = list(dict.fromkeys(q for p in pair.parameters() for q in home.get(p, [p])))
            home.update((p, together) for p in together)
        load, of_set = [0] * self.world.size, dict[int, list[SymmetricPair]]()
        for one in sorted({id(s): s for s in home.values()}.values(), key=lambda s: -sum(p.numel() for p in s)):
            rank = load.index(min(load))
            load[rank] += sum(p.numel() for p in one)
            self.owner.update((p, rank) for p in one)
        for pair in pairs:
            of_set.setdefault(id(home[pair.parameters()[0]]), []).append(pair)
        return list(of_set.values())

    def collect(self, rows: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Send the rows of parameters to their owners; return the full parameters that this process owns.

        All processes have rows of the same parameters; those without an owner are left out.
        """
        whole = {p: t.new_empty(self.of[p].shape) for p, t in rows.items() if self.is_mine(p)}
        self._exchange(rows, whole, to_owners=True)
        return whole

    def spread(self, whole: Mapping[Tensor, Tensor], rows: Mapping[Tensor, Tensor]) -> None:
        """Send full parameters from their owners to ``rows``, which every process has for the same parameters."""
        self._exchange(rows, whole, to_owners=False)

    @torch.no_grad()
    def _exchange(self, rows: Mapping[Tensor, Tensor], whole: Mapping[Tensor, Tensor], *, to_owners: bool) -> None:
        moving, ranks = [p for p in rows if p in self.owner], range(self.world.size)
        if not moving:
            return
        theirs = [[rows[p] for p in moving if self.owner[p] == rank] for rank in ranks]
        mine = [[whole[p][self.rows(p, rank)] for p in moving if self.is_mine(p)] for rank in ranks]
        sent, places = (theirs, mine) if to_owners else (mine, theirs)
        nothing = rows[moving[0]].new_empty(0)
        flat = [torch.cat([nothing, *(t.reshape(-1) for t in part)]) for part in sent]
        received = self.world.exchange(flat, [sum(t.numel() for t in into) for into in places])
        for numbers, into in zip(received, places, strict=True):
            parts = numbers.split([t.numel() for t in into]) if into else []
            for t, part in zip(into, parts, strict=True):
                t.copy_(part.view(t.shape))


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
        return self._shards.whole(p, rows).to(torch.promote_types(p.dtype, torch.float64))

    def __setitem__(self, p: Tensor, value: Tensor) -> None:
        super().__setitem__(p, value[self._shards.rows(p)].clone() if p in self._shards.of else value)


def _is_of_torch(hook: Any) -> bool:
    """Tell whether a hook is FSDP's own."""
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    return (hook if owner is None else type(owner)).__module__.startswith("torch.distributed")


def _check(model: nn.Module) -> None:
    """Refuse models that cannot be measured while sharded."""
    mesh = None
    for name, p in model.named_parameters():
        if not is_sharded(p):
            if p.requires_grad:
                raise ValueError(
                    f"the trainable parameter {name!r} is not sharded while others are; call fully_shard on the whole "
                    "model too, or freeze it"
                )
            continue
        placements = getattr(p, "placements", None)
        if placements is None or len(placements) != 1 or not placements[0].is_shard(0):
            raise ValueError(
                f"parameter {name!r} is sharded as {placements}; only FSDP2 over a mesh of one dimension is measured, "
                "rows on every process"
            )
        mesh = p.device_mesh if mesh is None else mesh  # type: ignore[attr-defined]
        if p.device_mesh != mesh:  # type: ignore[attr-defined]
            raise ValueError(f"parameter {name!r} is sharded over another mesh than the first; use one mesh for all")
        if p.device.type != mesh.device_type:
            raise ValueError(
                f"the shard of {name!r} lies on {p.device} while the mesh is of {mesh.device_type} devices; "
                "measure without an offload policy"
            )
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name!r} has a hook that runs after every backward pass, such as an optimiser's; remove it "
                "before measuring"
            )
        if p.requires_grad and p.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the trainable parameter {name!r} is {p.dtype}, in which small changes are lost; convert it to "
                "float32 before fully_shard"
            )
    for name, m in model.named_modules():
        state = m._get_fsdp_state() if hasattr(m, "_get_fsdp_state") else None  # noqa: SLF001
        policy = getattr(state, "_mp_policy", None)
        for kind in ("param_dtype", "reduce_dtype", "output_dtype"):
            cast = getattr(policy, kind, None)
            if cast not in (None, torch.float32, torch.float64):
                raise ValueError(
                    f"fully_shard of {name or 'the model'!r} has {kind}={cast} in its mixed-precision policy, which "
                    "loses small changes; measure it without"
                )
