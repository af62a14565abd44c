"""Checks of what users hand to manifolds: each raises one sentence that names the shape and the fix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .linalg import as_count, finite

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_tensors(who: object, **arguments: Any) -> None:
    """Raise for an argument that is not a tensor, has no numbers, or is of another dtype or device than the first."""
    for name, value in arguments.items():
        first_name, first = next(iter(arguments.items()))
        if not isinstance(value, Tensor):
            raise TypeError(f"{who}: {name} must be a tensor, got {type(value).__name__}")
        if value.is_meta:
            raise ValueError(f"{who}: {name} is on the device meta, without numbers; load them first")
        for what in ("dtype", "device"):
            if getattr(value, what) != getattr(first, what):
                raise ValueError(
                    f"{who}: {first_name} of shape {tuple(first.shape)} has {what} {getattr(first, what)} but {name} "
                    f"of shape {tuple(value.shape)} has {what} {getattr(value, what)}; move one of them with .to()"
                )


def as_shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Accept a shape as one tuple or as separate numbers, as torch does."""
    size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], tuple | list) else size
    return tuple(as_count("a size", s, least=0) for s in size)


def check_dtype(who: object, x: Tensor, allow_complex: bool = True) -> None:
    """Raise for a dtype without linear algebra."""
    allowed = _DTYPES if allow_complex else _DTYPES[:2]
    if x.dtype not in allowed:
        raise ValueError(
            f"{who}: a point of shape {tuple(x.shape)} has dtype {x.dtype}, which has no linear algebra here; convert "
            f"it to one of {', '.join(map(str, allowed))}"
        )


def check_vector(who: object, x: Tensor, u: Tensor, name: str = "u") -> None:
    """Raise for a vector that does not fit a point."""
    tensors = isinstance(x, Tensor) and isinstance(u, Tensor)
    if not tensors or x.is_meta or u.is_meta or u.dtype != x.dtype or u.device != x.device:
        check_tensors(who, x=x, **{name: u})
    if u.shape[-2:] != x.shape[-2:]:
        raise ValueError(
            f"{who}: the vector {name} of shape {tuple(u.shape)} does not fit the point x of shape "
            f"{tuple(x.shape)}; their last two dimensions must agree"
        )


def check_finite(who: object, u: Tensor, name: str = "u") -> None:
    """Raise for a vector that is not finite."""
    if not finite(u):
        raise ValueError(
            f"{who}: the vector {name} of shape {tuple(u.shape)} has NaN or infinite entries; if it is a "
            "gradient, check the loss, or lower the learning rate"
        )
