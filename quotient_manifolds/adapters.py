"""Means of LoRA adapters of the ``peft`` library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .linalg import in_double
from .means import ConvergenceError
from .symmetries.distance import full_rank, scaled_points
from .symmetries.lora import adapter_pairs, adapter_tensors, lora_layers
from .symmetries.pairs import MANIFOLDS, SymmetricPair
from .symmetries.stacks import stacks

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
    if any(into in layer.merged_adapters for layer, *_ in lora_layers(model)):
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
        device = stack.pairs[0].G[0].tensor.device
        of_names = [[found[name][p.module] for p in stack.pairs] for name in names]
        points = torch.stack([_checked_points(pairs, stack.pairs).to(device) for pairs in of_names])
        try:
            mean = stack.manifold(metric).mean(points, given.to(device))
        except ConvergenceError as error:
            layer = stack.pairs[int(error.residual.reshape(-1, len(stack)).amax(0).argmax())].module
            raise ConvergenceError(
                f"no mean of the adapters of {layer} was found ({metric}): they are too far apart", error.residual
            ) from error
        for x, p in zip(mean, stack.pairs, strict=True):
            x[: p.n] /= p.scale
        means.append((stack, stack.manifold(metric).canonical(mean)))
    shares = [*zip(names, (given / given.sum()).tolist(), strict=True)]
    others = _means_of_others(model, [p for layers in found.values() for p in layers.values()], into, shares)
    for stack, mean in means:  # only now that all are known
        stack.scatter_(mean)
    for target, value in others:
        target.copy_(value)


def _by_layer(model: nn.Module, name: str) -> dict[str, SymmetricPair]:
    """Look up the pair of an adapter in each of its layers."""
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
    return {p.module: p for p in pairs}


def _checked_points(pairs: Sequence[SymmetricPair], like: Sequence[SymmetricPair]) -> Tensor:
    """Gather an adapter in some layers, with its scale; raise if it is no point on the manifold of another adapter."""
    for p, own in zip(pairs, like, strict=True):
        if (own.group, own.n, own.m) != (p.group, p.n, p.m):
            raise ValueError(
                f"adapters of {own.module} differ in rank: {p.part!r} has {p.group}, {own.part!r} {own.group}"
            )
    x = scaled_points(pairs)
    sound = x.isfinite().flatten(1).all(1) & full_rank(x.nan_to_num(0, 0, 0), pairs[0].n)
    for p, is_sound in zip(pairs, sound.tolist(), strict=True):
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
            scaled = (in_double(v).to(target.device) * (w * scales.get(v, 1.0)) for v, w in values)
            mean = torch.stack([*scaled]).sum(0) / scales.get(target, 1.0)
        elif any(not torch.equal(v, mean) for v, _ in values):
            raise ValueError(f"{place} has no mean: its numbers are of {target.dtype}, and differ between the adapters")
        means.append((target, mean))
    return means
