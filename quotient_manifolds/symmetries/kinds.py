"""The kinds of continuous symmetry outside the heads: moves of weights that do not change the network's function.

One class for each kind; its fields say what moves, its methods are the formulas. Each formula assumes that the
symmetries before it in the list were folded; those without which it does not hold are named in ``after``. Notation: d
is the width of the stream, γ ⊙ n(x) + β a norm's output, W x + b a reader (fed by a norm) or a writer (added to the
stream). A reader without a bias has a substitute for it after a centring norm: with u = 1/γ, W + v uᵀ adds v uᵀβ to its
output and nothing else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor

from .slots import Slot
from .wiring import Affine, Norm, State


@dataclass(frozen=True)
class Action(ABC):
    """A group of moves of some weights.

    Attributes
    ----------
    kind, name : str
        The kind of symmetry, and its place in the network.
    after : tuple of str
        The labels of those that must have been folded.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import ALL, find
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    >>> [(a.kind, a.dimension) for a in find(encoder, kinds=ALL).actions if a.kind not in ("qk", "vo", "relu")][:3]
    [('shift', 8), ('reader', 16), ('key bias', 4)]
    """

    kind: str
    name: str
    _: KW_ONLY
    after: tuple[str, ...] = field(default=(), repr=False)

    @property
    def label(self) -> str:
        """Kind and place, by which ``after`` names it: no other symmetry of a network has the same."""
        return f"{self.kind}: {self.name}"

    @property
    @abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """What moves."""

    @property
    def needed(self) -> tuple[Slot, ...]:
        """What moves, and what says how far."""
        return self.slots

    @property
    def constant(self) -> tuple[Slot, ...]:
        """What has a fixed value once the symmetry is folded."""
        return ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of t, which says how far to move; t = 0 changes nothing."""

    @property
    def dimension(self) -> int:
        """Number of directions that are not among those of another symmetry of the list."""
        return self.shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights that move, each once."""
        return tuple(dict.fromkeys(s.name for s in self.slots))

    def among(self, others: Collection[Action]) -> Action:
        """Return the same symmetry for where only some of the others are left."""
        return self

    @abstractmethod
    def act_(self, state: State, t: Tensor) -> None:
        """Move weights, differentiably."""

    @abstractmethod
    def fold_(self, state: State) -> None:
        """Go to the one point of the orbit that all equivalent weights share."""


@dataclass(frozen=True)
class Scale(Action):
    """Multiply u + offset and some rows by s, divide others by s: u is γ or LayerScale. Folded, u + offset = 1."""

    unit: Slot
    alike: tuple[Slot, ...]
    against: tuple[Slot, ...]
    offset: float = 0.0

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.unit, *self.alike, *self.against)

    @property
    def constant(self) -> tuple[Slot, ...]:
        return (self.unit,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.unit.size[1],)

    def act_(self, state: State, t: Tensor) -> None:
        self._divide(state, torch.exp(-t))

    def fold_(self, state: State) -> None:
        self._divide(state, state.read(self.unit)[0] + self.offset)
        state.write(self.unit, torch.ones_like(state.read(self.unit)) - self.offset)

    def _divide(self, state: State, r: Tensor) -> None:
        safe = torch.where(r == 0, torch.ones_like(r), r)
        state.write(self.unit, (state.read(self.unit) + self.offset) / safe - self.offset)
        for rows in self.alike:
            state.write(rows, state.read(rows) / safe)
        for rows in self.against:
            state.write(rows, state.read(rows) * r)


@dataclass(frozen=True)
class Gain(Scale):
    """γ → γ s, β → β s, columns of the readers / s: a norm that only linear layers read. Folded, γ = 1."""

    _: KW_ONLY
    shift: Shift | None = field(default=None, repr=False)  # where γ has zeros, β is a bias and must be folded first

    def fold_(self, state: State) -> None:
        if self.shift is not None:
            self.shift.fold_(state)
        elif self.alike and not bool((state.read(self.unit) + self.offset != 0).all()):
            raise ValueError(f"{self.name} has a gain of 0, but had none when symmetries were found; find them again")
        super().fold_(state)


def has_zeros(norm: Norm, state: State, like: Slot) -> bool:
    """Return whether an entry of γ is zero."""
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


@dataclass(frozen=True)
class Shift(Action):
    """β → β + t, which the readers' biases take back; post-norm the next writer's bias does so for the stream.

    Folded, β is 0, or γ/√d where it must serve as a reader's bias.
    """

    beta: Slot
    norm: Norm
    readers: tuple[Affine, ...]
    carried: Slot | None

    @property
    def seeing(self) -> list[Affine]:
        """The readers that a constant has an effect on."""
        return [r for r in self.readers if r.bias is not None or not r.blind]

    @property
    def slots(self) -> tuple[Slot, ...]:
        carried = () if self.carried is None else (self.carried,)
        return (self.beta, *(r.bias or r.matrix for r in self.seeing), *carried)

    @property
    def needed(self) -> tuple[Slot, ...]:
        return (*self.slots, *self.norm.slots, *(r.matrix for r in self.seeing))

    @property
    def constant(self) -> tuple[Slot, ...]:
        return (self.beta,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.beta.size[1],)

    def act_(self, state: State, t: Tensor) -> None:
        state.add(self.beta, t)
        for r in self.seeing:
            _add_constant(state, r, self.norm, -(state.read(r.matrix) @ t))
        if self.carried is not None:
            state.add(self.carried, -t)

    def fold_(self, state: State) -> None:
        before = state.read(self.beta)[0]
        open_ends = any(r.bias is None for r in self.seeing)
        target = self.norm.gamma(state, before) / len(before) ** 0.5 if open_ends else torch.zeros_like(before)
        self.act_(state, target - before)
        state.write(self.beta, target)


@dataclass(frozen=True)
class Reader(Action):
    """W → W + v uᵀ, b → b − v uᵀβ: n(x) sums to 0 behind a LayerNorm. Folded, W u = 0."""

    norm: Norm
    affine: Affine

    @property
    def label(self) -> str:
        """Kind and place, and the matrix: a norm may have several, and two may be parts of one weight."""
        matrix = self.affine.matrix
        return f"{super().label} → {matrix.name}{f' from {matrix.offset}' if matrix.offset else ''}"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self.affine.slots)

    @property
    def needed(self) -> tuple[Slot, ...]:
        return (*self.slots, *self.norm.slots)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.affine.matrix.rows,)

    def act_(self, state: State, t: Tensor) -> None:
        W = state.read(self.affine.matrix)
        u = _null_input(self.norm, state, W[0])
        state.write(self.affine.matrix, W + torch.outer(t, u))
        if self.norm.shift is not None and self.affine.bias is not None:
            state.add(self.affine.bias, -t * (u @ state.read(self.norm.shift)[0]))

    def fold_(self, state: State) -> None:
        W = state.read(self.affine.matrix)
        u = _null_input(self.norm, state, W[0])
        self.act_(state, -(W @ u) / (u @ u))


@dataclass(frozen=True)
class Centring(Action):
    """Add c 1 to every row v: what a LayerNorm centres, or (kind "classes") weights of a softmax's logits."""

    vectors: tuple[Slot, ...]
    shared: tuple[Action, ...] = field(default=(), repr=False)  # each of them has one of its directions too

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.vectors

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(rows.rows for rows in self.vectors),)

    @property
    def dimension(self) -> int:
        return self.shape[0] - len(self.shared)

    def among(self, others: Collection[Action]) -> Action:
        return replace(self, shared=tuple(a for a in self.shared if a in others))

    def act_(self, state: State, t: Tensor) -> None:
        for rows, c in zip(self.vectors, t.split([rows.rows for rows in self.vectors]), strict=True):
            state.add(rows, c[:, None])

    def fold_(self, state: State) -> None:
        self.act_(state, -torch.cat([state.read(rows).mean(1) for rows in self.vectors]))


