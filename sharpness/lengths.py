"""The lengths of the vectors that weights' entries belong to, which the complete measures take in place of entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import Cause, Symmetries, slot
from quotient_manifolds.symmetries.slots import masks
from quotient_manifolds.symmetries.wiring import Affine, Wiring
from quotient_manifolds.weights import naming, weights_of


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
    writers = (*(a for _, a in wiring.writers), *(Affine(n.H[0]) for n in wiring.neurons))
    writing = {a.matrix.name: a for a in writers}
    affines = _affines(model, weights) | {r.matrix.name: r for s in wiring.sites for r in s.readers} | writing
    alone, touched = dict[str, Tensor](), dict[str, Tensor]()
    for name, p in weights.items():
        if p.element_size() == 1 or not (p.is_floating_point() or p.is_complex()):
            continue
        w, a = values(name), affines.get(name)
        outputs = p.dim() - 1 if a is None else int(a.matrix.stride[0] < a.matrix.stride[1])
        dims = [d for d in range(p.dim()) if (d == outputs) == (a is None or name in writing)]  # those of one vector
        alone[name] = whole = torch.linalg.vector_norm(w, dim=dims, keepdim=True) if dims else w.abs()
        if name in moved:  # the entries outside pairs, or all where none is outside
            touched[name] = moved[name].sum(dims, keepdim=True)
            outside = torch.linalg.vector_norm(w.masked_fill(moved[name], 0), dim=dims, keepdim=True)
            alone[name] = torch.where(touched[name] == w.numel() // whole.numel(), whole, outside)
    found = dict(alone)
    for matrix, a in affines.items():
        if a.bias is not None and matrix in alone and matrix not in writing:
            rows, added = alone[matrix].flatten(), a.bias.name
            joint = torch.hypot(rows, values(added))
            none = torch.zeros_like(joint, dtype=torch.bool)
            together = touched.get(matrix, none).flatten().bool() == moved.get(added, none)
            found[added] = torch.where(together, joint, alone[added])
            found[matrix] = torch.where(together, joint, rows).view(alone[matrix].shape)
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
        own, transposed = dict(module.named_parameters(recurse=False)), type(module).__name__ == "Conv1D"
        for weight, bias in (("weight", "bias"), ("in_proj_weight", "in_proj_bias")):
            W, b = own.get(weight), own.get(bias)
            matrix, vector = (name_of(path, name) for name in (weight, bias))
            if W is None or W.dim() < 2 or (b is None and not isinstance(module, nn.Linear)) or matrix not in weights:
                continue
            if b is None or (b.shape == (W.shape[int(transposed)],) and vector in weights):  # else no neuron has both
                row = None if b is None else replace(slot(module, bias), name=vector)
                found.setdefault(matrix, Affine(replace(slot(module, weight, transpose=transposed), name=matrix), row))
    return found
