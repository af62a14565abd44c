"""Points of the quotients among the parameters of a model, and weights that are computed from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .._geoopt import ManifoldParameter
from ..manifold import GLQuotient
from ..rescale import RescaleQuotient
from ..weights import weights_of
from .pairs import PairStack, SymmetricPair
from .slots import GL, Slot, real_view


class Point:
    """A parameter of a model that holds a stack of pairs of its weights, as long as :meth:`remove` is not called.

    In a pass of the model the parameter is split once: the gradient of each slice would have the size of the whole.
    """

    def __init__(self, root: nn.Module, name: str, stack: PairStack) -> None:
        self.root, self.name, self.stack = root, name, stack
        self._starts = sorted({run.points.start for run in stack.runs})
        self._pieces: dict[int, Tensor] = {}
        before, after = root.register_forward_pre_hook, root.register_forward_hook
        self._hooks = [before(self._split), after(self._join, always_call=True)]

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        found: Tensor = getattr(self.root, self.name)
        if isinstance(found, nn.Parameter) and not isinstance(found, ManifoldParameter):
            raise ValueError(
                f"{self.name!r} has been replaced by a plain parameter (load_state_dict(assign=True), to_empty, FSDP), "
                "which no optimiser keeps on the manifold; load without assign, or call plain_parameters_ before"
            )
        return found

    def rows(self, pairs: slice) -> Tensor:
        """Return the rows of some pairs, (pairs, n + m, h[, 2]), real."""
        pieces = [x for start, x in self._pieces.items() if pairs.start <= start < pairs.stop]
        x = self.parameter[pairs] if not pieces else pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return self.stack.group.from_point(x)

    def _split(self, *_: Any) -> None:
        sizes = [stop - start for start, stop in pairwise([*self._starts, len(self.stack)])]
        self._pieces = dict(zip(self._starts, self.parameter.split(sizes), strict=True))

    def _join(self, *_: Any) -> None:
        self._pieces = {}

    def remove(self) -> None:
        """Take the parameter from the model."""
        delattr(self.root, self.name)
        for hook in self._hooks:
            hook.remove()


class FromPoints(nn.Module):
    """Compute a weight of a module from points.

    ``original`` keeps the entries in no pair; if there are none it is an empty buffer, and ``weight`` keeps the
    parameter itself. ``order`` is that of the module's parameters.
    """

    def __init__(self, module: nn.Module, weight: Tensor, covered: Tensor) -> None:
        super().__init__()
        self.covered: Tensor
        self.order = tuple(name for name, _ in module.named_parameters(recurse=False))
        self.shape, self.whole, self.weight = weight.shape, bool(covered.all()), [weight]
        self.register_buffer("covered", covered, persistent=False)
        self.sources: list[tuple[Point, int]] = []

    def views(self, weight: Tensor) -> Iterator[tuple[Point, Tensor, slice, slice]]:
        """Yield the points, and where in the weight some rows of some of their pairs lie."""
        for point, i in self.sources:
            run = point.stack.runs[i]
            yield point, run.slot.of(weight), run.points, run.rows

    def forward(self, original: Tensor) -> Tensor:
        """Return the weight, differentiably."""
        weight = original.new_empty(self.shape) if self.whole else original.clone()
        for point, view, pairs, rows in self.views(weight):
            view.copy_(point.rows(pairs)[:, rows])
        return weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Write a weight to the points, and return the rest of it."""
        weight = weight.contiguous()
        for point, view, pairs, rows in self.views(weight):
            point.rows(pairs)[:, rows] = view
        return weight.new_empty(0) if self.whole else weight.masked_fill(self.covered, 0)


def computed_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any, FromPoints]]:
    """Walk through the weights that are computed from points: where they are, torch's list of steps, and ours."""
    for module in model.modules():
        for name, steps in dict(getattr(module, "parametrizations", {})).items():
            if isinstance(steps[0], FromPoints):
                yield module, name, steps, steps[0]


def point_pairs(model: nn.Module) -> list[SymmetricPair]:
    """List the points of the quotients among a model's parameters as pairs, which state their metric.

    Those of :func:`quotient_manifolds.symmetries.manifold_parameters_` are called as the pairs of weights that they
    hold, any other by its path.
    """
    held: dict[Tensor, Point] = {}
    for *_, step in computed_weights(model):
        held.update((point.parameter, point) for point, _ in step.sources)
    found = list[SymmetricPair]()
    for name, x in weights_of(model).items():
        if isinstance(x, ManifoldParameter) and isinstance(x.manifold, (GLQuotient, RescaleQuotient)):
            found += _pairs_of(name, x, held.get(x))
    return found


def _pairs_of(name: str, x: ManifoldParameter, point: Point | None) -> Iterator[SymmetricPair]:
    """Describe the points in a parameter as pairs."""
    if isinstance(x.manifold, RescaleQuotient):
        n, m, group, metric = 1, 1, GL(x.shape[-1], diagonal=True), x.manifold.metric
    else:
        n, m, metric = x.manifold.n, x.manifold.m, x.manifold.metric.name
        group = GL(x.shape[-1], field="complex" if x.is_complex() else "real")

    whole = torch.empty(x.shape, dtype=torch.complex64 if x.is_complex() else None, device="meta")
    flat = real_view(whole.unsqueeze(0).flatten(0, -3)) if point is None else point.stack.group.from_point(whole)
    for i in range(x[..., 0, 0].numel() if point is None else len(point.stack)):
        G, H = (Slot.from_view(name, whole, flat[i, rows]) for rows in (slice(0, n), slice(n, n + m)))
        if point is None:
            one = name if x.dim() == 2 else f"{name}[{i}]"
            yield SymmetricPair(one, "point", group, (G,), (H,), metric=metric)
        else:
            yield replace(point.stack.pairs[i], G=(G,), H=(H,), null=(), metric=metric)
