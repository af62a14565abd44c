"""LoRA adapters of the ``peft`` library, recognised without importing it, and their pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .blocks import GL, block
from .modules import check_model, plain_names
from .pairs import SymmetricPair, merged, usable
from .stacks import PairList, without_sharing

#: Variants that use the factors only through their product. DoRA divides by the norm of W + BA, aLoRA masks tokens.
_PRODUCT_VARIANTS = ("Dora", "ALora")
#: A parameter, by its owner and its name there.
Attribute = tuple[nn.Module, str]


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is a LoRA layer of peft."""
    return type(module).__module__.startswith("peft.tuners.lora") and hasattr(module, "lora_A")


def _factors(module: Any, names: Collection[str]) -> Iterator[tuple[str, Attribute, Attribute]]:
    """Return name, place of A (r, in) and place of B (out, r) for every adapter with one of these names."""
    for name in names:
        if name in module.lora_A:
            yield name, (module.lora_A[name], "weight"), (module.lora_B[name], "weight")
        elif name in module.lora_embedding_A:
            yield name, (module.lora_embedding_A, name), (module.lora_embedding_B, name)


def _active(module: Any) -> list[str]:
    """List the adapters that add to a layer's weight; none of a layer without LoRA."""
    off = not is_lora(module) or module.disable_adapters or module.merged
    return [] if off else list(module.active_adapters)


def prefix_tuned(model: nn.Module) -> bool:
    """Return whether peft adds its own keys and values to those of the layers."""
    return any(type(m).__name__ == "PrefixEncoder" and type(m).__module__.startswith("peft.") for m in model.modules())


def lora_factors(module: nn.Module) -> list[tuple[Attribute, Attribute]]:
    """List the places of A and B whose product adds to the weight of a module; empty without active LoRA."""
    return [(A, B) for _, A, B in _factors(module, _active(module))]


def _variant(module: Any, adapter: str) -> str:
    """Return the name of an adapter's variant of LoRA, if it is one."""
    variant = getattr(module, "lora_variant", {}).get(adapter)
    return "" if variant is None else getattr(variant, "__name__", type(variant).__name__)


def lora_obstacle(module: nn.Module) -> str:
    """Explain why LoRA on a projection leaves its attention layer without symmetry; empty if it does not."""
    variants = (_variant(module, a) for a in _active(module))
    return next((f"{variant} scales the projection's rows" for variant in variants if variant), "")


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
        reasons = {
            "merged into the base weight; unmerge it": module.merged and adapters is None,
            "the adapter is disabled": module.disable_adapters and adapters is None,
            f"no known symmetry of {variant}": variant and not variant.startswith(_PRODUCT_VARIANTS),
            "the factors of its experts are stacked in two matrices": getattr(module, "num_experts", 1) > 1,
            "a grouped convolution": G.size[1] != H.size[1],
        }
        reason = next((reason for reason, holds in reasons.items() if holds), "")
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
