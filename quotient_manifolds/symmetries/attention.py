"""The pairs of multi-head attention layers: a Q–K and a V–O pair per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .blocks import GL, Block, block
from .pairs import SymmetricPair, pair_or_reason
from .peft_lora import is_lora, lora_factors, lora_obstacle

__all__ = ["Projection", "Rows", "attention_pairs", "qk_pairs", "vo_pairs"]


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
        shape = tuple(getattr(self.module, self.attribute).shape)
        if shape[-1] != size:
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
    rows : tuple of str
        Further parameters whose last dimension runs over the heads: more rows of the same stack.
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
    rows: tuple[str, ...] = ()
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
        if self.conv1d:
            found = [block(self.module, self.weight, columns=dims, rotary=rotary)]
        else:
            found = [block(self.module, self.weight, dims, transpose=True, rotary=rotary)]
        whole = slice(head * size + offset, head * size + offset + count)
        found.extend(block(self.module, row, columns=whole, rotary=rotary) for row in self.rows)
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

    def output_blocks(self, head: int, size: int, rotary: str | None = None) -> tuple[Block, ...]:
        """Return rows of a stack for a projection *out of* head space: the head's slice of the weight."""
        dims = self._dims(self.start, head, size, 0, size)
        if self.conv1d:
            found = block(self.module, self.weight, dims, transpose=True, rotary=rotary)
        else:
            found = block(self.module, self.weight, columns=dims, rotary=rotary)
        return (found, *(block(*A, columns=dims, rotary=rotary) for A, _ in lora_factors(self.module)))


def qk_pairs(
    name: str, heads: int, kv_heads: int, q: Projection, k: Projection, size: int, *, rotary_size: int = 0,
    rotary: str = "half", null: bool = True, obstruction: str = "",
) -> Iterator[SymmetricPair]:  # fmt: skip
    """Return the pairs of query heads and their key heads, for the dimensions that RoPE rotates and the others."""
    reason = obstruction or q.obstacle() or k.obstacle()
    for i in range(heads):
        j = i * kv_heads // heads
        if reason:
            yield SymmetricPair(name, "qk", None, head=i, reason=reason)
            continue
        if rotary_size:
            dims = (size, 0, rotary_size, rotary)
            group = GL(rotary_size // 2, diagonal=True, field="complex")
            yield pair_or_reason(
                name, "qk", group, q.input_blocks(i, *dims), k.input_blocks(j, *dims), i, part="rotary"
            )
        if rotary_size < size:
            rest = (size, rotary_size, size - rotary_size)
            G, H, bias = q.input_blocks(i, *rest), k.input_blocks(j, *rest), k.bias_blocks(j, *rest)
            yield pair_or_reason(name, "qk", GL(size - rotary_size), G, H, i, null=bias if null else ())


def vo_pairs(
    name: str, heads: int, kv_heads: int, v: Projection, o: Projection, size: int, *, group: GL | None = None,
    rotary: str | None = None, obstruction: str = "",
) -> Iterator[SymmetricPair]:  # fmt: skip
    """Return the pairs of value heads and slices of the output projection; on RoPE's planes the group is complex."""
    reason = obstruction or v.obstacle() or o.obstacle()
    for i in range(heads):
        if reason:
            yield SymmetricPair(name, "vo", None, head=i, reason=reason)
            continue
        G = v.input_blocks(i * kv_heads // heads, size, 0, size, rotary)
        yield pair_or_reason(name, "vo", group or GL(size), G, o.output_blocks(i, size, rotary), i)


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
    kv_heads = kv_heads or heads
    first = qk_pairs(
        name, heads, kv_heads, q, k, size, rotary_size=rotary_size, rotary=rotary, null=key_bias_null,
        obstruction=qk_obstruction,
    )  # fmt: skip
    second = vo_pairs(name, heads, kv_heads, v, o, value_size or size, obstruction=vo_obstruction)
    yield from sorted([*first, *second], key=lambda p: p.head or 0)
