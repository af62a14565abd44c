"""Work spread over processes; the only file that uses torch.distributed."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import RemoteError

__all__ = ["World", "counter", "everybody", "shard_", "torchrun"]

T = TypeVar("T")

_calls = itertools.count()

#: Messages of gloo when a connection is lost.
_LOST = re.compile(r"gloo.*(Connection|Timed out|Socket|timeout)|Connection (closed|reset)", re.IGNORECASE | re.DOTALL)


class World:
    """The processes that share units of work in round-robin order.

    Parameters
    ----------
    group : ProcessGroup, optional
        By default only this process.

    Raises
    ------
    ValueError
        This process does not belong to the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if isinstance(group, int):  # torch's value for processes that are not members
            raise ValueError("this process does not belong to the group; call evaluate on its members only")
        if not isinstance(group, (dist.ProcessGroup, type(None))):
            raise TypeError(f"group must be a process group, got {type(group).__name__}")
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process does not belong to the group; call evaluate on its members only")

    @property
    def members(self) -> list[int]:
        """The ranks of the processes, as torch counts all."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def owns(self, unit: int) -> bool:
        """Tell whether a unit of work falls to this process."""
        return unit % self.size == self.rank

    def gather(self, mine: list[T]) -> list[T]:
        """Collect the results of all processes on every process."""
        return [item for part in self._exchange(mine) for item in part]

    def stack(self, t: Tensor) -> Tensor:
        """Stack the tensors of all processes, which have one shape: (size, …), the same on every process."""
        if self.group is None:
            return t.unsqueeze(0)
        if dist.get_backend(self.group) == "nccl":
            t = t.cuda()  # NCCL carries no tensors of the main memory
        found = t.new_empty((self.size, *t.shape))
        dist.all_gather_into_tensor(found.view(-1), t.contiguous().view(-1), group=self.group)
        return found

    def sum(self, t: Tensor) -> Tensor:
        """Sum with the same bits on every process, so that all make the same decisions."""
        return t if self.group is None else self.stack(t).sum(0)

    def all(self, what: bool) -> bool:
        """Tell whether something holds on every process."""
        return all(self._exchange(what))

    def exchange(self, sent: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Send a flat tensor to every process; ``counts`` says how many numbers come from each."""
        out = sent[0].new_empty(sum(counts))
        dist.all_to_all_single(out, torch.cat(list(sent)), list(counts), [len(t) for t in sent], group=self.group)
        return out.split(list(counts))

    @contextmanager
    def together(self) -> Iterator[list[Any]]:
        """Collect the results of all processes, and let an error of one end all of them, so that none waits for ever.

        Yields
        ------
        list
            To which a process appends its results; after the block it has those of all processes.

        Raises
        ------
        RemoteError
            Another process failed, or ended while this one waited for it; its own error where it failed itself.
        """
        results: list[Any] = []
        failure: Exception | None = None
        try:
            try:
                yield results
            except Exception as error:
                if _is_lost(error):
                    raise
                failure = error
            words = None if failure is None else f"{type(failure).__name__}: {failure}"
            everybody = self._exchange((results, words))
        except RuntimeError as error:
            if not _is_lost(error):
                raise
            raise RemoteError(
                f"another process of the group ended or failed while process {dist.get_rank()} waited for it; see what "
                "it said; the weights here are as before"
            ) from error
        if failure is not None:
            raise failure
        failed = [f"process {rank} failed with {words}" for rank, (_, words) in enumerate(everybody) if words]
        if failed:
            raise RemoteError("; ".join(failed))
        results[:] = [item for part, _ in everybody for item in part]

    def _exchange(self, item: Any) -> list[Any]:
        if self.group is None:
            return [item]
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, item, group=self.group)
        return everybody


def _is_lost(error: Exception) -> bool:
    """Whether the communication library says that the connection to another process is lost."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or bool(_LOST.search(str(error))))


@contextmanager
def torchrun(device: torch.device, timeout: timedelta = timedelta(hours=12)) -> Iterator[dist.ProcessGroup | None]:
    """Join the processes that torchrun started, and leave them at the end; None if it started none.

    nccl where the device is a GPU, else gloo. A process that dies closes its connections, which ends the others with
    an error.

    Parameters
    ----------
    device : torch.device
        Of the work.
    timeout : timedelta
        Of every exchange.

    Yields
    ------
    ProcessGroup or None
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    try:
        yield dist.group.WORLD
    finally:
        # Older torch (2.6) joins gloo's threads with the GIL held: a deadlock if one still frees the last gather.
        time.sleep(0.1)
        dist.destroy_process_group()


def everybody() -> dist.ProcessGroup:
    """Return the group of all processes.

    Raises
    ------
    ValueError
        This process is alone.
    """
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise ValueError("a model is sharded over several processes: start the command by torchrun")
    return dist.group.WORLD


def shard_(model: nn.Module, device: torch.device) -> None:
    """Shard a model in place by FSDP2 over all processes: each layer of its outermost lists of layers, and the rest.

    Parameters
    ----------
    model : nn.Module
        The same whole model on every process.
    device : torch.device
        Where the shards are to lie.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    inside: set[nn.Module] = set()
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and layers not in inside:
            inside.update(layers.modules())
            for layer in layers:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def counter(count: int) -> Iterator[int]:
    """Yield the numbers below ``count``, each on one of the processes of torchrun; all of them without torchrun.

    A common atomic counter in the store of the process group assigns them: a free process takes the next.

    Parameters
    ----------
    count : int

    Yields
    ------
    int
    """
    if not dist.is_initialized():
        yield from range(count)
        return
    # Every call counts by itself; all processes make the same calls.
    store = dist.distributed_c10d.PrefixStore(f"sharpness-{next(_calls)}", dist.distributed_c10d._get_default_store())
    while True:
        number = int(store.add("next", 1)) - 1
        if number >= count:
            return
        yield number
