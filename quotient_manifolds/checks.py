"""Checks of the arguments of manifolds: one sentence that names the shape and the fix."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from .linalg import finite

__all__ = ["as_count", "as_shape", "check_dtype", "check_finite", "check_same", "check_tensors", "check_vector"]

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_tensors(who: object, **arguments: Any) -> None:
    """Raise for an argument that is not a tensor, or has no numbers."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{who}: {name} must be a tensor, got {type(value).__name__}")
        if value.is_meta:
            raise ValueError(f"{who}: {name} is on the device meta, without numbers; load them first")


def as_count(name: str, value: Any, who: str = "", *, least: int = 1, most: float = math.inf) -> int:
    """Check a whole number, of Python or numpy, from ``least`` to below ``most``."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number < most:
        where = f"{who}: " if who else ""
        raise ValueError(f"{where}{name} must be a whole number of at least {least}, got {value!r}")
    return number


def as_shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Accept a shape as one tuple or as separate numbers, as torch does."""
    size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    try:
        return tuple(as_count("a size", s, least=0) for s in size)
    except ValueError as error:
        raise TypeError(f"a size must be one or several whole numbers, got {size!r}") from error


def check_dtype(who: object, x: Tensor, allow_complex: bool = True) -> None:
    """Raise for a dtype without linear algebra."""
    allowed = _DTYPES if allow_complex else _DTYPES[:2]
    if x.dtype not in allowed:
        name, *names = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, *allowed))
        raise ValueError(
            f"{who}: a point of shape {tuple(x.shape)} has dtype {name}, which has no linear algebra here; convert it "
            f"to one of {', '.join(names)}"
        )


def check_same(who: object, x: Tensor, u: Tensor, x_name: str, u_name: str) -> None:
    """Raise for tensors of different dtype or device."""
    for what in ("dtype", "device"):
        a, b = getattr(x, what), getattr(u, what)
        if a != b:
            raise ValueError(
                f"{who}: {x_name} of shape {tuple(x.shape)} has {what} {a} but {u_name} of shape "
                f"{tuple(u.shape)} has {what} {b}; move one of them with .to()"
            )


def check_vector(who: object, x: Tensor, u: Tensor, name: str = "u") -> None:
    """Raise for a vector that does not fit a point."""
    if not (isinstance(x, Tensor) and isinstance(u, Tensor)) or x.is_meta or u.is_meta:
        check_tensors(who, x=x, **{name: u})
    if u.shape[-2:] != x.shape[-2:]:
        raise ValueError(
            f"{who}: the vector {name} of shape {tuple(u.shape)} does not fit the point x of shape "
            f"{tuple(x.shape)}; their last two dimensions must agree"
        )
    if u.dtype != x.dtype or u.device != x.device:
        check_same(who, x, u, "the point x", f"the vector {name}")


def check_finite(who: object, u: Tensor, name: str = "u") -> None:
    """Raise for a vector that is not finite."""
    if not finite(u):
        raise ValueError(
            f"{who}: the vector {name} of shape {tuple(u.shape)} has NaN or infinite entries; if it is a "
            "gradient, check the loss, or lower the learning rate"
        )
