"""Attention weights as points of the quotient that geoopt's optimisers train, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._geoopt import ManifoldParameter
from ..manifold import MANIFOLDS
from ..weights import check_model, check_whole, trained, weights_of
from .discovery import find
from .found import Symmetries, check_symmetries
from .pairs import PairStack, coverage, stacks
from .points import FromPoints, Point, computed_weights


@torch.no_grad()
def manifold_parameters_(
    model: nn.Module, metric: str = "mix", *, symmetries: Symmetries | None = None
) -> list[ManifoldParameter]:
    """Replace the weights of symmetric pairs by points of the quotient, which geoopt's optimisers train.

    Pairs of equal shape become one stacked parameter, (pairs, n + m, h), of the model; under RoPE, whose pairs are
    diagonal, a complex one, (pairs, h, n + m, 1). The weights are computed from them in every pass
    (:mod:`torch.nn.utils.parametrize`). Entries that belong to no pair stay parameters.

    Parameters
    ----------
    model : nn.Module
        Changed in place: before it is wrapped (DDP) or compiled, and before the optimiser is made.
    metric : {"inv", "mix"}
        Metric of the quotient: :class:`quotient_manifolds.GLQuotientInv` or ``GLQuotientMix``.
    symmetries : Symmetries, optional
        By default those that :func:`find` finds; for attention of unknown classes pass what it finds with a batch.

    Returns
    -------
    list of geoopt.ManifoldParameter
        The points: also among ``model.parameters()``, as ``quotient_point_0``, ….

    Raises
    ------
    ValueError
        There is no pair, the weights of one are no point (LoRA's B = 0, half precision), or a weight is tied.

    Notes
    -----
    ``state_dict`` holds the points; before ``save_pretrained`` and the like, :func:`plain_parameters_`. torch pickles
    no parametrised module as a whole. The price is one more copy of the weights in a pass.

    Examples
    --------
    >>> import geoopt, torch
    >>> from quotient_manifolds.symmetries import manifold_parameters_, plain_parameters_
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> [tuple(p.shape) for p in manifold_parameters_(layer)]
    [(2, 18, 4), (2, 17, 4)]
    >>> optimizer = geoopt.optim.RiemannianAdam(layer.parameters(), lr=1e-3)
    >>> layer(torch.randn(2, 3, 8)).square()[..., 0].sum().backward()
    >>> optimizer.step()
    >>> plain_parameters_(layer)
    >>> type(layer.self_attn.in_proj_weight).__name__
    'Parameter'
    """
    check_whole(model)
    if metric not in MANIFOLDS:
        raise ValueError(f'metric must be "inv" or "mix", got {metric!r}')
    weights, symmetries = weights_of(model), find(model) if symmetries is None else symmetries
    check_symmetries(symmetries)
    moving = symmetries.restricted(trained(weights)).of_full_rank()
    # A dropped key bias stays a parameter.
    found = stacks([replace(p, null=()) for p in moving.pairs if p.metric is None], weights)
    if not found:
        raise ValueError(f"{type(model).__name__} has no symmetric pair that could become a point")
    points = {s: ManifoldParameter(s.gather(weights), manifold=s.manifold(metric)) for s in found}
    covered = coverage(found, weights)
    _check_points(points, model, [weights[name] for name in covered])
    taken = sum(name.startswith("quotient_point_") for name, _ in model.named_parameters(recurse=False))
    places: dict[str, FromPoints] = {}
    for i, (stack, x) in enumerate(points.items(), taken):
        point = Point(model, f"quotient_point_{i}", stack)
        model.register_parameter(point.name, x)
        for k, run in enumerate(stack.runs):
            name = run.slot.name
            places.setdefault(name, FromPoints(_home(model, name)[0], weights[name], covered[name]))
            places[name].sources.append((point, k))
    for name, step in places.items():
        module, attribute = _home(model, name)
        weights[name].grad = None
        parametrize.register_parametrization(module, attribute, step)
        if step.whole:  # what is left is empty: no parameter for an optimiser
            homes: Any = module.parametrizations
            del homes[attribute].original
            homes[attribute].register_buffer("original", weights[name].detach(), persistent=False)
    return list(points.values())


def _home(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a weight, and what it is called there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _check_points(points: dict[PairStack, ManifoldParameter], model: nn.Module, weights: Iterable[Tensor]) -> None:
    """Raise unless the stacks are points of their manifolds, and every weight has one place in the model."""
    for stack, x in points.items():
        for pair, one in zip(stack.pairs, x.detach(), strict=True):
            good, why = x.manifold.check_point_on_manifold(one, explain=True)
            if not good and pair.kind == "lora":
                raise ValueError(
                    f"{pair.name!r} is no point of the quotient, for a factor lacks full rank, as LoRA's B = 0 before "
                    "training; train adapters by quotient_manifolds.optim.create_quotient_lora_optimizer"
                )
            if not good:
                raise ValueError(f"the weights of {pair.name!r} are no point of the quotient: {why}")
    for weight in weights:
        places = [type(m).__name__ for m in model.modules() for p in m.parameters(recurse=False) if p is weight]
        if len(places) != 1:
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} is a parameter of {len(places)} modules of the model "
                f"({', '.join(places) or 'none'}), but one has to compute it from its point; untie it, or pass "
                "symmetries= without it"
            )


@torch.no_grad()
def plain_parameters_(model: nn.Module) -> None:
    """Undo :func:`manifold_parameters_`: write the points back to ordinary weights, bit for bit, in place.

    The weights are the Parameter objects that they were before. Now the model is saved as its library saves it.

    Parameters
    ----------
    model : nn.Module
        A model without such points is left as it is.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import manifold_parameters_, plain_parameters_
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> before = layer.state_dict()
    >>> before = {name: t.clone() for name, t in before.items()}
    >>> _ = manifold_parameters_(layer)
    >>> plain_parameters_(layer)
    >>> all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
    True
    """
    check_model(model)
    points: dict[Point, None] = {}
    for module, name, home, step in list(computed_weights(model)):
        points |= dict.fromkeys(point for point, _ in step.sources)
        if step.whole:
            (weight,) = step.weight
            weight.data = home.original
            del home.original
            home.original = weight
        cls = type(module)  # copies of the model share it, but torch takes the weight from it
        module.__class__ = type(cls.__name__, cls.__bases__, dict(vars(cls)))
        home.original.grad = None
        parametrize.remove_parametrizations(module, name)
        present = dict(module.named_parameters(recurse=False))
        for other in filter(present.__contains__, step.order):
            delattr(module, other)
            module.register_parameter(other, present[other])
    for point in points:
        point.remove()
