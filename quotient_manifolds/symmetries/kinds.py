"""The kinds of continuous symmetry outside the heads whose formulas need no norm: they scale, shift or rotate rows.

One class for each kind; its fields are slots, ``places`` says what moves, its other methods are the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor

from .actions import Action, Places, Shift, State
from .slots import Slot


@dataclass(frozen=True)
class Scale(Action):
    """Multiply u + offset and some rows by s, divide others by s: u is γ or LayerScale. Folded, u + offset = 1."""

    unit: Slot
    alike: tuple[Slot, ...]
    against: tuple[Slot, ...]
    offset: float = 0.0

    def places(self) -> Places:
        return Places((self.unit, *self.alike, *self.against), constant=(self.unit,))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.unit.size[1],)

    def act_(self, state: State, t: Tensor) -> None:
        self._divide(state, torch.exp(-t))

    def element(self, state: State) -> Tensor:
        return self.unit.read(state)[0] + self.offset

    def inverse(self, element: Tensor) -> Tensor:
        return torch.where(element == 0, 1, 1 / element)

    def fold_(self, state: State) -> None:
        self.apply_(state, self.element(state))
        state.write(self.unit, torch.ones_like(self.unit.read(state)) - self.offset)

    def apply_(self, state: State, element: Tensor) -> None:
        self._divide(state, element)

    def _divide(self, state: State, r: Tensor) -> None:
        safe = torch.where(r == 0, torch.ones_like(r), r)
        state.write(self.unit, (self.unit.read(state) + self.offset) / safe - self.offset)
        for rows in self.alike:
            state.write(rows, rows.read(state) / safe)
        for rows in self.against:
            state.write(rows, rows.read(state) * r)


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


@dataclass(frozen=True)
class Centring(Action):
    """Add c 1 to every row v: what a LayerNorm centres, or (kind "classes") weights of a softmax's logits."""

    vectors: tuple[Slot, ...]
    shared: tuple[Action, ...] = field(default=(), repr=False)  # each of them has one of its directions too

    def places(self) -> Places:
        return Places(self.vectors)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(rows.size[0] for rows in self.vectors),)

    @property
    def dimension(self) -> int:
        return self.shape[0] - len(self.shared)

    def among(self, others: Collection[Action]) -> Action:
        return replace(self, shared=tuple(a for a in self.shared if a in others))

    def act_(self, state: State, t: Tensor) -> None:
        for rows, c in zip(self.vectors, t.split([rows.size[0] for rows in self.vectors]), strict=True):
            state.write(rows, rows.read(state) + c[:, None])

    def element(self, state: State) -> Tensor:
        return -torch.cat([rows.read(state).mean(1) for rows in self.vectors])


@dataclass(frozen=True)
class Exchange(Action):
    """Add t to some rows, −t to those they are always added to, or add it to all scores. Folded, the mean is 0."""

    source: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    shared: tuple[Action, ...] = field(default=(), repr=False)  # those that have the direction along 1 too

    def places(self) -> Places:
        """Of the source, a single row that is a whole weight is constant."""
        first, *more = self.source
        alone = not more and first.size[0] == 1 and math.prod(first.shape) == first.size[1]
        return Places((*self.source, *self.targets), constant=self.source if alone else ())

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
            state.write(rows, rows.read(state) + t)
        for rows in self.targets:
            state.write(rows, rows.read(state) - t)

    def element(self, state: State) -> Tensor:
        return -torch.cat([rows.read(state) for rows in self.source]).mean(0)


@dataclass(frozen=True)
class Length(Action):
    """v → s v, s > 0, for rows of any shape that weight normalisation divides by their lengths. Folded, these are 1."""

    rows: Slot

    def places(self) -> Places:
        return Places((self.rows,))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows.size[0],)

    def act_(self, state: State, t: Tensor) -> None:
        state.write(self.rows, torch.einsum("i,i...->i...", torch.exp(t), self.rows.read(state)))

    def element(self, state: State) -> Tensor:
        length = torch.linalg.vector_norm(self.rows.read(state).reshape(self.rows.size[0], -1), dim=1)
        return -torch.where(length == 0, 1, length).log()


@dataclass(frozen=True)
class Rotation(Action):
    """Rotate the whole stream, x → Q x, Q orthogonal, with Q 1 = 1 for LayerNorm; needs all gains folded.

    There is no fold, because the metrics of pairs and of vectors in the stream do not depend on it.
    """

    vectors: tuple[Slot, ...]
    centred: bool

    def places(self) -> Places:
        return Places(self.vectors)

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
            state.write(rows, rows.read(state) @ Q.mT)

    def element(self, state: State) -> Tensor:
        return self.vectors[0].read(state).new_zeros(self.shape)

    def fold_(self, state: State) -> None:
        """Leave the weights as they are."""
