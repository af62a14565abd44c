"""From a model to its symmetries: what handlers and examinations claim, and what the outputs of the model say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .._geoopt import ManifoldParameter
from ..passes import Forward, Run, default_forward
from ..weights import (
    check_model,
    check_whole,
    first_names,
    naming,
    plain_names,
    running_copy,
    weights_of,
)
from .attention import HANDLERS
from .examination import examine_model
from .found import Symmetries, placed, settled
from .lora import is_lora, lora_pairs, prefix_tuned
from .orbits import ROUNDING, broken
from .pairs import SymmetricPair
from .points import point_pairs
from .refusals import Cause, Claim, refused

#: What :func:`find` finds by default, and all that it can be asked for.
PAIRS = ("heads", "lora", "points")
ALL = (*PAIRS, "neurons", "stream")
_PREFIXED = "prefix tuning adds keys and values to those of the layer"


def find(
    model: nn.Module,
    batch: Any = None,
    *,
    scope: Collection[str] = PAIRS,
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
        float64, on the inputs that they get from this batch; and every pair that is found has to leave the outputs of a
        float64 copy of the whole model as they are when it moves, see ``docs/math/certificate.md``. All other
        symmetries are what an adapter says; :func:`verify` checks them.
    scope : collection of {"heads", "lora", "points", "neurons", "stream"}
        Where to look: in attention heads, LoRA adapters, points of a quotient among the parameters; and, of networks
        whose wiring is known (:func:`~quotient_manifolds.symmetries.whole.register_wiring`), among hidden neurons, and
        around the streams: norms, biases, embeddings, rotations; with these, of any network, the lengths of normalised
        weights. ``ALL`` of them, or by default the first three. :meth:`Symmetries.of_kind` chooses single kinds.
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
    if isinstance(scope, str) or not set(scope) <= set(ALL):
        raise ValueError(f"scope is a collection of {', '.join(ALL)}, got {scope!r}")
    if batch is None:
        found = claimed(model, None, scope)
    else:
        check_whole(model)
        every = claimed(model, functools.partial(forward, model, batch), scope)
        found = _certified(model, every, every.pairs, batch, forward)
    if {"neurons", "stream"}.isdisjoint(scope):
        return found
    known, found = len(found.pairs), with_wiring(model, found, scope=scope, classes=classes)
    neurons = found.pairs[known:]
    return found if batch is None or not neurons else _certified(model, found, neurons, batch, forward)


def claimed(model: nn.Module, run: Run | None, scope: Collection[str] = PAIRS) -> Symmetries:
    """List what handlers and examinations claim, before the outputs of the whole model decide."""
    check_model(model)
    name_of, tied = naming(model), first_names(model)
    by_peft = any(type(m).__module__.startswith("peft.") for m in model.modules())
    examined = {} if run is None or "heads" not in scope else examine_model(model, run)
    found: list[Claim] = []
    for path, module in model.named_modules():
        handler = HANDLERS.of(module) if "heads" in scope else None
        claims = [] if handler is None else list(handler(module))
        if by_peft and "lora" in scope and is_lora(module):
            claims += lora_pairs(module)
        found += placed([*claims, *examined.get(path, ())], path, name_of)
    found = settled(found, model, decided=run is not None)
    if by_peft and prefix_tuned(model):
        found = [p if p.kind == "lora" else refused(p, Cause.BROKEN, _PREFIXED) for p in found]
    if "points" in scope and any(isinstance(p, ManifoldParameter) for p in model.parameters()):
        found = _with_points(model, found)
    return replace(Symmetries.of_claims(found), tied=tuple(sorted(tied.items())))


def _with_points(model: nn.Module, claims: list[Claim]) -> list[Claim]:
    """Put the points that hold weights in the place of the pairs of these weights, and add all others."""
    points = {p.name: p for p in point_pairs(model)}
    computed = {p.module for p in points.values() if p.kind != "point"}
    kept = [p for p in claims if isinstance(p, SymmetricPair) or p.name in points or p.module not in computed]
    return [points.pop(p.name, p) for p in kept] + list(points.values())


def with_wiring(
    model: nn.Module, found: Symmetries, *, scope: Collection[str] = ALL, classes: bool = False
) -> Symmetries:
    """Add the symmetries of hidden neurons, and those around the streams."""
    from .architectures import wiring_of
    from .folding import actions_of, lengths_of  # what heads alone do not need

    wiring, weights, plain = wiring_of(model), weights_of(model), plain_names(model)
    found = replace(found, wiring=wiring)
    if wiring is not None and "neurons" in scope:
        neurons = Symmetries.of_claims(settled(wiring.neurons, model))
        found = replace(found, pairs=found.pairs + neurons.pairs, refused=found.refused + neurons.refused)
    if "stream" not in scope:
        return found
    # Beside a key that is always zero, attention weights do not sum to 1.
    zero_key = {plain(path) for path, m in model.named_modules() if getattr(m, "add_zero_attn", False)}
    # Beside pruned queries, too, a key bias has no effect.
    heads: list[Claim] = [*found.pairs, *(r for r in found.refused if r.cause is Cause.COMPUTED)]
    heads = [p for p in heads if p.module not in zero_key]
    actions, refusals = actions_of(wiring, heads, weights, classes=classes)
    lengths, shared = lengths_of(model) if any(map(is_parametrized, model.modules())) else ([], [])
    return replace(found, actions=(*actions, *lengths), refused=(*found.refused, *refusals, *shared))


@torch.no_grad()
def _certified(
    model: nn.Module, found: Symmetries, pairs: Sequence[SymmetricPair], batch: Any, forward: Forward
) -> Symmetries:
    """Refuse some pairs, those of which moves change the outputs of a model."""
    wrong: Callable[[SymmetricPair], bool] = lambda _: True  # noqa: E731
    for dtype, tolerance in ((torch.float64, ROUNDING), (torch.float32, 1e-2)):  # some kernels exist in float32 alone
        try:
            with running_copy(model, batch, forward, dtype) as (twin, run):
                names = {p.name for p in broken([p for p in pairs if not p.thin], weights_of(twin), run, tolerance)}
                wrong, cause, why = (lambda p: p.name in names), Cause.CHANGES, ""  # noqa: B023
            break
        except Exception as error:  # whatever third-party code raises
            cause = Cause.FAILED
            why = f"in the whole model: {type(error).__name__}: {error}".splitlines()[0]
    out = {p: refused(p, cause, why) for p in pairs if wrong(p)}
    kept = tuple(p for p in found.pairs if p not in out)
    return replace(found, pairs=kept, refused=(*found.refused, *out.values()))
