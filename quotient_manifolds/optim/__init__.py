"""Torch optimisers on the quotient: from all equivalent factors they make the same run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..symmetries.found import Symmetries
from ..symmetries.lora import adapter_of, adapter_pairs, is_lora
from ..symmetries.pairs import SymmetricPair, check_pairs
from ..weights import naming, trained, weights_of
from .base import QuotientOptimizer
from .optimizers import QuotientAdam, QuotientMuon, QuotientSGD
from .pairs import alone
from .parameters import check_options

__all__ = [
    "QuotientAdam",
    "QuotientMuon",
    "QuotientOptimizer",
    "QuotientSGD",
    "create_quotient_lora_optimizer",
    "create_quotient_optimizer",
]

OPTIMIZERS: dict[str, type[QuotientAdam] | type[QuotientMuon]] = {"adam": QuotientAdam, "muon": QuotientMuon}


def create_quotient_lora_optimizer(
    model: nn.Module, *, lr: float, optimizer: str = "adam", adapter_names: Sequence[str] | None = None, **options: Any
) -> QuotientOptimizer:
    """Create an optimiser for a model with LoRA adapters of peft, instead of AdamW.

    Parameters
    ----------
    model : nn.Module
        With adapters; plain, DDP-wrapped or compiled.
    lr : float
        Learning rate. For ``"adam"`` begin with 3e-3, three times AdamW's best on three tasks at rank 4; for ``"muon"``
        it is the size of a step of the adapted weights in the spectral norm, for which .02 is a starting point. One
        rate served for ranks 4 to 64, and gives the same run at every α.
    optimizer : {"adam", "muon"}
        :class:`QuotientAdam` or :class:`QuotientMuon`.
    adapter_names : sequence of str, optional
        The adapters to train; by default all whose factors are trainable, active or not.
    other_params_lr : float, optional
        Learning rate of all parameters outside pairs: ``modules_to_save``, biases, DoRA's magnitudes, and adapters that
        form no pair (a warning names them; there may be no others). By default ``lr``, and ``lr / 20`` for
        :class:`QuotientMuon` beside AdamW, which is a starting point. Vectors and biases do not decay.
    others : {"adamw", "muon"}
        What trains parameters outside pairs. With ``"muon"``, ``torch.optim.Muon`` trains the weights of linear layers,
        except embeddings and the last layer, at AdamW's rate (``adjust_lr_fn="match_rms_adamw"``) and with its own
        momentum and ε, and AdamW the rest.
    **options
        ``betas``, ``eps``, ``weight_decay``, ``max_grad_norm`` and other options of the optimiser.

    Returns
    -------
    QuotientAdam or QuotientMuon

    Raises
    ------
    ValueError
        There is no trainable adapter, an adapter is unknown, or this torch (before 2.9) has no Muon.

    Warnings
    --------
    Do not average the factors over steps (EMA, SWA, means of checkpoints): see :class:`QuotientAdam`.

    Notes
    -----
    With ``Trainer`` of transformers, which clips by default, clip in the optimiser and not in the trainer::

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
    chosen = [adapter_names] if isinstance(adapter_names, str) else adapter_names
    found, weights = adapter_pairs(model, chosen), trained(weights_of(model)).items()
    moving = {name: p for name, p in weights if not chosen or adapter_of(name) in (None, *chosen)}
    left = found.restricted(moving)
    if not left.pairs and not alone(left.refused, moving):
        raise ValueError(f"the model has no LoRA adapter of peft with two trainable factors{_no_adapter(model)}")
    return _create(model, found, moving, optimizer, {"lr": lr, **options})


