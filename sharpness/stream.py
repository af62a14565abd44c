"""Vectors of a network's residual stream as units of length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.whole import Affine, Wiring

__all__ = ["vector_lengths"]


@torch.no_grad()
def vector_lengths(
    model: nn.Module, wiring: Wiring | None, read: Callable[[Tensor], Tensor] = Tensor.detach
) -> dict[Tensor, Tensor]:
    """Return the lengths of the vectors that a parameter's entries belong to, for every parameter, broadcastable.

    Vectors are: a neuron's row with its bias; a column of a layer that writes to the stream or reads rectified neurons;
    the bias of such a layer; and a row of an embedding or of any other table. ``read`` returns the values of a
    parameter.
    """
    wiring = Wiring() if wiring is None else wiring
    writers = [a for _, a in wiring.writers] + [n.down for n in wiring.neurons]
    affines = {a.W: a for s in wiring.sites for a in s.readers}
    for module in model.modules():
        for weight, bias in (("weight", "bias"), ("in_proj_weight", "in_proj_bias")):
            W, b = (dict(module.named_parameters(recurse=False)).get(name) for name in (weight, bias))
            transposed = type(module).__name__ == "Conv1D"
            if W is None or W.dim() < 2 or (b is None and not isinstance(module, nn.Linear)):
                continue
            if b is None or b.shape == (W.shape[int(transposed)],):  # else no neuron has both a row and a bias
                affines.setdefault(W, Affine(module, weight, bias, transposed=transposed))
    found: dict[Tensor, Tensor] = {}
    for a in affines.values():
        if a.W not in {w.W for w in writers}:
            lengths = read(a.W).transpose(0, a.stream_dim).flatten(1).norm(dim=1)
            if a.b is not None:
                found[a.b] = lengths = torch.hypot(lengths, read(a.b))
            shape = [1] * a.W.dim()
            shape[a.stream_dim] = -1
            found[a.W] = lengths.view(shape)
    for a in writers:
        found[a.W] = read(a.W).norm(dim=a.stream_dim, keepdim=True)
    for p in model.parameters():
        if p not in found:
            found[p] = read(p).abs() if p.dim() == 0 else read(p).norm(dim=-1, keepdim=True)
    return found
