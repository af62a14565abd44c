"""The pairs that an optimiser trains: which parameters form some, in buckets of equal shape, and a step of a bucket."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg import at_least_float32, column_rank_ratio
from ..symmetries.blocks import BlockStack
from ..symmetries.lora import lora_layers
from ..symmetries.modules import is_sharded, plain_names
from ..symmetries.pairs import SymmetricPair
from ..symmetries.stacks import PairStack
from .metric import Metric, eye_like, on_cpu, trace, wide

#: What has become of parameters that are not where they were.
GONE = (
    "have been replaced or deleted since this optimiser was created (load_state_dict(assign=True), delete_adapter, "
    "merge_and_unload, or FSDP2 and DeepSpeed, whose shards have no geometry of their own); create it anew, or use DDP"
)


#: Numbers of a factor that fit in a processor's cache, with their gradients, moments and intermediate results.
_IN_CACHE = 2**16
#: The metric of a bucket at points with some Gram matrices.
MetricOf = Callable[["Bucket", Tensor, Tensor], Metric]
#: Small matrices of G and of H, part by part.
_Sides = tuple[list[Tensor], list[Tensor]]


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
        self.steps, self.dtype = 0, at_least_float32(pairs[0].G[0].tensor.dtype)
        self.points = self.stack.group.h if self.stack.group.diagonal else 1  # of one pair
        self.parts: list[tuple[int, slice, BlockStack]] = []  # side, points and rows
        for side, rows in enumerate((self.stack.n, self.stack.m)):
            blocks = [(p.G, p.H)[side] for p in self.stack.pairs]
            some = max(1, _IN_CACHE // (rows * self.stack.group.h)) if on_cpu(blocks[0][0].tensor) else len(blocks)
            for i in range(0, len(blocks), some):
                points = slice(i * self.points, (i + some) * self.points)
                self.parts.append((side, points, BlockStack(blocks[i : i + some])))

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

    def read(self, gradients: Mapping[Tensor, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rows of parts and their gradients, (points, rows, h), in float32 at least; absent ones as 0."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for of_parts, tensors in zip(found, (None, gradients), strict=True):
            for _, _, rows in self.parts:
                X = self.stack.group.to_point(rows.read(tensors)).flatten(0, -3)
                of_parts.append(X if X.is_complex() else X.to(self.dtype))
        return found


class Step:
    """One step of the pairs of a bucket, with their rows ``x`` and gradients ``g`` as one tensor for each part.

    Small matrices are stacked as (points, 2, h, h), with those of G before those of H; ``metric`` is that at the
    weights. Where ``mask``, () or (points,), is False, nothing changes.
    """

    def __init__(
        self, bucket: Bucket, active: Sequence[bool], gradients: Mapping[Tensor, Tensor], metric: MetricOf
    ) -> None:
        self.bucket, self.state, self._metric = bucket, bucket.state, metric
        self.x, self.g = bucket.read(gradients)
        self.dtype = self.x[0].dtype
        self.mask: Tensor | None = None
        if not all(active):
            self.mask = torch.tensor(active, device=self.x[0].device).repeat_interleave(bucket.points)
        self.metric = metric(bucket, *self.grams(self.x).unbind(-3))

    def times(self, found: Iterable[Tensor], A: Tensor) -> Iterator[Tensor]:
        """Multiply rows of G by A_G and rows of H by A_H, in the precision of A, part by part."""
        for X, (side, points, _) in zip(found, self.bucket.parts, strict=True):
            yield X.to(A.dtype) @ A[points, side]

    def grams(self, found: Iterable[Tensor]) -> Tensor:
        """Return the Gram matrices of G and of H in double precision, (points, 2, h, h)."""
        sides: _Sides = [], []
        for X, (side, *_) in zip(map(wide, found), self.bucket.parts, strict=True):
            sides[side].append(X.mH @ X)
        return _stacked(sides)

    def rows(self, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """View the state of all rows, which may be changed in place; at first 0, in the order of memory."""
        views = []
        for X, (side, points, _) in zip(like, self.bucket.parts, strict=True):
            key = f"{name} {'GH'[side]}"
            if key not in self.state:
                transposed = X.stride(-2) < X.stride(-1)
                zeros = X.new_zeros(len(self.metric.sound), *(X.mT if transposed else X).shape[1:])
                self.state[key] = zeros.mT if transposed else zeros
            views.append(self.state[key][points])
        return views

    @cached_property
    def gradient_grams(self) -> Tensor:
        """Gram matrices of the gradients."""
        return self.grams(self.g)

    def squared_norm(self) -> Tensor:
        """Compute the squared norm of the gradient in the metric, ()."""
        K_inv = self.metric.inverse_roots
        return self.only(trace(K_inv @ self.gradient_grams @ K_inv.mH), 0).sum()

    def clip_(self, factor: Tensor) -> None:
        """Multiply the gradients by a factor."""
        self.gradient_grams = self.gradient_grams * factor.to(self.gradient_grams) ** 2
        self.g = [g * factor.to(g.device, g.real.dtype) for g in self.g]

    def only(self, value: Tensor, otherwise: Tensor | float, points: slice = slice(None)) -> Tensor:
        """Return values for those points that take their step, and others for the rest."""
        if self.mask is None:
            return value
        mask = self.mask[points] if self.mask.dim() else self.mask
        return torch.where(mask.view(-1, *[1] * (value.dim() - 1)), value, otherwise)

    def restrict(self, mask: Tensor) -> None:
        """Let fewer points take their step."""
        self.mask = mask if self.mask is None else self.mask & mask

    def unsound(self) -> Tensor:
        """Return where the anchor of a pair that takes its step lacks full rank; (points,)."""
        return self.only(~self.metric.sound, False)

    def name(self, where: Tensor) -> str:
        """Return the name of the first pair of which a point is marked."""
        return self.bucket.stack.pairs[int(where.nonzero()[0]) // self.bucket.points].name

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
            change = self.metric.straightening(torch.finfo(self.bucket.stack.parameters()[0].dtype).max)
            change = self.only(change, eye_like(change))
            dual = change.flip(-3)
            self.x = [X.to(self.dtype) for X in self.times(self.x, change)]
            self.g = [X.to(self.dtype) for X in self.times(self.g, dual)]
            self.transport_(dual)
            self.metric = self._metric(self.bucket, *self.grams(self.x).unbind(-3))
            skewed = self.metric.skewed()
        return skewed

    def advance_(self, directions: Iterable[Tensor], A: Tensor, decay: float, *, transport: bool = True) -> None:
        """Write rows plus directions times A, after products are multiplied by 1 - ``decay``; biases do not decay.

        The state is transported with them, or left as it is.
        """
        group = self.bucket.stack.group
        across: _Sides = [], []
        ends: _Sides = [], []
        for x, d, (side, points, rows) in zip(self.x, directions, self.bucket.parts, strict=True):
            end = x * max(1 - decay, 0) ** 0.5
            for run in rows.runs if decay else ():
                if len(run.block.shape) == 1:
                    end[:, run.rows] = x[:, run.rows]
            end = self.only(end.baddbmm_(d, A[points, side].to(d.dtype)), x, points)
            if transport:
                X, Y = wide(x), wide(end)
                across[side].append(X.mH @ Y)
                ends[side].append(Y.mH @ Y)
            rows.scatter_(group.from_point(end.unflatten(0, (-1, group.h)) if group.diagonal else end))
        if transport:
            to = self._metric(self.bucket, *_stacked(ends).unbind(-3))
            T = self.metric.transport_covectors(to, _stacked(across))
            self.transport_(self.only(T, eye_like(T)).to(self.dtype))

    def transport_(self, T: Tensor) -> None:
        """Multiply moments by (T_G, T_H), (points, 2, h, h), and the Gram matrices of such from both sides."""
        if "moment G" in self.state:
            for m, (side, points, _) in zip(self.rows("moment", self.x), self.bucket.parts, strict=True):
                m.copy_(m.to(T.dtype) @ T[points, side])
        if "matrix" in self.state:
            T = T.to(self.state["matrix"].dtype)
            self.state["matrix"] = T.mH @ self.state["matrix"] @ T


def _stacked(sides: _Sides) -> Tensor:
    """Stack small matrices as (points, 2, h, h)."""
    return torch.stack([torch.cat(sides[0]), torch.cat(sides[1])], dim=-3)


def gradients_of(param_groups: Iterable[Mapping[str, Any]], scale: Tensor | None) -> dict[Tensor, Tensor]:
    """Return the gradients to descend along, without the scale of a ``GradScaler``."""
    found = dict[Tensor, Tensor]()
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


class Places:
    """Where a model holds the parameters of an optimiser: whoever replaces them later leaves the new ones untrained."""

    def __init__(self, model: nn.Module, own: Collection[Tensor]) -> None:
        self.model = model
        self._adapters = [[layer, name, layer.scaling[name]] for layer, name, B in lora_layers(model) if B in own]
        self._named = {name: p for name, p in model.named_parameters() if p in own}

    def warn_of_strangers(self) -> None:
        """Warn of a gradient, where the optimiser's parameters have none."""
        name = next((name for name, p in self.model.named_parameters() if p.grad is not None), None)
        if name is not None:
            warnings.warn(
                f"no parameter of this optimiser has a gradient, but {name!r}, which is none of them, has one: an "
                "adapter that is added later joins by add_param_group",
                stacklevel=4,
            )

    def check(self, own: Collection[Tensor]) -> None:
        """Raise if parameters have left the model or are merged into others; warn of a scale that has changed."""
        inside = set(self.model.parameters())
        gone = [name for name, p in self._named.items() if p not in own or p not in inside]
        if gone:
            more = f" and {len(gone) - 1} other parameters" if gone[1:] else ""
            raise ValueError(f"{gone[0]!r}{more} of the model {GONE}")
        for adapter in self._adapters:
            layer, name, scale = adapter
            if layer.merged_adapters:
                raise ValueError(
                    f"adapter {layer.merged_adapters[0]!r} is merged into the base weights, which a step of its "
                    "factors does not reach; call unmerge_adapter() first"
                )
            if layer.scaling[name] != scale:
                warnings.warn(
                    f"the scale of adapter {name!r} was {scale:g} when this optimiser was created and is "
                    f"{layer.scaling[name]:g} now: its steps are as long as for the former; create it anew",
                    stacklevel=4,
                )
                adapter[2] = layer.scaling[name]


