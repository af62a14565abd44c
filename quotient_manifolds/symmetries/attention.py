"""Attention layers: the pairs of their heads, handlers of classes by name, and what of a model no handler covers."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..passes import eager, tensors
from ..weights import ByClass, is_sharded, plain_class, plain_names, trained, weights_of
from .found import Symmetries, check_symmetries
from .lora import is_lora
from .pairs import SymmetricPair
from .refusals import Cause, Claim, Refusal, UnknownAttentionError
from .roles import Heads, Projection, possible_heads, roles_of
from .slots import GL, PLANES

#: Functions whose call makes a module an attention layer, if no handler covers it.
_ATTENTION_CALLS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "flex_attention",
    "softmax",
    "_softmax",
    "_safe_softmax",
}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum"}
#: Marks of tensors other than plain activations: made from weights only, or from a product of two activations.
_WEIGHT, _SCORE = 1, 2
#: Parts of latent attention; and the projection of its queries, with that of a gate beside them in the second.
_LATENT = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_QUERIES = ("q_b_proj", "q_gate_proj", "q_proj")
_APPENDED = ("bias_k", "add_zero_attn")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_QK_NORMS = ("q_norm", "k_norm", "ln_q", "scaled_cosine")
_INNER_NORMS = ("norm", "ln_inner")
_QK_NORM = "queries and keys are normalised (q_norm, k_norm): no continuous symmetry"
_INNER_NORM = "the heads' outputs are normalised before the output projection: no symmetry"
_WRAPPED = "peft merges LoRA into this layer at every forward pass; only the adapter's own symmetry is offered"


Handler = Callable[[nn.Module], Iterable[Claim]]
HANDLERS = ByClass[Handler]()


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
    bias = two.name(two.bias) if kind == "qk" and heads.key_bias_null else ""
    # Keys and values may have fewer heads than queries and outputs.
    first = one.slots(heads.number if two.into else several, size)
    second = two.slots(several if two.into else heads.number, size)
    shared = [i % several if heads.cyclic else i * several // heads.number for i in range(heads.number)]
    factors = [(first[i], second[j]) if two.into else (first[j], second[i]) for i, j in enumerate(shared)]
    if heads.reason or heads.cause is not Cause.BROKEN:
        yield from (Refusal("", kind, heads.cause, heads.reason, i, G=G, H=H) for i, (G, H) in enumerate(factors))
        return
    parts, turned = list[tuple[str, GL, int, int, str | None]](), heads.rotary_size if heads.group in PLANES else 0
    if turned:
        planes = GL(turned // 2, diagonal=True, field="complex")
        parts.append(("rotary" if kind == "qk" else "", planes, 0, turned, heads.group))
    if turned < size:
        diagonal, positive = heads.group in ("diagonal", "positive"), heads.group == "positive"
        parts.append(("", GL(size - turned, diagonal=diagonal, positive=positive), turned, size - turned, None))
    for i, whole in enumerate(factors):
        for part, group, start, count, rotary in parts:
            G, H = (tuple(s.part(start, count, rotary) for s in slots) for slots in whole)
            null = () if rotary else tuple(s for s in H if s.name == bias)
            if set(G).isdisjoint(H):
                yield SymmetricPair("", kind, group, G, H, i, part, null)
            else:
                yield Refusal("", kind, Cause.TIED, head=i, part=part)


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


def no_pair(cause: Cause, detail: str = "") -> list[Claim]:
    """List the one refusal of a layer as a whole."""
    return [Refusal("", "attention", cause, detail)]


def _rotary_size(module: Any, size: int, partial: bool) -> int:
    """Return the number of dimensions that RoPE rotates; most classes ignore what a configuration says of a part."""
    given = getattr(module, "rotary_ndims", None) or getattr(module, "rotary_dim", None)
    parameters = getattr(module.config, "rope_parameters", None) or {}
    return int(given or size * (parameters.get("partial_rotary_factor", 1.0) if partial else 1.0))


def _of_known_class(row: dict[str, str], module: nn.Module) -> list[Claim]:
    """List the pairs of a module of a class of the table, with its number of heads."""
    name, group, partly, by_head = row.values()
    roles = roles_of(module, idle=lambda _: False)
    cls = name.rpartition(".")[2]
    if roles is None:
        return no_pair(Cause.BROKEN, f"a projection is not where {cls} has it (replaced, pruned or parametrised?)")
    owners = (module, *module.children(), getattr(module, "config", None))
    numbers = (getattr(o, name, None) for o in owners for name in _HEADS)
    heads = next((int(n) for n in numbers if isinstance(n, Integral)), 0)
    if not heads:
        return no_pair(Cause.BROKEN, f"{cls} does not say how many heads it has, as {' or '.join(_HEADS)}")
    possible = ((kind, possible_heads(roles, kind, heads)) for kind in ("qk", "vo"))
    fits = {kind: [p for p in of if p.blocks == (p.kv_number if by_head else 1)] for kind, of in possible}
    if unfit := [kind for kind, found in fits.items() if not found]:
        return no_pair(Cause.BROKEN, f"the projections of {unfit[0]} do not divide into {heads} heads")
    qk, vo = (first for first, *_ in fits.values())
    if group in PLANES:
        qk = replace(qk, rotary_size=_rotary_size(module, qk.size, bool(partly)))
    parts = {name: getattr(module, name, None) for name in (*_APPENDED, *_QK_NORMS, *_INNER_NORMS, "gate")}
    doing = {n for n, m in parts.items() if m is not None and m is not False and not isinstance(m, nn.Identity)}
    # The key bias also multiplies the queries of positions; appended keys do not receive it.
    null = not any(getattr(m, "pos_att_type", None) for m in module.children()) and doing.isdisjoint(_APPENDED)
    qk = replace(qk, group=group, reason="" if doing.isdisjoint(_QK_NORMS) else _QK_NORM, key_bias_null=null)
    if not doing.isdisjoint(_INNER_NORMS):
        vo = replace(vo, reason=_INNER_NORM)
    elif "gate" in doing:  # a separate number for every dimension
        vo = replace(vo, group="diagonal")
    if (
        isinstance(module, nn.MultiheadAttention)
        and hasattr(module.out_proj, "base_layer")
        and is_lora(module.out_proj)
    ):
        qk, vo = (replace(heads, reason=_WRAPPED) for heads in (qk, vo))
    return pairs_of_roles(roles, qk=qk, vo=vo)


#: Classes, what acts on queries and keys, whether RoPE may rotate a part of a head, and whether the rows of one matrix
#: go head by head: [head][q, k, v].
KNOWN = list(csv.DictReader(files(__package__).joinpath("known.csv").read_text(encoding="utf-8").splitlines()))
for _row in KNOWN:
    HANDLERS.register(_row["class"])(partial(_of_known_class, _row))


def candidates(model: nn.Module, covered: Collection[nn.Module] | None = None) -> dict[str, nn.Module]:
    """List the innermost modules that hold queries, keys, values and outputs, by their names, outside of covered ones.

    By default the modules with a handler are covered, with all that they hold.
    """
    modules, chosen = dict(model.named_modules()), dict[str, nn.Module]()
    known = (m for m in modules.values() if HANDLERS.of(m) is not None) if covered is None else covered
    attention = {inner for m in known for inner in m.modules()}
    for name, module in reversed(modules.items()):  # the inner ones first
        if attention.isdisjoint(module.modules()) and proposals(module):
            attention.update(module.modules())
            chosen[name] = module
    return dict(reversed(chosen.items()))


def unknown_attention(model: nn.Module) -> str:
    """Name the classes of trainable attention that no handler knows; adapters on frozen weights do not count."""
    found = candidates(model).values()
    moving = [m for m in found if any("lora_" not in name for name in trained(weights_of(m)))]
    return ", ".join(sorted({type(m).__name__ for m in moving}))


def check_coverage(model: nn.Module, run: Callable[[], Any], known: Symmetries | None = None) -> Any:
    """Run a forward pass and refuse attention that no handler covers.

    Parameters
    ----------
    model : nn.Module
        A compiled model is watched as the eager model that it was compiled from.
    run : callable
        Performs one forward pass of the model.
    known : Symmetries, optional
        As :func:`find` finds them with a batch, for example. Modules that they name, or whose projections they contain,
        count as examined, except those of which they say that the batch did not reach them (which are refused only if
        they are seen to compute attention here), that the gradient was zero, or that they could not be examined.

    Returns
    -------
    object
        What ``run`` returns.

    Raises
    ------
    UnknownAttentionError
        A module that is neither registered nor examined, and not inside such a module, calls softmax (on three or more
        dimensions), scaled-dot-product attention, flex_attention or torch's own multi-head attention; or multiplies
        activations with the result of a product of activations; or holds weights named like queries, keys, values and
        outputs (which may be used in code that cannot be watched); or is TorchScript.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import check_coverage
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> check_coverage(layer, lambda: layer(torch.ones(1, 3, 8))).shape
    torch.Size([1, 3, 8])
    """
    if known is None:
        known = Symmetries()
    else:
        check_symmetries(known)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnknownAttentionError(name, type(module), "TorchScript code, which cannot be watched")
    with eager(), watched(model) as calls:
        result = run()
    plain, claims = plain_names(model), [p for p in (*known.pairs, *known.refused) if p.kind != "lora"]
    missed = {p.module: p for p in claims if isinstance(p, Refusal) and p.cause.unexamined}
    examined = {p.module for p in claims} - set(missed)
    whole = (m for n, m in model.named_modules() if HANDLERS.of(m) is not None or plain(n) in examined)
    covered = {inner for module in whole for inner in module.modules()}
    # Around a registered layer with weights of its own, as torch's MultiheadAttention, there may be other attention.
    of_pairs = {name.rpartition(".")[0] for p in claims if p.module not in missed for name in p.names}
    owners = {m for n, m in model.named_modules() if plain(n) in of_pairs and HANDLERS.of(m) is None}
    covered |= {m for m in model.modules() if not owners.isdisjoint([m, *m.children()])}
    for name, m in candidates(model, covered).items():
        of_module = missed.get(plain(name))
        if of_module is None or of_module.cause is not Cause.UNREACHED:
            calls.append((m, "code that cannot be watched, by the names of its weights"))
    for path, module, call in uncovered(model, calls, covered):
        refusal = missed.get(plain(path))
        call = call if refusal is None else f"{call}; of its examination: {refusal.reason}"
        raise UnknownAttentionError(path or "(the model itself)", plain_class(module), call)
    return result


def uncovered(
    model: nn.Module, calls: Iterable[tuple[nn.Module, str]], covered: Collection[nn.Module]
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and call of attention outside of covered modules, at the next module that has parameters.

    State-space layers are let be: nothing but scales acts on their weights, which the adaptive metric does not see.
    """
    names = {module: name for name, module in model.named_modules()}
    for module, call in calls:
        if module not in covered and not hasattr(module, "A_log"):
            path = names.get(module, "(outside the model)")
            while module in names and path and next(module.parameters(), None) is None:
                path = path.rpartition(".")[0]
                module = model.get_submodule(path)
            if module not in covered:
                yield path, module, call


