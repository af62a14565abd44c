"""The rows of the table of architectures: names of layers, read from their notation once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

#: Names of one thing, of which the first that exists counts: versions of a library differ. Separated by ``|``.
Names = tuple[str, ...]


@dataclass(frozen=True)
class NamedRows:
    """NamedRows of a parameter (…, d), or outputs of a layer: ``"words"``, ``"positions[2:]"``, ``"types?[:1,2:]"``.

    Attributes
    ----------
    names : tuple of str
    ranges : tuple of slice
    optional : bool
        It may be missing, which the notation says by ``?``.
    """

    names: Names
    ranges: tuple[slice, ...] = (slice(None),)
    optional: bool = False

    @classmethod
    def read(cls, text: str) -> NamedRows:
        """Read the notation."""
        names, _, ranges = text.partition("[")
        bounds = [part.split(":") for part in (ranges.rstrip("]") or ":").split(",")]
        parts = tuple(slice(*(int(b) if b else None for b in ends)) for ends in bounds)
        return cls(tuple(names.removesuffix("?").split("|")), parts, names.endswith("?"))

    def __str__(self) -> str:
        """Write the notation again, without the question mark."""
        ends = [":".join("" if b is None else str(b) for b in (r.start, r.stop)) for r in self.ranges]
        return "|".join(self.names) + ("" if self.ranges == (slice(None),) else f"[{','.join(ends)}]")


@dataclass(frozen=True)
class Readers:
    """Layers that read the stream side by side, and what happens to the last one's output before the writer.

    Attributes
    ----------
    names : tuple of str
    act : str
        ``"glu"`` if it is gated, or where the activation is found, below the model; empty where there are no neurons.
    """

    names: tuple[str, ...]
    act: str = ""


@dataclass(frozen=True)
class Sublayer:
    """Names within a layer. Notation: ``"norm; readers; writer; act"``, then ``"; scale=…"`` and other fields by name.

    Attributes
    ----------
    norm : tuple of str
        Before the sublayer (pre-norm) or after its sum with the stream (post-norm).
    readers : tuple of Readers
        Of which the first that exists counts. Notation: names separated by spaces, alternatives by ``|``; one act for
        each alternative, or one for all; ``{q,k,v}`` stands for three names.
    writer : tuple of str
        The layer whose output is added to the stream.
    scale : tuple of str
        Parameter of LayerScale, which may be missing.
    blind : tuple of str
        A reader whose output may change by a constant without effect: keys.
    qk_norms : tuple of str
        Norms of queries and of keys, under RoPE in halves; or none.
    """

    norm: Names
    readers: tuple[Readers, ...]
    writer: Names
    scale: Names = ()
    blind: Names = ()
    qk_norms: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> Sublayer:
        """Read the notation."""
        text = re.sub(
            r"([^\s|]*)\{(.+?)\}([^\s|;]*)", lambda m: " ".join(m[1] + x + m[3] for x in m[2].split(",")), text
        )
        parts = [field.partition("=") for field in text.split("; ")]
        (norm, readers, writer, *act), named = (
            [name for name, sign, _ in parts if not sign],
            {name: names_of(value) for name, sign, value in parts if sign},
        )
        choices, acts = readers.split("|"), act[0].split("|") if act else [""]
        acts = acts * len(choices) if len(acts) == 1 else acts
        layers = tuple(Readers(tuple(names.split()), how) for names, how in zip(choices, acts, strict=True))
        return cls(names_of(norm), layers, names_of(writer), **named)


@dataclass(frozen=True)
class Layout:
    """A stack of layers between embeddings and a last norm: a section of the table of architectures.

    Attributes
    ----------
    layers : tuple of str
        Name of the list of layers.
    attention, cross, mlp : Sublayer, optional
        The sublayers of a layer, in this order.
    last : tuple of str
        Pre-norm: the norm after the stack. Post-norm: the norm of the embeddings, before it.
    embeddings : tuple of tuple of NamedRows
        What is added to the stream before the layers. ``"words + positions[2:], words + types"``: each row of the
        second parameter is always added to one row of the first, and so is each of the third. A convolution or linear
        layer writes all its outputs, and its bias is what is added.
    projection : tuple of str
        Post-norm: a layer after the embeddings' norm, if they have another width than the stream.
    first : tuple of str
        A norm after the embeddings, whose output is the stream.
    scores : tuple of NamedRows
        Tables (positions, heads), wherever they are below the model, whose rows are added to the scores of a query.
    post_norm : bool
    centring : bool
        LayerNorm; else RMSNorm.
    offset : float
        1 where γ = 1 + weight.
    """

    layers: Names = ()
    attention: Sublayer | None = None
    cross: Sublayer | None = None
    mlp: Sublayer | None = None
    last: Names = ()
    embeddings: tuple[tuple[NamedRows, ...], ...] = ()
    projection: Names = ()
    first: Names = ()
    scores: tuple[NamedRows, ...] = ()
    post_norm: bool = False
    centring: bool = True
    offset: float = 0.0

    def read(self, **row: str) -> Layout:
        """Read some fields from their notation; keep the others."""
        return replace(self, **{n: _READERS.get(n, names_of)(" ".join(text.split())) for n, text in row.items()})

    @property
    def sublayers(self) -> list[Sublayer]:
        """The sublayers of a layer, in order."""
        return [s for s in (self.attention, self.cross, self.mlp) if s is not None]


def names_of(text: str) -> Names:
    """Read names, separated by ``|`` or, where they stand side by side, by spaces."""
    return tuple(re.split(r"[| ]", text)) if text else ()


def _each(found: re.Match[str]) -> str:
    """Write out ``a.{q,k}_b`` as ``a.q_b a.k_b``."""
    return " ".join(found[1] + each + found[3] for each in found[2].split(","))


def _sums(text: str) -> tuple[tuple[NamedRows, ...], ...]:
    return tuple(tuple(map(NamedRows.read, row.split(" + "))) for row in text.split(", ") if row)


#: What reads a field of a layout that has no names alone.
_READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("attention", "cross", "mlp"), Sublayer.read),
    "embeddings": _sums,
    "scores": lambda text: tuple(map(NamedRows.read, text.split())),
    **dict.fromkeys(("post_norm", "centring"), "yes".__eq__),
    "offset": float,
}
