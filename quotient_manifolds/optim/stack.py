"""Pairs of equal shape, whose factors, gradients and state are stacked: a step is the same calls for any number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..linalg import at_least_float32
from ..symmetries.pairs import PairStack, SymmetricPair
from ..symmetries.slots import SlotStack, weight_of
from .metric import MOMENTS, Gradient, StepMetric, wide
from .rules import Update

#: Condition of H at which a pair moves to another gauge: rounding to float32 then changes the product by about 1e-5,
#: and the Gram matrix, whose condition is the square, is known to about 1e-5 if it is computed in float32.
_CONDITION = {torch.float64: 1e2, torch.float32: 1e1}
#: The metric of a stack at points with some Gram matrices.
MetricOf = Callable[["Stack", Tensor], StepMetric]


class Stack:
    """Pairs of equal shape and scale in one parameter group, oriented so that H is the anchor: of full column rank.

    ``flipped`` says whether G and H of the pairs, ``given`` as they are in their model, have swapped roles, and
    ``scale`` is positive: 1 for an adapter's 0. ``state`` holds tensors whose first dimension runs over points: one for
    each pair, or for each column of each pair where the group is diagonal; ``steps`` counts steps. Where parameters are
    sharded, this process has the points, steps and state of its ``own`` pairs alone.

    In a step ``x`` are the rows of G and of H, each (points, rows, h), in float32 at least, ``g`` is the
    :class:`Gradient` there, ``metric`` is that at the weights, ``near`` says where its anchor has a small condition,
    (points,), and ``straight`` whether all are known to have one. Small matrices are stacked as (points, 2, h, h), with
    those of G before those of H. Where the mask of the gradient is False, nothing changes: an expert without tokens
    waits.
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
        self._names = [(p.name, p.names) for p in self.pairs.pairs]
        self.keep(slice(None))

    def keep(self, own: slice) -> None:
        """Leave all but some of the pairs to other processes."""
        self.own, pairs = own, self.pairs.pairs[own]
        group = self.pairs.group if self.pairs.group.diagonal or self.pairs.group.field == "complex" else None
        self.slots = [SlotStack([p.G for p in pairs], group), SlotStack([p.H for p in pairs], group)]
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

    def begin(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> bool:
        """Read weights and gradients; return whether any pair has one. Where both factors have none, or 0, all stays.

        On the CPU all are read to the same place at every step: there memory that
        is new to the process costs more than what is computed. Elsewhere it is given back afterwards.
        """
        active = []
        for pair, own in self._names:
            without = [name for name in own if name not in gradients]
            if 0 < len(without) < len(own):
                raise ValueError(
                    f"pair {pair!r}: {without[0]!r} has no gradient but the rest of the pair has; train both "
                    "factors, or pass this pair to another optimiser"
                )
            active.append(not without)
        self.runs = any(active) and bool(active[self.own])
        if not self.runs:
            return any(active)
        if "x" not in vars(self):
            self.counts = self.counts.to(self.device)
            self.x, self.g = self.room(), Gradient(self.room(), self.counts)
        parts = list[tuple[Tensor, Tensor]]()
        for slots, x, g in zip(self.slots, self.x, self.g.rows, strict=True):
            parts += slots.views(x, [weight_of(run.slot, weights) for run in slots.runs])
            parts += slots.views(g, [gradients.get(run.slot.name) for run in slots.runs])
        into, views = zip(*parts, strict=True)
        torch._foreach_copy_(into, views)
        self.g.read()
        return True

    def measure(self, metric_of: MetricOf, *double: bool) -> None:
        """Compute the metric in one precision, and on the CPU in the next one too if an anchor is crooked."""
        for precise in double:
            grams = [X.mH @ X for X in (wide(x) if precise else x for x in self.x)]
            self.metric = metric_of(self, wide(torch.stack(grams, dim=-3)))
            self.near = self.metric.condition <= _CONDITION[self.dtype] ** 2 * self.pairs.group.h**0.5
            straight = self.near if self.g.mask is None else self.g.mask <= self.near  # or what waits
            self.straight = self.g.on_cpu and bool(straight.all())
            if self.straight:
                break

    def straighten_(self, metric_of: MetricOf) -> Tensor:
        """Turn points with a crooked anchor to a gauge in which it has orthonormal columns; return what stays crooked.

        The change is as accurate as the condition of N allows, hence the repetitions on the CPU. Elsewhere the host
        does not know which anchors are crooked: all are multiplied, most of them by 1, at every eighth step.
        """
        rounds = 3 if self.g.on_cpu else int(self.steps % 8 == 1)
        for _ in range(rounds):
            change = self.metric.straightening(self.g.only(~self.near, False), self.largest)
            covectors, moments = change.flip(-3), [self.state[name] for name in MOMENTS if name in self.state]
            for X, A in ((self.x, change), (self.g.rows, covectors), (moments, covectors)):
                for x, a in zip(X, A.unbind(1), strict=False):
                    x.copy_(x.to(a.dtype) @ a)
            if "matrix" in self.state:
                self.state["matrix"] = covectors.mH @ self.state["matrix"] @ covectors
            self.measure(metric_of, True)
            if self.straight:
                break
        return self.g.only(~self.near, False) & self.metric.sound & (rounds > 0)

    def advance_(
        self, update: Update, state: Mapping[str, Tensor], rate: float, decay: float, weights: Mapping[str, Tensor], *,
        transport: bool,
    ) -> None:  # fmt: skip
        """Write the new state, and to weights rows less ``rate`` times the update.

        Before that, products are multiplied by 1 - ``decay``, but for biases. The state is transported with them, or
        left as it is. On the CPU memory is kept.
        """
        self._take_(state)
        keep, rate, across = max(1 - decay, 0) ** 0.5, rate * update.factor, list[Tensor]()
        sides = update.matrices.to(self.x[0].dtype).unbind(1)
        for slots, x, d, a, room in zip(self.slots, self.x, update.rows, sides, self.g.room, strict=True):
            end = torch.baddbmm(x, d, a, beta=keep, alpha=-rate, out=room)
            biases = {(r.rows.start, r.rows.stop) for r in slots.runs if decay and len(r.slot.shape) == 1}
            for start, stop in biases:
                end[:, start:stop] = torch.baddbmm(x[:, start:stop], d[:, start:stop], a, alpha=-rate)
            slots.scatter_(self.g.only(end, x, out=end), weights)
            across += [x.mH @ end] if transport else []
        if transport:  # and what ends last is H
            found, N = wide(torch.stack([*across, end.mH @ end], dim=-3)).split([2, 1], dim=-3)
            T = self.g.only(self.metric.transport_covectors(N.squeeze(-3), found), self.metric.eye)
            before, sides = [self.state[name] for name in MOMENTS if name in self.state], T.to(end.dtype).unbind(1)
            new = [torch.bmm(m, t, out=g) for m, t, g in zip(before, sides, self.g.rows, strict=False)]
            self.g.rows = before or self.g.rows  # their memory takes the next gradients, whose own has the new ones
            self.state.update(zip(MOMENTS, new, strict=False))
            if "matrix" in self.state:
                self.state["matrix"] = T.mH @ self.state["matrix"] @ T
        if not self.g.on_cpu:
            del self.x, self.g

    def _take_(self, new: Mapping[str, Tensor]) -> None:
        """Take a new state of points that take their step; what a rule wrote to in place is as it should be."""
        old = self.state
        if new.keys() != old.keys():
            raise ValueError(
                f"a rule returned {sorted(new)}, but its state has {sorted(old)}; new_state makes all of it"
            )
        mine = {g.data_ptr() for g in self.g.rows}  # which take other gradients
        own = {k: v.clone() if v.data_ptr() in mine else v for k, v in new.items() if v is not old[k]}
        self.state = {**old, **{k: self.g.only(v, old[k]) for k, v in own.items()}}

    def sound(self) -> Tensor:
        """Return where the anchor of a pair that takes its step has full rank; (points,)."""
        return self.g.only(self.metric.sound, True)

    def name(self, where: Tensor) -> str:
        """Return the name of the first pair of which a point is marked."""
        return self.names[self.own][int(where.nonzero()[0]) // self.points]


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
