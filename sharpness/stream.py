"""Vectors of a network's residual stream as units of length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.blocks import Block, block
from quotient_manifolds.symmetries.whole import Affine, Wiring

__all__ = ["vector_lengths"]


@torch.no_grad()
def vector_lengths(
    model: nn.Module, wiring: Wiring | None, pairs: Sequence[SymmetricPair] = (),
    read: Callable[[Tensor], Tensor] = Tensor.detach,
) -> dict[Tensor, Tensor]:  # fmt: skip
    """Return the lengths of the vectors that a parameter's entries belong to, for every parameter, broadcastable.

    Vectors are: a neuron's row with its bias; a column of a layer that writes to the stream or reads rectified neurons;
    the bias of such a layer; and a row of an embedding or of any other table. What a pair's group moves is no part of
    the other vectors: a bias beside weights of ``pairs`` is a vector of its own. ``read`` returns the values of a
    parameter.
    """
    wiring = Wiring() if wiring is None else wiring
    moved: dict[Tensor, list[Block]] = {}
    for part in (b for pair in pairs if pair.group is not None for b in pair.G + pair.H):
        moved.setdefault(part.tensor, []).append(part)

    def inside(p: Tensor) -> Tensor:
        mask = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
        for part in moved.get(p, ()):
            part.of(mask).fill_(True)
        return mask

    def norm(p: Tensor, *dims: int) -> Tensor:
        """Sum over the entries outside pairs, or over all where none is outside."""
        w = read(p)
        whole = torch.linalg.vector_norm(w, dim=dims, keepdim=True)
        if p not in moved:
            return whole
        mask = inside(p)
        outside = torch.linalg.vector_norm(w.masked_fill(mask, 0), dim=dims, keepdim=True)
        return torch.where(mask.sum(dims, keepdim=True) == w.numel() // whole.numel(), whole, outside)

    writers = [a for _, a in wiring.writers] + [n.down for n in wiring.neurons]
    found = {a.W: norm(a.W, a.stream_dim) for a in writers}
    affines = {a.W: a for s in wiring.sites for a in s.readers}
    for module in model.modules():
        for weight, bias in (("weight", "bias"), ("in_proj_weight", "in_proj_bias")):
            W, b = (dict(module.named_parameters(recurse=False)).get(name) for name in (weight, bias))
            transposed = type(module).__name__ == "Conv1D"
            if W is None or W.dim() < 2 or (b is None and not isinstance(module, nn.Linear)):
                continue
            if b is None or b.shape == (W.shape[int(transposed)],):  # else no neuron has both a row and a bias
                row = None if b is None else block(module, bias)
                affines.setdefault(W, Affine(block(module, weight), row, stream_dim=int(transposed)))
    for a in affines.values():
        if a.W in found:
            continue
        inputs = [d for d in range(a.W.dim()) if d != a.stream_dim]
        found[a.W] = rows = norm(a.W, *inputs)
        if a.b is not None:
            together = inside(a.W).sum(inputs).bool() == inside(a.b)
            joint = torch.hypot(rows.flatten(), read(a.b))
            found[a.b] = torch.where(together, joint, norm(a.b, 0))
            found[a.W] = torch.where(together, joint, rows.flatten()).view(rows.shape)
    for p in model.parameters():
        if p not in found:
            found[p] = norm(p, -1) if p.dim() else read(p).abs()
    for pair in (p for p in pairs if p.group is not None and p.group.positive and p.part != "neurons"):
        for side in (pair.G, pair.H):  # such pairs are not divided out: each column is a vector
            columns = torch.cat([part.of(read(part.tensor)) for part in side]).norm(dim=0)
            for part in side:
                found[part.tensor] = found[part.tensor].expand(part.shape).clone()
                part.of(found[part.tensor]).copy_(columns)
    return found