def create_quotient_optimizer(
    model: nn.Module,
    *,
    lr: float,
    optimizer: str = "adam",
    symmetries: Symmetries | Iterable[SymmetricPair] | None = None,
    **options: Any,
) -> QuotientOptimizer:
    """Create an optimiser for a model's trainable weights, with attention heads (and adapters) on the quotient.

    Parameters
    ----------
    model : nn.Module
        Plain, DDP-wrapped or compiled.
    lr : float
        Learning rate.
    symmetries : Symmetries or iterable of SymmetricPair, optional
        By default ``find(model).without_null()``: the key bias has no effect, and its gradient is pure rounding error,
        which Adam would scale up to full steps; it is not trained. With a batch, ``find(model, batch)`` also finds
        those of attention classes that this package does not know.
    optimizer, others, other_params_lr, **options
        As for :func:`create_quotient_lora_optimizer`.

    Returns
    -------
    QuotientAdam or QuotientMuon

    Raises
    ------
    ValueError
        No pair is trainable, the classes of the attention are unknown, or this torch (before 2.9) has no Muon.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.optim import create_quotient_optimizer
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> optimizer = create_quotient_optimizer(layer, lr=1e-3, weight_decay=0.01)
    >>> layer(torch.randn(2, 3, 8)).square()[..., 0].sum().backward()
    >>> optimizer.step()
    >>> optimizer.state_dict()["pairs"]
    ['self_attn qk head 0', 'self_attn vo head 0', 'self_attn qk head 1', 'self_attn vo head 1']
    """
    moving = trained(weights_of(model))
    if symmetries is None:
        from ..symmetries.attention import unknown_attention
        from ..symmetries.discovery import find  # classes of attention, which adapters do not need

        symmetries = find(model).without_null()
        if names := unknown_attention(model):
            advice = (
                f"attention of classes that are not known here ({names}) forms no pair until it is examined on a "
                "batch: pass symmetries=find(model, batch).without_null()"
            )
            if not symmetries.restricted(moving).pairs:
                raise ValueError(advice)
            warnings.warn(f"AdamW trains parts of the model: {advice}", stacklevel=2)
    if not isinstance(symmetries, Symmetries):
        symmetries = Symmetries(tuple(check_pairs(symmetries)))
    return _create(model, symmetries, moving, optimizer, {"lr": lr, **options})


def _no_adapter(model: nn.Module) -> str:
    """Explain what a model without LoRA layers has instead, and what to do."""
    if any(is_lora(m) for m in model.modules()):
        return ": its LoRA adapters are frozen; load them with is_trainable=True, or choose one with set_adapter(name)"
    configs = [getattr(m, "peft_config", None) for m in model.modules()]
    found = [c for by_name in configs if isinstance(by_name, dict) for c in by_name.values()]
    kinds = {str(getattr(c, "peft_type", type(c).__name__)).removeprefix("PeftType.") for c in found}
    if kinds:
        return f": its adapters are of the kind {', '.join(sorted(kinds))}, whose weights form no such pairs; use AdamW"
    return "; wrap it with peft.get_peft_model"


def _hidden(model: nn.Module, symmetries: Symmetries) -> set[str]:
    """Return the names of the weights of linear layers, except the last one, embeddings' and adapters'."""
    name_of = naming(model)
    names = {m: name_of(path, "weight") for path, m in model.named_modules()}
    adapters = {name for p in symmetries.claims if p.kind == "lora" for name in p.names}
    linear = [name for m, name in names.items() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    layers = [name for name in linear if name not in adapters]
    tables = {name for m, name in names.items() if isinstance(m, nn.Embedding)}
    return set(layers) - {layers[-1], *tables} if layers else set()


def _create(
    model: nn.Module, symmetries: Symmetries, moving: Mapping[str, Tensor], kind: str, options: dict[str, Any]
) -> QuotientOptimizer:
    """Make parameter groups: pairs, other matrices, vectors and biases, which do not decay, and matrices for Muon."""
    if type(model).__name__ == "DeepSpeedEngine":
        raise ValueError(
            "the model is a DeepSpeedEngine, which gives optimisers flat copies of weights; use DDP or FSDP2"
        )
    lr, others, rate = options.pop("lr"), options.pop("others", "adamw"), options.pop("other_params_lr", None)
    if kind not in OPTIMIZERS:
        raise ValueError(f'optimizer must be "adam" or "muon", got {kind!r}')
    if others not in ("adamw", "muon") or (others == "muon" and not hasattr(torch.optim, "Muon")):
        raise ValueError(f'others must be "adamw", or "muon" where torch is 2.9 or newer, got {others!r}')
    check_options({"lr": lr}, {})
    if rate is None:  # Muon's best rate for the rest was that of the pairs (docs/results/pretraining.md)
        rate = lr if others == "muon" else lr * OPTIMIZERS[kind].rest
    mine = {name for p in symmetries.restricted(moving).pairs for name in p.names}
    hidden = _hidden(model, symmetries) if others == "muon" else ()
    groups: list[dict[str, Any]] = [
        {"lr": lr, "rest": rate / lr if lr else 1.0},
        {"lr": rate},
        {"lr": rate, "weight_decay": 0.0},
        {"lr": rate, "others": {"name": "Muon", "adjust_lr_fn": "match_rms_adamw"}},
    ]
    for name, w in moving.items():
        # Matrices have one row, too, and kernels several sizes; magnitudes of DoRA's convolutions are vectors.
        vector = name.endswith("bias") or (w.dim() != 2 and sum(size > 1 for size in w.shape) < 2)
        group = groups[0 if name in mine else 3 if name in hidden else 2 if vector else 1]
        group.setdefault("params", []).append((name, w))
    return OPTIMIZERS[kind]([g for g in groups if "params" in g], symmetries, lr, within=model, **options)
