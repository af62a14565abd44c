"""A model's trainable weights by name, after a check that they can be measured."""

from __future__ import annotations

import re

import geoopt
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.modules import check_model, is_sharded, plain_names

from .errors import naming

__all__ = ["named_weights", "trainable"]


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by name, without the prefixes of ``torch.compile`` and of wrappers such as DDP."""
    plain = plain_names(model)
    return {plain(name): p for name, p in model.named_parameters()}


def trainable(model: nn.Module, only: str | None = None, *, whole: bool = True) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, after a check of their devices, dtypes and entries.

    ``only`` is a regular expression; names without a match are left out. Unless they must be whole, parameters may be
    sharded by FSDP2.
    """
    check_model(model)
    found = {name: p for name, p in named_weights(model).items() if p.requires_grad}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter, so there is nothing to perturb; "
            "set requires_grad_(True) on the weights to be measured"
        )
    with naming(f"only={only!r} is not a regular expression"):
        pattern = re.compile(only or "")
    found = {name: p for name, p in found.items() if pattern.search(name)}
    if not found:
        raise ValueError(f"only={only!r} matches no trainable parameter's name")
    for name, p in model.named_parameters():
        if is_sharded(p) and (whole or not hasattr(p, "placements")):
            raise ValueError(
                f"parameter {name!r} is a shard of one (FSDP, DTensor or ZeRO-3), but whole weights are needed here; "
                "gather the model on one device, or load the whole checkpoint (evaluate and gradient_norm measure what "
                "FSDP2's fully_shard sharded)"
            )
    devices = {p.device for p in found.values()}
    if any(d.type == "meta" for d in devices):
        raise ValueError(
            "the trainable parameters lie on the meta device, where there are no numbers; load the weights"
        )
    if len(devices) > 1:
        raise ValueError(f"the trainable parameters lie on several devices ({devices}); move the model to one")
    for name, p in found.items():
        if not p.is_floating_point() or p.element_size() < 2:  # integers, float8
            raise ValueError(f"parameter {name!r} has dtype {p.dtype}; only real floating-point weights are measured")
        if p.is_inference():
            raise ValueError(
                f"parameter {name!r} was made under torch.inference_mode, where nothing can be differentiated; make "
                "the model outside of it"
            )
        if not is_sharded(p) and not bool(p.detach().isfinite().all()):
            raise ValueError(f"parameter {name!r} has NaN or infinite entries; load an intact checkpoint")
        if isinstance(p, geoopt.ManifoldParameter) and not isinstance(p.manifold, geoopt.Euclidean):
            raise ValueError(
                f"parameter {name!r} is a point of the manifold {p.manifold}, which a step in flat weights would "
                "leave; leave it out by only=, or freeze it with requires_grad_(False)"
            )
    _check_memory(model, found)
    return found


def _check_memory(model: nn.Module, moving: dict[str, nn.Parameter]) -> None:
    """Refuse moving weights whose memory other tensors of the model share: they would be moved apart."""
    plain, by_storage = plain_names(model), dict[int, list[tuple[str, Tensor]]]()
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if not is_sharded(t) and t.layout == torch.strided and t.device.type != "meta" and t.numel():
            by_storage.setdefault(t.untyped_storage().data_ptr(), []).append((plain(name), t.detach()))
    for tensors in by_storage.values():
        names = [name for name, _ in tensors if name in moving]
        repeated = [name for name, t in tensors if name in moving and _repeats(t)]
        if repeated:
            raise ValueError(f"parameter {repeated[0]!r} is expanded: some of its entries are one number; clone it")
        if names and len(tensors) > 1 and _overlap(tensors):
            other = next(name for name, _ in tensors if name != names[0])
            fix = "tie them as one Parameter (a.weight = b.weight, not a.weight.data = b.weight.data)"
            if other not in moving and other in dict(model.named_buffers()):
                fix = "compute the buffer from the weight in every forward pass"
            raise ValueError(
                f"{names[0]!r} and {other!r} share memory but are two tensors, so that a step would move them "
                f"apart; {fix}"
            )


def _repeats(t: Tensor) -> bool:
    # One number expanded to a whole weight stands in for a sharded one.
    return any(t.stride()) and any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True))


def _overlap(tensors: list[tuple[str, Tensor]]) -> bool:
    """Whether any two of some tensors in one storage have a byte in common."""
    taken = torch.zeros(tensors[0][1].untyped_storage().nbytes(), dtype=torch.bool)
    for _, t in tensors:
        width, start = t.element_size(), t.storage_offset()
        size, stride = (*t.shape, width), (*(width * s for s in t.stride()), 1)
        mine = taken.as_strided(size, stride, width * start)
        if bool(mine.any()):
            return True
        if not _repeats(t):
            mine.fill_(True)
    return False
