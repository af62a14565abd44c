"""Pairs of equal shape, whose factors, gradients and state are stacked: a step is the same calls for any number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..linalg import at_least_float32
from ..symmetries.pairs import SymmetricPair
from ..symmetries.slots import SlotStack, checked
from ..symmetries.stacks import PairStack
from .metric import StepMetric, on_cpu, wide

#: Condition of H at which a pair moves to another gauge: rounding to float32 then changes the product by about 1e-5,
#: and the Gram matrix, whose condition is the square, is known to about 1e-5 if it is computed in float32.
_CONDITION = {torch.float64: 1e2, torch.float32: 1e1}
#: Gradients of a smaller norm count as of this one: squares of their entries are 0 in float32.
LEAST_NORM = 1e-18
_MOMENTS = ("moment G", "moment H")
#: The metric of a stack at points with some Gram matrices.
MetricOf = Callable[["Stack", Tensor], StepMetric]


class Stack:
    """Pairs of equal shape and scale in one parameter group, oriented so that H is the anchor: of full column rank.

    ``flipped`` says whether G and H of the pairs, ``given`` as they are in their model, have swapped roles, and
    ``scale`` is positive: 1 for an adapter's 0. ``state`` holds tensors whose first dimension runs over points: one for
    each pair, or for each column of each pair where the group is diagonal; ``steps`` counts steps. Where parameters are
    sharded, this process has the points, steps and state of its ``own`` pairs alone.

    In a step ``x`` and ``g`` are the rows of G and of H and their gradients, each (points, rows, h), in float32 at
    least, ``sizes`` the norms of both gradients, (2,), ``metric`` is that at the weights, and ``straight`` says whether
    every anchor is known to have a small condition. Small matrices are stacked as (points, 2, h, h), with those of G
    before those of H. Where ``mask``, () or (points,), is False, nothing changes: an expert without tokens waits.
    """

    def __init__(
        self, pairs: Sequence[SymmetricPair], flipped: bool, group: int, weights: Mapping[str, Tensor]
    ) -> None:
        self.given, self.names, self.flipped, self.group = pairs, [p.name for p in pairs], flipped, group
        self.pairs = PairStack([replace(p, G=p.H, H=p.G) if flipped else p for p in pairs])
        self.scale, self.steps, self.state = abs(pairs[0].scale) or 1.0, 0, dict[str, Tensor]()
        first, dtypes = weights[pairs[0].G[0].name], (weights[run.slot.name].dtype for run in self.pairs.runs)
        self.dtype, self.device = at_least_float32(max(dtypes, key=attrgetter("itemsize"))), first.device
        self.largest = torch.finfo(weights[self.pairs.names[0]].dtype).max
        self.counts = torch.tensor([self.pairs.n, self.pairs.m])[:, None, None]  # of rows
        self.points = self.pairs.group.h if self.pairs.group.diagonal else 1  # of one pair
        self.keep(slice(None))

    def keep(self, own: slice) -> None:
        """Leave all but some of the pairs to other processes."""
        self.own, pairs = own, self.pairs.pairs[own]
        self.slots = [SlotStack([p.G for p in pairs]), SlotStack([p.H for p in pairs])]
        if own != slice(None):
            self.state = {k: v[own.start * self.points : own.stop * self.points].clone() for k, v in self.state.items()}

    def room(self) -> list[Tensor]:
        """Make tensors for rows of G and of H, in the order of memory of the parameters."""
        group, found = self.pairs.group, list[Tensor]()
        dtype = self.dtype.to_complex() if group.field == "complex" else self.dtype
        for slots in self.slots:
            stride, (count, rows, *_) = slots.runs[0].slot.stride, slots.shape
            size = (count * self.points, rows, 1 if group.diagonal else group.h)
            order = (0, 2, 1) if stride[1] < stride[2] else (0, 1, 2)
            found.append(torch.empty_permuted(size, order, dtype=dtype, device=self.device))
        return found

    def _rows(self, points: Tensor) -> Tensor:
        """View points as rows of slots."""
        group = self.pairs.group
        if group.diagonal:
            points = points.unflatten(0, (-1, group.h))
        return group.from_point(points) if group.diagonal or points.is_complex() else points

    def begin(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> bool:
        """Read weights and gradients; return whether any pair has one. Where both factors have none, or 0, all stays.

        The weights are written to as well. On the CPU all are read to the same place at every step: there memory that
        is new to the process costs more than what is computed. Elsewhere it is given back afterwards.
        """
        active = []
        for p in self.pairs.pairs:
            without = [name for name in p.names if name not in gradients]
            if 0 < len(without) < len(p.names):
                raise ValueError(
                    f"pair {p.name!r}: {without[0]!r} has no gradient but the rest of the pair has; train both "
                    "factors, or pass this pair to another optimiser"
                )
            active.append(not without)
        self.weights, self.runs = weights, any(active) and bool(active[self.own])
        if not self.runs:
            return any(active)
        if "x" not in vars(self):
            self.x, self.g = self.room(), self.room()
            self.spare = self.x[0].new_empty(max(x.numel() for x in self.x))
            self.counts = self.counts.to(self.x[0].device)
        into, views = list[Tensor](), list[Tensor]()
        for slots, x, g in zip(self.slots, self.x, self.g, strict=True):
            names = [run.slot.name for run in slots.runs]
            found = [checked(run.slot, weights[run.slot.name]) for run in slots.runs]
            for points, tensors in ((x, found), (g, map(gradients.get, names))):
                of_rows, of_tensors = slots.views(self._rows(points), tensors)
                into += of_rows
                views += of_tensors
        torch._foreach_copy_(into, views)
        norms = torch.stack([torch.linalg.vector_norm(g, dim=(1, 2)) for g in self.g])
        mask = norms.any(0)  # also where one is NaN
        self.mask = None if on_cpu(norms) and bool(mask.all()) else mask
        self.sizes = torch.linalg.vector_norm(norms, dim=1).clamp_min(LEAST_NORM)
        return True

    def measure(self, metric_of: MetricOf, *double: bool) -> None:
        """Compute the metric in one precision, and on the CPU in the next one too if an anchor is crooked."""
        for precision in double:
            self.metric = metric_of(self, wide(torch.stack([gram(x, precision) for x in self.x], dim=-3)))
            self.straight = on_cpu(self.sizes) and bool(self._straight().all())
            if self.straight:
                break

    def _straight(self) -> Tensor:
        """Return where the anchor has a small condition, or takes no step; (points,)."""
        straight = self.metric.straight(_CONDITION[self.dtype])
        return straight if self.mask is None else self.mask <= straight  # the one implies the other

    def straighten_(self, metric_of: MetricOf) -> Tensor:
        """Turn points with a crooked anchor to a gauge in which it has orthonormal columns; return what stays crooked.

        The change is as accurate as the condition of N allows, hence the repetitions on the CPU. Elsewhere the host
        does not know which anchors are crooked: all are multiplied, most of them by 1, at every eighth step.
        """
        rounds = 3 if on_cpu(self.sizes) else int(self.steps % 8 == 1)
        for _ in range(rounds):
            change = self.metric.straightening(~self._straight(), self.largest)
            for X, A in ((self.x, change), (self.g, change.flip(-3)), (self.moments(), change.flip(-3))):
                for x, a in zip(X, A.unbind(1), strict=False):
                    x.copy_(x.to(a.dtype) @ a)
            self._transport_matrices_(change.flip(-3))
            self.measure(metric_of, True)
            if self.straight:
                break
        return ~self._straight() & self.metric.sound & (rounds > 0)

    def advance_(
        self, directions: Sequence[Tensor], A: Tensor, rate: float, decay: float, *, transport: bool = True
    ) -> None:
        """Write rows minus ``rate`` times directions times A, after products are multiplied by 1 - ``decay``.

        Biases do not decay. The state is transported with them, or left as it is.
        """
        keep, sides, across = max(1 - decay, 0) ** 0.5, A.to(self.x[0].dtype).unbind(1), list[Tensor]()
        for slots, x, d, a in zip(self.slots, self.x, directions, sides, strict=True):
            end = torch.baddbmm(x, d, a, beta=keep, alpha=-rate, out=self.room_of(x))
            biases = {(r.rows.start, r.rows.stop) for r in slots.runs if decay and len(r.slot.shape) == 1}
            for start, stop in biases:
                end[:, start:stop] = torch.baddbmm(x[:, start:stop], d[:, start:stop], a, alpha=-rate)
            slots.scatter_(self._rows(self.only(end, x, out=end)), self.weights)
            across += [x.mH @ end] if transport else []
        if transport:  # and what ends last is H
            found, N = wide(torch.stack([*across, gram(end)], dim=-3)).split([2, 1], dim=-3)
            T = self.only(self.metric.transport_covectors(N.squeeze(-3), found), self.metric.eye)
            old, sides = self.moments(), T.to(end.dtype).unbind(1)
            new = [torch.bmm(m, t, out=g) for m, t, g in zip(old, sides, self.g, strict=False)]
            self.g = old or self.g  # memory of old moments takes the next gradients, whose own has the new moments
            self.state.update(zip(_MOMENTS, new, strict=False))
            self._transport_matrices_(T)

    def room_of(self, x: Tensor) -> Tensor:
        """Return room for what is as large as the rows of G or of H; there is one such room."""
        return self.spare.as_strided(x.shape, x.stride())

    def grams(self) -> Tensor:
        """Return the Gram matrices of the gradients."""
        found = list[Tensor]()
        for g, size in zip(self.g, self.sizes, strict=True):
            found.append(gram(torch.div(g, size, out=self.room_of(g))))
        return rescaled(found, self.sizes)

    def moments(self) -> list[Tensor]:
        """List the moments of G and of H, if there are any."""
        return [self.state[name] for name in _MOMENTS if name in self.state]

    def average_(self, weight: float) -> list[Tensor]:
        """Return the moments, after they have gone a share of the way to the gradients."""
        moments = self.moments()
        for g, m in zip(self.g, moments, strict=True):
            self.only(g, m, out=g)
        torch._foreach_lerp_(moments, self.g, weight)
        return moments

    def _transport_matrices_(self, T: Tensor) -> None:
        """Multiply Gram matrices of covectors by (T_G, T_H) from both sides."""
        if "matrix" in self.state:
            self.state["matrix"] = T.mH @ self.state["matrix"] @ T

    def only(self, value: Tensor, otherwise: Any, out: Tensor | None = None) -> Tensor:
        """Return values for those points that take their step, and others for the rest."""
        if self.mask is None:
            return value
        mask = self.mask.view(-1, *[1] * (value.dim() - 1))
        return torch.where(mask, value, otherwise) if out is None else torch.where(mask, value, otherwise, out=out)

    def restrict(self, mask: Tensor) -> None:
        """Let fewer points take their step."""
        self.mask = mask if self.mask is None else self.mask & mask

    def sound(self) -> Tensor:
        """Return where the anchor of a pair that takes its step has full rank; (points,)."""
        return self.only(self.metric.sound, True)

    def name(self, where: Tensor) -> str:
        """Return the name of the first pair of which a point is marked."""
        return self.names[self.own][int(where.nonzero()[0]) // self.points]


def gram(x: Tensor, double: bool = False) -> Tensor:
    """Return xᴴx, in the precision of x or in double precision."""
    x = wide(x) if double else x
    return x.mH @ x


def rescaled(grams: list[Tensor], sizes: Tensor) -> Tensor:
    """Return Gram matrices, given those of rows that were divided by sizes lest squares leave the range of float32."""
    factors = sizes[:, None, None]  # whose square float32 may not hold
    return wide(torch.stack(grams, dim=-3)).mul_(factors).mul_(factors)


def restored(
    entries: Sequence[Mapping[str, Any]],
    pairs: Iterable[SymmetricPair],
    weights: Mapping[str, Tensor],
    new_state: Callable[[Stack], dict[str, Tensor]],
) -> list[Stack]:
    """Restore the stacks of a ``state_dict`` from its entries; pairs are found by their names."""
    left, found = {p.name: p for p in pairs}, list[Stack]()
    for entry in entries:
        own = [(name, left.pop(name, None)) for name in entry["names"]]
        if missing := sorted({name for name, p in own if p is None}):
            raise ValueError(f"the state belongs to other pairs: {', '.join(missing[:3])}")
        given = [p for _, p in own if p is not None]
        s = Stack(given, entry["flipped"], entry["group"], weights)
        new = new_state(s) if entry["state"] else {}
        shapes, wanted = ({name: tuple(v.shape) for name, v in state.items()} for state in (entry["state"], new))
        if shapes != wanted or len({abs(p.scale) for p in given}) > 1:
            raise ValueError(
                f"the state of pairs has {shapes} where this optimiser has {wanted}: it is of another version, another "
                "rank, or another model; set ranks, lora_alpha and rslora as they were, or make a new optimiser"
            )
        s.state, s.steps = {k: v.to(new[k]) for k, v in entry["state"].items()}, entry["steps"]
        found.append(s)
    return found
