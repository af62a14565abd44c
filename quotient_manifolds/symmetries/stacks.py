"""Pairs of equal shape as one batched point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..linalg import at_least_float32
from ..manifold import GLQuotientInv, GLQuotientMix
from .blocks import BlockStack
from .groups import GL
from .pairs import MANIFOLDS, SymmetricPair, check_pairs

__all__ = ["PairStack", "coverage", "scaled_points", "stacks"]


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
            if (p.group, p.layout) != (first.group, first.layout):
                raise ValueError(f"pairs {first.name!r} and {p.name!r} differ in shape or group; see stacks()")
        self.n, self.m = first.n, first.m
        self._rows = BlockStack([p.G + p.H for p in self.pairs])
        self._dropped = BlockStack([[b] for p in self.pairs for b in p.dropped])

    def __len__(self) -> int:
        return len(self.pairs)

    def manifold(self, metric: str = "inv", **options: float) -> GLQuotientInv | GLQuotientMix:
        """Return the manifold of the stacked point; metric is ``"inv"`` or ``"mix"``, options are the manifold's."""
        return MANIFOLDS[metric](self.n, self.m, **options)

    def point_like(self, dtype: torch.dtype) -> tuple[tuple[int, ...], Tensor]:
        """Return the shape of the stacked point, and an empty tensor of its dtype, for real weights of ``dtype``."""
        like = self.group.to_point(torch.empty((0, *self._rows.shape[1:]), dtype=dtype, device=self._device()))
        return (len(self), *like.shape[1:]), like

    def _device(self) -> torch.device:
        return self.pairs[0].G[0].tensor.device

    def parameters(self) -> list[Tensor]:
        """List the parameters involved, each once, including those of dropped blocks."""
        runs = self._rows.runs + self._dropped.runs
        return list({id(r.first.tensor): r.first.tensor for r in runs}.values())

    def gather(self, tensors: Mapping[Tensor, Tensor] | None = None, *, out: Tensor | None = None) -> Tensor:
        """Copy the blocks into one point, differentiably.

        ``tensors`` maps each parameter to a tensor that is read instead, such as its gradient; absent ones count as
        zero. ``out`` is contiguous real memory that the result may use; then it is not differentiable. The point is
        (pairs, n + m, h), or (pairs, h, n + m, 1) for a diagonal group; complex if the group's field is.
        """
        shape = self._rows.shape
        room = None if out is None else out.view(-1)[: math.prod(shape)].view(shape)
        return self.group.to_point(self._rows.gather(tensors, room))

    def scatter_(self, x: Tensor, tensors: Mapping[Tensor, Tensor] | None = None) -> None:
        """Write a point of :meth:`gather`'s shape, rounded to their dtype, into the parameters or ``tensors``."""
        self._rows.scatter_(self.group.from_point(x), tensors)

    def views(self, tensors: Mapping[Tensor, Tensor]) -> Iterator[tuple[slice, bool, Tensor, Tensor]]:
        """Yield (indices of pairs, whether the rows are of G, the rows, the same rows of ``tensors``), as views."""
        for run in self._rows.runs:
            own, other = run.first.tensor, tensors.get(run.first.tensor)
            if other is not None:
                pairs = slice(run.start, run.start + run.count)
                yield pairs, run.row < self.n, run.view(own.contiguous()), run.view(other.contiguous())

    def mark_(self, tensors: Mapping[Tensor, Tensor]) -> None:
        """Set the entry of ``tensors`` for each parameter to True wherever a block lies, including dropped ones."""
        self._rows.mark_(tensors)
        self._dropped.mark_(tensors)


def stacks(pairs: Iterable[SymmetricPair]) -> list[PairStack]:
    """Sort the usable pairs by group, shape, block layout, dtype and device, and stack each kind.

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
            alike.setdefault((p.group, p.layout, like.dtype, like.device), []).append(p)
    return [PairStack(found) for found in alike.values()]


def scaled_points(pairs: Sequence[SymmetricPair]) -> Tensor:
    """Stack points, half precision as float32; first factors are multiplied by the scale of their product."""
    found = torch.stack([p.gather().detach() for p in pairs])
    found = found.to(at_least_float32(found.dtype))
    for x, p in zip(found, pairs, strict=True):
        x[..., : p.n, :] *= p.scale
    return found


def coverage(found: Iterable[PairStack]) -> dict[Tensor, Tensor]:
    """Tell, for every parameter of pairs, which of its entries belong to pairs or were dropped."""
    masks: dict[Tensor, Tensor] = {}
    for s in found:
        for p in s.parameters():
            masks.setdefault(p, torch.zeros(p.shape, dtype=torch.bool, device=p.device))
        s.mark_(masks)
    return masks
