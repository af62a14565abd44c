"""The kinds of continuous symmetry outside the heads: moves of weights that do not change the network's function.

One function for each kind makes its :class:`Symmetry`; :func:`symmetries_of` lists them in the order of folding, and
each formula assumes that the earlier ones were folded. Notation: d is the width of the stream, γ ⊙ n(x) + β a norm's
output, W x + b a reader (fed by a norm) or a writer (added to the stream). A reader without a bias has a substitute for
it after a centring norm: with u = 1/γ, W + v uᵀ adds v uᵀβ to its output and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from ..blocks import Block, block
from ..pairs import SymmetricPair
from .wiring import Affine, Norm, Site, State, Wiring, transposed

Blocks = Sequence[Block]


@dataclass(eq=False)
class Symmetry:
    """A group of moves of some parameters.

    Attributes
    ----------
    kind, name : str
        The kind of symmetry, and its place in the network.
    dimension : int
        Number of directions that are not among those of another symmetry of the list.
    shape : tuple of int
        Shape of t, which says how far to move; t = 0 changes nothing.
    blocks : sequence of Block
        What moves.
    constant : sequence of Block
        What has a fixed value once the symmetry is folded.
    move : callable
        ``move(state, t)`` moves a :class:`State`, differentiably.
    fold : callable
        ``fold(state)`` goes to the one point of the orbit that all equivalent weights share.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import canonical_form
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    >>> [(s.kind, s.dimension) for s in canonical_form(encoder).symmetries][:3]
    [('shift', 8), ('reader', 16), ('key bias', 4)]
    """

    kind: str
    name: str
    dimension: int
    shape: tuple[int, ...]
    blocks: Sequence[Block] = field(repr=False)
    constant: Sequence[Block] = field(repr=False)
    move: Callable[[State, Tensor], None] = field(repr=False)
    fold: Callable[[State], None] = field(repr=False)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that move, each once."""
        return list(dict.fromkeys(b.tensor for b in self.blocks))


def scaling(kind: str, name: str, unit: Block, alike: Blocks, against: Blocks, offset: float = 0.0) -> Symmetry:
    """Multiply u + offset and some rows by s, divide others by s: u is γ or LayerScale. Folded, u + offset = 1."""

    def divide(state: State, r: Tensor) -> None:
        safe = torch.where(r == 0, torch.ones_like(r), r)
        state.write(unit, (state.read(unit) + offset) / safe - offset)
        for rows in alike:
            state.write(rows, state.read(rows) / safe)
        for rows in against:
            state.write(rows, state.read(rows) * r)

    def fold(state: State) -> None:
        divide(state, state.read(unit)[0] + offset)
        state.write(unit, torch.ones_like(state.read(unit)) - offset)

    d, moving = unit.size[1], [unit, *alike, *against]
    return Symmetry(kind, name, d, (d,), moving, [unit], lambda state, t: divide(state, torch.exp(-t)), fold)


def gain(site: Site, unit: Block) -> Symmetry:
    """γ → γ s, β → β s, columns of the readers / s: a norm that only linear layers read. Folded, γ = 1."""
    its = site.norm
    plain = scaling("gain", site.name, unit, its.blocks[1:], [r.matrix for r in site.readers], its.offset)

    def fold(state: State) -> None:
        if its.shift is not None and _has_zeros(its, state, unit):  # there β is a bias and must be folded first
            shift(site, its.shift).fold(state)
        plain.fold(state)

    return replace(plain, fold=fold)


def _has_zeros(norm: Norm, state: State, like: Block) -> bool:
    return not bool((norm.gamma(state, state.read(like)[0]) != 0).all())


def _null_input(norm: Norm, state: State, like: Tensor) -> Tensor:
    """Return u with uᵀ(γ ⊙ n(x)) = 0 for all x after a centring norm: 1/γ, or a mark of the zeros of γ."""
    gamma = norm.gamma(state, like)
    return 1 / gamma if bool((gamma != 0).all()) else (gamma == 0).to(gamma.dtype)


