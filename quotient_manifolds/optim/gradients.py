"""The gradients of an optimiser's parameters, prepared for a step."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..linalg import at_least_float32

__all__ = ["all_finite", "collect_gradients"]


def collect_gradients(param_groups: Iterable[Mapping[str, Any]], scale: Tensor | None) -> dict[Tensor, Tensor]:
    """Return the gradients to descend along, without the scale of a ``GradScaler``."""
    found = {}
    for group in param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which is not supported; build "
                    "the embedding with sparse=False"
                )
            # In float32: the scale is beyond the range of half precision, and so are the gradients that it saved.
            g = p.grad if scale is None else p.grad.to(at_least_float32(p.dtype)) / scale.to(p.grad.device)
            found[p] = -g if group.get("maximize", False) else g
    return found


def all_finite(gradients: Mapping[Tensor, Tensor], found_inf: Tensor | None) -> bool | Tensor:
    """Tell whether all gradients are finite; if not, warn under a ``GradScaler`` (given ``found_inf``), else raise.

    On devices other than the CPU the answer is a tensor that the host does not read, because reading would make it
    wait.
    """
    whole = _sums_are_finite(gradients.values()) if found_inf is None else found_inf == 0
    if whole.device.type != "cpu":
        return whole
    if bool(whole):
        return True
    if found_inf is not None:
        warnings.warn("NaN or infinite gradients: this step is skipped", RuntimeWarning, stacklevel=4)
        return False
    for p, g in gradients.items():
        if not bool(g.isfinite().all()):
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(p.shape)} has NaN or infinite entries; no weight was "
                "changed; check the loss, lower the learning rate, or train in bfloat16 or float32"
            )
    return True


def _sums_are_finite(gradients: Collection[Tensor]) -> Tensor:
    """Tell whether all entries are finite, from their sums, which are finite only if all terms are.

    The sums are taken at least in float32, where those of finite half-precision gradients do not overflow.
    """
    device = next(iter(gradients)).device
    sums = [g.sum(dtype=at_least_float32(g.dtype)).to(device) for g in gradients]
    return torch.stack([v.isfinite() for v in sums]).all()
