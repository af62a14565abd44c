"""Parameters that FSDP2 shards: each process gets the whole factors of its share of the pairs, and steps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..linalg import at_least_float32
from ..processes import exchange
from ..weights import is_sharded
from .metric import wide
from .parameters import Store, Tensors, full
from .stack import Stack


def _over(t: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh of a sharded tensor, and along which of its dimensions it is divided; none of a whole one."""
    placements = t.placements if is_sharded(t) else ()
    return getattr(t, "device_mesh", None), tuple(i for i, how in enumerate(placements) if how.is_shard())


def _share(s: Stack, rank: int, size: int) -> slice:
    """Return which pairs of a stack one of several processes steps."""
    return slice(len(s.given) * rank // size, len(s.given) * (rank + 1) // size)


class ShardedPairs(Store):
    """The processes over which the parameters of pairs are sharded, each of which steps a share of every stack.

    It gets the rows of the factors in its share from all others, and sends those of the new ones back.
    """

    def __init__(self, sharded: Sequence[Stack], weights: Mapping[str, Any]) -> None:
        self._over = {_over(weights[run.slot.name]) for s in sharded for run in s.pairs.runs}
        if len(self._over) > 1 or any(len(dims) != 1 for _, dims in self._over):
            raise ValueError(
                "pairs are sharded over several meshes, tensor-parallel, or in part since the optimiser was made; "
                "fully_shard all over one mesh"
            )
        ((mesh, dims),) = self._over
        self.group = mesh.get_group(dims[0])
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._replicas = [mesh.get_group(i) for i in range(mesh.ndim) if i not in dims]
        shares = [[p for s in sharded for p in s.given[_share(s, rank, self.size)]] for rank in range(self.size)]
        #: The names of the weights that each process needs, and of those that several need.
        self._needed = [list(dict.fromkeys(name for p in own for name in p.names)) for own in shares]
        counts = Counter(chain.from_iterable(self._needed))
        self._common = [name for name, count in counts.items() if count > 1]
        # Of the device and the dtype in which all is sent: not every backend sends half precision.
        needed = [weights[name] for name in counts]
        empty = [p.to_local().flatten()[:0].to(at_least_float32(p.dtype)) for p in needed]
        self._nothing = torch.cat(empty)
        for s in (s for s in sharded if s.own == slice(None)):
            s.keep(_share(s, self.rank, self.size))

    def total(self, numbers: Iterable[Tensor], gradients: Iterable[Tensor], *, squares: bool = False) -> Tensor:
        """Sum numbers, and all entries of gradients in every copy, or the squares of each once, in all processes."""
        numbers, parts = [*numbers] or [self._nothing], self._parts(gradients, copies=not squares)
        total = wide(super().total(numbers, parts, squares=squares))  # in one dtype
        dist.all_reduce(total, group=self.group)
        return total

    @contextmanager
    def lent(self, weights: Mapping[str, Any]) -> Iterator[tuple[Tensors, Tensors, Tensors]]:
        """Lend all gradients; and weights and gradients, of which those of this process's pairs are whole."""
        gradients, whole = self._gradients(weights), self._gathered(weights, weights)
        yield gradients, whole, self._gathered(gradients, weights)
        if gradients:
            self._write_(whole, weights)
        whole.clear()  # which stacks hold

    def _gradients(self, weights: Mapping[str, Any]) -> dict[str, Tensor]:
        """List the gradients of weights, of which all processes then have the same.

        Where one has none but another has, as by hand, it is 0, and so are those of its replicas.
        """
        found = {name: p.grad for name, p in weights.items()}
        sharded = {name: p for name, p in weights.items() if is_sharded(p)}
        lacks = [float(p.grad is None) for p in sharded.values()]
        marks = torch.tensor([lacks, [1 - v for v in lacks]], device=self._nothing.device)
        for group in self._replicas:
            dist.all_reduce(marks, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(marks[1], dist.ReduceOp.MAX, group=self.group)
        for (name, p), lacking, some in zip(sharded.items(), *marks.tolist(), strict=True):
            if lacking:
                found[name] = torch.zeros_like(p) if some else None
        return {name: g for name, g in found.items() if g is not None}

    def _parts(self, tensors: Iterable[Any], *, copies: bool) -> Iterator[Tensor]:
        """List parts of tensors such that all processes together have each of their entries once, or every copy."""
        for t in tensors:
            ours = _over(t) in self._over
            part = t.to_local() if ours else full(t)
            if ours or copies or self.rank == 0:
                yield part

    def _gathered(self, tensors: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return weights or gradients, of which those of this process's pairs are whole."""
        whole = {name: self._nothing.new_empty(weights[name].shape) for name in self._needed[self.rank]}
        # One without a gradient is sent, but not used.
        local = [[tensors.get(name, weights[name]).to_local() for name in own] for own in self._needed]
        exchange(local, self._rows(whole, weights), self._nothing, self.group)
        return {**tensors, **{name: t for name, t in whole.items() if name in tensors}}

    def _write_(self, whole: Mapping[str, Tensor], weights: Mapping[str, Any]) -> None:
        """Write to the weights of all processes what each has made of those that it has gathered."""
        local = {name: weights[name].to_local() for name in dict.fromkeys(chain(*self._needed))}
        before = {name: local[name].clone() for name in self._common}
        into = [[before[name].clone() if name in before else local[name] for name in own] for own in self._needed]
        mine = {name: whole[name] for name in self._needed[self.rank]}
        exchange(self._rows(mine, weights), into, self._nothing, self.group)
        for name, new in zip(chain(*self._needed), chain(*into), strict=True):
            if name in before:  # each has changed the entries of its own pairs
                local[name].copy_(torch.where(new == before[name], local[name], new))

    def _rows(self, whole: Mapping[str, Tensor], weights: Mapping[str, Any]) -> list[list[Tensor]]:
        """List the parts of whole tensors that lie at each process, of which the last may have none."""
        found: list[list[Tensor]] = [[] for _ in range(self.size)]
        for name, t in whole.items():
            dim = next(how.dim for how in weights[name].placements if how.is_shard())
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
