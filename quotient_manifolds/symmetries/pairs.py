"""Pairs (G, H) that a network sees only through their products; stacks of them, and what a gradient says of these."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..linalg import standard_normal
from ..metrics import canonical_gauge
from .slots import GL, Slot, SlotStack, masks, weight_of

if TYPE_CHECKING:
    from ..manifold import GLQuotientInv, GLQuotientMix

#: Random rows that C is multiplied by where it has more: its norm is estimated, but whether it is zero is exact.
PROBES = 8


class Place:
    """A place in a network, and slots of two factors: of a pair, or of what might have been one."""

    module: str
    kind: str
    head: int | None
    part: str
    name: str
    slots: tuple[Slot, ...]
    names: tuple[str, ...]


def place_name(p: Place) -> str:
    """Name a place in a network, unless it is a user's own."""
    if p.head is None and not p.part:
        return p.module
    which = "" if p.head is None else f"{'expert' if p.kind == 'lora' else 'head'} {p.head}"
    return " ".join(word for word in (p.module, p.kind, which, p.part) if word)


@dataclass(frozen=True)
class SymmetricPair(Place):
    """Weights (G, H) that a network sees only through s G Hᴴ.

    Attributes
    ----------
    module : str
        Path of the module that they belong to, or a name chosen by the user.
    kind : str
        ``"qk"``, ``"vo"``, ``"lora"``, ``"glu"``, ``"relu"``, or a word chosen by the user.
    group : GL
        The group that acts on the columns.
    G, H : tuple of Slot
        Slots stacked as rows of the two factors.
    head : int or None
        Number of the attention head, or of the expert that an adapter changes, from 0.
    part : str
        What distinguishes pairs of the same module, kind and head: ``"rotary"``, or the name of a LoRA adapter.
    null : tuple of Slot
        Slots of H that the network does not see at all: the key bias, which adds the same number to all scores of a
        query. A slot that was removed from H (``Symmetries.without_null``) is left out of every measure.
    scale : float
        s: α/r for LoRA as it was when the pair was found, otherwise 1. Optimisers and distances count it.
    metric : {"inv", "mix", None}
        That of a point which states its own: a ``geoopt.ManifoldParameter``.
    name, label : str
        For messages and tables, such as ``"encoder.layer.3.attention qk head 5"``; ``module`` for your own.
    slots, names : tuple of Slot, tuple of str
        The slots of both factors, and the names of the weights that they lie in, each once.
    layout : tuple of (tuple of int)
        Rows of every slot of G, and of every slot of H.
    n, m : int
        All rows of G and of H.
    thin : bool
        A factor has too few rows for full column rank, which GL needs.

    Raises
    ------
    ValueError
        Slots do not fit the group; a factor is empty; a slot is in both factors.

    Examples
    --------
    Balance the queries and keys of one head, which leaves the layer's function as it is:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> weights, first = dict(layer.named_parameters()), find(layer).pairs[0]
    >>> first.name, first.module, first.kind, first.head, first.n, first.m
    ('self_attn qk head 0', 'self_attn', 'qk', 0, 9, 9)
    >>> first.scatter_(first.manifold("inv").canonical(first.gather(weights)), weights)
    """

    module: str
    kind: str
    group: GL
    G: tuple[Slot, ...] = field(default=(), repr=False)
    H: tuple[Slot, ...] = field(default=(), repr=False)
    head: int | None = None
    part: str = ""
    null: tuple[Slot, ...] = field(default=(), repr=False)
    scale: float = 1.0
    metric: str | None = None
    name: str = field(init=False, repr=False, compare=False)
    label: str = field(init=False, repr=False, compare=False)
    slots: tuple[Slot, ...] = field(init=False, repr=False, compare=False)
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    layout: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    n: int = field(init=False, repr=False, compare=False)
    m: int = field(init=False, repr=False, compare=False)
    thin: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        slots, name = self.G + self.H, place_name(self)
        vars(self).update(name=name, label=name, slots=slots)
        if not isinstance(self.group, GL) or not all(isinstance(s, Slot) for s in slots):
            raise TypeError(
                f"pair {self.name!r} needs a group, such as GL(4), and slots, as slot(model, name) makes them"
            )
        for s in slots:
            if s.size[1:] != self.group.columns:
                raise ValueError(
                    f"pair {self.name!r}: the group {self.group} acts on {self.group.columns} columns, but the slot "
                    f"in {s.name!r} has {s.size[1:]}"
                )
        if not self.G or not self.H:
            raise ValueError(f"pair {self.name!r} needs at least one slot in G and one in H")
        if not set(self.G).isdisjoint(self.H):
            raise ValueError(
                f"pair {self.name!r}: the same slot is in G and in H (tied weights); only an orthogonal group "
                "is left, which is not supported; leave the layer out with quotient_manifolds.symmetries.skip"
            )
        layout = tuple(tuple(s.size[0] for s in factor) for factor in (self.G, self.H))
        n, m = map(sum, layout)
        thin = not self.group.diagonal and self.group.h > min(n, m)
        vars(self).update(names=tuple(dict.fromkeys(s.name for s in slots)), layout=layout, n=n, m=m, thin=thin)

    @property
    def dimension(self) -> int:
        """Number of real parameters of the group."""
        return self.group.dimension

    @property
    def dropped(self) -> tuple[Slot, ...]:
        """Null slots that were taken out of H."""
        return tuple(s for s in self.null if s not in self.H)

    def manifold(self, metric: str = "inv") -> GLQuotientInv | GLQuotientMix:
        """Return the manifold on which the tensor of :meth:`gather` is a point; metric is ``"inv"`` or ``"mix"``."""
        from ..manifold import MANIFOLDS  # the optimisers need no manifold

        return MANIFOLDS[metric](self.n, self.m)

    def gather(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Copy weights into one point, (n + m, h), or (h, n + m, 1) for a diagonal group; differentiable."""
        return SlotStack([self.slots], self.group).gather(weights)[0]

    def scatter_(self, x: Tensor, weights: Mapping[str, Tensor]) -> None:
        """Write a point of :meth:`gather`'s shape back into the weights."""
        SlotStack([self.slots], self.group).scatter_(x.unsqueeze(0), weights)


def check_pairs(pairs: Iterable[SymmetricPair]) -> list[SymmetricPair]:
    """Return pairs as a list; raise a TypeError for anything else."""
    found = list(pairs)
    for p in found:
        if not isinstance(p, SymmetricPair):
            raise TypeError(f"pairs must be SymmetricPair objects, as in find(model).pairs, got {type(p).__name__}")
    return found


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


@torch.no_grad()
def orbit_residuals(stack: PairStack, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    r"""Return ‖ΩCᴴ‖ relative to its larger term, of every pair of a stack; NaN for 0/0.

    Ω is the identity up to h = 8, else Gaussian of shape (8, h): ΩCᴴ costs h/8 times less than C; with the few rows on
    the left the products are two to six times faster than with few columns on the right. For a diagonal group C is one
    number per column.
    """
    first = stack.runs[0].slot.read(weights)
    like = stack.group.to_point(first.new_empty(1, 0, *stack.shape[2:]))
    dtypes, h = {like.dtype, *(gradients[name].dtype for name in stack.names if name in gradients)}, like.shape[-1]
    wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
    probe = torch.eye(h, dtype=wide, device=like.device)
    if h > PROBES:
        real = torch.empty(0, dtype=torch.float64, device="cpu")
        probe = standard_normal((PROBES, h), real, torch.Generator().manual_seed(0)).to(probe)
    one, two = (probe.new_zeros(stack.shape[0], *like.shape[1:-2], *probe.shape) for _ in range(2))
    for run in stack.runs:
        if run.slot.name in gradients:
            x, slope = (stack.group.to_point(run.slot.read(t)).to(wide) for t in (weights, gradients))
            if run.rows.start < stack.n:
                one[run.points] += (probe @ slope.mH) @ x
            else:
                two[run.points] += (probe @ x.mH) @ slope
    sizes = [torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim()))) for t in (one - two, one, two)]
    return sizes[0] / torch.maximum(sizes[1], sizes[2])
