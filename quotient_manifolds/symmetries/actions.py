"""What every continuous symmetry outside the heads is, an action on weights, and the values that actions change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..linalg import in_double
from .slots import Slot, weight_of


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
