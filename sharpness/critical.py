"""Critical sharpness: the curvature along a step, by forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import as_count, at_least_float32, differentiated, finite, in_double
from quotient_manifolds.passes import to_device
from quotient_manifolds.weights import check_model, plain_class, pointing_to, preserve_model_state, unwrapped

from .batches import to_float32
from .losses import LossFunction, Objective, as_list
from .patches import trainable

#: Roundings of the loss in its weights' dtype that do not count as a fall.
_ROUNDINGS = 4
_COPY = "copy the weights before the step: before = copy.deepcopy(model.state_dict())"


def critical_sharpness(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    before: Mapping[str, Tensor] | None = None, passes: int = 10, micro_batch: int | None = None,
) -> float | None:  # fmt: skip
    r"""Compute the critical sharpness along the last update of the weights, or along the gradient.

    .. math:: λ_c = 2 / η_c, \qquad η_c = \min \{η > 0 : L(θ + η d) > L(θ)\}

    With ``before``, θ are the weights before a step of the optimiser and d is that step, so η counts steps: above
    :math:`λ_c = 2` the step that was taken raised the loss. Divided by the learning rate it is the critical sharpness
    of the paper. Without ``before``, θ are the weights and :math:`d = -\nabla L(θ)`.

    Parameters
    ----------
    model : nn.Module
        Its parameters with ``requires_grad`` are moved.
    batches : iterable
        As :func:`evaluate` takes them; L is the mean of their losses. Other data than those of the update give the
        relative critical sharpness.
    loss_fn : callable, optional
        As :func:`evaluate` takes it.
    before : mapping of str to Tensor, optional
        The weights before the step by name, such as a copy of the state dict.
    passes : int
        Forward passes of the search, after one at θ: ten give :math:`η_c` to some per cent.
    micro_batch : int, optional
        Examples per pass.

    Returns
    -------
    float or None
        None if the weights did not move, or if no step of any length that was tried raises the loss, or none lowers it
        by more than rounding.

    Raises
    ------
    TypeError, ValueError
        There is nothing to measure, the loss at θ or the update is NaN or infinite, or ``before`` does not fit.

    Notes
    -----
    Kalra et al., *A Scalable Measure of Loss Landscape Curvature for Analyzing the Training Dynamics of LLMs*, 2026.
    The search starts at the step that was taken, or along the gradient at :math:`η = 4 |L| / \|\nabla L\|^2`, which
    is :math:`η_c` of a parabola with minimum 0. It goes by factors of 4 until it brackets :math:`η_c`, and halves the
    bracket on a logarithmic scale. If there are several crossings it aims at the first one, without a guarantee. On a
    quadratic loss with Hessian H, :math:`λ_c = -d^T H d / d^T \nabla L`, along the gradient its Rayleigh quotient. It
    is not invariant. The model is in evaluation mode meanwhile, and afterwards as before.

    Examples
    --------
    Gradient descent on ½ w² with learning rate 0.1:

    >>> import copy, torch, sharpness
    >>> model, batch = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> loss_fn = lambda model, x: model(x).square().sum() / 2
    >>> before = copy.deepcopy(model.state_dict())
    >>> model.weight.data *= 0.9
    >>> round(sharpness.critical_sharpness(model, [batch], loss_fn, before=before, passes=30), 4)
    0.1
    """
    check_model(model)
    objective, state = Objective(loss_fn, micro_batch), preserve_model_state(model)
    with torch.inference_mode(False), state, state:  # twice, for interrupts
        now = {name: p.detach().to(at_least_float32(p.dtype)) for name, p in trainable(model).items()}
        moved = _prepared(model, batches)
        if before is None:
            start = now
            base, update = _descent(model, objective, moved, start)
            _check_loss(base)
        else:
            start = _fitting(before, now, plain_class(model).__name__)
            base, update = math.nan, {name: now[name] - w for name, w in start.items()}
        if not all(finite(d) for d in update.values()):
            raise ValueError("the update of the weights has NaN or infinite entries; lower the learning rate")
        at = {name: torch.empty_like(d) for name, d in update.items()}  # one copy: to allocate costs time too

        def loss(step: float) -> float:
            for name, d in update.items():
                torch.add(start[name], d, alpha=step, out=at[name])
            return fmean(objective.value(model, batch) for batch in moved)

        with pointing_to(model, at), torch.no_grad():
            base = base if before is None else loss(0.0)
            _check_loss(base)
            square = sum(float(in_double(d).abs().square().sum()) for d in update.values())
            if square == 0:
                return None
            first = 1.0 if before is not None else 4 * abs(base) / square or 1.0
            rounding = _ROUNDINGS * max(torch.finfo(w.dtype).eps for w in start.values()) * abs(base)
            return _searched(loss, base, first, as_count("passes", passes), rounding)


def _searched(loss: Callable[[float], float], base: float, step: float, passes: int, rounding: float) -> float | None:
    """Bracket the least step that raises the loss by factors of 4, and halve the bracket on a logarithmic scale."""
    low, high, lowest = 0.0, math.inf, base
    for _ in range(passes):
        value = loss(step)
        rises = not value <= base  # one that is not finite counts as a rise
        lowest = lowest if rises else min(lowest, value)
        low, high = (low, step) if rises else (step, high)
        step = high / 4 if low == 0 else low * 4 if high == math.inf else math.sqrt(low) * math.sqrt(high)
    fell = base - lowest > rounding  # else the step at which it stopped rising was too short to be seen
    return 2 / step if low > 0 and high < math.inf and fell else None


def _check_loss(base: float) -> None:
    if not math.isfinite(base):
        raise ValueError(f"the loss before the update is {base}; look for NaN in the data, or labels out of range")


def _prepared(model: nn.Module, batches: Iterable[Any]) -> list[Any]:
    """List the batches on the model's device, in float32 if its weights move in that."""
    weights = list(trainable(model).values())
    narrow = any(p.dtype != at_least_float32(p.dtype) for p in weights)
    moved = [to_device(batch, weights[0].device) for batch in as_list(batches)]
    return [to_float32(batch) for batch in moved] if narrow else moved


