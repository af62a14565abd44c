"""What may be permuted in a network, as batched points: heads, groups of heads that share keys, hidden neurons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import eq

import torch
from torch import Tensor

from ..actions import State
from ..found import Symmetries
from ..pairs import SymmetricPair
from ..refusals import Claim, Refusal
from ..slots import GL, Slot, SlotStack
from ..wiring import Wiring


@dataclass(frozen=True, eq=False)
class Part:
    """Weights that all units of a cell have, a pair (G, H) with a group or rows that only move with their unit.

    Attributes
    ----------
    kind : str
        ``"qk"``, ``"vo"``, ``"neurons"`` or ``"scores"``.
    points : list of tuple of Slot
        A point a unit or, with ``columns``, one point whose columns are the units.
    group : GL
        How rows become points.
    n : int
        Rows of G; 0 if no group acts, or none may.
    columns : bool
    queries : Tensor or None
        For every query head of a unit the numbers of its rows, (queries, rows).
    signs : bool
        Of the group only ±1 act.
    """

    kind: str
    points: list[tuple[Slot, ...]]
    group: GL
    n: int = 0
    columns: bool = False
    queries: Tensor | None = None
    signs: bool = False

    @cached_property
    def rows(self) -> SlotStack:
        """All points."""
        return SlotStack(self.points, self.group)

    @property
    def slots(self) -> list[Slot]:
        """The slots of all points."""
        return [s for point in self.points for s in point]

    def read(self, state: State) -> Tensor:
        """Copy the weights: (units, planes, n + m, h), with one plane for GL(h) and h = 1 for a diagonal group."""
        x = self.rows.gather({name: state[name] for name in self.rows.names})
        x = x if self.group.diagonal else x.unsqueeze(1)
        return x.transpose(0, 1) if self.columns else x

    def write(self, x: Tensor, state: State) -> None:
        """Write what :meth:`read` reads."""
        x = x.transpose(0, 1) if self.columns else x
        copies = {name: state[name].clone(memory_format=torch.contiguous_format) for name in self.rows.names}
        state.update(copies)
        self.rows.scatter_(x if self.group.diagonal else x.squeeze(1), state)

    def arranged(self, x: Tensor, move: Move) -> Tensor:
        """Permute the units, and the queries within them."""
        x = x[move.order.to(x.device)]
        if self.queries is None:
            return x
        source = torch.arange(x.shape[2]).repeat(len(x), 1)
        source[:, self.queries.flatten()] = self.queries[move.queries].flatten(1)
        return torch.take_along_dim(x, source.to(x.device)[:, None, :, None], 2)


@dataclass(frozen=True)
class Move:
    """How the units of a cell move.

    Attributes
    ----------
    order : Tensor
        For every unit of the result the unit that comes there, (units,).
    queries : Tensor
        The same for the query heads within every unit of the result, (units, queries).
    inner : dict of int to Tensor
        By the number of a part the group elements A, (units, planes, h, h): G → G A⁻¹, H → H Aᴴ. A part that is not
        there is only permuted.

    Examples
    --------
    See :class:`Alignment`.

    >>> import torch
    >>> from quotient_manifolds.symmetries.whole import Move
    >>> Move(torch.tensor([1, 0]), torch.zeros(2, 1, dtype=torch.long)).inner
    {}
    """

    order: Tensor
    queries: Tensor
    inner: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Cell:
    """Units that may be permuted: heads of a layer, or of all layers that share a table of scores, or neurons.

    ``others`` are weights that are read and written with them; one cell, without units, has all of no other cell.
    """

    name: str
    parts: tuple[Part, ...] = ()
    units: int = 0
    queries: int = 1
    others: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of its weights, each once."""
        return list(dict.fromkeys([name for part in self.parts for name in part.rows.names] + [*self.others]))

    def identity(self) -> Move:
        """Return the move that changes nothing."""
        return Move(torch.arange(self.units), torch.arange(self.queries).repeat(self.units, 1))

    def read(self, state: State) -> list[Tensor]:
        """Copy the points of all parts."""
        return [part.read(state) for part in self.parts]

    def write(self, X: Sequence[Tensor], state: State) -> None:
        """Write what :meth:`read` reads."""
        for part, x in zip(self.parts, X, strict=True):
            part.write(x, state)

    def moved(self, X: Sequence[Tensor], move: Move | None) -> list[Tensor]:
        """Move the points of all parts."""
        if move is None:
            return list(X)
        arranged = (part.arranged(x, move) for part, x in zip(self.parts, X, strict=True))
        return [acted(x, self.parts[k].n, move.inner.get(k)) for k, x in enumerate(arranged)]


