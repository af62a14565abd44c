"""The common shape of transformers: layers of sublayers, each with a norm, its readers and a writer, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .wiring import Affine, Neurons, Norm, Site, Table, Wiring

__all__ = ["Layout", "Sublayer", "affine", "has", "norm", "rectified", "table", "wire"]


@dataclass(frozen=True)
class Sublayer:
    """Names within a layer; of several, separated by ``|``, the first that exists (versions of a library differ).

    Attributes
    ----------
    norm : str
        Before the sublayer (pre-norm) or after its sum with the stream (post-norm).
    readers : tuple of str
        Layers that read the stream.
    writer : str
        The layer whose output is added to it.
    scale : str
        Parameter of LayerScale.
    act : str
        The activation between the last reader and the writer: ``"glu"``, ``"relu"``, or empty for others.
    blind : tuple of str
        Readers whose output may change by a constant without effect: keys.
    """

    norm: str
    readers: tuple[str, ...]
    writer: str
    scale: str = ""
    act: str = ""
    blind: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A stack of layers between embeddings and a last norm.

    Attributes
    ----------
    layers : str
        Name of the list of layers.
    sublayers : tuple of Sublayer
        In their order within a layer.
    last : str
        Pre-norm: the norm after the stack. Post-norm: the norm of the embeddings, before it.
    tables : tuple of str
        Parameters whose rows are added to the stream.
    patches : str
        A convolution that writes to it.
    common : tuple of (str, str)
        Parameters whose rows are always added to each other, each row of the first to one of the second. A name may end
        in a range of rows, ``"position_embeddings[1:]"``, and several ranges may be joined: ``"words[:1]+words[2:]"``.
    post_norm : bool
    centring : bool
        LayerNorm; else RMSNorm.
    offset : float
        1 where γ = 1 + weight.
    """

    layers: str
    sublayers: tuple[Sublayer, ...]
    last: str
    tables: tuple[str, ...] = ()
    patches: str = ""
    common: tuple[tuple[str, str], ...] = ()
    post_norm: bool = False
    centring: bool = True
    offset: float = 0.0


def rectified(layout: Layout, act: str | None) -> Layout:
    """Mark the hidden neurons of the last sublayer as rectified, if the configuration says so."""
    if act != "relu":
        return layout
    *others, mlp = layout.sublayers
    return replace(layout, sublayers=(*others, replace(mlp, act="relu")))


def _find(root: nn.Module, names: str) -> tuple[nn.Module, str, Any]:
    """Return the owner, the attribute and the value of the first of some names that exists."""
    for name in names.split("|"):
        owner, _, attribute = name.rpartition(".")
        try:
            module = root.get_submodule(owner)
        except AttributeError:
            continue
        found = getattr(module, attribute, None)
        if found is not None:
            return module, attribute, found
    raise AttributeError(f"{type(root).__name__} has none of {names}")


def has(root: nn.Module, names: str) -> bool:
    """Tell whether one of some names exists."""
    try:
        return _find(root, names)[2] is not None
    except AttributeError:
        return False


def affine(root: nn.Module, name: str, *, blind: bool = False) -> Affine:
    """Describe a linear layer, a convolution, GPT-2's ``Conv1D``, or a bare matrix x ↦ x P."""
    owner, attribute, found = _find(root, name)
    if not isinstance(found, nn.Module):
        return Affine(owner, attribute, "", transposed=True, blind=blind)
    if isinstance(found, nn.MultiheadAttention):
        return Affine(found, "in_proj_weight", "in_proj_bias", blind=blind)
    plain = any(isinstance(found, kind) and type(found).forward is kind.forward for kind in (nn.Linear, nn.Conv2d))
    if not plain and type(found).__name__ != "Conv1D":
        raise AttributeError(f"{name} is a {type(found).__name__}, not a linear layer")
    return Affine(found, transposed=type(found).__name__ == "Conv1D", blind=blind)


def norm(root: nn.Module, name: str, layout: Layout) -> Norm:
    """Describe a norm."""
    found = _find(root, name)[2]
    rms = type(found).__name__.endswith(("RMSNorm", "T5LayerNorm"))
    if not (isinstance(found, nn.LayerNorm) if layout.centring else rms):
        raise AttributeError(f"{name} is a {type(found).__name__}, not the norm that is wired")
    return Norm(found, layout.centring, layout.offset)


def table(root: nn.Module, name: str) -> Table:
    """Describe the rows of a parameter, or of an embedding's: "positions[1:]"."""
    name, _, part = name.partition("[")
    first, last = (int(b) if b else None for b in (part.rstrip("]") or ":").split(":"))
    rows = (first, last)
    owner, attribute, found = _find(root, name)
    return Table(found, "weight", rows) if isinstance(found, nn.Module) else Table(owner, attribute, rows)


def wire(w: Wiring, root: nn.Module, layout: Layout, heads: Sequence[Affine], name: str = "") -> Wiring:
    """Add a stack of layers to a wiring.

    ``heads`` read the last norm's output; empty if the readers are not known.
    """
    layers = _find(root, layout.layers)[2]
    steps: list[tuple[str, nn.Module, Sublayer]] = []
    for i, layer in enumerate(layers):
        steps += [
            (f"{name}{layout.layers.split('|')[0]}.{i}.{s.norm.split('|')[0]}", layer, s) for s in layout.sublayers
        ]
    read = [[affine(m, r, blind=r in s.blind) for r in s.readers] for _, m, s in steps]
    written = [affine(m, s.writer) for _, m, s in steps]
    norms: list[tuple[str, Norm | None]] = [(site, norm(m, s.norm, layout)) for site, m, s in steps]
    end = (f"{name}{layout.last}", norm(root, layout.last, layout) if layout.last else None)
    norms = [end, *norms] if layout.post_norm else [*norms, end]
    carried = [*(written if layout.post_norm else [None] * len(written)), None]
    for (site, its), readers, after in zip(norms, [*read, list(heads)], carried, strict=True):
        if its is not None:
            w.sites.append(Site(site, its, tuple(readers), after))
    for (site, layer, s), readers, writer in zip(steps, read, written, strict=True):
        w.writers.append((f"{site} writer", writer))
        if s.scale and dict(layer.named_parameters()).get(s.scale) is not None:
            w.scales.append((f"{site} scale", table(layer, s.scale), writer))
        if s.act:
            inner = writer.W.numel() // writer.W.shape[writer.stream_dim]
            outer = readers[-1].W.shape[readers[-1].stream_dim]
            w.neurons.append(Neurons(site, s.act, readers[-1], writer, outer - inner))
    for t in layout.tables:
        w.tables.append((f"{name}{t}", table(root, t)))
    if layout.patches:
        w.writers.append((f"{name}{layout.patches}", affine(root, layout.patches)))
    for a, b in layout.common:
        w.common.append((f"{name}{a}", table(root, a), tuple(table(root, part) for part in b.split("+"))))
    return w
