"""The pairs of multi-head attention layers: a Q–K and a V–O pair per head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from .lora import is_lora, lora_factors, lora_obstacle
from .pairs import Cause, Claim, Refusal, SymmetricPair
from .slots import GL, PLANES, Slot, outline, slot


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
    cause, reason : Cause, str
        Why nothing acts on them; the reason is empty, and the cause ``Cause.BROKEN``, otherwise.
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
    cause: Cause = Cause.BROKEN
    reason: str = ""
    key_bias_null: bool = True
    blocks: int = 1
    order: str = "qkv"
    cyclic: bool = False
    examined: bool = False


@dataclass(frozen=True)
class Rows:
    """A matrix that is added to queries or multiplied with them: one row a head, or the same rows for all heads."""

    root: nn.Module
    name: str
    shared: bool

    def slots(self, number: int, size: int) -> list[tuple[Slot, ...]]:
        """Return the rows of every head; none if heads have another size than the rows."""
        heads = [slice(None) if self.shared else slice(head, head + 1) for head in range(number)]
        found = [slot(self.root, self.name, rows) for rows in heads]
        return [(rows,) if rows.size[1] == size else () for rows in found]


@dataclass(frozen=True)
class Projection:
    """Where a query, key, value or output projection lies in an attention layer.

    Attributes
    ----------
    root : nn.Module
        The attention layer.
    path : str
        Name of the projection in it; empty if the layer itself owns the parameters.
    weight, bias : str
        Names of the projection's parameters; a bias that is missing or None is left out.
    start, bias_start : int
        First head dimension of head 0 in the weight and in the bias.
    stride, per : int
        Distance from one group of ``per`` heads to the next (0: the heads are consecutive).
    conv1d : bool
        The weight is (in, out), as GPT-2's ``Conv1D``, instead of (out, in).
    stacked : bool
        The weight is (heads, in, head size), or (heads, head size, out), and the bias (heads, head size).
    bias_path : str, optional
        Owner of the bias, if it is another module; there the heads are consecutive.
    further : tuple of Projection or Rows
        Others that add to the same scores, such as those of positions: more rows of the same stack.
    into : bool
        It leads into head space, as those of queries, keys and values do, and not out of it.
    letters : str
        Those of all projections in its matrix, such as ``"qkv"``, if only :class:`Heads` say which rows are whose.
    module, bias_owner : nn.Module
        The owners of the weight and of the bias.

    Examples
    --------
    One matrix with rows [q; k; v], as in vision transformers:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Heads, Projection, attention_pairs
    >>> layer = nn.ModuleDict({"qkv": nn.Linear(8, 3 * 8), "proj": nn.Linear(8, 8)})
    >>> q, k, v = (Projection(layer, "qkv", start=8 * i) for i in range(3))
    >>> pairs = attention_pairs(Heads(2, size=4), q=q, k=k, v=v, o=Projection(layer, "proj"))
    >>> [(p.kind, p.head, p.G[0].name) for p in pairs[:2]]
    [('qk', 0, 'qkv.weight'), ('vo', 0, 'qkv.weight')]
    """

    root: nn.Module
    path: str = ""
    weight: str = "weight"
    bias: str = "bias"
    start: int = 0
    bias_start: int | None = None
    stride: int = 0
    per: int = 1
    conv1d: bool = False
    stacked: bool = False
    bias_path: str | None = None
    further: tuple[Projection | Rows, ...] = ()
    into: bool = True
    letters: str = ""
    module: Any = field(init=False, repr=False, compare=False)
    bias_owner: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        paths = (self.path, self.path if self.bias_path is None else self.bias_path)
        # Unlike get_submodule, this finds parts of TorchScript too.
        module, bias_owner = (attrgetter(path)(self.root) if path else self.root for path in paths)
        vars(self).update(module=module, bias_owner=bias_owner)

    def name(self, attribute: str) -> str:
        """Return a parameter's name in the layer; peft's modules show those of the ones that they wrap."""
        owner, path = self.module, self.path
        if attribute == self.bias and self.bias_path is not None:
            owner, path = self.bias_owner, self.bias_path
        while "." not in attribute and hasattr(owner, "base_layer"):
            owner, path = owner.base_layer, f"{path}.base_layer".removeprefix(".")
        return f"{path}.{attribute}".removeprefix(".")

    def dimensions(self) -> int:
        """Return the total dimension of all heads."""
        size = getattr(self.module, "out_features" if self.into else "in_features", None)
        if self.weight == "weight" and isinstance(size, int):  # quantised weights are packed
            return size
        weight: torch.Tensor = getattr(self.module, self.weight)
        if self.stacked:
            return int(weight.shape[0] * weight.shape[2 if self.into else 1])
        return int((weight if self.weight == "weight" else weight.flatten(1)).shape[self.into == self.conv1d])

    def slots(self, number: int, size: int) -> list[tuple[Slot, ...]]:
        """Return the rows of every head: of the weight and, into head space, of whatever adds to its output."""
        if self.stacked:
            found = self._of_stack(number, size)
        else:
            matrices = [slot(self.root, self.name(self.weight), transpose=self.into != self.conv1d)]
            matrices += self._of_lora() if hasattr(self.module, "base_layer") else []
            columns = [(s, self.start, self.stride) for s in matrices]
            if self.into and getattr(self.bias_owner, self.bias, None) is not None:
                start = self.start if self.bias_start is None else self.bias_start
                stride = self.stride if self.bias_path is None else 0
                columns.append((slot(self.root, self.name(self.bias)), start, stride))
            found = []
            for group, place in (divmod(head, self.per) for head in range(number)):
                firsts = [start + group * (stride or size * self.per) + place * size for _, start, stride in columns]
                found.append(tuple(s.part(first, size) for (s, *_), first in zip(columns, firsts, strict=True)))
        for p in self.further:
            found = [(*one, *more) for one, more in zip(found, p.slots(number, size), strict=True)]
        return found

    def _of_stack(self, number: int, size: int) -> list[tuple[Slot, ...]]:
        """Return the rows of every head, or a part of them, where each head has its own matrix."""
        name, bias, found = self.name(self.weight), getattr(self.bias_owner, self.bias, None), []
        whole = outline(self.root, name)
        for head in range(number):
            i, start = divmod(head * size, whole.shape[2 if self.into else 1])
            part = slice(start, start + size)
            slots = [Slot.from_view(name, whole, whole[i][:, part] if self.into else whole[i][part].T)]
            if self.into and bias is not None:
                slots.append(slot(self.root, self.name(self.bias), slice(i, i + 1), part))
            found.append(tuple(slots))
        return found

    def _of_lora(self) -> list[Slot]:
        """Return the columns of the factors that add to the weight: with (x Aᵀ) Bᵀ + b, Bᵀ and b, or A out of heads."""
        found = []
        for A, B in lora_factors(self.module):
            adapter = B.rpartition(".")[0]
            found.append(slot(self.root, self.name(B if self.into else A), transpose=self.into))
            if self.into and getattr(attrgetter(adapter)(self.module), "bias", None) is not None:
                found.append(slot(self.root, self.name(f"{adapter}.bias")))
        return found

    def obstacle(self, examined: bool) -> str:
        """Explain why the module is not linear in its weight (and LoRA's); empty if it is."""
        cls, weight = type(self.module), getattr(self.module, self.weight, None)
        by_peft = cls.__module__.startswith("peft.tuners.")
        if by_peft and not is_lora(self.module):
            return f"no known symmetry of {cls.__module__.split('.')[2]}'s {cls.__name__}"
        if isinstance(weight, torch.Tensor) and not (weight.is_floating_point() or weight.is_complex()):
            return f"quantised: the weight has dtype {str(weight.dtype).removeprefix('torch.')}"
        if not examined and isinstance(self.module, nn.Linear) and cls.forward is not nn.Linear.forward:
            return f"{cls.__name__} is a subclass of Linear with its own forward"
        return lora_obstacle(self.module) if by_peft else ""


def pairs_of_roles(roles: Mapping[str, Projection], **kinds: Heads) -> list[Claim]:
    """List the pairs of some kinds (``qk``, ``vo``) with these heads, head by head, from projections by their letters.

    Of a matrix of several letters, :class:`Heads` say where the heads of each lie.
    """
    found = list[Claim]()
    for kind, heads in kinds.items():
        projections = []
        for letter in kind:
            whole = roles[letter]
            if len(whole.letters) > 1:
                number = {c: heads.number if c == "q" else heads.kv_number for c in whole.letters}
                widths = {c: n // heads.blocks * heads.size for c, n in number.items()}
                before = (c for c in heads.order[: heads.order.index(letter)] if c in widths)
                start, stride = whole.start + sum(widths[c] for c in before), sum(widths.values())
                whole = replace(whole, start=start, stride=stride, per=widths[letter] // heads.size)
            projections.append(whole)
        found += head_pairs(kind, heads, *projections)
    return sorted(found, key=lambda p: p.head or 0)


def head_pairs(kind: str, heads: Heads, one: Projection, two: Projection) -> Iterator[Claim]:
    """Yield the pairs of one kind, head by head: on the planes that RoPE rotates, and on the other dimensions.

    Of values and outputs (``"vo"``) the second projection leads out of head space.
    """
    size, several = heads.size, heads.kv_number
    if obstacle := one.obstacle(heads.examined) or two.obstacle(heads.examined):
        yield from (Refusal("", kind, heads.cause, heads.reason or obstacle, i) for i in range(heads.number))
        return
    # Keys and values may have fewer heads than queries and outputs.
    first = one.slots(heads.number if two.into else several, size)
    second = two.slots(several if two.into else heads.number, size)
    null = two.name(two.bias) if kind == "qk" and heads.key_bias_null else ""
    for i in range(heads.number):
        j = i % several if heads.cyclic else i * several // heads.number
        G, H = (first[i], second[j]) if two.into else (first[j], second[i])
        if heads.reason or heads.cause is not Cause.BROKEN:
            yield Refusal("", kind, heads.cause, heads.reason, i, G=G, H=H)
        else:
            yield from _parts_of(kind, heads, i, (G, H, tuple(s for s in H if s.name == null)))


def _parts_of(kind: str, heads: Heads, head: int, factors: tuple[tuple[Slot, ...], ...]) -> Iterator[Claim]:
    """Divide a head into the planes that RoPE rotates, and the other dimensions."""
    size, turned = heads.size, heads.rotary_size if heads.group in PLANES else 0
    parts: list[tuple[str, GL, int, int, str | None]] = []
    if turned:
        planes = GL(turned // 2, diagonal=True, field="complex")
        parts.append(("rotary" if kind == "qk" else "", planes, 0, turned, heads.group))
    if turned < size:
        diagonal, positive = heads.group in ("diagonal", "positive"), heads.group == "positive"
        parts.append(("", GL(size - turned, diagonal=diagonal, positive=positive), turned, size - turned, None))
    for part, group, start, count, rotary in parts:
        G, H, null = (tuple(s.part(start, count, rotary) for s in slots) for slots in factors)
        if set(G).isdisjoint(H):
            yield SymmetricPair("", kind, group, G, H, head, part, () if rotary else null)
        else:
            yield Refusal("", kind, Cause.TIED, head=head, part=part)


def attention_pairs(heads: Heads, *, q: Projection, k: Projection, v: Projection, o: Projection) -> list[Claim]:
    r"""List the Q–K and V–O pairs of a multi-head attention layer, one of each per query head.

    With the column convention q = x W_Q + b_q and biases as one more row: :math:`G = [W_Q; b_q^T]`,
    :math:`H = [W_K; b_k^T]`, and :math:`G = [W_V; b_v^T]`, H the head's slice of :math:`W_O^T`; the group is GL(h).

    Parameters
    ----------
    heads : Heads
        Number of heads and, if it is not clear from the projections, their size; ``group``, ``rotary_size`` (RoPE) and
        ``reason`` are those of queries and keys.
    q, k, v, o : Projection
        Location of the weights.

    Returns
    -------
    list of SymmetricPair or Refusal
        Of kind ``"qk"`` or ``"vo"``; under RoPE the rotated dimensions form a separate pair. Their weights have the
        names that they have in the layer.

    Notes
    -----
    Paper, §4.2 and App. C; in App. C.1 the printed W_iᵒ are rows of Wᵒ.

    Examples
    --------
    Grouped queries under RoPE; :func:`find` merges the heads that share keys:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Heads, Projection, attention_pairs
    >>> sizes = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8)}
    >>> layer = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    >>> projections = {name: Projection(layer, name) for name in layer}
    >>> pairs = attention_pairs(Heads(4, 2, group="half", rotary_size=2), **projections)
    >>> print(pairs[0].part, pairs[0].group, pairs[1].kind, pairs[1].group)
    rotary (ℂ*)^1 vo GL(2)
    """
    size = heads.size or getattr(q.module, q.weight).shape[1 if q.conv1d else 0] // heads.number
    qk = replace(heads, size=size, kv_number=heads.kv_number or heads.number)
    roles = {"q": q, "k": k, "v": v, "o": replace(o, into=False)}
    return pairs_of_roles(roles, qk=qk, vo=Heads(qk.number, qk.kv_number, size))
