"""What an optimiser is given: named parameters and options, checked at every step, and where the parameters lie.

Here they lie whole, in this process; :mod:`.sharded` has those that FSDP2 shards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg import at_least_float32
from ..weights import is_sharded, weights_of
from .metric import wide
from .stack import Stack

#: Tensors by the names of parameters.
Tensors = Mapping[str, Tensor]
#: A LoRA layer, the name of an adapter, and the scale of its pair, if it forms one.
Layer = tuple[Any, str, float | None]
REPLACED = (
    "have been replaced or deleted since this optimiser was created, by load_state_dict(assign=True), delete_adapter, "
    "merge_and_unload, fully_shard or DeepSpeed; make it anew"
)

#: Options: from where, below which number, and in words.
_OPTIONS = {
    "lr": (0, 1e30, "a number of at least 0"),
    "weight_decay": (0, 1e30, "a number of at least 0"),
    "betas": (0, 1, "two numbers in [0, 1)"),
    "eps": (5e-324, math.inf, "positive (a factor without a gradient is divided by it)"),
    "momentum": (0, 1, "a number in [0, 1)"),
    "max_grad_norm": (5e-324, math.inf, "positive (None turns clipping off)"),
}


def named(group: Mapping[str, Any], model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """Return the parameters of a group with their names: those in the model, if it is known, or those given."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if "param_names" in group:
        params = list(zip(group["param_names"], params, strict=True))
    known: dict[Any, str] = {} if model is None else {p: name for name, p in weights_of(model).items()}
    given = (p if isinstance(p, tuple) else ("", p) for p in params)
    found: list[tuple[str, Tensor]] = [(str(known.get(p, name)), p) for name, p in given]
    if not all(name for name, _ in found):
        raise ValueError(
            "parameters have no names, by which symmetries know them; pass model.named_parameters(), or, for groups "
            "that a Trainer makes, within=model"
        )
    return found


def check_options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for an option of a parameter group that is out of range; a number may be a tensor of one element."""
    for name in [name for name in _OPTIONS if name in group and (name, group[name]) != ("max_grad_norm", None)]:
        least, below, words = _OPTIONS[name]
        value, count = group[name], 2 if name == "betas" else 1
        values = value if name == "betas" and isinstance(value, tuple | list) else [value]
        numbers = [v for v in values if isinstance(v, Real) or (isinstance(v, Tensor) and v.numel() == 1)]
        valid = [v for v in numbers if not isinstance(v, bool) and least <= float(v) < below]
        if len(values) != count or len(valid) != count:
            raise ValueError(f"{name} must be {words}, got {value!r}")
    if group.get("max_grad_norm") != defaults.get("max_grad_norm"):
        raise ValueError("max_grad_norm clips all groups together; pass it to the optimiser, not to a group")


def by_name(groups: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the parameters of groups as they are now, by their names."""
    parts = [(group["param_names"], group["params"]) for group in groups]
    if any(len(names) != len(params) for names, params in parts):
        raise ValueError(f"a group has not as many names as parameters: some {REPLACED}")
    found = [named for part in parts for named in zip(*part, strict=True)]
    if len(weights := dict(found)) < len(found):
        name = Counter(name for name, _ in found).most_common(1)[0][0]
        raise ValueError(
            f"two parameters are called {name!r}; put several models into one module, such as nn.ModuleList, and "
            "take names and symmetries of that"
        )
    return weights


def check_places(model: nn.Module, layers: Iterable[Layer], weights: Mapping[str, Tensor]) -> None:
    """Raise if weights have left their model, where others would stay untrained, or LoRA layers are merged.

    Or if their scales are no longer those of the pairs.
    """
    present = set(model.parameters())
    if gone := [name for name, p in weights.items() if p not in present]:
        more = f" and {len(gone) - 1} other parameters" if gone[1:] else ""
        raise ValueError(f"{gone[0]!r}{more} of the model {REPLACED}")
    for layer, name, scale in layers:
        if merged := layer.merged_adapters:
            raise ValueError(
                f"adapter {merged[0]!r} is merged into the base weights; call unmerge_adapter() before a step"
            )
        if scale is not None and (now := float(layer.scaling.get(name, scale))) != scale:
            raise ValueError(
                f"adapter {name!r} has the scale {now:g}, but its pair has {scale:g}: hotswap_adapter or set_scale has "
                "changed it; find pairs and make the optimiser anew"
            )


def full(t: Any) -> Tensor:
    """Return a tensor that is sharded as a whole one, which all processes must ask for, and others as they are."""
    found: Tensor = t.full_tensor() if is_sharded(t) else t
    return found


def cut(p: Any, whole: Tensor) -> Any:
    """Shard a tensor that all processes have as a parameter of its shape is, if it is."""
    if not is_sharded(p):
        return whole
    from torch.distributed.tensor import DTensor  # which takes long to load

    return DTensor.from_local(whole, p.device_mesh).redistribute(placements=p.placements)


class Store:
    """Pairs whose weights lie whole in this process, which is the first of those that step them."""

    rank = 0

    def lent(self, weights: Tensors) -> AbstractContextManager[tuple[Tensors, Tensors, Tensors]]:
        """Lend all gradients; and weights and gradients, of which those of this process's pairs are whole."""
        gradients = {name: p.grad for name, p in weights.items() if p.grad is not None}
        return nullcontext((gradients, weights, gradients))

    def total(self, numbers: Iterable[Tensor], gradients: Iterable[Tensor], *, squares: bool = False) -> Tensor:
        """Sum numbers, and all entries of gradients in every copy, or the squares of each once, in all processes."""
        found = [
            torch.linalg.vector_norm(wide(g)).square() if squares else g.sum(dtype=at_least_float32(g.dtype))
            for g in map(full, gradients)
        ] + [*numbers]
        return torch.cat([n.to(found[0].device).flatten() for n in found]).sum()

    def whole_state(self, s: Stack) -> dict[str, Tensor]:
        """Return the state of all pairs of a stack, from all processes."""
        return s.state
