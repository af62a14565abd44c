"""Work spread over processes. All else that talks to other processes is FSDP2's DTensor, in :mod:`.sharded`."""

from __future__ import annotations

import itertools
import os
import re
import time
import traceback
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quotient_manifolds.weights import is_sharded, plain_class, trained

from .errors import RemoteError

T = TypeVar("T")

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
        if group is not None and not isinstance(group, dist.ProcessGroup | int):  # a number: outside of it
            raise TypeError(f"group must be a process group of torch.distributed, got {type(group).__name__}")
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process does not belong to the group; call evaluate on its members only")
        self.size = 1 if group is None else dist.get_world_size(group)

    def owns(self, unit: int) -> bool:
        """Return whether a unit of work falls to this process."""
        return unit % self.size == self.rank

    def checksums(self, model: nn.Module) -> dict[str, int]:
        """Compute the checksums of a model's weights, which several processes have alike."""
        weights = model.state_dict() if self.size > 1 else {}
        return {f"{name!r} of the model": checksum(t) for name, t in weights.items()}

    def deal(self, numbered: Iterable[tuple[int, T]], contents: dict[str, int]) -> Iterator[tuple[int, T]]:
        """Deal out numbered batches, of which all processes have all, and note their checksums."""
        for index, batch in numbered:
            if self.size > 1:
                contents[f"batch {index}"] = checksum(batch)
            if self.owns(index):
                yield index, batch

    def gather(self, mine: list[T]) -> list[T]:
        """Collect the results of all processes on every process."""
        return [item for part in self._exchange(mine) for item in part]

    def sum(self, t: Tensor) -> Tensor:
        """Sum small tensors with the same bits on every process, so that all make the same decisions; on the CPU."""
        return t if self.group is None else torch.stack(self._exchange(t.cpu())).sum(0)

    def all(self, what: bool) -> bool:
        """Return whether something holds on every process."""
        return all(self._exchange(what))

    def alike(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over batches, of which all processes must have the same at the same time."""
        end: Any = object()  # where others may go on
        for index, batch in enumerate(itertools.chain(batches, [end])):
            check_alike(self._exchange({} if batch is end else {f"batch {index}": checksum(batch)}))
            if batch is not end:
                yield batch

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


def checksum(batch: Any, start: int = 0) -> int:
    """Compute a checksum of the tensors and texts of a batch."""
    if isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            start = checksum(part, start)
    elif isinstance(batch, str):
        start = zlib.crc32(batch.encode(), start)
    elif isinstance(batch, Tensor) and batch.layout == torch.strided and batch.device.type != "meta":
        plain = batch.detach().as_subclass(Tensor)  # quantised weights have ways of their own to another device
        start = zlib.crc32(plain.cpu().resolve_conj().flatten().view(torch.uint8).numpy().data, start)
    return start


def check_alike(parts: Sequence[Mapping[str, int]]) -> None:
    """Raise if processes hold other batches or weights than each other, by their checksums."""
    for name in {name: None for part in parts for name in part}:
        if len({part.get(name) for part in parts}) > 1:
            raise ValueError(
                f"{name} is not the same on all processes; give all of them the same weights, and all batches in one "
                "order, without a DistributedSampler and with one seed for a shuffle: evaluate deals them out itself"
            )


def _is_lost(error: Exception) -> bool:
    """Whether the communication library, not code that a user gave, says that another process is lost."""
    if isinstance(error, dist.DistError):
        return True
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    said = isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
    return said and any(name.startswith("torch.distributed") for name in frames)


@contextmanager
def torchrun(device: torch.device) -> Iterator[dist.ProcessGroup | None]:
    """Join the processes that torchrun started, and leave them at the end; None if it started none.

    nccl where the device is a GPU, else gloo. An exchange may take twelve hours, for processes wait until the last one
    has finished; one that dies closes its connections, which ends the others with an error.

    Parameters
    ----------
    device : torch.device
        Of the work.

    Yields
    ------
    ProcessGroup or None
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=12))
    try:
        yield dist.group.WORLD
    finally:
        # Older torch (2.6) joins gloo's threads with the GIL held: a deadlock if one still frees the last gather.
        time.sleep(0.1)
        dist.destroy_process_group()


def world_of(model: nn.Module) -> World:
    """Return the processes over which a model is sharded; refuse models that cannot be measured while sharded."""
    mesh: Any = next(p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh"))
    weights = dict(model.named_parameters())
    moving = trained(weights)
    for name, p in weights.items():
        placements: Sequence[Any] = getattr(p, "placements", ())
        problem = None
        if not is_sharded(p):
            if name in moving:
                problem = "is not sharded while others are; call fully_shard on the whole model too, or freeze it"
        elif len(placements) != 1 or not placements[0].is_shard(0):
            problem = f"is sharded as {placements}; only FSDP2 over a mesh of one dimension, in rows, is measured"
        elif p.device_mesh != mesh:  # type: ignore[attr-defined]
            problem = "is sharded over another mesh than the first; use one mesh for all"
        elif p.device.type != mesh.device_type:
            problem = f"has its shard on {p.device}, not on {mesh.device_type}; measure without an offload policy"
        elif getattr(p, "_post_accumulate_grad_hooks", None):
            problem = "has a hook that runs after every backward pass, such as an optimiser's; remove it first"
        elif name in moving and p.dtype not in (torch.float32, torch.float64):
            problem = f"is {p.dtype}, in which small changes are lost; convert it to float32 before fully_shard"
        if problem:
            raise ValueError(f"parameter {name!r} {problem}")
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
    return World(mesh.get_group())


def twin_of(module: nn.Module, parameters: Mapping[Tensor, Any], twins: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a module that FSDP2 has sharded as it was before, with other parameters; ``twins`` are known copies."""
    if module in twins:
        return twins[module]
    twin: nn.Module = object.__new__(plain_class(module))
    twins[module] = twin
    own = dict(module.__dict__)
    own["_parameters"] = {k: None if p is None else parameters[p] for k, p in own["_parameters"].items()}
    own["_modules"] = {k: None if m is None else twin_of(m, parameters, twins) for k, m in own["_modules"].items()}
    for name, hooks in own.items():
        if isinstance(hooks, OrderedDict) and name.endswith("_hooks"):
            own[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_of_torch(hook))
    twin.__dict__.update(own)
    return twin


def _is_of_torch(hook: Any) -> bool:
    """Whether a hook is FSDP's own."""
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    return (hook if owner is None else type(owner)).__module__.startswith("torch.distributed")
