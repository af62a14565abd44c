"""A model's weights: which are trainable, and how parameters point to other data for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.symmetries.blocks import check_model, is_sharded

__all__ = ["half_precision_rest", "named_weights", "pointing_to", "trainable", "wide_buffers"]


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Give all parameters by name, without the prefixes of ``torch.compile`` and of wrappers such as DDP."""
    found = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}
    while found and all(name.startswith("module.") for name in found):  # else it is a layer that is called so
        found = {name.removeprefix("module."): p for name, p in found.items()}
    return found


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Give the trainable parameters by name, after a look at their devices, dtypes and entries."""
    check_model(model)
    found = {name: p for name, p in named_weights(model).items() if p.requires_grad}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter, so there is nothing to perturb; "
            "set requires_grad_(True) on the weights to be measured"
        )
    sharded = next((name for name, p in model.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise ValueError(
            f"parameter {sharded!r} is a shard of one (FSDP, DTensor or ZeRO-3), but whole weights are measured; "
            "gather the model on one device, or measure the checkpoint that it was loaded from"
        )
    devices = {p.device for p in found.values()}
    if any(d.type == "meta" for d in devices):
        raise ValueError(
            "the trainable parameters lie on the meta device, where there are no numbers; load the weights"
        )
    if len(devices) > 1:
        raise ValueError(f"the trainable parameters lie on several devices ({devices}); move the model to one")
    for name, p in found.items():
        if not p.is_floating_point():
            raise ValueError(f"parameter {name!r} has dtype {p.dtype}; only real floating-point weights are measured")
        if not bool(p.detach().isfinite().all()):
            raise ValueError(f"parameter {name!r} has NaN or infinite entries; load a sound checkpoint")
    return found


def half_precision_rest(model: nn.Module, known: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Copy in float32 the parameters that are not among those known and are narrower."""
    return {
        p: p.data.to(at_least_float32(p.dtype))
        for p in model.parameters()
        if p not in known and p.is_floating_point() and p.dtype != at_least_float32(p.dtype)
    }


@contextmanager
def wide_buffers(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Replace half-precision buffers by float32 ones for a while."""
    narrow = [
        (m, name, b)
        for m in (model.modules() if wanted else ())
        for name, b in m._buffers.items()
        if b is not None and b.is_floating_point() and b.dtype != at_least_float32(b.dtype)
    ]

    def put_back() -> None:
        for m, name, b in narrow:
            m._buffers[name] = b

    try:
        try:
            for m, name, b in narrow:
                m._buffers[name] = b.to(at_least_float32(b.dtype))
            yield
        finally:
            put_back()
    finally:
        put_back()


@contextmanager
def pointing_to(data: dict[Tensor, Tensor]) -> Iterator[None]:
    """Let parameters point to other data; the original storage is untouched and comes back on every way out."""
    original = {p: p.data for p in data}

    def put_back() -> None:
        for p, before in original.items():
            p.data = before

    try:
        try:
            for p, replacement in data.items():
                p.data = replacement
            yield
        finally:  # cut short by an interrupt, it is done again
            put_back()
    finally:
        put_back()
