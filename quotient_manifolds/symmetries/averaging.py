"""The mean of LoRA adapters, modulo the symmetry of their factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..linalg import column_rank_ratio, in_double, rank_tolerance
from ..means import ConvergenceError
from .pairs import MANIFOLDS, SymmetricPair
from .peft_lora import adapter_tensors, is_merged
from .registry import adapter_pairs
from .stacks import PairStack, scaled_points, stacks

__all__ = ["average_lora_"]


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
    if any(is_merged(m, into) for m in model.modules()):
        raise ValueError(f"adapter {into!r} is merged into the base weights; unmerge it first")
    found = {name: _by_layer(model, name) for name in (*names, into)}
    for name in names:
        for one, other in ((name, into), (into, name)):
            lacking = found[one].keys() - found[other].keys()
            if lacking:
                raise ValueError(f"adapter {one!r} has the layer {min(lacking)}, which {other!r} lacks")
    given = torch.as_tensor([1.0] * len(names) if weights is None else weights, dtype=torch.float64)
    means = []
    for stack in stacks(found[into].values()):
        points = torch.stack([_points(stack, found[name]) for name in names])
        try:
            mean = stack.manifold(metric).mean(points, given.to(points.device))
        except ConvergenceError as error:
            layer = stack.pairs[int(error.residual.reshape(-1, len(stack)).amax(0).argmax())].module
            raise ConvergenceError(
                f"no mean of the adapters of {layer} was found ({metric}): they are too far apart", error.residual
            ) from error
        for x, p in zip(mean, stack.pairs, strict=True):
            x[: p.n] /= p.scale
        means.append((stack, stack.manifold(metric).canonical(mean)))
    rest = _means_of_others(model, found, into, [*zip(names, (given / given.sum()).tolist(), strict=True)])
    for stack, mean in means:  # only now that all are known
        stack.scatter_(mean)
    for target, value in rest:
        target.copy_(value)


def _by_layer(model: nn.Module, name: str) -> dict[str, SymmetricPair]:
    """Look up the pair of an adapter in each of its layers."""
    pairs = adapter_pairs(model, [name], include_frozen=True)
    for p in pairs:
        p.usable_group()
        if any(b.tensor.is_meta for b in p.G + p.H):
            raise ValueError(f"adapter {name!r} of {p.module} is on the meta device; load its weights first")
        if not p.scale:
            raise ValueError(f"adapter {name!r} of {p.module} has the scale 0")
        if p.thin:
            raise ValueError(f"adapter {name!r} of {p.module} has a rank above a width of the layer: no full rank")
    return {p.module: p for p in pairs}


def _means_of_others(
    model: nn.Module, found: Mapping[str, Mapping[str, SymmetricPair]], into: str, shares: Sequence[tuple[str, float]]
) -> list[tuple[Tensor, Tensor]]:
    """List what belongs to an adapter beside its factors, each with the mean of the values of all adapters."""
    pairs = [p for layers in found.values() for p in layers.values()]
    factors = {b.tensor for p in pairs for b in p.G + p.H}
    scales = {getattr(p.G[0].module, "bias", None): p.scale for p in pairs}  # peft multiplies the bias of B, too
    tensors = adapter_tensors(model)
    own = {name: {place: t for place, t in tensors[name].items() if t not in factors} for name in found}
    for name, _ in shares:
        shapes, wanted = ({(place, t.shape) for place, t in own[a].items()} for a in (name, into))
        if shapes != wanted:
            place, shape = min(shapes ^ wanted)
            raise ValueError(f"adapters {name!r} and {into!r} differ in {place}, {tuple(shape)}: one of them lacks it")
    rest = []
    for place, target in own[into].items():
        values = [(own[name][place], share) for name, share in shares]
        mean = values[0][0]
        if target.is_floating_point() or target.is_complex():
            scaled = (in_double(v).to(target.device) * (w * scales.get(v, 1.0)) for v, w in values)
            mean = torch.stack([*scaled]).sum(0) / scales.get(target, 1.0)
        elif any(not torch.equal(v, mean) for v, _ in values):
            raise ValueError(f"{place} has no mean: its numbers are of {target.dtype}, and differ between the adapters")
        rest.append((target, mean))
    return rest


def _points(stack: PairStack, pairs: Mapping[str, SymmetricPair]) -> Tensor:
    """Gather the same layers of another adapter, with its scale."""
    found = [pairs[p.module] for p in stack.pairs]
    for own, other in zip(stack.pairs, found, strict=True):
        if (own.group, own.n, own.m) != (other.group, other.n, other.m):
            raise ValueError(
                f"adapters of {own.module} differ in rank: {other.part!r} has {other.group}, {own.part!r} {own.group}"
            )
    points = scaled_points(found)
    for x, p in zip(points, found, strict=True):
        factors = x.split([p.n, p.m])
        if not all(bool(X.isfinite().all()) and bool(column_rank_ratio(X) > rank_tolerance(X)) for X in factors):
            raise ValueError(
                f"the product of adapter {p.part!r} in {p.module} lacks full rank, as at B = 0, or is not finite, so "
                "it has no place on the quotient"
            )
    return points.to(stack.pairs[0].G[0].tensor.device)
