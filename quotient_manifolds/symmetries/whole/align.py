"""Bring two networks of one architecture into the same coordinates, modulo all their symmetries.

Both are brought into canonical form, with heads and scaled neurons balanced (GᴴG = HᴴH). What is left is the group of
:class:`Element`: the stream's rotation Q, permutations of heads, of queries that share keys, and of neurons, and group
elements A inside heads and of neurons. All steps lower one function of it, the squared distance of all weights,

    F(g) = Σ ‖W_reference − g W_model‖².
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...linalg import finite, in_double
from ...weights import check_whole, weights_of
from ..actions import State
from ..discovery import ALL, find
from ..folding import canonical_form, write_values
from ..wiring import Wiring
from .fits import balanced, matched, permutation, refined, rotation, turned
from .units import Cell, Move, Part, cells_of, unique

#: What :func:`align_models` may move, beyond the canonical form.
MOVES = ("permutations", "rotation", "heads", "scales")
#: A sweep that lowers the objective by less, relatively, is the last.
_TOLERANCE = 1e-4


def on_cpu() -> AbstractContextManager[Any]:
    """Whatever the default device: orders and scores are made on the CPU, weights stay where they are."""
    cpu = torch.device("cpu")  # as a context it would double the time, and is the default as a rule
    return nullcontext() if torch.get_default_device() == cpu else cpu


@dataclass(frozen=True)
class Element:
    """An element of a network's group, in its canonical form with balanced heads.

    Attributes
    ----------
    stream : Tensor or None
        Q, (d, d): the vectors x in the stream become Q x. None if nothing is known to act on it.
    cells : dict of str to Move
        How heads and neurons move, by layer.

    Examples
    --------
    See :class:`Alignment`.

    >>> from quotient_manifolds.symmetries.whole import Element
    >>> Element(None, {}).cells
    {}
    """

    stream: Tensor | None
    cells: dict[str, Move]

    @torch.no_grad()
    def of(self, model: nn.Module) -> nn.Module:
        """Return the moved canonical form of a network, a copy of the same function."""
        with on_cpu():
            form = Form(model)
            form.write(self)
        return form.model


@dataclass(frozen=True)
class Alignment:
    """What :func:`align_models` has found.

    Attributes
    ----------
    reference : Module
        A copy of the reference in the coordinates that both share: in canonical form, its heads balanced.
    element : Element
        What moves the canonical form of the other network there.
    before, after : dict of str to float
        Distances of the two canonical forms by kind of weight, before and after: ``"qk"``, ``"vo"``, ``"neurons"``,
        ``"scores"`` and ``"others"`` (embeddings, classifiers, biases).
    size : float
        The norm of the reference's canonical form.
    history : tuple of float
        Squared distance in canonical form, after the better start, and after each sweep; it never rises.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import move_
    >>> from quotient_manifolds.symmetries.whole import align_models
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> one = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    >>> other = copy.deepcopy(one)
    >>> _ = move_(other)
    >>> aligned, found = align_models(one, other)
    >>> found.distance < 1e-8 * found.size
    True
    >>> found.element.cells["layers.0.self_attn"].order
    tensor([0, 1])
    """

    reference: nn.Module = field(repr=False)
    element: Element = field(repr=False)
    before: dict[str, float]
    after: dict[str, float]
    size: float
    history: tuple[float, ...]

    @property
    def distance(self) -> float:
        """The Euclidean distance of all weights of the aligned network from those of the reference."""
        return sum(d**2 for d in self.after.values()) ** 0.5


@torch.no_grad()
def align_models(reference: nn.Module, model: nn.Module, *, by: Collection[str] = MOVES) -> tuple[nn.Module, Alignment]:
    """Move a network by its symmetries to where its weights are nearest to those of another; neither is changed.

    LoRA adapters of the network do not fit the copy that is moved; :func:`quotient_manifolds.adapters.carry` carries
    them there.

    Parameters
    ----------
    reference, model : nn.Module
        Networks of one known architecture, see :func:`register_wiring`, of one dtype, at least float32.
    by : collection of {"permutations", "rotation", "heads", "scales"}
        What may move besides the canonical form, as far as the architecture allows it: the order of heads, neurons and
        entries of the stream; the stream by an orthogonal matrix; heads by GL(h), or planes under RoPE by complex
        numbers; gated and rectified neurons by their scale, those of tanh by their sign.

    Returns
    -------
    aligned : nn.Module
        A copy of the model's function, to be compared with ``alignment.reference``.
    alignment : Alignment

    Raises
    ------
    ValueError
        Networks that differ in their parameters, dtypes or devices, are in half precision, or of which no wiring is
        known.

    Notes
    -----
    The minimum is local. Descent begins where the rotation fits the weights whose other index is known (tokens,
    positions, pixels, classes), or at the result of permutations alone, if that is lower. A copy that was moved by
    symmetries is found wherever these weights determine the rotation. One sign is not tried: that of the whole stream
    between LayerNorms, where its entries are only permuted.

    Examples
    --------
    See :class:`Alignment`.

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import align_models
    >>> align_models(nn.Linear(2, 2), nn.Linear(2, 2))
    Traceback (most recent call last):
    ValueError: no wiring is known of a Linear; see quotient_manifolds.symmetries.whole.register_wiring
    """
    if isinstance(by, str) or not set(by) <= set(MOVES):
        raise ValueError(f"by is a collection of {', '.join(MOVES)}, got {by!r}")
    _check(reference, model)
    with on_cpu():
        a, b = Form(reference), Form(model)
        descent, still = _Descent(a, b, by, {}), Element(None, {c.name: c.identity() for c in b.cells if c.units})
        found = [descent.costs(still), *descent.search(still)]
        b.write(found[-1].element)
    first, last = ({kind: square**0.5 for kind, square in f.squares.items()} for f in (found[0], found[-1]))
    return b.model, Alignment(a.model, found[-1].element, first, last, descent.size**0.5, tuple(f.total for f in found))


def _check(reference: nn.Module, model: nn.Module) -> None:
    """Raise for a network that cannot be brought to the reference's coordinates."""
    for m in (reference, model):
        check_whole(m)
    both = [{n: (tuple(p.shape), p.dtype, p.device) for n, p in m.named_parameters()} for m in (reference, model)]
    for name in {**both[0], **both[1]}:
        one, other = (side.get(name, "missing") for side in both)
        if one != other:
            raise ValueError(f"the networks differ in the parameter {name!r}: {one} and {other}")
    for name, p in (*reference.named_parameters(), *model.named_parameters()):
        if p.dtype not in (torch.float32, torch.float64) or not finite(p):
            raise ValueError(f"{name} has dtype {p.dtype} or is not finite; align finite weights in float32 or float64")


