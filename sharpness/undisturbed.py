"""Measuring leaves no trace: modes, buffers, random state and switches are put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

__all__ = ["undisturbed"]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Keep a model in evaluation mode with gradients on; put modes, buffers, random state and switches back."""
    modes = {m: m.training for m in model.modules()}
    buffers = [
        (m, name, b, b.detach().clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    fast_path = torch.backends.mha.get_fastpath_enabled()
    autocast_cache = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        try:
            # The fast path of torch's encoder layers reads weights behind autograd's (and adapters') back.
            torch.backends.mha.set_fastpath_enabled(False)
            # Not model.eval(): some layers merge weights when they are told to.
            for module in modes:
                module.training = False
            torch.set_autocast_cache_enabled(False)  # it would keep casts of the weights while they move
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            torch.set_autocast_cache_enabled(autocast_cache)
            for module, training in modes.items():
                module.training = training
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
