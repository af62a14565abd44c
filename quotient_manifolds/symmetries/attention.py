"""The pairs of multi-head attention layers: a Q–K and a V–O pair per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .blocks import GL, Block, block
from .lora import is_lora, lora_factors, lora_obstacle
from .pairs import TIED, SymmetricPair

__all__ = ["DIAGONAL", "PLANES", "Place", "Projection", "Rows", "attention_pairs", "head_pairs"]


#: How RoPE pairs dimensions.
PLANES = ("half", "interleaved")
#: Numbers a column, of any sign or only positive ones.
DIAGONAL = ("diagonal", "positive")


@dataclass(frozen=True)
class Rows:
    """A matrix that is added to queries or multiplied with them: one row a head, or the same rows for all heads."""

    module: nn.Module
    attribute: str
    shared: bool

    def input_blocks(
        self, head: int, size: int, offset: int, count: int, rotary: str | None = None
    ) -> tuple[Block, ...]:
        """Return the rows of a head; none if heads have another size than the rows."""
        if getattr(self.module, self.attribute).shape[-1] != size:
            return ()
        rows = slice(None) if self.shared else slice(head, head + 1)
        return (block(self.module, self.attribute, rows, slice(offset, offset + count), rotary=rotary),)


@dataclass(frozen=True)
class Projection:
    """Where a query, key, value or output projection lies in its module.

    Attributes
    ----------
    module : nn.Module
        Owner of the parameters.
    weight, bias : str
        Names of its parameters; a bias that is missing or None is left out.
    start, bias_start : int
        First head dimension of head 0 in the weight and in the bias.
    stride, per : int
        Distance from one group of ``per`` heads to the next (0: the heads are consecutive).
    conv1d : bool
        The weight is (in, out), as GPT-2's ``Conv1D``, instead of (out, in).
    bias_module : nn.Module, optional
        Owner of the bias, if it is another module; there the heads are consecutive.
    further : tuple of Projection or Rows
        Others that add to the same scores, such as those of positions: more rows of the same stack.
    examined : bool
        Gradients and moves decide whether the module is linear, so a subclass of ``nn.Linear`` is not refused.

    Examples
    --------
    One matrix with rows [q; k; v], as in vision transformers:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Projection, attention_pairs
    >>> qkv, out = nn.Linear(8, 3 * 8), Projection(nn.Linear(8, 8))
    >>> q, k, v = (Projection(qkv, start=8 * i) for i in range(3))
    >>> [pair.name for pair in attention_pairs("attention", heads=2, head_size=4, q=q, k=k, v=v, o=out)]
    ['attention qk head 0', 'attention vo head 0', 'attention qk head 1', 'attention vo head 1']
    """

    module: nn.Module
    weight: str = "weight"
    bias: str = "bias"
    start: int = 0
    bias_start: int | None = None
    stride: int = 0
    per: int = 1
    conv1d: bool = False
    bias_module: nn.Module | None = None
    further: tuple[Projection | Rows, ...] = ()
    examined: bool = False

    def dimensions(self, *, into: bool = True) -> int:
        """Return the total dimension of all heads, for a projection into head space or out of it."""
        size = getattr(self.module, "out_features" if into else "in_features", None)  # quantised weights are packed
        if self.weight == "weight" and isinstance(size, int):
            return size
        weight: torch.Tensor = getattr(self.module, self.weight)
        return int((weight if self.weight == "weight" else weight.flatten(1)).shape[into == self.conv1d])

    def _dims(self, start: int, head: int, size: int, offset: int, count: int) -> slice:
        group, number = divmod(head, self.per)
        first = start + group * (self.stride or size * self.per) + number * size + offset
        return slice(first, first + count)

    def input_blocks(
        self, head: int, size: int, offset: int, count: int, rotary: str | None = None
    ) -> tuple[Block, ...]:
        """Return rows of a stack for a projection *into* head space: the weight, and whatever adds to its output."""
        dims = self._dims(self.start, head, size, offset, count)
        rows, columns = (slice(None), dims) if self.conv1d else (dims, slice(None))
        found = [block(self.module, self.weight, rows, columns, transpose=not self.conv1d, rotary=rotary)]
        for _, (owner, attribute) in lora_factors(self.module):  # (x Aᵀ) Bᵀ + b: Bᵀ and b are further rows of the stack
            found.append(block(owner, attribute, dims, transpose=True, rotary=rotary))
            if getattr(owner, "bias", None) is not None:
                found.append(block(owner, "bias", dims, rotary=rotary))
        found.extend(self.bias_blocks(head, size, offset, count, rotary))
        return (*found, *(b for p in self.further for b in p.input_blocks(head, size, offset, count, rotary)))

    def bias_blocks(
        self, head: int, size: int, offset: int, count: int, rotary: str | None = None
    ) -> tuple[Block, ...]:
        """Return the bias as one more row; empty if there is no bias."""
        owner = self.bias_module or self.module
        if getattr(owner, self.bias, None) is None:
            return ()
        start = self.start if self.bias_start is None else self.bias_start
        dims = self._dims(start, head, size, offset, count)
        if self.bias_module is not None:
            dims = slice(start + head * size + offset, start + head * size + offset + count)
        return (block(owner, self.bias, dims, rotary=rotary),)

    def output_blocks(
        self, head: int, size: int, offset: int, count: int, rotary: str | None = None
    ) -> tuple[Block, ...]:
        """Return rows of a stack for a projection *out of* head space: the head's slice of the weight."""
        dims = self._dims(self.start, head, size, offset, count)
        rows, columns = (dims, slice(None)) if self.conv1d else (slice(None), dims)
        found = block(self.module, self.weight, rows, columns, transpose=self.conv1d, rotary=rotary)
        return (found, *(block(*A, columns=dims, rotary=rotary) for A, _ in lora_factors(self.module)))

    def obstacle(self) -> str:
        """Explain why the module is not linear in its weight (and LoRA's); empty if it is."""
        cls, weight = type(self.module), getattr(self.module, self.weight, None)
        if cls.__module__.startswith("peft.tuners.") and not is_lora(self.module):
            return f"no known symmetry of {cls.__module__.split('.')[2]}'s {cls.__name__}"
        if isinstance(weight, torch.Tensor) and not (weight.is_floating_point() or weight.is_complex()):
            return f"quantised: the weight has dtype {str(weight.dtype).removeprefix('torch.')}"
        if not self.examined and isinstance(self.module, nn.Linear) and cls.forward is not nn.Linear.forward:
            return f"{cls.__name__} is a subclass of Linear with its own forward"
        return lora_obstacle(self.module)


