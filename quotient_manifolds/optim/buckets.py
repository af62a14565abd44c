"""Pairs of equal shape that take a step together: their state, and what one step needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..linalg import at_least_float32, column_rank_ratio
from ..symmetries import GL, PairStack, SymmetricPair
from ..symmetries.blocks import BlockStack
from ..symmetries.modules import is_sharded
from .preconditioner import Preconditioner, gram, trace, wide

__all__ = ["PairBucket", "PairStep", "Part", "check_anchors", "group_of", "is_flipped"]


#: So many numbers of a factor, its gradient, its moment and intermediate results fit in the second-level cache.
_IN_CACHE = 2**16


@dataclass(frozen=True)
class Part:
    """Rows of one factor of some pairs of a bucket, as views of the parameters, (pairs, …, rows, h).

    ``side`` is 0 for G and 1 for H, ``pairs`` are the positions among the pairs that take a step, ``home`` those in the
    bucket, ``rows`` those of the rows in the factor, and ``decays`` is False for a bias. On the CPU a part is small
    enough to stay in the cache between operations, but at least one view of a parameter; elsewhere it is as large as
    possible.
    """

    group: GL
    side: int
    pairs: slice
    home: slice
    rows: slice
    decays: bool
    runs: tuple[Any, ...]

    def _views(self, tensors: Mapping[Tensor, Tensor] | None) -> list[Tensor]:
        found = [r.first.tensor for r in self.runs]
        given = [(p if tensors is None else tensors[p]).detach() for p in found]
        return [r.view(t.contiguous()) for r, t in zip(self.runs, given, strict=True)]

    def read(self, tensors: Mapping[Tensor, Tensor] | None = None) -> Tensor:
        """Read the rows of parameters, or of their entries in ``tensors``, in float32 at least; a view if possible."""
        views = self._views(tensors)
        if len(views) == 1:
            x = views[0]
        elif views[0].stride(1) < views[0].stride(2):  # in the order in which they lie
            x = torch.cat([v.transpose(1, 2) for v in views]).transpose(1, 2)
        else:
            x = torch.cat(views)
        x = self.group.to_point(x)
        return x if x.is_complex() else x.to(at_least_float32(x.dtype))

    def write_(self, x: Tensor) -> None:
        """Write the rows, rounded to their dtype; nothing is to be done for a view that was changed in place."""
        parts = self.group.from_point(x).split([r.count for r in self.runs])
        for run, part in zip(self.runs, parts, strict=True):
            target = run.first.tensor.detach()
            whole = target.contiguous()
            view = run.view(whole)
            if view.is_meta or view.data_ptr() != part.data_ptr():
                view.copy_(part)
            if whole is not target:
                target.copy_(whole)

    def room(self, count: int, rows: int, columns: int | None = None) -> Tensor:
        """Make zeros for a whole factor of all pairs, (count, …, rows, h), with the memory layout of its rows."""
        like = self.read()
        *batch, _, h = like.shape[1:]
        if columns is not None:
            return like.real.new_zeros(count, *batch, rows, columns)
        if like.stride(-2) < like.stride(-1):
            return like.new_zeros(count, *batch, h, rows).mT
        return like.new_zeros(count, *batch, rows, h)


def of_part(A: Tensor, part: Part) -> Tensor:
    """Return a view of the matrices of a part in (pairs, …, 2, h, h)."""
    return A.select(-3, part.side)[part.pairs]


class PairBucket:
    """Pairs of equal shape and scale in one parameter group, oriented so that H is the anchor: of full column rank.

    ``members`` are their positions among the optimiser's pairs, ``flipped`` says whether G and H have swapped roles,
    ``state`` holds tensors whose first dimension runs over the pairs, and ``scale`` is positive: 1 for an adapter's 0.
    """

    def __init__(self, pairs: Sequence[SymmetricPair], members: Sequence[int], flipped: bool, group: int) -> None:
        self.stack = PairStack([replace(p, G=p.H, H=p.G) if flipped else p for p in pairs])
        self.members, self.flipped, self.group = list(members), flipped, group
        self.scale = abs(pairs[0].scale) or 1.0
        self.state: dict[str, Tensor] = {}
        self.steps = 0
        self._layouts: dict[tuple[int, ...], tuple[tuple[Part, ...], Tensor | None]] = {}

    def _active(self) -> list[int]:
        """List the pairs that have a gradient."""
        found = []
        for i, p in enumerate(self.stack.pairs):
            without = [b for b in p.G + p.H if b.tensor.grad is None]
            if not without:
                found.append(i)
            elif len(without) < len(p.G + p.H):
                b = without[0]
                raise ValueError(
                    f"pair {p.name!r}: {b.place} has no gradient but the rest of the pair has; train both factors, or "
                    "pass this pair to another optimiser"
                )
        return found

    def begin(
        self, metric: Callable[[Tensor, Tensor], Preconditioner], gradients: Mapping[Tensor, Tensor]
    ) -> PairStep | None:
        """Begin a step of the pairs that have a gradient; None if there is no such pair."""
        active = tuple(self._active())
        if not active:
            return None
        if active not in self._layouts:
            device = self.stack.pairs[0].G[0].tensor.device
            parts = tuple(_parts(self.stack, active, _IN_CACHE if device.type == "cpu" else math.inf))
            whole = len(active) == len(self.stack)
            self._layouts[active] = parts, None if whole else torch.tensor(active, device=device)
        return PairStep(self, *self._layouts[active], gradients, metric)


def _parts(stack: PairStack, active: Sequence[int], most: float) -> Iterator[Part]:
    """Cut the factors of some pairs of a stack into parts of limited size."""
    starts = [i for i, home in enumerate(active) if not i or home != active[i - 1] + 1]
    for start, stop in pairwise([*starts, len(active)]):  # consecutive pairs of the bucket
        members = [stack.pairs[i] for i in active[start:stop]]
        for side in (0, 1):
            for lot in _lots(BlockStack([(p.G, p.H)[side] for p in members]).runs, most):
                first, count = lot[0], sum(r.count for r in lot)
                pairs, home = (slice(i + first.start, i + first.start + count) for i in (start, active[start]))
                rows = slice(first.row, first.row + first.first.rows)
                yield Part(stack.group, side, pairs, home, rows, len(first.first.shape) > 1, tuple(lot))


def _lots(runs: Sequence[Any], most: float) -> list[list[Any]]:
    """Join runs of the same rows and layout, up to a limited size."""
    lots: list[list[Any]] = []
    for r in runs:
        last = lots[-1] if lots else []
        alike = bool(last) and (last[0].row, last[0].first.stride) == (r.row, r.first.stride)
        if alike and math.prod(r.first.size) * (r.count + sum(q.count for q in last)) <= most:
            last.append(r)
        else:
            lots.append([r])
    return lots


class PairStep:
    """One step of the pairs of a bucket that have gradients.

    ``parts`` cover their factors, and ``preconditioner`` is the metric at the current point. Small matrices are stacked
    as (pairs, …, 2, h, h), with those of G before those of H. ``clip`` multiplies the gradients. ``ok``, if it is a
    tensor, lies on the device and is False for a step that must change nothing.
    """

    def __init__(
        self, bucket: PairBucket, parts: tuple[Part, ...], index: Tensor | None,
        gradients: Mapping[Tensor, Tensor], metric: Callable[[Tensor, Tensor], Preconditioner],
    ) -> None:  # fmt: skip
        self.bucket, self.parts, self._gradients, self._metric = bucket, parts, gradients, metric
        self.clip: Tensor | None = None
        self.ok: Tensor | None = None
        self._views: dict[tuple[int, bool], Tensor] = {}
        self.count = len(bucket.stack) if index is None else len(index)
        self._index = index
        self.preconditioner = metric(*self.grams(self.weights).unbind(-3))

    def name(self, i: int) -> str:
        """Return the name of a pair."""
        return self.bucket.stack.pairs[i if self._index is None else int(self._index[i])].name

    def grams(self, of: Callable[[Part], Tensor]) -> Tensor:
        """Sum over parts the Gram matrices Xᴴ X of a function's values."""
        found: Tensor | None = None
        for part in self.parts:
            S = gram(of(part))
            if found is None:
                found = S.new_zeros(self.count, *S.shape[1:-2], 2, *S.shape[-2:])
            of_part(found, part).add_(S)
        assert found is not None
        return found

    def _read(self, part: Part, gradient: bool) -> Tensor:
        """Read a part of the weights or of the gradient, once."""
        found = self._views.get((id(part), gradient))
        if found is None:
            found = part.read(self._gradients if gradient else None)
            self._views[id(part), gradient] = found
        return found

    def weights(self, part: Part) -> Tensor:
        """Return a part of the weights, which may be changed in place and then written."""
        return self._read(part, False)

    def gradient(self, part: Part) -> Tensor:
        """Return the clipped gradient of a part; 0 in a step that must change nothing, so that moments stay too."""
        g = self._read(part, True)
        if self.clip is not None:
            g = g * self.clip.to(g.device, g.real.dtype)
        return g if self.ok is None else torch.where(self.ok.to(g.device), g, 0)  # NaN times 0 is not 0

    def balance_(self) -> Tensor:
        """Move pairs with a skewed anchor to a gauge in which it has orthonormal columns; return what is still skewed.

        The change is as accurate as the condition of N allows, hence the repetitions. Off the CPU the host does not
        know which anchors are skewed: there all pairs are multiplied, most of them by 1, at every eighth step.
        """
        skewed = self.preconditioner.is_skewed()
        on_cpu = skewed.device.type == "cpu"
        due = on_cpu or self.bucket.steps % 8 == 0
        largest = torch.finfo(self.bucket.stack.pairs[0].G[0].tensor.dtype).max
        for _ in range(3 if on_cpu or not self.bucket.steps else due):
            if on_cpu and not bool(skewed.any()):
                break
            self._change_gauge_(self.preconditioner.straightening(largest))
            skewed = self.preconditioner.is_skewed()
        self.bucket.steps += 1
        left: Tensor = self.keep(skewed & due, False)
        return left

    def _change_gauge_(self, change: Tensor) -> None:
        """Multiply G, H by the matrices (A⁻¹, Aᴴ), (pairs, …, 2, h, h), and covectors by (Aᴴ, A⁻¹)."""
        change = self.keep(change, torch.eye(change.shape[-1], dtype=change.dtype, device=change.device))
        dual = change.flip(-3)
        for part in self.parts:
            x = self.weights(part)
            x.copy_(wide(x) @ of_part(change, part))
            part.write_(x)
            g = self._read(part, True)
            self._views[id(part), True] = (wide(g) @ of_part(dual, part)).to(g.dtype)
            if "moment G" in self.bucket.state:
                m = self.state("moment", part)
                m.copy_(wide(m) @ of_part(dual, part))
        if "matrix" in self.bucket.state:
            self.write("matrix", dual.mH @ self.read("matrix") @ dual)
        self.preconditioner = self._metric(*self.grams(self.weights).unbind(-3))

    @cached_property
    def gradient_grams(self) -> Tensor:
        """Gram matrices of the gradients of G and H before clipping."""
        return self.grams(lambda part: self._read(part, True))

    def squared_norm(self) -> Tensor:
        """Compute the squared norm of the gradient in the metric, before clipping, ()."""
        K_inv = self.preconditioner.inverse_roots
        return trace(K_inv @ self.gradient_grams @ K_inv.mH).sum()

    def make_room(self, name: str, columns: int | None = None) -> None:
        """Initialise the row-wise state with zeros, as ``name G`` and ``name H``, (pairs, …, rows, h)."""
        first = {part.side: part for part in reversed(self.parts)}
        for part in first.values():
            rows = (self.bucket.stack.n, self.bucket.stack.m)[part.side]
            self.bucket.state[f"{name} {'GH'[part.side]}"] = part.room(len(self.bucket.stack), rows, columns)

    def state(self, name: str, part: Part) -> Tensor:
        """Return the state of the rows of a part, which may be changed in place."""
        return self.bucket.state[f"{name} {'GH'[part.side]}"][part.home][..., part.rows, :]

    def read(self, name: str) -> Tensor:
        """Read the state of these pairs."""
        whole = self.bucket.state[name]
        return whole if self._index is None else whole[self._index]

    def write(self, name: str, value: Tensor) -> None:
        """Write the state of these pairs."""
        value = self.keep(value, self.read(name))
        if self._index is None:
            self.bucket.state[name].copy_(value)
        else:
            self.bucket.state[name][self._index] = value

    def keep(self, value: Any, otherwise: Any) -> Any:
        """Return the value, or a neutral value if the step must not change anything."""
        if self.ok is None:
            return value
        if isinstance(value, Tensor):
            return torch.where(self.ok.to(value.device), value, otherwise)
        ok = self.ok.to(self.weights(self.parts[0]).device, torch.float32)  # several devices may hold buckets
        return wide(ok) * (value - otherwise) + otherwise

    def scaled(self, A: Tensor, factor: float = 1.0) -> Tensor:
        """Multiply matrices by a number, or by 0 in a step that must change nothing, in the precision of the rows."""
        found: Tensor = self.keep(A * factor, 0)
        return found.to(self.weights(self.parts[0]).dtype)

    def move_(self, part: Part, direction: Tensor, A: Tensor, decay: float) -> Tensor:
        """Multiply the product by 1 - ``decay``, add coordinates times their basis A to the rows, and return them."""
        x, A = self.weights(part), of_part(A, part)
        keep = max(1 - decay, 0) ** 0.5 if part.decays else 1.0
        if x.dim() == 3 and (self.ok is None or keep == 1):
            x.baddbmm_(direction, A, beta=keep)
        else:
            x.mul_(self.keep(keep, 1.0)).add_(direction @ A)
        part.write_(x)
        return x

    def advance_(self, direction: Callable[[Part], Tensor], A: Tensor, lr: float, weight_decay: float) -> Tensor:
        """Move all parts along -η times direction A, and moments with them.

        Return the matrices, (pairs, …, 2, h, h), that transport covectors.
        """
        across, after, step = torch.zeros_like(A), torch.zeros_like(A), self.scaled(A, -lr)
        for part in self.parts:
            before = self.weights(part).to(A.dtype, copy=True)
            x = wide(self.move_(part, direction(part), step, lr * weight_decay))
            of_part(across, part).add_(gram(before, x))
            of_part(after, part).add_(gram(x))
        T = self.preconditioner.transport_covectors(self._metric(*after.unbind(-3)), across)
        T = self.keep(T, torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)).to(step.dtype)
        for part in self.parts if "moment G" in self.bucket.state else ():
            m = self.state("moment", part)
            m.copy_(m @ of_part(T, part))
        return T


