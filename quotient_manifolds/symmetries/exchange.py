"""Symmetries as JSON, and acting with them on a state dict: for programs that cannot build the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..linalg import in_double, standard_normal
from . import kinds, wiring
from .certificate import move_stacks_
from .found import Symmetries
from .pairs import Cause, Refusal, SymmetricPair
from .slots import GL, Slot
from .stacks import stacks
from .whole.canonical import canonical_form
from .wiring import State, Wiring

#: The version of the format. It rises when a reader of an older one would read something else than was meant.
SCHEMA = 1
_PARTS = (Symmetries, SymmetricPair, Refusal, GL, Slot, wiring.Affine, wiring.Norm, wiring.Site, Wiring)
_ACTIONS = (kinds.Scale, kinds.Gain, kinds.Shift, kinds.Reader, kinds.Centring, kinds.Exchange, kinds.HeadBias,
            kinds.QKGains, kinds.Length, kinds.Rotation)  # fmt: skip
_CLASSES = {cls.__name__: cls for cls in (*_PARTS, *_ACTIONS)}


def to_json(symmetries: Symmetries) -> str:
    """Write symmetries as JSON; see ``docs/reference/symmetries-json.md`` for the format.

    Parameters
    ----------
    symmetries : Symmetries

    Returns
    -------
    str

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find, from_json, to_json
    >>> found = find(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    >>> from_json(to_json(found)) == found
    True
    """
    return json.dumps({"schema": SCHEMA, **_encoded(symmetries)}, ensure_ascii=False)


def from_json(text: str) -> Symmetries:
    """Read symmetries that :func:`to_json` has written.

    Parameters
    ----------
    text : str

    Returns
    -------
    Symmetries

    Raises
    ------
    ValueError
        It is no such JSON, or of a newer version of the format.

    Examples
    --------
    See :func:`to_json`.

    >>> from quotient_manifolds.symmetries import from_json
    >>> from_json('{"schema": 1, "type": "Symmetries"}').dimension
    0
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"these are no symmetries as JSON: {error}") from None
    if not isinstance(data, dict) or data.get("type") != "Symmetries":
        raise ValueError('these are no symmetries as JSON: the outermost object has no "type": "Symmetries"')
    if data.pop("schema", None) != SCHEMA:
        raise ValueError(f"the symmetries are of another version of the format than {SCHEMA}; update the package")
    try:
        found: Symmetries = _decoded(data)
    except (TypeError, KeyError) as error:
        raise ValueError(f"these are no symmetries as JSON: {error}") from None
    return found


def _encoded(value: Any) -> Any:
    """Turn a value into what JSON has; fields with their default are left out."""
    if isinstance(value, Cause):
        return {"type": "Cause", "name": value.name}
    if is_dataclass(value):
        given = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != _default(f)}
        return {"type": type(value).__name__} | {name: _encoded(v) for name, v in given.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(v) for v in value]
    return sorted(value) if isinstance(value, set) else value


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _decoded(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_decoded, data))
    if not isinstance(data, dict):
        return data
    given = {name: _decoded(v) for name, v in data.items() if name != "type"}
    if data["type"] == "Cause":
        return Cause[given["name"]]
    if data["type"] == "Wiring":  # which an adapter builds up
        empty = Wiring()
        given = {name: type(getattr(empty, name))(v) for name, v in given.items()}
    return _CLASSES[data["type"]](**given)


@torch.no_grad()
def moved_weights(
    weights: Mapping[str, Tensor], symmetries: Symmetries, *, seed: int = 0, condition: float = 10.0, scale: float = 0.3
) -> dict[str, Tensor]:
    """Move a state dict by a random element of every symmetry, without the model: its function stays the same.

    Parameters
    ----------
    weights : mapping of str to Tensor
        With the names of the model's state dict. Of tied weights one name is enough; all that are there are written.
    symmetries : Symmetries
        Those of the model.
    seed : int
        Seed of the elements.
    condition : float
        Condition number of the elements of GL(h).
    scale : float
        Standard deviation of the moves outside pairs, which start at the canonical form.

    Returns
    -------
    dict of str to Tensor
        New tensors for those that move, in the dtypes of the old ones; the others as they are.

    Raises
    ------
    ValueError
        A weight is missing, or has another shape.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import ALL, find, moved_weights
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> encoder, x = torch.nn.TransformerEncoder(layer, 2), torch.ones(1, 3, 8)
    >>> before = encoder(x)
    >>> encoder.load_state_dict(moved_weights(encoder.state_dict(), find(encoder, kinds=ALL)))
    <All keys matched successfully>
    >>> torch.allclose(encoder(x), before, atol=1e-4)
    True
    """
    symmetries = symmetries.of_full_rank()
    own = _by_first_names(weights, symmetries)
    generator = torch.Generator().manual_seed(seed)
    state = State(own)
    state.update((name, in_double(v)) for name, v in canonical_form(own, symmetries, state=State(own)).values.items())
    for a in reversed(symmetries.actions):
        a.act_(state, scale * standard_normal(tuple(a.shape), state.of(a.names[0]), generator))
    in_pairs = dict.fromkeys(name for p in symmetries.pairs for name in p.names)
    values = dict(state) | {name: state.of(name).clone() for name in in_pairs}
    for stack in stacks(symmetries.pairs, values):
        move_stacks_([stack], values, condition, seed)
    found = {name: values[name].to(own[name]) for name in values}
    others = {other: found[name] for other, name in symmetries.tied if name in found and other in weights}
    return {**weights, **{name: v for name, v in found.items() if name in weights}, **others}


def _by_first_names(weights: Mapping[str, Tensor], symmetries: Symmetries) -> dict[str, Tensor]:
    """Give tied weights their first name, and raise if one is missing that moves."""
    own = {name: weights[other] for other, name in symmetries.tied if other in weights} | dict(weights)
    needed = [name for p in symmetries.pairs for name in p.names] + [n for a in symmetries.actions for n in a.names]
    if lost := next((name for name in needed if name not in own), None):
        raise ValueError(
            f"there is no weight {lost!r} in the file; its names must be those of the model's state dict, which "
            "transformers changes in some models when it saves: save model.state_dict() instead"
        )
    return own
