"""Devices: which there are, and what is moved to them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from quotient_manifolds.passes import to_device

from .errors import naming


def move(what: Any, device: torch.device | str) -> Any:
    """Move a model or a batch to a device; say in a sentence what that cannot hold, such as Apple's float64."""
    with naming(f"not everything can be moved to {device}"):
        return what.to(device) if isinstance(what, nn.Module) else to_device(what, torch.device(device))


def checked_device(name: torch.device | str) -> torch.device:
    """Return a device of torch, after checking that it exists; under torchrun every process has a GPU of its own."""
    with naming(f"the device {str(name)!r} cannot be used"):
        device = torch.device(name)
        if device.type == "cuda" and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.zeros((), device=device).item()
    return device
