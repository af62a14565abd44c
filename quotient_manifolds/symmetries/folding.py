"""The symmetries of a network outside its pairs, by its wiring and its heads, in the order of folding; and the fold.

A canonical form is one point of weights for all networks that differ only by symmetries. Heads and neurons stay as they
are, because the metrics of pairs do not depend on their representatives. All other symmetries are folded, in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..linalg import at_least_float32
from ..weights import naming, places_of, plain_class, plain_names
from .actions import Action, HeadBias, QKGains, Reader, Shift, State, has_zeros
from .found import Symmetries, check_symmetries
from .kinds import Centring, Exchange, Gain, Length, Rotation, Scale
from .pairs import SymmetricPair
from .refusals import Cause, Claim, Refusal
from .slots import Slot, masks, outline
from .wiring import ADAPTERS, BACKBONES, Affine, Norm, Site, Wiring

T = TypeVar("T")


def wiring_of(model: nn.Module, at: str = "") -> Wiring | None:
    """Look up the wiring of a network by its exact class, or by that of its backbone under a head of the same file.

    Parameters
    ----------
    model : nn.Module
        Plain, compiled, or in DDP.
    at : str
        The name of the network in it, if it is a part.

    Returns
    -------
    Wiring or None
        With the names of the model's weights, of tied ones the first. None for an unknown class; an empty wiring if
        layers of the class were replaced.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import wiring_of
    >>> len(wiring_of(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)).sites)
    6
    """
    part = model.get_submodule(at)
    while type(part).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        name, part = next(part.named_children())
        at = f"{at}.{name}".removeprefix(".")
    adapter, found = ADAPTERS.of(part), None
    if adapter is not None:
        found = adapter(part)
    for name, base in (("", part), *part.named_children()) if adapter is None else ():
        headed = BACKBONES.of(base)
        if headed is not None and plain_class(base).__module__ == plain_class(part).__module__:
            found = headed(part, name)
            break
    return None if found is None else renamed(found, partial(naming(model), at))


def renamed(value: T, name_of: Callable[[str], str]) -> T:
    """Return a slot, or what holds slots in its fields, with other names of the weights."""
    if isinstance(value, Slot):
        return replace(value, name=name_of(value.name))
    if is_dataclass(value):
        changed = {f.name: renamed(getattr(value, f.name), name_of) for f in fields(value) if f.init}
        return replace(value, **changed)  # type: ignore[type-var]
    if isinstance(value, (list, tuple)):
        return type(value)(renamed(part, name_of) for part in value)
    return value


def actions_of(
    wiring: Wiring | None, heads: Sequence[Claim], weights: Mapping[str, Tensor], *, classes: bool
) -> tuple[list[Action], list[Refusal]]:
    """List the symmetries of a network outside its pairs, in the order of folding, and what is refused.

    ``heads`` are those whose attention weights sum to 1; ``classes``: the network's logits are used only through a
    softmax.
    """
    lists = _Lists([], [], set() if wiring is None else wiring.tied(), weights)
    shifted = [] if wiring is None else _add_norms(wiring, lists)
    # Without a wiring nobody vouches that attention weights sum to 1.
    kinds = ("key bias", "value bias") if wiring is not None and wiring.sites else ("key bias",)
    for kind, p in product(kinds, heads):
        if (found := _head_bias(kind, p, shifted, weights)) is not None:
            _add(found, lists)
    if wiring is not None:
        _add_stream(wiring, lists)
        if classes:
            _add_classes(wiring, lists)
        _add_rotation(wiring, lists)
    return [a.among(lists.found) for a in lists.found] if lists.refused else lists.found, lists.refused


class _Lists(NamedTuple):
    """The symmetries that were found so far, those that were refused, and what tells."""

    found: list[Action]
    refused: list[Refusal]
    tied: set[str]
    weights: Mapping[str, Tensor]


def _add(a: Action, to: _Lists, detail: str = "") -> bool:
    """List an action, or refuse it; return whether it was found."""
    cause = Cause.BROKEN if detail else _obstacle(a, to)
    if cause is None:
        to.found.append(a)
    else:
        to.refused.append(Refusal(a.name, a.kind, cause, detail, G=a.slots))
    return cause is None


def _obstacle(a: Action, to: _Lists) -> Cause | None:
    if any(s.name in to.tied for s in a.alone):
        return Cause.SHARED
    # Weights may be computed, by pruning for example.
    return Cause.COMPUTED if any(s.name not in to.weights for s in a.needed) else None


def _has(lists: _Lists, labels: Sequence[str]) -> bool:
    """Return whether all of some actions were found."""
    return {a.label for a in lists.found}.issuperset(labels)


def _add_norms(w: Wiring, to: _Lists) -> list[Site]:
    """List what scales and shifts at norms and scores; return the sites whose shift is folded."""
    for name, unit, a in w.scales:
        _add(Scale("layer scale", name, unit, (), tuple(a.written)), to)
    for site in w.sites:
        _add_gain(site, to)
    shifted = [site for site in w.sites if site.norm.shift is not None and site.readers and _add_shift(site, to)]
    for site in w.sites:
        for r in site.readers if site.norm.centring else ():
            if site.norm.shift is None or r.bias is not None or r.blind:
                _add(Reader("reader", site.name, site.norm, r), to)
    for name, q, k in w.qk_norms:
        _add(QKGains("q/k gains", name, q, k), to)
    for name, tables in w.score_tables:
        _add(Exchange("score bias", name, tables, ()), to)
    return shifted


def _add_gain(site: Site, to: _Lists) -> None:
    """List the gain of a norm that only linear layers read; where a gain is 0, the shift must be folded first."""
    its, shift = site.norm, _shift(site)
    if not site.readers or site.carried or its.gain is None or its.gain.name not in to.weights:
        return
    waits = shift is not None and has_zeros(its, State(to.weights), its.gain)
    if waits and shift is not None and _obstacle(shift, to):
        return
    readers = tuple(r.matrix for r in site.readers)
    after = (shift.label,) if waits and shift is not None else ()
    its_shift = shift if waits else None
    unit, alike = its.gain, tuple(its.slots[1:])
    _add(Gain("gain", site.name, unit, alike, readers, its.offset, shift=its_shift, after=after), to)


def _add_shift(site: Site, to: _Lists) -> bool:
    """List the shift of a norm."""
    without = not site.norm.centring and any(r.bias is None and not r.blind for r in site.readers)
    last = site.carried is not None and site.carried.bias is None
    detail = "a reader without a bias" if without else "the next writer has no bias" if last else ""
    shift = _shift(site)
    return shift is not None and _add(shift, to, detail)


def _add_stream(w: Wiring, to: _Lists) -> None:
    """List what is added to a stream: constants that embeddings share, and the means of what norms centre."""
    scales = {a.matrix: (f"layer scale: {name}",) for name, _, a in w.scales}
    writers = [Centring("writer", name, tuple(a.written), after=scales.get(a.matrix, ())) for name, a in w.writers]
    writers += [Centring("writer", name, (rows,)) for name, rows in w.tables]
    writers = writers if w.centred and w.sites else []
    for name, source, targets in w.common:
        shared = tuple(a for a in writers if not {source.name, *(s.name for s in targets)}.isdisjoint(a.names))
        _add(Exchange("embeddings", name, (source,), targets, shared), to)
    for a in writers:
        _add(a, to, "" if _has(to, a.after) else "its layer scale is not folded")


def _add_classes(w: Wiring, to: _Lists) -> None:
    """List what adds one number to all logits of a softmax."""
    for name, a in w.classifiers:
        matrix, *bias = a.written
        shared = (r for r in to.found if isinstance(r, Reader) and r.affine.matrix.name == matrix.name)
        _add(Centring("classes", name, (matrix,), tuple(shared)), to)
        if bias:
            _add(Centring("classes", f"{name} biases", (bias[0],)), to)


def _add_rotation(w: Wiring, to: _Lists) -> None:
    """List the rotation of the stream, where everything that reads it is known and every gain is folded."""
    gains = (f"gain: {s.name}" for s in w.sites if s.norm.gain is not None)
    after = (*(f"layer scale: {name}" for name, *_ in w.scales), *gains)
    if w.closed and w.sites and not w.reads_stream_raw and _has(to, after):
        # A shift lies in the stream where a frozen bias keeps it from being folded; what is folded stays.
        rows = (*w.vectors, *(s.norm.shift for s in w.sites if s.norm.shift is not None))
        _add(Rotation("rotation", "the stream", tuple(dict.fromkeys(rows)), w.centred, after=after), to)


def _shift(site: Site) -> Shift | None:
    beta, carried = site.norm.shift, None if site.carried is None else site.carried.bias
    return None if beta is None else Shift("shift", site.name, beta, site.norm, site.readers, carried)


def lengths_of(model: nn.Module) -> tuple[list[Action], list[Refusal]]:
    """List those of what weight normalisation divides by its length, in layers of any class, and what is refused.

    Layers may share weights, if all of them divide the same rows by their lengths, and nothing else uses these.
    """
    plain, name_of = plain_names(model), naming(model)
    places = defaultdict[Slot, list[str]](list)
    for path, module in model.named_modules():
        for own, steps in getattr(module, "parametrizations", {}).items():
            if type(steps[0]).__name__ == "_WeightNorm" and len(steps) == 1 and not steps.original1.is_complex():
                inside = f"parametrizations.{own}.original1"
                rows = replace(_normalised(module, inside, steps[0].dim), name=name_of(path, inside))
                places[rows].append(plain(f"{path}.{own}".removeprefix(".")))
    found, refusals, held = list[Action](), list[Refusal](), places_of(model)
    for rows, (place, *others) in places.items():
        if held[rows.name] == 1 + len(others):
            found.append(Length("length", place, rows))
        else:
            refusals.append(Refusal(place, "length", Cause.SHARED, G=(rows,)))
    return found, refusals


def _normalised(module: nn.Module, name: str, dim: int) -> Slot:
    """Describe what weight normalisation divides by one length each: a whole weight for -1, else its slices."""
    whole = outline(module, name)
    return Slot.from_view(name, whole, whole.view(1, -1) if dim == -1 else whole.movedim(dim, 0))


def _head_bias(kind: str, head: Claim, shifted: Sequence[Site], weights: Mapping[str, Tensor]) -> HeadBias | None:
    """Describe the only bias of a head's keys, or of its values if outputs have biases too; or what stands for it."""
    of_keys, outputs = kind == "key bias", tuple[tuple[Slot, Slot], ...]()
    plain = isinstance(head, SymmetricPair) and head.kind == ("qk" if of_keys else "vo") and not head.group.diagonal
    if of_keys:
        rows = head.null or (head.H if plain and len(head.H) == 1 else ())
    else:
        outputs = _with_bias(head.H, weights)
        rows = head.G if plain and len(outputs) == len(head.H) else ()
    biases = [s for s in rows if s.size[0] == 1]
    site = _reads(shifted, rows[0]) if len(rows) == 1 and not biases else None
    if len(biases) != 1 and site is None:
        return None
    own = Affine(rows[0].transposed(), biases[0] if biases else None)
    norm: Norm | None = None if site is None else site.norm
    return HeadBias(kind, head.name, own, norm, outputs, after=() if site is None else (f"shift: {site.name}",))