@dataclass(frozen=True)
class Exchange(Action):
    """Add t to some rows, −t to those they are always added to, or add it to all scores. Folded, the mean is 0."""

    source: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    shared: tuple[Action, ...] = field(default=(), repr=False)  # those that have the direction along 1 too

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.source, *self.targets)

    @property
    def constant(self) -> tuple[Slot, ...]:
        """A single row that is a whole weight."""
        first, *more = self.source
        alone = not more and first.rows == 1 and math.prod(first.shape) == first.size[1]
        return self.source if alone else ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source[0].size[1],)

    @property
    def dimension(self) -> int:
        return self.shape[0] - bool(self.shared)

    def among(self, others: Collection[Action]) -> Action:
        return replace(self, shared=self.shared if all(a in others for a in self.shared) else ())

    def act_(self, state: State, t: Tensor) -> None:
        for rows in self.source:
            state.add(rows, t)
        for rows in self.targets:
            state.add(rows, -t)

    def fold_(self, state: State) -> None:
        self.act_(state, -torch.cat([state.read(rows) for rows in self.source]).mean(0))


@dataclass(frozen=True)
class HeadBias(Action):
    """Add t to a head's bias, or what stands for it, against the biases of the outputs; folded, it is 0.

    A key bias b_k + t adds one number to all scores of a query, which softmax ignores. Of values b_v → b_v + t, b_o →
    b_o − W_O t, since attention weights sum to 1.
    """

    affine: Affine
    norm: Norm | None
    outputs: tuple[tuple[Slot, Slot], ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.affine.bias or self.affine.matrix.transposed(), *(bias for _, bias in self.outputs))

    @property
    def needed(self) -> tuple[Slot, ...]:
        norm = () if self.norm is None else self.norm.slots
        return (*self.slots, *norm, *(matrix for matrix, _ in self.outputs))

    @property
    def constant(self) -> tuple[Slot, ...]:
        return () if self.affine.bias is None else (self.affine.bias,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.affine.matrix.rows,)

    def act_(self, state: State, t: Tensor) -> None:
        _add_constant(state, self.affine, self.norm, t)
        for matrix, bias in self.outputs:
            state.add(bias, -(state.read(matrix) @ t))

    def fold_(self, state: State) -> None:
        self.act_(state, -_constant(state, self.affine, self.norm))


