"""Symmetries as JSON: for programs that cannot build the model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from . import actions, kinds, wiring
from .found import Symmetries
from .pairs import SymmetricPair
from .refusals import Cause, Refusal
from .slots import GL, Slot
from .wiring import Wiring

#: The version of the format. It rises when a reader of an older one would read something else than was meant.
SCHEMA = 1
_PARTS = (Symmetries, SymmetricPair, Refusal, GL, Slot, wiring.Affine, wiring.Norm, wiring.Site, Wiring)
_ACTIONS = (kinds.Scale, kinds.Gain, kinds.Centring, kinds.Exchange, kinds.Length, kinds.Rotation,
            actions.Shift, actions.Reader, actions.HeadBias, actions.QKGains)  # fmt: skip
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


def digest(symmetries: Symmetries) -> str:
    """Return the SHA-256 of symmetries' JSON: which ones a recorded number had divided out."""
    return hashlib.sha256(to_json(symmetries).encode()).hexdigest()


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
        raise ValueError(f"these are no symmetries as JSON: {error}") from error
    return found


def _encoded(value: Any) -> Any:
    """Turn a value into what JSON has; fields with their default are left out."""
    if isinstance(value, Cause):
        return {"type": "Cause", "name": value.name}
    if is_dataclass(value):
        own = [f for f in fields(value) if f.init]
        given = {f.name: getattr(value, f.name) for f in own if getattr(value, f.name) != _default(f)}
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
