"""The canonical form of a network: one point of weights for all networks that differ only by symmetries.

Heads and neurons stay as they are, because the metrics of pairs do not depend on their representatives. All other
symmetries are folded, in float64.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...linalg import at_least_float32, in_double, standard_normal
from ...passes import Forward, default_forward
from ...weights import check_whole, running_copy, weights_of
from ..certificate import Certificate, certify, change, maximum, move_stacks_, output_gradients, preserve_values
from ..discovery import ALL, find
from ..found import Symmetries
from ..kinds import Action
from ..pairs import SymmetricPair
from ..slots import Slot, masks
from ..stacks import stacks
from ..wiring import State


@dataclass(frozen=True)
class CanonicalForm:
    """The weights of a network in canonical form, and its symmetries there.

    Attributes
    ----------
    values : dict of str to Tensor
        The weights that change and their canonical values, in the weights' dtypes but at least float32.
    constant : dict of str to Tensor
        Entries that are constant in the canonical form, by weight; they are not coordinates any more.
    symmetries : Symmetries
        The pairs without constant entries, and all that was folded or refused.

    Examples
    --------
    See :func:`canonical_form`.

    >>> from quotient_manifolds.symmetries import Symmetries
    >>> from quotient_manifolds.symmetries.whole import canonical_form
    >>> canonical_form({}, Symmetries()).values
    {}
    """

    values: dict[str, Tensor] = field(repr=False)
    constant: dict[str, Tensor] = field(repr=False)
    symmetries: Symmetries


@torch.no_grad()
def canonical_form(
    weights: Mapping[str, Tensor], symmetries: Symmetries, *, state: State | None = None
) -> CanonicalForm:
    """Compute the canonical form of weights; they are left unchanged.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Of a network, by name, or a state dict.
    symmetries : Symmetries
        Those of the network, as ``find(model, kinds=ALL)`` finds them, restricted to the weights that may change.
    state : State, optional
        Storage for values while they are folded; by default an empty one.

    Returns
    -------
    CanonicalForm

    Notes
    -----
    Gains and shifts of norms, LayerScale, and the biases of keys and values are folded into other weights; layers that
    read or write the stream are centred; constants that embeddings share are moved to one of them. It is computed in
    float64. Heads, neurons and rotations of the stream are left unchanged, because the metrics do not depend on them.

    Examples
    --------
    >>> from transformers import ViTConfig, ViTForImageClassification
    >>> from quotient_manifolds.symmetries import ALL, find
    >>> from quotient_manifolds.symmetries.whole import canonical_form
    >>> config = ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
    ...                    image_size=8, patch_size=4, num_channels=1)
    >>> model = ViTForImageClassification(config)
    >>> form = canonical_form(dict(model.named_parameters()), find(model, kinds=ALL))
    >>> print(form.symmetries.table())
    qk                  64
    vo                  64
    gain                40
    shift               40
    reader              74
    key bias            16
    value bias          16
    embeddings          14
    writer              67
    rotation            21
    all                416
    """
    state = State(weights) if state is None else state
    for a in symmetries.actions:
        a.fold_(state)
    fixed = dict.fromkeys(s for a in symmetries.actions for s in a.constant)
    pairs = tuple(_without(p, fixed) for p in symmetries.pairs)
    values = {name: v.to(at_least_float32(weights[name].dtype)).to(weights[name].device) for name, v in state.items()}
    return CanonicalForm(values, masks(fixed, weights), replace(symmetries, pairs=pairs))


def _without(pair: SymmetricPair, constant: Collection[Slot]) -> SymmetricPair:
    """Remove the constant slots from a pair."""
    G, H = (tuple(s for s in slots if s not in constant) for slots in (pair.G, pair.H))
    return replace(pair, G=G, H=H, null=())


@torch.no_grad()
def write_values(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write all weights or none."""
    before = {name: weights[name].detach().clone() for name in values}
    try:
        for name, value in values.items():
            weights[name].copy_(value)
    except BaseException:
        for name, value in before.items():
            weights[name].copy_(value)
        raise


@torch.no_grad()
def canonicalize_(model: nn.Module, *, classes: bool = False) -> CanonicalForm:
    """Move a network to its canonical form: the function stays the same to rounding.

    LoRA adapters of the old weights do not fit the new ones; merge them before.

    Parameters
    ----------
    model : nn.Module
        Changed in place; unchanged if anything fails.
    classes : bool
        As for :func:`~quotient_manifolds.symmetries.find`.

    Returns
    -------
    CanonicalForm
        The symmetries that were folded, and those that could not be.

    Examples
    --------
    >>> import torch
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from quotient_manifolds.symmetries.whole import canonicalize_
    >>> config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
    ...                     vocab_size=11)
    >>> model, words = BertForSequenceClassification(config).eval(), torch.arange(5)[None]
    >>> before = model(words).logits
    >>> _ = canonicalize_(model)
    >>> torch.allclose(model(words).logits, before, atol=1e-5), bool(model.bert.embeddings.LayerNorm.bias.any())
    (True, False)
    """
    check_whole(model)
    weights = weights_of(model)
    form = canonical_form(weights, find(model, kinds=ALL, classes=classes))
    write_values(weights, form.values)
    return form


