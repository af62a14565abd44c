"""The canonical form of a network: the same for all weights that differ by a continuous symmetry outside the heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...linalg import at_least_float32, in_double, standard_normal
from ...passes import Forward, default_forward
from ...weights import check_whole, plain_names, running_copy
from ..blocks import masks
from ..certificate import Certificate, certify, change, maximum, output_gradients, preserve_values
from ..discovery import apply_random_symmetry_, find_symmetric_pairs
from ..pairs import SymmetricPair, in_copy
from ..stacks import PairList, stacks
from .kinds import Symmetry, symmetries_of
from .wiring import State, Wiring, neuron_pairs, wiring_of


@dataclass(frozen=True)
class CanonicalForm:
    """The weights of a network in canonical form, and its symmetries.

    Attributes
    ----------
    values : dict of Tensor to Tensor
        The parameters that change and their canonical values, in the parameters' dtypes but at least float32.
    constant : dict of Tensor to Tensor
        Entries that are constant in the canonical form, by parameter; they are not coordinates any more.
    pairs : list of SymmetricPair
        Heads and neurons, without constant entries.
    symmetries : list of Symmetry
        The other symmetries, in the order of folding.
    refused : dict of str to str
        The symmetries that could not be folded, and why.
    halting : tuple of str
        Names of the frozen parameters for which a symmetry was refused that moves trained ones too, and would move the
        lengths by which these are measured.
    wiring : Wiring or None
        None if no adapter knows the network; then only its heads are treated.

    Examples
    --------
    See :func:`canonical_form`.

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import canonical_form
    >>> canonical_form(nn.Linear(2, 2)).wiring is None
    True
    """

    values: dict[Tensor, Tensor] = field(repr=False)
    constant: dict[Tensor, Tensor] = field(repr=False)
    pairs: PairList
    symmetries: list[Symmetry] = field(repr=False)
    refused: dict[str, str]
    halting: tuple[str, ...] = field(repr=False)
    wiring: Wiring | None = field(repr=False)

    @property
    def wired(self) -> bool:
        """Whether an adapter describes the network; else only heads and key biases are treated."""
        return self.wiring is not None and bool(self.wiring.sites)

    @property
    def dimensions(self) -> dict[str, int]:
        """The dimension of every kind of symmetry."""
        found: Counter[str] = Counter()
        of_pairs = [(p.kind, p.group.dimension) for p in self.pairs if p.group is not None]
        for kind, dimension in [*of_pairs, *((s.kind, s.dimension) for s in self.symmetries)]:
            found[kind] += dimension
        return dict(found)

    def __str__(self) -> str:
        lines = [f"{kind:<12} {dimension:>9,}" for kind, dimension in self.dimensions.items()]
        lines.append(f"{'all':<12} {sum(self.dimensions.values()):>9,}")
        if not self.wired:
            lines.append("only heads and key biases: no adapter describes how this network is wired (register_wiring)")
        reasons = Counter((name.partition(":")[0], why) for name, why in self.refused.items())
        lines += [f"not folded: {times} × {kind} ({why})" for (kind, why), times in reasons.items()]
        return "\n".join(lines)


@torch.no_grad()
def canonical_form(
    model: nn.Module, *, classes: bool = False, pairs: Iterable[SymmetricPair] | None = None, state: State | None = None
) -> CanonicalForm:
    """Find a network's canonical form; the network is left unchanged.

    Parameters
    ----------
    model : nn.Module
        A whole network, of a class that an adapter knows, see :func:`register_wiring`. For other classes only heads and
        their key biases are treated.
    classes : bool
        The logits are used only through a softmax, so a constant added to all of them is folded too. The logits change
        by that constant.
    pairs : iterable of SymmetricPair, optional
        Its heads, by default those that :func:`~quotient_manifolds.symmetries.find_symmetric_pairs` names.
    state : State, optional
        Storage for values while they are folded; by default an empty one.

    Returns
    -------
    CanonicalForm
        ``print`` shows the dimensions.

    Notes
    -----
    Gains and shifts of norms, LayerScale, and the biases of keys and values are folded into other weights; layers that
    read or write the stream are centred; constants that embeddings share are moved to one of them. It is computed in
    float64. Heads, neurons and rotations of the stream are left unchanged, because the metrics do not depend on them.

    Examples
    --------
    >>> from transformers import ViTConfig, ViTForImageClassification
    >>> from quotient_manifolds.symmetries.whole import canonical_form
    >>> config = ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
    ...                    image_size=8, patch_size=4, num_channels=1)
    >>> print(canonical_form(ViTForImageClassification(config)))
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
    check_whole(model, or_rows=state is not None)
    wiring = wiring_of(model)
    pairs = [*(find_symmetric_pairs(model) if pairs is None else pairs), *neuron_pairs(wiring)]
    symmetries, refused = symmetries_of(wiring, pairs, classes=classes)
    state = State() if state is None else state
    for s in symmetries:
        s.fold(state)
    fixed = {b.key: b for s in symmetries for b in s.constant}
    kept = PairList(_without(p, fixed) for p in pairs)
    values = {p: value.to(at_least_float32(p.dtype)).to(p.device) for p, value in state.items()}
    # The lengths of neurons go with their scale, and those of vectors do not depend on a rotation of the stream.
    halves = [set(s.parameters) for s, why in refused if why == "frozen weights" and s.kind != "rotation"]
    halves += [set(p.parameters()) for p in pairs if p.frozen and p.part != "neurons"]
    adapters = {t for p in pairs if p.kind == "lora" for t in p.parameters()}
    halving = (ts for ts in halves if any(t.requires_grad for t in ts - adapters))
    halting, plain = {t for t in set().union(*halving) if not t.requires_grad}, plain_names(model)
    names = tuple(plain(name) for name, p in model.named_parameters() if p in halting)
    reasons = {f"{s.kind}: {s.name}": why for s, why in refused}
    return CanonicalForm(values, masks(fixed.values()), kept, symmetries, reasons, names, wiring)


