"""LoRA adapters of the ``peft`` library, recognised without importing it: their pairs, and their mean."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg import column_rank_ratio, in_double, rank_tolerance
from ..means import ConvergenceError
from .blocks import GL, block
from .modules import check_model, plain_names
from .pairs import MANIFOLDS, SymmetricPair, merged, usable
from .stacks import PairList, PairStack, scaled_points, stacks, without_sharing

__all__ = [
    "adapter_names",
    "adapter_pairs",
    "adapter_tensors",
    "average_lora_",
    "is_lora",
    "lora_factors",
    "lora_layers",
    "lora_obstacle",
    "lora_pairs",
    "prefix_tuned",
]

#: Variants that use the factors only through their product. DoRA divides by the norm of W + BA, aLoRA masks tokens.
_PRODUCT_VARIANTS = ("Dora", "ALora")
#: (owner, attribute) of a parameter
Place = tuple[nn.Module, str]


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is a LoRA layer of peft."""
    return type(module).__module__.startswith("peft.tuners.lora") and hasattr(module, "lora_A")


def _factors(module: Any, names: Collection[str]) -> Iterator[tuple[str, Place, Place]]:
    """Return name, place of A (r, in) and place of B (out, r) for every adapter with one of these names."""
    for name in names:
        if name in module.lora_A:
            yield name, (module.lora_A[name], "weight"), (module.lora_B[name], "weight")
        elif name in module.lora_embedding_A:
            yield name, (module.lora_embedding_A, name), (module.lora_embedding_B, name)


def _is_off(module: Any) -> bool:
    return bool(module.disable_adapters or module.merged)


def prefix_tuned(model: nn.Module) -> bool:
    """Return whether peft adds its own keys and values to those of the layers."""
    return any(type(m).__name__ == "PrefixEncoder" and type(m).__module__.startswith("peft.") for m in model.modules())


def lora_factors(module: nn.Module) -> list[tuple[Place, Place]]:
    """List the places of A and B whose product adds to the weight of a module; empty without active LoRA."""
    layer: Any = module
    if not is_lora(module) or _is_off(module):
        return []
    return [(A, B) for _, A, B in _factors(layer, layer.active_adapters)]


def _variant(module: Any, adapter: str) -> str:
    """Return the name of an adapter's variant of LoRA, if it is one."""
    variant = getattr(module, "lora_variant", {}).get(adapter)
    return "" if variant is None else getattr(variant, "__name__", type(variant).__name__)


def lora_obstacle(module: nn.Module) -> str:
    """Explain why LoRA on a projection leaves its attention layer without symmetry; empty if it does not."""
    layer: Any = module
    found = [_variant(layer, a) for a in layer.active_adapters] if is_lora(module) and not _is_off(layer) else []
    return next((f"{variant} scales the projection's rows" for variant in found if variant), "")


def adapter_names(module: Any) -> list[str]:
    """List the names of all adapters of a LoRA layer, active or not."""
    return [*module.lora_A, *module.lora_embedding_A]


