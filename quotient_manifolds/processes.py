"""What processes send each other of sharded weights."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
