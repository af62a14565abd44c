"""The kinds of continuous symmetry outside the heads: moves of weights that do not change the network's function.

One function for each kind makes its :class:`Symmetry`. They are folded in the order in which ``symmetries_of`` lists
them; each formula assumes that the earlier ones were folded. Notation: d is the width of the stream, γ ⊙ n(x) + β a
norm's output, W x + b a reader (fed by a norm) or a writer (added to the stream).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..blocks import Block
from ..pairs import SymmetricPair
from .wiring import Affine, Norm, Site, State, Table, Wiring

__all__ = ["Symmetry"]


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
    parameters : list of Tensor
        The parameters that move.
    constant : list of Tensor or Block
        Parameters, or blocks of them, that have a fixed value once the symmetry is folded.
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
    parameters: list[Tensor] = field(repr=False)
    constant: list[Tensor | Block] = field(repr=False)
    move: Callable[[State, Tensor], None] = field(repr=False)
    fold: Callable[[State], None] = field(repr=False)

    def __post_init__(self) -> None:
        self.parameters = list(dict.fromkeys(self.parameters))


def null_input(norm: Norm, state: State, like: Tensor) -> Tensor:
    """Return u with uᵀ(γ ⊙ n(x)) = 0 for all x after a centring norm: 1/γ, or a mark of the zeros of γ."""
    gamma = norm.gamma(state)
    if gamma is None:
        return torch.ones_like(like)
    return 1 / gamma if bool((gamma != 0).all()) else (gamma == 0).to(gamma.dtype)


def gain(site: Site) -> Symmetry:
    """γ → γ s, β → β s, columns of the readers / s: a norm that only linear layers read. Folded, γ = 1."""
    norm, readers, p = site.norm, site.readers, site.norm.parameters[0]

    def divide(state: State, r: Tensor, after: Tensor) -> None:
        state[p] = after - norm.offset
        if norm.shift is not None:
            state[norm.shift] = state.of(norm.shift) / torch.where(r == 0, torch.ones_like(r), r)
        for reader in readers:
            reader.set_matrix(state, reader.matrix(state) * r)

    def move(state: State, t: Tensor) -> None:
        divide(state, torch.exp(-t), (state.of(p) + norm.offset) * torch.exp(t))

    def fold(state: State) -> None:
        gamma = state.of(p) + norm.offset
        if norm.shift is not None and not bool(
            (gamma != 0).all()
        ):  # where γ is 0, β is a bias and must be folded first
            shift(site).fold(state)
        divide(state, gamma, torch.ones_like(gamma))

    d = p.numel()
    return Symmetry("gain", site.name, d, (d,), [*norm.parameters, *(r.W for r in readers)], [p], move, fold)


def shift(site: Site) -> Symmetry:
    r"""β → β + t, which the readers' biases take back; post-norm the next writer's bias does so for the stream.

    A reader W without a bias has a substitute for it after a centring norm: with u = 1/γ, W + v uᵀ adds v uᵀβ to its
    output and nothing else. Folded, β is 0, or γ/√d where it must serve as that bias.
    """
    norm, readers, carried, p = site.norm, site.readers, site.carried, site.norm.parameters[-1]

    def move(state: State, t: Tensor) -> None:
        state[p] = after = state.of(p) + t
        for r in readers:
            change = -(r.matrix(state) @ t)
            if r.b is not None or r.blind:
                r.add_to_bias(state, change)
            else:
                u = null_input(norm, state, t)
                r.set_matrix(state, r.matrix(state) + torch.outer(change / (u @ after), u))
        if carried is not None:
            carried.add_to_bias(state, -t)

    def fold(state: State) -> None:
        before = state.of(p)
        target = torch.zeros_like(before)
        if any(r.b is None and not r.blind for r in readers):
            gamma = norm.gamma(state)
            target = (torch.ones_like(before) if gamma is None else gamma) / before.numel() ** 0.5
        move(state, target - before)
        state[p] = target

    moving = [p, *(r.W if r.b is None else r.b for r in readers if r.b is not None or not r.blind)]
    moving += [carried.b] if carried is not None and carried.b is not None else []
    return Symmetry("shift", site.name, p.numel(), (p.numel(),), moving, [p], move, fold)


def reader(site: Site, affine: Affine) -> Symmetry:
    """W → W + v uᵀ, b → b − v uᵀβ with u = 1/γ: n(x) sums to 0 behind a LayerNorm. Folded, W u = 0."""
    norm = site.norm

    def move(state: State, t: Tensor) -> None:
        W = affine.matrix(state)
        u = null_input(norm, state, W[0])
        affine.set_matrix(state, W + torch.outer(t, u))
        if norm.shift is not None:
            affine.add_to_bias(state, -t * (u @ state.of(norm.shift)))

    def fold(state: State) -> None:
        W = affine.matrix(state)
        u = null_input(norm, state, W[0])
        move(state, -(W @ u) / (u @ u))

    rows = len(affine.matrix(State()))
    return Symmetry("reader", site.name, rows, (rows,), affine.parameters, [], move, fold)


def writer(name: str, affine: Affine, kind: str = "writer", overlap: int = 0) -> Symmetry:
    """W → W + 1 vᵀ, b → b + c 1: what a LayerNorm centres; or (kind "classes") the logits of a softmax."""

    def move(state: State, t: Tensor) -> None:
        W = affine.matrix(state)
        affine.set_matrix(state, W + t[: W.shape[1]])
        if affine.b is not None:
            affine.add_to_bias(state, t[-1])

    def fold(state: State) -> None:
        t = -affine.matrix(state).mean(0)
        move(state, t if affine.b is None else torch.cat([t, -state.of(affine.b).mean(0, keepdim=True)]))

    size = affine.W.numel() // affine.W.shape[affine.stream_dim] + (affine.b is not None)
    return Symmetry(kind, name, size - overlap, (size,), affine.parameters, [], move, fold)


def writer_table(name: str, table: Table, kind: str = "writer") -> Symmetry:
    """Vectors of a stream that a LayerNorm centres: each + c 1; or (kind "classes") biases of a softmax's logits."""

    def fold(state: State) -> None:
        table.add(state, -table.vectors(state).mean(1, keepdim=True))

    rows = table.vectors(State()).shape[0]
    return Symmetry(kind, name, rows, (rows, 1), [table.parameter], [], table.add, fold)


