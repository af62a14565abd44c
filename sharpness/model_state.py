"""Measuring has no side effects: weights, modes, buffers, random state and global settings are restored."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from quotient_manifolds.symmetries.blocks import check_model

__all__ = ["preserves_model_state"]

P = ParamSpec("P")
T = TypeVar("T")

#: Attributes of modules that are False during a measurement. With the first, bitsandbytes packs a layer's 4-bit weights
#: for inference in the first pass that needs no gradient of its input: after that nothing can be differentiated through
#: the layer, and its old weights no longer fit. With the second, gradients are sparse and have no derivatives.
_SWITCHES: dict[str, type | tuple[type, ...]] = {
    "support_avx512bf16_for_cpu": nn.Module,
    "sparse": (nn.Embedding, nn.EmbeddingBag),
}


class _FastPath:
    """Torch's fast path of encoder layers, off during any measurement, because the setting is shared by all threads."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), set[int](), True

    def switch(self, user: int, *, off: bool) -> None:
        """Switch it off, or restore it when the last user has finished; a second call is harmless."""
        lock = self._lock
        held = lock.acquire(timeout=0.1)
        try:
            if off:
                if not self._users:
                    self._before = torch.backends.mha.get_fastpath_enabled()
                self._users.add(user)
                torch.backends.mha.set_fastpath_enabled(False)
            else:
                if self._users == {user}:
                    torch.backends.mha.set_fastpath_enabled(self._before)
                self._users.discard(user)
        finally:
            if held:
                lock.release()
            else:  # an interrupt came between acquiring and releasing the lock
                self._lock = threading.Lock()


_fast_path = _FastPath()


class _State:
    """Everything in a model and in torch that a measurement may change, with its previous state."""

    def __init__(self, model: nn.Module) -> None:
        self.modes = {m: m.training for m in model.modules()}
        self.switches = [
            (m, name, vars(m)[name]) for name, kind in _SWITCHES.items() for m in self.modes
            if isinstance(m, kind) and name in vars(m)
        ]  # fmt: skip
        self.data = [(p, p.data, p.grad) for p in model.parameters()]
        self.buffers = [(m, dict(m._buffers)) for m in self.modes if not isinstance(m, torch.jit.ScriptModule)]
        self.contents = [(b, b.detach().clone()) for b in model.buffers()]
        self.random = torch.get_rng_state()
        devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
        self.random_of_gpus = [(i, torch.cuda.get_rng_state(i)) for i in devices]
        self.gradients = torch.is_grad_enabled()
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.cached_parametrizations = parametrize._cache_enabled

    def prepare(self) -> None:
        """Switch off code that reads weights without autograd (or adapters), and go to evaluation mode."""
        _fast_path.switch(id(self), off=True)
        torch.set_autocast_cache_enabled(False)  # it would cache casts of the weights while they move
        parametrize._cache_enabled = 0
        # Not model.eval(): some layers merge weights when they are told to.
        for module in self.modes:
            module.training = False
        for module, name, _ in self.switches:
            setattr(module, name, False)

    def restore(self) -> None:
        """Restore everything; a second call is harmless."""
        for p, data, grad in self.data:
            p.data, p.grad = data, grad
        for module, training in self.modes.items():
            module.training = training
        for module, name, value in self.switches:
            setattr(module, name, value)
        for module, found in self.buffers:
            for name in set(module._buffers) - set(found):
                del module._buffers[name]
            module._buffers.update(found)  # buffers that a pass filled or replaced
        for buffer, value in self.contents:
            if not torch.equal(buffer, value):
                buffer.detach().copy_(value)  # not under no_grad(), which an interrupt might leave switched on
        torch.set_grad_enabled(self.gradients)
        torch.set_rng_state(self.random)
        for i, state in self.random_of_gpus:
            torch.cuda.set_rng_state(state, i)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        parametrize._cache_enabled = self.cached_parametrizations
        _fast_path.switch(id(self), off=False)


def preserves_model_state(function: Callable[Concatenate[nn.Module, P], T]) -> Callable[Concatenate[nn.Module, P], T]:
    """Run a function of a model in evaluation mode with gradients on, then restore everything, see :class:`_State`.

    An interrupt during the clean-up is raised after it, and the interrupted step is repeated. (A ``with`` statement
    could not guarantee that, because an interrupt may come within contextlib's own code.)
    """

    @functools.wraps(function)
    def wrapped(model: nn.Module, *args: P.args, **kwargs: P.kwargs) -> T:
        check_model(model)
        state = _State(model)
        try:
            try:
                state.prepare()
                with torch.inference_mode(False), torch.enable_grad():
                    return function(model, *args, **kwargs)
            finally:
                state.restore()
        finally:
            state.restore()

    return wrapped
