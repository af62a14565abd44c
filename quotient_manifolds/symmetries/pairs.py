"""A pair (G, H) that a network sees only through its product, made of blocks of the network's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .blocks import GL, Block, BlockStack, block

if TYPE_CHECKING:
    from ..manifold import GLQuotientInv, GLQuotientMix

#: Reasons why weights are no pair.
TIED = "both factors contain the same weights; only an orthogonal group is left"
SHARED = "its weights are used in another place too (shared or overlapping memory)"
CHANGES = "moves along its orbit change the outputs of the model on this batch"
#: Reasons why a module could not be examined.
UNREACHED = "the batch does not reach it"
UNCERTIFIED = "not certified: the gradient is zero"
UNNAMED = "the names of its weights do not tell its queries, keys, values and outputs"
FAILED = "could not be examined"
UNEXAMINED = (UNREACHED, UNCERTIFIED, UNNAMED, FAILED)


@dataclass(frozen=True)
class SymmetricPair:
    """Weights (G, H) that a network sees only through s G Hᴴ, or the reason why they have no symmetry.

    Attributes
    ----------
    module : str
        Path of the module that they belong to, or a name chosen by the user.
    kind : str
        ``"qk"``, ``"vo"``, ``"lora"``, or a word chosen by the user.
    group : GL or None
        The group that acts on the columns; None where no continuous symmetry exists or the pair cannot be used.
    G, H : tuple of Block
        Blocks stacked as rows of the two factors.
    head : int or None
        Number of the attention head, or of the expert that an adapter changes, from 0.
    part : str
        What distinguishes pairs of the same module, kind and head: ``"rotary"``, or the name of a LoRA adapter.
    reason : str
        Why ``group`` is None; empty otherwise.
    frozen : bool
        The reason is that a parameter is not trainable.
    null : tuple of Block
        Blocks of H that the network does not see at all: the key bias, which adds the same number to all scores of a
        query. A block that was removed from H (``find_symmetric_pairs(key_bias="drop")``) is left out of every measure.
    scale : float
        s: α/r for LoRA as it was when the pair was found, otherwise 1. Optimisers and distances count it.
    metric : {"inv", "mix", None}
        That of a point which states its own: a ``geoopt.ManifoldParameter``.
    model : Module or None
        The model in which the pair was found, and in which an optimiser expects its parameters.

    Raises
    ------
    ValueError
        There is neither a group nor a reason; blocks do not fit the group; a factor is empty; a block is in both
        factors.

    Examples
    --------
    Balance the queries and keys of one head, which leaves the layer's function as it is:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs
    >>> first = find_symmetric_pairs(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))[0]
    >>> first.name, first.module, first.kind, first.head, first.n, first.m
    ('self_attn qk head 0', 'self_attn', 'qk', 0, 9, 9)
    >>> first.scatter_(first.manifold("inv").canonical(first.gather()))
    """

    module: str
    kind: str
    group: GL | None
    G: tuple[Block, ...] = field(default=(), repr=False)
    H: tuple[Block, ...] = field(default=(), repr=False)
    head: int | None = None
    part: str = ""
    reason: str = ""
    frozen: bool = False
    null: tuple[Block, ...] = field(default=(), repr=False)
    scale: float = 1.0
    metric: str | None = None
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.group is None:
            if not self.reason:
                raise ValueError(f"pair {self.name!r} has no group; pass the reason")
            return
        for b in self.G + self.H:
            if b.size[1:] != self.group.columns:
                raise ValueError(
                    f"pair {self.name!r}: the group {self.group} acts on {self.group.columns} columns, but the block "
                    f"in {b.place} has {b.size[1:]}"
                )
        if not self.G or not self.H:
            raise ValueError(f"pair {self.name!r} needs at least one block in G and one in H")
        key = attrgetter("key")
        if not set(map(key, self.G)).isdisjoint(map(key, self.H)):
            raise ValueError(
                f"pair {self.name!r}: the same block is in G and in H (tied weights); only an orthogonal group "
                "is left, which is not supported; leave the layer out with quotient_manifolds.symmetries.skip"
            )

    @property
    def name(self) -> str:
        """Name for messages and tables, such as ``"encoder.layer.3.attention qk head 5"``; ``module`` for your own."""
        if self.head is None and not self.part:
            return self.module
        head = "" if self.head is None else f"{'expert' if self.kind == 'lora' else 'head'} {self.head}"
        return " ".join(word for word in (self.module, self.kind, head, self.part) if word)

    @property
    def n(self) -> int:
        """Rows of G."""
        return sum(b.rows for b in self.G)

    @property
    def m(self) -> int:
        """Rows of H."""
        return sum(b.rows for b in self.H)

    @property
    def thin(self) -> bool:
        """Whether a factor has too few rows for full column rank, which GL needs."""
        return self.group is not None and not self.group.diagonal and self.group.h > min(self.n, self.m)

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows of every block of G and of H."""
        return tuple(b.rows for b in self.G), tuple(b.rows for b in self.H)

    @property
    def dropped(self) -> tuple[Block, ...]:
        """Null blocks that were taken out of H."""
        kept = {b.key for b in self.H}
        return tuple(b for b in self.null if b.key not in kept)

    def manifold(self, metric: str = "inv") -> GLQuotientInv | GLQuotientMix:
        """Return the manifold on which the tensor of :meth:`gather` is a point; metric is ``"inv"`` or ``"mix"``."""
        from ..manifold import MANIFOLDS  # the optimisers need no manifold

        return MANIFOLDS[metric](self.n, self.m)

    def parameters(self) -> list[Tensor]:
        """List the parameters that the blocks belong to, each once."""
        return list({id(b.tensor): b.tensor for b in self.G + self.H}.values())

    def gather(self) -> Tensor:
        """Copy the weights into one point, (n + m, h), or (h, n + m, 1) for a diagonal group; differentiable."""
        return self.usable_group().to_point(BlockStack([self.G + self.H]).gather())[0]

    def scatter_(self, x: Tensor) -> None:
        """Write a point of :meth:`gather`'s shape back into the weights."""
        BlockStack([self.G + self.H]).scatter_(self.usable_group().from_point(x.unsqueeze(0)))

    def usable_group(self) -> GL:
        """Return the group; without one, raise a ValueError with the reason."""
        if self.group is None:
            raise ValueError(f"pair {self.name!r} has no symmetry: {self.reason}")
        return self.group


