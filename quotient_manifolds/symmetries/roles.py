"""The roles of an attention layer's weights (query, key, value, output), read from the names of its parameters."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .attention import Projection, Rows, qk_pairs, vo_pairs
from .blocks import GL
from .pairs import SymmetricPair

__all__ = ["Place", "Roles", "holds_keys", "layout_pairs", "places", "roles_of"]

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
_FURTHER = frozenset({"pos", "global", "relative"})
#: Parameters of relative positions that are added to queries, one row a head; keys that all heads share; and keys of
#: every head, of shape (rows, heads, head size).
_ADDED = ("bias_u", "bias_v", "pos_bias_u", "pos_bias_v", "r_w_bias", "r_r_bias", "r_s_bias")
_SHARED = ("rel_pos_h", "rel_pos_w")
_KEYS = ("r", "r_kernel", "seg_embed")
#: Largest head size that is tried.
LARGEST = 512
#: Numbers a column, of any sign or only positive ones.
_DIAGONAL = ("diagonal", "positive")
#: How RoPE pairs dimensions.
PLANES = ("half", "interleaved")


@dataclass(frozen=True)
class Roles:
    """The projections of an attention layer.

    ``main`` holds them by letters: ``"q"``, ``"k"``, ``"v"``, ``"o"``, or several in one matrix, ``"qkv"``. ``further``
    holds more rows of the same factor, such as projections of positions; ``beside`` says where a letter's bias is if it
    does not lie with its weight (BEiT), and which parameters are appended (torch's ``bias_k``).
    """

    main: Mapping[str, Projection]
    further: Mapping[str, tuple[Projection | Rows, ...]]
    beside: Mapping[str, dict[str, Any]]

    def home(self, letter: str) -> str:
        """Return the letters of the matrix that contains a letter."""
        return next(letters for letters in self.main if letter in letters)

    @property
    def width(self) -> dict[str, int]:
        """Total number of head dimensions of all heads, in every matrix."""
        return {c: p.dimensions(into=c != "o") for c, p in self.main.items()}


@dataclass(frozen=True)
class Place:
    """Where the heads lie in the matrices, and what acts on them.

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

    def __post_init__(self) -> None:
        if self.group in PLANES and not self.rotary_size:
            object.__setattr__(self, "rotary_size", self.size)

    def projection(self, roles: Roles, letter: str) -> Projection:
        """Describe where a letter's heads lie."""
        home = roles.home(letter)
        found = replace(roles.main[home], further=roles.further.get(letter, ()), **roles.beside.get(letter, {}))
        if home == letter:
            return found
        share = {c: (self.heads if c == "q" else self.kv_heads) // self.blocks * self.size for c in home}
        before = self.order[: self.order.index(letter)]
        start = found.start + sum(share[c] for c in before if c in home)
        return replace(found, start=start, stride=sum(share.values()), per=share[letter] // self.size)


def _words(name: str) -> set[str]:
    """Split a parameter's name into the words that matter."""
    words = [w for w in re.split(r"[._\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if w]
    return {w for w in words if w not in _NOISE}


def _letters(words: set[str]) -> str | None:
    """Return the letters of a role, or None if it is not a projection."""
    if not words:
        return "o"
    found = [_LETTERS.get(w) for w in words]
    if None in found:
        return None
    return "".join(c for c in "qkvo" if any(c in (letters or "") for letters in found))


def _projects(module: nn.Module) -> bool:
    """Tell whether a module may be a projection; gradients and moves judge those with a forward of their own."""
    return isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) or type(module).__name__ in ("Conv1D", "QuantLinear")


def _weights(module: nn.Module, path: str = "", without: Container[nn.Module] = ()) -> Iterator[tuple[str, Projection]]:
    """Iterate over possible projections: linear layers, adapted ones, convolutions, and bare matrices."""
    base = getattr(module, "base_layer", module)
    if _projects(base) or base is not module:
        yield path, Projection(module, conv1d=type(base).__name__ == "Conv1D")
        return
    for name, p in module.named_parameters(recurse=False):
        if p.dim() == 2 and name.endswith("weight") and name != "weight":
            yield f"{path}.{name}", Projection(module, name, f"{name.removesuffix('weight')}bias")
        if p.dim() == 3 and name in ("q", "k", "v", "o"):  # (width, heads, head size)
            yield f"{path}.{name}", Projection(module, name, conv1d=name != "o")
    for name, child in module.named_children():
        if child not in without:
            yield from _weights(child, f"{path}.{name}", without)


def roles_of(module: nn.Module, without: Container[nn.Module] = ()) -> Roles | None:
    """Read the roles of the weights in a module from their names; None if they do not form one attention layer.

    Submodules in ``without`` are passed over.
    """
    if any(hasattr(module, mark) for mark in ("conv1d", "A_log")):  # a state-space layer
        return None
    main: dict[str, Projection] = {}
    further: dict[str, tuple[Projection | Rows, ...]] = {}
    for name, found in _weights(module, without=without):
        words = _words(name)
        letters = "qkv" if name.lower().endswith(_PACKED) else _letters(words - _FURTHER)
        letters = "k" if name.endswith("linear_pos") else letters
        if letters is None or (letters == "o" and words & _FURTHER):
            continue
        if words & _FURTHER:
            further[letters] = (*further.get(letters, ()), found)
        elif letters in main:
            return None
        else:
            main[letters] = found
    if "q" in main and "qkv" in main:
        main["kv"] = main.pop("qkv")
    if sorted("".join(main)) != sorted("qkvo"):
        return None
    for letter, rows in _positions(module):
        further[letter] = (*further.get(letter, ()), rows)
    return Roles(main, further, {c: _beside(module, main, c) for c in "qkv"})


def _positions(module: nn.Module) -> Iterator[tuple[str, Projection | Rows]]:
    """Iterate over the parameters of relative positions that no layer holds, and the letters that they belong to."""
    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            if name in (*_ADDED, *_SHARED) and p.dim() == 2:
                yield "q" if name in _ADDED else "k", Rows(owner, name, shared=name in _SHARED)
            elif name in _KEYS and p.dim() == 3:
                yield "k", Projection(owner, name, conv1d=True)


def holds_keys(module: nn.Module) -> bool:
    """Tell whether the children of a module are named like keys, values and outputs, with or without queries."""
    found = (_letters(_words(n)) for n, m in module.named_children() if _projects(m))
    return set("kvo") <= set("".join(letters or "" for letters in found))


def _beside(module: nn.Module, main: Mapping[str, Projection], letter: str) -> dict[str, Any]:
    """Find biases that do not lie with their weights, and what torch's layer appends to keys and values."""
    found: dict[str, Any] = {}
    for owner in module.modules():
        known = {name for name, p in owner.named_parameters(recurse=False) if p is not None}
        if letter not in main and f"{letter}_bias" in known:
            found |= {"bias_module": owner, "bias": f"{letter}_bias", "bias_start": 0}
        if letter in main and "in_proj_bias" in known:
            found |= {"bias": "in_proj_bias", "bias_start": "qkv".index(letter) * main[letter].dimensions()}
        if f"bias_{letter}" in known and any(owner is p.module for p in main.values()):  # else of another meaning
            found["rows"] = (f"bias_{letter}",)
    return found


def layout_pairs(name: str, roles: Roles, qk: Place | None, vo: Place | None) -> list[SymmetricPair]:
    """Yield the pairs of a layer, head by head: those of queries and keys, and those of values and outputs."""
    found: list[SymmetricPair] = []
    for kind, place in (("qk", qk), ("vo", vo)):
        if place is None:
            continue
        one, two = (place.projection(roles, c) for c in kind)
        heads, size, rotary = (place.heads, place.kv_heads), place.size, place.group if place.group in PLANES else None
        reason = "" if rotary or place.group in ("GL", *_DIAGONAL) else place.group
        if kind == "qk":
            turned, null = place.rotary_size if rotary else 0, place.key_bias_null
            emitted = qk_pairs(
                name, *heads, one, two, size, rotary_size=turned, rotary=rotary or "half", null=null, obstruction=reason
            )
        else:
            group = GL(size // 2, diagonal=True, field="complex") if rotary else None
            emitted = vo_pairs(name, *heads, one, two, size, group=group, rotary=rotary, obstruction=reason)
        if place.group in _DIAGONAL:
            diagonal = GL(size, diagonal=True, positive=place.group == "positive")
            emitted = (p if p.group is None else replace(p, group=diagonal) for p in emitted)
        found += emitted
    return sorted(found, key=lambda p: p.head or 0)


def places(roles: Roles, kind: str, heads: int | None = None) -> Iterator[Place]:
    """List where the heads may lie: so many, where their number is known."""
    width = roles.width
    homes = {c: roles.home(c) for c in "qkvo"}
    apart = kind == "qk" and homes["q"] != "qkv"  # in one matrix with the values, all heads have the same size
    queries = width[homes["q"]] // len(homes["q"]) if apart else width["o"]
    for h in range(1, LARGEST + 1) if heads is None else (queries // heads,):
        keys = homes["k" if kind == "qk" else "v"]
        shared = width[keys] - queries * ("q" in keys)
        others = len(keys) - ("q" in keys)
        if not h or queries % h or shared <= 0 or shared % (others * h):
            continue
        found, kv_heads = queries // h, shared // (others * h)
        if found % kv_heads or found != (heads or found):
            continue
        several = len(keys) > 1
        for blocks in sorted({1, *((kv_heads,) if several else ()), *((4,) if several and kv_heads % 4 == 0 else ())}):
            for order in ("qkv", "qvk") if len(keys) == 3 else ("qkv",):
                yield Place(found, kv_heads, h, blocks, order)
