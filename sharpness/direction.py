"""A tangent vector at the weights of a model, the model moved along it, and the loss there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import as_count, in_double
from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.modules import is_point, is_sharded, to_device
from quotient_manifolds.symmetries.pairs import in_copy
from quotient_manifolds.symmetries.whole import canonical_form

from .building import block_class, divide, named_weights
from .losses import LossFunction, Objective, to_float32
from .measures import Measure
from .perturb import becomes_float32, pointing_to, preserved
from .points import PointBlock


@dataclass(frozen=True)
class Direction:
    r"""A tangent vector at a model's weights.

    Attributes
    ----------
    measure : Measure
        The measure, which defines how to move along the vector.
    tensors : dict of str to Tensor
        One tensor per trainable parameter, of its shape and dtype (at least float32), on the CPU, by the parameter's
        name. For attention pairs it is the horizontal vector at the model's own representative; for measures at the
        canonical form it is a vector there.
    norm : float
        Length in the measure's metric.
    squares : dict of (str, str, int or None) to float
        Squared length by layer, part of the network and attention head, see :class:`sharpness.LayerShare`; they add up
        to norm².
    pairs : tuple of SymmetricPair
        The pairs that were divided out.
    given : sequence of SymmetricPair or None
        The pairs that the measurement was given or found by examination; None if the model's classes name them.
    classes : bool
        For measures at the canonical form: the logits are centred over the classes there.

    Examples
    --------
    The worst direction of a linear model in the adaptive metric, whose length is :math:`\|ξ \oslash |w|\|`:

    >>> from torch import nn
    >>> import sharpness, torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.data = torch.tensor([[2.0, 1.0]])
    >>> result = sharpness.evaluate(model, [torch.eye(2)], lambda f, x: f(x).sum(), measure="adaptive", rho=0.5)
    >>> xi = result.direction(0)
    >>> xi.tensors["weight"], round(xi.norm, 4)
    (tensor([[0.8944, 0.2236]]), 0.5)
    """

    measure: Measure
    tensors: dict[str, Tensor] = field(repr=False)
    norm: float
    squares: dict[tuple[str, str, int | None], float] = field(default_factory=dict, repr=False)
    pairs: tuple[SymmetricPair, ...] = field(default=(), repr=False)
    given: Sequence[SymmetricPair] | None = field(default=None, repr=False)
    classes: bool = False


@contextmanager
def perturbed(model: nn.Module, direction: Direction, t: float = 1.0) -> Iterator[nn.Module]:
    r"""Move a model along a direction for the time of a ``with`` block.

    The weights become :math:`R_θ(tξ)`: the measure's retraction for attention pairs, θ + tξ elsewhere.

    Parameters
    ----------
    model : nn.Module
        The model whose weights the direction belongs to.
    direction : Direction
        For example ``result.direction(0)``.
    t : float
        How far to move; at t = 1 the loss is the one that ``evaluate`` reports.

    Yields
    ------
    nn.Module
        The model. Its weights are restored, bit for bit, when the block ends, also after an exception. A half-precision
        model is in float32 within the ``with`` block and takes float32 inputs.

    Raises
    ------
    ValueError
        If the direction's parameters or pairs are not those of the model.

    Notes
    -----
    Paper, §5.2. Meanwhile the parameters point to copies; their own storage is not written to. A direction may be used
    on another copy of the measured model, on any device.

    Examples
    --------
    What the worst perturbation does to the outputs:

    >>> from torch import nn
    >>> import sharpness, torch
    >>> model, x = nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> model.weight.data = torch.tensor([[2.0, 1.0]])
    >>> result = sharpness.evaluate(model, [x], lambda f, x: f(x).sum(), measure="adaptive", rho=0.5)
    >>> with torch.no_grad(), sharpness.perturbed(model, result.direction(0)):
    ...     model(x).T
    tensor([[2.8944, 1.2236]])
    """
    base, moved = _along(model, direction)
    with pointing_to(model, {**base, **moved(t)}):
        yield model


def _along(
    model: nn.Module, direction: Direction
) -> tuple[Mapping[Tensor, Tensor], Callable[[float], dict[Tensor, Tensor]]]:
    """Return the weights of a model's representative, and a function from t to those at t, for :func:`pointing_to`."""
    parameters = named_weights(model)
    if any(is_sharded(p) for p in parameters.values()):
        raise ValueError("a sharded model cannot be moved along a direction; load the whole checkpoint")
    for name, v in direction.tensors.items():
        if name not in parameters or parameters[name].shape != v.shape:
            raise ValueError(
                f"the direction has a tensor {name!r} of shape {tuple(v.shape)}, which {type(model).__name__} lacks; "
                "it belongs to another model"
            )
    moving = {name: parameters[name] for name in direction.tensors}
    with torch.no_grad():
        vector: dict[Tensor, Tensor] = {p: direction.tensors[name].to(p.device) for name, p in moving.items()}
        measure, canonical = direction.measure, direction.measure.form == "canonical"
        pairs = direction.given if canonical else direction.pairs
        if pairs and not all(b.module in set(model.modules()) for b in pairs[0].G):  # of the copy that was measured
            pairs = in_copy(pairs, pairs[0].model or model, model)
        form = canonical_form(model, classes=direction.classes, pairs=pairs) if canonical else None
        base = {} if form is None else form.values
        with pointing_to(model, base):
            found, *_ = divide(model, measure, pairs, moving, form=form, only_some=canonical)
            blocks = [block_class(measure, s)(s, measure, torch.float64, at_model=True) for s in found]
            inside = {p for b in blocks for p in b.parameters}
            alone = {name: p for name, p in moving.items() if measure.takes_points and is_point(p) and p not in inside}
            points = [PointBlock(name, p, torch.float64) for name, p in alone.items()]

    @torch.no_grad()
    def moved(t: float) -> dict[Tensor, Tensor]:
        weights = {p: (in_double(base.get(p, p)) + t * in_double(v)).to(v) for p, v in vector.items()}
        for point in points:
            weights[point.parameter].copy_(point.retract(t * in_double(vector[point.parameter])))
        for block in blocks:
            u = block.stack.gather(vector)
            block.stack.scatter_(block.retract(t * u.to(block.tangent.x)), weights)
        return weights

    return base, moved


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
    points: int = 33,
    micro_batch: int | None = None,
    normalize_logits: bool = False,
) -> Profile:
    r"""Evaluate the loss along a direction through a model's weights, :math:`L(R_θ(tξ))` for t in [−2, 2].

    The path is the geodesic of the direction's measure, and the straight line, ``"first-order"``. For a measure that
    divides out nothing they are the same.

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
    points : int
        Number of values of t, at least 2; 4k + 1 of them include −1, 0 and 1.
    micro_batch, normalize_logits
        As passed to :func:`sharpness.evaluate`.

    Returns
    -------
    Profile
        :func:`sharpness.plots.plot_profile` draws it.

    Raises
    ------
    ValueError
        There are fewer than two points, or the direction is of another model.

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
    if not isinstance(direction, Direction):
        raise TypeError(f"direction must be a Direction, such as result.direction(0), got {type(direction).__name__}")
    points = as_count("points", points, least=2)
    measure, objective = direction.measure, Objective(loss_fn, normalize_logits, micro_batch)
    parameters = named_weights(model)
    batch = to_device(batch, next(iter(parameters.values())).device)
    if becomes_float32(model, [parameters[name] for name in direction.tensors if name in parameters]):
        batch = to_float32(batch)
    times = [4 * i / (points - 1) - 2 for i in range(points)]
    ways = dict.fromkeys((measure.geodesic, "first-order")) if measure.divides else ("first-order",)
    found: dict[str, list[float]] = {way: [] for way in ways}
    state = preserved(model)
    with state, state, torch.inference_mode(False), torch.enable_grad():
        for way in ways:
            base, moved = _along(model, replace(direction, measure=replace(measure, geodesic=way)))
            for t in times:
                with pointing_to(model, {**base, **moved(t)}):
                    found[way].append(objective.value(model, batch))
    losses = {way: tuple(values) for way, values in found.items()}
    return Profile(measure.name, tuple(t * direction.norm for t in times), losses, direction.norm)