@torch.no_grad()
def apply_random_moves_(
    model: nn.Module, scale: float = 0.3, seed: int = 0, *, classes: bool = False, kinds: Collection[str] | None = None
) -> list[str]:
    """Move a network by a random element of every symmetry outside its pairs: the function stays the same.

    The network is canonicalised first; then gains, shifts, biases and embeddings are moved, in the reverse order of
    folding. Heads and neurons are moved by :func:`~quotient_manifolds.symmetries.apply_random_symmetry_`.
    LoRA adapters of the old weights do not fit the new ones.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    scale : float
        Standard deviation of the moves.
    seed : int
        Seed of the moves.
    classes : bool
        As for :func:`~quotient_manifolds.symmetries.find`.
    kinds : str or collection of str, optional
        The kinds to move; by default all.

    Returns
    -------
    list of str
        The kinds that were moved.

    Raises
    ------
    ValueError
        The network has no symmetry of a kind.

    Examples
    --------
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from quotient_manifolds.symmetries.whole import apply_random_moves_
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=6, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> words = torch.arange(5)[None]
    >>> before = model(words).logits
    >>> apply_random_moves_(model)
    ['writer', 'value bias', 'key bias', 'reader', 'shift', 'gain']
    >>> torch.allclose(model(words).logits, before, atol=1e-4)
    True
    """
    check_whole(model)
    weights = weights_of(model)
    form = canonical_form(weights, find(model, kinds=ALL, classes=classes))
    actions = form.symmetries.actions
    kinds, known = [kinds] if isinstance(kinds, str) else kinds, list(dict.fromkeys(a.kind for a in actions))
    if unknown := sorted(set(kinds or ()) - set(known)):
        raise ValueError(f"{type(model).__name__} has no symmetry {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    moving, state = [a for a in actions if kinds is None or a.kind in kinds], State(weights)
    state.update((name, in_double(value)) for name, value in form.values.items())
    _move_(moving, state, scale, seed)
    return list(dict.fromkeys(a.kind for a in reversed(moving)))


def _move_(actions: Sequence[Action], state: State, scale: float, seed: int) -> None:
    """Move weights in canonical form by random elements, in the reverse order of folding."""
    generator = torch.Generator().manual_seed(seed)
    for a in reversed(actions):
        a.act_(state, scale * standard_normal(tuple(a.shape), state.of(a.names[0]), generator))
    write_values(state.weights, {name: value.to(state.weights[name].dtype) for name, value in state.items()})


@torch.inference_mode(False)
@torch.enable_grad()
def verify_whole(
    model: nn.Module, batch: Any, seed: int = 0, *, forward: Forward = default_forward, classes: bool = False
) -> Certificate:
    """Certify every kind of symmetry of a network, heads, neurons and all others, and move it.

    It is done on a canonicalised copy in float64.

    Parameters
    ----------
    model : nn.Module
        A network of a known class, see :func:`register_wiring`; it is left unchanged.
    batch : object
        A batch for ``forward``; floating-point tensors are widened.
    seed : int
        Seed of the cotangent and the moves.
    forward : callable
        ``forward(model, batch)`` → outputs, of which the first one that is not a single number is compared.
    classes : bool
        The outputs are used only through a softmax over their last dimension.

    Returns
    -------
    Certificate
        Its residuals and changes are by kind: the largest derivative of the outputs along a symmetry of the kind,
        relative to the lengths of gradient and move, and their change when all of the kind move.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries.whole import verify_whole
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = torch.nn.TransformerEncoder(layer, 2)
    >>> verify_whole(encoder, torch.linspace(-1, 1, 48).reshape(2, 3, 8)).ok
    True
    """
    found = find(model, batch, kinds=ALL, classes=classes, forward=forward).of_full_rank()
    with running_copy(model, batch, forward) as (twin, run):
        weights = weights_of(twin)
        form = canonical_form(weights, found)
        write_values(weights, form.values)

        def outputs() -> list[Tensor]:
            """Return the first output that is not a loss; others, such as hidden states, need not be invariant."""
            found = [t for t in run() if t.dim()]
            return [t.log_softmax(-1) if classes else t for t in found[:1]]

        gradients = output_gradients(outputs, weights, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            before = outputs()
        pairs, actions = form.symmetries.pairs, form.symmetries.actions
        by_pair = certify(stacks(pairs, weights), weights, gradients).residuals.items()
        residuals, changes = dict[str, float](), dict[str, float]()
        for kind, r in [
            *((p.kind, r) for p, r in by_pair),
            *((a.kind, _residual(a, weights, gradients)) for a in actions),
        ]:
            residuals[kind] = maximum([residuals.get(kind, 0.0), r])
        for kind in form.symmetries.dimensions:
            some = [p for p in pairs if p.kind == kind]
            with torch.no_grad(), preserve_values(weights.values()):
                if some:
                    move_stacks_(stacks(some, weights), weights, 10.0, seed)
                else:
                    _move_([a for a in actions if a.kind == kind], State(weights), 0.3, seed)
                changes[kind] = change(before, outputs())
    return Certificate(residuals, (), 1e-8, changes, 1e-8)


def _residual(a: Action, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> float:
    """Return the derivative along a symmetry at t = 0, relative to the gradient's and the move's lengths."""
    t = torch.zeros(a.shape, dtype=torch.float64, device=weights[a.names[0]].device, requires_grad=True)
    at, near = State(weights), State(weights)
    a.act_(at, t)
    step = 1e-4 * standard_normal(tuple(a.shape), t, torch.Generator().manual_seed(0))
    a.act_(near, step)
    known = [name for name in a.names if name in gradients and at.of(name).requires_grad]
    if not known:
        return 0.0
    (along,) = torch.autograd.grad(torch.stack([(gradients[n] * at[n]).sum() for n in known]).sum(), t)
    floor = 1e-6 * max(float(g.norm()) for g in gradients.values())  # a gradient may be pure rounding error
    moved = sum(
        max(float(gradients[n].norm()), floor) * float((near.of(n) - weights[n].detach()).norm()) for n in known
    )
    sizes = moved / float(step.norm())
    return float(along.norm()) / sizes if sizes else 0.0
