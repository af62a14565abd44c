"""From a model to its pairs: what handlers and examinations claim, and what the outputs of the model say of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .certificate import ROUNDING, Certificate, broken, certify, change, move_, moved, output_gradients
from .examination import examine_model
from .lora import is_lora, lora_pairs, prefix_tuned
from .modules import Forward, Run, Wide, check_model, check_whole, default_forward, is_point, plain_names, running_copy
from .pairs import CHANGES, FAILED, UNNAMED, SymmetricPair, check_pairs, in_copy, merged, refused, usable
from .points import point_pairs
from .registry import handler_of
from .stacks import PairList, stacks, without_sharing

_PREFIXED = "prefix tuning adds keys and values to those of the layer"


def find_symmetric_pairs(
    model: nn.Module,
    *,
    extra: Sequence[SymmetricPair] = (),
    key_bias: str = "keep",
    include_frozen: bool = False,
    batch: Any = None,
    forward: Forward = default_forward,
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
        A Q–K and a V–O pair for each head and one pair for each LoRA adapter, in the order of the modules, and one for
        each point of a quotient among the parameters. Pairs without a symmetry or with frozen parameters have
        ``group=None`` and a ``reason``. ``print`` groups them by layer.

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
    if batch is not None:
        check_whole(model)
    run = None if batch is None else functools.partial(forward, model, batch)
    found = _claimed(model, extra, run, key_bias, include_frozen)
    return found if batch is None else _certified(model, found, batch, forward)


def _claimed(
    model: nn.Module, extra: Sequence[SymmetricPair], run: Run | None, key_bias: str, include_frozen: bool
) -> PairList:
    """List what handlers and examinations claim, before the outputs of the whole model decide."""
    if key_bias not in ("keep", "drop"):
        raise ValueError(f'key_bias must be "keep" or "drop", got {key_bias!r}')
    check_model(model)
    extra, plain = check_pairs(extra), plain_names(model)
    given = {b.module for p in extra for b in p.G + p.H}
    examined = {} if run is None else examine_model(model, run)
    found: list[SymmetricPair] = []
    for path, module in model.named_modules():
        handler = handler_of(module)
        found += [] if handler is None else handler(module, plain(path))
        found += lora_pairs(module, plain(path)) if is_lora(module) else []
        for p in examined.get(path, ()):
            if p.reason != UNNAMED or given.isdisjoint(module.modules()):  # else a pair of the user describes it
                found.append(replace(p, module=plain(path)))
    _check_extra(extra, found)
    whole = merged([*found, *extra])
    if key_bias == "drop":
        whole = [replace(p, H=tuple(b for b in p.H if b.key not in {n.key for n in p.null})) for p in whole]
    if prefix_tuned(model):
        whole = [p if p.kind == "lora" else refused(p, p.reason or _PREFIXED) for p in whole]
    found = without_sharing(list(_disjoint([usable(p, include_frozen) for p in whole])))
    if any(map(is_point, model.parameters())):
        points = {p.name: p for p in point_pairs(model, include_frozen)}  # of which some hold the weights of modules
        computed = {p.module for p in points.values() if p.kind != "point"}
        found = [p for p in found if p.group is not None or p.name in points or p.module not in computed]
        found = [points.pop(p.name, p) for p in found] + list(points.values())
    return PairList(replace(p, model=model) for p in found)


@torch.no_grad()
def _certified(model: nn.Module, pairs: Iterable[SymmetricPair], batch: Any, forward: Forward) -> PairList:
    """Refuse the pairs of which moves change the outputs of a model."""
    used = [p for p in pairs if p.group is not None]
    names = {p.name for p in used}
    for dtype, tolerance in ((torch.float64, ROUNDING), (torch.float32, 1e-2)):  # some kernels exist in float32 alone
        try:
            with running_copy(model, batch, forward, dtype) as (twin, run):
                names, reason = {p.name for p in broken(in_copy(used, model, twin), run, tolerance)}, CHANGES
            break
        except Exception as error:  # whatever third-party code raises
            reason = f"{FAILED} in the whole model: {type(error).__name__}: {error}".splitlines()[0]
    return PairList(refused(p, reason) if p.group is not None and p.name in names else p for p in pairs)


def _disjoint(pairs: list[SymmetricPair]) -> Iterator[SymmetricPair]:
    """Leave out pairs so that no number belongs to two: LoRA's factors are also rows of attention pairs.

    They belong to attention pairs that are trainable as a whole; otherwise they are pairs of their own.
    """
    used = [p for p in pairs if p.group is not None]
    adapters = {t for p in used if p.kind == "lora" for t in p.parameters()}
    whole = [p for p in used if p.kind != "lora" and all(t.requires_grad for t in p.parameters())]
    trained = {t for p in whole for t in p.parameters()}
    for p in pairs:
        tensors = set(p.parameters()) if p.group is not None else set()
        if p.kind == "lora" and tensors & trained:
            yield refused(p, "its factors belong to the attention pairs of the trainable base weights")
        elif p.kind != "lora" and tensors & adapters and not tensors <= trained:
            yield refused(p, "its base weights are frozen, and its adapters are pairs of their own", frozen=True)
        else:
            yield p


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


@torch.no_grad()
def apply_random_symmetry_(
    model: nn.Module, condition: float = 10.0, seed: int = 0, pairs: Iterable[SymmetricPair] | None = None
) -> int:
    """Move every symmetric pair of a model along its orbit by a random group element: the function stays the same.

    The move starts at the balanced representative (canonical gauge), is computed in float64 and rounded to the
    weights' precision, so the outputs change by rounding errors, which grow with the condition number.
    LoRA adapters of the old weights do not fit the new ones.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    condition : float
        Condition number of every group element, ≥ 1.
    seed : int
        Seed of the group elements.
    pairs : iterable of SymmetricPair, optional
        The pairs to move; by default all that :func:`find_symmetric_pairs` finds.

    Returns
    -------
    int
        Number of pairs moved.

    Raises
    ------
    ValueError
        A condition number below 1.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import apply_random_symmetry_
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> weight = layer.self_attn.in_proj_weight
    >>> output, old = layer(torch.ones(1, 3, 8)), weight.clone()
    >>> apply_random_symmetry_(layer)
    4
    >>> torch.allclose(layer(torch.ones(1, 3, 8)), output, atol=1e-4), torch.allclose(weight, old)
    (True, False)
    """
    if not isinstance(condition, (int, float)) or not 1 <= condition < float("inf"):
        raise ValueError(f"a condition number is at least 1, got {condition!r}")
    check_whole(model)
    found = stacks(find_symmetric_pairs(model) if pairs is None else pairs)
    move_(found, condition, seed)
    return sum(map(len, found))


@torch.inference_mode(False)  # else there is no gradient, which certifies
@torch.no_grad()
def verify(
    model: nn.Module,
    batch: Any,
    seed: int = 0,
    *,
    moves: bool = True,
    forward: Forward = default_forward,
    extra: Sequence[SymmetricPair] = (),
) -> Certificate:
    """Certify every pair by one backward pass, then act on it with a random group element and compare the outputs.

    It is done on a float64 copy of the model in evaluation mode, which casts nothing to single precision, and starts at
    the balanced representative of every pair. Attention of unknown classes is examined first.

    Parameters
    ----------
    model : nn.Module
        The model; it is left unchanged.
    batch : object
        A small batch for ``forward``. Floating-point tensors are widened to float64.
    seed : int
        Seed of the group elements, of condition number 10.
    moves : bool
        Whether to act on the pairs too, at one forward pass each.
    forward : callable
        ``forward(model, batch)`` → outputs; by default as for :func:`sharpness.evaluate`, without its loss.
    extra : sequence of SymmetricPair
        Pairs of your own, as for :func:`find_symmetric_pairs`.

    Returns
    -------
    Certificate
        ``print`` shows it; ``ok`` and ``failures`` say what is wrong.

    Raises
    ------
    ValueError
        The model returns no floating-point tensor, or a pair of your own belongs to another model.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import verify
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> print(verify(layer, torch.linspace(-1, 1, 24).reshape(1, 3, 8)))
    4 pairs certified, largest residual ...e-1... (rounding is up to 1e-08)
    4 pairs moved, largest relative change of an output ...e-1... (rounding is up to 1e-09)

    A pair that is no symmetry, for there is a ReLU between its factors:

    >>> from quotient_manifolds.symmetries import GL, block, pair
    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
    >>> G = [block(model[0], "weight", transpose=True), block(model[0], "bias")]
    >>> wrong = pair(G, [block(model[2], "weight")], GL(3), name="layers")
    >>> [p.name for p in verify(model, torch.linspace(-1, 1, 40).reshape(8, 5), extra=[wrong]).failures]
    ['layers']
    """
    check_whole(model)
    extra = check_pairs(extra)
    with running_copy(model, batch, forward) as (twin, run):
        before = run()
        if not before:
            raise ValueError(f"{type(model).__name__} returned no floating-point tensor to compare; pass forward")
        if not any(t.isfinite().any() for t in before):
            raise ValueError(f"all outputs of {type(model).__name__} are NaN or infinite, which certifies nothing")
        claimed = _claimed(twin, in_copy(extra, model, twin), run, "keep", include_frozen=False)
        pairs = [p for p in claimed if p.group is not None]
        found = stacks(pairs)
        gradients: dict[Tensor, Tensor] = {}
        with suppress(RuntimeError), Wide():  # outputs that cannot be differentiated certify nothing; moves decide
            parameters = [p for s in found for p in s.parameters()]
            generator = torch.Generator().manual_seed(seed)
            gradients = output_gradients(lambda: [t[t.isfinite()] for t in run()], parameters, generator)
        certificate = certify(found, gradients, tolerance=1e-8)
        changes = {}
        for p in pairs if moves else ():
            with moved([p], 10.0, seed):
                changes[p] = change(before, run())
    return replace(certificate, changes=changes)
