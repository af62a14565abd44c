"""What the names and shapes of a layer's parameters say: where its projections lie, and how many heads they may have.

They propose; gradients and a move decide what holds (:mod:`.examination`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from .lora import is_lora, lora_factors, lora_obstacle
from .refusals import Cause
from .slots import Slot, outline, slot

#: Words of a name that leave the role open, and the role that each other word stands for. A name that consists of the
#: first kind alone ("proj") means the output.
_NOISE = frozenset("""
    proj project projection lin linear layer attn attention self dense to fc head heads weight in net post pack unify
    kernel base default w c att states
""".split())  # fmt: skip  # noqa: SIM905
_LETTERS = {
    "q": "q", "query": "q", "queries": "q", "wq": "q", "k": "k", "key": "k", "keys": "k", "wk": "k", "v": "v",
    "value": "v", "values": "v", "wv": "v", "qkv": "qkv", "wqkv": "qkv", "kv": "kv", "wkv": "kv", "qk": "qk",
    "o": "o", "out": "o", "output": "o", "wo": "o",
}  # fmt: skip
_PACKED = ("c_attn", "in_proj", "in_proj_weight", "w_pack")
#: One matrix for each head, and what its bias is called with b instead of w.
_STACKED = re.compile(r"(_?)w(_?[qkvo])", re.IGNORECASE)
_FURTHER = frozenset({"pos", "global", "relative"})
#: Parameters of relative positions that are added to queries, one row a head; keys that all heads share; and keys of
#: every head, of shape (rows, heads, head size).
_ADDED = ("bias_u", "bias_v", "pos_bias_u", "pos_bias_v", "r_w_bias", "r_r_bias", "r_s_bias")
_SHARED = ("rel_pos_h", "rel_pos_w")
_KEYS = ("r_kernel", "seg_embed")
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d)
#: Layers that may be projections, by their classes and by the names of these.
_LAYERS, _BY_NAME = (nn.Linear, nn.Conv1d, nn.Conv2d), ("Conv1D", "QuantLinear")
#: Largest head size that is tried.
LARGEST = 512


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


def _read(name: str, further: Collection[str] = ()) -> tuple[set[str], str | None]:
    """Return the words of a parameter's name that matter, and the letters of its role; None if it has none."""
    every = re.split(r"[._\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    words = {w for w in every if w and w not in _NOISE}
    known = words.difference(further)
    if not known <= _LETTERS.keys():
        return words, None
    letters = "".join(_LETTERS[w] for w in known)
    return words, "".join(c for c in "qkvo" if c in letters) or "o"


def _weights(root: nn.Module, module: nn.Module, path: str = "") -> Iterator[Projection]:
    """Iterate over possible projections in a module: linear layers, adapted ones, convolutions, and bare matrices.

    Gradients and moves judge those with a forward of their own. A child of two names has the first.
    """
    base = getattr(module, "base_layer", module)
    cls = type(base).__name__
    if isinstance(base, _LAYERS) or cls in _BY_NAME or base is not module:
        yield Projection(root, path, conv1d=cls == "Conv1D")
        return
    for name, p in module.named_parameters(recurse=False):
        if p.dim() == 2 and name.endswith("weight") and name != "weight":
            yield Projection(root, path, name, f"{name.removesuffix('weight')}bias")
        elif p.dim() == 3 and (found := _STACKED.fullmatch(name)):
            yield Projection(root, path, name, f"{found[1]}b{found[2]}", stacked=True)
    for name, child in module.named_children():
        yield from _weights(root, child, f"{path}.{name}".removeprefix("."))


def roles_of(module: nn.Module, idle: Callable[[nn.Module], bool] | None = None) -> dict[str, Projection] | None:
    """Read the roles of the weights in a module from their names; None if they do not form one attention layer.

    They are projections by the letters ``"q"``, ``"k"``, ``"v"``, ``"o"``.

    A layer whose name says nothing ("proj") is the output where no other layer is; of several, the one that is not
    ``idle``. If that is not known, they are told apart later.
    """
    if any(hasattr(module, mark) for mark in ("conv1d", "A_log")):  # a state-space layer
        return None
    main, unnamed = dict[str, Projection](), list[Projection]()
    further = defaultdict[str, tuple[Projection | Rows, ...]](tuple)
    for found in _weights(module, module):
        name = found.path if found.weight == "weight" else found.name(found.weight)
        words, letters = _read(name, _FURTHER)
        letters = "qkv" if name.lower().endswith(_PACKED) else "k" if name.endswith("linear_pos") else letters
        if letters is None or (letters == "o" and words & _FURTHER):
            continue
        if not words and letters == "o":
            unnamed.append(found)
        elif words & _FURTHER:
            further[letters] += (found,)
        elif letters in main:
            return None
        else:
            main[letters] = found
    if unnamed and "o" not in main:
        used = [found for found in unnamed if idle is None or len(unnamed) == 1 or not idle(found.module)]
        if len(used) != 1 and idle is not None:
            return None
        main["o"] = used[0]
    if "q" in main and "qkv" in main:
        main["kv"] = main.pop("qkv")
    if sorted("".join(main)) != sorted("qkvo"):
        return None
    more, biases = _elsewhere(module, main)
    roles = dict[str, Projection]()
    for letters, whole in main.items():
        for c in letters:
            rows = (*further[c], *more[c])
            roles[c] = replace(whole, letters=letters, into=c != "o", further=rows, **biases[c])
    return roles


def _elsewhere(
    module: nn.Module, main: Mapping[str, Projection]
) -> tuple[dict[str, list[Projection | Rows]], dict[str, dict[str, Any]]]:
    """Find by their letters what projections lack: further rows of factors, and biases that lie elsewhere.

    Rows are parameters of relative positions that no layer holds, and what torch's layer appends to keys and values.
    """
    layers = {p.path for p in main.values()}
    further, biases = defaultdict[str, list[Projection | Rows]](list), defaultdict[str, dict[str, Any]](dict)
    for path, owner in module.named_modules():
        for name, p in owner.named_parameters(recurse=False):
            if name in (*_ADDED, *_SHARED) and p.dim() == 2:
                rows = Rows(module, f"{path}.{name}".removeprefix("."), shared=name in _SHARED)
                further["q" if name in _ADDED else "k"].append(rows)
            elif name in _KEYS and p.dim() == 3:
                further["k"].append(Projection(module, path, name, conv1d=True))
            elif name in ("bias_k", "bias_v") and path in layers:  # else of another meaning
                further[name[-1]].append(Projection(module, path, name, "", conv1d=True))
            elif name in ("q_bias", "k_bias", "v_bias") and name[0] not in main:
                biases[name[0]] |= {"bias_path": path, "bias": name, "bias_start": 0}
            elif name == "in_proj_bias":
                for i, c in enumerate("qkv"):
                    if c in main:
                        biases[c] |= {"bias": name, "bias_start": i * main[c].dimensions()}
    return further, biases


def holds_keys(module: nn.Module) -> bool:
    """Return whether the children of a module are named like keys, values and outputs, with or without queries."""
    children = (name for name, m in module.named_children() if isinstance(m, _LAYERS) or type(m).__name__ in _BY_NAME)
    return set("kvo") <= set("".join(_read(name)[1] or "" for name in children))


def possible_heads(roles: Mapping[str, Projection], kind: str, number: int | None = None) -> Iterator[Heads]:
    """List where the heads may lie: so many, where their number is known."""
    apart = kind == "qk" and roles["q"].letters != "qkv"  # in one matrix with the values, all heads have the same size
    queries = roles["q"].dimensions() // len(roles["q"].letters) if apart else roles["o"].dimensions()
    of_keys = roles["k" if kind == "qk" else "v"]
    letters = of_keys.letters
    shared, others = of_keys.dimensions() - queries * ("q" in letters), len(letters.replace("q", ""))
    # Parts of heads may lie in a matrix of each head.
    stacked = [roles[c] for c in kind if roles[c].stacked]
    single = [getattr(p.module, p.weight).shape[2 if p.into else 1] for p in stacked]
    for h in range(1, LARGEST + 1) if number is None else (queries // number,):
        if not h or queries % h or shared <= 0 or shared % (others * h) or any(width % h for width in single):
            continue
        found, kv_number = queries // h, shared // (others * h)
        if found % kv_number or found != (number or found):
            continue
        several = [kv_number, *([4] if kv_number % 4 == 0 else [])] if len(letters) > 1 else []
        for blocks in sorted({1, *several}):
            for order in ("qkv", "qvk") if len(letters) == 3 else ("qkv",):
                for cyclic in (False, True) if 1 < kv_number < found and blocks == 1 else (False,):
                    yield Heads(found, kv_number, h, blocks=blocks, order=order, cyclic=cyclic, examined=number is None)
