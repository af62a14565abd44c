"""Baselines with which every measure is compared: norms, distances, margins, and other definitions of flatness."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.passes import default_forward
from quotient_manifolds.symmetries import find, model_distance
from quotient_manifolds.weights import pointing_to, weights_of
from sharpness import critical_sharpness
from sharpness.batches import IGNORED, labels_of, to_float32
from sharpness.losses import Objective
from sharpness.patches import trainable

__all__ = [
    "baselines", "distance", "fisher_trace", "geodesic_distance", "margin", "norms", "relative_flatness",
]  # fmt: skip

#: Examples at a time.
_PIECE = 32


def scores_and_labels(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor] | None:
    """Run a classifier: scores (examples, classes), with their graph, and labels; None if it is not a classification.

    The output is the scores, or has them as ``.logits``.
    """
    output, labels = default_forward(model, batch), labels_of(batch)
    scores = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(scores, Tensor) or labels is None or labels.is_floating_point():
        return None
    return (scores, labels) if (scores.dim(), labels.dim()) == (2, 1) and scores.shape[1] >= 2 else None


def baselines(
    model: nn.Module, batches: Iterable[Any], start: Mapping[str, Tensor] | None = None
) -> dict[str, float | None]:
    """Compute all baselines, which a sweep asks for by ``baselines: reproduction.baselines:baselines``.

    The distances are those from the initial weights, a state dict. Weights in half precision are taken in
    float32, since small steps would be rounded away.
    """
    moving = {n: p for n, p in weights_of(model).items() if p.requires_grad and p.dtype != at_least_float32(p.dtype)}
    wide = {name: p.data.to(at_least_float32(p.dtype)) for name, p in moving.items()}
    batches = [to_float32(batch) for batch in batches] if moving else list(batches)
    with pointing_to(model, wide):
        parts = [part for batch in batches for _, part in Objective(micro_batch=_PIECE).pieces(model, batch)]
        found = {
            **norms(model), "relative_flatness": relative_flatness(model, parts), "margin": margin(model, parts),
            "fisher_trace": fisher_trace(model, parts),
        }  # fmt: skip
    found["critical_sharpness"] = critical_sharpness(model, batches[:1], micro_batch=_PIECE)
    if start is None:
        return found
    return {**found, "distance": distance(model, start), "geodesic_distance": geodesic_distance(model, start)}


@torch.no_grad()
def norms(model: nn.Module) -> dict[str, float]:
    r"""Compute two norms of a model's trainable weights, neither of which is invariant (Jiang et al. 2020, App. C).

    .. math:: \|θ\|_2, \qquad \sum_l \log \|W_l\|_2

    The latter is over all matrices (kernels of convolutions flattened to out × rest) except tables of embeddings.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    square, spectral = 0.0, 0.0
    for p in trainable(model).values():
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
    trained = trainable(model)
    common = {name: p for name, p in trained.items() if name in start and start[name].shape == p.shape}
    known, total = (sum(p.numel() for p in named.values()) for named in (common, trained))
    if known < 0.5 * total:
        raise ValueError(
            f"the initial weights have {known:,} of the {total:,} weights of {type(model).__name__}; name the model "
            "that it was fine-tuned from, or leave initial out"
        )
    squares = ((p.double() - start[name].to(p.device, torch.float64)).square().sum() for name, p in common.items())
    return sum(map(float, squares)) ** 0.5


@torch.no_grad()
def geodesic_distance(model: nn.Module, start: Mapping[str, Tensor]) -> float | None:
    r"""Compute the distance of the attention pairs from the initial ones, modulo their GL(h), in the inv metric.

    That is :func:`quotient_manifolds.symmetries.model_distance` of the model and a copy with all weights that the state
    dict θ₀ has too. None if the model has no such pairs, or a distance cannot be computed.
    """
    if not find(model).of_full_rank().pairs:
        return None
    initial = copy.deepcopy(model)
    for name, p in initial.named_parameters():
        if name in start and start[name].shape == p.shape:
            p.copy_(start[name])
    found = model_distance(model, initial)
    return found.total if all(math.isfinite(p.distance) for p in found.pairs) else None


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
        if output.dim() == 2:  # one row of scores per example
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
            counted = found[1] != IGNORED
            total += float((features.double().square().sum(1) * spread)[counted].sum())
            count += int(counted.sum())
    finally:
        for hook in hooks:
            hook.remove()
    return total / count


@torch.no_grad()
def margin(model: nn.Module, batches: Iterable[Any], quantile: float = 0.1) -> float | None:
    r"""Compute a quantile over examples of a classifier's margins; None if it is not a classification.

    .. math:: f(x)_y - \max_{s \ne y} f(x)_s

    Negative margins are errors. The tenth percentile stands in for the smallest one, which a wrong label decides (Jiang
    et al. 2020, App. C).
    """
    found = []
    for batch in batches:
        outcome = scores_and_labels(model, batch)
        if outcome is None:
            return None
        counted = outcome[1] != IGNORED
        scores, labels = outcome[0].double()[counted], outcome[1][counted, None]
        others = scores.scatter(1, labels, -torch.inf).amax(1)
        found.append(scores.gather(1, labels)[:, 0] - others)
    return float(torch.cat(found).quantile(quantile))


def fisher_trace(model: nn.Module, batches: Iterable[Any]) -> float | None:
    r"""Compute the trace of a classifier's Fisher matrix; None if it is not a classification.

    .. math:: \operatorname{Tr} F = \operatorname{mean}_i \sum_s p_{is} \, \|\nabla_θ \log p_{is}\|^2

    over all trainable weights θ, with the classes' probabilities :math:`p_i` at example i. Labels are those of the
    model, not of the data. Up to ten classes the sum is exact, at one backward pass per class and example; for more
    classes one label per example is drawn from :math:`p_i` with a fixed seed, which is unbiased. It is not invariant.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [p for p in model.parameters() if p.requires_grad]
    total, count = 0.0, 0
    for batch in batches:
        for _, example in Objective(micro_batch=1).pieces(model, batch):
            outcome = scores_and_labels(model, example)
            if outcome is None:
                return None
            logs = outcome[0].log_softmax(1)[0]
            p = logs.detach().exp().cpu()
            many = len(p) > 10
            for s in [int(p.multinomial(1, generator=generator))] if many else range(len(p)):
                gradients = torch.autograd.grad(logs[s], weights, retain_graph=True, allow_unused=True)
                total += (1.0 if many else float(p[s])) * sum(
                    float(g.square().sum()) for g in gradients if g is not None
                )
            count += 1
    return total / count