class Form:
    """A network's copy in canonical form with balanced heads, its cells, and what lies in its stream."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.weights: dict[str, Tensor] = dict(weights_of(self.model))
        state, found = State(self.weights), find(self.model, scope=ALL).of_full_rank()
        self.form = canonical_form(self.weights, found, state=state)
        self.form.values.clear()  # they are in the state
        if not found.wired:
            name = type(model).__name__
            raise ValueError(f"no wiring is known of a {name}; see quotient_manifolds.symmetries.whole.register_wiring")
        w = found.wiring or Wiring()
        norms = [s.norm for s in w.sites]
        self.centring = any(n.centring for n in norms)
        self.turns = any(a.kind == "rotation" for a in found.actions)
        #: Rows that are vectors in the stream, and rows of one number an entry, which its sign does not change.
        self.vectors = unique([*w.vectors, *w.alike, *(n.shift for n in norms if n.shift)])
        self.gains = unique([*(n.gain for n in norms if n.gain), *(s for _, s, _ in w.scales)])
        one_width = len({s.size[1] for s in (*self.vectors, *self.gains)}) == 1
        if not w.closed or not one_width or not all(s.name in self.weights for s in self.vectors):
            self.vectors = ()
        cells = cells_of(self.form.symmetries, self.weights)
        for part in (part for cell in cells for part in cell.parts if part.n and not part.signs):
            part.write(balanced(part.read(state), part.n), state)
        write_values(self.weights, state)
        taken = {name for cell in cells for name in cell.names}
        self.cells = [*cells, Cell("", others=tuple(name for name in self.weights if name not in taken))]

    def write(self, element: Element) -> None:
        """Move the network."""
        for cell in self.cells:
            write_values(self.weights, self.moved(cell, element))

    def turned(self, cell: Cell, Q: Tensor | None) -> State:
        """Return the weights of a cell after a rotation of the stream."""
        state, chosen = State(self.weights), set(cell.names)
        for rows, R in ((self.vectors, Q), (self.gains, None if Q is None or self.turns else Q.abs())):
            for s in rows:
                if R is not None and s.name in chosen:
                    state.write(s, turned(s.read(state), R))
        return state

    def moved(self, cell: Cell, element: Element) -> State:
        """Return the weights of a cell after a move."""
        state = self.turned(cell, element.stream)
        cell.write(cell.moved(cell.read(state), element.cells.get(cell.name)), state)
        return state


@dataclass(frozen=True)
class _Found:
    """An element, and squared distances by kind."""

    element: Element
    squares: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.squares.values())


class _Descent:
    """The steps that lower the objective."""

    def __init__(self, a: Form, b: Form, by: Collection[str], matches: dict[object, Move]) -> None:
        self.a, self.b, self.by, self.matches = a, b, set(by), matches
        if [(c.name, c.units, c.queries) for c in a.cells] != [(c.name, c.units, c.queries) for c in b.cells]:
            raise ValueError("the networks differ in their heads or neurons; compare networks of one architecture")
        self.cells = [replace(cell, parts=tuple(map(self.limited, cell.parts))) for cell in b.cells]
        weights = list(a.weights.values())
        self.size = sum(map(_square, weights))
        self.least = 100 * max(torch.finfo(p.dtype).eps for p in weights) ** 2 * self.size  # rounding

    def limited(self, part: Part) -> Part:
        """Take the group from a part on which none may act."""
        return part if ("scales" if part.kind == "neurons" else "heads") in self.by else replace(part, n=0)

    def search(self, still: Element) -> list[_Found]:
        """Descend from the better of two starts; return what was found, lower and lower."""
        found = [self.costs(self.turned(still, known=True), improve=True)]
        if found[0].total > self.least:
            alone = _Descent(self.a, self.b, {"permutations"}, self.matches)
            start = alone.search(still)[-1].element if self.by > alone.by else still
            found = [min(*found, self.costs(start, improve=True), key=lambda f: f.total)]
        while found[-1].total > self.least:
            trial = self.turned(found[-1].element)
            if _same(trial.stream, found[-1].element.stream):
                break
            lower = self.costs(trial, improve=True)
            if not lower.total < (1 - _TOLERANCE) * found[-1].total:
                break
            found.append(lower)
        return found

    def costs(self, element: Element, improve: bool = False) -> _Found:
        """Return squared distances by kind, of an element or, with ``improve``, of one with better moves of cells."""
        squares, moves = defaultdict[str, float](float), dict(element.cells)
        for cell, mine in zip(self.cells, self.a.cells, strict=True):
            at, state = State(self.a.weights), self.b.turned(cell, element.stream)
            X, Y = mine.read(at), cell.read(state)
            if improve and cell.units:
                moves[cell.name] = self.better(cell, X, Y, moves[cell.name], element.stream)
            for part, square in zip(cell.parts, _squares(cell, X, Y, moves.get(cell.name)), strict=True):
                squares[part.kind] += square
            for name in cell.names:
                rest = (state[name] - at[name]).contiguous()
                for s in (s for part in cell.parts for s in part.slots if s.name == name):
                    s.of(rest).zero_()
                squares["others"] += _square(rest)
        return _Found(replace(element, cells=moves), dict(squares))

    def turned(self, element: Element, known: bool = False) -> Element:
        """Fit the rotation or permutation of the stream; ``known``: only to rows of no cell, whose index is known."""
        a, b = self.a, self.b
        free = b.turns and "rotation" in self.by
        if not b.vectors or not (free or "permutations" in self.by):
            return element
        d = b.vectors[0].size[1]
        M, N = torch.zeros(2, d, d, dtype=torch.float64)
        for cell in self.cells[-1:] if known else self.cells:
            state, chosen = b.moved(cell, replace(element, stream=None)), set(cell.names)
            for into, mine, others in ((M, a.vectors, b.vectors), (N, a.gains, b.gains)):
                for one, other in zip(mine, others, strict=True):
                    if other.name in chosen:
                        into += (one.read(State(a.weights)).mT @ other.read(state)).cpu()
        return replace(element, stream=rotation(M, b.centring) if free else permutation(M, N, signs=not b.centring))

    def better(self, cell: Cell, X: list[Tensor], Y: list[Tensor], move: Move, stream: Tensor | None) -> Move:
        """Match units anew and choose group elements; if that does not help, keep units and choose elements."""
        tried, now = [move], sum(_squares(cell, X, Y, move))
        if "permutations" in self.by:
            key = (cell.name, *(p.n for p in cell.parts), stream if stream is None else hash(stream.numpy().tobytes()))
            if key not in self.matches:
                self.matches[key] = matched(cell, X, Y)
            new = self.matches[key]
            if not (torch.equal(new.order, move.order) and torch.equal(new.queries, move.queries)):
                tried.insert(0, new)
        trials = (refined(cell, X, Y, trial) for trial in tried)
        return next((trial for trial in trials if sum(_squares(cell, X, Y, trial)) < now), move)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _squares(cell: Cell, X: list[Tensor], Y: list[Tensor], move: Move | None) -> list[float]:
    """Return the squared distances of the parts of a cell."""
    return [_square(x - y) for x, y in zip(X, cell.moved(Y, move), strict=True)]


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(in_double(x.detach())) ** 2)
