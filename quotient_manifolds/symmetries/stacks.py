"""Pairs of equal shape as one batched point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..gauge import canonical_gauge
from .pairs import SymmetricPair, check_pairs
from .slots import GL, SlotStack, masks, weight_of

if TYPE_CHECKING:
    from ..manifold import GLQuotientInv, GLQuotientMix


class PairStack(SlotStack):
    """Pairs of equal shape, group and layout as one batched point; :func:`stacks` sorts a mixed list first.

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
    names : tuple of str
        Names of the weights, each once, including those of dropped slots.

    Raises
    ------
    ValueError
        There is no pair, or pairs differ.

    Examples
    --------
    The Riemannian gradients of all heads at once:

    >>> import torch
    >>> from quotient_manifolds.symmetries import find, stacks
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> weights = dict(layer.named_parameters())
    >>> qk, vo = stacks(find(layer).pairs, weights)
    >>> layer(torch.ones(1, 3, 8)).square().sum().backward()
    >>> gradients = vo.gather({name: p.grad for name, p in weights.items()})
    >>> vo.manifold("mix").egrad2rgrad(vo.gather(weights), gradients).shape
    torch.Size([2, 17, 4])
    """

    group: GL

    def __init__(self, pairs: Iterable[SymmetricPair]) -> None:
        self.pairs = tuple(check_pairs(pairs))
        if not self.pairs:
            raise ValueError("a PairStack needs at least one pair")
        first = self.pairs[0]
        for p in self.pairs:
            if (p.group, p.layout, p.metric) != (first.group, first.layout, first.metric):
                raise ValueError(f"pairs {first.name!r} and {p.name!r} differ in shape, group or metric; see stacks()")
        self.n, self.m, self.metric = first.n, first.m, first.metric
        super().__init__([p.slots for p in self.pairs], first.group)
        self.names = tuple(dict.fromkeys([*self.names, *(s.name for p in self.pairs for s in p.null)]))

    def manifold(self, metric: str = "inv") -> GLQuotientInv | GLQuotientMix:
        """Return the manifold of the stacked point; metric is ``"inv"`` or ``"mix"``."""
        return self.pairs[0].manifold(metric)

    def canonical(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the canonical representative of every pair of a point, and whether it has one.

        A pair whose factors lack full rank has none, and stays. Positive numbers change no sign.
        """
        G, H = self.manifold().unpack_tensor(x)
        gauge = canonical_gauge(G, H)
        unit = (gauge.G * G).sum(-2, keepdim=True).sign() if self.group.positive else 1
        full = gauge.present()[..., -1]
        return torch.where(full[..., None, None], gauge.x * unit, x), full


def stacks(pairs: Iterable[SymmetricPair], weights: Mapping[str, Tensor]) -> list[PairStack]:
    """Sort pairs by group, shape, layout, metric, dtype and device, and stack each kind.

    Parameters
    ----------
    pairs : iterable of SymmetricPair
    weights : mapping of str to Tensor
        Tells dtypes and devices.

    Returns
    -------
    list of PairStack
        In the order in which the kinds first occur.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find, stacks
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> found = stacks(find(layer).pairs, dict(layer.named_parameters()))
    >>> [(len(s), str(s.group), s.n, s.m) for s in found]
    [(2, 'GL(4)', 9, 9), (2, 'GL(4)', 9, 8)]
    """
    alike: dict[object, list[SymmetricPair]] = {}
    for p in check_pairs(pairs):
        like = weight_of(p.G[0], weights)
        alike.setdefault((p.group, p.layout, p.metric, like.dtype, like.device), []).append(p)
    return [PairStack(found) for found in alike.values()]


def coverage(found: Iterable[PairStack], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, for each of some weights in pairs, which of its entries belong to pairs or were dropped."""
    every = (s for stack in found for p in stack.pairs for s in p.slots + p.null)
    return masks((s for s in every if s.name in weights), weights)