def _with_bias(matrices: Sequence[Slot], weights: Mapping[str, Tensor]) -> tuple[tuple[Slot, Slot], ...]:
    """Return the matrices of layers with a bias, each with this vector as a row."""
    found = list[tuple[Slot, Slot]]()
    for s in matrices:
        path, dot, own = s.name.rpartition(".")
        if own == "weight" and (name := f"{path}{dot}bias") in weights:
            (size,) = weights[name].shape
            found.append((s, Slot(name, (size,), 0, (1, size), (size, 1))))
    return tuple(found)


def _reads(shifted: Sequence[Site], rows: Slot) -> Site | None:
    """Return the folded, centring norm in front of a reader without a bias that has these rows."""
    readers = ((s, r) for s in shifted if s.norm.centring for r in s.readers if r.bias is None and not r.blind)
    return next((s for s, r in readers if r.matrix.name == rows.name), None)


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

    >>> from quotient_manifolds.symmetries import Symmetries, canonical_form
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
        Those of the network, as ``find(model, scope=ALL)`` finds them, restricted to the weights that may change.
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
    >>> from quotient_manifolds.symmetries import ALL, canonical_form, find
    >>> config = ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
    ...                    image_size=8, patch_size=4, num_channels=1)
    >>> model = ViTForImageClassification(config)
    >>> form = canonical_form(dict(model.named_parameters()), find(model, scope=ALL))
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
    check_symmetries(symmetries)
    state = fold(weights, symmetries, state)
    fixed = dict.fromkeys(s for a in symmetries.actions for s in a.constant)
    left = [[tuple(s for s in slots if s not in fixed) for slots in (p.G, p.H)] for p in symmetries.pairs]
    pairs = tuple(replace(p, G=G, H=H, null=()) for p, (G, H) in zip(symmetries.pairs, left, strict=True))
    values = {name: v.to(at_least_float32(weights[name].dtype)).to(weights[name].device) for name, v in state.items()}
    return CanonicalForm(values, masks(fixed, weights), replace(symmetries, pairs=pairs))


def fold(weights: Mapping[str, Tensor], symmetries: Symmetries, state: State | None = None) -> State:
    """Return the values of weights in canonical form, in float64."""
    state = State(weights) if state is None else state
    for a in symmetries.actions:
        a.fold_(state)
    return state


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