def common(name: str, source: Table, targets: Sequence[Table], centred: bool) -> Symmetry:
    """Vectors that are always added together: a → a + t, b → b − t. Folded, the mean of the first is 0."""
    p = source.parameter
    d = p.shape[-1]
    alone: list[Tensor | Block] = [p] if p.numel() == d else []
    moving = [p, *(target.parameter for target in targets)]

    def move(state: State, t: Tensor) -> None:
        source.add(state, t)
        for target in targets:
            target.add(state, -t)

    def fold(state: State) -> None:
        move(state, -source.vectors(state).mean(0))
        if alone:
            state[p] = torch.zeros_like(state.of(p))

    # The part along 1 belongs to the writers already.
    return Symmetry("embeddings", name, d - centred, (d,), moving, alone, move, fold)


def layer_scale(name: str, scale: Table, affine: Affine) -> Symmetry:
    """λ → λ s, the writer's rows and bias / s. Folded, λ = 1."""
    p = scale.parameter

    def divide(state: State, r: Tensor, after: Tensor) -> None:
        state[p] = after
        affine.set_matrix(state, affine.matrix(state) * r[:, None])
        if affine.b is not None:
            state[affine.b] = state.of(affine.b) * r

    def move(state: State, t: Tensor) -> None:
        divide(state, torch.exp(-t), state.of(p) * torch.exp(t).view(p.shape))

    def fold(state: State) -> None:
        divide(state, state.of(p).flatten(), torch.ones_like(state.of(p)))

    return Symmetry("layer scale", name, p.numel(), (p.numel(),), [p, *affine.parameters], [p], move, fold)


@dataclass(frozen=True)
class _Bias:
    """What adds a constant to a head's keys or values: a bias or, after a norm with a shift, the part of W along u."""

    block: Block
    norm: Norm | None = None

    def read(self, state: State) -> Tensor:
        part = self.block.of(state.of(self.block.tensor).contiguous())
        if self.norm is None:
            return part[0]
        u, beta = self._directions(state, part)
        return (u @ part) * (u @ beta) / (u @ u)

    def add(self, state: State, t: Tensor) -> None:
        whole = state.of(self.block.tensor).clone(memory_format=torch.contiguous_format)
        part = self.block.of(whole)
        if self.norm is None:
            part.add_(t)
        else:
            u, beta = self._directions(state, part)
            part.add_(torch.outer(u, t / (u @ beta)))
        state[self.block.tensor] = whole

    def _directions(self, state: State, part: Tensor) -> tuple[Tensor, Tensor]:
        assert self.norm is not None
        return null_input(self.norm, state, part[:, 0]), state.of(self.norm.parameters[-1])

    @property
    def constant(self) -> list[Tensor | Block]:
        return [self.block] if self.norm is None else []


def _bias_of(blocks: Sequence[Block], norms: Mapping[Tensor, Norm]) -> _Bias | None:
    """Find what serves as the only bias of a head's keys or values."""
    biases = [b for b in blocks if b.rows == 1]
    if len(biases) == 1:
        return _Bias(biases[0])
    return _Bias(blocks[0], norms[blocks[0].tensor]) if len(blocks) == 1 and blocks[0].tensor in norms else None


