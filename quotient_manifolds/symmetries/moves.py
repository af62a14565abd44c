"""What is done with symmetries: moving weights along them, bringing them to one point of an orbit, verifying them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg import standard_normal
from ..passes import Forward, Run, Wide, default_forward
from ..weights import check_whole, running_copy, weights_of
from .actions import Action, State
from .certificate import Certificate
from .discovery import ALL, claimed, find
from .folding import canonical_form, fold, write_values
from .found import Symmetries, certify, check_names, check_symmetries
from .orbits import change, move_stacks_, output_gradients, preserve_values
from .pairs import SymmetricPair, stacks
from .refusals import Cause, refused


@torch.no_grad()
def moved_weights(
    weights: Mapping[str, Tensor],
    symmetries: Symmetries,
    *,
    seed: int = 0,
    condition: float = 10.0,
    scale: float = 0.3,
    kinds: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Move weights by a random element of every symmetry, without the model: its function stays the same.

    What lies outside pairs starts at its canonical form, and is moved in the reverse order of folding; each pair starts
    at its canonical representative. It is computed in float64 and rounded to the weights' precision, so the outputs
    change by rounding errors, which grow with the condition number.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Those of the network by name, or its state dict. Of tied weights one name is enough; all that are there are
        written: those that symmetries know, as ``find`` returns them, and those that share memory.
    symmetries : Symmetries
        Those of the network.
    seed : int
        Seed of the elements.
    condition : float
        Condition number of the elements of GL(h), ≥ 1.
    scale : float
        Standard deviation of the moves outside pairs.
    kinds : collection of str, optional
        Which to move, such as ``{"qk", "gain"}``; by default all.

    Returns
    -------
    dict of str to Tensor
        New tensors for those that move, in the dtypes of the old ones; the others as they are.

    Raises
    ------
    ValueError
        A weight is missing, or has another shape; a condition number below 1; no symmetry is of a kind.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import ALL, find, moved_weights
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> encoder, x = torch.nn.TransformerEncoder(layer, 2), torch.ones(1, 3, 8)
    >>> before = encoder(x)
    >>> encoder.load_state_dict(moved_weights(encoder.state_dict(), find(encoder, scope=ALL)))
    <All keys matched successfully>
    >>> torch.allclose(encoder(x), before, atol=1e-4)
    True
    """
    check_symmetries(symmetries)
    if not isinstance(condition, (int, float)) or not 1 <= condition < float("inf"):
        raise ValueError(f"a condition number is at least 1, got {condition!r}")
    symmetries = symmetries.of_full_rank()
    tied = _further_names(weights, symmetries)
    own = _by_first_names(weights, symmetries, tied)
    state = fold(own, symmetries)
    chosen = _chosen(symmetries, kinds)
    pairs = [p for p in symmetries.pairs if p.kind in chosen]
    _move_(state, pairs, [a for a in symmetries.actions if a.kind in chosen], seed, condition, scale)
    found = {name: value.to(own[name]) for name, value in state.items()}
    others = {other: found[name] for other, name in tied.items() if name in found and other in weights}
    return {**weights, **{name: value for name, value in found.items() if name in weights}, **others}


def _chosen(symmetries: Symmetries, kinds: Collection[str] | None) -> Collection[str]:
    """Return the kinds to move; raise for one that is not there."""
    known = symmetries.dimensions
    if isinstance(kinds, str) or not set(() if kinds is None else kinds) <= set(known):
        raise ValueError(f"kinds is a collection of {', '.join(known) or 'nothing'} here, got {kinds!r}")
    return known if kinds is None else set(kinds)


def _further_names(weights: Mapping[str, Tensor], symmetries: Symmetries) -> dict[str, str]:
    """Return for further names of tied weights the one that slots have: as symmetries know, or shared memory tells."""
    used = {name for s in symmetries for name in s.names if name in weights}
    places = {_place(weights[name]): name for name in used}
    shared = {name: _place(t) for name, t in weights.items() if name not in used and isinstance(t, Tensor)}
    return {name: places[at] for name, at in shared.items() if at in places} | dict(symmetries.tied)


