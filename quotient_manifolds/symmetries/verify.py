"""Hold what the adapters say against what the model does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from .pairs import stacks
from .registry import adapter_of, find

__all__ = ["UnknownAttentionError", "act_randomly_", "check_coverage"]

#: Functions whose call makes a module an attention layer, if no adapter covers it.
_ATTENTION_CALLS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "softmax",
}


class UnknownAttentionError(ValueError):
    """A module computes attention, but no adapter knows which symmetries its weights have.

    Attributes
    ----------
    path : str
        The module's name in the model.
    cls : type
        Its class.
    """

    def __init__(self, path: str, cls: type, call: str) -> None:
        self.path, self.cls = path, cls
        super().__init__(
            f"module {path!r} of class {cls.__module__}.{cls.__qualname__} computes attention (it calls {call}), but "
            "no adapter knows the symmetries of this class; write one with quotient_manifolds.symmetries.register, "
            'or use measure="adaptive", which needs none'
        )


class _Watch(TorchFunctionMode):
    """Notes which module was running when an attention function was called."""

    def __init__(self, calls: list[tuple[nn.Module, str]], running: list[nn.Module]) -> None:
        super().__init__()
        self._calls, self._running = calls, running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ATTENTION_CALLS and self._running:
            # A softmax over class scores has two dimensions; attention weights have heads or batches besides.
            first = args[0] if args else (kwargs or {}).get("input")
            if name != "softmax" or (isinstance(first, torch.Tensor) and first.dim() >= 3):
                self._calls.append((self._running[-1], name))
        return func(*args, **(kwargs or {}))


@contextmanager
def _watching() -> Iterator[list[tuple[nn.Module, str]]]:
    calls: list[tuple[nn.Module, str]] = []
    running: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        while running and running.pop() is not module:
            pass

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with _Watch(calls, running):
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def check_coverage(model: nn.Module, run: Callable[[], Any]) -> Any:
    """Run a forward pass and refuse attention that no adapter covers.

    Parameters
    ----------
    model : nn.Module
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
        scaled-dot-product attention or torch's own multi-head attention.
    """
    with _watching() as calls:
        result = run()
    names: dict[nn.Module, str] = {}
    covered: set[nn.Module] = set()
    for name, module in model.named_modules():
        names[module] = name
        if adapter_of(module) is not None:
            covered.update(module.modules())
    for module, call in calls:
        if module not in covered:
            path = names.get(module, "(outside the model)")
            raise UnknownAttentionError(path or "(the model itself)", type(module), call)
    return result


@torch.no_grad()
def act_randomly_(model: nn.Module, condition: float = 10.0, seed: int = 0) -> int:
    """Move every symmetric pair of a model along its orbit by a random group element: the function stays the same.

    The move is computed in float64 and rounded to the weights' precision, so the outputs change by rounding, which
    grows with the condition number.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    condition : float
        Condition number of every group element, ≥ 1.
    seed : int

    Returns
    -------
    int
        Number of pairs moved.
    """
    if condition < 1:
        raise ValueError(f"a condition number is at least 1, got {condition}")
    generator = torch.Generator().manual_seed(seed)
    moved = 0
    for s in stacks(find(model)):
        x = s.gather()
        wide = torch.complex128 if x.is_complex() else torch.float64
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-1])
        A = _random_elements(shape, condition, wide, generator).to(x.device)
        s.scatter_(s.manifold().act(x.to(wide), A))
        moved += len(s)
    return moved


def _random_elements(
    shape: tuple[int, ...], condition: float, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Draw U diag(s) Vᴴ with random orthogonal U, V and log-uniform s from condition^-½ to condition^½."""
    draws = [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(2)]
    U, V = (torch.linalg.qr(d).Q for d in draws)
    exponent = torch.rand(shape[:-1], dtype=torch.float64, generator=generator) - 0.5
    if shape[-1] > 1:
        exponent[..., 0], exponent[..., -1] = -0.5, 0.5
    return (U * (condition**exponent).unsqueeze(-2)) @ V.mH
