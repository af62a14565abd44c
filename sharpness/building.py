"""Build the blocks of a model under a measure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import PairStack, SymmetricPair, find_symmetric_pairs, stacks
from quotient_manifolds.symmetries.pairs import check_pairs
from quotient_manifolds.symmetries.registry import candidates
from quotient_manifolds.symmetries.stacks import coverage
from quotient_manifolds.symmetries.whole import CanonicalForm

from .blocks import Block, ElementwiseBlock, PairBlock
from .errors import imported
from .measures import Measure
from .stream import vector_lengths
from .vectors import Memory

__all__ = ["Division", "build_blocks", "divide", "pair_block_class", "warn_of_unknown", "with_constants"]

#: Number of elements of a stack of pairs that are processed at a time on a CPU, because large temporaries are slow.
_PIECE = 2**20


@dataclass
class Division:
    """Which weights belong to pairs, and how the other weights are measured.

    Attributes
    ----------
    stacks : list of PairStack
        The pairs that are divided out.
    covered : dict of Tensor to Tensor
        Masks of the entries of parameters that belong to pairs, or do not move in the canonical form.
    lengths : dict of Tensor to Tensor
        Where the measure asks for them, see :func:`sharpness.stream.vector_lengths`.
    """

    stacks: list[PairStack]
    covered: dict[Tensor, Tensor]
    lengths: dict[Tensor, Tensor]

    def leaves_some_of(self, p: Tensor) -> bool:
        """Tell whether any entry of a parameter moves outside pairs."""
        return p not in self.covered or not bool(self.covered[p].all())


def with_constants(covered: Mapping[Tensor, Tensor], constant: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Join two sets of masks."""
    return {**constant, **{p: mask | constant[p] if p in constant else mask for p, mask in covered.items()}}


def divide(
    model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None, parameters: Mapping[str, Tensor], *,
    form: CanonicalForm | None = None, only_some: bool = False, read: Callable[[Tensor], Tensor] = Tensor.detach,
    cover: bool = True,
) -> Division:  # fmt: skip
    """Divide parameters into pairs and entries that move separately.

    Parameters
    ----------
    model, measure : nn.Module, Measure
        The measure says which pairs are divided out, and whether lengths are needed.
    pairs : sequence of SymmetricPair, optional
        By default those that ``quotient_manifolds.symmetries.find_symmetric_pairs`` names.
    parameters : mapping of str to Tensor
        Those that move, by name.
    form : CanonicalForm, optional
        The canonical form at which the parameters are: its pairs are divided out, its constants do not move.
    only_some : bool
        Pairs with other parameters than these are left out.
    read : callable
        Function that returns the values of a parameter there.
    cover : bool
        Note what belongs to pairs; else only what is constant.

    Returns
    -------
    Division
    """
    found: list[PairStack] = []
    known: Sequence[SymmetricPair] = ()
    if measure.divides:
        pairs = form.pairs if form is not None else pairs
        known = find_symmetric_pairs(model) if pairs is None else check_pairs(pairs)
        # The representative that a stack uses may have other signs.
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
    if next(iter(known_weights)).device.type == "cpu":
        count = [max(1, _PIECE // ((s.n + s.m) * s.group.h)) for s in found]
        found = [PairStack(s.pairs[i : i + k]) for s, k in zip(found, count, strict=True) for i in range(0, len(s), k)]
    covered = with_constants(coverage(found) if cover else {}, {} if form is None else form.constant)
    lengths = {}
    if measure.elementwise == "vector":
        lengths = vector_lengths(model, None if form is None else form.wiring, known, read)
    return Division(found, covered, lengths)


def build_blocks(
    measure: Measure,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    division: Division,
    *,
    at_model: bool = False,
) -> list[Block]:
    """Return the blocks of some parameters: single ones first, then stacks of pairs.

    Parameters
    ----------
    measure : Measure
        The metrics.
    parameters : mapping of str to Tensor
        Those that move, by name.
    dtype : torch.dtype
        Dtype of the coordinates.
    division : Division
        See :func:`divide`.
    at_model : bool
        See :class:`PairBlock`.

    Returns
    -------
    list of Block
    """
    single: list[Block] = [
        ElementwiseBlock(name, p, measure, dtype, division.covered.get(p), division.lengths.get(p))
        for name, p in parameters.items()
        if division.leaves_some_of(p)
    ]
    kind = pair_block_class(measure.pair_block)
    memory = Memory(dtype, next(iter(parameters.values())).device)
    return single + [kind(s, measure, dtype, memory, at_model=at_model) for s in division.stacks]


def warn_of_unknown(model: nn.Module) -> None:
    """Say which trainable attention has no pairs because no handler knows its class, where no batch can tell."""
    found = candidates(model).values()
    trained = [m for m in found if any(p.requires_grad for name, p in m.named_parameters() if "lora_" not in name)]
    if trained:
        names = ", ".join(sorted({type(m).__name__ for m in trained}))
        warnings.warn(
            f"no handler knows the symmetries of {names}, and there is no batch yet to examine them on, so their "
            "weights move one by one; pass pairs=find_symmetric_pairs(model, batch=batch)", stacklevel=3,
        )  # fmt: skip


def pair_block_class(name: str) -> type[PairBlock]:
    """Import the class of a measure's ``pair_block``; the current folder counts, as for models and data."""
    kind = imported(name, f"pair_block={name!r} cannot be imported")
    if not (isinstance(kind, type) and issubclass(kind, PairBlock)):
        raise ValueError(f"pair_block={name!r} is not a subclass of sharpness.blocks.PairBlock")
    return kind
