"""Attention in a forward pass that no handler covers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from .registry import handler_of

__all__ = ["UnknownAttentionError", "check_coverage"]

#: Functions whose call makes a module an attention layer, if no handler covers it.
_ATTENTION_CALLS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "softmax",
}


class UnknownAttentionError(ValueError):
    """A module computes attention, but no handler knows which symmetries its weights have.

    Attributes
    ----------
    path : str
        The module's name in the model.
    cls : type
        Its class.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import UnknownAttentionError, check_coverage
    >>> class SelfSimilarity(torch.nn.Module):
    ...     def forward(self, x):
    ...         return (x @ x.mT).softmax(-1) @ x
    >>> model = torch.nn.Sequential(SelfSimilarity())
    >>> try:
    ...     check_coverage(model, lambda: model(torch.ones(1, 3, 4)))
    ... except UnknownAttentionError as error:
    ...     print(error.path, error.cls.__name__)
    0 SelfSimilarity
    """

    def __init__(self, path: str, cls: type, call: str) -> None:
        self.path, self.cls = path, cls
        super().__init__(
            f"module {path!r} of class {cls.__module__}.{cls.__qualname__} computes attention (it calls {call}), but "
            "no handler knows the symmetries of this class; write one with "
            "quotient_manifolds.symmetries.register_attention, count its weights without symmetry by "
            'quotient_manifolds.symmetries.skip(cls), or use measure="adaptive", which needs none'
        )


class _Watch(TorchFunctionMode):
    """Notes which module was running when an attention function was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[nn.Module, str]] = []
        self._running: list[nn.Module] = []

    def __enter__(self) -> _Watch:
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ATTENTION_CALLS and self._running:
            # A softmax over class scores has two dimensions; attention weights have heads or batches besides.
            first = args[0] if args else (kwargs or {}).get("input")
            if name != "softmax" or (isinstance(first, torch.Tensor) and first.dim() >= 3):
                self.calls.append((self._running[-1], name))
        return func(*args, **(kwargs or {}))


def check_coverage(model: nn.Module, run: Callable[[], Any]) -> Any:
    """Run a forward pass and refuse attention that no handler covers.

    Parameters
    ----------
    model : nn.Module
        A compiled one is watched as the eager one that it was compiled from.
    run : callable
        Performs one forward pass of the model.

    Returns
    -------
    object
        What ``run`` returns.

    Raises
    ------
    UnknownAttentionError
        A module that is neither registered nor inside a registered one calls softmax (on three or more dimensions),
        scaled-dot-product attention or torch's own multi-head attention; or TorchScript code, which cannot be watched.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import check_coverage
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> check_coverage(layer, lambda: layer(torch.ones(1, 3, 8))).shape
    torch.Size([1, 3, 8])
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnknownAttentionError(name, type(module), "TorchScript code, which cannot be watched")
    with torch.compiler.set_stance("force_eager"), _Watch() as watch:
        result = run()
    names = {module: name for name, module in model.named_modules()}
    covered = {inner for module in names if handler_of(module) is not None for inner in module.modules()}
    for module, call in watch.calls:
        if module not in covered:
            path = names.get(module, "(outside the model)") or "(the model itself)"
            raise UnknownAttentionError(path, type(module), call)
    return result
