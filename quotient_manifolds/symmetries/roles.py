"""What the names of a layer's parameters say: the roles of attention's weights, and possible pairs of other layers.

Names and shapes propose; gradients and a move decide what holds (:mod:`.examination`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from .attention import Heads, Projection, Rows, head_pairs, pairs_of_roles
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
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d)
#: Layers that may be projections, by their classes and by the names of these.
_LAYERS, _BY_NAME = (nn.Linear, nn.Conv1d, nn.Conv2d), ("Conv1D", "QuantLinear")
#: Largest head size that is tried.
LARGEST = 512
#: Parts of latent attention; and the projection of its queries, with that of a gate beside them in the second.
_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_QUERIES = ("q_b_proj", "q_gate_proj", "q_proj")


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
    main: dict[str, Projection] = {}
    further: dict[str, tuple[Projection | Rows, ...]] = {}
    unnamed: list[Projection] = []
    for found in _weights(module, module):
        name = found.path if found.weight == "weight" else found.name(found.weight)
        words, letters = _read(name, _FURTHER)
        letters = "qkv" if name.lower().endswith(_PACKED) else "k" if name.endswith("linear_pos") else letters
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
    more, biases = _elsewhere(module, main)
    roles = dict[str, Projection]()
    for letters, whole in main.items():
        for c in letters:
            rows = (*further.get(c, ()), *more.get(c, ()))
            roles[c] = replace(whole, letters=letters, into=c != "o", further=rows, **biases.get(c, {}))
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


class Proposal(NamedTuple):
    """Where the heads of one kind of pairs may lie in a layer, and the pairs of heads that do."""

    kind: str
    heads: Sequence[Heads]
    pairs: Callable[[Heads], Iterable[Claim]]


def proposals(module: nn.Module, idle: Callable[[nn.Module], bool] | None = None) -> list[Proposal]:
    """List what the pairs of a layer may be; empty for a layer that is no attention, by the names in it."""
    roles = roles_of(module, idle)
    if roles is not None:
        of_kind = {k: lambda heads, kind=k: pairs_of_roles(roles, **{kind: heads}) for k in ("vo", "qk")}
        return [Proposal(kind, list(possible_heads(roles, kind)), pairs) for kind, pairs in of_kind.items()]
    latent = all(hasattr(module, a) for a in (*_LATENT, *_LATENT_SIZES)) and any(hasattr(module, a) for a in _QUERIES)
    return list(_latent(module)) if latent else []


def _latent(m: Any) -> Iterator[Proposal]:
    """Propose pairs where keys and values of all heads come from one latent vector; RoPE acts on a shared key."""
    nope, rope, size = m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim
    source = next(a for a in _QUERIES if getattr(m, a, None) is not None)
    v, o = Projection(m, "kv_b_proj", start=nope, stride=nope + size), Projection(m, "o_proj", into=False)
    number = o.dimensions() // size
    q, k = Projection(m, source, stride=Projection(m, source).dimensions() // number), replace(v, start=0)
    turned, shared = replace(q, start=nope), Projection(m, "kv_a_proj_with_mqa", start=m.kv_lora_rank)

    parts = (("vo", v, o, number, size), ("qk", turned, shared, 1, rope), ("qk", q, k, number, nope))
    for kind, one, two, kv_number, width in parts:
        heads = Heads(number, kv_number, width, key_bias_null=False, examined=True)
        if width:
            yield Proposal(kind, [heads], partial(head_pairs, kind, one=one, two=two))
