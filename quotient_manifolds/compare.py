"""Compare models modulo the symmetry of their pairs: distances, head by head, and means of adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor, nn

from .linalg import at_least_float32, column_rank_ratio, double_device, in_double, rank_tolerance
from .manifold import MANIFOLDS
from .means import ConvergenceError
from .symmetries.discovery import find_symmetric_pairs
from .symmetries.lora import adapter_pairs, adapter_tensors, lora_layers
from .symmetries.pairs import SymmetricPair
from .symmetries.stacks import PairStack, stacks


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


@torch.no_grad()
def average_lora_(
    model: nn.Module, names: Sequence[str], into: str, *, weights: Sequence[float] | None = None, metric: str = "inv"
) -> None:
    r"""Write the mean of LoRA adapters into another adapter: the Fréchet mean of their products, layer by layer.

    .. math:: \min_{B, A} \sum_i w_i d\big([B, A], [B_i, A_i]\big)^2

    The mean has the rank of the adapters and does not depend on the factors in which each is stored, unlike that of
    the factors. All else that belongs to adapters (biases, DoRA's magnitudes, ``modules_to_save``, trained tokens) has
    no such freedom, and is averaged number by number.

    Parameters
    ----------
    model : nn.Module
        With adapters of peft, active or not, trainable or frozen.
    names : sequence of str
        Adapters to average.
    into : str
        Adapter that is replaced, of the same layers and rank; load or add it first. Its factors are in canonical gauge
        afterwards.
    weights : sequence of float, optional
        One for each name, not negative; divided by their sum. Equal by default.
    metric : {"inv", "mix"}
        Of :class:`quotient_manifolds.GLQuotientInv` or :class:`quotient_manifolds.GLQuotientMix`.

    Raises
    ------
    ValueError
        There is no such adapter or metric, layers, ranks or what else belongs to adapters differ, a layer has no
        symmetry (see :func:`adapter_pairs`), a product lacks full rank, as at B = 0, or ``into`` is merged into the
        base weights.
    ConvergenceError
        A mean was not found: the adapters are too far apart.

    Notes
    -----
    Products are averaged with their scales (alpha/r), which may differ. See :func:`quotient_manifolds.frechet_mean`.

    Examples
    --------
    >>> import torch
    >>> from peft import LoraConfig, get_peft_model
    >>> from quotient_manifolds.symmetries import average_lora_
    >>> config = LoraConfig(r=1, target_modules=["0"], init_lora_weights=False)
    >>> model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 3)), config, adapter_name="one")
    >>> for name in ("two", "mean"):
    ...     model.add_adapter(name, config)
    >>> layer = model.base_model.model[0]
    >>> for name, size in (("one", 1.0), ("two", 4.0)):
    ...     layer.lora_B[name].weight.data, layer.lora_A[name].weight.data = torch.ones(3, 1), size * torch.ones(1, 3)
    >>> average_lora_(model, ["one", "two"], into="mean")
    >>> f"{float((layer.lora_B.mean.weight @ layer.lora_A.mean.weight)[0, 0]):.3f}"
    '2.000'
    """
    names = [names] if isinstance(names, str) else list(names)
    if metric not in MANIFOLDS:
        raise ValueError(f"metric must be one of {', '.join(MANIFOLDS)}, got {metric!r}")
    if not names:
        raise ValueError("names lists no adapter to average")
    if any(into in layer.merged_adapters for layer, *_ in lora_layers(model)):
        raise ValueError(f"adapter {into!r} is merged into the base weights; unmerge it first")
    found = {name: _by_layer(model, name) for name in (*names, into)}
    for one, other in ((a, b) for name in names for a, b in ((name, into), (into, name))):
        if lacking := found[one].keys() - found[other].keys():
            raise ValueError(f"adapter {one!r} has the layer {min(lacking)[0]}, which {other!r} lacks")
    given = torch.as_tensor([1.0] * len(names) if weights is None else weights, dtype=torch.float64, device="cpu")
    means = []
    for stack in stacks(found[into].values()):
        device = double_device(stack.pairs[0].G[0].tensor.device)
        of_names = [[found[name][p.module, p.head] for p in stack.pairs] for name in names]
        points = torch.stack([_checked_points(pairs, stack.pairs).to(device) for pairs in of_names])
        means.append((stack, _mean(stack, points, given.to(device), metric)))
    shares = [*zip(names, (given / given.sum()).tolist(), strict=True)]
    others = _means_of_others(model, [p for layers in found.values() for p in layers.values()], into, shares)
    for stack, mean in means:  # only now that all are known
        stack.scatter_(mean)
    for target, value in others:
        target.copy_(value)


def _mean(stack: PairStack, points: Tensor, weights: Tensor, metric: str) -> Tensor:
    """Return the canonical mean of scaled points, (adapters, pairs, …), without the scales of the stack's pairs."""
    try:
        mean = stack.manifold(metric).mean(points, weights)
    except ConvergenceError as error:
        layer = stack.pairs[int(error.residual.reshape(-1, len(stack)).amax(0).argmax())].module
        raise ConvergenceError(
            f"no mean of the adapters of {layer} was found ({metric}): they are too far apart", error.residual
        ) from error
    for x, p in zip(mean, stack.pairs, strict=True):
        x[: p.n] /= p.scale
    return stack.manifold(metric).canonical(mean)


