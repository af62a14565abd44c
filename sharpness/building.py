"""From a model and a measure to patches: which weights move, which belong to pairs, and how the others are measured."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import finite
from quotient_manifolds.symmetries import Cause, PairStack, Slot, SymmetricPair, Symmetries, find, slot, stacks
from quotient_manifolds.symmetries.discovery import PAIRS, with_wiring
from quotient_manifolds.symmetries.found import check_names, check_symmetries
from quotient_manifolds.symmetries.registry import unknown_attention
from quotient_manifolds.symmetries.slots import masks
from quotient_manifolds.symmetries.stacks import coverage
from quotient_manifolds.symmetries.wiring import Affine, Wiring
from quotient_manifolds.weights import check_whole, is_point, is_sharded, naming, plain_names, trained, weights_of

from .measures import Measure
from .patches import ElementwisePatch, PairPatch, Patch
from .points import PointPatch

#: Number of elements of a stack of pairs that are processed at a time on a CPU, because large temporaries are slow.
_PIECE = 2**20


def trainable(model: nn.Module, *, whole: bool = True) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, after a check of their devices, dtypes and entries.

    Unless they must be whole, parameters may be sharded by FSDP2.
    """
    check_whole(model, or_rows=not whole)
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
    kinds = PAIRS if measure.divides else ("points",) if measure.takes_points else ()
    if given is None or not measure.divides:
        found = find(model, kinds=kinds) if kinds else Symmetries()
    else:
        check_symmetries(given)
        check_names(given, weights_of(model), type(model).__name__)
        found = given if not measure.takes_points else _with_points(model, given)
    return with_wiring(model, found, classes=classes) if measure.form == "canonical" and not found.actions else found


def _with_points(model: nn.Module, given: Symmetries) -> Symmetries:
    """Add the points that a user's pairs lack."""
    names = {p.name for p in given.pairs}
    return given.adding(*(p for p in find(model, kinds=("points",)).pairs if p.name not in names))


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
    return [PairStack(s.pairs[i : i + k]) for s, k in zip(found, count, strict=True) for i in range(0, len(s), k)]


@torch.no_grad()
def vector_lengths(
    model: nn.Module, symmetries: Symmetries, read: Callable[[str], Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the lengths of the vectors that a weight's entries belong to, for every weight, broadcastable.

    Vectors are: a neuron's row with its bias; a column of a layer that writes to the stream or reads rectified neurons;
    the bias of such a layer; and a row of an embedding or of any other table. What a pair's group moves, frozen or not,
    is no part of the other vectors: a bias beside weights of pairs is a vector of its own, and so is one beside
    quantised weights, which never move and have no length here. ``read`` returns the values of a weight.
    """
    weights, wiring = weights_of(model), symmetries.wiring or Wiring()
    values = read or (lambda name: weights[name].detach())
    of_pairs = [s for p in symmetries.pairs for s in p.slots]
    of_pairs += [s for r in symmetries.refused if r.cause is Cause.FROZEN and r.H for s in r.slots]
    moved = masks(of_pairs, weights)

    def inside(name: str) -> Tensor:
        p = weights[name]
        return moved[name] if name in moved else torch.zeros(p.shape, dtype=torch.bool, device=p.device)

    def norm(name: str, *dims: int) -> Tensor:
        """Sum over the entries outside pairs, or over all where none is outside."""
        w = values(name)
        whole = torch.linalg.vector_norm(w, dim=dims, keepdim=True)
        if name not in moved:
            return whole
        mask = inside(name)
        outside = torch.linalg.vector_norm(w.masked_fill(mask, 0), dim=dims, keepdim=True)
        return torch.where(mask.sum(dims, keepdim=True) == w.numel() // whole.numel(), whole, outside)

    def quantised(name: str) -> bool:
        p = weights[name]
        return p.element_size() < 2 or not (p.is_floating_point() or p.is_complex())

    writers = [a for _, a in wiring.writers] + [Affine(n.H[0]) for n in wiring.neurons]
    found = {a.matrix.name: norm(a.matrix.name, a.stream_dim) for a in writers if not quantised(a.matrix.name)}
    affines = _affines(model, weights) | {r.matrix.name: r for s in wiring.sites for r in s.readers}
    for matrix, a in affines.items():
        if matrix in found or quantised(matrix):
            continue
        inputs = [d for d in range(weights[matrix].dim()) if d != a.stream_dim]
        found[matrix] = rows = norm(matrix, *inputs)
        if a.bias is not None:
            added = a.bias.name
            together = inside(matrix).sum(inputs).bool() == inside(added)
            joint = torch.hypot(rows.flatten(), values(added))
            found[added] = torch.where(together, joint, norm(added, 0))
            found[matrix] = torch.where(together, joint, rows.flatten()).view(rows.shape)
    for name, p in weights.items():
        if name not in found and not quantised(name):
            found[name] = norm(name, -1) if p.dim() else values(name).abs()
    for pair in (p for p in symmetries.pairs if p.group.positive and p.part != "neurons"):
        for side in (pair.G, pair.H):  # such pairs are not divided out: each column is a vector
            columns = torch.cat([s.of(values(s.name)) for s in side]).norm(dim=0)
            for s in side:
                found[s.name] = found[s.name].expand(weights[s.name].shape).clone()
                s.of(found[s.name]).copy_(columns)
    return found


def _affines(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Affine]:
    """Describe the layers of a model by the names of their matrices: rows of neurons with their biases."""
    name_of, found = naming(model), dict[str, Affine]()
    for path, module in model.named_modules():
        for weight, bias in (("weight", "bias"), ("in_proj_weight", "in_proj_bias")):
            W, b = (dict(module.named_parameters(recurse=False)).get(name) for name in (weight, bias))
            matrix, vector = (name_of(path, own) for own in (weight, bias))
            transposed = type(module).__name__ == "Conv1D"
            if W is None or W.dim() < 2 or (b is None and not isinstance(module, nn.Linear)) or matrix not in weights:
                continue
            if b is None or (b.shape == (W.shape[int(transposed)],) and vector in weights):  # else no neuron has both
                row = None if b is None else placed_slot(module, bias, vector)
                found.setdefault(matrix, Affine(placed_slot(module, weight, matrix, transpose=transposed), row))
    return found


def placed_slot(module: nn.Module, own: str, name: str, *, transpose: bool = False) -> Slot:
    """Describe a parameter of a module by the name that it has in the model."""
    return replace(slot(module, own, transpose=transpose), name=name)


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
        PointPatch(name, p, dtype) if measure.takes_points and is_point(p)
        else ElementwisePatch(name, p, measure, dtype, covered.get(name), lengths.get(name))
        for name, p in moving.items()
        if name not in covered or not bool(covered[name].all())
    ]  # fmt: skip
    return single, [patch_class(measure, s)(s, moving, measure, dtype) for s in found]


def patch_class(measure: Measure, stack: PairStack) -> Any:
    """Return the class of a stack's patch: a measure's own is not for points, whose metric is their own."""
    return PairPatch if stack.metric else measure.pair_patch or PairPatch


def warn_of_unknown(model: nn.Module) -> None:
    """Say which trainable attention has no pairs because no handler knows its class, where no batch can tell."""
    if names := unknown_attention(model):
        warnings.warn(
            f"no handler knows the symmetries of {names}, and there is no batch yet to examine them on, so their "
            "weights move one by one; pass symmetries=find(model, batch)", stacklevel=3,
        )  # fmt: skip
