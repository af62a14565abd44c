"""The parts of a network: queries and keys, values and outputs, MLP, embeddings, norms and biases, head."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from quotient_manifolds.symmetries import SymmetricPair, find_symmetric_pairs, stacks
from quotient_manifolds.symmetries.stacks import coverage
from quotient_manifolds.symmetries.whole import wiring_of

from .blocks import Block, ElementwiseBlock, PairBlock

__all__ = ["PARTS", "Parts", "part_of_pair"]

#: In the order of tables.
PARTS = ("Q–K", "V–O", "LoRA", "MLP", "embeddings", "norms and biases", "head", "other pairs")

_OF_PAIRS = {"qk": "Q–K", "vo": "V–O", "lora": "LoRA", "glu": "MLP", "relu": "MLP"}
_EMBEDDING = re.compile(
    r"embed|cls_token|dist_token|distillation_token|mask_token|(^|[._])(wte|wpe|shared)\b|patch|conv1"
)
_HEAD = re.compile(
    r"(^|\.)(classifier|pre_classifier|score|lm_head|head|fc|fc_out|pooler|cls|proj|visual_projection)(\.|$)"
)


def part_of_pair(pair: SymmetricPair) -> str:
    """Name the part that a pair belongs to."""
    return _OF_PAIRS.get(pair.kind, "other pairs")


class Parts:
    """Which part every entry of every parameter belongs to.

    Queries and keys, values and outputs are known from the model's pairs, trainable or not; the others from the kind of
    their module: weights of embeddings and convolutions, and parameters named as tokens, count as embeddings, all
    vectors as norms and biases, a last linear layer as the head, and all other matrices as MLP.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, Tensor]) -> None:
        found = stacks(find_symmetric_pairs(model, include_frozen=True))
        self._masks = {
            part: coverage(s for s in found if part_of_pair(s.pairs[0]) == part)
            for part in dict.fromkeys(part_of_pair(s.pairs[0]) for s in found)
        }
        wiring = wiring_of(model)
        heads = {p for _, a in wiring.classifiers for p in a.parameters} if wiring is not None else set()
        tables = {m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.Conv2d))}
        self._rest = {p: self._part(name, p, heads, tables) for name, p in names.items()}

    @staticmethod
    def _part(name: str, p: Tensor, heads: set[Tensor], tables: set[Tensor]) -> str:
        if p in heads or (not heads and _HEAD.search(name)):
            return "head"
        if p in tables or (p.dim() > 1 and _EMBEDDING.search(name)):
            return "embeddings"
        return "norms and biases" if p.squeeze().dim() < 2 else "MLP"

    def cut(self, cut: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Keep a part of the entries of every parameter, as selected by ``cut(parameter, mask)``."""
        self._masks = {part: {p: cut(p, mask) for p, mask in masks.items()} for part, masks in self._masks.items()}

    def add_squares(self, into: dict[str, float], block: Block, c: Tensor) -> None:
        """Add the squared coordinates of a block to the parts that they belong to."""
        if isinstance(block, PairBlock):
            for pair, square in zip(block.stack.pairs, block.squares(c), strict=True):
                into[part_of_pair(pair)] = into.get(part_of_pair(pair), 0.0) + square
        elif isinstance(block, ElementwiseBlock):
            p = block.parameter
            rest = c.view(p.shape).square()
            for part, masks in self._masks.items():
                if p in masks:
                    into[part] = into.get(part, 0.0) + float(rest[masks[p]].sum())
                    rest = rest.masked_fill(masks[p], 0)
            into[self._rest[p]] = into.get(self._rest[p], 0.0) + float(rest.sum())
