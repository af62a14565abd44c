"""From a model to its pairs: ``find_symmetric_pairs``, and ``register_attention`` for unknown classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..batches import default_forward, floats, tree_map
from .certificate import ROUNDING, broken
from .discovery import FAILED, UNNAMED, discover
from .merging import merged, refused, without_sharing
from .modules import ByClass, Wide, check_model, copied, plain_names, preserve_model_state, random_state_kept
from .pairs import SymmetricPair, check_pairs, in_copy
from .peft_lora import adapter_names, is_lora, lora_pairs, prefix_tuned

__all__ = ["PairList", "adapter_pairs", "find_symmetric_pairs", "register_attention", "skip"]

Handler = Callable[[nn.Module, str], Iterable[SymmetricPair]]
_HANDLERS = ByClass[Handler]()
CHANGES = "moves along its orbit change the outputs of the model on this batch"
_PREFIXED = "prefix tuning adds keys and values to those of the layer"


def register_attention(*classes: type | str) -> Callable[[Handler], Handler]:
    """Register a handler for attention modules of exactly these classes.

    Parameters
    ----------
    classes : type or str
        Classes, or their qualified names (``"library.file.Class"``), so that a handler need not import the library.
        Subclasses are not covered, because they may compute something else.

    Returns
    -------
    callable
        Decorator for a function ``handler(module, name) -> iterable of SymmetricPair``. See
        :func:`quotient_manifolds.symmetries.attention_pairs` for the usual case.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Projection, attention_pairs, find_symmetric_pairs, register_attention
    >>> class MyAttention(nn.Module):
    ...     def __init__(self, dim, heads):
    ...         super().__init__()
    ...         self.heads = heads
    ...         self.to_q, self.to_k = nn.Linear(dim, dim), nn.Linear(dim, dim)
    ...         self.to_v, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
    >>> @register_attention(MyAttention)
    ... def my_attention(module, name):
    ...     q, k, v, o = map(Projection, (module.to_q, module.to_k, module.to_v, module.to_out))
    ...     return attention_pairs(name, heads=module.heads, q=q, k=k, v=v, o=o)
    >>> print(find_symmetric_pairs(nn.Sequential(MyAttention(8, 2))))
    0 qk    2 × GL(4), 9+9 rows
    0 vo    2 × GL(4), 9+8 rows
    """
    return _HANDLERS.register(*classes)


def skip(*classes: type | str) -> None:
    """Declare that no symmetry of attention modules of these classes is to be used.

    Their weights are then treated like all others (with the adaptive metric, in geodesic sharpness).

    Parameters
    ----------
    classes : type or str
        As for :func:`register_attention`.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs, skip
    >>> class Gated(nn.MultiheadAttention): pass
    >>> skip(Gated)
    >>> print(find_symmetric_pairs(nn.Sequential(Gated(8, 2))))
    0    1 × none (skipped on request)
    """

    @register_attention(*classes)
    def skipped(module: nn.Module, name: str) -> list[SymmetricPair]:
        return [SymmetricPair(name, "attention", None, reason="skipped on request")]


def handler_of(module: nn.Module) -> Handler | None:
    """Look up the handler for the exact class of a module, as it was before it was parametrised."""
    cls = type(module).__mro__[1] if is_parametrized(module) else None
    return _HANDLERS.of(module) if cls is None else _HANDLERS.get(f"{cls.__module__}.{cls.__qualname__}")


class PairList(list[SymmetricPair]):
    """The pairs of a model: a list that prints pairs that differ only in their head as one line."""

    def __str__(self) -> str:
        lines: dict[tuple[str, str], int] = {}
        for p in self:
            place = p.name if p.head is None else f"{p.module} {p.kind}"
            what = f"none ({p.reason})" if p.group is None else f"{p.group}, {p.n}+{p.m} rows"
            lines[place, what] = lines.get((place, what), 0) + 1
        wide = max((len(place) for place, _ in lines), default=0)
        rows = [f"{place:<{wide}}  {count:>3} × {what}" for (place, what), count in lines.items()]
        return "\n".join(rows) or "no symmetric pairs"


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


def _disjoint(pairs: list[SymmetricPair]) -> Iterator[SymmetricPair]:
    """Leave out pairs so that no number belongs to two: LoRA's factors are also rows of attention pairs.

    They belong to attention pairs that are trainable as a whole; otherwise they are pairs of their own.
    """
    sides: dict[bool, set[int]] = {True: set(), False: set()}
    for p in pairs:
        if p.group is not None and (p.kind == "lora" or all(b.tensor.requires_grad for b in p.G + p.H)):
            sides[p.kind == "lora"].update(id(b.tensor) for b in p.G + p.H)
    trained, adapters = sides[False], sides[True]
    for p in pairs:
        tensors = {id(b.tensor) for b in p.G + p.H} if p.group is not None else set()
        if p.kind == "lora" and tensors & trained:
            yield refused(p, "its factors belong to the attention pairs of the trainable base weights")
        elif p.kind != "lora" and tensors & adapters and not tensors <= trained:
            yield refused(p, "its base weights are frozen, and its adapters are pairs of their own", frozen=True)
        else:
            yield p


def _of_module(module: nn.Module, name: str) -> list[SymmetricPair]:
    handler = handler_of(module)
    found = [] if handler is None else list(handler(module, name))
    return [*found, *lora_pairs(module, name)] if is_lora(module) else found


def find_symmetric_pairs(
    model: nn.Module,
    *,
    extra: Sequence[SymmetricPair] = (),
    key_bias: str = "keep",
    include_frozen: bool = False,
    batch: Any = None,
    forward: Callable[[nn.Module, Any], Any] = default_forward,
) -> PairList:
    """Find the continuous symmetries of a model's attention and LoRA weights.

    Parameters
    ----------
    model : nn.Module
        Any model; it is left unchanged. Without a batch, modules of unknown classes are ignored (``sharpness.evaluate``
        refuses models in which such a module computes attention).
    extra : sequence of SymmetricPair
        Pairs of your own.
    key_bias : {"keep", "drop"}
        The key bias adds one number to all scores of a query, which softmax ignores: it is a null direction. ``"keep"``
        leaves it in H as one more row, as in the paper; moving it then has a length, and sharpness depends on its
        value. ``"drop"`` divides it out too. (Under RoPE it is not a null direction, and is kept.)
    include_frozen : bool
        Keep the group of pairs with parameters that are not trainable.
    batch : object, optional
        A batch for ``forward``. Attention modules of unknown classes are then examined one by one, each alone and in
        float64, on the inputs that they get from this batch; and everything that is found has to leave the outputs of a
        float64 copy of the whole model as they are when it moves, see ``docs/math/certificate.md``.
    forward : callable
        ``forward(model, batch)``, by default as for :func:`sharpness.evaluate`, without its loss.

    Returns
    -------
    PairList
        A Q–K and a V–O pair for each head and one pair for each LoRA adapter, in the order of the modules. Pairs
        without a symmetry or with frozen parameters have ``group=None`` and a ``reason``. ``print`` groups them by
        layer.

    Raises
    ------
    ValueError
        A pair of ``extra`` overlaps another pair, or ``key_bias`` has another value.

    Notes
    -----
    Paper, §4.2 and App. C. Pairs that share a block (grouped queries, shared layers) are merged into one.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> print(find_symmetric_pairs(layer))
    self_attn qk    2 × GL(4), 9+9 rows
    self_attn vo    2 × GL(4), 9+8 rows
    >>> sum(p.group.dimension for p in find_symmetric_pairs(layer))
    64
    """
    found = claimed_pairs(
        model, extra=extra, key_bias=key_bias, include_frozen=include_frozen, batch=batch, forward=forward
    )
    return found if batch is None else _certified(model, found, batch, forward)


def claimed_pairs(
    model: nn.Module, *, extra: Sequence[SymmetricPair] = (), key_bias: str = "keep", include_frozen: bool = False,
    batch: Any = None, forward: Callable[[nn.Module, Any], Any] = default_forward,
) -> PairList:  # fmt: skip
    """List what handlers and examinations claim, before the outputs of the whole model decide."""
    if key_bias not in ("keep", "drop"):
        raise ValueError(f'key_bias must be "keep" or "drop", got {key_bias!r}')
    check_model(model)
    extra, plain = check_pairs(extra), plain_names(model)
    examined: dict[str, list[SymmetricPair]] = {}
    given = {b.module for p in extra for b in p.G + p.H}
    for path, p in () if batch is None else discover(
        model, lambda m: handler_of(m) is not None, lambda: forward(model, batch)
    ):  # fmt: skip
        described = p.reason == UNNAMED and not given.isdisjoint(model.get_submodule(path).modules())
        examined.setdefault(path, []).extend([] if described else [replace(p, module=plain(path))])
    found = [
        p for path, module in model.named_modules() for p in (*_of_module(module, plain(path)), *examined.get(path, ()))
    ]
    _check_extra(extra, found)
    whole = merged([*found, *extra])
    if key_bias == "drop":
        whole = [replace(p, H=tuple(b for b in p.H if b.key not in {n.key for n in p.null})) for p in whole]
    if prefix_tuned(model):
        whole = [p if p.kind == "lora" else refused(p, p.reason or _PREFIXED) for p in whole]
    found = without_sharing(list(_disjoint([usable(p, include_frozen) for p in whole])))
    return PairList(replace(p, model=model) for p in found)


@torch.no_grad()
def _certified(
    model: nn.Module, pairs: Iterable[SymmetricPair], batch: Any, forward: Callable[[nn.Module, Any], Any]
) -> PairList:
    """Refuse the pairs of which moves change the outputs of a model."""

    def failing(dtype: torch.dtype, tolerance: float) -> set[str]:
        twin, inputs = copied(model).to(dtype), tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
        modules = dict(zip(model.modules(), twin.modules(), strict=True))

        def run() -> list[Tensor]:
            with random_state_kept(twin):
                return floats(forward(twin, inputs))

        with preserve_model_state(twin), Wide() if dtype == torch.float64 else nullcontext():
            return {p.name for p in broken((in_copy(p, modules) for p in pairs if p.group is not None), run, tolerance)}

    try:
        try:
            names, reason = failing(torch.float64, ROUNDING), CHANGES
        except Exception:  # such as that of a kernel that exists in single precision alone
            names, reason = failing(torch.float32, 1e-2), CHANGES
    except Exception as error:  # whatever third-party code raises
        names = {p.name for p in pairs}
        reason = f"{FAILED} in the whole model: {type(error).__name__}: {error}".splitlines()[0]
    return PairList(refused(p, reason) if p.group is not None and p.name in names else p for p in pairs)


def _check_extra(extra: Sequence[SymmetricPair], found: Sequence[SymmetricPair]) -> None:
    """Refuse pairs of a user that share their name or a block with others."""
    taken = {b.key: p.name for p in found if p.group is not None for b in p.G + p.H}
    names = {p.name for p in found}
    for p in extra:
        if p.name in names:
            raise ValueError(f"two pairs are called {p.name!r}; give each of yours another name: pair(…, name=…)")
        names.add(p.name)
        for b in p.G + p.H:
            if b.key in taken:
                raise ValueError(f"pair {p.name!r} uses a block that already belongs to pair {taken[b.key]!r}")
        taken.update({b.key: p.name for b in p.G + p.H})


def adapter_pairs(model: nn.Module, names: Sequence[str] | None = None, *, include_frozen: bool = False) -> PairList:
    """List the pairs (B, Aᵀ) of a model's LoRA adapters, active or not, and nothing else.

    Parameters
    ----------
    model : nn.Module
        With adapters of peft; plain, DDP-wrapped or compiled.
    names : sequence of str, optional
        Names of adapters; by default those of all adapters.
    include_frozen : bool
        Treat frozen factors like trainable ones. By default adapters with two of them are left out, and pairs with one
        have no group.

    Returns
    -------
    PairList
        Tied adapters have no group. Where the rank is above a width of the layer, the pair is ``thin``: optimisers
        train it, but it is no point of a manifold.

    Raises
    ------
    ValueError
        No layer has an adapter of such a name.

    Examples
    --------
    >>> import torch
    >>> from peft import LoraConfig, get_peft_model
    >>> from quotient_manifolds.symmetries import adapter_pairs
    >>> model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 4)), LoraConfig(r=2, target_modules=["0"]))
    >>> print(adapter_pairs(model))
    base_model.model.0 lora default    1 × GL(2), 4+6 rows
    """
    check_model(model)
    names = [names] if isinstance(names, str) else names
    plain = plain_names(model)
    layers = [(plain(path), m) for path, m in model.named_modules() if is_lora(m)]
    known = {a for _, m in layers for a in adapter_names(m)}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise ValueError(f"no layer has an adapter {unknown[0]!r}; there are {', '.join(sorted(known)) or 'none'}")
    found: list[SymmetricPair] = []
    for path, m in layers:
        wanted = [a for a in adapter_names(m) if names is None or a in names]
        found.extend(lora_pairs(m, path, wanted))
    kept = [
        p for p in merged(found)
        if include_frozen or any(b.tensor.requires_grad for b in p.G + p.H)
    ]  # fmt: skip
    found = without_sharing([usable(p, include_frozen, thin=True) for p in kept])
    return PairList(replace(p, model=model) for p in found)
