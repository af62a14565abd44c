"""From a model and a measure to patches: which weights move, which belong to pairs, and how the others are measured."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import finite
from quotient_manifolds.symmetries import PairStack, SymmetricPair, Symmetries, stacks
from quotient_manifolds.symmetries.attention import unknown_attention
from quotient_manifolds.symmetries.found import check_names, check_symmetries
from quotient_manifolds.symmetries.pairs import coverage
from quotient_manifolds.weights import check_whole, is_point, is_sharded, plain_names, trained, weights_of

from .measures import Measure
from .patches import ElementwisePatch, PairPatch, Patch
from .points import PointPatch

#: Number of elements of a stack of pairs that are processed at a time on a CPU, because large temporaries are slow.
_PIECE = 2**20


def trainable(model: nn.Module, *, whole: bool = True) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, after a check of their devices, dtypes and entries.

    They must be whole, unless the caller has made sure that they are, or that FSDP2 has sharded them.
    """
    if whole:
        check_whole(model)
    found = trained(weights_of(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter, so there is nothing to perturb; "
            "set requires_grad_(True) on the weights to be measured"
        )
    devices = {p.device for p in found.values()}
    if len(devices) > 1 or any(d.type == "meta" for d in devices):  # where there are no numbers
        raise ValueError(
            f"the trainable parameters lie on {', '.join(sorted(map(str, devices)))}; load the whole model on one "
            "device that holds numbers"
        )
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.is_meta:
            raise ValueError(f"{name!r} is on the device meta, without numbers; load the whole model")
    for name, p in found.items():
        measured = p.is_floating_point() or (is_point(p) and p.is_complex())
        if not measured or p.element_size() < 2:  # integers, float8
            raise ValueError(f"parameter {name!r} has dtype {p.dtype}; only real floating-point weights are measured")
        if p.is_inference():
            raise ValueError(
                f"parameter {name!r} was made under torch.inference_mode, where nothing can be differentiated; make "
                "the model outside of it"
            )
        if not is_sharded(p) and not finite(p):
            raise ValueError(f"parameter {name!r} has NaN or infinite entries; load an intact checkpoint")
    _check_memory(model, found)
    return found


def _check_memory(model: nn.Module, moving: dict[str, nn.Parameter]) -> None:
    """Refuse moving weights whose memory other tensors of the model share: they would be moved apart."""
    plain, by_storage = plain_names(model), dict[int, list[tuple[str, Tensor]]]()
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if not is_sharded(t) and t.layout == torch.strided and t.device.type != "meta" and t.numel():
            by_storage.setdefault(t.untyped_storage().data_ptr(), []).append((plain(name), t.detach()))
    for tensors in by_storage.values():
        for name, t in tensors:  # one number expanded to a whole weight stands in for a sharded one
            repeats = any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True))
            if name in moving and repeats and any(t.stride()):
                raise ValueError(f"parameter {name!r} is expanded: some of its entries are one number; clone it")
        storage = np.empty(tensors[0][1].untyped_storage().nbytes(), np.uint8)  # of which the addresses alone are used
        for (name, one), (other, two) in itertools.permutations(tensors, 2):
            if name in moving and np.shares_memory(_within(storage, one), _within(storage, two)):
                raise ValueError(
                    f"{name!r} and {other!r} share memory but are two tensors, so that a step would move them apart; "
                    "tie them as one Parameter (a.weight = b.weight, not a.weight.data = b.weight.data), or compute a "
                    "buffer from the weight in every forward pass"
                )


def _within(storage: np.ndarray, t: Tensor) -> np.ndarray:
    """Lay out an array in a storage as a tensor lies in its own."""
    size = t.element_size()
    strides = [size * stride for stride in t.stride()]
    return np.ndarray(tuple(t.shape), f"V{size}", storage, size * t.storage_offset(), strides)


def known(model: nn.Module, measure: Measure, given: Symmetries | None, *, classes: bool = False) -> Symmetries:
    """Return the symmetries that a measure divides out where all weights move.

    Parameters
    ----------
    model, measure : nn.Module, Measure
    given : Symmetries, optional
        By default those of heads and adapters that the model's classes name.
    classes : bool
        For measures at the canonical form: the loss uses the logits only through a softmax.
    """
    from quotient_manifolds.symmetries.discovery import PAIRS, find, with_wiring

    scope = PAIRS if measure.divides else ("points",) if measure.takes_points else ()
    if given is None or not measure.divides:
        found = find(model, scope=scope) if scope else Symmetries()
    else:
        check_symmetries(given)
        check_names(given, weights_of(model), type(model).__name__)
        found = given if not measure.takes_points else _with_points(model, given)
    return with_wiring(model, found, classes=classes) if measure.form == "canonical" and not found.actions else found


def _with_points(model: nn.Module, given: Symmetries) -> Symmetries:
    """Add the points that a user's pairs lack."""
    from quotient_manifolds.symmetries import find

    names = {p.name for p in given.pairs}
    return given.adding(*(p for p in find(model, scope=("points",)).pairs if p.name not in names))


def divides(measure: Measure, pair: SymmetricPair) -> bool:
    """Return whether a measure divides a pair out; of positive numbers a representative may have other signs."""
    return not pair.group.positive and bool(pair.metric or measure.symmetry in ("all", pair.kind))


def stacks_of(
    measure: Measure, symmetries: Symmetries, weights: Mapping[str, Tensor], *, pieces: bool = True
) -> list[PairStack]:
    """Stack the pairs that a measure divides out; on a CPU in pieces."""
    found = stacks([p for p in symmetries.pairs if divides(measure, p)], weights)
    if not pieces or any(weights[name].device.type != "cpu" for s in found[:1] for name in s.names[:1]):
        return found
    count = [max(1, _PIECE // ((s.n + s.m) * s.group.h)) for s in found]
    return [PairStack(s.pairs[i : i + k]) for s, k in zip(found, count, strict=True) for i in range(0, len(s.pairs), k)]


def build_patches(
    measure: Measure, moving: Mapping[str, Tensor], dtype: torch.dtype, found: Sequence[PairStack],
    constant: Mapping[str, Tensor], lengths: Mapping[str, Tensor],
) -> tuple[list[Patch], list[PairPatch]]:  # fmt: skip
    """Return the patches of the weights that move: of single ones, and of stacks of pairs.

    ``constant`` are masks of the entries that do not move, ``lengths`` those of the vectors that entries belong to.
    """
    covered = coverage(found, moving)
    for name, mask in constant.items():
        covered[name] = mask | covered[name] if name in covered else mask
    single: list[Patch] = [
        PointPatch(name, p, dtype) if is_point(p) and measure.takes_points
        else ElementwisePatch(name, p, measure, dtype, covered.get(name), lengths.get(name))
        for name, p in moving.items()
        if name not in covered or not bool(covered[name].all())
    ]  # fmt: skip
    own = measure.pair_patch or PairPatch  # not for points, whose metric is their own
    return single, [(PairPatch if s.metric else own)(s, moving, measure, dtype) for s in found]


def warn_of_unknown(model: nn.Module) -> None:
    """Say which trainable attention has no pairs because no handler knows its class, where no batch can tell."""
    if names := unknown_attention(model):
        warnings.warn(
            f"no handler knows the symmetries of {names}, and there is no batch yet to examine them on, so their "
            "weights move one by one; pass symmetries=find(model, batch)", stacklevel=3,
        )  # fmt: skip
