"""The common shape of transformers: layers of sublayers, each with a norm, its readers and a writer, wired by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from .notation import Layout, NamedRows, Sublayer
from .slots import Slot, outline, slot
from .wiring import Affine, Norm, Site, Wiring, neurons


def within(at: str, *names: str) -> list[str]:
    """Prefix names by that of the module that they are in."""
    return [f"{at}.{name}".removeprefix(".") for name in names]


def first_of(root: nn.Module, *names: str) -> tuple[str, Any]:
    """Return the first that exists of some names, and what it names."""
    for name in names:
        with suppress(AttributeError):
            if (value := attrgetter(name)(root)) is not None:
                return name, value
    raise AttributeError(f"{type(root).__name__} has none of {', '.join(names)}")


def has(root: nn.Module, *names: str) -> bool:
    """Return whether one of some names exists."""
    with suppress(AttributeError):
        return first_of(root, *names)[1] is not None
    return False


def affine(
    root: nn.Module, *names: str, outputs: slice = slice(None), inputs: slice = slice(None), blind: bool = False
) -> Affine:
    """Describe a linear layer, a convolution, GPT-2's ``Conv1D``, all inputs of an attention, or a bare x ↦ x P.

    Parameters
    ----------
    root : nn.Module
        The network.
    *names : str
        Name of the layer, or of the matrix P, in it; of several the first that exists.
    outputs, inputs : slice
        NamedRows and columns of W, where one layer writes or reads several things.
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
    name, value = first_of(root, *names)
    weight, bias, reverse = name, "", not isinstance(value, nn.Module)
    if isinstance(value, nn.MultiheadAttention):
        weight, bias = within(name, "in_proj_weight", "in_proj_bias")
    elif isinstance(value, nn.Module):
        (weight, bias), reverse = within(name, "weight", "bias"), type(value).__name__ == "Conv1D"
        plain = any(isinstance(value, kind) and type(value).forward is kind.forward for kind in (nn.Linear, nn.Conv2d))
        if not plain and not reverse:
            raise AttributeError(f"{name} is a {type(value).__name__}, not a linear layer")
    rows, columns = (inputs, outputs) if reverse else (outputs, inputs)
    b = slot(root, bias, outputs) if bias and has(root, bias) else None
    return Affine(slot(root, weight, rows, columns, transpose=reverse), b, blind)


def norm(root: nn.Module, *names: str, centring: bool = True, offset: float = 0.0) -> Norm:
    """Describe a norm by its name.

    Parameters
    ----------
    root : nn.Module
    *names : str
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
    name, found = first_of(root, *names)
    rms = type(found).__name__.endswith(("RMSNorm", "T5LayerNorm"))
    if not (isinstance(found, nn.LayerNorm) if centring else rms):
        raise AttributeError(f"{name} is a {type(found).__name__}, not the norm that is wired")
    gain, shift = (slot(root, n) if has(root, n) else None for n in within(name, "weight", "bias"))
    return Norm(gain, shift, centring, offset)


def table(root: nn.Module, rows: NamedRows) -> list[Slot]:
    """Describe rows of a parameter (…, d), or of an embedding's."""
    name, value = first_of(root, *rows.names)
    weight = f"{name}.weight" if isinstance(value, nn.Module) else name
    whole = outline(root, weight)
    return [Slot.from_view(weight, whole, whole.view(-1, whole.shape[-1])[part]) for part in rows.ranges]


