"""Pairs of equal shape and scale that take a step together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ..linalg import at_least_float32
from ..symmetries.blocks import BlockStack
from ..symmetries.pairs import SymmetricPair
from ..symmetries.stacks import PairStack
from .metric import Metric, eye_like, on_cpu, trace, wide

__all__ = ["Bucket", "Part", "Step"]

#: Numbers of a factor that fit in a processor's cache, with their gradients, moments and intermediate results.
_IN_CACHE = 2**16


class Bucket:
    """Pairs of equal shape and scale in one parameter group, oriented so that H is the anchor: of full column rank.

    ``members`` are their positions among the optimiser's pairs, ``flipped`` says whether G and H have swapped roles,
    and ``scale`` is positive: 1 for an adapter's 0. ``state`` holds tensors whose first dimension runs over points:
    one for each pair, or for each column of each pair where the group is diagonal.
    """

    def __init__(self, pairs: Sequence[SymmetricPair], members: Sequence[int], flipped: bool, group: int) -> None:
        self.stack = PairStack([replace(p, G=p.H, H=p.G) if flipped else p for p in pairs])
        self.members, self.flipped, self.group = list(members), flipped, group
        self.scale = abs(pairs[0].scale) or 1.0
        self.state: dict[str, Tensor] = {}
        self.steps = 0
        self.points = self.stack.group.h if self.stack.group.diagonal else 1  # of one pair
        self.parts: list[tuple[int, slice, BlockStack, list[slice]]] = []
        for side, rows in enumerate((self.stack.n, self.stack.m)):
            blocks = [(p.G, p.H)[side] for p in self.stack.pairs]
            ends = zip(blocks[0], accumulate(b.rows for b in blocks[0]), strict=True)
            biases = [slice(end - b.rows, end) for b, end in ends if len(b.shape) == 1]
            count = max(1, _IN_CACHE // (rows * self.stack.group.h)) if on_cpu(blocks[0][0].tensor) else len(blocks)
            for i in range(0, len(blocks), count):
                points = slice(i * self.points, (i + count) * self.points)
                self.parts.append((side, points, BlockStack(blocks[i : i + count]), biases))

    def active(self, gradients: Collection[Tensor]) -> list[bool]:
        """List which pairs have a gradient; raise for those of which only a part has one."""
        found = []
        for p in self.stack.pairs:
            without = [b for b in p.G + p.H if b.tensor not in gradients]
            found.append(not without)
            if 0 < len(without) < len(p.G + p.H):
                raise ValueError(
                    f"pair {p.name!r}: {without[0].place} has no gradient but the rest of the pair has; train both "
                    "factors, or pass this pair to another optimiser"
                )
        return found


@dataclass
class Part:
    """One factor in a step: of all pairs or, on the CPU, of as many as fit in its cache."""

    side: int
    points: slice
    blocks: BlockStack
    biases: list[slice]
    weights: list[list[Tensor]]
    gradients: list[list[Tensor]]

    def of(self, A: Tensor) -> Tensor:
        """Return the matrices of this part in (points, 2, h, h)."""
        return A[self.points, self.side]


class Step:
    """One step of the pairs of a bucket, whose factors are read and written part by part, as rows (points, rows, h).

    Small matrices are stacked as (points, 2, h, h), with those of G before those of H; ``metric`` is that at the
    weights. ``clip`` multiplies the gradients. Where ``mask``, () or (points,), is False, nothing changes.
    """

    def __init__(
        self,
        bucket: Bucket,
        active: Sequence[bool],
        gradients: Mapping[Tensor, Tensor],
        metric: Callable[[Bucket, Tensor, Tensor], Metric],
    ) -> None:
        self.bucket, self.state, self._metric = bucket, bucket.state, metric
        self.parts = [Part(*part, _views(part[2], None), _views(part[2], gradients)) for part in bucket.parts]
        self.clip: Tensor | None = None
        self.mask: Tensor | None = None
        self._change: Tensor | None = None
        self.metric = metric(bucket, *self.grams(map(self.x, self.parts)).unbind(-3))
        if not all(active):
            self.mask = torch.tensor(active, device=self.metric.sound.device).repeat_interleave(bucket.points)

    def _read(self, views: list[list[Tensor]]) -> Tensor:
        """Join views to rows in float32 at least; of a single view no copy is made."""
        x = self.bucket.stack.group.to_point(_joined([_joined(column, 0) for column in views], 1)).flatten(0, -3)
        return x if x.is_complex() else x.to(at_least_float32(x.dtype))

    def x(self, part: Part) -> Tensor:
        """Read the rows of a part."""
        x = self._read(part.weights)
        return x if self._change is None else _times(x, part.of(self._change))

    def g(self, part: Part) -> Tensor:
        """Read the gradient of a part."""
        g = self._read(part.gradients)
        if self.clip is not None:
            g = g * self.clip.to(g.device, g.real.dtype)
        return g if self._change is None else _times(g, part.of(self._change.flip(-3)))

    def grams(self, rows: Iterable[Tensor]) -> Tensor:
        """Return the Gram matrices of rows of all parts in double precision."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for part, x in zip(self.parts, rows, strict=True):
            x = wide(x)
            found[part.side].append(x.mH @ x)
        return torch.stack([torch.cat(of_side) for of_side in found], dim=-3)

    def squared_norm(self) -> Tensor:
        """Compute the squared norm of the gradient in the metric, ()."""
        K_inv = self.metric.inverse_roots
        return self.only(trace(K_inv @ self.grams(map(self.g, self.parts)) @ K_inv.mH), 0).sum()

    def only(self, value: Tensor, otherwise: Tensor | float, part: Part | None = None) -> Tensor:
        """Return values (of a part) for the points that take their step, and others for the rest."""
        if self.mask is None:
            return value
        mask = self.mask if part is None or self.mask.dim() == 0 else self.mask[part.points]
        return torch.where(mask.view(-1, *[1] * (value.dim() - 1)), value, otherwise)

    def restrict(self, mask: Tensor) -> None:
        """Let fewer points take their step."""
        self.mask = mask if self.mask is None else self.mask & mask

    def straighten_(self) -> Tensor:
        """Turn points with a skewed anchor to a gauge in which it has orthonormal columns; return what stays skewed.

        The change is as accurate as the condition of N allows, hence the repetitions on the CPU. Elsewhere the host
        does not know which anchors are skewed: all are multiplied, most of them by 1, at every eighth step.
        """
        skewed = self.metric.skewed()
        readable = on_cpu(skewed)
        self.bucket.steps += 1
        if not readable and self.bucket.steps % 8 != 1:
            return torch.zeros_like(skewed)
        for _ in range(3 if readable else 1):
            if readable and not bool(skewed.any()):
                break
            change = self.metric.straightening(torch.finfo(self.parts[0].weights[0][0].dtype).max)
            change = self.only(change, eye_like(change))
            self.transport_(change.flip(-3))
            self._change = change if self._change is None else self._change @ change
            self.metric = self._metric(self.bucket, *self.grams(map(self.x, self.parts)).unbind(-3))
            skewed = self.metric.skewed()
        return skewed

    def rows(self, name: str, part: Part, columns: int | None = None) -> Tensor:
        """View the state of the rows of a part, which may be changed in place; at first 0, in the order of memory."""
        key = f"{name} {'GH'[part.side]}"
        if key not in self.state:
            x = self.x(part) if columns is None else self.x(part).real[..., :columns]
            points, transposed = len(self.metric.sound), x.stride(-2) < x.stride(-1)
            rows, h = x.shape[-2:]
            self.state[key] = x.new_zeros(points, h, rows).mT if transposed else x.new_zeros(points, rows, h)
        return self.state[key][part.points]

    def moved(self, part: Part, d: Tensor, A: Tensor, decay: float) -> Tensor:
        """Return the rows of a part plus d A, after the product is multiplied by 1 - ``decay``; biases stay."""
        x = self.x(part)
        end = x * max(1 - decay, 0) ** 0.5
        for rows in part.biases if decay else ():
            end[..., rows, :] = x[..., rows, :]
        return self.only(end.baddbmm_(d, part.of(A).to(d.dtype)), x, part)

    def write_(self, part: Part, x: Tensor) -> None:
        """Write the rows of a part, rounded to the dtype of their parameters."""
        group = self.bucket.stack.group
        part.blocks.scatter_(group.from_point(x.unflatten(0, (-1, group.h)) if group.diagonal else x))

    def advance_(self, directions: Iterable[Tensor], A: Tensor, decay: float) -> None:
        """Add directions, one for each part, times A to the rows, and transport the state with them."""
        across: tuple[list[Tensor], list[Tensor]] = [], []
        ends: tuple[list[Tensor], list[Tensor]] = [], []
        for part, d in zip(self.parts, directions, strict=True):
            end = self.moved(part, d, A, decay)
            y = wide(end)
            across[part.side].append(wide(self.x(part)).mH @ y)
            ends[part.side].append(y.mH @ y)
            self.write_(part, end)
        to = self._metric(self.bucket, *map(torch.cat, ends))
        T = self.metric.transport_covectors(to, torch.stack([torch.cat(of_side) for of_side in across], dim=-3))
        self.transport_(self.only(T, eye_like(T)).to(d.dtype))

    def transport_(self, T: Tensor) -> None:
        """Multiply moments by (T_G, T_H), (points, 2, h, h), and the Gram matrices of such from both sides."""
        for part in self.parts if "moment G" in self.state else ():
            m = self.rows("moment", part)
            m.copy_(_times(m, part.of(T)))
        if "matrix" in self.state:
            T = T.to(self.state["matrix"].dtype)
            self.state["matrix"].copy_(T.mH @ self.state["matrix"] @ T)


def _views(blocks: BlockStack, tensors: Mapping[Tensor, Tensor] | None) -> list[list[Tensor]]:
    """View blocks in their parameters or in ``tensors``, column by column; what is absent is zero."""
    columns: dict[int, list[Tensor]] = {}
    for run in blocks.runs:
        p = run.first.tensor
        t = p if tensors is None else tensors.get(p)
        t = torch.zeros_like(p) if t is None else t.detach()
        columns.setdefault(run.row, []).append(run.view(t.contiguous()))
    return list(columns.values())


def _times(X: Tensor, A: Tensor) -> Tensor:
    """Return X A, computed in the precision of A, in the dtype and the memory order of X."""
    return torch.empty_like(X, dtype=A.dtype).baddbmm_(X.to(A.dtype), A, beta=0).to(X.dtype)


def _joined(views: list[Tensor], dim: int) -> Tensor:
    """Join views (pairs, rows, h) along a dimension, in the order in which they lie in memory; of one, no copy."""
    if len(views) == 1:
        return views[0]
    if views[0].stride(1) < views[0].stride(2):
        return torch.cat([v.transpose(1, 2) for v in views], (0, 2)[dim]).transpose(1, 2)
    return torch.cat(views, dim)
