"""Pairs of equal shape and scale that take a step together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..linalg import at_least_float32
from ..symmetries.blocks import Block, BlockStack
from ..symmetries.pairs import SymmetricPair
from ..symmetries.stacks import PairStack
from .metric import Metric, eye_like, on_cpu, trace, wide

__all__ = ["Bucket", "Part", "Step", "all_finite", "check_shape", "explain", "gradients_of", "restored"]

#: Numbers of a factor that fit in a processor's cache, with their gradients, moments and intermediate results.
_IN_CACHE = 2**16


#: The metric of a bucket at points with some Gram matrices.
MetricOf = Callable[["Bucket", Tensor, Tensor], Metric]
#: Blocks of consecutive pairs at equal distances in one parameter: the first, its row, and size and stride of the view.
Run = tuple[Block, int, tuple[int, ...], tuple[int, ...]]


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
        self.dtype = at_least_float32(pairs[0].G[0].tensor.dtype)
        self.steps = 0
        self.points = self.stack.group.h if self.stack.group.diagonal else 1  # of one pair
        self.parts: list[tuple[int, slice, list[slice], list[Run]]] = []
        for side, rows in enumerate((self.stack.n, self.stack.m)):
            blocks = [(p.G, p.H)[side] for p in self.stack.pairs]
            ends = zip(blocks[0], accumulate(b.rows for b in blocks[0]), strict=True)
            biases = [slice(end - b.rows, end) for b, end in ends if len(b.shape) == 1]
            count = max(1, _IN_CACHE // (rows * self.stack.group.h)) if on_cpu(blocks[0][0].tensor) else len(blocks)
            for i in range(0, len(blocks), count):
                points = slice(i * self.points, (i + count) * self.points)
                runs = BlockStack(blocks[i : i + count]).runs
                views = [(r.first, r.rows.start, r.size, r.stride) for r in runs]
                self.parts.append((side, points, biases, views))

    def active(self, gradients: Collection[Tensor]) -> list[bool]:
        """List which pairs have a gradient; raise for those of which only a part has one."""
        found = []
        for p in self.stack.pairs:
            without = [b for b in p.G + p.H if getattr(b.module, b.attribute) not in gradients]
            found.append(not without)
            if 0 < len(without) < len(p.G + p.H):
                raise ValueError(
                    f"pair {p.name!r}: {without[0].place} has no gradient but the rest of the pair has; train both "
                    "factors, or pass this pair to another optimiser"
                )
        return found


@dataclass
class Part:
    """One factor in a step: of all pairs or, on the CPU, of as many as fit in its cache.

    ``x`` are its rows, ``g`` their gradients, (points, rows, h), ``views`` the rows in the parameters, column by column
    of blocks, or in the contiguous ``copies`` of parameters that are not.
    """

    side: int
    points: slice
    biases: list[slice]
    x: Tensor
    g: Tensor
    views: list[list[Tensor]]
    copies: dict[Tensor, Tensor]

    def of(self, A: Tensor) -> Tensor:
        """Return the matrices of this part in (points, 2, h, h)."""
        return A[self.points, self.side]


class Step:
    """One step of the pairs of a bucket, whose factors are read at once and written part by part.

    Small matrices are stacked as (points, 2, h, h), with those of G before those of H; ``metric`` is that at the
    weights. Where ``mask``, () or (points,), is False, nothing changes.
    """

    def __init__(
        self, bucket: Bucket, active: Sequence[bool], gradients: Mapping[Tensor, Tensor], metric: MetricOf
    ) -> None:
        self.bucket, self.state, self._metric = bucket, bucket.state, metric
        self.parts = [self._read(*part, gradients) for part in bucket.parts]
        self.mask: Tensor | None = None
        self.metric = metric(bucket, *self.grams([part.x for part in self.parts]).unbind(-3))
        if not all(active):
            self.mask = torch.tensor(active, device=self.metric.sound.device).repeat_interleave(bucket.points)

    def _read(
        self, side: int, points: slice, biases: list[slice], runs: list[Run], gradients: Mapping[Tensor, Tensor]
    ) -> Part:
        """Read rows and gradients in float32 at least: views if possible, and zeros for gradients that are absent."""
        weights, slopes, copies = dict[int, list[Tensor]](), dict[int, list[Tensor]](), dict[Tensor, Tensor]()
        for first, row, size, stride in runs:
            p = first.tensor
            if not p.is_contiguous() and p not in copies:
                copies[p] = p.detach().contiguous()
            x, g = copies.get(p, p.detach()), (gradients[p] if p in gradients else torch.zeros_like(p)).contiguous()
            weights.setdefault(row, []).append(x.as_strided(size, stride, x.storage_offset() + first.offset))
            slopes.setdefault(row, []).append(g.as_strided(size, stride, g.storage_offset() + first.offset))
        x, g = self._joined(weights), self._joined(slopes)
        return Part(side, points, biases, x, g, list(weights.values()), copies)

    def _joined(self, columns: Mapping[int, list[Tensor]]) -> Tensor:
        """Join views, (pairs, rows, h[, 2]), to one point for each pair, or for each column of a pair."""
        rows = [views[0] if len(views) == 1 else _cat(views, 0) for views in columns.values()]
        x, group = rows[0] if len(rows) == 1 else _cat(rows, 1), self.bucket.stack.group
        if group.diagonal or group.field == "complex":
            x = group.to_point(x).flatten(0, -3)
        return x if x.is_complex() else x.to(self.bucket.dtype)

    def grams(self, rows: Iterable[Tensor]) -> Tensor:
        """Return the Gram matrices of rows of all parts in double precision."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for part, x in zip(self.parts, rows, strict=True):
            x = wide(x)
            found[part.side].append(x.mH @ x)
        return torch.stack([torch.cat(found[0]), torch.cat(found[1])], dim=-3)

    @cached_property
    def gradient_grams(self) -> Tensor:
        """Gram matrices of the gradients."""
        return self.grams([part.g for part in self.parts])

    def clip_(self, factor: Tensor) -> None:
        """Multiply the gradients by a factor."""
        self.gradient_grams = self.gradient_grams * factor.to(self.gradient_grams) ** 2
        for part in self.parts:
            part.g = part.g * factor.to(part.g.device, part.g.real.dtype)

    def squared_norm(self) -> Tensor:
        """Compute the squared norm of the gradient in the metric, ()."""
        K_inv = self.metric.inverse_roots
        return self.only(trace(K_inv @ self.gradient_grams @ K_inv.mH), 0).sum()

    def only(self, value: Tensor, otherwise: Tensor | float, part: Part | None = None) -> Tensor:
        """Return values (of a part) for the points that take their step, and others for the rest."""
        if self.mask is None:
            return value
        mask = self.mask if part is None or self.mask.dim() == 0 else self.mask[part.points]
        return torch.where(mask.view(-1, *[1] * (value.dim() - 1)), value, otherwise)

    def unsound(self) -> Tensor:
        """Tell where the anchor of a pair that takes its step lacks full rank; (points,)."""
        return self.only(~self.metric.sound, torch.zeros_like(self.metric.sound))

    def name(self, where: Tensor) -> str:
        """Return the name of the first pair of which a point is marked."""
        return self.bucket.stack.pairs[int(where.nonzero()[0]) // self.bucket.points].name

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
            change = self.metric.straightening(torch.finfo(self.parts[0].views[0][0].dtype).max)
            change = self.only(change, eye_like(change))
            dual = change.flip(-3)
            for part in self.parts:
                part.x, part.g = _times(part.x, part.of(change)), _times(part.g, part.of(dual))
            self.transport_(dual)
            self.metric = self._metric(self.bucket, *self.grams([part.x for part in self.parts]).unbind(-3))
            skewed = self.metric.skewed()
        return skewed

    def rows(self, name: str, part: Part, columns: int | None = None) -> Tensor:
        """View the state of the rows of a part, which may be changed in place; at first 0, in the order of memory."""
        key = f"{name} {'GH'[part.side]}"
        if key not in self.state:
            x = part.x if columns is None else part.x.real[..., :columns]
            points, rows, h = len(self.metric.sound), *x.shape[1:]
            transposed = x.stride(-2) < x.stride(-1)
            self.state[key] = x.new_zeros(points, h, rows).mT if transposed else x.new_zeros(points, rows, h)
        return self.state[key][part.points]

    def moved(self, part: Part, d: Tensor, A: Tensor, decay: float) -> Tensor:
        """Return the rows of a part plus d A, after the product is multiplied by 1 - ``decay``; biases stay."""
        end = part.x * max(1 - decay, 0) ** 0.5
        for rows in part.biases if decay else ():
            end[..., rows, :] = part.x[..., rows, :]
        return self.only(end.baddbmm_(d, part.of(A).to(d.dtype)), part.x, part)

    def write_(self, part: Part, x: Tensor) -> None:
        """Write the rows of a part, rounded to the dtype of their parameters."""
        group, targets, sources = self.bucket.stack.group, list[Tensor](), list[Tensor]()
        if group.diagonal or group.field == "complex":
            x = group.from_point(x.unflatten(0, (-1, group.h)) if group.diagonal else x)
        heights = [column[0].shape[1] for column in part.views]
        for column, rows in zip(part.views, x.split(heights, dim=1), strict=True):
            targets += column
            sources += rows.split([len(view) for view in column])
        for p, copy in part.copies.items():
            copy.copy_(p)  # what others have written to it since
        torch._foreach_copy_(targets, sources)
        for p, copy in part.copies.items():
            p.copy_(copy)

    def advance_(self, directions: Iterable[Tensor], A: Tensor, decay: float) -> None:
        """Add directions, one for each part, times A to the rows, and transport the state with them."""
        across: tuple[list[Tensor], list[Tensor]] = [], []
        ends: tuple[list[Tensor], list[Tensor]] = [], []
        for part, d in zip(self.parts, directions, strict=True):
            x = self.moved(part, d, A, decay)
            end = wide(x)
            across[part.side].append(wide(part.x).mH @ end)
            ends[part.side].append(end.mH @ end)
            self.write_(part, x)
        to = self._metric(self.bucket, torch.cat(ends[0]), torch.cat(ends[1]))
        T = self.metric.transport_covectors(to, torch.stack([torch.cat(across[0]), torch.cat(across[1])], dim=-3))
        self.transport_(self.only(T, eye_like(T)).to(x.dtype))

    def transport_(self, T: Tensor) -> None:
        """Multiply moments by (T_G, T_H), (points, 2, h, h), and the Gram matrices of such from both sides."""
        for part in self.parts if "moment G" in self.state else ():
            m = self.rows("moment", part)
            m.copy_(_times(m, part.of(T)))
        if "matrix" in self.state:
            T = T.to(self.state["matrix"].dtype)
            self.state["matrix"].copy_(T.mH @ self.state["matrix"] @ T)


def _times(X: Tensor, A: Tensor) -> Tensor:
    """Return X A, computed in the precision of A, in the dtype and the memory order of X."""
    return torch.empty_like(X, dtype=A.dtype).baddbmm_(X.to(A.dtype), A, beta=0).to(X.dtype)


def _cat(views: list[Tensor], dim: int) -> Tensor:
    """Join views (pairs, rows, h) along a dimension, in the order in which they lie in memory."""
    if views[0].stride(1) < views[0].stride(2):
        return torch.cat([v.transpose(1, 2) for v in views], 2 * dim).transpose(1, 2)
    return torch.cat(views, dim)


def gradients_of(param_groups: Iterable[Mapping[str, Any]], scale: Tensor | None) -> dict[Tensor, Tensor]:
    """Return the gradients to descend along, without the scale of a ``GradScaler``."""
    found = {}
    for group in param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which is not supported; build the "
                    "embedding with sparse=False"
                )
            # In float32: the scale is beyond the range of half precision, and so are the gradients that it saved.
            g = p.grad if scale is None else p.grad.to(at_least_float32(p.dtype)) / scale.to(p.grad.device)
            found[p] = -g if group["maximize"] else g
    return found


