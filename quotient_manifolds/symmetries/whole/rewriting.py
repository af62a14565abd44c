"""The way from one network to another of the same function, by group elements that other weights can take, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...linalg import in_double
from ...weights import weights_of
from ..actions import Action, State
from ..discovery import ALL, find
from ..kinds import Gain, Rotation
from .align import MOVES, Element, Form, align_models, on_cpu
from .fits import balanced, turned
from .units import acted, cells_of


class _Way:
    """The way of a network to its canonical form with balanced heads, and back."""

    def __init__(self, model: nn.Module) -> None:
        self.form, weights = Form(model), weights_of(model)
        found, state = find(model, scope=ALL).of_full_rank(), State(weights)
        self.steps: list[tuple[Action, Tensor]] = []
        for a in found.actions:
            if isinstance(a, Gain) and a.shift is not None:
                raise ValueError(f"the gain of {a.name} has a 0, which hides what its readers are; train or replace it")
            if not isinstance(a, Rotation):
                self.steps.append((a, a.element(state)))
                a.apply_(state, self.steps[-1][1])
        #: With the biases of heads, which the form's own cells lack: they are constant there, but not in other weights.
        self.cells = cells_of(found, weights)
        self.gauges = [[_gauge(p.read(state), p.n) if p.n and not p.signs else None for p in c.parts]
                       for c in self.form.cells if c.units]  # fmt: skip

    def go_(self, state: State) -> None:
        """Move weights as the network moves to its form."""
        for a, element in self.steps:
            a.apply_(state, element)
        self._balance_(state, self.gauges)

    def move_(self, state: State, element: Element) -> None:
        """Move weights as the form moves by an element of its group."""
        Q, form = element.stream, self.form
        if Q is not None:
            for s, R in [(s, Q) for s in form.vectors] + [(s, Q.abs()) for s in form.gains if not form.turns]:
                state.write(s, turned(s.read(state), R))
        for cell in self.cells:
            cell.write(cell.moved(cell.read(state), element.cells.get(cell.name)), state)

    def back_(self, state: State) -> None:
        """Move weights as the form moves to the network."""
        self._balance_(state, [[A if A is None else torch.linalg.inv(A) for A in each] for each in self.gauges])
        for a, element in reversed(self.steps):
            a.apply_(state, a.inverse(element))

    def _balance_(self, state: State, gauges: list[list[Tensor | None]]) -> None:
        for cell, each in zip(self.cells, gauges, strict=True):
            X = zip(cell.parts, cell.read(state), each, strict=True)
            cell.write([acted(x, part.n, A) for part, x, A in X], state)


def _gauge(x: Tensor, n: int) -> Tensor:
    """Return the group elements that balance points, 1 where they stay as they are."""
    y = balanced(x, n)
    inverse = torch.linalg.lstsq(x[..., :n, :], y[..., :n, :]).solution
    still = (x == y).flatten(-2).all(-1)[..., None, None]
    return torch.linalg.inv(torch.where(still, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), inverse))


@dataclass(frozen=True)
class Rewriting:
    """Group elements that lead from one network to another, with the same function.

    They depend on the networks alone. So they also move weights with an adapter on them to such of the same function,
    and what an adapter adds to a matrix moves by a linear map: its rank stays.

    Attributes
    ----------
    there, back : object
        The ways of the two networks to their canonical forms with balanced heads.
    element : Element
        What moves the form of the first network to that of the second.

    Examples
    --------
    See :func:`rewriting`.

    >>> from quotient_manifolds.symmetries.whole import Rewriting
    >>> Rewriting.__dataclass_params__.frozen
    True
    """

    there: _Way
    element: Element
    back: _Way

    @property
    def gains(self) -> set[str]:
        """The names of gains that must have the first network's values, for the basis of what they scale has moved."""
        form = self.there.form
        return {s.name for s in form.gains} if form.turns and self.element.stream is not None else set()

    @torch.no_grad()
    def of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move all weights of a network with other values than the first one's; the values are in float64."""
        with on_cpu():
            state = State(weights)
            self.there.go_(state)
            self.there.move_(state, self.element)
            self.back.back_(state)
            return {name: state[name] for name in weights}


@torch.no_grad()
def rewriting(base: nn.Module, other: nn.Module, *, tolerance: float = 1e-8) -> Rewriting:
    """Find by which elements of its group a network was rewritten.

    Parameters
    ----------
    base, other : nn.Module
        Networks as for :func:`align_models`; they are left unchanged.
    tolerance : float
        Norm of what may remain between the weights, relative to all.

    Returns
    -------
    Rewriting

    Raises
    ------
    ValueError
        No such elements are found; or as for :func:`align_models`.

    Examples
    --------
    >>> import copy, torch
    >>> from quotient_manifolds.symmetries import ALL, find, move_
    >>> from quotient_manifolds.symmetries.whole import rewriting
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> base = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    >>> other, x = copy.deepcopy(base), torch.randn(3, 5, 8, dtype=torch.float64)
    >>> _ = move_(other, find(other, scope=ALL))
    >>> way = rewriting(base, other)
    >>> with torch.no_grad():
    ...     for p in base.parameters():  # as a fine-tune does
    ...         p += 0.1 * torch.randn_like(p)
    >>> _ = other.load_state_dict({**other.state_dict(), **way.of(dict(base.named_parameters()))})
    >>> torch.allclose(base(x), other(x))
    True
    """
    weights, target = weights_of(base), weights_of(other)
    size = _norm(target.values())
    with on_cpu():
        there, back = _Way(base), _Way(other)
        for by in (MOVES[2:], MOVES):  # heads and neurons that stayed in their places are found for certain
            _, alignment = align_models(other, base, by=by)
            found = Rewriting(there, alignment.element, back)
            moved = found.of(weights)
            apart = {name: _norm([moved[name] - p]) for name, p in target.items()}
            if _norm([torch.tensor([*apart.values()])]) <= tolerance * size:
                return found
    worst = max(apart, key=apart.__getitem__)
    raise ValueError(
        f"no symmetries are found that lead from one network to the other: moved by the best, they differ by "
        f"{sum(d**2 for d in apart.values()) ** 0.5 / size:.1g} of the norm of all weights, most in {worst}"
    )


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(in_double(t.detach()))) ** 2 for t in tensors) ** 0.5
