"""The common shape of transformers: layers of sublayers, each with a norm, its readers and a writer, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from .slots import Slot, outline, slot
from .wiring import Affine, Norm, Site, Wiring, neurons


@dataclass(frozen=True)
class Sublayer:
    """Names within a layer; of several, separated by ``|``, the first that exists (versions of a library differ).

    Attributes
    ----------
    norm : str
        Before the sublayer (pre-norm) or after its sum with the stream (post-norm).
    readers : str
        Layers that read the stream, separated by spaces; alternatives, separated by ``|``, are such lists.
    writer : str
        The layer whose output is added to it.
    act : str
        What happens to the last reader's output before the writer: ``"glu"`` if it is gated, or where the activation is
        found, below the model; one for each alternative of the readers, or one for all.
    scale : str
        Parameter of LayerScale, which may be missing.
    blind : str
        A reader whose output may change by a constant without effect: keys.
    qk_norms : str
        Norms of queries and of keys, under RoPE in halves.
    """

    norm: str
    readers: str
    writer: str
    act: str = ""
    scale: str = ""
    blind: str = ""
    qk_norms: str = ""


@dataclass(frozen=True)
class Layout:
    """A stack of layers between embeddings and a last norm; a row of the table of architectures.

    Attributes
    ----------
    layers : str
        Name of the list of layers.
    attention, mlp : Sublayer
        The first and the last sublayer of a layer.
    last : str
        Pre-norm: the norm after the stack. Post-norm: the norm of the embeddings, before it.
    embeddings : str
        What is added to the stream before the layers. ``"words + positions[2:], words + types"``: each row of the
        second parameter is always added to one row of the first, and so is each of the third. A name may end in ranges
        of rows, and in ``?`` if it may be missing; a convolution or linear layer writes all its outputs, and its bias
        is what is added.
    cross : Sublayer, optional
        The second sublayer of three.
    projection : str
        Post-norm: a layer after the embeddings' norm, if they have another width than the stream.
    first : str
        A norm after the embeddings, whose output is the stream.
    scores : str
        Tables (positions, heads), wherever they are below the model, whose rows are added to the scores of a query.
    post_norm : bool
    centring : bool
        LayerNorm; else RMSNorm.
    offset : float
        1 where γ = 1 + weight.
    """

    layers: str
    attention: Sublayer
    mlp: Sublayer
    last: str = ""
    embeddings: str = ""
    cross: Sublayer | None = None
    projection: str = ""
    first: str = ""
    scores: str = ""
    post_norm: bool = False
    centring: bool = True
    offset: float = 0.0


def within(at: str, names: str) -> str:
    """Prefix names, separated by ``|``, by that of the module that they are in."""
    return "|".join(f"{at}.{name}".removeprefix(".") for name in names.split("|"))


def find(root: nn.Module, names: str) -> tuple[str, Any]:
    """Return the first that exists of some names, separated by ``|``, and what it names."""
    for name in names.split("|"):
        with suppress(AttributeError):
            if (value := attrgetter(name)(root)) is not None:
                return name, value
    raise AttributeError(f"{type(root).__name__} has none of {names}")


def has(root: nn.Module, names: str) -> bool:
    """Return whether one of some names exists."""
    with suppress(AttributeError):
        return find(root, names)[1] is not None
    return False


def affine(
    root: nn.Module, names: str, *, outputs: slice = slice(None), inputs: slice = slice(None), blind: bool = False
) -> Affine:
    """Describe a linear layer, a convolution, GPT-2's ``Conv1D``, all inputs of an attention, or a bare x ↦ x P.

    Parameters
    ----------
    root : nn.Module
        The network.
    names : str
        Name of the layer, or of the matrix P, in it; of several, separated by ``|``, the first that exists.
    outputs, inputs : slice
        Rows and columns of W, where one layer writes or reads several things.
    blind : bool
        See :class:`Affine`.

    Returns
    -------
    Affine

    Raises
    ------
    AttributeError
        None of the names exists, or the layer is not linear.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import affine
    >>> affine(nn.Sequential(nn.Conv2d(3, 8, 2)), "0").matrix.size
    (8, 12)
    """
    name, value = find(root, names)
    weight, bias, reverse = name, "", not isinstance(value, nn.Module)
    if isinstance(value, nn.MultiheadAttention):
        weight, bias = within(name, "in_proj_weight"), within(name, "in_proj_bias")
    elif isinstance(value, nn.Module):
        weight, bias, reverse = within(name, "weight"), within(name, "bias"), type(value).__name__ == "Conv1D"
        plain = any(isinstance(value, kind) and type(value).forward is kind.forward for kind in (nn.Linear, nn.Conv2d))
        if not plain and not reverse:
            raise AttributeError(f"{names} is a {type(value).__name__}, not a linear layer")
    rows, columns = (inputs, outputs) if reverse else (outputs, inputs)
    b = slot(root, bias, outputs) if bias and has(root, bias) else None
    return Affine(slot(root, weight, rows, columns, transpose=reverse), b, blind)


def norm(root: nn.Module, names: str, *, centring: bool = True, offset: float = 0.0) -> Norm:
    """Describe a norm by its name.

    Parameters
    ----------
    root : nn.Module
    names : str
        As for :func:`affine`.
    centring : bool
        The norm is a LayerNorm; else an RMSNorm.
    offset : float
        What is added to its weight: 1 for Gemma's.

    Returns
    -------
    Norm

    Raises
    ------
    AttributeError
        None of the names exists, or the norm is of the other kind.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import norm
    >>> norm(nn.Sequential(nn.RMSNorm(3)), "0", centring=False).shift is None
    True
    """
    name, found = find(root, names)
    rms = type(found).__name__.endswith(("RMSNorm", "T5LayerNorm"))
    if not (isinstance(found, nn.LayerNorm) if centring else rms):
        raise AttributeError(f"{names} is a {type(found).__name__}, not the norm that is wired")
    gain, shift = (slot(root, n) if has(root, n := within(name, own)) else None for own in ("weight", "bias"))
    return Norm(gain, shift, centring, offset)


def table(root: nn.Module, name: str) -> list[Slot]:
    """Describe rows of a parameter (…, d), or of an embedding's: ``"words"``, ``"positions[1:]"``, ``"x[:1,2:]"``."""
    names, _, ranges = name.partition("[")
    weight, value = find(root, names)
    weight = within(weight, "weight") if isinstance(value, nn.Module) else weight

    def part(bounds: str) -> Slot:
        rows = slice(*(int(bound) if bound else None for bound in bounds.split(":")))
        whole = outline(root, weight)
        return Slot.from_view(weight, whole, whole.view(-1, whole.shape[-1])[rows])

    return [part(bounds) for bounds in (ranges.rstrip("]") or ":").split(",")]


