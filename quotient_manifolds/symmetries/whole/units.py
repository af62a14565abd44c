"""What may be permuted in a network, as batched points: heads, groups of heads that share keys, hidden neurons."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..blocks import GL, Block, BlockStack
from ..pairs import SymmetricPair
from .canonical import CanonicalForm
from .wiring import State, Wiring


@dataclass(frozen=True, eq=False)
class Part:
    """Weights that all units of a cell have, a pair (G, H) with a group or rows that only move with their unit.

    Attributes
    ----------
    kind : str
        ``"qk"``, ``"vo"``, ``"neurons"`` or ``"scores"``.
    rows : BlockStack
        A point a unit or, with ``columns``, one point whose columns are the units.
    group : GL
        How rows become points.
    n : int
        Rows of G; 0 if no group acts.
    columns : bool
    queries : Tensor or None
        For every query head of a unit the numbers of its rows, (queries, rows).
    """

    kind: str
    rows: BlockStack
    group: GL
    n: int = 0
    columns: bool = False
    queries: Tensor | None = None

    def read(self, state: State) -> Tensor:
        """Copy the weights: (units, planes, n + m, h), with one plane for GL(h) and h = 1 for a diagonal group."""
        x = self.group.to_point(self.rows.gather({p: state.of(p) for p in self.rows.parameters()}))
        x = x if self.group.diagonal else x.unsqueeze(1)
        return x.transpose(0, 1) if self.columns else x

    def write(self, x: Tensor, state: State) -> None:
        """Write what :meth:`read` reads."""
        x = x.transpose(0, 1) if self.columns else x
        rows = self.group.from_point(x if self.group.diagonal else x.squeeze(1))
        for p in set(self.rows.parameters()) - state.keys():
            state[p] = state.of(p).clone(memory_format=torch.contiguous_format)
        self.rows.scatter_(rows, state)


@dataclass(frozen=True)
class Move:
    """How the units of a cell move.

    Attributes
    ----------
    order : Tensor
        For every unit of the result the unit that comes there, (units,).
    queries : Tensor
        The same for the query heads within every unit of the result, (units, queries).
    inner : tuple of Tensor or None
        For every part the group elements A, (units, planes, h, h): G → G A⁻¹, H → H Aᴴ.

    Examples
    --------
    See :class:`Alignment`.

    >>> import torch
    >>> from quotient_manifolds.symmetries.whole import Move
    >>> Move(torch.tensor([1, 0]), torch.zeros(2, 1, dtype=torch.long)).inner
    ()
    """

    order: Tensor
    queries: Tensor
    inner: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Cell:
    """Units that may be permuted: heads of a layer, or of all layers that share a table of scores, or neurons."""

    name: str
    parts: tuple[Part, ...]
    units: int
    queries: int = 1
    blocks: tuple[Block, ...] = field(default=(), repr=False)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that its weights belong to, each once."""
        return list(dict.fromkeys(p for part in self.parts for p in part.rows.parameters()))

    def identity(self) -> Move:
        """Return the move that changes nothing."""
        queries = torch.arange(self.queries).repeat(self.units, 1)
        return Move(torch.arange(self.units), queries, (None,) * len(self.parts))

    def random(self, generator: torch.Generator) -> Move:
        """Draw an order of the units, and of the queries in each."""
        order, queries = (
            torch.rand(n, generator=generator).argsort() for n in (self.units, (self.units, self.queries))
        )
        return Move(order, queries, (None,) * len(self.parts))

    def arranged(self, k: int, x: Tensor, move: Move) -> Tensor:
        """Permute the units of the points of a part, and the queries within them."""
        x, rows = x[move.order.to(x.device)], self.parts[k].queries
        if rows is None:
            return x
        source = torch.arange(x.shape[2]).repeat(self.units, 1)
        source[:, rows.flatten()] = rows[move.queries].flatten(1)
        return torch.take_along_dim(x, source.to(x.device)[:, None, :, None], 2)

    def moved(self, k: int, x: Tensor, move: Move) -> Tensor:
        """Move the points of a part."""
        return acted(self.arranged(k, x, move), self.parts[k].n, move.inner[k])


def acted(x: Tensor, n: int, A: Tensor | None) -> Tensor:
    """Return (G A⁻¹, H Aᴴ) for points x = (G, H)."""
    if A is None:
        return x
    G, H = x[..., :n, :], x[..., n:, :]
    return torch.cat([torch.linalg.solve_ex(A, G, left=False).result, H @ A.mH], dim=-2)


