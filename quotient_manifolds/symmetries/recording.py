"""A forward pass without side effects that records the inputs of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ..batches import tensors
from .blocks import is_sharded

__all__ = ["Call", "Watch", "caching", "copied", "drop_caches", "random_state_kept", "record", "undisturbed"]

#: Functions whose call makes a module an attention layer, if no handler covers it.
_ATTENTION_CALLS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "flex_attention",
    "softmax",
}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum"}
#: Marks of tensors other than plain activations: made from weights only, or from a product of two activations.
_WEIGHT, _SCORE = 1, 2
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
    """Tell a module that keeps tensors besides parameters and buffers to drop what it made in evaluation mode.

    timm's LeViT and others gather biases once in evaluation mode, and would not see weights that move.
    """
    own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
    if not module.training and next(tensors(own), None) is not None:
        modes = [(m, m.training) for m in module.modules()]
        module.train()
        module.train(False)
        for m, training in modes:
            m.training = training


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


class Watch(TorchFunctionMode):
    """Record which module was running when attention was computed.

    Attention is a call of a function known to compute it, or a product of activations with the result of another
    product of activations, whatever happened in between (sigmoid, exponentials and their sum, nothing at all).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[tuple[nn.Module, str]] = []
        self._running: list[nn.Module] = []
        self._kinds: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._weights = {self._place(t) for t in [*model.parameters(), *model.buffers()]} - {0}

    def __enter__(self) -> Watch:
        enter = register_module_forward_pre_hook(lambda module, _: self._running.append(module))
        self._hooks = [enter, register_module_forward_hook(self._leave, always_call=True)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass

    @staticmethod
    def _place(t: Tensor) -> int:
        plain = t.layout == torch.strided and t.device.type != "meta" and not is_sharded(t)
        return t.untyped_storage().data_ptr() if plain else 0

    def _kind(self, t: Tensor) -> int:
        own = (
            isinstance(t, nn.Parameter) or self._place(t) in self._weights
        )  # a tensor that FSDP gathers is a parameter too
        return _WEIGHT if own else self._kinds.get(t, 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        if not self._running:
            return result
        operands = [*tensors(args), *tensors(kwargs or {})]
        kinds = [self._kind(t) for t in operands if t.is_floating_point()]
        if name in _ATTENTION_CALLS and (name != "softmax" or operands[0].dim() >= 3):
            # A softmax over class scores has two dimensions; attention weights have heads or batches besides.
            self.calls.append((self._running[-1], name))
        made = _SCORE if _SCORE in kinds else 0
        if kinds and set(kinds) == {_WEIGHT}:
            made = _WEIGHT
        elif name in _PRODUCTS and len(kinds) > 1 and _WEIGHT not in kinds:
            if made:
                self.calls.append((self._running[-1], f"{name} on the result of a product"))
            made = 0 if made else _SCORE
        elif name == "linear":
            made = 0
        if made:
            for t in tensors(result):
                self._kinds[t] = made
        return result