def _without(pair: SymmetricPair, constant: Collection[object]) -> SymmetricPair:
    """Remove the constant blocks from a pair."""
    if pair.group is None:
        return pair
    G, H = (tuple(b for b in blocks if b.key not in constant) for blocks in (pair.G, pair.H))
    return replace(pair, G=G, H=H, null=())


@torch.no_grad()
def write_values(values: dict[Tensor, Tensor]) -> None:
    """Write all parameters or none."""
    before = {p: p.detach().clone() for p in values}
    try:
        for p, value in values.items():
            p.copy_(value)
    except BaseException:
        for p, value in before.items():
            p.copy_(value)
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
        As for :func:`canonical_form`.

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
    form = canonical_form(model, classes=classes)
    write_values(form.values)
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
        As for :func:`canonical_form`.
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
    form = canonical_form(model, classes=classes)
    kinds, known = [kinds] if isinstance(kinds, str) else kinds, list(dict.fromkeys(s.kind for s in form.symmetries))
    if unknown := sorted(set(kinds or ()) - set(known)):
        raise ValueError(f"{type(model).__name__} has no symmetry {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    moving = [s for s in form.symmetries if kinds is None or s.kind in kinds]
    _move_(moving, State({p: in_double(value) for p, value in form.values.items()}), scale, seed)
    return list(dict.fromkeys(s.kind for s in reversed(moving)))


def _move_(symmetries: Sequence[Symmetry], state: State, scale: float, seed: int) -> None:
    """Move weights in canonical form by random elements, in the reverse order of folding."""
    generator = torch.Generator().manual_seed(seed)
    for s in reversed(symmetries):
        s.move(state, scale * standard_normal(tuple(s.shape), state.of(s.parameters[0]), generator))
    write_values({p: value.to(p.dtype) for p, value in state.items()})


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
    known = find_symmetric_pairs(model, include_frozen=True, batch=batch, forward=forward)
    with running_copy(model, batch, forward) as (twin, run):
        form = canonical_form(twin.requires_grad_(), classes=classes, pairs=in_copy(known, model, twin))
        write_values(form.values)
        parameters = list(twin.parameters())

        def outputs() -> list[Tensor]:
            """Return the first output that is not a loss; others, such as hidden states, need not be invariant."""
            found = [t for t in run() if t.dim()]
            return [t.log_softmax(-1) if classes else t for t in found[:1]]

        gradients = output_gradients(outputs, parameters, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            before = outputs()
        residuals, changes = dict[str, float](), dict[str, float]()
        of_pairs = [(p.kind, r) for p, r in certify(stacks(form.pairs), gradients).residuals.items()]
        for kind, residual in [*of_pairs, *((s.kind, _residual(s, gradients)) for s in form.symmetries)]:
            residuals[kind] = maximum([residuals.get(kind, 0.0), residual])
        for kind in form.dimensions:
            pairs = [p for p in form.pairs if p.kind == kind]
            with torch.no_grad(), preserve_values(parameters):
                if pairs:
                    apply_random_symmetry_(twin, seed=seed, pairs=pairs)
                else:
                    _move_([s for s in form.symmetries if s.kind == kind], State(), 0.3, seed)
                changes[kind] = change(before, outputs())
    return Certificate(residuals, (), 1e-8, changes, 1e-8)


def _residual(s: Symmetry, gradients: dict[Tensor, Tensor]) -> float:
    """Return the derivative along a symmetry at t = 0, relative to the gradient's and the move's lengths."""
    t = torch.zeros(s.shape, dtype=torch.float64, device=s.parameters[0].device, requires_grad=True)
    at, near = State(), State()
    s.move(at, t)
    step = 1e-4 * standard_normal(tuple(s.shape), t, torch.Generator().manual_seed(0))
    s.move(near, step)
    known = [p for p in s.parameters if p in gradients and at.of(p).requires_grad]
    if not known:
        return 0.0
    (along,) = torch.autograd.grad(torch.stack([(gradients[p] * at[p]).sum() for p in known]).sum(), t)
    floor = 1e-6 * max(float(g.norm()) for g in gradients.values())  # a gradient may be pure rounding error
    moved = sum(max(float(gradients[p].norm()), floor) * float((near.of(p) - p.detach()).norm()) for p in known)
    sizes = moved / float(step.norm())
    return float(along.norm()) / sizes if sizes else 0.0