def key_bias(pair: SymmetricPair, norms: Mapping[Tensor, Norm]) -> Symmetry | None:
    """b_k → b_k + t adds one number to all scores of a query, which softmax ignores. Folded, b_k = 0."""
    substitute = pair.kind == "qk" and pair.group is not None and not pair.group.diagonal and len(pair.H) == 1
    bias = _bias_of(pair.null or (pair.H if substitute else ()), norms)
    # Beside a key that is always zero, a number added to the scores of all other keys counts.
    if bias is None or getattr(bias.block.module, "add_zero_attn", False):
        return None
    h = bias.block.size[1]
    return Symmetry(
        "key bias", pair.name, h, (h,), [bias.block.tensor], bias.constant, bias.add,
        lambda state: bias.add(state, -bias.read(state)),
    )  # fmt: skip


def value_bias(pair: SymmetricPair, norms: Mapping[Tensor, Norm]) -> Symmetry | None:
    """b_v → b_v + t, b_o → b_o − W_O t of a head, since its attention weights sum to 1. Folded, b_v = 0.

    None where values or outputs have no bias.
    """
    plain = pair.kind == "vo" and pair.group is not None and not pair.group.diagonal
    found = [(b, getattr(b.module, "bias", None)) for b in pair.H if b.attribute == "weight"]
    outputs = [(b, bias) for b, bias in found if isinstance(bias, Tensor)]
    if not plain or len(outputs) < len(pair.H):
        return None
    own = _bias_of(pair.G, norms)
    if own is None or getattr(own.block.module, "add_zero_attn", False):
        return None

    def move(state: State, t: Tensor) -> None:
        own.add(state, t)
        for b, bias in outputs:
            state[bias] = state.of(bias) - b.of(state.of(b.tensor).contiguous()) @ t

    h = own.block.size[1]
    moving = [own.block.tensor, *(bias for _, bias in outputs)]
    return Symmetry(
        "value bias", pair.name, h, (h,), moving, own.constant, move, lambda state: move(state, -own.read(state))
    )


def qk_gain(name: str, queries: Norm, keys: Norm) -> Symmetry:
    """Gains of the norms of queries and keys, scaled inversely in every plane that RoPE rotates: q s, k / s."""
    (q, k), norms = (queries.parameters[0], keys.parameters[0]), (queries, keys)

    def gammas(state: State) -> list[Tensor]:
        return [state.of(p) + norm.offset for p, norm in zip((q, k), norms, strict=True)]

    def move(state: State, t: Tensor) -> None:
        for p, norm, gamma, sign in zip((q, k), norms, gammas(state), (1, -1), strict=True):
            state[p] = gamma * torch.exp(sign * t).repeat(2) - norm.offset

    def fold(state: State) -> None:
        of_q, of_k = (gamma.view(2, -1).norm(dim=0) for gamma in gammas(state))
        move(state, torch.log(of_k / of_q).nan_to_num(0, 0, 0) / 2)

    size = q.numel() // 2
    return Symmetry("q/k gains", name, size, (size,), [q, k], [], move, fold)


def score_bias(name: str, tables: Sequence[Table]) -> Symmetry:
    """Scores by relative position, (positions, heads): + one number a head, which softmax ignores."""

    def move(state: State, t: Tensor) -> None:
        for table in tables:
            table.add(state, t)

    def fold(state: State) -> None:
        move(state, -torch.cat([table.vectors(state) for table in tables]).mean(0))

    p = tables[0].parameter
    return Symmetry("score bias", name, p.shape[-1], (p.shape[-1],), [p], [], move, fold)


def rotation(name: str, wiring: Wiring, shifts: Sequence[Tensor] = ()) -> Symmetry:
    """Rotate the whole stream, x → Q x, Q orthogonal, with Q 1 = 1 for LayerNorm; needs all gains folded.

    ``shifts`` are those of norms that could not be folded; they lie in the stream as well.

    There is no fold, because the metrics of pairs and of vectors in the stream do not depend on it.
    """
    readers = {(id(r.module), r.weight, r.inputs, r.outputs): r for s in wiring.sites for r in s.readers}
    tables = list(dict.fromkeys(t.parameter for _, t in wiring.tables))
    d = int(next(iter(readers.values())).matrix(State()).shape[1])
    k = d - wiring.centred

    def move(state: State, t: Tensor) -> None:
        skew = t - t.mT
        if wiring.centred:  # act on the space orthogonal to 1
            frame = torch.eye(d, dtype=t.dtype, device=t.device)
            frame[:, 0] = 1
            basis = torch.linalg.qr(frame).Q[:, 1:]
            skew = basis @ skew @ basis.mT
        Q = torch.linalg.matrix_exp(skew)
        for r in readers.values():
            r.set_matrix(state, r.matrix(state) @ Q.mT)
        for _, w in wiring.writers:
            w.set_matrix(state, Q @ w.matrix(state))
            if w.b is not None:
                state[w.b] = Q @ state.of(w.b)
        for p in shifts:
            state[p] = Q @ state.of(p)
        for p in tables:
            state[p] = state.of(p) @ Q.mT

    moving = [r.W for r in readers.values()] + [p for _, w in wiring.writers for p in w.parameters] + tables
    moving += shifts
    return Symmetry("rotation", name, k * (k - 1) // 2, (k, k), moving, [], move, lambda state: None)