def check_anchors(steps: Sequence[PairStep]) -> Tensor | None:
    """Raise if weights were replaced and an anchor now lacks full rank; off the CPU, return a tensor that says so."""
    sound = [s.preconditioner.is_sound() for s in steps]
    if not sound:
        return None
    whole = torch.stack([v.all().to(sound[0].device) for v in sound]).all()
    if whole.device.type != "cpu":
        return whole
    if bool(whole):
        return None
    s, good = next((s, v) for s, v in zip(steps, sound, strict=True) if not bool(v.all()))
    bad = int((~good).flatten(1).any(1).nonzero()[0] if good.dim() > 1 else (~good).nonzero()[0])
    raise ValueError(
        f"pair {s.name(bad)!r}: its {'first' if s.bucket.flipped else 'second'} factor has lost full rank since the "
        "optimiser was made; no weight was changed; make a new optimiser for these weights"
    )


def group_of(pair: SymmetricPair, home: Mapping[Tensor, int], paired: Collection[Tensor]) -> int | None:
    """Return the parameter group of a usable pair; None for pairs that are to be ignored.

    ``home`` maps every parameter to its group, ``paired`` holds the parameters of all usable pairs.
    """
    blocks = pair.G + pair.H
    inside = {home[b.tensor] for b in blocks if b.tensor in home}
    if not inside:
        return None
    if pair.group is None:
        if pair.frozen and any(b.tensor in home and b.tensor not in paired for b in blocks):
            raise ValueError(
                f"pair {pair.name!r} is half frozen ({pair.reason}), but the quotient needs both factors to move; "
                "unfreeze it, or train the other half with torch.optim.AdamW"
            )
        return None
    for b in blocks:
        if b.tensor not in home:
            raise ValueError(
                f"pair {pair.name!r}: {b.place} is not among the optimiser's "
                "parameters but the rest of the pair is; pass both factors"
            )
    if len(inside) > 1:
        raise ValueError(
            f"pair {pair.name!r} is split over the parameter groups {sorted(inside)}; put both of its factors into one "
            "group, because they move together"
        )
    for b in blocks:
        if is_sharded(b.tensor):
            raise ValueError(
                f"pair {pair.name!r} has a sharded parameter ({type(b.tensor).__name__}; FSDP, DTensor or ZeRO-3), but "
                "its geometry needs whole factors; use DDP, or keep these modules out of the sharding"
            )
    return inside.pop()


def is_flipped(pair: SymmetricPair) -> bool:
    """Tell whether the factors must swap roles, because H lacks full column rank and G does not."""
    x = pair.gather().detach()
    full = []
    for X in x.split([pair.n, pair.m], dim=-2):
        tolerance = X.shape[-1] * torch.finfo(at_least_float32(X.real.dtype)).eps
        full.append(X.shape[-2] >= X.shape[-1] and bool((column_rank_ratio(wide(X)) > tolerance).all()))
    if not any(full):
        raise ValueError(
            f"pair {pair.name!r}: both factors lack full column rank ({pair.n} and {pair.m} rows, {x.shape[-1]} "
            "columns), where the quotient has no metric; initialise one of them with a full-rank matrix, lower the "
            "rank, or leave the pair out"
        )
    return not full[1]
