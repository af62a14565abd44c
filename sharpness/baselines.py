"""Quantities that cost no search, to hold every measure against: norms, distances, relative flatness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .losses import scores_and_labels

__all__ = ["distance", "norms", "relative_flatness"]


def norms(model: nn.Module) -> dict[str, float]:
    r"""Compute two norms of a model's trainable weights.

    Parameters
    ----------
    model : nn.Module
        On any device; norms are computed there.

    Returns
    -------
    dict of str to float
        ``weight_norm``, :math:`\|θ\|_2` of all weights, and ``log_spectral``, :math:`\sum_l \log \|W_l\|_2`, the
        logarithm of the product of the spectral norms of all matrices (kernels of convolutions flattened to out × rest)
        that are not tables of embeddings.

    Notes
    -----
    Jiang et al., *Fantastic Generalization Measures*, 2020, App. C. Neither is invariant.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> for layer in model:
    ...     layer.weight.data = 3 * torch.eye(2)
    >>> {name: round(value, 4) for name, value in norms(model).items()}  # √36 and 2 log 3
    {'weight_norm': 6.0, 'log_spectral': 2.1972}
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    square, spectral = 0.0, 0.0
    with torch.no_grad():
        for p in model.parameters():
            if not p.requires_grad:
                continue
            square += float(p.double().square().sum())
            if p.dim() >= 2 and id(p) not in tables and min(p.shape[0], p[0].numel()) > 1:
                top = torch.linalg.matrix_norm(p.detach().flatten(1).float(), 2)
                spectral += float(top.clamp_min(torch.finfo(torch.float32).tiny).log())
    return {"weight_norm": square**0.5, "log_spectral": spectral}


def distance(model: nn.Module, start: Mapping[str, Tensor]) -> float:
    r"""Compute the distance from the initial weights, :math:`\|θ - θ_0\|_2`.

    Parameters
    ----------
    model : nn.Module
        Its trainable weights that ``start`` has too, by name and shape, are compared.
    start : mapping of str to Tensor
        θ₀, a state dict on any device.

    Returns
    -------
    float
        Summed in double precision.

    Raises
    ------
    ValueError
        They have less than half of the weights in common.

    Notes
    -----
    Jiang et al. 2020, App. C. It is not invariant.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(2, 2)
    >>> start = {name: weight.clone() for name, weight in model.state_dict().items()}
    >>> model.bias.data += torch.tensor([3.0, 4.0])  # in place of training
    >>> round(distance(model, start), 4)
    5.0
    """
    square, found, total = 0.0, 0, 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            total += p.numel()
            if name in start and start[name].shape == p.shape:
                found += p.numel()
                square += float((p.double() - start[name].to(p.device, torch.float64)).square().sum())
    if found < 0.5 * total:
        raise ValueError(
            f"the initial weights have {found:,} of the {total:,} weights of {type(model).__name__}; name what it was "
            "fine-tuned from, or leave initial out"
        )
    return square**0.5


def relative_flatness(model: nn.Module, batches: Iterable[Any]) -> float | None:
    r"""Compute the relative flatness of a classifier's last layer.

    .. math:: κ_{Tr} = \sum_{s,s'} ⟨w_s, w_{s'}⟩ \operatorname{Tr} H_{s,s'}
              = \operatorname{mean}_i \|φ_i\|^2 \Bigl(\sum_s p_{is} \|w_s\|^2 - \bigl\|\sum_s p_{is} w_s\bigr\|^2\Bigr)

    with the rows :math:`w_s` of the last linear layer, the blocks :math:`H_{s,s'}` of the Hessian of the mean
    cross-entropy in them, the layer's inputs φ and the classes' probabilities p.

    Parameters
    ----------
    model : nn.Module
        Its scores are the output of an ``nn.Linear``. Put it in evaluation mode first.
    batches : iterable
        As for :func:`sharpness.evaluate`.

    Returns
    -------
    float or None
        None where the scores are not those of classes, or do not come straight from a linear layer.

    Notes
    -----
    Petzka, Kamp, Adilova, Sminchisescu, Boley, *Relative Flatness and Generalization*, 2021, Definition 3. For
    cross-entropy the Hessian's blocks are :math:`\operatorname{mean}_i (p_s δ_{ss'} - p_s p_{s'}) φ φ^T`, which gives
    the second form, exactly and without second derivatives.

    Examples
    --------
    A confident fit is flat:

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(2, 2, bias=False)
    >>> model.weight.data = torch.eye(2)
    >>> near, far = (torch.eye(2), torch.arange(2)), (9 * torch.eye(2), torch.arange(2))
    >>> [round(relative_flatness(model, [batch]), 4) for batch in (near, far)]
    [0.3932, 0.02]
    """
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        if output.dim() == 2:  # one row of scores an example
            calls.append((module, inputs[0], output))

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]
    total, count = 0.0, 0
    try:
        for batch in batches:
            calls.clear()
            with torch.no_grad():
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
