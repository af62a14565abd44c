"""Parameters that FSDP2 shards: whole factors for all processes, and a share of the pairs for each to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..linalg import at_least_float32
from ..symmetries.modules import is_sharded
from .stack import Stack


def full(t: Any) -> Tensor:
    """Return a tensor that is sharded as a whole one, which all processes must ask for, and others as they are."""
    found: Tensor = t.full_tensor() if is_sharded(t) else t
    return found


def place(p: Any) -> tuple[slice, ...]:
    """Return where the part of a sharded parameter that lies here is in the whole one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # which takes long to load

    sizes, starts = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple(slice(start, start + size) for size, start in zip(sizes, starts, strict=True))


def cut(p: Any, whole: Tensor) -> Tensor:
    """Shard a tensor of a parameter's shape as the parameter is."""
    from torch.distributed.tensor import DTensor

    part = whole[place(p)].clone()
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


class Shards:
    """The parameters of pairs that are sharded, all over the same processes, of which this one is ``rank``."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.places = {p: place(p) for p in parameters}
        over = {(p.device_mesh, tuple(i for i, how in enumerate(p.placements) if how.is_shard())) for p in self.places}
        if len(over) > 1 or any(len(dims) != 1 for _, dims in over):
            raise ValueError(
                "the parameters of pairs are sharded over different processes, or along several dimensions of a mesh "
                "(tensor parallelism); shard all of them by fully_shard over one mesh"
            )
        self.group = next((mesh.get_group(dims[0]) for mesh, dims in over), None)
        self.rank, self.size = (dist.get_rank(self.group), dist.get_world_size(self.group)) if over else (0, 1)
        self.replicas = [mesh.get_group(i) for mesh, dims in over for i in range(mesh.ndim) if i not in dims]

    def gradients(self, own: Iterable[Any]) -> dict[Tensor, Tensor]:
        """List the gradients of parameters, of which all processes then have the same.

        Where one has none but another has, as by hand, it is 0, and so are those of its replicas.
        """
        found = {p: p.grad for p in own}
        sharded = [p for p in found if is_sharded(p)] if self.places else []
        if sharded:
            here = torch.tensor([float(found[p] is not None) for p in sharded], device=sharded[0].device)
            anywhere = here.clone()
            for group in self.replicas:
                dist.all_reduce(here, dist.ReduceOp.MIN, group=group)
                dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.group)
            for p, mine, some in zip(sharded, here.tolist(), anywhere.tolist(), strict=True):
                if not mine:
                    found[p] = torch.zeros_like(p) if some else None
        return {p: g for p, g in found.items() if g is not None}

    def _sum(self, found: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        flat = torch.cat([t.flatten() for t in found.values()])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([p.numel() for p in found])
        return {p: part.view(p.shape) for p, part in zip(found, parts, strict=True)}

    def whole(self, tensors: Mapping[Any, Any]) -> dict[Tensor, Tensor]:
        """Gather tensors that lie as their parameters do, by one call; in float32 at least."""
        found = {}
        for p, t in tensors.items():
            local = t.to_local()
            found[p] = local.new_zeros(p.shape, dtype=at_least_float32(t.dtype))
            found[p][self.places[p]] = local
        return self._sum(found) if found else {}

    def write_(self, ends: Mapping[Any, Tensor], running: Iterable[Stack]) -> None:
        """Write the rows that lie here, of which each process has written those of its stacks into ``ends``."""
        written = {p: torch.zeros_like(t) for p, t in ends.items()}
        for blocks in (blocks for s in running if s.owner is not None for blocks in s.blocks):
            blocks.scatter_(next(iter(written.values())).new_ones(blocks.shape), written)
        for p, end in (self._sum(ends) if ends else {}).items():
            local, here = p.to_local(), self.places[p]
            local.copy_(torch.where(written[p][here] > 0, end[here], local))

    def split(self, s: Stack) -> Iterator[Stack]:
        """Divide the pairs of a stack among the processes."""
        if s.owner is not None or s.pairs.parameters()[0] not in self.places:
            yield s
            return
        ends = [len(s.given) * rank // self.size for rank in range(self.size + 1)]
        for rank, (start, stop) in enumerate(pairwise(ends)):
            if start < stop:
                part = Stack(s.given[start:stop], s.flipped, s.group)
                part.owner, part.steps = rank, s.steps
                if rank == self.rank:
                    part.state = {k: v[start * s.points : stop * s.points].clone() for k, v in s.state.items()}
                yield part

    def join(self, some: Iterable[Stack], new_state: Callable[[Stack], dict[str, Tensor]]) -> Iterator[Stack]:
        """Undo :meth:`split`, for all processes."""
        parts = list[Stack]()
        for s in some:
            parts = [*parts, s]
            if s.owner is None:
                yield parts.pop()
            elif s.owner == self.size - 1:  # the last process has a part of every stack
                states = [part.state or new_state(part) for part in parts]  # 0 in all processes but the owner
                whole = Stack([p for part in parts for p in part.given], s.flipped, s.group)
                whole.steps, parts = max(part.steps for part in parts), []
                if whole.steps:
                    whole.state = {k: torch.cat([state[k] for state in states]).contiguous() for k in states[0]}
                for value in whole.state.values():
                    dist.all_reduce(value, group=self.group)
                yield whole
