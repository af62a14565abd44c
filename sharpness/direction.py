"""A tangent vector at the weights of a model: where it lies, and the model moved along it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import in_double
from quotient_manifolds.symmetries import Slot, SymmetricPair, Symmetries
from quotient_manifolds.symmetries.attention import HANDLERS, candidates
from quotient_manifolds.symmetries.roles import roles_of
from quotient_manifolds.weights import check_whole, is_point, plain_names, pointing_to, weights_of

from .errors import aligned
from .measures import Measure
from .patch import Patch
from .patches import PairPatch, stacks_of
from .points import PointPatch

#: The parts of a network, in the order of tables.
PARTS = ("Q–K", "V–O", "LoRA", "MLP", "embeddings", "norms and biases", "head", "other pairs")

#: Layer, part, and number of the attention head or None: a :class:`LayerShare` without its share.
Place = tuple[str, str, int | None]

_OF_PAIRS = {"qk": "Q–K", "vo": "V–O", "lora": "LoRA", "glu": "MLP", "relu": "MLP"}
_EMBEDDING = re.compile(
    r"embed|cls_token|dist_token|distillation_token|mask_token|(^|[._])(wte|wpe|shared)\b|patch|conv1"
)
_HEAD = re.compile(
    r"(^|\.)(classifier|pre_classifier|score|lm_head|head|fc|fc_out|pooler|cls|proj|visual_projection)(\.|$)"
)


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
            alone = [name for name in vector if measure.takes_points and is_point(weights[name]) and name not in inside]
            points = [PointPatch(name, weights[name], torch.float64) for name in alone]

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


def parts_of(
    model: nn.Module, weights: Mapping[str, Tensor], pairs: Collection[SymmetricPair]
) -> dict[str, WeightParts]:
    """Return the layer and parts to which the entries of every weight belong.

    Queries and keys, values and outputs are known from the model's pairs, trainable or not, and from the roles of the
    weights of attention layers without a symmetry; the others from the kind of their module: weights of embeddings and
    convolutions, and parameters named as tokens, count as embeddings, all vectors as norms and biases, a last linear
    layer as the head, and all other matrices as MLP.

    Parameters
    ----------
    model : nn.Module
    weights : mapping of str to Tensor
        Its parameters that move, by name.
    pairs : collection of SymmetricPair
        All its pairs, frozen ones too.
    """
    inside: dict[str, list[tuple[str, Slot]]] = {}
    for pair in pairs:
        for s in dict.fromkeys(pair.slots + pair.null):
            inside.setdefault(s.name, []).append((_OF_PAIRS.get(pair.kind, "other pairs"), s))
    plain, found = plain_names(model), dict[str, WeightParts]()
    known = {name: m for name, m in model.named_modules() if HANDLERS.of(m) is not None}
    layers = {plain(name): m for name, m in (known | candidates(model)).items()}
    blocks = {_block(p.module) for p in pairs if p.head is not None and p.kind != "lora"} | set(map(_block, layers))
    roles = {name: part for path, m in layers.items() for name, part in _of_roles(m, path, inside)}
    tables = {f"{plain(n)}.weight" for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.Conv2d))}
    for name, p in weights.items():
        around = [b for b in blocks if name.startswith(f"{b}.")]
        layer = max(around, key=len) if around else _block(name.rpartition(".")[0]) or name
        embeds, part = name in tables or bool(_EMBEDDING.search(name)), roles.get(name, "MLP")
        if name not in roles:
            if layer not in blocks and _HEAD.search(name) and not embeds:
                part = "head"
            elif name in tables or (p.dim() > 1 and embeds):
                part = "embeddings"
            elif p.squeeze().dim() < 2:
                part = "norms and biases"
        found[name] = WeightParts(layer, part, inside.get(name, ()))
    return found


def _of_roles(layer: nn.Module, path: str, inside: Mapping[str, list[tuple[str, Slot]]]) -> Iterator[tuple[str, str]]:
    """Iterate over the weights of an attention layer, and the part to which belongs what no pair claims of them."""
    for letter, where in (roles_of(layer) or {}).items():
        owned = [where.name(where.weight)]
        owned += [where.name(where.bias)] * (letter != "o")
        for name in (f"{path}.{own}".removeprefix(".") for own in owned):
            rest = set(where.letters)
            for part, _ in inside.get(name, ()):
                rest -= set({"Q–K": "qk", "V–O": "vo"}.get(part, ""))
            yield name, "Q–K" if rest & {"q", "k"} else "V–O"


def squares_of(vector: Iterable[tuple[Patch, Tensor]], weights: Mapping[str, WeightParts]) -> dict[Place, float]:
    """Add up the squared coordinates of a vector at every place, in the order of the parameters.

    Coordinates of single weights have the shape of their parameter, or as many numbers.
    """
    found = defaultdict[Place, float](float)
    for patch, c in vector:
        lengths = c.view(len(patch.pairs), -1).square().sum(1).tolist() if patch.pairs else []
        for pair, square in zip(patch.pairs, lengths, strict=True):
            layer = weights[pair.G[0].name].layer
            if pair.metric and pair.kind != "point":  # weights that are computed from a point
                layer = _block(pair.module)
            found[layer, _OF_PAIRS.get(pair.kind, "other pairs"), pair.head] += square
        for name in () if patch.pairs else patch.names:
            squares, (layer, rest, inside) = c.square(), weights[name]
            for part, s in inside:
                found[layer, part, None] += float(s.of(squares).sum())
                s.of(squares).zero_()
            found[layer, rest, None] += float(squares.sum())
    layers = list(dict.fromkeys([*(of.layer for of in weights.values()), *(layer for layer, *_ in found)]))
    places = sorted(found, key=lambda place: (layers.index(place[0]), PARTS.index(place[1]), place[2] or 0))
    return {place: found[place] for place in places if found[place] > 0}


def _block(module: str) -> str:
    """Cut a path after its last number: ``vit.layers.3.attention`` is in ``vit.layers.3``."""
    parts = module.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])