def alone(pairs: Iterable[SymmetricPair], own: Collection[Tensor]) -> list[SymmetricPair]:
    """List what forms no pair, but has matrices among ``own`` in its module."""
    found = [(p.model, p) for p in pairs if p.group is None and not p.frozen and p.model is not None]
    modules: dict[tuple[nn.Module, str], nn.Module] = {}
    for model in {model for model, _ in found}:
        plain = plain_names(model)
        modules.update(((model, plain(path)), m) for path, m in model.named_modules())
    return [p for model, p in found if any(q in own and q.dim() > 1 for q in modules[model, p.module].parameters())]


def reasons(pairs: Iterable[SymmetricPair]) -> str:
    """Join the reasons why pairs have no group, each with the first of its pairs."""
    names: dict[str, list[str]] = {}
    for p in pairs:
        names.setdefault(p.reason, []).append(p.name)
    return "; ".join(
        f"{why} ({first!r}{f' and {len(rest)} more' if rest else ''})" for why, (first, *rest) in names.items()
    )


def group_of(pair: SymmetricPair, home: Mapping[Tensor, int], paired: Collection[Tensor]) -> int | None:
    """Return the parameter group of a usable pair; None for pairs that are to be ignored.

    ``home`` maps every parameter to its group, ``paired`` holds the parameters of all usable pairs.
    """
    blocks = pair.G + pair.H
    inside = {home[b.tensor] for b in blocks if b.tensor in home}
    if pair.group is None or not inside:
        if pair.frozen and any(b.tensor in home and b.tensor not in paired for b in blocks):
            raise ValueError(
                f"pair {pair.name!r} is half frozen ({pair.reason}), but the quotient needs both factors to move; "
                "unfreeze it, or train the other half with torch.optim.AdamW"
            )
        return None
    for b in blocks:
        if b.tensor not in home:
            raise ValueError(
                f"pair {pair.name!r}: {b.place} is not among the optimiser's parameters but the rest of the pair is; "
                "pass both factors"
            )
        if is_sharded(b.tensor):
            raise ValueError(
                f"pair {pair.name!r} has a sharded parameter ({type(b.tensor).__name__}; FSDP, DTensor or ZeRO-3), but "
                "its geometry needs whole factors; use DDP, or keep these modules out of the sharding"
            )
    if len(inside) > 1:
        raise ValueError(
            f"pair {pair.name!r} is split over the parameter groups {sorted(inside)}; put both of its factors into one "
            "group, because they move together"
        )
    return inside.pop()


def orientation(pair: SymmetricPair) -> bool | None:
    """Tell whether the factors of a pair must swap roles, because H lacks full column rank and G does not.

    None for an adapter of which both factors lack full rank, but not so far that gradients could not move it.
    """
    if any(b.tensor.is_meta for b in pair.G + pair.H):
        raise ValueError(f"pair {pair.name!r} is on the meta device; load its weights before making an optimiser")
    x = pair.gather().detach()
    tolerance = x.shape[-1] * torch.finfo(at_least_float32(x.real.dtype)).eps
    full = [
        X.shape[-2] >= X.shape[-1] and bool((column_rank_ratio(wide(X)) > tolerance).all())
        for X in x.split([pair.n, pair.m], dim=-2)
    ]
    if any(full):
        return not full[1]
    if pair.kind == "lora" and bool(x.any()):
        return None
    raise ValueError(
        f"pair {pair.name!r}: both factors lack full column rank ({pair.n} and {pair.m} rows, {x.shape[-1]} columns), "
        "where the quotient has no metric; initialise one of them with a full-rank matrix, lower the rank, or leave "
        "the pair out"
    )
