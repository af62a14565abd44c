"""The kinds of continuous symmetry outside the heads whose formulas need a norm: its gain, shift and null direction.

One class for each kind, as in ``kinds.py``. Notation: γ ⊙ n(x) + β is a norm's output, W x + b a reader (fed by a norm)
or a writer (added to the stream). A reader without a bias has a substitute for it after a centring norm: with u = 1/γ,
W + v uᵀ adds v uᵀβ to its output and nothing else.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from .actions import Action, Places, State
from .kinds import Scale
from .slots import Slot
from .wiring import Affine, Norm


@dataclass(frozen=True)
class Gain(Scale):
    """γ → γ s, β → β s, columns of the readers / s: a norm that only linear layers read. Folded, γ = 1."""

    _: KW_ONLY
    shift: Shift | None = field(default=None, repr=False)  # where γ has zeros, β is a bias and must be folded first

    def fold_(self, state: State) -> None:
        if self.shift is not None:
            self.shift.fold_(state)
        elif self.alike and not bool((self.unit.read(state) + self.offset != 0).all()):
            raise ValueError(f"{self.name} has a gain of 0, but had none when symmetries were found; find them again")
        super().fold_(state)


def has_zeros(norm: Norm, state: State, like: Slot) -> bool:
    """Return whether an entry of γ is zero."""
    return not bool((norm.gamma(state, like.read(state)[0]) != 0).all())


def _null_input(norm: Norm, state: State, like: Tensor) -> Tensor:
    """Return u with uᵀ(γ ⊙ n(x)) = 0 for all x after a centring norm: 1/γ, or a mark of the zeros of γ."""
    gamma = norm.gamma(state, like)
    return 1 / gamma if bool((gamma != 0).all()) else (gamma == 0).to(gamma.dtype)


def _substitute(state: State, reader: Affine, norm: Norm | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, u and β of a reader without a bias."""
    assert norm is not None
    assert norm.shift is not None
    W, beta = reader.matrix.read(state), norm.shift.read(state)[0]
    return W, _null_input(norm, state, beta), beta


def _add_constant(state: State, reader: Affine, norm: Norm | None, c: Tensor) -> None:
    if reader.bias is not None:
        state.write(reader.bias, reader.bias.read(state) + c)
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

    def places(self) -> Places:
        moving = (self.beta, *(r.bias or r.matrix for r in self.seeing))
        read = (*self.norm.slots, *(r.matrix for r in self.seeing))
        return Places(moving if self.carried is None else (*moving, self.carried), read, constant=(self.beta,))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.beta.size[1],)

    def act_(self, state: State, t: Tensor) -> None:
        state.write(self.beta, self.beta.read(state) + t)
        for r in self.seeing:
            _add_constant(state, r, self.norm, -(r.matrix.read(state) @ t))
        if self.carried is not None:
            state.write(self.carried, self.carried.read(state) - t)

    def element(self, state: State) -> Tensor:
        before = self.beta.read(state)[0]
        open_ends = any(r.bias is None for r in self.seeing)
        target = self.norm.gamma(state, before) / len(before) ** 0.5 if open_ends else torch.zeros_like(before)
        return target - before

    def fold_(self, state: State) -> None:
        target = self.beta.read(state)[0] + (element := self.element(state))
        self.act_(state, element)
        state.write(self.beta, target)


@dataclass(frozen=True)
class Reader(Action):
    """W → W + v uᵀ, b → b − v uᵀβ: n(x) sums to 0 behind a LayerNorm. Folded, W u = 0."""

    norm: Norm
    affine: Affine

    def __post_init__(self) -> None:
        """Add the matrix to the label: a norm may have several, and two may be parts of one weight."""
        super().__post_init__()
        matrix = self.affine.matrix
        label = f"{self.label} → {matrix.name}{f' from {matrix.offset}' if matrix.offset else ''}"
        vars(self).update(label=label)

    def places(self) -> Places:
        return Places(tuple(self.affine.slots), tuple(self.norm.slots))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.affine.matrix.size[0],)

    def act_(self, state: State, t: Tensor) -> None:
        W = self.affine.matrix.read(state)
        u = _null_input(self.norm, state, W[0])
        state.write(self.affine.matrix, W + torch.outer(t, u))
        if self.norm.shift is not None and self.affine.bias is not None:
            state.write(self.affine.bias, self.affine.bias.read(state) - t * (u @ self.norm.shift.read(state)[0]))

    def element(self, state: State) -> Tensor:
        W = self.affine.matrix.read(state)
        u = _null_input(self.norm, state, W[0])
        return -(W @ u) / (u @ u)


@dataclass(frozen=True)
class HeadBias(Action):
    """Add t to a head's bias, or what stands for it, against the biases of the outputs; folded, it is 0.

    A key bias b_k + t adds one number to all scores of a query, which softmax ignores. Of values b_v → b_v + t, b_o →
    b_o − W_O t, since attention weights sum to 1.
    """

    affine: Affine
    norm: Norm | None
    outputs: tuple[tuple[Slot, Slot], ...]

    def places(self) -> Places:
        own, norm = self.affine.bias, () if self.norm is None else self.norm.slots
        matrices = tuple(matrix for matrix, _ in self.outputs)  # alone: of layers that share one, one has the bias
        moving = (own or self.affine.matrix.transposed(), *(bias for _, bias in self.outputs))
        return Places(moving, (*norm, *matrices), () if own is None else (own,), alone=matrices)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.affine.matrix.size[0],)

    def act_(self, state: State, t: Tensor) -> None:
        _add_constant(state, self.affine, self.norm, t)
        for matrix, bias in self.outputs:
            state.write(bias, bias.read(state) - (matrix.read(state) @ t))

    def element(self, state: State) -> Tensor:
        """Return what takes b away, or what W has along u."""
        if self.affine.bias is not None:
            return -self.affine.bias.read(state)[0]
        W, u, beta = _substitute(state, self.affine, self.norm)
        return -(W @ u) * (u @ beta) / (u @ u)


@dataclass(frozen=True)
class QKGains(Action):
    """Gains of the norms of queries and keys, scaled inversely in every plane that RoPE rotates: q s, k / s."""

    queries: Norm
    keys: Norm

    def places(self) -> Places:
        return Places((*self.queries.slots, *self.keys.slots))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.queries.slots[0].size[1] // 2,)

    def act_(self, state: State, t: Tensor) -> None:
        for its, s in ((self.queries, t), (self.keys, -t)):
            (rows,) = its.slots
            state.write(rows, (rows.read(state) + its.offset) * torch.exp(s).repeat(2) - its.offset)

    def element(self, state: State) -> Tensor:
        of_q, of_k = (
            (its.slots[0].read(state) + its.offset).view(2, -1).norm(dim=0) for its in (self.queries, self.keys)
        )
        return torch.log(of_k / of_q).nan_to_num(0, 0, 0) / 2