def _substitute(state: State, reader: Affine, norm: Norm | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, u and β of a reader without a bias."""
    assert norm is not None
    assert norm.shift is not None
    W, beta = state.read(reader.matrix), state.read(norm.shift)[0]
    return W, _null_input(norm, state, beta), beta


def _constant(state: State, reader: Affine, norm: Norm | None) -> Tensor:
    """Read what a reader adds to its output: b, or what W has along u."""
    if reader.bias is not None:
        return state.read(reader.bias)[0]
    W, u, beta = _substitute(state, reader, norm)
    return (W @ u) * (u @ beta) / (u @ u)


def _add_constant(state: State, reader: Affine, norm: Norm | None, c: Tensor) -> None:
    if reader.bias is not None:
        state.add(reader.bias, c)
    elif not reader.blind:
        W, u, beta = _substitute(state, reader, norm)
        state.write(reader.matrix, W + torch.outer(c / (u @ beta), u))


def shift(site: Site, beta: Block) -> Symmetry:
    """β → β + t, which the readers' biases take back; post-norm the next writer's bias does so for the stream.

    Folded, β is 0, or γ/√d where it must serve as a reader's bias.
    """
    d, carried = beta.size[1], None if site.carried is None else site.carried.bias
    seeing = [r for r in site.readers if r.bias is not None or not r.blind]

    def move(state: State, t: Tensor) -> None:
        state.add(beta, t)
        for r in seeing:
            _add_constant(state, r, site.norm, -(state.read(r.matrix) @ t))
        if carried is not None:
            state.add(carried, -t)

    def fold(state: State) -> None:
        before = state.read(beta)[0]
        open_ends = any(r.bias is None for r in seeing)
        target = site.norm.gamma(state, before) / d**0.5 if open_ends else torch.zeros_like(before)
        move(state, target - before)
        state.write(beta, target)

    moving = [beta, *(r.bias or r.matrix for r in seeing), *([] if carried is None else [carried])]
    return Symmetry("shift", site.name, d, (d,), moving, [beta], move, fold)


def reader(site: Site, affine: Affine) -> Symmetry:
    """W → W + v uᵀ, b → b − v uᵀβ: n(x) sums to 0 behind a LayerNorm. Folded, W u = 0."""
    its, rows = site.norm, affine.matrix.rows

    def move(state: State, t: Tensor) -> None:
        W = state.read(affine.matrix)
        u = _null_input(its, state, W[0])
        state.write(affine.matrix, W + torch.outer(t, u))
        if its.shift is not None and affine.bias is not None:
            state.add(affine.bias, -t * (u @ state.read(its.shift)[0]))

    def fold(state: State) -> None:
        W = state.read(affine.matrix)
        u = _null_input(its, state, W[0])
        move(state, -(W @ u) / (u @ u))

    return Symmetry("reader", site.name, rows, (rows,), affine.blocks, [], move, fold)


def centring(kind: str, name: str, vectors: Sequence[Block], overlap: int = 0) -> Symmetry:
    """Add c 1 to every row v: what a LayerNorm centres, or (kind "classes") weights of a softmax's logits."""
    sizes = [rows.rows for rows in vectors]

    def move(state: State, t: Tensor) -> None:
        for rows, c in zip(vectors, t.split(sizes), strict=True):
            state.add(rows, c[:, None])

    def fold(state: State) -> None:
        move(state, -torch.cat([state.read(rows).mean(1) for rows in vectors]))

    return Symmetry(kind, name, sum(sizes) - overlap, (sum(sizes),), vectors, [], move, fold)


def exchange(kind: str, name: str, source: Sequence[Block], targets: Sequence[Block], dimension: int) -> Symmetry:
    """Add t to some rows, −t to those they are always added to, or add it to all scores. Folded, the mean is 0."""
    alone = [b for b in source if len(source) == b.rows == 1 and b.tensor.numel() == b.size[1]]

    def move(state: State, t: Tensor) -> None:
        for rows in source:
            state.add(rows, t)
        for rows in targets:
            state.add(rows, -t)

    def fold(state: State) -> None:
        move(state, -torch.cat([state.read(rows) for rows in source]).mean(0))

    return Symmetry(kind, name, dimension, (source[0].size[1],), [*source, *targets], alone, move, fold)


def key_bias(pair: SymmetricPair, norms: Mapping[Tensor, Norm]) -> Symmetry | None:
    """b_k → b_k + t adds one number to all scores of a query, which softmax ignores. Folded, b_k = 0."""
    plain = pair.kind == "qk" and pair.group is not None and not pair.group.diagonal and len(pair.H) == 1
    return _head_bias("key bias", pair.name, pair.null or (pair.H if plain else ()), norms, [])


def value_bias(pair: SymmetricPair, norms: Mapping[Tensor, Norm]) -> Symmetry | None:
    """b_v → b_v + t, b_o → b_o − W_O t of a head, since its attention weights sum to 1. Folded, b_v = 0.

    None where values or outputs have no bias.
    """
    plain = pair.kind == "vo" and pair.group is not None and not pair.group.diagonal
    layers = [b for b in pair.H if b.attribute == "weight" and getattr(b.module, "bias", None) is not None]
    if not plain or len(layers) < len(pair.H):
        return None
    return _head_bias("value bias", pair.name, pair.G, norms, [(b, block(b.module, "bias")) for b in layers])


def _head_bias(
    kind: str, name: str, rows: Blocks, norms: Mapping[Tensor, Norm], outputs: Sequence[tuple[Block, Block]]
) -> Symmetry | None:
    """Move the only bias in the rows of a head, or what stands for it, against the biases of ``outputs``."""
    biases = [b for b in rows if b.rows == 1]
    its = norms.get(rows[0].tensor) if len(rows) == 1 and not biases else None
    # Beside a key that is always zero, a number added to the scores of all other keys counts.
    if (len(biases) != 1 and its is None) or getattr(rows[0].module, "add_zero_attn", False):
        return None
    own, h = Affine(transposed(rows[0]), biases[0] if biases else None), rows[0].size[1]

    def move(state: State, t: Tensor) -> None:
        _add_constant(state, own, its, t)
        for matrix, bias in outputs:
            state.add(bias, -(state.read(matrix) @ t))

    moving = [own.bias or rows[0], *(bias for _, bias in outputs)]
    return Symmetry(kind, name, h, (h,), moving, biases, move, lambda s: move(s, -_constant(s, own, its)))


def qk_gain(name: str, queries: Norm, keys: Norm) -> Symmetry:
    """Gains of the norms of queries and keys, scaled inversely in every plane that RoPE rotates: q s, k / s."""
    (q,), (k,), size = queries.blocks, keys.blocks, queries.blocks[0].size[1] // 2

    def move(state: State, t: Tensor) -> None:
        for rows, offset, s in ((q, queries.offset, t), (k, keys.offset, -t)):
            state.write(rows, (state.read(rows) + offset) * torch.exp(s).repeat(2) - offset)

    def fold(state: State) -> None:
        of_q, of_k = ((state.read(b) + n.offset).view(2, -1).norm(dim=0) for b, n in ((q, queries), (k, keys)))
        move(state, torch.log(of_k / of_q).nan_to_num(0, 0, 0) / 2)

    return Symmetry("q/k gains", name, size, (size,), [q, k], [], move, fold)


def rotation(name: str, w: Wiring, shifts: Sequence[Block]) -> Symmetry:
    """Rotate the whole stream, x → Q x, Q orthogonal, with Q 1 = 1 for LayerNorm; needs all gains folded.

    ``shifts`` are those of norms that could not be folded; they lie in the stream as well.

    There is no fold, because the metrics of pairs and of vectors in the stream do not depend on it.
    """
    vectors = list({b.key: b for b in (*w.vectors, *shifts)}.values())
    d, k = vectors[0].size[1], vectors[0].size[1] - w.centred

    def move(state: State, t: Tensor) -> None:
        skew = t - t.mT
        if w.centred:  # act on the space orthogonal to 1
            frame = torch.eye(d, dtype=t.dtype, device=t.device)
            frame[:, 0] = 1
            basis = torch.linalg.qr(frame).Q[:, 1:]
            skew = basis @ skew @ basis.mT
        Q = torch.linalg.matrix_exp(skew)
        for rows in vectors:
            state.write(rows, state.read(rows) @ Q.mT)

    return Symmetry("rotation", name, k * (k - 1) // 2, (k, k), vectors, [], move, lambda state: None)


def symmetries_of(
    wiring: Wiring | None, pairs: Sequence[SymmetricPair], *, classes: bool
) -> tuple[list[Symmetry], list[tuple[Symmetry, str]]]:
    """List the symmetries of a network outside its pairs, in the order of folding, and the refused ones with reasons.

    ``classes``: the network's logits are used only through a softmax.
    """
    w = Wiring(closed=False) if wiring is None else wiring
    found, refused, tied = list[Symmetry](), list[tuple[Symmetry, str]](), w.tied()

    def add(s: Symmetry, reason: str = "") -> bool:
        reason = reason or _obstacle(s, tied)
        if reason:
            refused.append((s, reason))
        else:
            found.append(s)
        return not reason

    def foldable(site: Site, unit: Block) -> bool:
        """Where a gain is 0, the shift after it must be folded first."""
        beta = site.norm.shift
        waits = beta is not None and _has_zeros(site.norm, State(), unit) and _obstacle(shift(site, beta), tied)
        return bool(site.readers) and not site.carried and not waits

    # A constant added by a writer, or a rotation, passes through no scale.
    scaled = {
        a.matrix.tensor for name, unit, a in w.scales if not add(scaling("layer scale", name, unit, [], a.written))
    }
    gains = [(site, site.norm.gain) for site in w.sites if site.norm.gain is not None]
    folded = [foldable(site, unit) and add(gain(site, unit)) for site, unit in gains]
    shifted: list[Site] = []
    for site in w.sites:
        beta = site.norm.shift
        if beta is None or not site.readers:
            continue
        without = not site.norm.centring and any(r.bias is None and not r.blind for r in site.readers)
        last = site.carried is not None and site.carried.bias is None
        reason = "a reader without a bias" if without else "the next writer has no bias" if last else ""
        if add(shift(site, beta), reason):
            shifted.append(site)
    parts: Counter[Tensor] = Counter()
    for site in w.sites:
        for r in site.readers if site.norm.centring else ():
            if site.norm.shift is None or r.bias is not None or r.blind:
                parts[r.matrix.tensor] += add(reader(site, r))
    for name, q, k in w.qk_norms:
        add(qk_gain(name, q, k))
    for name, tables in w.score_tables:
        add(exchange("score bias", name, tables, [], tables[0].size[1]))
    norms = {
        r.matrix.tensor: s.norm for s in shifted if s.norm.centring for r in s.readers if r.bias is None and not r.blind
    }
    # Without a wiring nobody vouches that attention weights sum to 1.
    for bias_of, pair in product((key_bias, value_bias) if w.sites else (key_bias,), pairs):
        if (of_pair := bias_of(pair, norms)) is not None:
            add(of_pair)
    in_stream = {rows.tensor for _, rows in w.tables} | {b.tensor for _, a in w.writers for b in a.blocks}
    for name, source, targets in w.common:  # the part along 1 belongs to the writers already
        d = source.size[1] - (w.centred and source.tensor in in_stream)
        add(exchange("embeddings", name, [source], targets, d))
    for name, a in w.writers if w.centred and w.sites else ():
        add(centring("writer", name, a.written), "its layer scale is not folded" * (a.matrix.tensor in scaled))
    for name, rows in w.tables if w.centred and w.sites else ():
        add(centring("writer", name, [rows]))
    for name, a in w.classifiers if classes else ():
        if not add(centring("classes", name, a.written, parts[a.matrix.tensor])) and a.bias is not None:
            add(centring("classes", f"{name} biases", [a.bias]))
    if w.closed and w.sites and not w.reads_stream_raw and all(folded) and not scaled:
        add(rotation("the stream", w, [s.norm.shift for s in w.sites if s.norm.shift is not None and s not in shifted]))
    return found, refused


def _obstacle(s: Symmetry, tied: Container[Tensor]) -> str:
    """Say why a symmetry cannot be folded, if it cannot."""
    if any(p in tied for p in s.parameters):
        return "weights that are used in another place too"
    if any(not p.is_leaf for p in s.parameters):
        return "weights that are computed"  # by pruning, for example
    return "frozen weights" if any(not p.requires_grad for p in s.parameters) else ""
