"""AdamW for parameters outside pairs: classifiers, biases, DoRA's magnitudes, adapters that form no pair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ..symmetries import SymmetricPair
from ..symmetries.modules import plain_names
from .buckets import is_flipped

__all__ = ["adamw_", "alone", "check_options", "is_number", "orientation", "reasons"]


def is_number(value: Any) -> bool:
    """Tell whether a value is a number, or a tensor with one number."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def check_options(group: Mapping[str, Any]) -> None:
    """Raise for an option of a parameter group that is out of range."""
    for name in ("lr", "weight_decay"):
        if not (is_number(group[name]) and 0 <= float(group[name]) < 1e30):
            raise ValueError(f"{name} must be a number of at least 0, got {group[name]!r}")
    if not isinstance(group.get("maximize", False), bool):
        raise ValueError(f"maximize must be True or False, got {group['maximize']!r}")
    if group.keys() >= {"betas", "eps"}:
        _check_adam_options(group)
    if group.keys() >= {"momentum", "nesterov"}:
        _check_momentum(group)


def _check_adam_options(group: Mapping[str, Any]) -> None:
    """Raise for ``betas`` or ``eps`` out of range."""
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    if not (is_number(group["eps"]) and 0 < group["eps"] < math.inf):
        raise ValueError(f"eps must be positive, got {group['eps']!r}: a factor without a gradient is divided by it")


def _check_momentum(group: Mapping[str, Any]) -> None:
    """Raise for ``momentum`` or ``nesterov`` out of range."""
    if not (is_number(group["momentum"]) and 0 <= group["momentum"] < 1):
        raise ValueError(f"momentum must be a number in [0, 1), got {group['momentum']!r}")
    if not isinstance(group["nesterov"], bool):
        raise ValueError(f"nesterov must be True or False, got {group['nesterov']!r}")
    if group["nesterov"] and not group["momentum"]:
        raise ValueError("nesterov needs a momentum above 0")


def adamw_(
    state: MutableMapping[Tensor, Any], group: Mapping[str, Any], params: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """Update parameters by torch's AdamW, with its state."""
    for p in params:
        own = state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in own:
                own[name] = torch.zeros_like(p)
        if "step" not in own:
            own["step"] = torch.zeros((), dtype=torch.float32)
    states = [state[p] for p in params]
    adamw(
        list(params),
        list(gradients),
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [],
        [s["step"] for s in states],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        foreach=group["foreach"],
        has_complex=any(p.is_complex() for p in params),
        maximize=False,  # the sign of the gradients is set already
    )


def alone(pairs: Iterable[SymmetricPair], own: AbstractSet[Tensor]) -> list[SymmetricPair]:
    """List what forms no pair, but has parameters among ``own``: in its blocks, or else matrices in its module."""
    modules: dict[nn.Module, dict[str, nn.Module]] = {}

    def parameters(p: SymmetricPair) -> set[Tensor]:
        if p.G:  # a parametrised weight is computed from other parameters of its module
            tensors = ((b.tensor, b.module) for b in p.G + p.H)
            return {q for t, m in tensors for q in ([t] if isinstance(t, nn.Parameter) else m.parameters())}
        if p.model is None:
            return set()
        if p.model not in modules:
            plain = plain_names(p.model)
            modules[p.model] = {plain(path): m for path, m in p.model.named_modules()}
        return {q for q in modules[p.model][p.module].parameters() if q.dim() > 1}

    return [p for p in pairs if p.group is None and not p.frozen and parameters(p) & own]


def orientation(pair: SymmetricPair) -> bool | None:
    """Tell whether the factors of a pair must swap roles; None for an adapter of lower rank that gradients can move."""
    if any(b.tensor.is_meta for b in pair.G + pair.H):
        raise ValueError(f"pair {pair.name!r} is on the meta device; load its weights before making an optimiser")
    try:
        return is_flipped(pair)
    except ValueError:
        if pair.kind == "lora" and bool(pair.gather().any()):
            return None
        raise


def reasons(pairs: Iterable[SymmetricPair]) -> str:
    """Join the reasons why pairs have no group, each with the first of its pairs."""
    names: dict[str, list[str]] = {}
    for p in pairs:
        names.setdefault(p.reason, []).append(p.name)
    return "; ".join(
        f"{why} ({first!r}{f' and {len(rest)} more' if rest else ''})" for why, (first, *rest) in names.items()
    )
