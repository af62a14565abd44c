"""The gradients of an optimiser's parameters, prepared for a step."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..linalg import at_least_float32
from .buckets import PairStep
from .preconditioner import wide

__all__ = ["all_finite", "clip_factor", "collect_gradients", "warn_of_size"]


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


def clip_factor(
    bound: float,
    steps: Iterable[PairStep],
    gradients: Mapping[Tensor, Tensor],
    covered: Mapping[Tensor, Tensor],
    rests: Mapping[Tensor, Tensor],
) -> Tensor:
    """Return the factor that scales the gradient's norm, in the metric for pairs, to a bound."""
    squares = [s.squared_norm() for s in steps]
    for p, g in gradients.items():
        if p in rests or p not in covered:
            g = g.masked_fill(covered[p].to(g.device), 0) if p in rests else g
            squares.append(torch.linalg.vector_norm(wide(g)).square())
    if not squares:  # no pair takes its step
        return torch.ones(())
    norm = torch.stack([v.to(squares[0].device) for v in squares]).sum().sqrt()
    return (bound / (norm + 1e-12)).clamp_max(1.0)


def warn_of_size(name: str) -> None:
    """Warn of a pair that has no good gauge."""
    warnings.warn(
        f"pair {name!r}: its product is too large for the dtype of its factors; steps of all pairs of this shape are "
        "not taken until that changes; lower the learning rate, or make the factors smaller",
        RuntimeWarning,
        stacklevel=5,
    )


def _sums_are_finite(gradients: Collection[Tensor]) -> Tensor:
    """Tell whether all entries are finite, from their sums, which are finite only if all terms are.

    The sums are taken at least in float32, where those of finite half-precision gradients do not overflow.
    """
    device = next(iter(gradients)).device
    sums = [g.sum(dtype=at_least_float32(g.dtype)).to(device) for g in gradients]
    return torch.stack([v.isfinite() for v in sums]).all()
