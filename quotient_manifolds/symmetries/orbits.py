"""Moves of pairs along their orbits, in double precision, and what the outputs of a model say of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ..linalg import differentiated, in_double, standard_normal
from ..passes import Run
from .pairs import PairStack, SymmetricPair, stacks

#: Relative residuals and changes of outputs up to this are rounding of float64: symmetries show at most 1e-10, others
#: at least 1e-4.
ROUNDING = 1e-7
#: Condition number of the group elements that confirm a symmetry: so far along an orbit, clipped values are clipped.
CONDITION = 100.0


def random_elements(x: Tensor, condition: float, generator: torch.Generator) -> Tensor:
    """Draw U diag(s) Vᴴ for each of some points, in double precision.

    U and V are random orthogonal, numbers have random signs or phases; s is log-uniform, from condition^-½ to its root.
    """
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-1])
    like = torch.empty(0, dtype=torch.promote_types(x.dtype, torch.float64), device="cpu")
    draws = [standard_normal(shape, like, generator) for _ in range(2)]
    U, V = (d / d.abs() if shape[-1] == 1 else torch.linalg.qr(d).Q for d in draws)
    exponent = torch.rand(shape[:-1], dtype=torch.float64, device="cpu", generator=generator) - 0.5
    if shape[-1] > 1:
        exponent[..., 0], exponent[..., -1] = -0.5, 0.5
    return ((U * (condition**exponent).unsqueeze(-2)) @ V.mH).to(x.device)


@torch.enable_grad()
def output_gradients(run: Run, weights: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the gradients, by name, of a random linear function of outputs; ``.grad`` holds them afterwards."""
    for p in weights.values():
        p.requires_grad_()
        p.grad = None
    outputs = list(filter(differentiated, run()))
    draws = [standard_normal(tuple(t.shape), t, generator) for t in outputs]
    for t, draw in zip(outputs, draws, strict=True):  # a model may keep a part of the graph that it has made once
        (t * draw).sum().backward(retain_graph=True)
    return {name: p.grad for name, p in weights.items() if p.grad is not None}


def maximum(numbers: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN, which Python's max may ignore."""
    return float(torch.tensor([0.0, *numbers], dtype=torch.float64, device="cpu").max())


def change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest change of finite outputs, relative to their largest; NaN if one became NaN, or for none."""
    finite = [(b[at], a[at]) for b, a in zip(before, after, strict=True) if (at := b.isfinite()).any()]
    scale = max((float(b.abs().max()) for b, _ in finite), default=math.nan)
    return maximum(float((a - b).abs().max()) for b, a in finite) / max(scale, 1e-300)


@torch.no_grad()
def move_stacks_(found: Iterable[PairStack], weights: Mapping[str, Tensor], condition: float, seed: int) -> None:
    """Move pairs from their balanced representatives along their orbits, by random elements of the groups."""
    generator = torch.Generator().manual_seed(operator.index(seed))
    for s in found:
        balanced, _ = s.canonical(in_double(s.gather(weights)))
        A = random_elements(balanced, condition, generator)
        if s.group.positive:
            A = A.abs()
        elif balanced.shape[-1] == 1 and not balanced.is_complex():
            # Real numbers: one of every pair changes its sign, which a canonical representative may have done already.
            same = (A * (balanced * s.gather(weights)).sum(-2, keepdim=True)).flatten(1).gt(0).all(1)
            A = torch.where(same.reshape(-1, *[1] * (A.dim() - 1)), -A, A)
        s.scatter_(s.manifold().act(balanced, A), weights)


@contextmanager
def preserve_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors afterwards."""
    kept = [(t, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        for t, value in kept:
            t.detach().copy_(value)


@contextmanager
def moved(
    pairs: Sequence[SymmetricPair], weights: Mapping[str, Tensor], condition: float = CONDITION, seed: int = 0
) -> Iterator[None]:
    """Move pairs along their orbits for the time of a ``with``."""
    found = stacks(pairs, weights)
    with preserve_values(weights[name] for name in dict.fromkeys(name for s in found for name in s.names)):
        move_stacks_(found, weights, condition, seed)
        yield


@torch.no_grad()
def broken(
    pairs: Iterable[SymmetricPair], weights: Mapping[str, Tensor], run: Run, tolerance: float = ROUNDING
) -> list[SymmetricPair]:
    """Find the layers of which moves change the outputs of ``run``; the weights are as before afterwards.

    All pairs are moved together, and halved as long as an output changes by more than rounding. What has passed stays
    moved meanwhile, so that all that is left holds together.
    """
    layers: dict[tuple[str, str], list[SymmetricPair]] = {}
    for p in pairs:
        layers.setdefault((p.module, p.kind), []).append(p)
    if not layers:
        return []
    before = run()

    def failing(some: list[list[SymmetricPair]], passed: ExitStack) -> list[SymmetricPair]:
        moving = [p for layer in some for p in layer]
        with ExitStack() as stack:
            stack.enter_context(moved(moving, weights))
            if change(before, run()) <= tolerance:
                passed.push(stack.pop_all())
                return []
        half = len(some) // 2
        return [*failing(some[:half], passed), *failing(some[half:], passed)] if half else moving

    with ExitStack() as passed:
        return failing(list(layers.values()), passed)
