"""Where a direction lies: its squared length by layer, part of the network and attention head."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.blocks import Block

from .measures import PairBlock
from .points import WeightBlock

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


class LayerShare(NamedTuple):
    """The share of a part of a layer in a worst direction.

    Attributes
    ----------
    layer : str
        The block that contains an attention module, such as ``vit.layers.3``; else the module.
    part : str
        The part of the network, one of :data:`sharpness.shares.PARTS`.
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
        """Add up the layers and heads of every part, in the order of :data:`sharpness.shares.PARTS`."""
        found = {part: sum(s.share for s in self if s.part == part) for part in PARTS}
        return {part: share for part, share in found.items() if share > 0}

    def __str__(self) -> str:
        sums: dict[tuple[str, str], float] = {}
        for s in self:
            sums[s.layer, s.part] = sums.get((s.layer, s.part), 0.0) + s.share
        parts = [part for part in PARTS if any(part == other for _, other in sums)]
        rows = [["layer", *parts]]
        for layer in dict.fromkeys(layer for layer, _ in sums):
            shares = [sums.get((layer, part)) for part in parts]
            rows.append([layer, *("" if share is None else f"{share:.1%}" for share in shares)])
        widths = [max(len(row[0]) for row in rows), *(max(7, len(part)) for part in parts)]
        return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


class NetworkParts:
    """The layer and part to which every entry of every parameter belongs.

    Queries and keys, values and outputs are known from the model's pairs, trainable or not; the others from the kind of
    their module: weights of embeddings and convolutions, and parameters named as tokens, count as embeddings, all
    vectors as norms and biases, a last linear layer as the head, and all other matrices as MLP.

    Parameters
    ----------
    model : nn.Module
    names : mapping of str to Tensor
        Its parameters that move, by name.
    pairs : iterable of SymmetricPair
        All its pairs, frozen ones too.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, Tensor], pairs: Iterable[SymmetricPair]) -> None:
        pairs = [p for p in pairs if p.group is not None]
        self._inside: dict[Tensor, list[tuple[str, Block]]] = {}
        for pair in pairs:
            for part in pair.G + pair.H + pair.null:
                self._inside.setdefault(part.tensor, []).append((_OF_PAIRS.get(pair.kind, "other pairs"), part))
        attention = {_block(p.module) for p in pairs if p.head is not None and p.kind != "lora"}
        tables = {m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.Conv2d))}
        self._layers, self._rest = dict[Tensor, str](), dict[Tensor, str]()
        for name, p in names.items():
            self._layers[p], self._rest[p] = _layer(name, attention), "MLP"
            if self._layers[p] not in attention and _HEAD.search(name):
                self._rest[p] = "head"
            elif p in tables or (p.dim() > 1 and _EMBEDDING.search(name)):
                self._rest[p] = "embeddings"
            elif p.squeeze().dim() < 2:
                self._rest[p] = "norms and biases"

    def squares(self, vector: Iterable[tuple[WeightBlock, Tensor]]) -> dict[Place, float]:
        """Add up the squared coordinates at every place, in the order of the parameters.

        Coordinates of single weights have the shape of their parameter, or as many numbers.
        """
        found: dict[Place, float] = {}
        for place, square in (entry for block, c in vector for entry in self._of_block(block, c)):
            found[place] = found.get(place, 0.0) + square
        layers = list(dict.fromkeys([*self._layers.values(), *(layer for layer, *_ in found)]))
        places = sorted(found, key=lambda place: (layers.index(place[0]), PARTS.index(place[1]), place[2] or 0))
        return {place: found[place] for place in places if found[place] > 0}

    def _of_block(self, block: WeightBlock, c: Tensor) -> Iterator[tuple[Place, float]]:
        if isinstance(block, PairBlock):
            for pair, square in zip(block.stack.pairs, block.squares(c), strict=True):
                layer = self._layers[pair.G[0].tensor]
                if pair.metric and pair.kind != "point":  # weights that are computed from a point
                    layer = _block(pair.module)
                yield (layer, _OF_PAIRS.get(pair.kind, "other pairs"), pair.head), square
        else:
            p, squares = block.parameter, c.square()
            for name, part in self._inside.get(p, ()):
                yield (self._layers[p], name, None), float(part.of(squares).sum())
                part.of(squares).zero_()
            yield (self._layers[p], self._rest[p], None), float(squares.sum())


def _block(module: str) -> str:
    """Cut a path after its last number: ``vit.layers.3.attention`` is in ``vit.layers.3``."""
    parts = module.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])


def _layer(parameter: str, blocks: Collection[str]) -> str:
    """Find the block of the attention module that contains a parameter, or else the parameter's own module."""
    inside = [b for b in blocks if parameter.startswith(f"{b}.")]
    return max(inside, key=len) if inside else _block(parameter.rpartition(".")[0]) or parameter
