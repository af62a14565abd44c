"""float64 throughout: run models that compute in single precision inside without its rounding errors."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..batches import tree_map

__all__ = ["Wide", "widened"]

_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def widened(batch: Any) -> Any:
    """Copy a batch, with every floating-point tensor in float64; autograd may keep copies of inference tensors."""
    return tree_map(lambda t: t.detach().to(torch.float64 if t.is_floating_point() else t.dtype, copy=True), batch)


class Wide(TorchFunctionMode):
    """Turn every cast to a narrower floating-point type into one to float64: ``with Wide(): model(batch)``."""

    def __enter__(self) -> Wide:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        args = tuple(_wide(a) for a in args)
        return func(*args, **{k: _wide(a) for k, a in (kwargs or {}).items()})


def _wide(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in _NARROW else argument
