"""Check the symmetries that handlers claim against the outputs of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base import standard_normal
from ..batches import default_forward, floats
from .certificate import Certificate, certify, change, move_
from .modules import Wide, check_model, copied, preserve_model_state, random_state_kept, widened
from .pairs import SymmetricPair, check_pairs, in_copy
from .registry import claimed_pairs, find_symmetric_pairs
from .stacks import PairStack, stacks

__all__ = ["Verification", "apply_random_symmetry_", "verify"]


@torch.no_grad()
def apply_random_symmetry_(
    model: nn.Module, condition: float = 10.0, seed: int = 0, pairs: Iterable[SymmetricPair] | None = None
) -> int:
    """Move every symmetric pair of a model along its orbit by a random group element: the function stays the same.

    The move starts at the balanced representative (canonical gauge), is computed in float64 and rounded to the
    weights' precision, so the outputs change by rounding errors, which grow with the condition number.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    condition : float
        Condition number of every group element, ≥ 1.
    seed : int
        Seed of the group elements.
    pairs : iterable of SymmetricPair, optional
        The pairs to move; by default all that :func:`find_symmetric_pairs` finds.

    Returns
    -------
    int
        Number of pairs moved.

    Raises
    ------
    ValueError
        A condition number below 1.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import apply_random_symmetry_
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> weight = layer.self_attn.in_proj_weight
    >>> output, old = layer(torch.ones(1, 3, 8)), weight.clone()
    >>> apply_random_symmetry_(layer)
    4
    >>> torch.allclose(layer(torch.ones(1, 3, 8)), output, atol=1e-4), torch.allclose(weight, old)
    (True, False)
    """
    if not isinstance(condition, (int, float)) or not 1 <= condition < float("inf"):
        raise ValueError(f"a condition number is at least 1, got {condition!r}")
    check_model(model)
    if not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    found = stacks(find_symmetric_pairs(model) if pairs is None else pairs)
    move_(found, condition, seed)
    return sum(map(len, found))


@dataclass(frozen=True)
class Verification:
    """What the outputs' gradient says about each pair, and how moving it changed the outputs.

    ``changes`` holds, by the pair's name, the largest change of an output relative to the largest output; up to
    ``tolerance`` it counts as rounding.
    """

    certificate: Certificate
    changes: dict[str, float]
    tolerance: float = 1e-9

    @property
    def failures(self) -> list[str]:
        """Names of the pairs that are not symmetries."""
        moved = [name for name, change in self.changes.items() if not change <= self.tolerance]
        return list(dict.fromkeys([*moved, *(p.name for p in self.certificate.failures)]))

    @property
    def ok(self) -> bool:
        """Every pair is a symmetry."""
        return not self.failures

    def __str__(self) -> str:
        lines = str(self.certificate).splitlines()
        if self.changes:
            worst = max(self.changes.values())
            lines.append(
                f"{len(self.changes)} pairs moved, largest relative change of an output {worst:.1e} "
                f"(rounding is up to {self.tolerance:.0e})"
            )
            moved = [n for n, change in self.changes.items() if not change <= self.tolerance]
            lines += [f"NOT A SYMMETRY: {n}: moves change the outputs by {self.changes[n]:.1e}" for n in moved]
        return "\n".join(lines)


@torch.inference_mode(False)  # else there is no gradient, which certifies
@torch.no_grad()
def verify(
    model: nn.Module,
    batch: Any,
    seed: int = 0,
    *,
    moves: bool = True,
    condition: float = 10.0,
    forward: Callable[[nn.Module, Any], Any] = default_forward,
    extra: Sequence[SymmetricPair] = (),
) -> Verification:
    """Certify every pair by one backward pass, then act on it with a random group element and compare the outputs.

    It is done on a float64 copy of the model in evaluation mode, which casts nothing to single precision, and starts at
    the balanced representative of every pair. Attention of unknown classes is examined first.

    Parameters
    ----------
    model : nn.Module
        The model; it is left unchanged.
    batch : object
        A small batch for ``forward``. Floating-point tensors are widened to float64.
    seed : int
        Seed of the group elements.
    moves : bool
        Whether to act on the pairs too, at one forward pass each.
    condition : float
        Condition number of the group elements.
    forward : callable
        ``forward(model, batch)`` → outputs; by default as for :func:`sharpness.evaluate`, without its loss.
    extra : sequence of SymmetricPair
        Pairs of your own, as for :func:`find_symmetric_pairs`.

    Returns
    -------
    Verification
        ``print`` shows it; ``ok`` and ``failures`` say what is wrong.

    Raises
    ------
    ValueError
        The model returns no floating-point tensor, or a pair of your own belongs to another model.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import verify
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> print(verify(layer, torch.linspace(-1, 1, 24).reshape(1, 3, 8)))
    4 pairs certified, largest residual ...e-1... (rounding is up to 1e-08)
    4 pairs moved, largest relative change of an output ...e-1... (rounding is up to 1e-09)

    A pair that is no symmetry, for there is a ReLU between its factors:

    >>> from quotient_manifolds.symmetries import GL, block, pair
    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
    >>> G = [block(model[0], "weight", transpose=True), block(model[0], "bias")]
    >>> wrong = pair(G, [block(model[2], "weight")], GL(3), name="layers")
    >>> verify(model, torch.linspace(-1, 1, 40).reshape(8, 5), extra=[wrong]).failures
    ['layers']
    """
    check_model(model)
    extra = check_pairs(extra)
    twin = copied(model).double()
    modules = dict(zip(model.modules(), twin.modules(), strict=True))
    batch = widened(batch)

    def run() -> list[torch.Tensor]:
        with random_state_kept(twin):
            return [t.double() for t in floats(forward(twin, batch))]

    with preserve_model_state(twin), Wide():
        before = run()
        if not before:
            raise ValueError(f"{type(model).__name__} returned no floating-point tensor to compare; pass forward")
        pairs = claimed_pairs(twin, extra=[in_copy(p, modules) for p in extra], batch=batch, forward=forward)
        certificate = _certificate(stacks(pairs), run, seed)
        changes = _changes(twin, pairs, run, before, condition, seed) if moves else {}
    return Verification(certificate, changes)


def _changes(
    twin: nn.Module, pairs: Iterable[SymmetricPair], run: Callable[[], list[torch.Tensor]], before: list[torch.Tensor],
    condition: float, seed: int,
) -> dict[str, float]:  # fmt: skip
    """Act on one pair after the other, and measure how much the outputs change."""
    changes = {}
    for p in pairs:
        if p.group is not None:
            kept = [(t, t.detach().clone()) for t in p.parameters()]
            apply_random_symmetry_(twin, condition, seed, [p])
            changes[p.name] = change(before, run())
            for t, value in kept:
                t.copy_(value)
    return changes


def _certificate(found: Sequence[PairStack], run: Callable[[], list[torch.Tensor]], seed: int) -> Certificate:
    """Certify pairs by the gradient of the outputs along a random cotangent."""
    parameters = [p for s in found for p in s.parameters()]
    for p in parameters:
        p.requires_grad_()
        p.grad = None
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        outputs = [t[t.isfinite()] for t in run() if t.requires_grad]
        draws = [standard_normal(tuple(t.shape), t, generator) for t in outputs]
        for t, draw in zip(outputs, draws, strict=True):
            try:
                (t * draw).sum().backward(retain_graph=True)
            except RuntimeError:  # outputs that cannot be differentiated certify nothing; moves decide
                break
    known: dict[torch.Tensor, torch.Tensor] = {p: p.grad for p in parameters if p.grad is not None}
    return certify(found, known, tolerance=1e-8)
