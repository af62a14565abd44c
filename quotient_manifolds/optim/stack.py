"""Pairs of equal shape, whose factors, gradients and state are stacked: a step is the same calls for any number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..linalg import at_least_float32
from ..symmetries.blocks import BlockStack
from ..symmetries.pairs import SymmetricPair
from ..symmetries.stacks import PairStack
from .metric import Metric, eye_like, on_cpu, wide

#: Condition of H at which a pair moves to another gauge: rounding to float32 then changes the product by about 1e-5,
#: and the Gram matrix, whose condition is the square, is known to about 1e-5 if it is computed in float32.
_CONDITION = {torch.float64: 1e2, torch.float32: 1e1}
#: Gradients of a smaller norm count as of this one: squares of their entries are 0 in float32.
_LEAST = 1e-18
#: The metric of a stack at points with some Gram matrices.
MetricOf = Callable[["Stack", Tensor], Metric]


class Stack:
    """Pairs of equal shape and scale in one parameter group, oriented so that H is the anchor: of full column rank.

    ``members`` are their positions among the optimiser's pairs, ``flipped`` says whether G and H have swapped roles,
    and ``scale`` is positive: 1 for an adapter's 0. ``state`` holds tensors whose first dimension runs over points:
    one for each pair, or for each column of each pair where the group is diagonal; ``steps`` counts steps.

    In a step ``x`` and ``g`` are the rows of G and of H and their gradients, each (points, rows, h), in float32 at
    least, ``sizes`` the norms of both gradients, (2,), ``metric`` is that at the weights, and ``straight`` says whether
    every anchor is known to have a small condition. Small matrices are stacked as (points, 2, h, h), with those of G
    before those of H. Where ``mask``, () or (points,), is False, nothing changes.
    """

    x: list[Tensor]
    g: list[Tensor]
    sizes: Tensor
    metric: Metric
    straight: bool
    mask: Tensor | None

    def __init__(self, pairs: Sequence[SymmetricPair], members: Sequence[int], flipped: bool, group: int) -> None:
        self.pairs = PairStack([replace(p, G=p.H, H=p.G) if flipped else p for p in pairs])
        self.members, self.flipped, self.group = list(members), flipped, group
        self.scale, self.steps, like = abs(pairs[0].scale) or 1.0, 0, pairs[0].G[0].tensor
        self.dtype = at_least_float32(like.dtype)
        self.condition = _CONDITION[self.dtype]
        self.state: dict[str, Tensor] = {}
        self.blocks = [BlockStack([side(p) for p in self.pairs.pairs]) for side in (lambda p: p.G, lambda p: p.H)]
        self.counts = torch.tensor([self.pairs.n, self.pairs.m])[:, None, None]  # of rows
        self.points = self.pairs.group.h if self.pairs.group.diagonal else 1  # of one pair
        self._kept: dict[str, list[Tensor]] = {}

    def empty(self) -> list[Tensor]:
        """Return tensors for rows of G and of H, in the order of memory of the parameters."""
        group, found = self.pairs.group, list[Tensor]()
        columns = 1 if group.diagonal else group.h
        device = self.pairs.pairs[0].G[0].tensor.device
        dtype = self.dtype.to_complex() if group.field == "complex" else self.dtype
        for blocks in self.blocks:
            stride, (count, rows, *_) = blocks.runs[0].block.stride, blocks.shape
            transposed = stride[1] < stride[2] and not group.diagonal
            size = (columns, rows) if transposed else (rows, columns)
            rows_of_points = torch.empty(count * self.points, *size, dtype=dtype, device=device)
            found.append(rows_of_points.mT if transposed else rows_of_points)
        return found

    def room(self, name: str) -> list[Tensor]:
        """Return tensors to write rows to, on the CPU the same at every step.

        There memory that is new to the process costs more than what is computed: 200 factors of 4096 × 16 are stacked
        in 5 ms, and in 36 ms into new memory. A GPU has its own cache of memory.
        """
        found = self._kept.get(name)
        if found is None:
            found = self.empty()
            if on_cpu(found[0]):
                self._kept[name] = found
        return found

    def _rows(self, points: Tensor) -> Tensor:
        """View points as rows of blocks."""
        group = self.pairs.group
        if group.diagonal:
            points = points.unflatten(0, (-1, group.h))
        return group.from_point(points) if group.diagonal or points.is_complex() else points

    def begin(self, gradients: Mapping[Tensor, Tensor]) -> bool:
        """Read weights and gradients; return whether any pair has one. Pairs without one are left as they are."""
        active = self._active(gradients)
        if not any(active):
            return False
        self.x, self.g = self.room("x"), self.room("g")
        into, views = list[Tensor](), list[Tensor]()
        for blocks, x, g in zip(self.blocks, self.x, self.g, strict=True):
            parameters = blocks.parameters()
            for points, tensors in ((x, parameters), (g, map(gradients.get, parameters))):
                of_rows, of_tensors = blocks.views(self._rows(points), tensors)
                into += of_rows
                views += of_tensors
        torch._foreach_copy_(into, views)
        self.counts = self.counts.to(self.x[0].device)
        self.mask = None
        if not all(active):
            self.mask = torch.tensor(active, device=self.x[0].device).repeat_interleave(self.points)
        self.sizes = self.norms(self.g)
        return True

    def _active(self, gradients: Collection[Tensor]) -> list[bool]:
        """List which pairs have a gradient; raise for those of which only a part has one."""
        found = []
        for p in self.pairs.pairs:
            blocks = p.G + p.H
            without = [b for b in blocks if getattr(b.module, b.attribute) not in gradients]
            if 0 < len(without) < len(blocks):
                raise ValueError(
                    f"pair {p.name!r}: {without[0].place} has no gradient but the rest of the pair has; train both "
                    "factors, or pass this pair to another optimiser"
                )
            found.append(not without)
        return found

    def measure(self, metric_of: MetricOf, *, double: bool = True) -> None:
        """Compute the metric at the weights, and on the CPU whether every anchor is straight."""
        self.metric = metric_of(self, self.products(self.x, self.x, double=double))
        self.straight = on_cpu(self.sizes) and bool(self.metric.straight(self.condition).all())

    def straighten_(self, metric_of: MetricOf) -> Tensor:
        """Turn points with a crooked anchor to a gauge in which it has orthonormal columns; return what stays crooked.

        The change is as accurate as the condition of N allows, hence the repetitions on the CPU. Elsewhere the host
        does not know which anchors are crooked: all are multiplied, most of them by 1, at every eighth step.
        """
        crooked = ~self.metric.straight(self.condition)
        if not on_cpu(crooked) and self.steps % 8 != 1:
            return torch.zeros_like(crooked)
        for _ in range(3 if on_cpu(crooked) else 1):
            change = self.metric.straightening(crooked, torch.finfo(self.pairs.parameters()[0].dtype).max)
            change = self.only(change, eye_like(change))
            for X, A in ((self.x, change), (self.g, change.flip(-3))):
                for side, x in enumerate(X):
                    x.copy_(x.to(A.dtype) @ A[:, side])
            self.transport_(change.flip(-3))
            self.measure(metric_of)
            crooked = ~self.metric.straight(self.condition)
            if self.straight:
                break
        return crooked & self.metric.sound

    def advance_(self, directions: Sequence[Tensor], A: Tensor, decay: float, *, transport: bool = True) -> None:
        """Write rows plus directions times A, after products are multiplied by 1 - ``decay``; biases do not decay.

        The state is transported with them, or left as it is.
        """
        keep, ends = max(1 - decay, 0) ** 0.5, self.room("end")
        for blocks, x, d, a, end in zip(
            self.blocks, self.x, directions, A.to(self.x[0].dtype).unbind(1), ends, strict=True
        ):
            torch.baddbmm(x, d, a, beta=keep, out=end)
            biases = {(r.rows.start, r.rows.stop) for r in blocks.runs if decay and len(r.block.shape) == 1}
            for start, stop in biases:
                end[:, start:stop] = torch.baddbmm(x[:, start:stop], d[:, start:stop], a)
        ends = [self.only(end, x) for end, x in zip(ends, self.x, strict=True)]
        for blocks, end in zip(self.blocks, ends, strict=True):
            blocks.scatter_(self._rows(end))
        if transport:
            across, N = self.products([*self.x, ends[1]], [*ends, ends[1]]).split([2, 1], dim=1)
            T = self.metric.transport_covectors(N.squeeze(1), across)
            self.transport_(T if self.mask is None else self.only(T, eye_like(T)))

    def products(self, X: Sequence[Tensor], Y: Sequence[Tensor], *, double: bool = False) -> Tensor:
        """Return the products XᴴY of G and of H, in the precision of the factors or in double precision."""
        if double:
            X, Y = list(map(wide, X)), list(map(wide, Y))
        return wide(torch.stack([x.mH @ y for x, y in zip(X, Y, strict=True)], dim=-3))

    def times(self, X: Sequence[Tensor], A: Tensor, name: str) -> list[Tensor]:
        """Multiply rows of G by A_G and rows of H by A_H, into the room of a name."""
        room = self.room(name)
        for side, (x, a) in enumerate(zip(X, A.to(X[0].dtype).unbind(1), strict=True)):
            torch.bmm(x, a, out=room[side])
        return room

    def norms(self, X: list[Tensor]) -> Tensor:
        """Compute the norm of all rows of G, and of H, (2,), at least 1e-18."""
        return torch.stack(torch._foreach_norm(X)).clamp_min(_LEAST)  # noqa: SLF001

    def grams(self, X: Sequence[Tensor], sizes: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return X divided by its norms, (2,), lest squares leave the range of float32, and its Gram matrices."""
        scaled = self.room("end")
        for x, size, end in zip(X, sizes.unbind(), scaled, strict=True):
            torch.div(x, size, out=end)
        return scaled, self.products(scaled, scaled) * wide(sizes).square()[:, None, None]

    def moments(self) -> list[Tensor]:
        """List the moments of G and of H, which may be changed in place."""
        return [self.state["moment G"], self.state["moment H"]]

    def transport_(self, T: Tensor) -> None:
        """Multiply moments by (T_G, T_H), (points, 2, h, h), and Gram matrices of such from both sides."""
        if "moment G" in self.state:
            old = self.moments()
            self.state["moment G"], self.state["moment H"] = self.times(old, T, "end")
            if "end" in self._kept:
                self._kept["end"] = old
        if "matrix" in self.state:
            self.state["matrix"] = T.mH @ self.state["matrix"] @ T

    def only(self, value: Tensor, otherwise: Tensor | float) -> Tensor:
        """Return values for those points that take their step, and others for the rest."""
        if self.mask is None:
            return value
        return torch.where(self.mask.view(-1, *[1] * (value.dim() - 1)), value, otherwise)

    def restrict(self, mask: Tensor) -> None:
        """Let fewer points take their step."""
        self.mask = mask if self.mask is None else self.mask & mask

    def awaits(self, certificate: Set[SymmetricPair]) -> bool:
        """Return whether to look for the certificates of pairs that await one: at steps 1, 2, 3, 5, 9, and so on.

        Pairs without a gradient, such as experts without tokens, keep waiting, and looking reads from the device.
        """
        return self.steps & (self.steps - 1) == 0 and not certificate.isdisjoint(self.pairs.pairs)

    def sound(self) -> Tensor:
        """Return where the anchor of a pair that takes its step has full rank; (points,)."""
        return self.only(self.metric.sound, True)

    def saved(self) -> dict[str, Any]:
        """Return what :func:`restored` reads."""
        return {name: getattr(self, name) for name in ("members", "flipped", "group", "steps", "state")}

    def name(self, where: Tensor) -> str:
        """Return the name of the first pair of which a point is marked."""
        return self.pairs.pairs[int(where.nonzero()[0]) // self.points].name


def explain(stacks: Iterable[Stack], gradients: Mapping[Tensor, Tensor]) -> NoReturn:
    """Raise for a gradient that is not finite, or a pair whose anchor lacks full rank."""
    if not all(bool((bad := g).isfinite().all()) for g in gradients.values()):
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(bad.shape)} has NaN or infinite entries; no weight was "
            "changed; check the loss, lower the learning rate, or train in bfloat16 or float32"
        )
    for s in stacks:
        if bool((unsound := ~s.sound()).any()):
            raise ValueError(
                f"pair {s.name(unsound)!r}: its {'first' if s.flipped else 'second'} factor has lost full rank "
                "since the optimiser was made; no weight was changed; make a new optimiser for these weights"
            )
    raise ValueError("the sum of a gradient's squares is beyond the range of its dtype; no weight was changed")


def restored(
    entry: Mapping[str, Any], pairs: Sequence[SymmetricPair], new_state: Callable[[Stack], dict[str, Tensor]]
) -> Stack:
    """Restore a stack from its entry in a ``state_dict``."""
    s = Stack(pairs, entry["members"], entry["flipped"], entry["group"])
    saved, new = entry["state"], new_state(s) if entry["state"] else {}
    shapes, wanted = ({name: tuple(value.shape) for name, value in state.items()} for state in (saved, new))
    if shapes != wanted or len({abs(p.scale) for p in pairs}) > 1:
        raise ValueError(
            f"the state of pairs has {shapes} where this optimiser has {wanted}: it is of another version, "
            "another rank, or another model; set ranks, lora_alpha and rslora as they were, or make a new optimiser"
        )
    s.state = {name: value.to(new[name].device) for name, value in saved.items()}
    s.steps = entry["steps"]
    return s
