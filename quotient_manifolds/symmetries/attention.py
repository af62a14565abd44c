"""The pairs of multi-head attention layers: a Q–K and a V–O pair per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

import torch
from torch import nn

from .blocks import GL, PLANES, Block, block, outline
from .lora import is_lora, lora_factors, lora_obstacle
from .pairs import TIED, SymmetricPair


@dataclass(frozen=True)
class Heads:
    """How many heads a layer has, where they lie in its matrices, and what acts on them.

    Attributes
    ----------
    number, kv_number : int
        Query heads, and key/value heads where queries are grouped (0: as many): head i uses key head
        i // (number / kv_number).
    size : int
        Dimension of one head (0: that of the queries' projection, divided by the number of heads).
    group : {"GL", "half", "interleaved", "diagonal", "positive"}
        What acts on a head: GL(h); under RoPE, by which dimensions it pairs, one non-zero complex number per frequency
        on the leading ``rotary_size`` dimensions, and GL on the others; or one number a dimension, of any sign or only
        positive.
    rotary_size : int
        Leading dimensions that RoPE rotates.
    reason : str
        Why nothing acts on them; empty otherwise.
    key_bias_null : bool
        The key bias adds the same number to all scores of a query, so softmax ignores it (not under RoPE).
    blocks, order
        A matrix of several letters consists of ``blocks`` equal parts. In each of them the letters follow in ``order``,
        every one with its share of the heads.
    cyclic : bool
        Query head i uses key head i modulo kv_number instead.
    examined : bool
        Gradients and moves decide whether projections are linear, so a subclass of ``nn.Linear`` is not refused.

    Examples
    --------
    >>> from quotient_manifolds.symmetries import Heads
    >>> Heads(32, 8, group="half", rotary_size=128).number
    32
    """

    number: int
    kv_number: int = 0
    size: int = 0
    group: str = "GL"
    rotary_size: int = 0
    reason: str = ""
    key_bias_null: bool = True
    blocks: int = 1
    order: str = "qkv"
    cyclic: bool = False
    examined: bool = False


@dataclass(frozen=True)
class Rows:
    """A matrix that is added to queries or multiplied with them: one row a head, or the same rows for all heads."""

    module: nn.Module
    attribute: str
    shared: bool

    def input_blocks(self, head: int, size: int) -> tuple[Block, ...]:
        """Return the rows of a head; none if heads have another size than the rows."""
        rows = block(self.module, self.attribute, slice(None) if self.shared else slice(head, head + 1))
        return (rows,) if rows.size[1] == size else ()


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
    stacked : bool
        The weight is (heads, in, head size), or (heads, head size, out), and the bias (heads, head size).
    bias_module : nn.Module, optional
        Owner of the bias, if it is another module; there the heads are consecutive.
    further : tuple of Projection or Rows
        Others that add to the same scores, such as those of positions: more rows of the same stack.

    Examples
    --------
    One matrix with rows [q; k; v], as in vision transformers:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Heads, Projection, attention_pairs
    >>> qkv, out = nn.Linear(8, 3 * 8), Projection(nn.Linear(8, 8))
    >>> q, k, v = (Projection(qkv, start=8 * i) for i in range(3))
    >>> [pair.name for pair in attention_pairs("attention", Heads(2, size=4), q=q, k=k, v=v, o=out)]
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
    stacked: bool = False
    bias_module: nn.Module | None = None
    further: tuple[Projection | Rows, ...] = ()

    def dimensions(self, *, into: bool = True) -> int:
        """Return the total dimension of all heads, for a projection into head space or out of it."""
        size = getattr(self.module, "out_features" if into else "in_features", None)  # quantised weights are packed
        if self.weight == "weight" and isinstance(size, int):
            return size
        weight: torch.Tensor = getattr(self.module, self.weight)
        if self.stacked:
            return int(weight.shape[0] * weight.shape[2 if into else 1])
        return int((weight if self.weight == "weight" else weight.flatten(1)).shape[into == self.conv1d])

    def holds(self, size: int, *, into: bool = True) -> bool:
        """Return whether heads of this size, or parts of heads, may lie in it."""
        return not self.stacked or int(getattr(self.module, self.weight).shape[2 if into else 1]) % size == 0

    def _slice(self, head: int, size: int, start: int, stride: int) -> slice:
        group, number = divmod(head, self.per)
        first = start + group * (stride or size * self.per) + number * size
        return slice(first, first + size)

    def _of_stack(self, head: int, size: int, *, into: bool) -> Block:
        """Return a head's rows, or a part of them, where each head has its own matrix."""
        whole = outline(self.module, self.weight)
        number, part = divmod(head * size, whole.shape[2 if into else 1])
        dims = slice(part, part + size)
        return Block.from_view(self.module, self.weight, whole[number][:, dims] if into else whole[number][dims].T)

    def input_blocks(self, head: int, size: int) -> tuple[Block, ...]:
        """Return a head's rows for a projection *into* head space: the weight, and whatever adds to its output."""
        dims = self._slice(head, size, self.start, self.stride)
        rows, columns = (slice(None), dims) if self.conv1d else (dims, slice(None))
        if self.stacked:
            blocks = [self._of_stack(head, size, into=True)]
        else:
            blocks = [block(self.module, self.weight, rows, columns, transpose=not self.conv1d)]
        for _, (owner, attribute) in lora_factors(self.module):  # (x Aᵀ) Bᵀ + b: Bᵀ and b are further rows of the stack
            blocks.append(block(owner, attribute, dims, transpose=True))
            if getattr(owner, "bias", None) is not None:
                blocks.append(block(owner, "bias", dims))
        blocks += starmap(block, self.bias_rows(head, size))
        return (*blocks, *(b for p in self.further for b in p.input_blocks(head, size)))

    def bias_rows(self, head: int, size: int) -> list[tuple[Any, ...]]:
        """Return where the bias, one more row, lies, as arguments of :func:`block`; empty if there is no bias."""
        owner = self.bias_module or self.module
        if getattr(owner, self.bias, None) is None:
            return []
        if self.stacked:
            number, part = divmod(head * size, getattr(owner, self.bias).shape[1])
            return [(owner, self.bias, slice(number, number + 1), slice(part, part + size))]
        start = self.start if self.bias_start is None else self.bias_start
        return [(owner, self.bias, self._slice(head, size, start, self.stride if self.bias_module is None else 0))]

    def output_blocks(self, head: int, size: int) -> tuple[Block, ...]:
        """Return rows of a stack for a projection *out of* head space: the head's slice of the weight."""
        if self.stacked:
            return (self._of_stack(head, size, into=False),)
        dims = self._slice(head, size, self.start, self.stride)
        rows, columns = (dims, slice(None)) if self.conv1d else (slice(None), dims)
        weight = block(self.module, self.weight, rows, columns, transpose=self.conv1d)
        return (weight, *(block(*A, columns=dims) for A, _ in lora_factors(self.module)))

    def obstacle(self, examined: bool) -> str:
        """Explain why the module is not linear in its weight (and LoRA's); empty if it is."""
        cls, weight = type(self.module), getattr(self.module, self.weight, None)
        if cls.__module__.startswith("peft.tuners.") and not is_lora(self.module):
            return f"no known symmetry of {cls.__module__.split('.')[2]}'s {cls.__name__}"
        if isinstance(weight, torch.Tensor) and not (weight.is_floating_point() or weight.is_complex()):
            return f"quantised: the weight has dtype {str(weight.dtype).removeprefix('torch.')}"
        if not examined and isinstance(self.module, nn.Linear) and cls.forward is not nn.Linear.forward:
            return f"{cls.__name__} is a subclass of Linear with its own forward"
        return lora_obstacle(self.module)


def head_pairs(name: str, kind: str, heads: Heads, one: Projection, two: Projection) -> Iterator[SymmetricPair]:
    """Yield the pairs of one kind, head by head: on the planes that RoPE rotates, and on the other dimensions.

    Of values and outputs (``"vo"``) the second projection leads out of head space.
    """
    size, turned = heads.size, heads.rotary_size if heads.group in PLANES else 0
    obstacle = one.obstacle(heads.examined) or two.obstacle(heads.examined)
    parts: list[tuple[str, GL, int, int, str | None]] = []
    if turned:
        planes = GL(turned // 2, diagonal=True, field="complex")
        parts.append(("rotary" if kind == "qk" else "", planes, 0, turned, heads.group))
    if turned < size:
        diagonal, positive = heads.group in ("diagonal", "positive"), heads.group == "positive"
        parts.append(("", GL(size - turned, diagonal=diagonal, positive=positive), turned, size - turned, None))
    for i in range(heads.number):
        j = i % heads.kv_number if heads.cyclic else i * heads.kv_number // heads.number
        if obstacle:
            yield SymmetricPair(name, kind, None, head=i, reason=heads.reason or obstacle)
            continue
        G = one.input_blocks(j if kind == "vo" else i, size)
        H = two.output_blocks(i, size) if kind == "vo" else two.input_blocks(j, size)
        if heads.reason:
            yield SymmetricPair(name, kind, None, G, H, i, reason=heads.reason)
            continue
        null = tuple(starmap(block, two.bias_rows(j, size) if kind == "qk" and heads.key_bias_null else ()))
        for part, group, start, count, rotary in parts:
            if {b.key for b in G} & {b.key for b in H}:
                yield SymmetricPair(name, kind, None, head=i, part=part, reason=TIED)
            else:
                factors = (G, H, () if rotary else null)
                g, h, no_effect = (tuple(b.part(start, count, rotary) for b in blocks) for blocks in factors)
                yield SymmetricPair(name, kind, group, g, h, i, part, null=no_effect)


def attention_pairs(
    name: str, heads: Heads, *, q: Projection, k: Projection, v: Projection, o: Projection
) -> list[SymmetricPair]:
    r"""List the Q–K and V–O pairs of a multi-head attention layer, one of each per query head.

    With the column convention q = x W_Q + b_q and biases as one more row: :math:`G = [W_Q; b_q^T]`,
    :math:`H = [W_K; b_k^T]`, and :math:`G = [W_V; b_v^T]`, H the head's slice of :math:`W_O^T`; the group is GL(h).

    Parameters
    ----------
    name : str
        Path of the module.
    heads : Heads
        Number of heads and, if it is not clear from the projections, their size; ``group``, ``rotary_size`` (RoPE) and
        ``reason`` are those of queries and keys.
    q, k, v, o : Projection
        Location of the weights.

    Returns
    -------
    list of SymmetricPair
        Of kind ``"qk"`` or ``"vo"``; under RoPE the rotated dimensions form a separate pair.

    Notes
    -----
    Paper, §4.2 and App. C; in App. C.1 the printed W_iᵒ are rows of Wᵒ.

    Examples
    --------
    Grouped queries under RoPE; :func:`find_symmetric_pairs` merges the heads that share keys:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Heads, Projection, attention_pairs
    >>> q, k, v, o = (Projection(nn.Linear(*size, bias=False)) for size in [(8, 8), (8, 4), (8, 4), (8, 8)])
    >>> pairs = attention_pairs("attention", Heads(4, 2, group="half", rotary_size=2), q=q, k=k, v=v, o=o)
    >>> print(pairs[0].name, pairs[0].group, pairs[1].name, pairs[1].group)
    attention qk head 0 rotary (ℂ*)^1 attention vo head 0 GL(2)
    """
    size = heads.size or getattr(q.module, q.weight).shape[1 if q.conv1d else 0] // heads.number
    qk = replace(heads, size=size, kv_number=heads.kv_number or heads.number)
    vo = Heads(qk.number, qk.kv_number, size)
    pairs = [*head_pairs(name, "qk", qk, q, k), *head_pairs(name, "vo", vo, v, o)]
    return sorted(pairs, key=lambda p: p.head or 0)
