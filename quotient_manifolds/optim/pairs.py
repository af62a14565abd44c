"""Which of an optimiser's parameters form pairs, and what is said of those that cannot take a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..linalg import at_least_float32, column_rank_ratio, finite, in_double
from ..symmetries.certificate import Certificate
from ..symmetries.found import Symmetries
from ..symmetries.lora import zero_norm
from ..symmetries.pairs import SymmetricPair
from ..symmetries.refusals import Cause, NotASymmetryError, Refusal, refused
from ..symmetries.slots import Slot
from ..weights import is_sharded
from .parameters import full
from .stack import Stack


def alone(left: Iterable[Refusal], own: Mapping[str, Tensor]) -> list[Refusal]:
    """List what forms no pair, but has matrices among ``own``: in its module, or, where a part is frozen, in itself."""
    matrices, found = {name for name, p in own.items() if p.dim() > 1}, list[Refusal]()
    for p in left:
        path = f"{p.module}." if p.module else ""
        inside = p.cause is not Cause.FROZEN and any(name.startswith(path) for name in matrices)
        found += [p] if inside or not matrices.isdisjoint(p.names) else []
    return found


def reasons(left: Iterable[Refusal]) -> str:
    """Join the reasons why there are no pairs, each with the first of its places."""
    alike: dict[object, list[Refusal]] = {}
    for p in left:
        alike.setdefault(p.cause if p.cause in (Cause.FROZEN, Cause.COMPUTED) else p.reason, []).append(p)
    return "; ".join(
        f"{first.reason} ({first.name!r}{f' and {len(rest)} more' if rest else ''})" for first, *rest in alike.values()
    )


class Choice(NamedTuple):
    """What becomes of symmetries: pairs, by what those of one stack share; what is left; adapters without some columns.

    Pairs of one stack share their parameter group, whether their factors have swapped roles, their scale, their place
    in the model, and whether they are sharded. Adapters take turns, so those that are switched off stay out of the
    others' stacks.
    """

    alike: dict[tuple[int, bool, float, str, bool], list[SymmetricPair]]
    left: list[Refusal]
    dead: list[str]


def chosen(
    found: Symmetries, taken: Mapping[Slot, str], groups: Iterable[Mapping[str, Any]], weights: Mapping[str, Tensor]
) -> Choice:
    """Choose the pairs that an optimiser steps, beside those whose slots are ``taken``, by their names."""
    home = {name: i for i, group in enumerate(groups) for name in group["param_names"]}
    choice, taken = Choice({}, list(found.refused), []), dict(taken)
    for whole in (p for p in found.pairs if taken.keys().isdisjoint(p.slots)):
        group, pair = group_of(whole, home, weights), live(whole, weights)
        if not taken.keys().isdisjoint(pair.slots):
            continue
        if pair != whole:
            choice.dead.append(pair.name)
        if (flipped := orientation(pair, weights)) is None:
            choice.left.append(refused(pair, Cause.DEFICIENT, f"a rank below {pair.group.h}"))
            continue
        if pair.name in taken.values():
            raise ValueError(f"two pairs are called {pair.name!r}; give each of yours another name")
        taken.update(dict.fromkeys(pair.slots, pair.name))
        sharded = is_sharded(weights[pair.G[0].name])
        choice.alike.setdefault((group, flipped, pair.scale, pair.part, sharded), []).append(pair)
    return choice


def group_of(pair: SymmetricPair, home: Mapping[str, int], weights: Mapping[str, Tensor]) -> int:
    """Return the parameter group of a pair, given that of every parameter; raise if there it takes no step."""
    inside, own = {home[name] for name in pair.names}, [weights[name] for name in pair.names]
    kinds = {type(p).__name__ if is_sharded(p) else "" for p in own}
    wrong = {
        " is a complex point (RoPE); call plain_parameters_, or use geoopt": any(p.is_complex() for p in own),
        " has a sharded parameter (FSDP1, ZeRO-3, or FSDP2 of a part of it); use DDP or FSDP2": kinds
        not in ({""}, {"DTensor"}),
        f" is split over the parameter groups {sorted(inside)}; put both factors into one group": len(inside) > 1,
        " is on the meta device; load its weights before making an optimiser": any(p.is_meta for p in own),
    }
    for words, holds in wrong.items():
        if holds:
            raise ValueError(f"pair {pair.name!r}{words}")
    return inside.pop()


def live(pair: SymmetricPair, weights: Mapping[str, Tensor]) -> SymmetricPair:
    """Return an adapter's pair without first and last columns in which both factors are 0, which get no gradient."""
    if pair.kind != "lora":
        return pair
    some = pair.gather({name: full(weights[name].detach()) for name in pair.names}).any(-2).nonzero().flatten().tolist()
    start, h = (some[0], some[-1] + 1 - some[0]) if some else (0, pair.group.h)
    if h == pair.group.h:
        return pair
    G, H = (tuple(slot.part(start, h) for slot in slots) for slots in (pair.G, pair.H))
    return replace(pair, group=replace(pair.group, h=h), G=G, H=H)


def orientation(pair: SymmetricPair, weights: Mapping[str, Tensor]) -> bool | None:
    """Tell whether the factors of a pair must swap roles, because H lacks full column rank and G does not.

    None where both lack it: an adapter, but not so far that gradients could not move it, or factors of too few rows.
    """
    x = pair.gather({name: full(weights[name].detach()) for name in pair.names})
    if not finite(x):
        raise ValueError(f"pair {pair.name!r} has NaN or infinite entries; load intact weights")
    tolerance = x.shape[-1] * torch.finfo(at_least_float32(x.real.dtype)).eps
    G, H = (
        X.shape[-2] >= X.shape[-1] and bool((column_rank_ratio(in_double(X)) > tolerance).all())
        for X in x.split([pair.n, pair.m], dim=-2)
    )
    if G or H:
        return not H
    if bool(x.any()) and (pair.kind == "lora" or pair.group.h > max(pair.n, pair.m)):
        return None
    raise ValueError(
        f"pair {pair.name!r}: both factors lack full column rank ({pair.n} and {pair.m} rows, {x.shape[-1]} columns); "
        "initialise one of them with a full-rank matrix, lower the rank, or leave the pair out"
    )


def doubts(seen: Certificate) -> str:
    """Raise for a pair that is no symmetry; say so if none has passed, or only adapters, which are ones, fail."""
    try:
        seen.check()
    except NotASymmetryError as error:
        if len(seen.failures) < len(seen.residuals) and any(p.kind != "lora" for p in seen.failures):
            raise
        return f"{error}; the steps are taken all the same"
    return ""


def explain(running: Iterable[Stack], gradients: Mapping[str, Tensor], model: nn.Module | None) -> NoReturn:
    """Raise for a gradient that is not finite, or a pair whose anchor lacks full rank."""
    wrong = [name for name, g in gradients.items() if not bool(full(g).isfinite().all())]  # by all processes together
    if wrong:
        why = "" if model is None else zero_norm(model)
        raise ValueError(
            f"the gradient of {wrong[0]!r} has NaN or infinite entries; no weight was changed; "
            f"{why or 'check the loss, lower the learning rate, or train in bfloat16 or float32'}"
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
