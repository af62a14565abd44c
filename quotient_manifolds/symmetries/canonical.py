"""The canonical form of a network: one point of weights for all networks that differ only by symmetries.

Heads and neurons stay as they are, because the metrics of pairs do not depend on their representatives. All other
symmetries are folded, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..linalg import at_least_float32
from .actions import State
from .found import Symmetries, check_symmetries
from .pairs import SymmetricPair
from .slots import masks


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
    pairs = list[SymmetricPair]()
    for p in symmetries.pairs:
        G, H = (tuple(s for s in slots if s not in fixed) for slots in (p.G, p.H))
        pairs.append(replace(p, G=G, H=H, null=()))
    values = {name: v.to(at_least_float32(weights[name].dtype)).to(weights[name].device) for name, v in state.items()}
    return CanonicalForm(values, masks(fixed, weights), replace(symmetries, pairs=tuple(pairs)))


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
