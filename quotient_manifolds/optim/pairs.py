"""Which of an optimiser's parameters form pairs, and whether they still lie in their model."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from ..linalg import at_least_float32, column_rank_ratio
from ..symmetries.lora import lora_layers
from ..symmetries.modules import is_sharded, plain_names
from ..symmetries.pairs import SymmetricPair
from .metric import wide

#: What has become of parameters that are not where they were.
GONE = (
    "have been replaced or deleted since this optimiser was created (load_state_dict(assign=True), delete_adapter, "
    "merge_and_unload, or FSDP2 and DeepSpeed, whose shards have no geometry of their own); create it anew, or use DDP"
)


class Places:
    """Where a model holds the parameters of an optimiser: whoever replaces them later leaves the new ones untrained."""

    def __init__(self, model: nn.Module, own: Collection[Tensor]) -> None:
        self.model = model
        self._adapters = [[layer, name, layer.scaling[name]] for layer, name, B in lora_layers(model) if B in own]
        self._named = {name: p for name, p in model.named_parameters() if p in own}

    def warn_of_strangers(self) -> None:
        """Warn of a gradient, where the optimiser's parameters have none."""
        name = next((name for name, p in self.model.named_parameters() if p.grad is not None), None)
        if name is not None:
            warnings.warn(
                f"no parameter of this optimiser has a gradient, but {name!r}, which is none of them, has one: an "
                "adapter that is added later joins by add_param_group",
                stacklevel=4,
            )

    def check(self, own: Collection[Tensor]) -> None:
        """Raise if parameters have left the model or are merged into others; warn of a scale that has changed."""
        inside = set(self.model.parameters())
        gone = [name for name, p in self._named.items() if p not in own or p not in inside]
        if gone:
            more = f" and {len(gone) - 1} other parameters" if gone[1:] else ""
            raise ValueError(f"{gone[0]!r}{more} of the model {GONE}")
        for adapter in self._adapters:
            layer, name, scale = adapter
            if layer.merged_adapters:
                raise ValueError(
                    f"adapter {layer.merged_adapters[0]!r} is merged into the base weights, which a step of its "
                    "factors does not reach; call unmerge_adapter() first"
                )
            if layer.scaling[name] != scale:
                warnings.warn(
                    f"the scale of adapter {name!r} was {scale:g} when this optimiser was created and is "
                    f"{layer.scaling[name]:g} now: its steps are as long as for the former; create it anew",
                    stacklevel=4,
                )
                adapter[2] = layer.scaling[name]


def alone(pairs: Iterable[SymmetricPair], own: Collection[Tensor]) -> list[SymmetricPair]:
    """List what forms no pair, but has matrices among ``own`` in its module."""
    found = [(p.model, p) for p in pairs if p.group is None and not p.frozen and p.model is not None]
    modules: dict[tuple[nn.Module, str], nn.Module] = {}
    for model in {model for model, _ in found}:
        plain = plain_names(model)
        modules.update(((model, plain(path)), m) for path, m in model.named_modules())
    return [p for model, p in found if any(q in own and q.dim() > 1 for q in modules[model, p.module].parameters())]


def reasons(pairs: Iterable[SymmetricPair]) -> str:
    """Join the reasons why pairs have no group, each with the first of its pairs."""
    names: dict[str, list[str]] = {}
    for p in pairs:
        names.setdefault(p.reason, []).append(p.name)
    return "; ".join(
        f"{why} ({first!r}{f' and {len(rest)} more' if rest else ''})" for why, (first, *rest) in names.items()
    )


def group_of(pair: SymmetricPair, home: Mapping[Tensor, int], paired: Collection[Tensor]) -> int | None:
    """Return the parameter group of a usable pair; None for pairs that are to be ignored.

    ``home`` maps every parameter to its group, ``paired`` holds the parameters of all usable pairs.
    """
    blocks = pair.G + pair.H
    inside = {home[b.tensor] for b in blocks if b.tensor in home}
    if pair.group is None or not inside:
        if pair.frozen and any(b.tensor in home and b.tensor not in paired for b in blocks):
            raise ValueError(
                f"pair {pair.name!r} is half frozen ({pair.reason}), but the quotient needs both factors to move; "
                "unfreeze it, or train the other half with torch.optim.AdamW"
            )
        return None
    for b in blocks:
        if b.tensor not in home:
            raise ValueError(
                f"pair {pair.name!r}: {b.place} is not among the optimiser's parameters but the rest of the pair is; "
                "pass both factors"
            )
        if b.tensor.is_complex():
            raise ValueError(
                f"pair {pair.name!r} is a complex point (RoPE), but this optimiser trains real weights; call "
                "plain_parameters_ before, or train the points by geoopt's optimisers"
            )
        if is_sharded(b.tensor):
            raise ValueError(
                f"pair {pair.name!r} has a sharded parameter ({type(b.tensor).__name__}; FSDP, DTensor or ZeRO-3), but "
                "its geometry needs whole factors; use DDP, or keep these modules out of the sharding"
            )
    if len(inside) > 1:
        raise ValueError(
            f"pair {pair.name!r} is split over the parameter groups {sorted(inside)}; put both of its factors into one "
            "group, because they move together"
        )
    return inside.pop()


def orientation(pair: SymmetricPair) -> bool | None:
    """Tell whether the factors of a pair must swap roles, because H lacks full column rank and G does not.

    None for an adapter of which both factors lack full rank, but not so far that gradients could not move it.
    """
    if any(b.tensor.is_meta for b in pair.G + pair.H):
        raise ValueError(f"pair {pair.name!r} is on the meta device; load its weights before making an optimiser")
    x = pair.gather().detach()
    tolerance = x.shape[-1] * torch.finfo(at_least_float32(x.real.dtype)).eps
    full = [
        X.shape[-2] >= X.shape[-1] and bool((column_rank_ratio(wide(X)) > tolerance).all())
        for X in x.split([pair.n, pair.m], dim=-2)
    ]
    if any(full):
        return not full[1]
    if pair.kind == "lora" and bool(x.any()):
        return None
    raise ValueError(
        f"pair {pair.name!r}: both factors lack full column rank ({pair.n} and {pair.m} rows, {x.shape[-1]} columns), "
        "where the quotient has no metric; initialise one of them with a full-rank matrix, lower the rank, or leave "
        "the pair out"
    )
