"""Compare models modulo the symmetry of their pairs, or modulo all their symmetries: distances, head by head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .linalg import at_least_float32, column_rank_ratio, in_double, rank_tolerance
from .symmetries.discovery import ALL, find
from .symmetries.folding import canonical_form
from .symmetries.found import Symmetries
from .symmetries.pairs import SymmetricPair, stacks
from .symmetries.refusals import Cause
from .symmetries.slots import masks
from .symmetries.whole import Wiring, align_models
from .weights import check_whole, weights_of


@dataclass(frozen=True)
class PairDistance:
    """The distance of one pair of weights.

    Attributes
    ----------
    name, module, kind : str
        Those of the pair in the first model; ``"vectors"`` for a parameter outside the pairs.
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


@torch.no_grad()
def model_distance(one: nn.Module, other: nn.Module, *, metric: str = "inv", modulo: str = "heads") -> ModelDistance:
    r"""Compute the distance of two models of one architecture, pair by pair, modulo symmetries.

    Whether weights are frozen does not matter. Layers with LoRA are compared by their active adapters, (s B, Aᵀ) with
    PEFT's scale s, and not by the frozen weights beneath.

    Parameters
    ----------
    one, other : nn.Module
        Models with the same pairs; parameters outside the pairs are not compared, see ``skipped``.
    metric : {"inv", "mix"}
    modulo : {"heads", "all"}
        The GL(h) of every pair, of heads of the same number; or all symmetries, for models of known architectures:
        :func:`~quotient_manifolds.symmetries.whole.align_models` goes first, gated and rectified neurons are pairs too,
        and of every other parameter the vectors v count, by the length of the shortest path in the metric ‖dv‖²/‖v‖².

    Returns
    -------
    ModelDistance
        ``pairs``, of which pandas makes a table, ``total`` and ``skipped``.

    Raises
    ------
    ValueError
        There are no pairs, the models' pairs differ in name or shape, or ``metric`` or ``modulo`` has another value;
        or the models cannot be aligned.

    Examples
    --------
    A group element changes the weights, not the distance:

    >>> import copy, torch
    >>> from quotient_manifolds.symmetries import move_, model_distance
    >>> one = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    >>> other = copy.deepcopy(one)
    >>> _ = move_(other)
    >>> model_distance(one, other).total < 1e-4
    True
    """
    if metric not in ("inv", "mix") or modulo not in ("heads", "all"):
        raise ValueError(f'metric must be "inv" or "mix", modulo "heads" or "all", got {metric!r} and {modulo!r}')
    for model in (one, other):
        check_whole(model)
    if modulo == "all":
        return _aligned_distance(one, other, metric)
    both = [find(model).restricted(_measured(model)).of_full_rank() for model in (one, other)]
    first, second, skipped = _comparable(*both)
    return _distance(Side(first, weights_of(one)), Side(second, weights_of(other)), skipped, metric)


class Side(NamedTuple):
    """Pairs, and the weights that they are pairs of."""

    pairs: list[SymmetricPair]
    weights: Mapping[str, Tensor]

    def points(self, chosen: Sequence[SymmetricPair]) -> Tensor:
        """Stack points, half precision as float32; first factors are multiplied by the scale of their product."""
        x = torch.stack([p.gather(self.weights).detach() for p in chosen])
        x = x.to(at_least_float32(x.dtype))
        for own, p in zip(x, chosen, strict=True):
            own[..., : p.n, :] *= p.scale
        return x


def _measured(model: nn.Module) -> list[str]:
    """Name the weights that distances are of: all, but those beneath adapters."""
    names = list(weights_of(model))
    adapted = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    beneath = {name for name in names if ".lora_" not in name and any(name.startswith(f"{a}.") for a in adapted)}
    return [name for name in names if name not in beneath]


