"""A forward pass without side effects that records the inputs of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..batches import tensors

__all__ = ["Call", "caching", "copied", "drop_caches", "random_state_kept", "record", "undisturbed"]

#: Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode temporarily; modes, buffers and the random state are restored afterwards.

    Torch's fast path of encoder layers is off meanwhile, because it bypasses the modules inside.
    """
    modes = {m: m.training for m in model.modules()}
    buffers = [(m, dict(m._buffers)) for m in modes if not isinstance(m, torch.jit.ScriptModule)]
    contents = [(b, b.detach().clone()) for b in model.buffers()]
    fast_path, hooks = torch.backends.mha.get_fastpath_enabled(), list[RemovableHandle]()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        # Not model.eval(): some layers merge weights when they are told to.
        for module in modes:
            module.training = False
        hooks += [m.register_forward_pre_hook(drop_caches) for m in caching(model)]
        with random_state_kept(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for hook in hooks:
            hook.remove()
        for module in caching(model):
            drop_caches(module)
        for module, training in modes.items():
            module.training = training
        for module, found in buffers:
            module._buffers.clear()
            module._buffers.update(found)
        for buffer, value in contents:
            if not torch.equal(buffer, value):
                buffer.detach().copy_(value)


def caching(model: nn.Module) -> list[nn.Module]:
    """List the modules that do something when ``train()`` is called, and hold no others that do."""
    return [m for m in model.modules() if [c for c in m.modules() if type(c).train is not nn.Module.train] == [m]]


def drop_caches(module: nn.Module, *_: Any) -> None:
    """Tell a module that keeps tensors besides parameters and buffers to drop what depends on its mode.

    timm's LeViT and others gather biases once in evaluation mode, and would not see weights that move.
    """
    own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
    if next(tensors(own), None) is not None:
        module.train()
        module.train(False)


def random_state_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the random state afterwards: passes that each run within this draw the same numbers."""
    return torch.random.fork_rng(sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda}))


def copied(model: Any) -> Any:
    """Copy a model, without the graphs of tensors that it has kept from a pass (pruning, weight norm, caches)."""
    kept = (t for m in model.modules() for t in tensors(vars(m)) if not t.is_leaf)
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in kept})


def record(run: Callable[[], Any], wanted: Mapping[str, nn.Module]) -> dict[str, Call]:
    """Run a model and keep the inputs of the first call of each module, without caches of earlier tokens."""
    calls: dict[str, Call] = {}
    hooks = []

    def plain(value: Any) -> Any:
        return None if type(value).__name__.endswith("Cache") else value

    for name, module in wanted.items():

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            if name not in calls:
                calls[name] = tuple(map(plain, args)), {k: plain(v) for k, v in kwargs.items()}

        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # a compiled model ignores hooks
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls
