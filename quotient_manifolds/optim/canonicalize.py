"""Adapters in canonical gauge."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..gauge import canonical_gauge
from ..symmetries import adapter_pairs
from .preconditioner import wide

__all__ = ["canonicalize_lora_"]


@torch.no_grad()
def canonicalize_lora_(model: nn.Module, adapter_names: Sequence[str] | None = None) -> list[str]:
    r"""Bring every LoRA pair into canonical gauge, :math:`B^T B = A A^T` = diag(σ), without changing the function.

    Parameters
    ----------
    model : nn.Module
        Changed in place; its function stays the same up to rounding.
    adapter_names : sequence of str, optional
        By default all adapters, active or not, trainable or frozen.

    Returns
    -------
    list of str
        Names of the pairs that were balanced. A pair whose product lacks full rank, as at B = 0, has no canonical
        representative from which training could continue; it is left unchanged, and so is one on the meta device.

    Raises
    ------
    ValueError
        No layer has an adapter of this name.

    Notes
    -----
    The state of an optimiser refers to the old factors, so call this before or after training. It is computed in
    float64; see :class:`quotient_manifolds.Gauge`.

    Examples
    --------
    >>> import torch
    >>> from peft import LoraConfig, get_peft_model
    >>> from quotient_manifolds.optim import canonicalize_lora_
    >>> config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 4)), config)
    >>> canonicalize_lora_(model)
    ['base_model.model.0 lora default']
    >>> A, B = model.base_model.model[0].lora_A.default.weight, model.base_model.model[0].lora_B.default.weight
    >>> torch.allclose(B.mT @ B, A @ A.mT, atol=1e-6)
    True
    """
    done = []
    for pair in adapter_pairs(model, adapter_names, include_frozen=True):
        if pair.group is None or pair.group.h > min(pair.n, pair.m) or any(b.tensor.is_meta for b in pair.G + pair.H):
            continue
        x = wide(pair.gather().detach())
        gauge = canonical_gauge(*x.split([pair.n, pair.m], dim=-2))
        if bool(gauge.present().all()):
            pair.scatter_(gauge.x)
            done.append(pair.name)
    return done
