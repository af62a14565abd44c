"""The numerical null dimension of a small network: the number of weight directions without effect on its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.passes import Wide, default_forward, floats

__all__ = ["Nullity", "nullity"]


#: Layers that compute something else in training: they drop numbers, or mix examples.
_OTHER_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class Nullity:
    """The null dimension of the outputs' Jacobian.

    Attributes
    ----------
    dimension : int
        Number of null directions among ``parameters``.
    parameters : int
        Entries of trainable parameters that some output depends on.
    unused : int
        Entries that no output depends on, such as rows of embeddings that no input uses.
    null, first : float
        The largest singular value that counts as zero and the smallest that does not, both relative to the largest.

    Examples
    --------
    See :func:`nullity`.

    >>> from reproduction.nullity import Nullity
    >>> f"{Nullity(dimension=4, parameters=12, unused=0, null=1e-16, first=1e-3).gap:.0e}"
    '1e+13'
    """

    dimension: int
    parameters: int
    unused: int
    null: float
    first: float

    @property
    def gap(self) -> float:
        """Ratio of the smallest non-zero singular value to the largest one counted as zero; 1e4 is a clear answer."""
        return self.first / max(self.null, 1e-300)


def nullity(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] = default_forward,
    tolerance: float = 1e-11,
    classes: bool = False,
) -> Nullity:
    """Count the directions of the weights without effect on the outputs, from the singular values of their Jacobian.

    Parameters
    ----------
    model : nn.Module
        Small (a few thousand parameters), in float64 and evaluation mode; only its trainable parameters count.
    inputs : sequence
        Batches, with at least as many numbers in their outputs as there are parameters: three times as many is safe.
    forward : callable
        ``forward(model, batch)`` → a tensor of outputs.
    tolerance : float
        Singular values below it, relative to the largest, are null.
    classes : bool
        Use the logarithms of the softmax over the last dimension instead of the outputs.

    Returns
    -------
    Nullity

    Raises
    ------
    ValueError
        There are fewer outputs than parameters, the model is not in float64, or it drops or normalises by batches.

    Notes
    -----
    Casts to float32 inside the model (transformers' RMSNorm), which would hide null directions at 1e-7, become float64.

    Examples
    --------
    Of two linear layers in a row, GL(2) is not seen:

    >>> import torch
    >>> from reproduction.nullity import nullity
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 3, bias=False)).double()
    >>> nullity(model, [torch.randn(9, 3, dtype=torch.float64)]).dimension
    4
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    random = any(m.training and isinstance(m, _OTHER_IN_TRAINING) and getattr(m, "p", 1) for m in model.modules())
    if random or any(p.dtype != torch.float64 for p in parameters):
        raise ValueError("a null dimension is counted in float64 and evaluation mode; pass model.double().eval()")
    rows: list[Tensor] = []
    for batch in inputs:
        with Wide(), torch.enable_grad():
            out = floats(forward(model, batch))[0]
            out = (out.log_softmax(-1) if classes else out).flatten()
        eye = torch.eye(out.numel(), dtype=out.dtype, device=out.device)
        for piece in eye.split(256):
            found = torch.autograd.grad(
                out, parameters, piece, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            parts = [
                piece.new_zeros(len(piece), p.numel()) if g is None else g.reshape(len(piece), -1)
                for p, g in zip(parameters, found, strict=True)
            ]
            rows.append(torch.cat(parts, 1).detach())
    J = torch.cat(rows)
    used = (J != 0).any(0)
    if not used.any():
        raise ValueError("no output depends on a trainable weight on these inputs")
    J = J[:, used]
    if J.shape[0] < J.shape[1]:
        raise ValueError(f"{J.shape[0]} outputs cannot distinguish {J.shape[1]} parameters; pass more inputs")
    J = J / J.norm(dim=1, keepdim=True).clamp_min(1e-300)
    sigma = torch.linalg.svdvals(torch.linalg.qr(J, mode="r").R)
    sigma = sigma / sigma[0]
    kept = int((sigma > tolerance).sum())
    null = float(sigma[kept]) if kept < len(sigma) else 0.0
    return Nullity(len(sigma) - kept, J.shape[1], int((~used).sum()), null, float(sigma[kept - 1]))