def acted(x: Tensor, n: int, A: Tensor | None) -> Tensor:
    """Return (G A⁻¹, H Aᴴ) for points x = (G, H)."""
    if A is None:
        return x
    G, H = x[..., :n, :], x[..., n:, :]
    return torch.cat([torch.linalg.solve_ex(A, G, left=False).result, H @ A.mH], dim=-2)


def cells_of(symmetries: Symmetries, weights: Mapping[str, Tensor]) -> list[Cell]:
    """List the cells of a network in canonical form; none shares a weight, or has what is computed."""
    w = symmetries.wiring or Wiring()
    by_module = defaultdict[str, list[Claim]](list)
    for p in symmetries.claims:
        if p.G and p.kind in ("qk", "vo") and (isinstance(p, SymmetricPair) or (p.kind == "qk" and w.qk_norms)):
            by_module[p.module].append(p)
    found = _bound([c for name, claims in by_module.items() for c in _heads(name, claims)], w)
    scaled = {p.H[0]: p for p in symmetries.pairs if p.part == "neurons"}
    for name, slots in w.hidden:
        pair, parts = scaled.get(slots[-1]), []
        if pair is not None:
            parts.append(Part("neurons", [pair.slots], pair.group, pair.n, True))
            slots = tuple(s for s in slots if s not in pair.slots)
        if slots:
            n = sum(s.size[0] for s in slots[:-1]) if name in w.odd else 0
            parts.append(Part("neurons", [slots], GL(slots[0].size[1], diagonal=True), n, True, signs=n > 0))
        found.append(Cell(name, tuple(parts), parts[0].group.h))
    taken, kept = set[str](), []
    for cell in found:
        if taken.isdisjoint(cell.names) and all(name in weights for name in cell.names):
            taken.update(cell.names)
            kept.append(cell)
    return kept


def _heads(name: str, claims: Sequence[Claim]) -> list[Cell]:
    """Return the cell of one attention layer; none if its heads do not look alike, or values or queries are unknown."""
    shared = defaultdict[tuple[str, str], dict[Hashable, Claim]](dict)
    for p in claims:  # what is refused has not been merged
        units, key = shared[p.kind, p.part], p.G if p.kind == "vo" else p.H
        one = units.get(key, p)
        units[key] = replace(one, G=unique(one.G + p.G), H=unique(one.H + p.H))
    layouts = {
        (kind, _group(p), tuple(s.size[0] for s in p.G), tuple(s.size[0] for s in p.H))
        for (kind, _), units in shared.items()
        for p in units.values()
    }
    sizes = {len(units) for units in shared.values()}
    if {kind for kind, _ in shared} != {"qk", "vo"} or len(sizes) > 1 or len(layouts) > len(shared):
        return []
    outputs = next(iter(shared["vo", ""].values())).H
    queries = sum(s.name == outputs[0].name for s in outputs)
    parts = []
    for (kind, _), units in shared.items():
        first, *_ = units.values()
        n, m = (sum(s.size[0] for s in side) for side in (first.G, first.H))
        rows = torch.arange(n, n + m) if kind == "vo" else torch.arange(n)
        each = rows.view(queries, -1) if queries > 1 else None
        group = _group(first)
        free = 0 if group is None else n
        parts.append(Part(kind, [p.slots for p in units.values()], group or GL(first.G[0].size[1]), free, queries=each))
    return [Cell(name, tuple(parts), sizes.pop(), queries)]


def _group(p: Claim) -> GL | None:
    """Return what acts on a head."""
    return None if isinstance(p, Refusal) else p.group


def unique(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return slots without repetitions."""
    return tuple(dict.fromkeys(slots))


def _levels(name: str) -> list[str]:
    """Return the parts of a module's name without the numbers of layers."""
    return [part for part in name.split(".") if part and not part.isdigit()]


def _bound(cells: Sequence[Cell], w: Wiring) -> list[Cell]:
    """Join cells whose scores come from one table (T5's layers share that of the first); the table moves with them."""
    tables = defaultdict[str, tuple[Slot, ...]](tuple)  # by the module that they lie in
    for _, slots in w.score_tables:
        tables[slots[0].name.rsplit(".", 2)[0]] += slots
    joined = defaultdict[str, list[Cell]](list)
    for c in cells:  # the table of its own layer, or else of another one of the same stack
        alike = (t for t in tables if all(map(eq, _levels(c.name), _levels(t))))  # a table may lie deeper than its cell
        common = {t: sum(map(eq, c.name.split("."), t.split("."))) for t in alike}
        own = max(common, key=common.__getitem__, default=c.name)
        joined[own].append(c)
    found = []
    for name, each in joined.items():
        parts, scores = [part for c in each for part in c.parts], tables[name]
        if scores:
            parts.append(Part("scores", [scores], GL(scores[0].size[1], diagonal=True), columns=True))
        found.append(replace(each[0], parts=tuple(parts)))
    return found