@contextmanager
def watched(model: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    """List which modules were running when attention was computed, and by what.

    Attention is a call of a function known to compute it, or a product of activations with the result of another
    product of activations, whatever happened in between (sigmoid, exponentials and their sum, nothing at all).
    """
    watch = _Watch({_place(t) for t in (*model.parameters(), *model.buffers())} - {0})
    with ExitStack() as hooks, watch:
        for m in model.modules():
            if not isinstance(m, torch.jit.ScriptModule):
                hooks.callback(m.register_forward_pre_hook(watch.enter, prepend=True).remove)
                hooks.callback(m.register_forward_hook(watch.leave, prepend=True, always_call=True).remove)
        yield watch.calls


def _place(t: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own."""
    if t.layout != torch.strided or is_sharded(t) or is_functorch_wrapped_tensor(t):
        return 0
    storage = t.untyped_storage()  # on the meta device for tensors that torch.export puts in place of inputs, too
    return storage.data_ptr() if storage.device.type != "meta" else 0


@dataclass(eq=False, repr=False)
class _Watch(TorchFunctionMode):
    """What :func:`watched` sees: the addresses of weights tell them from activations."""

    weights: Set[int]
    calls: list[tuple[nn.Module, str]] = field(default_factory=list)
    running: list[nn.Module] = field(default_factory=list)
    kinds: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def enter(self, module: nn.Module, *_: Any) -> None:
        self.running.append(module)

    def leave(self, module: nn.Module, *_: Any) -> None:
        while self.running and self.running.pop() is not module:
            pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]  # of torch.ops.aten, which torch.export calls, too
        result = func(*args, **(kwargs or {}))
        if not self.running:
            return result
        operands = [*tensors(args), *tensors(kwargs or {})]
        kinds = [  # a tensor that FSDP gathers is a parameter too
            _WEIGHT if isinstance(t, nn.Parameter) or _place(t) in self.weights else self.kinds.get(t, 0)
            for t in operands
            if t.is_floating_point()
        ]
        attends = name in _ATTENTION_CALLS or name.startswith("_scaled_dot_product")
        if attends and (not name.endswith("softmax") or operands[0].dim() >= 3):
            # A softmax over class scores has two dimensions; attention weights have heads or batches besides.
            self.calls.append((self.running[-1], name))
        made = _SCORE if _SCORE in kinds else 0
        if kinds and set(kinds) == {_WEIGHT}:
            made = _WEIGHT
        elif name in _PRODUCTS and len(kinds) > 1 and _WEIGHT not in kinds:
            if made:
                self.calls.append((self.running[-1], f"{name} on the result of a product"))
            made = 0 if made else _SCORE
        elif name == "linear":
            made = 0
        if made:
            for t in tensors(result):
                self.kinds[t] = made
        return result