def cells_of(form: CanonicalForm, model: nn.Module) -> list[Cell]:
    """List the cells of a network from its canonical form; those with weights that are no parameters are left out."""
    w = form.wiring or Wiring()
    by_module: dict[str, list[SymmetricPair]] = {}
    for p in form.pairs:
        if p.G and p.kind in ("qk", "vo") and (p.group is not None or (p.kind == "qk" and w.qk_norms)):
            by_module.setdefault(p.module, []).append(p)
    found = [*_bound([c for name, pairs in by_module.items() for c in _heads(name, pairs)], w, model)]
    scaled = {p.H[0].key: p for p in form.pairs if p.part == "neurons" and p.group is not None}
    for name, blocks in w.hidden:
        pair = scaled.get(blocks[-1].key)
        taken = {b.key for b in (*pair.G, *pair.H)} if pair else set()
        rest, plain = tuple(b for b in blocks if b.key not in taken), GL(blocks[-1].size[1], diagonal=True)
        parts = [Part("neurons", BlockStack([pair.G + pair.H]), pair.usable_group(), pair.n, True)] if pair else []
        parts += [Part("neurons", BlockStack([rest]), plain, columns=True)] if rest else []
        found.append(Cell(name, tuple(parts), plain.h, 1, blocks))
    return [c for c in found if all(isinstance(p, nn.Parameter) for p in c.parameters)]


def _heads(name: str, pairs: Sequence[SymmetricPair]) -> list[Cell]:
    """Return the cell of one attention layer; none if its heads do not look alike, or values or queries are unknown."""
    shared: dict[tuple[str, str], dict[Hashable, SymmetricPair]] = {}
    for p in pairs:  # pairs without a group have not been merged
        units = shared.setdefault((p.kind, p.part), {})
        key = tuple(b.key for b in (p.G if p.kind == "vo" else p.H))
        one = units.get(key)
        together = p if one is None else replace(one, G=_union(one.G, p.G), H=_union(one.H, p.H))
        units[key] = together
    sizes = {len(units) for units in shared.values()}
    if {kind for kind, _ in shared} != {"qk", "vo"} or len(sizes) > 1:
        return []
    outputs = next(iter(shared["vo", ""].values())).H
    queries = sum((b.module, b.attribute) == (outputs[0].module, outputs[0].attribute) for b in outputs)
    parts, blocks = [], list[Block]()
    for (kind, _), units in shared.items():
        ps = list(units.values())
        if len({(p.group, p.layout) for p in ps}) > 1:
            return []
        n, m = ps[0].n, ps[0].m
        rows = torch.arange(n, n + m) if kind == "vo" else torch.arange(n)
        stack, group = BlockStack([p.G + p.H for p in ps]), ps[0].group
        each = rows.view(queries, -1) if queries > 1 else None
        parts.append(Part(kind, stack, group or GL(ps[0].G[0].size[1]), n if group else 0, queries=each))
        blocks += [b for p in ps for b in p.G + p.H]
    return [Cell(name, tuple(parts), sizes.pop(), queries, tuple(blocks))]


def _union(one: tuple[Block, ...], other: tuple[Block, ...]) -> tuple[Block, ...]:
    return tuple({b.key: b for b in one + other}.values())


def _bound(cells: Sequence[Cell], w: Wiring, model: nn.Module) -> list[Cell]:
    """Join cells whose scores come from one table (T5's layers share that of the first); the table moves with them."""
    names = {module: name for name, module in model.named_modules()}
    tables: dict[str, list[Block]] = {}  # by the attention layer in which they lie, or ""
    for _, blocks in w.score_tables:
        path = names[blocks[0].module]
        owner = next((c.name for c in cells if f"{path}.".startswith(f"{c.name}.")), "")
        tables.setdefault(owner, []).extend(blocks)
    joined: dict[str, list[Cell]] = {}
    for c in cells:
        alike = (o for o in tables if o in ("", c.name) or _plain(o) == _plain(c.name))
        joined.setdefault(c.name if c.name in tables else next(alike, c.name), []).append(c)
    found = []
    for name, some in joined.items():
        parts, blocks = [p for c in some for p in c.parts], [b for c in some for b in c.blocks]
        if name in tables:
            rows = tuple(tables[name])
            parts.append(Part("scores", BlockStack([rows]), GL(rows[0].size[1], diagonal=True), columns=True))
            blocks += rows
        found.append(replace(some[0], parts=tuple(parts), blocks=tuple(blocks)))
    return found


def _plain(path: str) -> str:
    """Replace the numbers in a path."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))
