"""From a wiring to the list of symmetries: the conditions of each kind, and the order of folding."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import Tensor

from ..pairs import SymmetricPair
from . import kinds
from .kinds import Symmetry
from .wiring import Site, Table, Wiring

__all__ = ["symmetries_of"]


def symmetries_of(
    wiring: Wiring | None, pairs: Sequence[SymmetricPair], *, classes: bool
) -> tuple[list[Symmetry], dict[str, str]]:
    """List the symmetries of a network outside its pairs, in the order of folding, and the refused ones with reasons.

    ``classes``: the network's logits are used only through a softmax.
    """
    found: list[Symmetry] = []
    refused: dict[str, str] = {}
    w = Wiring(closed=False) if wiring is None else wiring
    tied = w.tied()

    def add(s: Symmetry) -> bool:
        reason = _obstacle(s, tied)
        if reason:
            refused[f"{s.kind}: {s.name}"] = reason
        else:
            found.append(s)
        return not reason

    def foldable(site: Site) -> bool:
        """Where a gain is 0, the shift after it must be folded first."""
        norm = site.norm
        if norm.gain is None or norm.shift is None or bool((norm.gain.detach() + norm.offset != 0).all()):
            return True
        return not _obstacle(kinds.shift(site), tied)

    # A constant added by a writer, or a rotation, passes through no scale.
    scaled = {affine.W for name, scale, affine in w.scales if not add(kinds.layer_scale(name, scale, affine))}
    folded = [
        site.norm.gain is None
        or (bool(site.readers) and not site.raw and not site.carried and foldable(site) and add(kinds.gain(site)))
        for site in w.sites
    ]
    shifted: list[Site] = []
    for site in w.sites:
        open_ends = [r for r in site.readers if r.b is None and not r.blind]
        if site.norm.shift is None or site.raw or not site.readers:
            continue
        if open_ends and not site.norm.centring:
            refused[f"shift: {site.name}"] = "a reader without a bias"
        elif site.carried is not None and site.carried.b is None:
            refused[f"shift: {site.name}"] = "the next writer has no bias"
        elif add(kinds.shift(site)):
            shifted.append(site)
    parts: dict[Tensor, int] = {}
    for site in w.sites:
        for r in site.readers:
            free = site.norm.shift is None or r.b is not None or r.blind
            if site.norm.centring and free and add(kinds.reader(site, r)):
                parts[r.W] = parts.get(r.W, 0) + 1
    for name, q, k in w.qk_norms:
        add(kinds.qk_gain(name, q, k))
    for name, tables in w.score_tables:
        add(kinds.score_bias(name, tables))
    for s in _biases(w, shifted, pairs):
        if s is not None:
            add(s)
    centred = [t.parameter for _, t in w.tables] + [p for _, a in w.writers for p in a.parameters] if w.centred else []
    for name, source, targets in w.common:
        add(kinds.common(name, source, targets, any(source.parameter is p for p in centred)))
    if w.centred and w.sites:
        for name, affine in w.writers:
            if affine.W in scaled:
                refused[f"writer: {name}"] = "its layer scale is not folded"
            else:
                add(kinds.writer(name, affine))
        for name, table in w.tables:
            add(kinds.writer_table(name, table))
    if classes:
        for name, affine in w.classifiers:
            if not add(kinds.writer(name, affine, "classes", parts.get(affine.W, 0))) and affine.b is not None:
                add(kinds.writer_table(f"{name} biases", Table(affine.module, affine.bias), "classes"))
    if w.closed and w.sites and not w.reads_stream_raw and all(folded) and not scaled:
        left = [s.norm.shift for s in w.sites if s.norm.shift is not None and s not in shifted]
        add(kinds.rotation("the stream", w, left))
    return found, refused


def _obstacle(s: Symmetry, tied: Container[Tensor]) -> str:
    """Say why a symmetry cannot be folded, if it cannot."""
    if any(p in tied for p in s.parameters):
        return "weights that are used in another place too"
    if any(not p.is_leaf for p in s.parameters):
        return "weights that are computed"  # by pruning, for example
    return "frozen weights" if any(not p.requires_grad for p in s.parameters) else ""


def _biases(w: Wiring, shifted: Sequence[Site], pairs: Sequence[SymmetricPair]) -> list[Symmetry | None]:
    norms = {r.W: s.norm for s in shifted if s.norm.centring for r in s.readers if r.b is None and not r.blind}
    found = [kinds.key_bias(p, norms) for p in pairs]
    if w.sites:  # else nobody vouches that attention weights sum to 1
        found += [kinds.value_bias(p, norms) for p in pairs]
    return found