def _place(t: Tensor) -> object:
    """Return what tensors of one memory have in common."""
    where = t.untyped_storage().data_ptr()
    return (t.device, where, t.storage_offset(), t.shape, t.stride()) if where else id(t)


def _by_first_names(
    weights: Mapping[str, Tensor], symmetries: Symmetries, tied: Mapping[str, str]
) -> dict[str, Tensor]:
    """Give tied weights their first name, and raise if one is missing that moves."""
    own = {name: weights[other] for other, name in tied.items() if other in weights} | dict(weights)
    needed = (name for s in symmetries for name in s.names)
    if lost := next((name for name in needed if name not in own), None):
        raise ValueError(
            f"there is no weight {lost!r}; the names must be those of the model's state dict, which transformers "
            "changes in some models when it saves: save model.state_dict() instead"
        )
    return own


def _copies(state: State, pairs: Sequence[SymmetricPair]) -> dict[str, Tensor]:
    """Copy the weights of pairs, each once, though many heads share one."""
    return {name: state[name].clone() for name in dict.fromkeys(name for p in pairs for name in p.names)}


def _move_(
    state: State,
    pairs: Sequence[SymmetricPair],
    actions: Sequence[Action],
    seed: int,
    condition: float = 10.0,
    scale: float = 0.3,
) -> None:
    """Move folded weights by random elements, actions in the reverse order of folding."""
    generator = torch.Generator().manual_seed(operator.index(seed))
    for a in reversed(actions):
        a.act_(state, scale * standard_normal(tuple(a.shape), state[a.names[0]], generator))
    own = _copies(state, pairs)
    move_stacks_(stacks(pairs, own), own, condition, seed)
    state.update(own)


@torch.no_grad()
def move_(
    model: nn.Module,
    symmetries: Symmetries | None = None,
    *,
    seed: int = 0,
    condition: float = 10.0,
    scale: float = 0.3,
    kinds: Collection[str] | None = None,
) -> dict[str, int]:
    """Move a model's weights by a random element of every symmetry: its function stays the same.

    LoRA adapters of the old weights do not fit the new ones; :func:`quotient_manifolds.adapters.carry` carries them.

    Parameters
    ----------
    model : nn.Module
        Changed in place; unchanged if anything fails.
    symmetries : Symmetries, optional
        By default the pairs that :func:`find` finds: ``find(model, scope=ALL)`` has everything that is known.
    seed, condition, scale, kinds
        As for :func:`moved_weights`.

    Returns
    -------
    dict of str to int
        How many symmetries of each kind were moved.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import move_
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> weight = layer.self_attn.in_proj_weight
    >>> output, old = layer(torch.ones(1, 3, 8)), weight.clone()
    >>> move_(layer)
    {'qk': 2, 'vo': 2}
    >>> torch.allclose(layer(torch.ones(1, 3, 8)), output, atol=1e-4), torch.allclose(weight, old)
    (True, False)
    """
    check_whole(model)
    symmetries, weights = find(model) if symmetries is None else symmetries, weights_of(model)
    new = moved_weights(weights, symmetries, seed=seed, condition=condition, scale=scale, kinds=kinds)
    write_values(weights, {name: value for name, value in new.items() if value is not weights[name]})
    chosen = _chosen(symmetries, kinds)
    return dict(Counter(s.kind for s in symmetries.of_full_rank() if s.kind in chosen))


