"""Work spread over processes; the only file that knows torch.distributed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .errors import RemoteError

__all__ = ["World", "counter", "torchrun"]

T = TypeVar("T")


class World:
    """The processes among which units of work go round, one after the other.

    Parameters
    ----------
    group : ProcessGroup, optional
        None is this process alone.

    Raises
    ------
    ValueError
        This process does not belong to the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if isinstance(group, int):  # what torch gives those who are no members
            raise ValueError("this process does not belong to the group; call evaluate on its members only")
        if not isinstance(group, (dist.ProcessGroup, type(None))):
            raise TypeError(f"group must be a process group, got {type(group).__name__}")
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process does not belong to the group; call evaluate on its members only")

    def owns(self, unit: int) -> bool:
        """Tell whether a unit of work falls to this process."""
        return unit % self.size == self.rank

    def share(self, count: int) -> range:
        """Name the units, of a number of them, that fall to this process."""
        return range(self.rank, count, self.size)

    def gather(self, mine: list[T]) -> list[T]:
        """Collect everybody's results, on every process."""
        return [item for part in self._exchange(mine) for item in part]

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let an error of one process end all: nobody is left waiting for results that never come.

        Raises
        ------
        RemoteError
            Another process failed; its own error where it failed itself.
        """
        if self.group is None:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        reports = self._exchange(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if failed:
            raise RemoteError("; ".join(f"process {rank} failed with {report}" for rank, report in failed))

    def _exchange(self, item: Any) -> list[Any]:
        if self.group is None:
            return [item]
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, item, group=self.group)
        return everybody


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
        # Older torch (2.6) joins gloo's threads with the GIL held: for ever, if one still frees the last gather.
        time.sleep(0.1)
        dist.destroy_process_group()


def counter(count: int) -> Iterator[int]:
    """Draw the numbers below ``count``, each once among the processes that torchrun started; all of them without.

    A common atomic counter in the store of the process group hands them out: whoever is free takes the next.

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
    store = dist.distributed_c10d.PrefixStore("sharpness-sweep", dist.distributed_c10d._get_default_store())
    while True:
        number = int(store.add("next", 1)) - 1
        if number >= count:
            return
        yield number
