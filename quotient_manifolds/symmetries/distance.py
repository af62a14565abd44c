"""The distance of two models, head by head and modulo the symmetry of their pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor, nn

from ..linalg import at_least_float32, column_rank_ratio, in_double, rank_tolerance
from .discovery import find_symmetric_pairs
from .pairs import SymmetricPair, check_pairs
from .stacks import stacks

__all__ = ["ModelDistance", "PairDistance", "full_rank", "model_distance", "scaled_points"]


@dataclass(frozen=True)
class PairDistance:
    """The distance of one pair of weights.

    Attributes
    ----------
    name, module, kind : str
        Those of the pair in the first model.
    head, other_head : int or None
        Number of the head in the first model, and of the head in the second that it is compared with.
    distance : float
        Distance in the metric; NaN where no geodesic was found or a factor lacks full column rank, as LoRA's B = 0.

    Examples
    --------
    >>> from quotient_manifolds.symmetries import PairDistance
    >>> PairDistance("self_attn qk head 0", "self_attn", "qk", 0, 1, 2.5).distance
    2.5
    """

    name: str
    module: str
    kind: str
    head: int | None
    other_head: int | None
    distance: float


@dataclass(frozen=True)
class ModelDistance:
    """Distances pair by pair, as computed by :func:`model_distance`.

    Attributes
    ----------
    metric : str
    pairs : tuple of PairDistance
        In the order of the first model's pairs.
    skipped : dict of str to str
        Names of what was not compared, or has no distance, with the reason.

    Examples
    --------
    >>> from quotient_manifolds.symmetries import ModelDistance, PairDistance
    >>> pairs = [PairDistance(f"layer qk head {i}", "layer", "qk", i, i, d) for i, d in enumerate((3.0, 4.0))]
    >>> ModelDistance("inv", tuple(pairs)).total
    5.0
    """

    metric: str
    pairs: tuple[PairDistance, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The root of the sum of squares, over the pairs that have a distance; ``skipped`` names the others.

        It is the distance in the product of those pairs' manifolds; NaN if there is none.
        """
        squares = [p.distance**2 for p in self.pairs if not math.isnan(p.distance)]
        return sum(squares) ** 0.5 if squares else math.nan

    def table(self, kind: str) -> tuple[list[str], Tensor]:
        """Return the modules and, for one kind of pair, their heads' distances (modules, heads), NaN if absent."""
        chosen = [p for p in self.pairs if p.kind == kind]
        modules = list(dict.fromkeys(p.module for p in chosen))
        heads = 1 + max((p.head or 0 for p in chosen), default=-1)
        found = torch.full((len(modules), heads), torch.nan, dtype=torch.float64)
        for p in chosen:
            found[modules.index(p.module), p.head or 0] = p.distance
        return modules, found


def model_distance(
    one: nn.Module,
    other: nn.Module,
    *,
    metric: str = "inv",
    match: str = "none",
    pairs: tuple[Iterable[SymmetricPair], Iterable[SymmetricPair]] | None = None,
) -> ModelDistance:
    r"""Compute the distance of two models of one architecture, pair by pair, modulo the GL(h) of every pair.

    Whether weights are frozen does not matter. Layers with LoRA are compared by their active adapters, (s B, Aᵀ) with
    PEFT's scale s, and not by the frozen weights beneath.

    Parameters
    ----------
    one, other : nn.Module
        Models with the same pairs; parameters outside the pairs are not compared, see ``skipped``.
    metric : {"inv", "mix"}
    match : {"none", "heads"}
        Which heads are compared: those of the same number or, for models trained independently, those of the assignment
        within every module that minimises the sum of :math:`\|X_i - Y_j\|^2 / (\|X_i\| \|Y_j\|)`, where X and Y are the
        products G Hᴴ of the heads; pairs of one head stay together, and so do queries that share their keys.
    pairs : tuple of two iterables of SymmetricPair, optional
        The pairs of both models; by default those that ``find_symmetric_pairs(…, include_frozen=True)`` finds.

    Returns
    -------
    ModelDistance
        ``pairs``, ``total``, ``skipped``, and ``table(kind)`` for a heat map (``sharpness.plots.plot_distances``).

    Raises
    ------
    ValueError
        There are no pairs, the models' pairs differ in name or shape, or ``metric`` or ``match`` has another value.

    Examples
    --------
    A group element changes the weights, not the distance:

    >>> import copy, torch
    >>> from quotient_manifolds.symmetries import apply_random_symmetry_, model_distance
    >>> one = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    >>> other = copy.deepcopy(one)
    >>> _ = apply_random_symmetry_(other)
    >>> model_distance(one, other).total < 1e-4
    True
    """
    if metric not in ("inv", "mix") or match not in ("none", "heads"):
        raise ValueError(f'metric must be "inv" or "mix", match "none" or "heads", got {metric!r} and {match!r}')
    first, second, skipped = _comparable(pairs or [find_symmetric_pairs(m, include_frozen=True) for m in (one, other)])
    partner = {id(p): q for p, q in zip(first, second, strict=True)}
    if match == "heads":
        _match_heads_(partner, first)
    found: dict[int, PairDistance] = {}
    with torch.no_grad():
        for stack in stacks(first):
            x, y = (scaled_points(side) for side in (stack.pairs, [partner[id(p)] for p in stack.pairs]))
            y = y.to(x.device)
            sound = full_rank(x, stack.n) & full_rank(y, stack.n)
            d = x.new_full(sound.shape, torch.nan, dtype=torch.float64)
            d[sound] = stack.manifold(metric).dist(in_double(x[sound]), in_double(y[sound]), on_error="nan")
            # A diagonal group: every column is a separate pair.
            total = d.reshape(len(stack), -1).square().sum(1).sqrt().tolist()
            for p, distance in zip(stack.pairs, total, strict=True):
                found[id(p)] = PairDistance(p.name, p.module, p.kind, p.head, partner[id(p)].head, distance)
    distances = tuple(found[id(p)] for p in first)
    lost = "no geodesic was found, or a factor lacks full column rank in one of the models (as LoRA's B = 0)"
    return ModelDistance(metric, distances, skipped | {d.name: lost for d in distances if math.isnan(d.distance)})