def wire(
    w: Wiring, root: nn.Module, layout: Layout, heads: Sequence[Affine], name: str = "", *, at: str = ""
) -> Wiring:
    """Add a stack of layers, which lies in a network under the name ``at``, to a wiring.

    ``heads`` read the last norm's output; empty if the readers are not known.
    """
    norm_of = partial(norm, centring=layout.centring, offset=layout.offset)
    _add_embeddings(w, root, layout, name, at)
    last = within(at, layout.last)
    end = (f"{name}{layout.last.split('|')[0]}", norm_of(root, last)) if layout.last else None
    if end and layout.projection and has(root, within(at, layout.projection)):  # the first layer reads without a norm
        w.sites.append(Site(*end, (affine(root, within(at, layout.projection)),)))
        end = None
    prefix, (path, layers) = f"{name}{layout.layers.split('|')[0]}", find(root, within(at, layout.layers))
    for i, s in product(range(len(layers)), filter(None, (layout.attention, layout.cross, layout.mlp))):
        site, layer = f"{prefix}.{i}.{s.norm.split('|')[0]}", f"{path}.{i}"
        its, (readers, writer) = norm_of(root, within(layer, s.norm)), _add_sublayer(w, root, layer, s, site, at)
        if not layout.post_norm:
            w.sites.append(Site(site, its, readers))
            continue
        if end:
            w.sites.append(Site(*end, readers, writer))
        end = (site, its)
    if end:
        w.sites.append(Site(*end, tuple(heads)))
    return w


