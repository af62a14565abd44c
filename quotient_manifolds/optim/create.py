"""From a model to its optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..symmetries import SymmetricPair, adapter_pairs, find_symmetric_pairs
from .adam import QuotientAdam

__all__ = ["create_quotient_lora_optimizer", "create_quotient_optimizer"]


def create_quotient_lora_optimizer(
    model: nn.Module,
    *,
    lr: float,
    adapter_names: Sequence[str] | None = None,
    other_params_lr: float | None = None,
    **options: Any,
) -> QuotientAdam:
    """Create the optimiser of a model with LoRA adapters of peft, in place of AdamW.

    Parameters
    ----------
    model : nn.Module
        With adapters; plain, DDP-wrapped or compiled.
    lr : float
        Learning rate.
    adapter_names : sequence of str, optional
        Train these adapters; by default all whose factors are trainable, active or not.
    other_params_lr : float, optional
        Learning rate of everything that is no pair: ``modules_to_save``, biases, DoRA's magnitudes; by default ``lr``.
        Vectors and biases do not decay.
    **options
        ``betas``, ``eps``, ``weight_decay``, ``metric``, ``second_moment``, ``max_grad_norm`` and the others of
        :class:`QuotientAdam`.

    Returns
    -------
    QuotientAdam

    Raises
    ------
    ValueError
        No trainable adapter, an unknown adapter, or an adapter with one frozen factor.

    Notes
    -----
    With ``Trainer`` of transformers, clip here and not there::

        optimizer = create_quotient_lora_optimizer(model, lr=2e-4, max_grad_norm=1.0)
        Trainer(model, TrainingArguments(..., max_grad_norm=0), optimizers=(optimizer, None))

    Examples
    --------
    >>> import torch
    >>> from peft import LoraConfig, get_peft_model
    >>> from quotient_manifolds.optim import create_quotient_lora_optimizer
    >>> model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 4)), LoraConfig(r=2, target_modules=["0"]))
    >>> optimizer = create_quotient_lora_optimizer(model, lr=1e-2)
    >>> model(torch.ones(3, 6)).square().sum().backward()
    >>> optimizer.step()
    >>> bool(model.base_model.model[0].lora_B.default.weight.any())
    True
    """
    pairs = adapter_pairs(model, adapter_names)
    if all(p.group is None for p in pairs):
        why = sorted({p.reason for p in pairs})
        raise ValueError(
            "the model has no LoRA adapter of peft whose two factors are trainable"
            + (f" ({'; '.join(why)})" if why else _no_adapter(model))
        )
    left = set() if adapter_names is None else _parameters(adapter_pairs(model)) - _parameters(pairs)
    return _create(model, pairs, left, lr, other_params_lr, options)


def create_quotient_optimizer(
    model: nn.Module,
    *,
    lr: float,
    pairs: Sequence[SymmetricPair] | None = None,
    other_params_lr: float | None = None,
    **options: Any,
) -> QuotientAdam:
    """Create the optimiser of a model's trainable weights, its attention heads (and adapters) on the quotient.

    Parameters
    ----------
    model : nn.Module
        Plain, DDP-wrapped or compiled.
    lr : float
        Learning rate.
    pairs : sequence of SymmetricPair, optional
        By default what ``find_symmetric_pairs(model, key_bias="drop")`` names: the bias of the keys has no effect and
        no gradient but rounding, which Adam would blow up; it stays as it is.
    other_params_lr, **options
        As for :func:`create_quotient_lora_optimizer`.

    Returns
    -------
    QuotientAdam

    Raises
    ------
    ValueError
        No pair is trainable.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim import create_quotient_optimizer
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> optimizer = create_quotient_optimizer(layer, lr=1e-3, weight_decay=0.01)
    >>> layer(torch.ones(1, 3, 8)).square().sum().backward()
    >>> optimizer.step()
    >>> optimizer.state_dict()["pairs"]
    ['self_attn qk head 0', 'self_attn vo head 0', 'self_attn qk head 1', 'self_attn vo head 1']
    """
    pairs = find_symmetric_pairs(model, key_bias="drop") if pairs is None else pairs
    return _create(model, pairs, set(), lr, other_params_lr, options)


def _no_adapter(model: nn.Module) -> str:
    """Say what a model without LoRA layers has instead, and what to do."""
    configs = [getattr(m, "peft_config", None) for m in model.modules()]
    found = [c for by_name in configs if isinstance(by_name, dict) for c in by_name.values()]
    kinds = {str(getattr(c, "peft_type", type(c).__name__)).removeprefix("PeftType.") for c in found}
    if kinds:
        return f": its adapters are of the kind {', '.join(sorted(kinds))}, whose weights form no such pair; use AdamW"
    return "; wrap it with peft.get_peft_model"


def _parameters(pairs: Iterable[SymmetricPair]) -> set[int]:
    return {id(b.tensor) for p in pairs for b in p.G + p.H}


def _create(
    model: nn.Module,
    pairs: Sequence[SymmetricPair],
    left: set[int],
    lr: float,
    other_lr: float | None,
    options: dict[str, Any],
) -> QuotientAdam:
    """Make three parameter groups: pairs, other matrices, and vectors and biases, which do not decay."""
    mine = _parameters(p for p in pairs if p.group is not None)
    rate = lr if other_lr is None else other_lr
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": lr},
        {"params": [], "lr": rate},
        {"params": [], "lr": rate, "weight_decay": 0.0},
    ]
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in left:
            place = 0 if id(p) in mine else 1 if p.dim() > 1 and not name.endswith("bias") else 2
            groups[place]["params"].append(p)
    return QuotientAdam([g for g in groups if g["params"]], pairs, lr, **options)
