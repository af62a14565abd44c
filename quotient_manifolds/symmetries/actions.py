"""What every continuous symmetry outside the heads is: an action, on values of weights; and the kinds that need a norm.

One class for each kind, as in ``kinds.py``. Notation: γ ⊙ n(x) + β is a norm's output, W x + b a reader (fed by a norm)
or a writer (added to the stream). A reader without a bias has a substitute for it after a centring norm: with u = 1/γ,
W + v uᵀ adds v uᵀβ to its output and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..linalg import in_double
from .slots import Slot, weight_of
from .wiring import Affine, Norm


@dataclass(eq=False, repr=False)
class State(dict[str, Tensor]):
    """Values of weights in float64, by name; what was not changed is read from the weights, and not stored.

    Attributes
    ----------
    weights : mapping of str to Tensor
        Those of the network, which stay as they are.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import slot
    >>> from quotient_manifolds.symmetries.whole import State
    >>> layer = torch.nn.Linear(2, 3)
    >>> state, first = State(dict(layer.named_parameters())), slot(layer, "weight", slice(1))
    >>> state.write(first, torch.zeros(1, 2))
    >>> float(first.read(state).norm()), bool(layer.weight[0].any())
    (0.0, True)
    """

    weights: Mapping[str, Tensor]

    def __missing__(self, name: str) -> Tensor:
        return in_double(self.weights[name].detach())

    def write(self, slot: Slot, rows: Tensor) -> None:
        """Change the numbers of a slot, differentiably."""
        value = weight_of(slot, self).clone(memory_format=torch.contiguous_format)
        slot.of(value).copy_(rows)
        self[slot.name] = value


class Places(NamedTuple):
    """The slots of an action: what moves, and besides it, what says how far, and what must have no other place."""

    moving: tuple[Slot, ...]
    read: tuple[Slot, ...] = ()
    constant: tuple[Slot, ...] = ()  # which of them have a fixed value once the symmetry is folded
    alone: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Action(ABC):
    """A group of moves of some weights, which holds where the actions before it in the list were folded.

    Attributes
    ----------
    kind, name : str
        The kind of symmetry, and its place in the network.
    after : tuple of str
        The labels of those before it without which it does not hold: it is left out where one of them is.
    slots, needed : tuple of Slot
        What moves; and with it, what says how far.
    alone : tuple of Slot
        What must have no other place in the network.
    constant : tuple of Slot
        What has a fixed value once the symmetry is folded.
    names : tuple of str
        Names of the weights that move, each once.
    label : str
        Kind and place, by which ``after`` names it: no other symmetry of a network has the same.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import ALL, find
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    >>> [(a.kind, a.dimension) for a in find(encoder, scope=ALL).actions if a.kind not in ("qk", "vo", "relu")][:3]
    [('shift', 8), ('reader', 16), ('key bias', 4)]
    """

    kind: str
    name: str
    _: KW_ONLY
    after: tuple[str, ...] = field(default=(), repr=False)
    slots: tuple[Slot, ...] = field(init=False, repr=False, compare=False)
    needed: tuple[Slot, ...] = field(init=False, repr=False, compare=False)
    alone: tuple[Slot, ...] = field(init=False, repr=False, compare=False)
    constant: tuple[Slot, ...] = field(init=False, repr=False, compare=False)
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    label: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        slots, read, constant, alone = self.places()
        names, label = tuple(dict.fromkeys(s.name for s in slots)), f"{self.kind}: {self.name}"
        vars(self).update(slots=slots, needed=slots + read, alone=slots + alone, constant=constant)
        vars(self).update(names=names, label=label)

    @abstractmethod
    def places(self) -> Places:
        """Return where its slots lie."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of t, which says how far to move; t = 0 changes nothing."""

    @property
    def dimension(self) -> int:
        """Number of directions that are not among those of another symmetry of the list."""
        return self.shape[0]

    def among(self, others: Collection[Action]) -> Action:
        """Return the same symmetry for where only some of the others are left."""
        return self

    @abstractmethod
    def act_(self, state: State, t: Tensor) -> None:
        """Move weights, differentiably."""

    @abstractmethod
    def element(self, state: State) -> Tensor:
        """Return how far to go to the one point of the orbit that all equivalent weights share; :meth:`apply_` does."""

    def apply_(self, state: State, element: Tensor) -> None:
        """Move weights by an element, those from which it was computed or others."""
        self.act_(state, element)

    def inverse(self, element: Tensor) -> Tensor:
        """Return the element that moves them back."""
        return -element

    def fold_(self, state: State) -> None:
        """Go to that point."""
        self.act_(state, self.element(state))


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
