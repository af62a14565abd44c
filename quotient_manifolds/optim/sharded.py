"""Parameters that FSDP2 shards: each process gets the whole factors of its share of the pairs, and steps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..linalg import at_least_float32
from ..weights import is_sharded
from .metric import wide
from .stack import Stack


def full(t: Any) -> Tensor:
    """Return a tensor that is sharded as a whole one, which all processes must ask for, and others as they are."""
    found: Tensor = t.full_tensor() if is_sharded(t) else t
    return found


def cut(p: Any, whole: Tensor) -> Any:
    """Shard a tensor that all processes have as a parameter of its shape is."""
    from torch.distributed.tensor import DTensor  # which takes long to load

    return DTensor.from_local(whole, p.device_mesh).redistribute(placements=p.placements)


def _over(t: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh of a sharded tensor, and along which of its dimensions it is divided; none of a whole one."""
    placements = t.placements if is_sharded(t) else ()
    return getattr(t, "device_mesh", None), tuple(i for i, how in enumerate(placements) if how.is_shard())


def _share(s: Stack, rank: int, size: int) -> slice:
    """Return which pairs of a stack one of several processes steps."""
    return slice(len(s.given) * rank // size, len(s.given) * (rank + 1) // size)


def exchange(sent: list[list[Tensor]], into: list[list[Tensor]], nothing: Tensor, group: Any) -> None:
    """Send lists of tensors to the processes of a group by one call, and fill others by what comes from them.

    What travels has the dtype and device of ``nothing``, which is empty.
    """
    flat = torch.cat([nothing, *(t.flatten() for own in sent for t in own)]).to(nothing.dtype)
    coming, going = ([sum(t.numel() for t in own) for own in parts] for parts in (into, sent))
    received = flat.new_empty(sum(coming))
    dist.all_to_all_single(received, flat, coming, going, group=group)
    filled = [nothing, *chain(*into)]
    parts = received.split([t.numel() for t in filled])
    torch._foreach_copy_(filled, [part.view(t.shape) for part, t in zip(parts, filled, strict=True)])


class ShardedPairs:
    """The processes over which the parameters of pairs are sharded, each of which steps a share of every stack.

    It gets the rows of the factors in its share from all others, and sends those of the new ones back.
    """

    def __init__(self, stacks: Iterable[Stack]) -> None:
        sharded = [s for s in stacks if any(map(is_sharded, s.pairs.parameters()))]
        self._over = {_over(p) for s in sharded for p in s.pairs.parameters()}
        if len(self._over) > 1 or any(len(dims) != 1 for _, dims in self._over):
            raise ValueError(
                "pairs are sharded over several meshes, tensor-parallel, or in part since the optimiser was made; "
                "fully_shard all over one mesh"
            )
        self.group = next((mesh.get_group(dims[0]) for mesh, dims in self._over), None)
        self.rank, self.size = (dist.get_rank(self.group), dist.get_world_size(self.group)) if sharded else (0, 1)
        self._replicas = [mesh.get_group(i) for mesh, dims in self._over for i in range(mesh.ndim) if i not in dims]
        shares = [[p for s in sharded for p in s.given[_share(s, rank, self.size)]] for rank in range(self.size)]
        #: The parameters that each process needs, and those that several need.
        self._needed: list[dict[Any, None]] = [dict.fromkeys(t for p in own for t in p.parameters()) for own in shares]
        counts = Counter(chain.from_iterable(self._needed))
        self._common = [p for p, count in counts.items() if count > 1]
        # Of the device and the dtype in which all is sent: not every backend sends half precision.
        empty = [p.to_local().flatten()[:0].to(at_least_float32(p.dtype)) for p in counts]
        self._nothing = torch.cat(empty) if sharded else torch.empty(0)
        for s in (s for s in sharded if s.own == slice(None)):
            s.keep(_share(s, self.rank, self.size))

    def sum(self, numbers: Iterable[Tensor]) -> Tensor:
        """Sum all entries of some tensors in all processes."""
        found = [*numbers] or [self._nothing]
        total = torch.cat([n.to(found[0].device).flatten() for n in found]).sum()
        if self.group is not None:  # in one dtype
            dist.all_reduce(total := wide(total), group=self.group)
        return total

    def gradients(self, own: Iterable[Any]) -> dict[Tensor, Tensor]:
        """List the gradients of parameters, of which all processes then have the same.

        Where one has none but another has, as by hand, it is 0, and so are those of its replicas.
        """
        found = {p: p.grad for p in own}
        sharded = [p for p in found if is_sharded(p)] if self.group is not None else []
        if sharded:
            lacks = [float(found[p] is None) for p in sharded]
            marks = torch.tensor([lacks, [1 - v for v in lacks]], device=sharded[0].device)
            for group in self._replicas:
                dist.all_reduce(marks, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(marks[1], dist.ReduceOp.MAX, group=self.group)
            for p, lacking, some in zip(sharded, *marks.tolist(), strict=True):
                if lacking:
                    found[p] = torch.zeros_like(p) if some else None
        return {p: g for p, g in found.items() if g is not None}

    def once(self, tensors: Iterable[Any], *, copies: bool = False) -> Iterator[Tensor]:
        """List parts of tensors such that all processes together have each of their entries once, or every copy."""
        for t in tensors:
            ours = _over(t) in self._over
            part = t.to_local() if ours else full(t)
            if ours or copies or self.rank == 0:
                yield part

    def gather(self, gradients: Mapping[Any, Any]) -> tuple[dict[Any, Tensor], Mapping[Any, Tensor]]:
        """Return the whole parameters of this process's pairs, and the gradients, of which those of these are whole."""
        if self.group is None:
            return {}, gradients
        found = list[dict[Any, Tensor]]()
        for tensors in ({}, gradients):
            found.append({p: self._nothing.new_empty(p.shape) for p in self._needed[self.rank]})
            local = [[tensors.get(p, p).to_local() for p in own] for own in self._needed]
            exchange(local, self._rows(found[-1]), self._nothing, self.group)
        return found[0], {**gradients, **{p: t for p, t in found[1].items() if p in gradients}}

    def scatter_(self, whole: Mapping[Any, Tensor]) -> None:
        """Write to the parameters of all processes what each has made of those it has gathered."""
        if self.group is None:
            return
        before = {p: p.to_local().clone() for p in self._common}
        into = [[before[p].clone() if p in before else p.to_local() for p in own] for own in self._needed]
        exchange(self._rows(whole), into, self._nothing, self.group)
        for p, new in zip(chain(*self._needed), chain(*into), strict=True):
            if p in before:  # each has changed the entries of its own pairs
                p.to_local().copy_(torch.where(new == before[p], p.to_local(), new))

    def _rows(self, whole: Mapping[Any, Tensor]) -> list[list[Tensor]]:
        """List the parts of whole tensors that lie at each process, of which the last may have none."""
        found: list[list[Tensor]] = [[] for _ in range(self.size)]
        for p, t in whole.items():
            dim = next(how.dim for how in p.placements if how.is_shard())
            for own, rows in zip(found, t.chunk(self.size, dim), strict=False):
                own.append(rows)
        return found

    def whole_state(self, s: Stack) -> dict[str, Tensor]:
        """Return the state of all pairs of a stack, from all processes."""
        if s.own == slice(None):
            return s.state
        found = list[Any](None for _ in range(self.size))
        dist.all_gather_object(found, {k: v.cpu() for k, v in s.state.items()}, group=self.group)
        names: Iterable[str] = next(filter(None, found), {})
        return {k: torch.cat([state[k] for state in found if state]).to(self._nothing.device) for k in names}