def _by_layer(model: nn.Module, name: str) -> dict[tuple[str, int | None], SymmetricPair]:
    """Look up the pair of an adapter in each of its layers, and for each of their experts."""
    pairs = adapter_pairs(model, [name], include_frozen=True)
    for p in pairs:
        p.usable_group()
        reasons = {
            "is on the meta device; load its weights first": any(t.is_meta for t in p.parameters()),
            "has the scale 0": not p.scale,
            "has a rank above a width of the layer: no full rank": p.thin,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"adapter {name!r} of {p.module} {reason}")
    return {(p.module, p.head): p for p in pairs}


def _checked_points(pairs: Sequence[SymmetricPair], like: Sequence[SymmetricPair]) -> Tensor:
    """Gather an adapter in some layers, with its scale; raise if it is no point on the manifold of another adapter."""
    for p, own in zip(pairs, like, strict=True):
        if (own.group, own.n, own.m) != (p.group, p.n, p.m):
            raise ValueError(
                f"adapters of {own.module} differ in rank: {p.part!r} has {p.group}, {own.part!r} {own.group}"
            )
    x = _scaled_points(pairs)
    for p, is_sound in zip(pairs, _full_rank(x, pairs[0].n).tolist(), strict=True):
        if not is_sound:
            raise ValueError(
                f"the product of adapter {p.part!r} in {p.module} lacks full rank, as at B = 0, or is not finite, so "
                "it has no place on the quotient"
            )
    return x


def _means_of_others(
    model: nn.Module, pairs: Sequence[SymmetricPair], into: str, shares: Sequence[tuple[str, float]]
) -> list[tuple[Tensor, Tensor]]:
    """List what belongs to an adapter beside its factors, each with the mean of the values of all adapters."""
    factors = {t for p in pairs for t in p.parameters()}
    scales = {getattr(p.G[0].module, "bias", None): p.scale for p in pairs}  # peft multiplies the bias of B, too
    own = {a: {k: t for k, t in of.items() if t not in factors} for a, of in adapter_tensors(model).items()}
    means = []
    for name, _ in shares:
        shapes, wanted = ({(place, t.shape) for place, t in own[a].items()} for a in (name, into))
        if shapes != wanted:
            place, shape = min(shapes ^ wanted)
            raise ValueError(f"adapters {name!r} and {into!r} differ in {place}, {tuple(shape)}: one of them lacks it")
    for place, target in own[into].items():
        values = [(own[name][place], share) for name, share in shares]
        mean = values[0][0]
        if target.is_floating_point() or target.is_complex():
            scaled = (in_double(v.to(target.device)) * (w * scales.get(v, 1.0)) for v, w in values)
            mean = torch.stack([*scaled]).sum(0) / scales.get(target, 1.0)
        elif any(not torch.equal(v, mean) for v, _ in values):
            raise ValueError(f"{place} has no mean: its numbers are of {target.dtype}, and differ between the adapters")
        means.append((target, mean))
    return means
