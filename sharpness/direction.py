"""A tangent vector at the weights of a model, and the model moved along it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries import SymmetricPair, find_symmetric_pairs
from quotient_manifolds.symmetries.modules import is_sharded
from quotient_manifolds.symmetries.whole import canonical_form

from .building import build_blocks, divide
from .measures import Measure
from .perturb import pointing_to
from .weights import named_weights

__all__ = ["Direction", "perturbed"]


@dataclass(frozen=True)
class Direction:
    r"""A tangent vector at a model's weights.

    Attributes
    ----------
    measure : Measure
        The measure, which defines how to move along the vector.
    tensors : dict of str to Tensor
        One tensor per trainable parameter, of its shape and dtype (at least float32), on the CPU, by the parameter's
        name. For attention pairs it is the horizontal vector at the model's own representative; for measures at the
        canonical form it is a vector there.
    norm : float
        Length in the measure's metric.
    pairs : tuple of SymmetricPair
        The pairs that were divided out.
    squares : dict of str to float
        Squared length in the metric of every parameter's part outside pairs, by the parameter's name.
    pair_squares : tuple of float
        Squared length of every pair's part. With ``squares`` they add up to norm².
    classes : bool
        For measures at the canonical form: the logits are centred over the classes there.
    parts : dict of str to float
        Squared length by part of the network, see :data:`sharpness.parts.PARTS`.
    given : sequence of SymmetricPair or None
        The pairs that the measurement was given or found by examination; None if the model's classes name them.

    Examples
    --------
    The worst direction of a linear model in the adaptive metric, whose length is :math:`\|ξ \oslash |w|\|`:

    >>> from torch import nn
    >>> import sharpness, torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.data = torch.tensor([[2.0, 1.0]])
    >>> result = sharpness.evaluate(model, [torch.eye(2)], lambda f, x: f(x).sum(), measure="adaptive", rho=0.5)
    >>> xi = result.direction(0)
    >>> xi.tensors["weight"], round(xi.norm, 4)
    (tensor([[0.8944, 0.2236]]), 0.5)
    """

    measure: Measure
    tensors: dict[str, Tensor] = field(repr=False)
    norm: float
    pairs: tuple[SymmetricPair, ...] = field(default=(), repr=False)
    squares: dict[str, float] = field(default_factory=dict, repr=False)
    pair_squares: tuple[float, ...] = field(default=(), repr=False)
    classes: bool = False
    parts: dict[str, float] = field(default_factory=dict, repr=False)
    given: Sequence[SymmetricPair] | None = field(default=None, repr=False)


def _same_pairs(model: nn.Module, pairs: Sequence[SymmetricPair]) -> list[SymmetricPair]:
    """Find a direction's pairs in this model, which may be another copy of the one that was measured."""
    own = {id(m) for m in model.modules()}
    if all(id(b.module) in own for p in pairs for b in p.G + p.H):
        return list(pairs)
    found = {p.name: p for p in find_symmetric_pairs(model, include_frozen=True)}
    missing = [p.name for p in pairs if p.name not in found]
    if missing:
        raise ValueError(
            f"the direction moves the pair {missing[0]!r}, which find_symmetric_pairs does not name in this "
            f"{type(model).__name__}; use the model that was measured"
        )
    return [found[p.name] for p in pairs]


@contextmanager
def perturbed(model: nn.Module, direction: Direction, t: float = 1.0) -> Iterator[nn.Module]:
    r"""Move a model along a direction for the time of a ``with`` block.

    The weights become :math:`R_θ(tξ)`: the measure's retraction for attention pairs, θ + tξ elsewhere.

    Parameters
    ----------
    model : nn.Module
        The model whose weights the direction belongs to.
    direction : Direction
        For example ``result.direction(0)``.
    t : float
        How far to move; at t = 1 the loss is the one that ``evaluate`` reports.

    Yields
    ------
    nn.Module
        The model. Its weights are restored, bit for bit, when the block ends, also after an exception. A half-precision
        model is in float32 within the ``with`` block and takes float32 inputs.

    Raises
    ------
    ValueError
        If the direction's parameters or pairs are not those of the model.

    Notes
    -----
    Paper, §5.2. Meanwhile the parameters point to copies; their own storage is not written to. A direction may be used
    on another copy of the measured model, on any device, unless its pairs were found by examination of a batch.

    Examples
    --------
    What the worst perturbation does to the outputs:

    >>> from torch import nn
    >>> import sharpness, torch
    >>> model, x = nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> model.weight.data = torch.tensor([[2.0, 1.0]])
    >>> result = sharpness.evaluate(model, [x], lambda f, x: f(x).sum(), measure="adaptive", rho=0.5)
    >>> with torch.no_grad(), sharpness.perturbed(model, result.direction(0)):
    ...     model(x).T
    tensor([[2.8944, 1.2236]])
    """
    parameters = named_weights(model)
    if any(is_sharded(p) for p in parameters.values()):
        raise ValueError("a sharded model cannot be moved along a direction; load the whole checkpoint")
    for name, v in direction.tensors.items():
        if name not in parameters or parameters[name].shape != v.shape:
            raise ValueError(
                f"the direction has a tensor {name!r} of shape {tuple(v.shape)}, which {type(model).__name__} lacks; "
                "it belongs to another model"
            )
    moving = {name: parameters[name] for name in direction.tensors}
    with torch.no_grad():
        vector: dict[Tensor, Tensor] = {p: direction.tensors[name].to(p.device) for name, p in moving.items()}
        measure, canonical = direction.measure, direction.measure.form == "canonical"
        given = _same_pairs(model, direction.given) if canonical and direction.given is not None else None
        form = canonical_form(model, classes=direction.classes, pairs=given) if canonical else None
        base = {} if form is None else form.values
        pairs = _same_pairs(model, direction.pairs) if form is None else None
        moved: dict[Tensor, Tensor] = {p: torch.empty_like(v).copy_(base.get(p, p)) for p, v in vector.items()}
        with pointing_to(model, base):
            division = divide(model, measure, pairs, moving, form=form, only_some=canonical)
            blocks = build_blocks(measure, moving, torch.float64, division, at_model=True)
        for block in blocks:
            block.move_(moved, t * block.coordinates(vector))
    with pointing_to(model, {**base, **moved}):
        yield model
