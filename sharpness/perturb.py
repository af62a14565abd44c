"""Temporarily moved weights: only this file and, for shards, ``sharded.py`` move a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.symmetries.modules import caching, drop_caches, floats, preserve_model_state, tree_map

from .losses import to_float32

#: Attributes of modules that are False during a measurement. With the first, bitsandbytes packs a layer's 4-bit weights
#: for inference in the first pass that needs no gradient of its input: after that nothing can be differentiated through
#: the layer, and its old weights no longer fit. With the second, gradients are sparse and have no derivatives.
_SWITCHES: dict[str, tuple[type, ...]] = {
    "support_avx512bf16_for_cpu": (nn.Module,),
    "sparse": (nn.Embedding, nn.EmbeddingBag),
}


def preserved(model: nn.Module) -> preserve_model_state:
    """Return what leaves a model as it was, if ``with`` enters it twice, see :class:`preserve_model_state`."""
    return preserve_model_state(model, _SWITCHES)


@contextmanager
def pointing_to(model: nn.Module, copies: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let parameters point to copies; their own storage is untouched and is restored even after an error.

    Where a copy is wider than its parameter, all half-precision parameters and buffers of the model are float32
    meanwhile: next to w, bfloat16 has no numbers closer than w (1 ± 2⁻⁸), so that nearly all of a small ξ would be
    rounded away, in the weights and again by autocast, which casts them before every product. Not so above a frozen
    base, see :func:`stands_on_narrow_base`: it stays as it is, and the modules of the copies compute in float32.
    """
    data, hooks, above = dict(copies), list[RemovableHandle](), stands_on_narrow_base(model, copies)
    wider = {p for p, copy in copies.items() if p.dtype != copy.dtype}
    if wider and not above:
        others = (t for t in (*model.parameters(), *model.buffers()) if t not in data and _is_narrow(t))
        data |= {t: to_float32(t.data) for t in others}
    original, cached = {t: t.data for t in data}, caching(model)

    def put_back() -> None:
        for t, before in original.items():
            t.data = before
        for m in cached:
            drop_caches(m)
        for hook in hooks:
            hook.remove()

    try:
        try:
            for t, replacement in data.items():
                t.data = replacement
            hooks += [m.register_forward_pre_hook(drop_caches) for m in cached]  # in each pass, for the weights move on
            for m in model.modules() if above else ():
                narrow = [original[p].dtype for p in m.parameters(recurse=False) if p in wider]
                hooks += _compute_in_float32(m, narrow[0]) if narrow else []
            yield
        finally:  # repeat what an interrupt has cut short
            put_back()
    finally:
        put_back()


def becomes_float32(model: nn.Module, moving: Collection[Tensor]) -> bool:
    """Whether a half-precision model is in float32, and needs such batches, while some of its weights move."""
    return any(map(_is_narrow, moving)) and not stands_on_narrow_base(model, moving)


def stands_on_narrow_base(model: nn.Module, moving: Collection[Tensor]) -> bool:
    """Whether most of a model is frozen in half precision, or in integers, as below adapters.

    Wide copies of the base would need more memory than all moving weights. What moves must belong to modules that
    hold nothing else, whose own forward pass reads it: only those can compute in float32 by themselves.
    """
    known = set(moving)
    frozen = (p for p in model.parameters() if not p.requires_grad and p not in known)
    if sum(p.numel() for p in frozen if p.dtype != at_least_float32(p.dtype)) <= sum(p.numel() for p in known):
        return False
    for m in model.modules():
        own = [p for p in m.parameters(recurse=False) if _is_narrow(p)]
        read_by_its_parent = isinstance(m, NonDynamicallyQuantizableLinear)
        alone = known.issuperset(own) and not read_by_its_parent and next(m.children(), None) is None
        if not alone and not known.isdisjoint(own):
            return False
    return True


def _compute_in_float32(module: nn.Module, narrow: torch.dtype) -> list[RemovableHandle]:
    """Let a module whose weights are now in float32 accept and return the dtype of its neighbours."""
    came: list[torch.dtype] = []

    def widen(_: nn.Module, args: Any, kwargs: Any) -> Any:
        came.append(next((t.dtype for t in floats((args, kwargs))), narrow))
        return to_float32(args), to_float32(kwargs)

    def narrow_again(_: nn.Module, args: Any, output: Any) -> Any:
        dtype = came.pop()
        return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    return [module.register_forward_pre_hook(widen, with_kwargs=True), module.register_forward_hook(narrow_again)]


def _is_narrow(t: Tensor) -> bool:
    return t.is_floating_point() and t.dtype != at_least_float32(t.dtype)