def _descent(
    model: nn.Module, objective: Objective, batches: list[Any], weights: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss at the weights, and minus its gradient by name."""
    base, sums = 0.0, dict[str, Tensor]()
    parameters = trainable(model)
    with pointing_to(model, weights), torch.enable_grad():
        for batch in batches:
            for share, part in objective.pieces(model, batch):
                loss = share / len(batches) * objective(model, part).loss
                base += float(loss.detach())
                if not differentiated(loss):
                    raise ValueError("the loss has no gradient: loss_fn must not detach it, and must use the model")
                found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                for name, g in zip(parameters, found, strict=True):
                    if g is not None:
                        sums[name] = sums[name] - g if name in sums else -g
    return base, sums


def _fitting(before: Mapping[str, Tensor], now: Mapping[str, Tensor], model: str) -> dict[str, Tensor]:
    """Return the weights of before that have moved since, as the model has them."""
    if not isinstance(before, Mapping):
        raise TypeError(f"before must be a mapping of names to tensors, got {type(before).__name__}; {_COPY}")
    known = dict(zip(unwrapped(before, now.keys()), before.values(), strict=True))
    for name, p in now.items():
        w = known.get(name)
        if not isinstance(w, Tensor) or w.shape != p.shape or w.is_meta:
            raise ValueError(f"before has no weight {name!r} of the shape {tuple(p.shape)}, which {model} has; {_COPY}")
        if p.numel() and w.data_ptr() == p.data_ptr():
            raise ValueError(f"before holds {name!r} of {model} itself, which moves in the step; {_COPY}")
    return {name: known[name].detach().to(p.device, p.dtype) for name, p in now.items()}
