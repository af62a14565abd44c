"""From what layers claim of their weights to what holds in the model: by its names, merged, each number once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..weights import is_sharded, naming, places_of, plain_names, weights_of
from .pairs import Cause, Claim, SymmetricPair, merged, refused
from .slots import Slot, renamed


def placing(model: nn.Module) -> Callable[[Iterable[Claim], str], list[Claim]]:
    """Return what names weights of claims on the module at a path as in the model; tied ones have their first name."""
    plain, name_of = plain_names(model), naming(model)

    def placed(claims: Iterable[Claim], path: str) -> list[Claim]:
        rename, found = partial(name_of, path), list[Claim]()
        for p in claims:
            G, H = (set(renamed(side, rename)) for side in (p.G, p.H))
            p = p if G.isdisjoint(H) else refused(p, Cause.TIED)
            found.append(replace(renamed(p, rename), module=plain(path)))
        return found

    return placed


def settled(claims: Iterable[Claim], model: nn.Module, *, decided: bool = False) -> list[Claim]:
    """Merge pairs that share a slot; refuse those of weights that are computed, or that are held elsewhere too.

    Whether that matters is ``decided`` where the model is run: what holds a weight may not be used.

    LoRA's factors may be rows of attention pairs as well; these claims stand side by side.
    """
    weights, held, claims = weights_of(model), places_of(model), list(claims)
    places = {(p.kind == "lora", p.module, name) for p in claims for name in p.names}
    claimed = Counter((lora, name) for lora, _, name in places)
    found = list[Claim]()
    for p in merged(claims):
        computed = [name for name in p.names if name not in weights]
        shared = not decided and any(held[name] > claimed[p.kind == "lora", name] for name in p.names)
        cause = Cause.COMPUTED if computed else Cause.SHARED if shared else None
        found.append(p if cause is None else refused(p, cause, "".join(computed[:1])))
    sides = [{i: p for i, p in enumerate(found) if (p.kind == "lora") == lora} for lora in (False, True)]
    for side in sides:
        for i, p in zip(side, _without_sharing(list(side.values()), weights), strict=True):
            found[i] = p
    return found


def _without_sharing(claims: Sequence[Claim], weights: Mapping[str, Tensor]) -> list[Claim]:
    """Refuse the pairs of which a weight is also used elsewhere, whichever parameter it belongs to."""
    homes: dict[object, list[tuple[int, Slot, Tensor]]] = {}
    for i, p in enumerate(claims):
        for s in p.slots if isinstance(p, SymmetricPair) else ():
            t = weights[s.name]
            # Expanded numbers stand in for weights elsewhere (the twin of a sharded model) and share their memory.
            if t.device.type != "meta" and not is_sharded(t) and 0 not in t.stride():
                homes.setdefault((t.untyped_storage().data_ptr(), t.dtype), []).append((i, s, t))
    shared = {i for slots in homes.values() for i in _sharing_memory(slots)}
    return [refused(p, Cause.SHARED) if i in shared else p for i, p in enumerate(claims)]


def _sharing_memory(slots: Sequence[tuple[int, Slot, Tensor]]) -> Iterator[int]:
    """Count how many slots, up to two, each number of one memory belongs to; yield the pairs of those with two."""
    first = slots[0][2]
    tensors = {t: torch.zeros(t.shape, dtype=torch.uint8, device=t.device) for t in dict.fromkeys(t for *_, t in slots)}
    for _, s, t in slots:
        s.of(tensors[t]).add_(1).clamp_(max=2)
    size = first.untyped_storage().nbytes() // first.element_size()
    memory = torch.zeros(size, dtype=torch.uint8, device=first.device)
    places = {t: memory.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors}
    for t, count in tensors.items():
        places[t].add_(count).clamp_(max=2)
    for i, s, t in slots:
        if bool((s.of(places[t].contiguous()) != 1).any()):
            yield i