def _comparable(
    sides: Iterable[Iterable[SymmetricPair]],
) -> tuple[list[SymmetricPair], list[SymmetricPair], dict[str, str]]:
    """Return the pairs of two models that have a group, and the names of the others with the reason."""
    both = [check_pairs(side) for side in sides]
    skipped = {p.name: p.reason for side in both for p in side if p.group is None}
    first, second = ([p for p in side if p.group is not None] for side in both)
    if not first and not second:
        reasons = "; ".join(dict.fromkeys(skipped.values())) or "attention of no known kind, and no LoRA"
        raise ValueError(f"the models have no pairs that can be compared: {reasons}")
    mine, others = ([(p.module, p.kind, p.head, p.n, p.m, p.group) for p in side] for side in (first, second))
    if mine != others:
        at = next(i for i, (a, b) in enumerate(zip_longest(mine, others)) if a != b)
        name = (first[at:] or second[at:])[0].name
        why = f" ({skipped[name]})" if name in skipped else ""
        raise ValueError(f"the models have different pairs, beginning with {name!r}{why}; compare models of one kind")
    return first, second, skipped


def scaled_points(pairs: Sequence[SymmetricPair]) -> Tensor:
    """Stack points, half precision as float32; first factors are multiplied by the scale of their product."""
    x = torch.stack([p.gather().detach() for p in pairs])
    x = x.to(at_least_float32(x.dtype))
    for own, p in zip(x, pairs, strict=True):
        own[..., : p.n, :] *= p.scale
    return x


def full_rank(x: Tensor, n: int) -> Tensor:
    """Return for each point whether both factors have full column rank; (…)."""
    G, H = x[..., :n, :], x[..., n:, :]
    return (column_rank_ratio(G) > rank_tolerance(G)) & (column_rank_ratio(H) > rank_tolerance(H))


def _match_heads_(partner: dict[int, SymmetricPair], pairs: Sequence[SymmetricPair]) -> None:
    """Assign the heads of every module anew: to each pair of the first model one of the second, of the same kind."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    by_head: dict[str, dict[int | None, list[SymmetricPair]]] = {}
    for p in pairs:
        by_head.setdefault(p.module, {}).setdefault(p.head, []).append(p)
    for heads in map(list[list[SymmetricPair]], (found.values() for found in by_head.values())):
        kinds = [[(p.kind, p.part, p.n, p.m) for p in head] for head in heads]
        if any(k != kinds[0] for k in kinds):
            continue
        cost = torch.zeros(len(heads), len(heads), dtype=torch.float64)
        for alike in zip(*heads, strict=True):
            X, Y = (in_double(scaled_points(side)) for side in (alike, [partner[id(p)] for p in alike]))
            n = alike[0].n
            inner = _products(X, Y, n)
            a, b = _products(X, X, n).diagonal(), _products(Y, Y, n).diagonal()
            cost += (a[:, None] + b - 2 * inner) / (a[:, None] * b).sqrt().clamp_min(1e-300)
        given = [[partner[id(p)] for p in head] for head in heads]
        for i, j in zip(*linear_sum_assignment(cost.numpy()), strict=True):
            partner.update((id(p), q) for p, q in zip(heads[i], given[j], strict=True))


def _products(X: Tensor, Y: Tensor, n: int) -> Tensor:
    """Return Re⟨G_i H_iᴴ, G_j H_jᴴ⟩ for stacks of points, summed over the columns for a diagonal group."""
    parts = ((X[..., :n, :], Y[..., :n, :]), (X[..., n:, :], Y[..., n:, :]))
    G, H = (torch.einsum("i...ra,j...rb->ij...ab", A.conj(), B) for A, B in parts)
    return (G * H.conj()).real.flatten(2).sum(-1).cpu()