def _distance(first: Side, second: Side, skipped: dict[str, str], metric: str) -> ModelDistance:
    """Compute the distances of pairs in the order in which they stand."""
    partner, found = dict(zip(first.pairs, second.pairs, strict=True)), dict[SymmetricPair, PairDistance]()
    for stack in stacks(first.pairs, first.weights):
        x, y = first.points(stack.pairs), second.points([partner[p] for p in stack.pairs])
        y = y.to(x.device)
        sound = _full_rank(x, stack.n) & _full_rank(y, stack.n)
        d = in_double(torch.full_like(sound, torch.nan, dtype=torch.float32))
        d[sound.to(d.device)] = stack.manifold(metric).dist(in_double(x[sound]), in_double(y[sound]), on_error="nan")
        # A diagonal group: every column is a separate pair.
        for p, distance in zip(stack.pairs, d.reshape(len(stack), -1).norm(dim=1).tolist(), strict=True):
            found[p] = PairDistance(p.name, p.module, p.kind, p.head, partner[p].head, distance)
    distances = tuple(found[p] for p in first.pairs)
    lost = "no geodesic was found, or a factor lacks full column rank in one of the models (as LoRA's B = 0)"
    return ModelDistance(metric, distances, skipped | {d.name: lost for d in distances if math.isnan(d.distance)})


def _comparable(*both: Symmetries) -> tuple[list[SymmetricPair], list[SymmetricPair], dict[str, str]]:
    """Return the pairs of two models, and the names of what is refused with the reason."""
    beneath = "its adapters are pairs of their own, and are compared"  # which alone makes weights stay here
    refusals = [r for side in both for r in side.refused]
    skipped = {r.name: beneath if r.cause is Cause.FROZEN else r.reason for r in refusals}
    first, second = (list(side.pairs) for side in both)
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


def _full_rank(x: Tensor, n: int) -> Tensor:
    """Return for each point whether it is finite and both factors have full column rank; (…)."""
    finite, x = x.isfinite().all(-1).all(-1), x.nan_to_num(0, 0, 0)
    G, H = x[..., :n, :], x[..., n:, :]
    return finite & (column_rank_ratio(G) > rank_tolerance(G)) & (column_rank_ratio(H) > rank_tolerance(H))


def _aligned_distance(one: nn.Module, other: nn.Module, metric: str) -> ModelDistance:
    """Align two models, and compute the distances of their pairs and of the vectors outside."""
    aligned, found = align_models(one, other)
    models = (found.reference, aligned)
    forms = [canonical_form(weights_of(m), find(m, scope=ALL).of_full_rank()) for m in models]
    first, second, skipped = _comparable(*(form.symmetries for form in forms))
    mine, theirs = (weights_of(m) for m in models)
    result, pairs = _distance(Side(first, mine), Side(second, theirs), skipped, metric), []
    for d in result.pairs:
        if d.module in found.element.cells and d.head is not None:
            heads = sorted({p.head for p in first if p.module == d.module and p.head is not None})
            order = found.element.cells[d.module].order
            d = replace(d, other_head=heads[int(order[heads.index(d.head)])])
        pairs.append(d)
    covered = masks((s for p in first for s in p.slots), mine)
    rows = {s.name: s for s in (forms[0].symmetries.wiring or Wiring()).vectors}
    for name, p in mine.items():
        none = torch.zeros_like(p, dtype=torch.bool)
        inside = covered.get(name, none) | forms[0].constant.get(name, none)
        if not bool(inside.all()):
            parts = (in_double(t.detach().masked_fill(inside, 0)).contiguous() for t in (p, theirs[name]))
            a, b = (rows[name].of(t) if name in rows else t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in parts)
            pairs.append(PairDistance(name, name.rpartition(".")[0], "vectors", None, None, _path(a, b)))
    lost = {
        d.name: "a vector is 0 in one of the models" for d in pairs if d.kind == "vectors" and math.isnan(d.distance)
    }
    return replace(result, pairs=tuple(pairs), skipped=result.skipped | lost)


def _path(a: Tensor, b: Tensor) -> float:
    """Return the distance of vectors, the rows, in ‖dv‖²/‖v‖²: logarithms of lengths and angles; NaN for a lone 0."""
    lengths = [torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (a, b)]
    u, v = (side / length for side, length in zip((a, b), lengths, strict=True))
    angle = 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))
    square = (lengths[1] / lengths[0]).log().squeeze(-1).square() + angle.square()
    gone = (lengths[0] == 0) & (lengths[1] == 0)
    return float(square.masked_fill(gone.squeeze(-1), 0).sum().sqrt())
