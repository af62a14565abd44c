"""Pairs that share weights: merged where one group acts on all of them, refused where none does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .blocks import Block
from .modules import is_sharded
from .pairs import TIED, SymmetricPair

__all__ = ["SHARED", "merged", "refused", "sharing", "without_sharing"]


def _union(blocks: Iterable[tuple[Block, ...]]) -> tuple[Block, ...]:
    """List all blocks, each once."""
    return tuple({b.key: b for some in blocks for b in some}.values())


#: Why overlapping pairs are not usable.
SHARED = "its weights are used in another place too (shared or overlapping memory)"


def merged(pairs: Iterable[SymmetricPair]) -> list[SymmetricPair]:
    """Merge pairs that share a block (grouped queries, shared layers); refuse those without a common group."""
    found: dict[int, SymmetricPair] = {}
    home: dict[object, int] = {}
    for i, p in enumerate(pairs):
        found[i] = p
        if p.group is None:
            continue
        first, *others = sorted({i, *(home[b.key] for b in p.G + p.H if b.key in home)})
        parts = [found[j] for j in (first, *others)]
        G, H, null = (_union(getattr(q, name) for q in parts) for name in ("G", "H", "null"))
        home.update((b.key, first) for b in G + H)
        reason = next((q.reason for q in parts if q.group is None), "")
        if not reason and ({b.key for b in G} & {b.key for b in H}):
            reason = TIED
        if reason:
            found.update((j, refused(found[j], reason)) for j in (first, *others))
            continue
        for j in others:
            del found[j]
        found[first] = replace(parts[0], G=G, H=H, null=null)
    return list(found.values())


def without_sharing(pairs: Sequence[SymmetricPair]) -> list[SymmetricPair]:
    """Refuse the pairs of which a weight is also used elsewhere, whichever parameter it belongs to."""
    shared = sharing(pairs)
    return [refused(p, SHARED) if i in shared else p for i, p in enumerate(pairs)]


def sharing(pairs: Sequence[SymmetricPair]) -> set[int]:
    """Find the pairs of which a weight is also used elsewhere, whichever parameter it belongs to."""
    places: dict[int, list[tuple[int, Block, Tensor]]] = {}
    for i, p in enumerate(pairs):
        for b in p.G + p.H if p.group is not None else ():
            t = b.tensor
            # Expanded numbers stand in for weights elsewhere (the twin of a sharded model) and share their memory.
            if t.device.type != "meta" and not is_sharded(t) and 0 not in t.stride():
                places.setdefault(t.untyped_storage().data_ptr(), []).append((i, b, t))
    found: set[int] = set()
    for blocks in places.values():
        starts, ends = zip(*(_intervals(b, t) for _, b, t in blocks), strict=True)
        owner = torch.cat([torch.full_like(s, i) for (i, *_), s in zip(blocks, starts, strict=True)])
        start, order = torch.cat(starts).sort()
        end, owner = torch.cat(ends)[order], owner[order]
        # In the order of the starts: runs that begin before another has ended, and runs that the next one overlaps.
        met = [owner[1:][start[1:] < end.cummax(0).values[:-1]], owner[:-1][start[1:] < end[:-1]]]
        found |= set(torch.cat(met).tolist())
    return found


def _intervals(b: Block, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the contiguous runs of a block begin and end in its storage, in bytes."""
    if not t.is_contiguous():  # such as the transpose of another parameter: every number by itself
        flat = torch.arange(t.numel()).as_strided(b.size, b.stride, b.offset).flatten()
        starts = torch.full_like(flat, int(t.storage_offset()))
        for index, stride in zip(torch.unravel_index(flat, t.shape), t.stride(), strict=True):
            starts += stride * index
        return t.element_size() * starts, t.element_size() * (starts + 1)
    starts, length = torch.tensor([t.storage_offset() + b.offset]), 1
    for stride, size in sorted(zip(b.stride, b.size, strict=True)):
        if stride == length and len(starts) == 1:
            length *= size
        else:
            starts = (starts + stride * torch.arange(size)[:, None]).flatten()
    return t.element_size() * starts, t.element_size() * (starts + length)


def refused(pair: SymmetricPair, reason: str, frozen: bool = False) -> SymmetricPair:
    """Take the group from a pair, and say why."""
    return replace(pair, group=None, reason=reason, frozen=frozen)