@dataclass(frozen=True)
class Place:
    """Where the heads of a layer lie in its matrices, and what acts on them.

    A matrix of several letters consists of ``blocks`` equal parts. In each of them the letters follow in ``order``,
    every one with its share of the heads. ``group`` is ``"GL"``, ``"diagonal"``, ``"positive"``, ``"half"`` or
    ``"interleaved"`` (RoPE on the first ``rotary_size`` dimensions), or else the reason why nothing is divided out;
    ``dimension`` is the dimension of the symmetry that was found on a head, whether it is divided out or not.
    """

    heads: int
    kv_heads: int
    size: int
    blocks: int = 1
    order: str = "qkv"
    group: str = "GL"
    rotary_size: int = 0
    key_bias_null: bool = False
    dimension: int = 0


def head_pairs(name: str, kind: str, place: Place, one: Projection, two: Projection) -> Iterator[SymmetricPair]:
    """Yield the pairs of one kind, head by head: on the planes that RoPE rotates, and on the other dimensions."""
    size, group = place.size, place.group
    turned = place.rotary_size if group in PLANES else 0
    reason = "" if group in ("GL", *PLANES, *DIAGONAL) else group
    reason = reason or one.obstacle() or two.obstacle()
    parts: list[tuple[str, GL, tuple[int, int, int, str | None]]] = []
    if turned:
        planes = GL(turned // 2, diagonal=True, field="complex")
        parts.append(("rotary" if kind == "qk" else "", planes, (size, 0, turned, group)))
    if turned < size:
        others = GL(size - turned, diagonal=group in DIAGONAL, positive=group == "positive")
        parts.append(("", others, (size, turned, size - turned, None)))
    for i in range(place.heads):
        j = i * place.kv_heads // place.heads
        if reason:
            yield SymmetricPair(name, kind, None, head=i, reason=reason)
            continue
        for part, acting, dims in parts:
            G = one.input_blocks(i if kind == "qk" else j, *dims)
            H = two.input_blocks(j, *dims) if kind == "qk" else two.output_blocks(i, *dims)
            if {b.key for b in G} & {b.key for b in H}:
                yield SymmetricPair(name, kind, None, head=i, part=part, reason=TIED)
            else:
                null = two.bias_blocks(j, *dims) if place.key_bias_null and dims[-1] is None else ()
                yield SymmetricPair(name, kind, acting, G, H, head=i, part=part, null=null)


def attention_pairs(
    name: str,
    *,
    heads: int,
    q: Projection,
    k: Projection,
    v: Projection,
    o: Projection,
    head_size: int | None = None,
    value_size: int | None = None,
    kv_heads: int | None = None,
    rotary_size: int = 0,
    rotary: str = "half",
    qk_obstruction: str = "",
    vo_obstruction: str = "",
    key_bias_null: bool = True,
) -> Iterator[SymmetricPair]:
    r"""Yield the Q–K and V–O pairs of a multi-head attention layer, one of each per query head.

    With the column convention q = x W_Q + b_q and biases as one more row: :math:`G = [W_Q; b_q^T]`,
    :math:`H = [W_K; b_k^T]`, and :math:`G = [W_V; b_v^T]`, H the head's slice of :math:`W_O^T`; the group is GL(h).

    Parameters
    ----------
    name : str
        Path of the module.
    heads, kv_heads : int
        Query heads, and key/value heads where queries are grouped: head i uses key head i // (heads / kv_heads).
    q, k, v, o : Projection
        Location of the weights.
    head_size, value_size : int, optional
        Dimension of one head's queries and values; required where one matrix holds more than the queries.
    rotary_size : int
        Leading head dimensions that RoPE rotates: there GL(h) shrinks to one non-zero complex number per frequency.
    rotary : {"half", "interleaved"}
        Which dimensions RoPE pairs.
    qk_obstruction, vo_obstruction : str
        Reason why Q–K or V–O has no symmetry, if that is so.
    key_bias_null : bool
        The key bias adds the same number to all scores of a query, so softmax ignores it (not under RoPE).

    Yields
    ------
    SymmetricPair
        Of kind ``"qk"`` or ``"vo"``; under RoPE the rotated dimensions form a separate pair.

    Notes
    -----
    Paper, §4.2 and App. C; in App. C.1 the printed W_iᵒ are rows of Wᵒ.

    Examples
    --------
    Grouped queries under RoPE; :func:`find_symmetric_pairs` merges the heads that share keys:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Projection, attention_pairs
    >>> q, k, v, o = (Projection(nn.Linear(*size, bias=False)) for size in [(8, 8), (8, 4), (8, 4), (8, 8)])
    >>> pairs = list(attention_pairs("attention", heads=4, kv_heads=2, rotary_size=2, q=q, k=k, v=v, o=o))
    >>> print(pairs[0].name, pairs[0].group, pairs[1].name, pairs[1].group)
    attention qk head 0 rotary (ℂ*)^1 attention vo head 0 GL(2)
    """
    size = head_size or getattr(q.module, q.weight).shape[1 if q.conv1d else 0] // heads
    kv_heads, group = kv_heads or heads, rotary if rotary_size else "GL"
    group = qk_obstruction or group
    qk = Place(heads, kv_heads, size, group=group, rotary_size=rotary_size, key_bias_null=key_bias_null)
    vo = Place(heads, kv_heads, value_size or size, group=vo_obstruction or "GL")
    yield from sorted([*head_pairs(name, "qk", qk, q, k), *head_pairs(name, "vo", vo, v, o)], key=lambda p: p.head or 0)