def pair(G: Iterable[Block], H: Iterable[Block], group: GL, *, name: str = "pair", kind: str = "user") -> SymmetricPair:
    """Describe a pair of your own.

    Parameters
    ----------
    G, H : iterable of Block
        Blocks stacked as rows of the two factors, see :func:`block`.
    group : GL
        ``GL(h)`` for any invertible h × h matrix, ``GL(h, diagonal=True)`` for a rescaling of every column.
    name, kind : str
        Any words; the name appears in messages and tables.

    Returns
    -------
    SymmetricPair
        For ``find_symmetric_pairs(model, extra=[…])`` or ``sharpness.evaluate(…, pairs=[…])``.

    Examples
    --------
    Two linear layers with a bias between them, x ↦ W₂(W₁x + b₁):

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import GL, block, pair
    >>> first, second = nn.Linear(5, 3), nn.Linear(3, 4)
    >>> p = pair([block(first, "weight", transpose=True), block(first, "bias")], [block(second, "weight")], GL(3))
    >>> p.gather().shape
    torch.Size([10, 3])
    """
    return SymmetricPair(name, kind, group, tuple(G), tuple(H))


def factor_pair(G: nn.Parameter, H: nn.Parameter, *, name: str = "factors") -> SymmetricPair:
    r"""Describe two factors of which only the product G Hᵀ counts, outside any network.

    Parameters
    ----------
    G, H : nn.Parameter
        (n, h) and (m, h), real, of one dtype and device.
    name : str
        For messages.

    Returns
    -------
    SymmetricPair

    Raises
    ------
    ValueError
        Factors that are no parameters, not real, of different dtypes or devices, or no matrices with the same number of
        columns.

    Examples
    --------
    Matrix factorisation by an optimiser that does not see how the product is split between its factors:

    >>> import torch
    >>> from torch import nn
    >>> from quotient_manifolds.optim import QuotientAdam
    >>> from quotient_manifolds.symmetries import factor_pair
    >>> _ = torch.manual_seed(0)
    >>> target = torch.randn(30, 4) @ torch.randn(4, 20)
    >>> G, H = nn.Parameter(torch.randn(30, 4)), nn.Parameter(torch.randn(20, 4))
    >>> optimizer = QuotientAdam([G, H], [factor_pair(G, H)], lr=0.1)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     loss = (G @ H.T - target).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    >>> loss.item() < 0.1
    True
    """
    if G.dim() != 2 or H.dim() != 2 or G.shape[1] != H.shape[1]:
        raise ValueError(
            f"factors are matrices (n, h) and (m, h) with the same h, got {tuple(G.shape)} and {tuple(H.shape)}"
        )
    if not all(isinstance(X, nn.Parameter) and X.is_floating_point() for X in (G, H)):
        raise ValueError("factors are real torch.nn.Parameter, which are trained; wrap tensors in nn.Parameter")
    if (G.dtype, G.device) != (H.dtype, H.device):
        raise ValueError(f"factors have one dtype and device, got {G.dtype}, {G.device} and {H.dtype}, {H.device}")
    both = nn.ParameterDict({"G": G, "H": H})
    return pair([block(both, "G")], [block(both, "H")], GL(G.shape[1]), name=name)