@torch.no_grad()
def canonicalize_(model: nn.Module, symmetries: Symmetries | None = None) -> Symmetries:
    r"""Bring a model's weights to the one point of their orbit that all equivalent weights share.

    Pairs come into canonical gauge, :math:`G^H G = H^H H` = diag(σ), and all other symmetries are folded, see
    :func:`canonical_form`. The function stays the same to rounding. The basis of the stream, where it can be rotated,
    and the order of heads and neurons stay as they are; see :func:`~quotient_manifolds.symmetries.whole.align_models`.
    LoRA adapters of the old weights do not fit the new ones; :func:`quotient_manifolds.adapters.carry` carries them.

    Parameters
    ----------
    model : nn.Module
        Changed in place; unchanged if anything fails. The state of an optimiser refers to the old weights, so call this
        before or after training.
    symmetries : Symmetries, optional
        By default all that are known, ``find(model, scope=ALL)``. :func:`adapter_pairs` lists those of LoRA alone.

    Returns
    -------
    Symmetries
        What was folded, and what was refused: also the pairs whose product lacks full rank, as LoRA's at B = 0. They
        have no canonical representative from which training could continue, and stay as they are.

    Examples
    --------
    >>> import torch
    >>> from peft import LoraConfig, get_peft_model
    >>> from quotient_manifolds.symmetries import adapter_pairs, canonicalize_
    >>> config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 4)), config)
    >>> print(canonicalize_(model, adapter_pairs(model)))
    base_model.model.0 lora default    1 × GL(2), 4+6 rows
    >>> A, B = model.base_model.model[0].lora_A.default.weight, model.base_model.model[0].lora_B.default.weight
    >>> torch.allclose(B.mT @ B, A @ A.mT, atol=1e-6)
    True
    """
    check_whole(model)
    symmetries = find(model, scope=ALL) if symmetries is None else symmetries
    check_symmetries(symmetries)
    weights, symmetries = weights_of(model), symmetries.of_full_rank()
    state = fold(weights, symmetries)
    own = _copies(state, symmetries.pairs)
    full = dict[SymmetricPair, bool]()
    for stack in stacks([p for p in symmetries.pairs if not any(own[name].is_meta for name in p.names)], own):
        x, present = stack.canonical(stack.gather(own))
        stack.scatter_(x, own)
        full |= dict(zip(stack.pairs, present.reshape(stack.shape[0], -1).all(1).tolist(), strict=True))
    state.update(own)
    write_values(weights, {name: value.to(weights[name].dtype) for name, value in state.items()})
    left = tuple(refused(p, Cause.DEFICIENT) for p in symmetries.pairs if not full.get(p))
    return replace(
        symmetries, pairs=tuple(p for p in symmetries.pairs if full.get(p)), refused=(*symmetries.refused, *left)
    )


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
    """Certify symmetries by one backward pass, then move the weights along them and compare the outputs.

    It is done on a float64 copy of the model in evaluation mode, which casts nothing to single precision, and is in
    canonical form. All of a kind are moved together, and halved as long as an output changes by more than rounding.

    Parameters
    ----------
    model : nn.Module
        The model; it is left unchanged.
    batch : object
        A small batch for ``forward``. Floating-point tensors are widened to float64.
    symmetries : Symmetries, optional
        By default the pairs that handlers know, and that an examination of attention of unknown classes finds on this
        batch.
    seed : int
        Seed of the cotangent and of the group elements, which have condition number 10.
    moves : bool
        Whether to move, at one forward pass each kind.
    forward : callable
        ``forward(model, batch)`` → outputs; by default as for :func:`sharpness.evaluate`, without its loss. Of a
        network with symmetries outside pairs the first output that is not a single number is compared, since they
        change hidden states; where logits count only through a softmax, its logarithm.

    Returns
    -------
    Certificate
        ``print`` shows it; ``ok`` and ``failures`` say what is wrong.

    Raises
    ------
    ValueError
        The model returns no floating-point tensor, or has not the weights of a symmetry.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import ALL, find, verify
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder, x = torch.nn.TransformerEncoder(layer, 2), torch.linspace(-1, 1, 24).reshape(1, 3, 8)
    >>> print(verify(encoder, x, find(encoder, scope=ALL)))
    28 symmetries certified, largest residual ...e-1... (rounding is up to 1e-08)
    28 symmetries moved, largest relative change of an output ...e-1... (rounding is up to 1e-09)

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
        symmetries = claimed(twin, run) if symmetries is None else symmetries
        check_symmetries(symmetries)
        weights, symmetries = weights_of(twin), symmetries.of_full_rank()
        check_names(symmetries, weights, type(model).__name__)
        write_values(weights, canonical_form(weights, symmetries).values)
        pairs, actions = symmetries.pairs, symmetries.actions
        before = _outputs(run, actions)
        if not before:
            raise ValueError(f"{type(model).__name__} returned no floating-point tensor to compare; pass forward")
        if not any(t.isfinite().any() for t in before):
            raise ValueError(f"all outputs of {type(model).__name__} are NaN or infinite, which certifies nothing")
        gradients: dict[str, Tensor] = {}
        with suppress(RuntimeError), Wide():  # outputs that cannot be differentiated certify nothing; moves decide
            moving = {name: weights[name] for s in symmetries for name in s.names}
            gradients = output_gradients(lambda: [t[t.isfinite()] for t in _outputs(run, actions)], moving, generator)
        found = certify(stacks(pairs, weights), weights, gradients, tolerance=1e-8)
        along = {a: _residual(a, weights, gradients) for a in actions}
        residuals = found.residuals | {a: r for a, r in along.items() if r is not None}
        unreached = (*found.unreached, *(a for a, r in along.items() if r is None))
        changes = _changes(symmetries, weights, lambda: change(before, _outputs(run, actions)), seed) if moves else {}
    return replace(found, residuals=residuals, unreached=unreached, changes=changes)


def _outputs(run: Run, actions: Sequence[Action]) -> list[Tensor]:
    """Return the outputs that symmetries leave as they are."""
    outputs = run()
    if actions:
        outputs = [t for t in outputs if t.dim()][:1]
    return [t.log_softmax(-1) for t in outputs] if any(a.kind == "classes" for a in actions) else outputs


@torch.enable_grad()
def _residual(a: Action, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> float | None:
    """Return the derivative along an action at t = 0, relative to the lengths of gradient and move; None for 0/0."""
    t = torch.zeros(a.shape, dtype=torch.float64, device=weights[a.names[0]].device, requires_grad=True)
    at, near = State(weights), State(weights)
    a.act_(at, t)
    step = 1e-4 * standard_normal(tuple(a.shape), t, torch.Generator().manual_seed(0))
    a.act_(near, step)
    known = [name for name in a.names if name in gradients and name in at]
    if not known:
        return None
    (along,) = torch.autograd.grad(torch.stack([(gradients[n] * at[n]).sum() for n in known]).sum(), t)
    floor = 1e-6 * max(float(g.norm()) for g in gradients.values())  # a gradient may be pure rounding error
    moved = sum(max(float(gradients[n].norm()), floor) * float((near[n] - weights[n].detach()).norm()) for n in known)
    return float(along.norm() * step.norm()) / moved if moved else None


def _changes(symmetries: Symmetries, weights: Mapping[str, Tensor], change: Any, seed: int) -> dict[Any, float]:
    """Move all of a kind, and halves of it as long as an output changes by more than rounding."""
    left: list[list[Any]] = [[s for s in symmetries if s.kind == kind] for kind in symmetries.dimensions]
    found = dict[Any, float]()
    while left:
        some = left.pop()
        with _moved(weights, some, seed):
            largest = change()
        if largest <= Certificate.changes_tolerance or len(some) == 1:
            found |= dict.fromkeys(some, largest)
        else:
            left += [some[: len(some) // 2], some[len(some) // 2 :]]
    return {s: found[s] for s in symmetries}


@contextmanager
def _moved(weights: Mapping[str, Tensor], some: Sequence[SymmetricPair | Action], seed: int) -> Iterator[None]:
    """Move weights in canonical form along some symmetries for the time of a ``with``."""
    state, pairs = State(weights), [s for s in some if isinstance(s, SymmetricPair)]
    _move_(state, pairs, [s for s in some if not isinstance(s, SymmetricPair)], seed)
    with preserve_values(weights[name] for name in state):
        for name, value in state.items():
            weights[name].copy_(value)
        yield
