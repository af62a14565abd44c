"""From a model to its symmetries: what handlers and examinations claim, and what the outputs of the model say of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..passes import Forward, Run, Wide, default_forward
from ..weights import check_model, check_whole, first_names, is_point, plain_names, running_copy, weights_of
from .certificate import ROUNDING, Certificate, broken, certify, change, move_stacks_, moved, output_gradients
from .examination import examine_model
from .found import Symmetries, check_symmetries
from .lora import is_lora, lora_pairs, prefix_tuned
from .pairs import Cause, Claim, SymmetricPair, refused
from .placing import placing, settled
from .points import point_pairs
from .registry import handler_of
from .stacks import stacks

#: What :func:`find` finds by default, and all that it can be asked for.
PAIRS = ("heads", "lora", "points")
ALL = (*PAIRS, "neurons", "stream")
_PREFIXED = "prefix tuning adds keys and values to those of the layer"


def find(
    model: nn.Module,
    batch: Any = None,
    *,
    kinds: Collection[str] = PAIRS,
    classes: bool = False,
    forward: Forward = default_forward,
) -> Symmetries:
    """Find the continuous symmetries of a model's weights.

    Whether weights are trained does not matter: ``find(model).restricted(names)`` is what is left where only some move.

    Parameters
    ----------
    model : nn.Module
        Any model; it is left unchanged. Without a batch, modules of unknown classes are ignored (``sharpness.evaluate``
        refuses models in which such a module computes attention).
    batch : object, optional
        A batch for ``forward``. Attention modules of unknown classes are then examined one by one, each alone and in
        float64, on the inputs that they get from this batch; and everything that is found has to leave the outputs of a
        float64 copy of the whole model as they are when it moves, see ``docs/math/certificate.md``.
    kinds : collection of {"heads", "lora", "points", "neurons", "stream"}
        What to look for: attention heads, LoRA adapters, points of a quotient among the parameters; and, of networks
        whose wiring is known (:func:`~quotient_manifolds.symmetries.whole.register_wiring`), hidden neurons, and what
        lies around the streams: norms, biases, embeddings, rotations. ``ALL`` of them, or by default the first three.
    classes : bool
        The logits are used only through a softmax, so a constant added to all of them is a symmetry too.
    forward : callable
        ``forward(model, batch)``, by default as for :func:`sharpness.evaluate`, without its loss.

    Returns
    -------
    Symmetries
        A Q–K and a V–O pair for each head and one pair for each LoRA adapter, in the order of the modules, and one for
        each point of a quotient among the parameters; and what has no symmetry, with the cause. ``print`` groups them
        by layer.

    Notes
    -----
    Paper, §4.2 and App. C. Pairs that share a slot (grouped queries, shared layers) are merged into one.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> print(find(layer))
    self_attn qk    2 × GL(4), 9+9 rows
    self_attn vo    2 × GL(4), 9+8 rows
    >>> find(layer).dimension
    64
    """
    if isinstance(kinds, str) or not set(kinds) <= set(ALL):
        raise ValueError(f"kinds is a collection of {', '.join(ALL)}, got {kinds!r}")
    if batch is None:
        found = _claimed(model, None, kinds)
    else:
        check_whole(model)
        claimed = _claimed(model, functools.partial(forward, model, batch), kinds)
        found = _certified(model, claimed, batch, forward)
    return found if {"neurons", "stream"}.isdisjoint(kinds) else with_wiring(model, found, kinds=kinds, classes=classes)


def _claimed(model: nn.Module, run: Run | None, kinds: Collection[str] = PAIRS) -> Symmetries:
    """List what handlers and examinations claim, before the outputs of the whole model decide."""
    check_model(model)
    placed = placing(model)
    examined = {} if run is None or "heads" not in kinds else examine_model(model, run)
    found: list[Claim] = []
    for path, module in model.named_modules():
        handler = handler_of(module) if "heads" in kinds else None
        claims = [] if handler is None else list(handler(module))
        claims += lora_pairs(module) if is_lora(module) and "lora" in kinds else []
        found += placed([*claims, *examined.get(path, ())], path)
    found = settled(found, model)
    if prefix_tuned(model):
        found = [p if p.kind == "lora" else refused(p, Cause.BROKEN, _PREFIXED) for p in found]
    claims = _with_points(model, found) if "points" in kinds else found
    return replace(Symmetries.of_claims(claims), tied=tuple(sorted(first_names(model).items())))


def _with_points(model: nn.Module, claims: list[Claim]) -> list[Claim]:
    """Put the points that hold weights in the place of the pairs of these weights, and add all others."""
    if not any(map(is_point, model.parameters())):
        return claims
    points = {p.name: p for p in point_pairs(model)}
    computed = {p.module for p in points.values() if p.kind != "point"}
    kept = [p for p in claims if isinstance(p, SymmetricPair) or p.name in points or p.module not in computed]
    return [points.pop(p.name, p) for p in kept] + list(points.values())


def with_wiring(
    model: nn.Module, found: Symmetries, *, kinds: Collection[str] = ALL, classes: bool = False
) -> Symmetries:
    """Add the symmetries of hidden neurons, and those around the streams."""
    from .architectures import wiring_of
    from .listing import actions_of, lengths_of  # what heads alone do not need

    wiring, weights, plain = wiring_of(model), weights_of(model), plain_names(model)
    claims = settled([] if wiring is None else wiring.neurons, model)
    neurons = Symmetries.of_claims(claims if "neurons" in kinds else [])
    found = replace(found, pairs=found.pairs + neurons.pairs, refused=found.refused + neurons.refused, wiring=wiring)
    if "stream" not in kinds:
        return found
    # Beside a key that is always zero, attention weights do not sum to 1.
    zero_key = {plain(path) for path, m in model.named_modules() if getattr(m, "add_zero_attn", False)}
    heads = [  # beside pruned queries, too, a key bias has no effect
        p
        for p in found.claims
        if (isinstance(p, SymmetricPair) or p.cause is Cause.COMPUTED) and p.module not in zero_key
    ]
    actions, refusals = actions_of(wiring, heads, weights, classes=classes)
    return replace(found, actions=(*actions, *lengths_of(model)), refused=found.refused + tuple(refusals))


@torch.no_grad()
def _certified(model: nn.Module, found: Symmetries, batch: Any, forward: Forward) -> Symmetries:
    """Refuse the pairs of which moves change the outputs of a model."""
    wrong: Callable[[SymmetricPair], bool] = lambda _: True  # noqa: E731
    for dtype, tolerance in ((torch.float64, ROUNDING), (torch.float32, 1e-2)):  # some kernels exist in float32 alone
        try:
            with running_copy(model, batch, forward, dtype) as (twin, run):
                names = {p.name for p in broken(found.of_full_rank().pairs, weights_of(twin), run, tolerance)}
                wrong, cause, why = (lambda p: p.name in names), Cause.CHANGES, ""  # noqa: B023
            break
        except Exception as error:  # whatever third-party code raises
            cause = Cause.FAILED
            why = f"in the whole model: {type(error).__name__}: {error}".splitlines()[0]
    out = tuple(refused(p, cause, why) for p in found.pairs if wrong(p))
    return replace(found, pairs=tuple(p for p in found.pairs if not wrong(p)), refused=(*found.refused, *out))


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
        The pairs to move; by default all that :func:`find` finds.

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
    weights = weights_of(model)
    found = stacks(find(model).of_full_rank().pairs if pairs is None else pairs, weights)
    move_stacks_(found, weights, condition, seed)
    return sum(map(len, found))


@torch.inference_mode(False)  # else there is no gradient, which certifies
@torch.no_grad()
def verify(
    model: nn.Module,
    batch: Any,
    symmetries: Symmetries | None = None,
    *,
    seed: int = 0,
    moves: bool = True,
    forward: Forward = default_forward,
) -> Certificate:
    """Certify every pair by one backward pass, then act on it with a random group element and compare the outputs.

    It is done on a float64 copy of the model in evaluation mode, which casts nothing to single precision, and starts at
    the balanced representative of every pair.

    Parameters
    ----------
    model : nn.Module
        The model; it is left unchanged.
    batch : object
        A small batch for ``forward``. Floating-point tensors are widened to float64.
    symmetries : Symmetries, optional
        By default what handlers know, and what an examination of attention of unknown classes finds on this batch.
    seed : int
        Seed of the group elements, of condition number 10.
    moves : bool
        Whether to act on the pairs too, at one forward pass each.
    forward : callable
        ``forward(model, batch)`` → outputs; by default as for :func:`sharpness.evaluate`, without its loss.

    Returns
    -------
    Certificate
        ``print`` shows it; ``ok`` and ``failures`` say what is wrong.

    Raises
    ------
    ValueError
        The model returns no floating-point tensor, or has not the weights of a pair.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import find, verify
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> print(verify(layer, torch.linspace(-1, 1, 24).reshape(1, 3, 8)))
    4 pairs certified, largest residual ...e-1... (rounding is up to 1e-08)
    4 pairs moved, largest relative change of an output ...e-1... (rounding is up to 1e-09)

    A pair that is no symmetry, for there is a ReLU between its factors:

    >>> from quotient_manifolds.symmetries import GL, pair, slot
    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
    >>> G = [slot(model, "0.weight", transpose=True), slot(model, "0.bias")]
    >>> wrong = pair(G, [slot(model, "2.weight")], GL(3), name="layers")
    >>> certificate = verify(model, torch.linspace(-1, 1, 40).reshape(8, 5), find(model).adding(wrong))
    >>> [p.name for p in certificate.failures]
    ['layers']
    """
    check_whole(model)
    generator = torch.Generator().manual_seed(operator.index(seed))
    with running_copy(model, batch, forward) as (twin, run):
        before = run()
        if not before:
            raise ValueError(f"{type(model).__name__} returned no floating-point tensor to compare; pass forward")
        if not any(t.isfinite().any() for t in before):
            raise ValueError(f"all outputs of {type(model).__name__} are NaN or infinite, which certifies nothing")
        symmetries = _claimed(twin, run) if symmetries is None else symmetries
        check_symmetries(symmetries)
        pairs, weights = symmetries.of_full_rank().pairs, weights_of(twin)
        check_names(pairs, weights, type(model).__name__)
        found = stacks(pairs, weights)
        gradients: dict[str, Tensor] = {}
        with suppress(RuntimeError), Wide():  # outputs that cannot be differentiated certify nothing; moves decide
            moving = {name: weights[name] for s in found for name in s.names}
            gradients = output_gradients(lambda: [t[t.isfinite()] for t in run()], moving, generator)
        certificate = certify(found, weights, gradients, tolerance=1e-8)
        changes = {}
        for p in pairs if moves else ():
            with moved([p], weights, 10.0, seed):
                changes[p] = change(before, run())
    return replace(certificate, changes=changes)


def check_names(pairs: Iterable[SymmetricPair], weights: Collection[str], model: str) -> None:
    """Raise for a pair with weights that a model has not."""
    for p in pairs:
        if lost := next((name for name in p.names if name not in weights), None):
            raise ValueError(f"the pair {p.name!r} belongs to another model: {model} has no weight {lost!r}")
