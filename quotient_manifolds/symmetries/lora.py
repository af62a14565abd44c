"""LoRA adapters of the ``peft`` library, recognised without importing it, and their pairs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from ..weights import check_model, naming, plain_names
from .found import Symmetries, placed, settled
from .pairs import SymmetricPair
from .refusals import Cause, Claim, Refusal
from .slots import GL, Slot, outline, slot

#: Variants that use the factors only through their product. DoRA divides by the norm of W + BA, aLoRA masks tokens.
_PRODUCT_VARIANTS = ("Dora", "ALora")


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is a LoRA layer of peft."""
    return type(module).__module__.startswith("peft.tuners.lora") and hasattr(module, "lora_A")


def _factors(module: Any, names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Return name, and the names in the layer of A (r, in) and B (out, r), of every adapter with one of these names."""
    for name in names:
        if name in module.lora_A:
            yield name, f"lora_A.{name}.weight", f"lora_B.{name}.weight"
        elif name in module.lora_embedding_A:
            yield name, f"lora_embedding_A.{name}", f"lora_embedding_B.{name}"


def _active(module: Any) -> list[str]:
    """List the adapters that add to the weight of a LoRA layer."""
    return [] if module.disable_adapters or module.merged else list(module.active_adapters)


def prefix_tuned(model: nn.Module) -> bool:
    """Return whether peft adds its own keys and values to those of the layers."""
    return any(type(m).__name__ == "PrefixEncoder" and type(m).__module__.startswith("peft.") for m in model.modules())


def lora_factors(module: nn.Module) -> list[tuple[str, str]]:
    """List the names of A and B whose product adds to the weight of a module; empty without active LoRA."""
    return [(A, B) for _, A, B in _factors(module, _active(module))] if is_lora(module) else []


def _variant(module: Any, adapter: str) -> str:
    """Return the name of an adapter's variant of LoRA, if it is one."""
    variant = getattr(module, "lora_variant", {}).get(adapter)
    return "" if variant is None else getattr(variant, "__name__", type(variant).__name__)


def lora_obstacle(module: nn.Module) -> str:
    """Explain why LoRA on a projection leaves its attention layer without symmetry; empty if it does not."""
    if not is_lora(module):
        return ""
    variants = (_variant(module, a) for a in _active(module))
    return next((f"{variant} scales the projection's rows" for variant in variants if variant), "")


def lora_layers(model: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield every LoRA layer of a model with the name and the factor B of each of its adapters, active or not."""
    for m in filter(is_lora, model.modules()):
        layer: Any = m
        for name, _, B in _factors(layer, [*layer.lora_A, *layer.lora_embedding_A]):
            yield layer, name, attrgetter(B)(layer)


def zero_norm(model: nn.Module) -> str:
    """Say which layer has a zero row, by whose norm DoRA divides, which gives NaN; empty if none has."""
    plain = plain_names(model)
    for path, m in model.named_modules():
        layer: Any = m
        for name, magnitude in layer.lora_magnitude_vector.items() if is_lora(m) else ():  # which have or are weights
            if bool((getattr(magnitude, "weight", magnitude) == 0).any()):
                return (
                    f"DoRA (adapter {name!r}) divides by the norm of a row of {plain(path)!r}, and one is 0; leave "
                    "this layer out of target_modules, or set use_dora=False"
                )
    return ""


def adapter_of(name: str) -> str | None:
    """Return the adapter to which a parameter of this name belongs: as factor, bias, magnitude, saved module, token."""
    kinds = "lora_(?:embedding_)?[AB]|lora_magnitude_vector|modules_to_save|trainable_tokens_delta"
    found = re.search(rf"(?:^|\.)(?:{kinds})\.([^.]+)", name)
    return found and found[1]


def _slots(module: nn.Module, A: str, B: str, expert: int, experts: int) -> tuple[Slot, Slot]:
    """Describe B and Aᵀ of one expert: A_e = A.reshape(E, r, in)[e], B_e = B.reshape(out, r, E)[..., e]."""
    if experts == 1:
        return slot(module, B), slot(module, A, transpose=True)
    of_A, of_B = outline(module, A), outline(module, B)
    G = Slot.from_view(B, of_B, of_B.unflatten(1, (-1, experts))[..., expert])
    return G, Slot.from_view(A, of_A, of_A.unflatten(0, (experts, -1))[expert].T)


def lora_pairs(module: Any, adapters: Collection[str] | None = None) -> Iterator[Claim]:
    """Yield the pair G = B (out, r), H = Aᵀ (in, r) with the group GL(r) for every active adapter of a LoRA layer.

    Where an adapter changes the weights of several experts (``target_parameters``), each has a pair, whose ``head`` is
    the expert's number. ``adapters`` names other adapters to use instead, active or not.
    """
    for adapter, A, B in _factors(module, module.active_adapters if adapters is None else adapters):
        if any(attrgetter(name)(module).dim() < 2 for name in (A, B)):
            raise ValueError(
                f"the factors of adapter {adapter!r} in {type(module).__name__} are no matrices, as FSDP1 "
                "(use_orig_params=True) and ZeRO-3 leave them, but their geometry needs whole factors; use DDP, or "
                "keep these modules out of the sharding"
            )
        experts, variant = getattr(module, "num_experts", 1), _variant(module, adapter)
        scale = float(module.scaling[adapter])
        for expert in range(experts):
            G, H = _slots(module, A, B, expert, experts)
            reasons = {
                "merged into the base weight; unmerge it": module.merged and adapters is None,
                "the adapter is disabled": module.disable_adapters and adapters is None,
                f"no known symmetry of {variant}": variant and not variant.startswith(_PRODUCT_VARIANTS),
                "a grouped convolution": G.size[1] != H.size[1],
            }
            reason = next((reason for reason, holds in reasons.items() if holds), "")
            head = expert if experts > 1 else None
            if reason:
                yield Refusal("", "lora", Cause.BROKEN, reason, head, adapter, (G,), (H,))
            else:
                yield SymmetricPair("", "lora", GL(G.size[1]), (G,), (H,), head, adapter, scale=scale)


def lora_pairs_by_name(
    model: nn.Module, down: str = "lora_down", up: str = "lora_up", *, scale: str | float = "scale"
) -> Symmetries:
    """List the pairs (B, Aᵀ) of LoRA layers that are not peft's, by the names that their factors have.

    Parameters
    ----------
    model : nn.Module
        Every module in it that has both factors is a LoRA layer.
    down, up : str
        Names of A and B: layers with a ``weight``, (r, in, …) and (out, r, …), or parameters, whose common dimension is
        the rank: (r, in) and (out, r) for ``x @ A.T @ B.T``, (in, r) and (r, out) for ``x @ A @ B``.
    scale : str or float
        What the layer multiplies the product by: the name of a number of the layer (1 where it has none), or a number.

    Returns
    -------
    Symmetries
        For ``create_quotient_optimizer(model, lr=…, symmetries=…)``. Factors without a common dimension are refused.

    Raises
    ------
    ValueError
        No module has factors of these names.

    Examples
    --------
    The layers of kohya's scripts, and those of torchtune:

    >>> import torch
    >>> from quotient_manifolds.symmetries import lora_pairs_by_name
    >>> layer = torch.nn.ModuleDict({"lora_down": torch.nn.Linear(6, 2), "lora_up": torch.nn.Linear(2, 4)})
    >>> print(lora_pairs_by_name(torch.nn.Sequential(layer)))
    0    1 × GL(2), 4+6 rows
    >>> layer = torch.nn.ModuleDict({"lora_a": torch.nn.Linear(6, 2), "lora_b": torch.nn.Linear(2, 4)})
    >>> lora_pairs_by_name(torch.nn.Sequential(layer), "lora_a", "lora_b", scale=16 / 2).pairs[0].scale
    8.0
    """
    check_model(model)
    name_of, found = naming(model), list[Claim]()
    for path, m in model.named_modules():
        A, B = (_named(m, name) for name in (down, up))
        if A is not None and B is not None:
            found += placed([_by_shapes(m, A, B, scale)], path, name_of)
    if not found:
        raise ValueError(f"no module has factors that are called {down!r} and {up!r}; pass the names that yours have")
    return Symmetries.of_claims(settled(found, model))


def _by_shapes(module: nn.Module, A: str, B: str, scale: str | float) -> Claim:
    """Describe the factors of a layer; of parameters shapes tell whether they are those of x A B or of x Aᵀ Bᵀ."""
    rows, columns = (attrgetter(name)(module).flatten(1).shape for name in (B, A))
    # Of two common dimensions the rank is the smaller one.
    swapped = "." not in A and rows[0] == columns[1] and not (rows[1] == columns[0] <= rows[0])
    G, H = slot(module, B, transpose=swapped), slot(module, A, transpose=not swapped)
    if G.size[1] != H.size[1]:
        return Refusal("", "lora", Cause.BROKEN, f"{B} and {A} have no dimension in common", G=(G,), H=(H,))
    s = getattr(module, scale, 1.0) if isinstance(scale, str) else scale
    return SymmetricPair("", "lora", GL(G.size[1]), (G,), (H,), scale=float(s))


def _named(module: nn.Module, name: str) -> str | None:
    """Return the name of a LoRA layer's factor: a parameter, or the weight of a layer; None if there is none."""
    found = getattr(module, name, None)
    name = f"{name}.weight" if isinstance(found, nn.Module) else name
    tensor = getattr(found, "weight", None) if isinstance(found, nn.Module) else found
    return name if isinstance(tensor, Tensor) and tensor.dim() > 1 else None


def adapter_pairs(model: nn.Module, names: Sequence[str] | None = None) -> Symmetries:
    """List the pairs (B, Aᵀ) of a model's LoRA adapters, active or not, and nothing else.

    Parameters
    ----------
    model : nn.Module
        With adapters of peft; plain, DDP-wrapped or compiled.
    names : sequence of str, optional
        Names of adapters; by default those of all adapters.

    Returns
    -------
    Symmetries
        One pair for each layer, or for each expert of a layer (``target_parameters``), whose number is the pair's
        ``head``. Tied adapters are refused. Where the rank is above a width of the layer, the pair is ``thin``:
        optimisers train it, but it is no point of a manifold.

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
    known = dict.fromkeys(name for _, name, _ in lora_layers(model))
    unknown = sorted(set(() if names is None else names) - set(known))
    if unknown:
        raise ValueError(f"no layer has an adapter {unknown[0]!r}; there are {', '.join(sorted(known)) or 'none'}")
    wanted = [name for name in known if names is None or name in names]
    name_of, found = naming(model), list[Claim]()
    for path, m in model.named_modules():
        if is_lora(m):
            found += placed(lora_pairs(m, wanted), path, name_of)
    return Symmetries.of_claims(settled(found, model))
