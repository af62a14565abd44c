"""From a model and a measure to blocks: which weights move, which belong to pairs, and how the others are measured."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import finite
from quotient_manifolds.symmetries import PairStack, SymmetricPair, block, find_symmetric_pairs, stacks
from quotient_manifolds.symmetries.blocks import masks
from quotient_manifolds.symmetries.pairs import check_pairs
from quotient_manifolds.symmetries.points import point_pairs
from quotient_manifolds.symmetries.registry import unknown_attention
from quotient_manifolds.symmetries.stacks import coverage
from quotient_manifolds.symmetries.whole import Affine, CanonicalForm, Wiring
from quotient_manifolds.weights import check_whole, is_point, is_sharded, plain_names

from .measures import ElementwiseBlock, Measure, PairBlock
from .points import PointBlock, WeightBlock, check_points

#: Number of elements of a stack of pairs that are processed at a time on a CPU, because large temporaries are slow.
_PIECE = 2**20


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by name, without the prefixes of ``torch.compile`` and of wrappers such as DDP."""
    plain = plain_names(model)
    return {plain(name): p for name, p in model.named_parameters()}


def trainable(model: nn.Module, *, whole: bool = True) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, after a check of their devices, dtypes and entries.

    Unless they must be whole, parameters may be sharded by FSDP2.
    """
    check_whole(model, or_rows=not whole)
    found = {name: p for name, p in named_weights(model).items() if p.requires_grad}
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


def divide(
    model: nn.Module, measure: Measure, pairs: Sequence[SymmetricPair] | None, parameters: Mapping[str, Tensor], *,
    form: CanonicalForm | None = None, only_some: bool = False, read: Callable[[Tensor], Tensor] = Tensor.detach,
) -> tuple[list[PairStack], dict[Tensor, Tensor], dict[Tensor, Tensor]]:  # fmt: skip
    """Divide parameters into pairs and entries that move separately.

    Parameters
    ----------
    model, measure : nn.Module, Measure
        The measure says which pairs are divided out, and whether lengths are needed.
    pairs : sequence of SymmetricPair, optional
        By default those that ``quotient_manifolds.symmetries.find_symmetric_pairs`` names.
    parameters : mapping of str to Tensor
        Those that move, by name.
    form : CanonicalForm, optional
        The canonical form at which the parameters are: its pairs are divided out, its constants do not move.
    only_some : bool
        Pairs with other parameters than these are left out.
    read : callable
        Function that returns the values of a parameter there.

    Returns
    -------
    list of PairStack
        The pairs that are divided out.
    dict of Tensor to Tensor
        Masks of the entries of parameters that do not move in the canonical form.
    dict of Tensor to Tensor
        Where the measure asks for them, see :func:`vector_lengths`.
    """
    known: Sequence[SymmetricPair] = ()
    if points := any(map(is_point, parameters.values())):
        check_points(measure, parameters)
    if measure.divides:
        pairs = form.pairs if form is not None else pairs
        known = find_symmetric_pairs(model) if pairs is None else check_pairs(pairs)
    if measure.takes_points and points:  # also those beside the pairs that a caller gives
        names = {p.name for p in known}
        known = [*known, *(p for p in point_pairs(model) if p.name not in names)]
    moving = set(parameters.values())
    # The representative that a stack uses may have other signs.
    divided = [
        p for p in known
        if p.group is not None and not p.group.positive and (p.metric or measure.symmetry in ("all", p.kind))
    ]  # fmt: skip
    if only_some:
        divided = [p for p in divided if moving.issuperset(p.parameters())]
    for pair in divided:
        if any(b.tensor not in moving for b in pair.G + pair.H):
            raise ValueError(
                f"the pair {pair.name!r} has weights that are no trainable parameters of {type(model).__name__}; pass "
                "pairs as find_symmetric_pairs gives them for this model"
            )
    found = stacks(divided)
    if next(iter(moving)).device.type == "cpu":
        count = [max(1, _PIECE // ((s.n + s.m) * s.group.h)) for s in found]
        found = [PairStack(s.pairs[i : i + k]) for s, k in zip(found, count, strict=True) for i in range(0, len(s), k)]
    lengths = {}
    if measure.elementwise == "vector":
        lengths = vector_lengths(model, None if form is None else form.wiring, known, read)
    return found, {} if form is None else form.constant, lengths


@torch.no_grad()
def vector_lengths(
    model: nn.Module, wiring: Wiring | None, pairs: Sequence[SymmetricPair] = (),
    read: Callable[[Tensor], Tensor] = Tensor.detach,
) -> dict[Tensor, Tensor]:  # fmt: skip
    """Return the lengths of the vectors that a parameter's entries belong to, for every parameter, broadcastable.

    Vectors are: a neuron's row with its bias; a column of a layer that writes to the stream or reads rectified neurons;
    the bias of such a layer; and a row of an embedding or of any other table. What a pair's group moves, frozen or not,
    is no part of the other vectors: a bias beside weights of ``pairs`` is a vector of its own, and so is one beside
    quantised weights, which never move and have no length here. ``read`` returns the values of a parameter.
    """
    wiring = Wiring() if wiring is None else wiring
    moved = masks(b for pair in pairs if pair.group is not None or pair.frozen for b in pair.G + pair.H)

    def inside(p: Tensor) -> Tensor:
        return moved[p] if p in moved else torch.zeros(p.shape, dtype=torch.bool, device=p.device)

    def norm(p: Tensor, *dims: int) -> Tensor:
        """Sum over the entries outside pairs, or over all where none is outside."""
        w = read(p)
        whole = torch.linalg.vector_norm(w, dim=dims, keepdim=True)
        if p not in moved:
            return whole
        mask = inside(p)
        outside = torch.linalg.vector_norm(w.masked_fill(mask, 0), dim=dims, keepdim=True)
        return torch.where(mask.sum(dims, keepdim=True) == w.numel() // whole.numel(), whole, outside)

    def quantised(p: Tensor) -> bool:
        return p.element_size() < 2 or not (p.is_floating_point() or p.is_complex())

    writers = [a for _, a in wiring.writers] + [Affine(n.H[0]) for n in wiring.neurons]
    found = {t: norm(t, a.stream_dim) for a in writers if not quantised(t := a.matrix.tensor)}
    affines = {a.matrix.tensor: a for s in wiring.sites for a in s.readers}
    for module in model.modules():
        for weight, bias in (("weight", "bias"), ("in_proj_weight", "in_proj_bias")):
            W, b = (dict(module.named_parameters(recurse=False)).get(name) for name in (weight, bias))
            transposed = type(module).__name__ == "Conv1D"
            if W is None or W.dim() < 2 or (b is None and not isinstance(module, nn.Linear)):
                continue
            if b is None or b.shape == (W.shape[int(transposed)],):  # else no neuron has both a row and a bias
                row = None if b is None else block(module, bias)
                affines.setdefault(W, Affine(block(module, weight, transpose=transposed), row))
    for a in affines.values():
        matrix = a.matrix.tensor
        if matrix in found or quantised(matrix):
            continue
        inputs = [d for d in range(matrix.dim()) if d != a.stream_dim]
        found[matrix] = rows = norm(matrix, *inputs)
        if a.bias is not None:
            added = a.bias.tensor
            together = inside(matrix).sum(inputs).bool() == inside(added)
            joint = torch.hypot(rows.flatten(), read(added))
            found[added] = torch.where(together, joint, norm(added, 0))
            found[matrix] = torch.where(together, joint, rows.flatten()).view(rows.shape)
    for p in model.parameters():
        if p not in found and not quantised(p):
            found[p] = norm(p, -1) if p.dim() else read(p).abs()
    for pair in (p for p in pairs if p.group is not None and p.group.positive and p.part != "neurons"):
        for side in (pair.G, pair.H):  # such pairs are not divided out: each column is a vector
            columns = torch.cat([part.of(read(part.tensor)) for part in side]).norm(dim=0)
            for part in side:
                found[part.tensor] = found[part.tensor].expand(part.shape).clone()
                part.of(found[part.tensor]).copy_(columns)
    return found


def build_blocks(
    measure: Measure, parameters: Mapping[str, Tensor], dtype: torch.dtype, found: Sequence[PairStack],
    constant: Mapping[Tensor, Tensor], lengths: Mapping[Tensor, Tensor],
) -> list[WeightBlock]:  # fmt: skip
    """Return the blocks of parameters that :func:`divide` has divided, single ones first, then stacks of pairs."""
    covered = coverage(found)
    for p, mask in constant.items():
        covered[p] = mask | covered[p] if p in covered else mask
    single: list[WeightBlock] = [
        PointBlock(name, p, dtype) if measure.takes_points and is_point(p)
        else ElementwiseBlock(p, measure, dtype, covered.get(p), lengths.get(p))
        for name, p in parameters.items()
        if p not in covered or not bool(covered[p].all())
    ]  # fmt: skip
    return single + [block_class(measure, s)(s, measure, dtype) for s in found]


def block_class(measure: Measure, stack: PairStack) -> Any:
    """Return the class of a stack's block: a measure's own is not for points, whose metric is their own."""
    return PairBlock if stack.metric else measure.pair_block or PairBlock


def warn_of_unknown(model: nn.Module) -> None:
    """Say which trainable attention has no pairs because no handler knows its class, where no batch can tell."""
    if names := unknown_attention(model):
        warnings.warn(
            f"no handler knows the symmetries of {names}, and there is no batch yet to examine them on, so their "
            "weights move one by one; pass pairs=find_symmetric_pairs(model, batch=batch)", stacklevel=3,
        )  # fmt: skip