@dataclass(frozen=True)
class QKGains(Action):
    """Gains of the norms of queries and keys, scaled inversely in every plane that RoPE rotates: q s, k / s."""

    queries: Norm
    keys: Norm

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*self.queries.slots, *self.keys.slots)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.queries.slots[0].size[1] // 2,)

    def act_(self, state: State, t: Tensor) -> None:
        for its, s in ((self.queries, t), (self.keys, -t)):
            (rows,) = its.slots
            state.write(rows, (state.read(rows) + its.offset) * torch.exp(s).repeat(2) - its.offset)

    def fold_(self, state: State) -> None:
        of_q, of_k = (
            (state.read(its.slots[0]) + its.offset).view(2, -1).norm(dim=0) for its in (self.queries, self.keys)
        )
        self.act_(state, torch.log(of_k / of_q).nan_to_num(0, 0, 0) / 2)


@dataclass(frozen=True)
class Length(Action):
    """v → s v, rows that weight normalisation divides by their lengths. Folded, their lengths are 1."""

    rows: Slot

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.rows,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows.rows,)

    def act_(self, state: State, t: Tensor) -> None:
        state.write(self.rows, state.read(self.rows) * torch.exp(t)[:, None])

    def fold_(self, state: State) -> None:
        rows = state.read(self.rows)
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        state.write(self.rows, rows / torch.where(length == 0, 1, length))


@dataclass(frozen=True)
class Rotation(Action):
    """Rotate the whole stream, x → Q x, Q orthogonal, with Q 1 = 1 for LayerNorm; needs all gains folded.

    There is no fold, because the metrics of pairs and of vectors in the stream do not depend on it.
    """

    vectors: tuple[Slot, ...]
    centred: bool

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.vectors

    @property
    def shape(self) -> tuple[int, ...]:
        k = self.vectors[0].size[1] - self.centred
        return (k, k)

    @property
    def dimension(self) -> int:
        k, _ = self.shape
        return k * (k - 1) // 2

    def act_(self, state: State, t: Tensor) -> None:
        d, skew = self.vectors[0].size[1], t - t.mT
        if self.centred:  # act on the space orthogonal to 1
            frame = torch.eye(d, dtype=t.dtype, device=t.device)
            frame[:, 0] = 1
            basis = torch.linalg.qr(frame).Q[:, 1:]
            skew = basis @ skew @ basis.mT
        Q = torch.linalg.matrix_exp(skew)
        for rows in self.vectors:
            state.write(rows, state.read(rows) @ Q.mT)

    def fold_(self, state: State) -> None:
        """Leave the weights as they are."""
