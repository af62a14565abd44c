"""From what layers claim of their weights to what holds in the model: by its names, merged, each number once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from torch import nn

from ..weights import naming, plain_names, weights_of
from .pairs import Cause, Claim, merged, refused
from .slots import renamed
from .stacks import without_sharing


def placing(model: nn.Module) -> Callable[[Iterable[Claim], str], list[Claim]]:
    """Return what names weights of claims on the module at a path as in the model; tied ones have their first name."""
    plain, name_of = plain_names(model), naming(model)

    def placed(claims: Iterable[Claim], path: str) -> list[Claim]:
        def named(p: Claim) -> Claim:
            G, H = (set(renamed(side, partial(name_of, path))) for side in (p.G, p.H))
            p = p if G.isdisjoint(H) else refused(p, Cause.TIED)
            return replace(renamed(p, partial(name_of, path)), module=plain(path))

        return list(map(named, claims))

    return placed


def settled(claims: Iterable[Claim], model: nn.Module) -> list[Claim]:
    """Merge pairs that share a slot; refuse those of weights that are computed, or that share memory with others.

    LoRA's factors may be rows of attention pairs as well; these claims stand side by side.
    """
    weights = weights_of(model)
    found = list[Claim]()
    for p in merged(claims):
        computed = [name for name in p.names if name not in weights]
        found.append(refused(p, Cause.COMPUTED, computed[0]) if computed else p)
    sides = [{i: p for i, p in enumerate(found) if (p.kind == "lora") == lora} for lora in (False, True)]
    for side in sides:
        for i, p in zip(side, without_sharing(list(side.values()), weights), strict=True):
            found[i] = p
    return found
