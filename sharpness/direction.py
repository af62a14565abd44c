"""A tangent vector at the weights of a model: where it lies, and the model moved along it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quotient_manifolds._geoopt import ManifoldParameter
from quotient_manifolds.linalg import in_double
from quotient_manifolds.symmetries import Slot, Symmetries
from quotient_manifolds.weights import check_whole, pointing_to, weights_of

from .errors import aligned
from .measures import Measure
from .patches import PairPatch, stacks_of
from .points import PointPatch

#: The parts of a network, in the order of tables.
PARTS = ("Q–K", "V–O", "LoRA", "MLP", "embeddings", "norms and biases", "head", "other pairs")

#: Layer, part, and number of the attention head or None: a :class:`LayerShare` without its share.
Place = tuple[str, str, int | None]


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
    symmetries : Symmetries
        Those that were divided out.

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
    symmetries: Symmetries = field(default=Symmetries(), repr=False)


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
    base, moved = along(model, direction)
    with pointing_to(model, {**base, **moved(t)}):
        yield model


def along(model: nn.Module, direction: Direction) -> tuple[Mapping[str, Tensor], Callable[[float], dict[str, Tensor]]]:
    """Return the weights of a model's representative, and a function from t to those at t, for :func:`pointing_to`."""
    if not isinstance(direction, Direction):
        raise TypeError(f"direction must be a Direction, such as result.direction(0), got {type(direction).__name__}")
    check_whole(model)
    weights, measure, symmetries = weights_of(model), direction.measure, direction.symmetries
    for name, v in direction.tensors.items():
        if name not in weights or weights[name].shape != v.shape:
            raise ValueError(
                f"the direction has a tensor {name!r} of shape {tuple(v.shape)}, which {type(model).__name__} lacks; "
                "it belongs to another model"
            )
    with torch.no_grad():
        vector = {name: v.to(weights[name].device) for name, v in direction.tensors.items()}
        base = dict[str, Tensor]()
        if measure.form == "canonical":
            from quotient_manifolds.symmetries import canonical_form

            form = canonical_form(weights, symmetries)
            base, symmetries = form.values, form.symmetries
        with pointing_to(model, base):
            found = stacks_of(measure, symmetries, weights)
            own = measure.pair_patch or PairPatch  # not for points, whose metric is their own
            patches = [
                (PairPatch if s.metric else own)(s, weights, measure, torch.float64, at_model=True) for s in found
            ]
            inside = {name for p in patches for name in p.names}
            alone = {n: weights[n] for n in vector if n not in inside and isinstance(weights[n], ManifoldParameter)}
            points = [PointPatch(n, p, torch.float64) for n, p in alone.items() if measure.takes_points]

    @torch.no_grad()
    def moved(t: float) -> dict[str, Tensor]:
        ends = {n: (in_double(base.get(n, weights[n])) + t * in_double(v)).to(v) for n, v in vector.items()}
        for point in points:
            ends[point.name].copy_(point.retract(t * in_double(vector[point.name])))
        for patch in patches:
            u = patch.stack.gather(vector)
            patch.follow_(ends, t * u.to(patch.tangent.x))
        return ends

    return base, moved


# -- where it lies -----------------------------------------------------------------------------------------------------


class LayerShare(NamedTuple):
    """The share of a part of a layer in a worst direction.

    Attributes
    ----------
    layer : str
        The block that contains an attention module, such as ``vit.layers.3``; else the module.
    part : str
        The part of the network, one of :data:`sharpness.direction.PARTS`.
    head : int or None
        Number of the attention head, from 0; None for weights that are not divided by heads.
    share : float
        Share of the squared length in the measure's metric, between 0 and 1.

    Examples
    --------
    >>> LayerShare("layers.0", "Q–K", head=1, share=0.25)
    LayerShare(layer='layers.0', part='Q–K', head=1, share=0.25)
    """

    layer: str
    part: str
    head: int | None
    share: float


class LayerShares(list[LayerShare]):
    """Shares in the order of the model's parameters, which add up to 1; ``print`` shows a table with a row per layer.

    Parameters
    ----------
    iterable : iterable of LayerShare, optional

    Examples
    --------
    ``result.by_layer()`` gives one. Printed, it adds up the heads of a layer:

    >>> first, second = LayerShare("layers.0", "Q–K", 0, 0.5), LayerShare("layers.0", "Q–K", 1, 0.2)
    >>> print(LayerShares([first, second, LayerShare("layers.0", "MLP", None, 0.3)]))
    layer         Q–K    MLP
    layers.0    70.0%  30.0%
    """

    def by_part(self) -> dict[str, float]:
        """Add up the layers and heads of every part, in the order of :data:`sharpness.direction.PARTS`."""
        found = {part: sum(s.share for s in self if s.part == part) for part in PARTS}
        return {part: share for part, share in found.items() if share > 0}

    def _by_layer(self) -> tuple[list[str], dict[str, list[float | None]]]:
        """Return the parts that there are, and their shares in every layer."""
        sums: dict[tuple[str, str], float] = {}
        for s in self:
            sums[s.layer, s.part] = sums.get((s.layer, s.part), 0.0) + s.share
        parts = [part for part in PARTS if any(part == other for _, other in sums)]
        layers = dict.fromkeys(layer for layer, _ in sums)
        return parts, {layer: [sums.get((layer, part)) for part in parts] for layer in layers}

    def _repr_html_(self) -> str:
        """Show percentages with bars in a notebook."""
        from quotient_manifolds.notebook import Bar, html_table

        parts, layers = self._by_layer()
        rows = [[name, *(None if s is None else Bar(100 * s) for s in shares)] for name, shares in layers.items()]
        return html_table(["layer", *(f"{part}, %" for part in parts)], rows)

    def __str__(self) -> str:
        parts, layers = self._by_layer()
        rows = [["layer", *parts]]
        for layer, shares in layers.items():
            rows.append([layer, *("" if share is None else f"{share:.1%}" for share in shares)])
        return aligned(rows)


class WeightParts(NamedTuple):
    """The layer and part of the network to which a weight belongs, and slots in it with parts of their own."""

    layer: str
    part: str
    inside: Sequence[tuple[str, Slot]]
