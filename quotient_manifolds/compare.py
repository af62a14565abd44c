"""Compare models modulo the symmetry of their pairs: distances, head by head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor, nn

from .linalg import at_least_float32, column_rank_ratio, in_double, rank_tolerance
from .symmetries.discovery import find_symmetric_pairs
from .symmetries.pairs import SymmetricPair
from .symmetries.stacks import stacks


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
        found = torch.full((len(modules), heads), torch.nan, dtype=torch.float64, device="cpu")
        for p in chosen:
            found[modules.index(p.module), p.head or 0] = p.distance
        return modules, found


@torch.no_grad()
def model_distance(one: nn.Module, other: nn.Module, *, metric: str = "inv", match: str = "none") -> ModelDistance:
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

    Returns
    -------
    ModelDistance
        ``pairs``, ``total``, ``skipped``, and ``table(kind)`` for a heat map.

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
    first, second, skipped = _comparable(one, other)
    if match == "heads":
        second = _matched(first, second)
    partner, found = dict(zip(map(id, first), second, strict=True)), dict[int, PairDistance]()
    for stack in stacks(first):
        x, y = (_scaled_points(side) for side in (stack.pairs, [partner[id(p)] for p in stack.pairs]))
        y = y.to(x.device)
        sound = _full_rank(x, stack.n) & _full_rank(y, stack.n)
        d = in_double(torch.full_like(sound, torch.nan, dtype=torch.float32))
        d[sound.to(d.device)] = stack.manifold(metric).dist(in_double(x[sound]), in_double(y[sound]), on_error="nan")
        # A diagonal group: every column is a separate pair.
        for p, distance in zip(stack.pairs, d.reshape(len(stack), -1).norm(dim=1).tolist(), strict=True):
            found[id(p)] = PairDistance(p.name, p.module, p.kind, p.head, partner[id(p)].head, distance)
    distances = tuple(found[id(p)] for p in first)
    lost = "no geodesic was found, or a factor lacks full column rank in one of the models (as LoRA's B = 0)"
    return ModelDistance(metric, distances, skipped | {d.name: lost for d in distances if math.isnan(d.distance)})


def _comparable(one: nn.Module, other: nn.Module) -> tuple[list[SymmetricPair], list[SymmetricPair], dict[str, str]]:
    """Return the pairs of two models that have a group, and the names of the others with the reason."""
    both = [find_symmetric_pairs(model, include_frozen=True) for model in (one, other)]
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


def _scaled_points(pairs: Sequence[SymmetricPair]) -> Tensor:
    """Stack points, half precision as float32; first factors are multiplied by the scale of their product."""
    x = torch.stack([p.gather().detach() for p in pairs])
    x = x.to(at_least_float32(x.dtype))
    for own, p in zip(x, pairs, strict=True):
        own[..., : p.n, :] *= p.scale
    return x


def _full_rank(x: Tensor, n: int) -> Tensor:
    """Return for each point whether it is finite and both factors have full column rank; (…)."""
    finite, x = x.isfinite().all(-1).all(-1), x.nan_to_num(0, 0, 0)
    G, H = x[..., :n, :], x[..., n:, :]
    return finite & (column_rank_ratio(G) > rank_tolerance(G)) & (column_rank_ratio(H) > rank_tolerance(H))


def _matched(first: list[SymmetricPair], second: list[SymmetricPair]) -> list[SymmetricPair]:
    """Sort the pairs of the second model: in every module its heads are assigned to those of the first."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    matched, by_head = list(second), dict[str, dict[int | None, list[int]]]()
    for i, p in enumerate(first):
        by_head.setdefault(p.module, {}).setdefault(p.head, []).append(i)
    for heads in ([*found.values()] for found in by_head.values()):
        if len({tuple((first[i].kind, first[i].part, first[i].n, first[i].m) for i in head) for head in heads}) > 1:
            continue
        cost = torch.zeros(len(heads), len(heads), dtype=torch.float64, device="cpu")
        for alike in zip(*heads, strict=True):
            X, Y = (in_double(_scaled_points([side[i] for i in alike])) for side in (first, second))
            a, b, inner = (_products(*both, first[alike[0]].n) for both in ((X, X), (Y, Y), (X, Y)))
            a, b = a.diagonal()[:, None], b.diagonal()
            cost += (a + b - 2 * inner) / (a * b).sqrt().clamp_min(1e-300)
        for i, j in zip(*linear_sum_assignment(cost.numpy()), strict=True):
            for at, other in zip(heads[i], heads[j], strict=True):
                matched[at] = second[other]
    return matched


def _products(X: Tensor, Y: Tensor, n: int) -> Tensor:
    """Return Re⟨G_i H_iᴴ, G_j H_jᴴ⟩ for stacks of points, summed over the columns for a diagonal group."""
    parts = ((X[..., :n, :], Y[..., :n, :]), (X[..., n:, :], Y[..., n:, :]))
    G, H = (torch.einsum("i...ra,j...rb->ij...ab", A.conj(), B) for A, B in parts)
    return (G * H.conj()).real.flatten(2).sum(-1).cpu()