def _add_sublayer(
    w: Wiring, root: nn.Module, layer: str, s: Sublayer, name: str, at: str
) -> tuple[tuple[Affine, ...], Affine]:
    """Add what a sublayer writes, its scales and its neurons to a wiring; return its readers and its writer."""
    choices, acts = [names.split() for names in s.readers.split("|")], s.act.split("|")
    k = next((k for k, names in enumerate(choices) if all(has(root, within(layer, n)) for n in names)), 0)
    readers = tuple(affine(root, within(layer, n), blind=n in s.blind.split("|")) for n in choices[k])
    writer = affine(root, within(layer, s.writer))
    w.writers.append((f"{name} writer", writer))
    if s.scale and has(root, within(layer, s.scale)):
        w.scales.append((f"{name} scale", table(root, within(layer, s.scale))[0], writer))
    if s.qk_norms:
        queries, keys = (norm(root, within(layer, n), centring=False) for n in s.qk_norms.split())
        w.qk_norms.append((name, queries, keys))
    act = acts[k % len(acts)]
    if act not in ("", "glu"):
        value = attrgetter(within(at, act))(root)
        act = "relu" if value in ("relu", 1) or isinstance(value, nn.ReLU) else ""
    if act:  # a gate's rows may come before the neurons'
        first = readers[-1].matrix.rows - writer.matrix.size[1]
        up = affine(root, within(layer, choices[k][-1]), outputs=slice(first, None))
        w.neurons.append(neurons(name, act, up, writer))
    if s.act:
        ff = writer.matrix.size[1]
        into = [
            affine(root, within(layer, n), outputs=slice(start, start + ff))
            for n, r in zip(choices[k], readers, strict=True)
            for start in range(0, r.matrix.rows, ff)
        ]
        w.hidden.append((f"{name} neurons", (*(b for a in into for b in a.written), writer.matrix)))
    return readers, writer


def _add_embeddings(w: Wiring, root: nn.Module, layout: Layout, name: str, at: str) -> None:
    """Add what is in the stream before the layers to a wiring, and the tables of scores."""
    tables: dict[str, list[Slot]] = {}
    for row in filter(None, layout.embeddings.split(", ")):
        added: list[tuple[str, list[Slot]]] = []
        for term in row.split(" + "):
            names, bracket, rows = term.partition("[")
            if names.endswith("?") and not has(root, within(at, names[:-1])):
                continue
            names = names.removesuffix("?")
            if isinstance(find(root, within(at, names))[1], (nn.Embedding, Tensor)):
                slots = table(root, within(at, names) + bracket + rows)
                tables.setdefault(names, []).extend(slots)
            else:
                writer = affine(root, within(at, names))
                w.writers.append((f"{name}{names}", writer))
                slots = writer.slots[1:]
            added.append((names + bracket + rows, slots))
        for term, source in added[1:]:
            w.common += [(f"{name}{term}", b, tuple(added[0][1])) for b in source if added[0][1]]
    for names, slots in tables.items():  # from the first to the last row
        start, d = min(b.offset for b in slots), slots[0].size[1]
        stop = max(b.offset + b.rows * d for b in slots)
        w.tables.append((f"{name}{names}", replace(slots[0], offset=start, size=((stop - start) // d, d))))
    if layout.first:
        first = norm(root, within(at, layout.first))
        w.sites.append(Site(f"{name}{layout.first}", first, ()))
        w.tables += [(f"{name}{layout.first}.bias", first.shift)] if first.shift is not None else []
        w.closed = False
    base = root.get_submodule(at)
    for term, (n, module) in product(layout.scores.split(), base.named_modules()):
        if has(module, term.split("[")[0]):
            scores = tuple(table(root, within(within(at, n).removesuffix("."), term)))
            w.score_tables.append((f"{name}{n} {term}", scores))