def wire(
    w: Wiring, root: nn.Module, layout: Layout, heads: Sequence[Affine], name: str = "", *, at: str = ""
) -> Wiring:
    """Add a stack of layers, which lies in a network under the name ``at``, to a wiring.

    ``heads`` read the last norm's output; empty if the readers are not known.
    """
    norm_of = partial(norm, centring=layout.centring, offset=layout.offset)
    _add_embeddings(w, root, layout, name, at)
    end = (f"{name}{layout.last[0]}", norm_of(root, *within(at, *layout.last))) if layout.last else None
    if end and has(root, *within(at, *layout.projection)):  # the first layer reads without a norm
        w.sites.append(Site(*end, (affine(root, *within(at, *layout.projection)),)))
        end = None
    prefix, (path, layers) = f"{name}{layout.layers[0]}", first_of(root, *within(at, *layout.layers))
    for i, s in product(range(len(layers)), layout.sublayers):
        site, layer = f"{prefix}.{i}.{s.norm[0]}", f"{path}.{i}"
        its, (readers, writer) = norm_of(root, *within(layer, *s.norm)), _add_sublayer(w, root, layer, s, site, at)
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
    choice = next((c for c in s.readers if all(has(root, n) for n in within(layer, *c.names))), s.readers[0])
    readers = tuple(affine(root, *within(layer, n), blind=n in s.blind) for n in choice.names)
    writer = affine(root, *within(layer, *s.writer))
    w.writers.append((f"{name} writer", writer))
    if has(root, *within(layer, *s.scale)):
        w.scales.append((f"{name} scale", table(root, NamedRows(tuple(within(layer, *s.scale))))[0], writer))
    if s.qk_norms:
        queries, keys = (norm(root, n, centring=False) for n in within(layer, *s.qk_norms))
        w.qk_norms.append((name, queries, keys))
    if choice.act:
        ff, names = writer.matrix.size[1], within(layer, *choice.names)
        into = [
            affine(root, n, outputs=slice(start, start + ff))
            for n, r in zip(names, readers, strict=True)
            for start in range(0, r.matrix.size[0], ff)
        ]
        if kind := _kind(root, at, choice.act):  # a gate's rows may come before the neurons'
            w.neurons.append(neurons(name, kind, into[-1], writer))
        w.hidden.append((f"{name} neurons", (*(b for a in into for b in a.written), writer.matrix)))
    return readers, writer


def _kind(root: nn.Module, at: str, act: str) -> str:
    """Return what is known of an activation: gated, rectified, or nothing."""
    if act == "glu":
        return act
    _, value = first_of(root, *within(at, act))
    return "relu" if value in ("relu", 1) or isinstance(value, nn.ReLU) else ""


def _add_embeddings(w: Wiring, root: nn.Module, layout: Layout, name: str, at: str) -> None:
    """Add what is in the stream before the layers to a wiring, and the tables of scores."""
    tables: dict[str, list[Slot]] = {}
    for row in layout.embeddings:
        added: list[tuple[str, list[Slot]]] = []
        for term in row:
            its = replace(term, names=tuple(within(at, *term.names)))
            if term.optional and not has(root, *its.names):
                continue
            if isinstance(first_of(root, *its.names)[1], (nn.Embedding, Tensor)):
                slots = table(root, its)
                tables.setdefault("|".join(term.names), []).extend(slots)
            else:
                writer = affine(root, *its.names)
                w.writers.append((f"{name}{term}", writer))
                slots = writer.slots[1:]
            added.append((str(term), slots))
        for label, source in added[1:]:
            w.common += [(f"{name}{label}", b, tuple(added[0][1])) for b in source if added[0][1]]
    for names, slots in tables.items():  # from the first to the last row
        start, d = min(b.offset for b in slots), slots[0].size[1]
        stop = max(b.offset + b.size[0] * d for b in slots)
        w.tables.append((f"{name}{names}", replace(slots[0], offset=start, size=((stop - start) // d, d))))
    if layout.first:
        first = norm(root, *within(at, *layout.first))
        w.sites.append(Site(f"{name}{layout.first[0]}", first, ()))
        w.tables += [(f"{name}{layout.first[0]}.bias", first.shift)] if first.shift is not None else []
        w.closed = False
    for term, (n, module) in product(layout.scores, root.get_submodule(at).named_modules()):
        if has(module, *term.names):
            there = tuple(within(at, *within(n, *term.names)))
            w.score_tables.append((f"{name}{n} {term}", tuple(table(root, replace(term, names=there)))))
