"""What the names of a layer's parameters say: the roles of attention's weights, and possible pairs of other layers.

Names and shapes propose; gradients and a move decide what holds (:mod:`.examination`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from .attention import Heads, Projection, Rows, head_pairs, part_of
from .pairs import Claim

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
#: Largest head size that is tried.
LARGEST = 512
#: Parts of latent attention; and the projection of its queries, with that of a gate beside them in the second.
_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_QUERIES = ("q_b_proj", "q_gate_proj", "q_proj")


@dataclass(frozen=True)
class Roles:
    """The projections of an attention layer, by the letters ``"q"``, ``"k"``, ``"v"``, ``"o"``.

    ``homes`` says which letters lie in the same matrix as a letter, such as ``"qkv"``.
    """

    projections: Mapping[str, Projection]
    homes: Mapping[str, str]

    def width(self, letter: str) -> int:
        """Total number of head dimensions of all heads, in the matrix that contains a letter."""
        return self.projections[letter].dimensions(into=letter != "o")

    def placed(self, letter: str, heads: Heads) -> Projection:
        """Describe where a letter's heads lie."""
        home, whole = self.homes[letter], self.projections[letter]
        if home == letter:
            return whole
        share = {c: (heads.number if c == "q" else heads.kv_number) // heads.blocks * heads.size for c in home}
        start = whole.start + sum(share[c] for c in heads.order[: heads.order.index(letter)] if c in home)
        return replace(whole, start=start, stride=sum(share.values()), per=share[letter] // heads.size)

    def pairs(self, **kinds: Heads) -> list[Claim]:
        """List the pairs of some kinds (``qk``, ``vo``) with these heads, head by head."""
        found = (head_pairs(c, heads, *(self.placed(x, heads) for x in c)) for c, heads in kinds.items())
        return sorted(chain(*found), key=lambda p: p.head or 0)


def _words(name: str) -> set[str]:
    """Split a parameter's name into the words that matter."""
    words = [w for w in re.split(r"[._\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if w]
    return {w for w in words if w not in _NOISE}


def _letters(words: set[str]) -> str | None:
    """Return the letters of a role, or None if it is not a projection."""
    if not words <= _LETTERS.keys():
        return None
    letters = "".join(_LETTERS[w] for w in words)
    return "".join(c for c in "qkvo" if c in letters) or "o"


def _projects(module: nn.Module) -> bool:
    """Return whether a module may be a projection; gradients and moves judge those with a forward of their own."""
    return isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) or type(module).__name__ in ("Conv1D", "QuantLinear")


def _weights(root: nn.Module, path: str = "") -> Iterator[Projection]:
    """Iterate over possible projections: linear layers, adapted ones, convolutions, and bare matrices."""
    module = part_of(root, path)
    base = getattr(module, "base_layer", module)
    if _projects(base) or base is not module:
        yield Projection(root, path, conv1d=type(base).__name__ == "Conv1D")
        return
    for name, p in module.named_parameters(recurse=False):
        if p.dim() == 2 and name.endswith("weight") and name != "weight":
            yield Projection(root, path, name, f"{name.removesuffix('weight')}bias")
        elif p.dim() == 3 and (found := _STACKED.fullmatch(name)):
            yield Projection(root, path, name, f"{found[1]}b{found[2]}", stacked=True)
    for name, _ in module.named_children():
        yield from _weights(root, f"{path}.{name}".removeprefix("."))


def roles_of(module: nn.Module, idle: Callable[[nn.Module], bool] | None = None) -> Roles | None:
    """Read the roles of the weights in a module from their names; None if they do not form one attention layer.

    A layer whose name says nothing ("proj") is the output where no other layer is; of several, the one that is not
    ``idle``. If that is not known, they are told apart later.
    """
    if any(hasattr(module, mark) for mark in ("conv1d", "A_log")):  # a state-space layer
        return None
    main: dict[str, Projection] = {}
    further: dict[str, tuple[Projection | Rows, ...]] = {}
    unnamed: list[Projection] = []
    for found in _weights(module):
        name = found.path if found.weight == "weight" else found.name(found.weight)
        words = _words(name)
        letters = "qkv" if name.lower().endswith(_PACKED) else _letters(words - _FURTHER)
        letters = "k" if name.endswith("linear_pos") else letters
        if letters is None or (letters == "o" and words & _FURTHER):
            continue
        if not words and letters == "o":
            unnamed.append(found)
        elif words & _FURTHER:
            further[letters] = (*further.get(letters, ()), found)
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
    for letter, rows in _rows(module, {p.path for p in main.values()}):
        further[letter] = (*further.get(letter, ()), rows)
    homes = {c: letters for letters in main for c in letters}
    beside = {c: _beside(module, main, c) if c != "o" else {} for c in homes}
    return Roles({c: replace(main[homes[c]], further=further.get(c, ()), **beside[c]) for c in homes}, homes)


def _rows(module: nn.Module, layers: Container[str]) -> Iterator[tuple[str, Projection | Rows]]:
    """Iterate over further rows of factors, and the letters that they belong to.

    They are parameters of relative positions that no layer holds, and what torch's layer appends to keys and values.
    """
    for path, owner in module.named_modules():
        for name, p in owner.named_parameters(recurse=False):
            if name in (*_ADDED, *_SHARED) and p.dim() == 2:
                rows = Rows(module, f"{path}.{name}".removeprefix("."), shared=name in _SHARED)
                yield "q" if name in _ADDED else "k", rows
            elif name in _KEYS and p.dim() == 3:
                yield "k", Projection(module, path, name, conv1d=True)
            elif name in ("bias_k", "bias_v") and path in layers:  # else of another meaning
                yield name[-1], Projection(module, path, name, "", conv1d=True)


def holds_keys(module: nn.Module) -> bool:
    """Return whether the children of a module are named like keys, values and outputs, with or without queries."""
    found = (_letters(_words(n)) for n, m in module.named_children() if _projects(m))
    return set("kvo") <= set("".join(letters or "" for letters in found))


def _beside(module: nn.Module, main: Mapping[str, Projection], letter: str) -> dict[str, Any]:
    """Find a bias that does not lie with its weight."""
    found: dict[str, Any] = {}
    for path, owner in module.named_modules():
        known = {name for name, p in owner.named_parameters(recurse=False) if p is not None}
        if letter not in main and f"{letter}_bias" in known:
            found |= {"bias_path": path, "bias": f"{letter}_bias", "bias_start": 0}
        if letter in main and "in_proj_bias" in known:
            found |= {"bias": "in_proj_bias", "bias_start": "qkv".index(letter) * main[letter].dimensions()}
    return found


def possible_heads(roles: Roles, kind: str, number: int | None = None) -> Iterator[Heads]:
    """List where the heads may lie: so many, where their number is known."""
    apart = kind == "qk" and roles.homes["q"] != "qkv"  # in one matrix with the values, all heads have the same size
    queries = roles.width("q") // len(roles.homes["q"]) if apart else roles.width("o")
    letter = "k" if kind == "qk" else "v"
    keys, others = roles.homes[letter], len(roles.homes[letter].replace("q", ""))
    shared = roles.width(letter) - queries * ("q" in keys)
    for h in range(1, LARGEST + 1) if number is None else (queries // number,):
        if not h or queries % h or shared <= 0 or shared % (others * h):
            continue
        found, kv_number = queries // h, shared // (others * h)
        if not all(roles.projections[c].holds(h, into=c != "o") for c in kind):
            continue
        if found % kv_number or found != (number or found):
            continue
        several = [kv_number, *([4] if kv_number % 4 == 0 else [])] if len(keys) > 1 else []
        for blocks in sorted({1, *several}):
            for order in ("qkv", "qvk") if len(keys) == 3 else ("qkv",):
                for cyclic in (False, True) if 1 < kv_number < found and blocks == 1 else (False,):
                    yield Heads(found, kv_number, h, blocks=blocks, order=order, cyclic=cyclic, examined=number is None)


class Proposal(NamedTuple):
    """Where the heads of one kind of pairs may lie in a layer, and the pairs of heads that do."""

    kind: str
    heads: Sequence[Heads]
    pairs: Callable[[Heads], Iterable[Claim]]


def proposals(module: nn.Module, idle: Callable[[nn.Module], bool] | None = None) -> list[Proposal]:
    """List what the pairs of a layer may be; empty for a layer that is no attention, by the names in it."""
    roles = roles_of(module, idle)
    if roles is not None:
        of_kind = {k: lambda heads, kind=k: roles.pairs(**{kind: heads}) for k in ("vo", "qk")}
        return [Proposal(kind, list(possible_heads(roles, kind)), pairs) for kind, pairs in of_kind.items()]
    latent = all(hasattr(module, a) for a in (*_LATENT, *_LATENT_SIZES)) and any(hasattr(module, a) for a in _QUERIES)
    return list(_latent(module)) if latent else []


def _latent(m: Any) -> Iterator[Proposal]:
    """Propose pairs where keys and values of all heads come from one latent vector; RoPE acts on a shared key."""
    nope, rope, size = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
    source = next(a for a in _QUERIES if getattr(m, a, None) is not None)
    v, o = Projection(m, "kv_b_proj", start=nope, stride=nope + size), Projection(m, "o_proj")
    number = o.dimensions(into=False) // size
    q, k = Projection(m, source, stride=Projection(m, source).dimensions() // number), replace(v, start=0)
    turned, shared = replace(q, start=nope), Projection(m, "kv_a_proj_with_mqa", start=m.kv_lora_rank)

    parts = (("vo", v, o, number, size), ("qk", turned, shared, 1, rope), ("qk", q, k, number, nope))
    for kind, one, two, kv_number, width in parts:
        heads = Heads(number, kv_number, width, key_bias_null=False, examined=True)
        if width:
            yield Proposal(kind, [heads], partial(head_pairs, kind, one=one, two=two))
