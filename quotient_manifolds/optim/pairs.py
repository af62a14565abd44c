"""Which of an optimiser's parameters form pairs, whether they still lie in their model, and can take a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..linalg import at_least_float32, column_rank_ratio, finite, in_double
from ..symmetries.lora import zero_norm
from ..symmetries.pairs import SymmetricPair
from ..symmetries.stacks import PairStack
from ..weights import is_sharded, plain_names
from .sharded import full
from .stack import Stack

#: A LoRA layer, the name of an adapter, and the scale of its pair, if it forms one.
Layer = tuple[Any, str, float | None]


def check_places(
    places: Mapping[nn.Module, dict[str, Tensor]], layers: Iterable[Layer], own: Collection[Tensor]
) -> bool:
    """Raise if parameters have left their model, where others would stay untrained, or LoRA layers are merged.

    Or if their scales are no longer those of the pairs.

    Those that were replaced in the model and in the optimiser alike, as accelerate does with FSDP2, have not; return
    whether there are any.
    """
    moved = False
    for model, named in places.items():
        inside = dict(model.named_parameters())
        new = {name: inside[name] for name, p in named.items() if p not in own and inside.get(name) in own}
        named.update(new)
        moved |= bool(new)
        present = set(inside.values())
        if gone := [name for name, p in named.items() if p not in own or p not in present]:
            more = f" and {len(gone) - 1} other parameters" if gone[1:] else ""
            raise ValueError(
                f"{gone[0]!r}{more} of the model have been replaced or deleted since this optimiser was created, by "
                "load_state_dict(assign=True), delete_adapter, merge_and_unload, fully_shard or DeepSpeed; make it anew"
            )
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
    return moved


def alone(pairs: Iterable[SymmetricPair], own: Collection[Tensor]) -> list[SymmetricPair]:
    """List what forms no pair, but has matrices among ``own``: in its module, or, where a part is frozen, in itself."""
    found = []
    for p in pairs:
        if p.group is None and p.model is not None:
            modules = {} if p.frozen else dict(p.model.named_modules())
            plain = plain_names(p.model)
            module = next((m for path, m in modules.items() if plain(path) == p.module), None)
            tensors = p.parameters() if module is None else module.parameters()
            found += [p] if any(t in own and t.dim() > 1 for t in tensors) else []
    return found


def reasons(pairs: Iterable[SymmetricPair]) -> str:
    """Join the reasons why pairs have no group, each with the first of its pairs."""
    names: dict[str, list[str]] = {}
    for p in pairs:
        names.setdefault(p.reason, []).append(p.name)
    return "; ".join(
        f"{why} ({first!r}{f' and {len(rest)} more' if rest else ''})" for why, (first, *rest) in names.items()
    )


def group_of(pair: SymmetricPair, home: Mapping[Tensor, int]) -> int | None:
    """Return the parameter group of a usable pair, given that of every parameter; None for pairs that are ignored."""
    blocks = pair.G + pair.H
    inside = {home[b.tensor] for b in blocks if b.tensor in home}
    if pair.group is None or not inside:
        return None
    missing = next((b.place for b in blocks if b.tensor not in home), "")
    kinds = {type(b.tensor).__name__ if is_sharded(b.tensor) else "" for b in blocks}
    whole = kinds in ({""}, {"DTensor"})
    wrong = {
        f": {missing} is not among the optimiser's parameters but the rest of the pair is; pass both factors": missing,
        " is a complex point (RoPE); call plain_parameters_, or use geoopt": any(b.tensor.is_complex() for b in blocks),
        " has a sharded parameter (FSDP1, ZeRO-3, or FSDP2 of a part of it); use DDP or FSDP2": not whole,
        f" is split over the parameter groups {sorted(inside)}; put both factors into one group": len(inside) > 1,
        " is on the meta device; load its weights before making an optimiser": any(b.tensor.is_meta for b in blocks),
    }
    for words, holds in wrong.items():
        if holds:
            raise ValueError(f"pair {pair.name!r}{words}")
    return inside.pop()


def orientation(pair: SymmetricPair) -> bool | None:
    """Tell whether the factors of a pair must swap roles, because H lacks full column rank and G does not.

    None for an adapter of which both factors lack full rank, but not so far that gradients could not move it.
    """
    x = PairStack([pair]).gather({p: full(p.detach()) for p in pair.parameters()})[0]
    if not finite(x):
        raise ValueError(f"pair {pair.name!r} has NaN or infinite entries; load intact weights")
    tolerance = x.shape[-1] * torch.finfo(at_least_float32(x.real.dtype)).eps
    G, H = (
        X.shape[-2] >= X.shape[-1] and bool((column_rank_ratio(in_double(X)) > tolerance).all())
        for X in x.split([pair.n, pair.m], dim=-2)
    )
    if G or H:
        return not H
    if pair.kind == "lora" and bool(x.any()):
        return None
    raise ValueError(
        f"pair {pair.name!r}: both factors lack full column rank ({pair.n} and {pair.m} rows, {x.shape[-1]} columns); "
        "initialise one of them with a full-rank matrix, lower the rank, or leave the pair out"
    )


def explain(running: Iterable[Stack], gradients: Mapping[Tensor, Tensor]) -> NoReturn:
    """Raise for a gradient that is not finite, or a pair whose anchor lacks full rank."""
    wrong = [g.shape for g in gradients.values() if not bool(full(g).isfinite().all())]  # by all processes together
    if wrong:
        models = dict.fromkeys(p.model for s in running for p in s.given if p.model is not None)
        why = next(filter(None, map(zero_norm, models)), "")
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(wrong[0])} has NaN or infinite entries; no weight was "
            f"changed; {why or 'check the loss, lower the learning rate, or train in bfloat16 or float32'}"
        )
    for s in running:
        if bool((unsound := ~s.sound()).any()):
            raise ValueError(
                f"pair {s.name(unsound)!r}: its {'first' if s.flipped else 'second'} factor has lost full rank since "
                "the optimiser was made; no weight was changed; make a new optimiser for these weights"
            )
    raise ValueError(
        "the sum of a gradient's squares is beyond the range of its dtype, or another process says what is wrong; no "
        "weight was changed"
    )
