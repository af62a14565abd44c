"""Pairs of equal shape as one batched point; lists of pairs, and pairs that share weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .blocks import GL, Block, BlockStack, masks
from .modules import is_sharded
from .pairs import SHARED, SymmetricPair, check_pairs, refused

if TYPE_CHECKING:
    from ..manifold import GLQuotientInv, GLQuotientMix


class PairStack:
    """Pairs of equal shape, group and block layout as one batched point; :func:`stacks` sorts a mixed list first.

    Parameters
    ----------
    pairs : iterable of SymmetricPair
        In the order of the point's first dimension.

    Attributes
    ----------
    pairs : tuple of SymmetricPair
    group : GL
    n, m : int
        Rows of every G and H.
    metric : {"inv", "mix", None}
        That of the pairs, if they are points that state one.

    Raises
    ------
    ValueError
        There is no pair, pairs differ, or a pair has no symmetry.

    Examples
    --------
    The Riemannian gradients of all heads at once:

    >>> import torch
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs, stacks
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> qk, vo = stacks(find_symmetric_pairs(layer))
    >>> layer(torch.ones(1, 3, 8)).square().sum().backward()
    >>> gradients = vo.gather({p: p.grad for p in vo.parameters()})
    >>> vo.manifold("mix").egrad2rgrad(vo.gather(), gradients).shape
    torch.Size([2, 17, 4])
    """

    def __init__(self, pairs: Iterable[SymmetricPair]) -> None:
        self.pairs = tuple(check_pairs(pairs))
        if not self.pairs:
            raise ValueError("a PairStack needs at least one pair")
        first = self.pairs[0]
        self.group: GL = first.usable_group()
        for p in self.pairs:
            if (p.group, p.layout, p.metric) != (first.group, first.layout, first.metric):
                raise ValueError(f"pairs {first.name!r} and {p.name!r} differ in shape, group or metric; see stacks()")
        self.n, self.m, self.metric = first.n, first.m, first.metric
        self._rows = BlockStack([p.G + p.H for p in self.pairs])
        self.runs = self._rows.runs  # the strided views of which the rows consist

    def __len__(self) -> int:
        return len(self.pairs)

    def manifold(self, metric: str = "inv") -> GLQuotientInv | GLQuotientMix:
        """Return the manifold of the stacked point; metric is ``"inv"`` or ``"mix"``."""
        return self.pairs[0].manifold(metric)

    def parameters(self) -> list[Tensor]:
        """List the parameters involved, each once, including those of dropped blocks."""
        blocks = [*(run.block for run in self.runs), *(b for p in self.pairs for b in p.null)]
        return list({id(b.tensor): b.tensor for b in blocks}.values())

    def gather(self, tensors: Mapping[Tensor, Tensor] | None = None) -> Tensor:
        """Copy the blocks into one point, differentiably.

        ``tensors`` maps each parameter to a tensor that is read instead, such as its gradient; absent ones count as
        zero. The point is (pairs, n + m, h), or (pairs, h, n + m, 1) for a diagonal group; complex if the group's field
        is.
        """
        return self.group.to_point(self._rows.gather(tensors))

    def scatter_(self, x: Tensor, tensors: Mapping[Tensor, Tensor] | None = None) -> None:
        """Write a point of :meth:`gather`'s shape, rounded to their dtype, into the parameters or ``tensors``."""
        self._rows.scatter_(self.group.from_point(x), tensors)


def stacks(pairs: Iterable[SymmetricPair]) -> list[PairStack]:
    """Sort the usable pairs by group, shape, block layout, metric, dtype and device, and stack each kind.

    Parameters
    ----------
    pairs : iterable of SymmetricPair
        Pairs without a group are left out.

    Returns
    -------
    list of PairStack
        In the order in which the kinds first occur.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs, stacks
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> [(len(s), str(s.group), s.n, s.m) for s in stacks(find_symmetric_pairs(layer))]
    [(2, 'GL(4)', 9, 9), (2, 'GL(4)', 9, 8)]
    """
    alike: dict[object, list[SymmetricPair]] = {}
    for p in check_pairs(pairs):
        if p.group is not None:
            like = p.G[0].tensor
            alike.setdefault((p.group, p.layout, p.metric, like.dtype, like.device), []).append(p)
    return [PairStack(found) for found in alike.values()]


def coverage(found: Iterable[PairStack]) -> dict[Tensor, Tensor]:
    """Return, for every parameter of pairs, which of its entries belong to pairs or were dropped."""
    return masks(b for s in found for p in s.pairs for b in p.G + p.H + p.null)


def without_sharing(pairs: Sequence[SymmetricPair]) -> list[SymmetricPair]:
    """Refuse the pairs of which a weight is also used elsewhere, whichever parameter it belongs to."""
    homes: dict[object, list[tuple[int, Block, Tensor]]] = {}
    for i, p in enumerate(pairs):
        for b in p.G + p.H if p.group is not None else ():
            t = b.tensor
            # Expanded numbers stand in for weights elsewhere (the twin of a sharded model) and share their memory.
            if t.device.type != "meta" and not is_sharded(t) and 0 not in t.stride():
                homes.setdefault((t.untyped_storage().data_ptr(), t.dtype), []).append((i, b, t))
    shared = {i for blocks in homes.values() for i in _sharing_memory(blocks)}
    return [refused(p, SHARED) if i in shared else p for i, p in enumerate(pairs)]


def _sharing_memory(blocks: Sequence[tuple[int, Block, Tensor]]) -> Iterator[int]:
    """Count how many blocks, up to two, each number of one memory belongs to; yield the pairs of those with two."""
    first = blocks[0][2]
    tensors = {t: torch.zeros(t.shape, dtype=torch.uint8, device=t.device) for *_, t in blocks}
    for _, b, t in blocks:
        b.of(tensors[t]).add_(1).clamp_(max=2)
    size = first.untyped_storage().nbytes() // first.element_size()
    memory = torch.zeros(size, dtype=torch.uint8, device=first.device)
    places = {t: memory.as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors}
    for t, count in tensors.items():
        places[t].add_(count).clamp_(max=2)
    for i, b, t in blocks:
        if bool((b.of(places[t].contiguous()) != 1).any()):
            yield i


class PairList(list[SymmetricPair]):
    """The pairs of a model: a list that prints pairs that differ only in their head as one line."""

    def __str__(self) -> str:
        lines: dict[tuple[str, str], int] = {}
        for p in self:
            place = p.name if p.head is None else f"{p.module} {p.kind}"
            what = f"none ({p.reason})" if p.group is None else f"{p.group}, {p.n}+{p.m} rows"
            lines[place, what] = lines.get((place, what), 0) + 1
        wide = max((len(place) for place, _ in lines), default=0)
        rows = [f"{place:<{wide}}  {count:>3} × {what}" for (place, what), count in lines.items()]
        return "\n".join(rows) or "no symmetric pairs"