def no_pair(name: str, reason: str) -> list[SymmetricPair]:
    """List the one pair that a module without a symmetry has, with the reason."""
    return [SymmetricPair(name, "attention", None, reason=reason)]


def refused(pair: SymmetricPair, reason: str, frozen: bool = False) -> SymmetricPair:
    """Take the group from a pair, and say why."""
    return replace(pair, group=None, reason=reason, frozen=frozen)


def usable(pair: SymmetricPair, include_frozen: bool = False, thin: bool = False) -> SymmetricPair:
    """Remove the group from a pair that cannot be used; ``thin`` factors are no points, but optimisers train them."""
    if pair.group is None:
        return pair
    for b in pair.G + pair.H:
        if not isinstance(b.tensor, nn.Parameter):
            return refused(pair, f"{b.place} is computed, not a parameter")
    frozen = {b.place for b in pair.G + pair.H if not b.tensor.requires_grad}
    if frozen and not include_frozen:
        return refused(pair, f"frozen: {', '.join(sorted(frozen))}", frozen=True)
    if pair.thin and not thin:
        return refused(pair, f"h = {pair.group.h} columns, but factors of {pair.n} and {pair.m} rows")
    return pair


def in_copy(pairs: Iterable[SymmetricPair], model: nn.Module, copy: nn.Module) -> list[SymmetricPair]:
    """Return the same pairs of a copy of their model."""
    modules = dict(zip(model.modules(), copy.modules(), strict=True))
    found = []
    for p in pairs:
        if not all(b.module in modules for b in p.G + p.H + p.null):
            raise ValueError(f"the pair {p.name!r} belongs to another model")
        G, H, null = (tuple(replace(b, module=modules[b.module]) for b in v) for v in (p.G, p.H, p.null))
        found.append(replace(p, G=G, H=H, null=null, model=None if p.model is None else modules.get(p.model)))
    return found


def check_pairs(pairs: Iterable[SymmetricPair]) -> list[SymmetricPair]:
    """Return pairs as a list; raise a TypeError for anything else."""
    found = list(pairs)
    for p in found:
        if not isinstance(p, SymmetricPair):
            raise TypeError(
                "pairs must be SymmetricPair objects, as returned by find_symmetric_pairs(model), got "
                f"{type(p).__name__}"
            )
    return found


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
        G, H, null = (  # all blocks, each once
            tuple({b.key: b for q in parts for b in getattr(q, name)}.values()) for name in ("G", "H", "null")
        )
        home.update((b.key, first) for b in G + H)
        tied = TIED if {b.key for b in G} & {b.key for b in H} else ""
        if reason := next((q.reason for q in parts if q.group is None), tied):
            found.update((j, refused(found[j], reason)) for j in (first, *others))
            continue
        for j in others:
            del found[j]
        found[first] = replace(parts[0], G=G, H=H, null=null)
    return list(found.values())