def all_finite(steps: Sequence[Step], outside: Mapping[Tensor, Tensor]) -> Tensor:
    """Tell whether all gradients, of pairs and outside, are finite, from their sums in float32 at least."""
    sums = [part.g.sum() for s in steps for part in s.parts]
    sums += [g.sum(dtype=at_least_float32(g.dtype)) for g in outside.values()]
    return torch.stack([v.isfinite().to(sums[0].device) for v in sums]).all()


def explain(steps: Iterable[Step], gradients: Mapping[Tensor, Tensor]) -> None:
    """Raise for a gradient that is not finite, or a pair whose anchor lacks full rank."""
    for p, g in gradients.items():
        if not bool(g.isfinite().all()):
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(p.shape)} has NaN or infinite entries; no weight was "
                "changed; check the loss, lower the learning rate, or train in bfloat16 or float32"
            )
    for s in steps:
        if bool((unsound := s.unsound()).any()):
            raise ValueError(
                f"pair {s.name(unsound)!r}: its {'first' if s.bucket.flipped else 'second'} factor has lost full "
                "rank since the optimiser was made; no weight was changed; make a new optimiser for these weights"
            )


def restored(entry: Mapping[str, Any], pairs: Sequence[SymmetricPair], names: AbstractSet[str]) -> Bucket:
    """Restore a bucket from its entry in a ``state_dict``, in which its state must have certain names."""
    members, state = entry["members"], entry["state"]
    if state and state.keys() != names:
        raise ValueError(
            f"the state of pairs has {', '.join(sorted(state))} where this optimiser has "
            f"{', '.join(sorted(names))}: it is of another version; load the model's weights and start "
            "with a new optimiser"
        )
    if len({abs(pairs[i].scale) for i in members}) > 1:
        raise ValueError(
            "pairs that had one scale have several now; set lora_alpha, ranks and rslora as they were, or make a "
            "new optimizer"
        )
    bucket = Bucket([pairs[i] for i in members], members, entry["flipped"], entry["group"])
    for side, rows in (("G", bucket.stack.n), ("H", bucket.stack.m)):
        h = bucket.stack.group.h
        shape = (bucket.points * len(members), rows, h // bucket.points)
        check_shape(state[f"moment {side}"].shape if f"moment {side}" in state else shape, shape)
    bucket.steps = entry.get("steps", 0)
    bucket.state = {name: value.to(pairs[members[0]].G[0].tensor.device) for name, value in state.items()}
    return bucket


def check_shape(given: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise if the state of a weight is for one of another shape."""
    if tuple(given) != tuple(wanted):
        raise ValueError(
            f"the state is for weights of shape {tuple(given)}, but the weights now have shape "
            f"{tuple(wanted)}: another rank, or another model"
        )
