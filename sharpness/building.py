"""From a model and a measure to its blocks."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import PairStack, SymmetricPair, find_symmetric_pairs, stacks
from quotient_manifolds.symmetries.pairs import check_pairs
from quotient_manifolds.symmetries.stacks import coverage
from quotient_manifolds.symmetries.whole import CanonicalForm

from .blocks import Block, ElementwiseBlock, PairBlock
from .measures import Measure
from .stream import vector_lengths
from .vectors import Memory

__all__ = ["build_blocks", "pair_block_class"]

#: Elements of a stack of pairs that are worked on at a time on a CPU: large fresh temporaries are dear.
_PIECE = 2**20


def build_blocks(
    model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None, parameters: Mapping[str, Tensor],
    dtype: torch.dtype, *, at_model: bool = False, form: CanonicalForm | None = None,
    only_some: bool = False,
) -> list[Block]:  # fmt: skip
    """Give the blocks of some parameters: single ones first, then stacks of pairs.

    Parameters
    ----------
    model, measure : nn.Module, Measure
        The measure says which pairs are divided out, and the metrics.
    pairs : sequence of SymmetricPair, optional
        By default those that ``quotient_manifolds.symmetries.find_symmetric_pairs`` names.
    parameters : mapping of str to Tensor
        Those that move, by name.
    dtype : torch.dtype
        Of the coordinates.
    at_model : bool
        See :class:`PairBlock`.
    form : CanonicalForm, optional
        Where the parameters stand: its pairs are divided out, its constants do not move.
    only_some : bool
        Pairs with other parameters than these are left out.

    Returns
    -------
    list of Block
    """
    found: list[PairStack] = []
    if measure.divides:
        pairs = form.pairs if form is not None else pairs
        known = find_symmetric_pairs(model) if pairs is None else check_pairs(pairs)
        # The representative at which a stack is worked on may have other signs.
        signed = [p for p in known if p.group is None or not p.group.positive]
        found = stacks(p for p in signed if measure.symmetry in ("all", p.kind))
    known_weights = set(parameters.values())
    if only_some:
        found = stacks(p for s in found for p in s.pairs if known_weights.issuperset(p.parameters()))
    for pair in (p for s in found for p in s.pairs):
        if any(b.tensor not in known_weights for b in pair.G + pair.H):
            raise ValueError(
                f"the pair {pair.name!r} has weights that are no trainable parameters of {type(model).__name__}; pass "
                "pairs as find_symmetric_pairs gives them for this model"
            )
    covered = coverage(found)
    for p, mask in ({} if form is None else form.constant).items():
        covered[p] = covered[p] | mask if p in covered else mask
    lengths = vector_lengths(model, None if form is None else form.wiring) if measure.elementwise == "vector" else {}
    device = next(iter(parameters.values())).device
    if device.type == "cpu":
        count = [max(1, _PIECE // ((s.n + s.m) * s.group.h)) for s in found]
        found = [PairStack(s.pairs[i : i + k]) for s, k in zip(found, count, strict=True) for i in range(0, len(s), k)]
    single: list[Block] = [
        ElementwiseBlock(name, p, measure, dtype, covered.get(p), lengths.get(p))
        for name, p in parameters.items()
        if p not in covered or not bool(covered[p].all())
    ]
    kind = pair_block_class(measure.pair_block)
    memory = Memory(dtype, device)
    return single + [kind(s, measure, dtype, memory, at_model=at_model) for s in found]


def pair_block_class(name: str) -> type[PairBlock]:
    """Import the class of a measure's ``pair_block``; the current folder counts, as for models and data."""
    sys.path += [] if os.getcwd() in sys.path else [os.getcwd()]
    try:
        kind: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"pair_block={name!r} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, PairBlock)):
        raise ValueError(f"pair_block={name!r} is no subclass of sharpness.blocks.PairBlock")
    return kind