def lora_layers(model: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield every LoRA layer of a model with the name and the factor B of each of its adapters."""
    for m in model.modules():
        if is_lora(m):
            yield from ((m, name, getattr(*B)) for name, _, B in _factors(m, adapter_names(m)))


def adapter_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Look up what belongs to each adapter: factors, biases, DoRA's magnitudes, saved modules and tokens, by place."""
    found: dict[str, dict[str, Tensor]] = {}
    for path, m in model.named_modules():
        layer: Any = m  # a LoRA layer, or what wraps a module that is saved, or trained for some tokens
        tokens = getattr(layer, "token_indices", {})
        if is_lora(m) or (type(m).__module__.startswith("peft.") and (tokens or hasattr(m, "original_module"))):
            for place, part in m.named_children():
                if isinstance(part, nn.ModuleDict | nn.ParameterDict):
                    for name, own in part.items():
                        where = f"{path}.{place}" + (f" of the tokens {tokens[name]}" if name in tokens else "")
                        tensors = own.state_dict(keep_vars=True) if isinstance(own, nn.Module) else {"": own}
                        found.setdefault(name, {}).update((f"{where}.{k}".rstrip("."), t) for k, t in tensors.items())
    return found


def lora_pairs(module: Any, name: str, adapters: Collection[str] | None = None) -> Iterator[SymmetricPair]:
    """Yield the pair G = B (out, r), H = Aᵀ (in, r) with the group GL(r) for every active adapter of a LoRA layer.

    ``adapters`` names other adapters to use instead, active or not.
    """
    for adapter, A, B in _factors(module, module.active_adapters if adapters is None else adapters):
        if B[0] is A[0] and A[1] == B[1]:
            continue
        if any(getattr(*place).dim() < 2 for place in (A, B)):
            raise ValueError(
                f"the factors of adapter {adapter!r} in {name} are no matrices, as FSDP1 "
                "(use_orig_params=True) and ZeRO-3 leave them, but their geometry needs whole factors; use DDP, or "
                "keep these modules out of the sharding"
            )
        G, H = block(*B), block(*A, transpose=True)
        variant = _variant(module, adapter)
        if module.merged and adapters is None:
            reason = "merged into the base weight; unmerge it"
        elif module.disable_adapters and adapters is None:
            reason = "the adapter is disabled"
        elif variant and not variant.startswith(_PRODUCT_VARIANTS):
            reason = f"no known symmetry of {variant}"
        elif getattr(module, "num_experts", 1) > 1:
            reason = "the factors of its experts are stacked in two matrices"
        elif G.size[1] != H.size[1]:
            reason = "a grouped convolution"
        else:
            reason = ""
        group, scale = None if reason else GL(G.size[1]), float(module.scaling[adapter])
        yield SymmetricPair(name, "lora", group, (G,), (H,), part=adapter, reason=reason, scale=scale)


def adapter_pairs(model: nn.Module, names: Sequence[str] | None = None, *, include_frozen: bool = False) -> PairList:
    """List the pairs (B, Aᵀ) of a model's LoRA adapters, active or not, and nothing else.

    Parameters
    ----------
    model : nn.Module
        With adapters of peft; plain, DDP-wrapped or compiled.
    names : sequence of str, optional
        Names of adapters; by default those of all adapters.
    include_frozen : bool
        Treat frozen factors like trainable ones. By default adapters with two of them are left out, and pairs with one
        have no group.

    Returns
    -------
    PairList
        Tied adapters have no group. Where the rank is above a width of the layer, the pair is ``thin``: optimisers
        train it, but it is no point of a manifold.

    Raises
    ------
    ValueError
        No layer has an adapter of such a name.

    Examples
    --------
    >>> import torch
    >>> from peft import LoraConfig, get_peft_model
    >>> from quotient_manifolds.symmetries import adapter_pairs
    >>> model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 4)), LoraConfig(r=2, target_modules=["0"]))
    >>> print(adapter_pairs(model))
    base_model.model.0 lora default    1 × GL(2), 4+6 rows
    """
    check_model(model)
    names = [names] if isinstance(names, str) else names
    plain = plain_names(model)
    layers = [(plain(path), m) for path, m in model.named_modules() if is_lora(m)]
    known = {a for _, m in layers for a in adapter_names(m)}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise ValueError(f"no layer has an adapter {unknown[0]!r}; there are {', '.join(sorted(known)) or 'none'}")
    wanted = known if names is None else set(names)
    found = [p for path, m in layers for p in lora_pairs(m, path, [a for a in adapter_names(m) if a in wanted])]
    trained = [p for p in merged(found) if include_frozen or any(t.requires_grad for t in p.parameters())]
    usable_ones = without_sharing([usable(p, include_frozen, thin=True) for p in trained])
    return PairList(replace(p, model=model) for p in usable_ones)


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
        points = torch.stack([_points(stack, found[name]) for name in names])
        means.append((stack, _mean(stack, points, given, metric)))
    rest = _means_of_others(model, found, into, [*zip(names, (given / given.sum()).tolist(), strict=True)])
    for stack, mean in means:  # only now that all are known
        stack.scatter_(mean)
    for target, value in rest:
        target.copy_(value)


def _mean(stack: PairStack, points: Tensor, weights: Tensor, metric: str) -> Tensor:
    """Return the mean of some adapters in the layers of a stack, in canonical gauge, without the stack's scales."""
    try:
        mean = stack.manifold(metric).mean(points, weights.to(points.device))
    except ConvergenceError as error:
        layer = stack.pairs[int(error.residual.reshape(-1, len(stack)).amax(0).argmax())].module
        raise ConvergenceError(
            f"no mean of the adapters of {layer} was found ({metric}): they are too far apart", error.residual
        ) from error
    for x, p in zip(mean, stack.pairs, strict=True):
        x[: p.n] /= p.scale
    return stack.manifold(metric).canonical(mean)


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
