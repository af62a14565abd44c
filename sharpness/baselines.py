"""Quantities that cost no search, to hold every measure against: norms, distances, relative flatness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .losses import scores_and_labels

__all__ = ["distance", "norms", "relative_flatness"]


@torch.no_grad()
def norms(model: nn.Module) -> dict[str, float]:
    r"""Compute two norms of a model's trainable weights, neither of which is invariant (Jiang et al. 2020, App. C).

    .. math:: \|θ\|_2, \qquad \sum_l \log \|W_l\|_2

    The latter is over all matrices (kernels of convolutions flattened to out × rest) but tables of embeddings.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    square, spectral = 0.0, 0.0
    for p in model.parameters():
        if p.requires_grad:
            square += float(p.double().square().sum())
            if p.dim() >= 2 and id(p) not in tables and min(p.shape[0], p[0].numel()) > 1:
                top = torch.linalg.matrix_norm(p.flatten(1).float(), 2)
                spectral += float(top.clamp_min(torch.finfo(torch.float32).tiny).log())
    return {"weight_norm": square**0.5, "log_spectral": spectral}


@torch.no_grad()
def distance(model: nn.Module, start: Mapping[str, Tensor]) -> float:
    r"""Compute the distance from the initial weights, :math:`\|θ - θ_0\|_2` (Jiang et al. 2020, App. C).

    Trainable weights that the state dict θ₀ has too, by name and shape, are compared, in double precision. It is not
    invariant.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    common = {name: p for name, p in trained.items() if name in start and start[name].shape == p.shape}
    found, total = (sum(p.numel() for p in named.values()) for named in (common, trained))
    if found < 0.5 * total:
        raise ValueError(
            f"the initial weights have {found:,} of the {total:,} weights of {type(model).__name__}; name what it was "
            "fine-tuned from, or leave initial out"
        )
    squares = ((p.double() - start[name].to(p.device, torch.float64)).square().sum() for name, p in common.items())
    return sum(map(float, squares)) ** 0.5


@torch.no_grad()
def relative_flatness(model: nn.Module, batches: Iterable[Any]) -> float | None:
    r"""Compute the relative flatness of a classifier's last layer; None if its scores do not come from a linear layer.

    .. math:: κ_{Tr} = \sum_{s,s'} ⟨w_s, w_{s'}⟩ \operatorname{Tr} H_{s,s'}
              = \operatorname{mean}_i \|φ_i\|^2 \Bigl(\sum_s p_{is} \|w_s\|^2 - \bigl\|\sum_s p_{is} w_s\bigr\|^2\Bigr)

    with the rows :math:`w_s` of the last linear layer, the blocks :math:`H_{s,s'}` of the Hessian of the mean
    cross-entropy in them, the layer's inputs φ and the classes' probabilities p (Petzka, Kamp, Adilova, Sminchisescu,
    Boley, *Relative Flatness and Generalization*, 2021, Definition 3). For cross-entropy the Hessian's blocks are
    :math:`\operatorname{mean}_i (p_s δ_{ss'} - p_s p_{s'}) φ φ^T`, which gives the second form, exactly and without
    second derivatives. The model is in evaluation mode.
    """
    calls: list[tuple[Any, Tensor, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.dim() == 2:  # one row of scores an example
            calls.append((layer, inputs[0], output))

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]
    total, count = 0.0, 0
    try:
        for batch in batches:
            calls.clear()
            found = scores_and_labels(model, batch)
            if found is None:
                return None
            scores = found[0]
            last = [c for c in calls if c[2].shape == scores.shape and torch.equal(c[2], scores)]
            if not last:
                return None
            layer, features, _ = last[-1]
            w, p = layer.weight.double(), scores.double().softmax(1)
            spread = p @ w.square().sum(1) - (p @ w).square().sum(1)
            total += float((features.double().square().sum(1) * spread).sum())
            count += len(scores)
    finally:
        for hook in hooks:
            hook.remove()
    return total / count
