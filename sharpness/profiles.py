"""The loss along a tangent vector: on the measure's geodesic, and on the straight line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from quotient_manifolds.batches import to_device
from quotient_manifolds.checks import as_count
from quotient_manifolds.symmetries.modules import check_model

from .direction import Direction, perturbed
from .losses import LossFunction, Objective, to_float32
from .model_state import preserve_model_state
from .perturb import becomes_float32
from .weights import named_weights

__all__ = ["Profile", "profile"]


@dataclass(frozen=True)
class Profile:
    """The loss along a direction.

    Attributes
    ----------
    measure : str
        Name of the measure whose direction it is.
    lengths : tuple of float
        Signed distance from the weights, in the measure's metric.
    losses : dict of str to tuple of float
        Losses by the path: ``"second-order"`` or ``"exact"`` geodesic, or ``"first-order"``, the straight line.
    radius : float
        Length of the direction.

    Examples
    --------
    Where along its worst direction a model's loss has doubled:

    >>> found = Profile("adaptive", (0.0, 0.1, 0.2, 0.3), {"first-order": (0.5, 0.6, 0.9, 1.3)}, radius=0.2)
    >>> losses = found.losses["first-order"]
    >>> next(s for s, loss in zip(found.lengths, losses) if loss >= 2 * losses[0])
    0.3
    """

    measure: str
    lengths: tuple[float, ...]
    losses: dict[str, tuple[float, ...]]
    radius: float


def profile(
    model: nn.Module,
    batch: Any,
    direction: Direction,
    loss_fn: LossFunction | None = None,
    *,
    ways: Sequence[str] | None = None,
    reach: float = 2.0,
    points: int = 33,
    micro_batch: int | None = None,
    normalize_logits: bool = False,
) -> Profile:
    r"""Evaluate the loss along a direction through a model's weights, :math:`L(R_θ(tξ))` for t in [−reach, reach].

    Parameters
    ----------
    model : nn.Module
        Its weights are restored, even after an error.
    batch : tuple, dict or other
        A batch as for :func:`sharpness.evaluate`.
    direction : Direction
        ξ, for example ``result.direction(0)``.
    loss_fn : callable, optional
        As for :func:`sharpness.evaluate`.
    ways : sequence of str, optional
        ``geodesic`` of :class:`sharpness.Measure`: by default that of the direction's measure and the straight line,
        ``"first-order"``. For a measure that divides out nothing they are the same, and only the line is used.
    reach : float
        How far, in units of the direction's length.
    points : int
        Number of values of t, at least 2; an odd number includes t = 0.
    micro_batch, normalize_logits
        As passed to :func:`sharpness.evaluate`.

    Returns
    -------
    Profile
        :func:`sharpness.plots.plot_profile` draws it.

    Raises
    ------
    ValueError
        There are fewer than two points, ``reach`` is not positive, a way is unknown, or the direction is of another
        model.

    Examples
    --------
    At t = 1 the loss is the worst one that :func:`sharpness.evaluate` found:

    >>> from torch import nn
    >>> import sharpness, torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> batch = torch.randn(16, 4), torch.arange(16) % 3
    >>> result = sharpness.evaluate(model, [batch], measure="adaptive", progress=False)
    >>> found = sharpness.profile(model, batch, result.direction(0), points=5)
    >>> [round(t, 2) for t in found.lengths]
    [-1.0, -0.5, 0.0, 0.5, 1.0]
    >>> abs(found.losses["first-order"][3] - result.batches[0].worst_loss) < 1e-4
    True
    """
    check_model(model)
    if not isinstance(direction, Direction):
        raise TypeError(f"direction must be a Direction, such as result.direction(0), got {type(direction).__name__}")
    points = as_count("points", points, least=2)
    if isinstance(reach, bool) or not isinstance(reach, (int, float)) or not 0 < reach < math.inf:
        raise ValueError(f"reach must be a positive number, got {reach!r}")
    measure = direction.measure
    if ways is None:
        ways = tuple(dict.fromkeys((measure.geodesic, "first-order")))
    if not measure.divides:
        ways = ("first-order",)
    objective = Objective(loss_fn, normalize_logits, micro_batch)
    times = [reach * (2 * i / (points - 1) - 1) for i in range(points)]
    losses = preserve_model_state(
        model, lambda: {way: _losses(model, batch, direction, way, times, objective) for way in ways}
    )
    return Profile(measure.name, tuple(t * direction.norm for t in times), losses, direction.norm)


def _losses(
    model: nn.Module, batch: Any, direction: Direction, way: str, times: Sequence[float], objective: Objective
) -> tuple[float, ...]:
    own = named_weights(model)
    batch = to_device(batch, next(iter(own.values())).device)
    moving = [own[name] for name in direction.tensors if name in own]
    if becomes_float32(model, moving):
        batch = to_float32(batch)
    along = replace(direction, measure=replace(direction.measure, geodesic=way))

    def loss_at(t: float) -> float:
        with perturbed(model, along, t):
            return objective.value(model, batch)

    return tuple(loss_at(t) for t in times)
