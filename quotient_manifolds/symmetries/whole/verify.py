"""Check every kind of symmetry on the network's outputs: by one gradient, and by finite moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...base import standard_normal
from ...batches import default_forward, floats
from ..certificate import certify, change, largest
from ..discovery import apply_random_symmetry_
from ..modules import Wide, copied, preserve_model_state, widened
from ..stacks import stacks
from .canonical import apply_random_moves_, canonicalize_
from .kinds import Symmetry
from .wiring import State

__all__ = ["WholeVerification", "verify_whole"]


@dataclass(frozen=True)
class WholeVerification:
    """What the outputs' gradient and finite moves say about every kind of symmetry.

    Attributes
    ----------
    residuals : dict of str to float
        By kind: the largest derivative of the outputs along a symmetry, relative to the lengths of gradient and move.
    changes : dict of str to float
        By kind: the largest change of an output when all symmetries of the kind move, relative to the largest output.
    tolerance : float
        Values up to this count as rounding.

    Examples
    --------
    See :func:`verify_whole`.

    >>> from quotient_manifolds.symmetries.whole import WholeVerification
    >>> WholeVerification({"gain": 1e-16}, {"gain": 0.1, "shift": 1e-15}).failures
    ['gain']
    """

    residuals: dict[str, float]
    changes: dict[str, float]
    tolerance: float = 1e-8

    @property
    def failures(self) -> list[str]:
        """The kinds that are not symmetries."""
        kinds = dict.fromkeys([*self.residuals, *self.changes])
        return [
            k for k in kinds if not all(of[k] <= self.tolerance for of in (self.residuals, self.changes) if k in of)
        ]

    @property
    def ok(self) -> bool:
        """Whether every kind is a symmetry."""
        return not self.failures

    def __str__(self) -> str:
        lines = [f"{'':<12} {'gradient':>9} {'move':>9}"]
        for kind, moved in self.changes.items():
            residual = f"{self.residuals[kind]:>9.0e}" if kind in self.residuals else " " * 9
            wrong = "  NOT A SYMMETRY" * (kind in self.failures)
            lines.append(f"{kind:<12} {residual} {moved:>9.0e}{wrong}")
        return "\n".join(lines)


@torch.inference_mode(False)
@torch.enable_grad()
def verify_whole(
    model: nn.Module,
    batch: Any,
    seed: int = 0,
    *,
    forward: Callable[[nn.Module, Any], Any] = default_forward,
    classes: bool = False,
) -> WholeVerification:
    """Certify every kind of symmetry of a network, heads, neurons and all others, and move it.

    It is done on a canonicalised copy in float64.

    Parameters
    ----------
    model : nn.Module
        A network of a known class, see :func:`register_wiring`; it is left unchanged.
    batch : object
        A batch for ``forward``; floating-point tensors are widened.
    seed : int
        Seed of the cotangent and the moves.
    forward : callable
        ``forward(model, batch)`` → outputs, of which the first one that is not a single number is compared.
    classes : bool
        The outputs are used only through a softmax over their last dimension.

    Returns
    -------
    WholeVerification
        ``print`` shows a row for each kind.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries.whole import verify_whole
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = torch.nn.TransformerEncoder(layer, 2)
    >>> verify_whole(encoder, torch.linspace(-1, 1, 48).reshape(2, 3, 8)).ok
    True
    """
    twin = copied(model).double().requires_grad_()
    wide = widened(batch)

    def outputs() -> list[Tensor]:
        with Wide():
            found = [t for t in floats(forward(twin, wide)) if t.dim()]
        # The first output that is not a loss; others, such as hidden states, need not be invariant.
        return [t.log_softmax(-1) if classes else t for t in found[:1]]

    with preserve_model_state(twin):
        form = canonicalize_(twin, classes=classes)
        generator = torch.Generator().manual_seed(seed)
        at = [t for t in outputs() if t.requires_grad]
        draws = [standard_normal(tuple(t.shape), t, generator) for t in at]
        parameters = list(twin.parameters())
        gradients = torch.autograd.grad(at, parameters, draws, allow_unused=True)
        known: dict[Tensor, Tensor] = {p: g for p, g in zip(parameters, gradients, strict=True) if g is not None}
        residuals: dict[str, float] = {}
        found = [(p.kind, r) for p, r in certify(stacks(form.pairs), known).residuals.items()]
        for kind, residual in [*found, *((s.kind, _residual(s, known)) for s in form.symmetries)]:
            residuals[kind] = largest([residuals.get(kind, 0.0), residual])
        before, weights = [t.detach() for t in at], {p: p.detach().clone() for p in parameters}
        changes = {}
        for kind in form.dimensions:
            with torch.no_grad():
                mine = [p for p in form.pairs if p.kind == kind]
                if mine:
                    apply_random_symmetry_(twin, seed=seed, pairs=mine)
                else:
                    apply_random_moves_(twin, seed=seed, classes=classes, kinds=[kind])
                changes[kind] = change(before, outputs())
                for p, value in weights.items():
                    p.copy_(value)
    return WholeVerification(residuals, changes)


def _residual(s: Symmetry, gradients: dict[Tensor, Tensor]) -> float:
    """Return the derivative along a symmetry at t = 0, relative to the gradient's and the move's lengths."""
    t = torch.zeros(s.shape, dtype=torch.float64, device=s.parameters[0].device, requires_grad=True)
    at, near = State(), State()
    s.move(at, t)
    step = 1e-4 * standard_normal(tuple(s.shape), t, torch.Generator().manual_seed(0))
    s.move(near, step)
    known = [p for p in s.parameters if p in gradients and at.of(p).requires_grad]
    if not known:
        return 0.0
    (along,) = torch.autograd.grad(torch.stack([(gradients[p] * at[p]).sum() for p in known]).sum(), t)
    floor = 1e-6 * max(float(g.norm()) for g in gradients.values())  # a gradient may be pure rounding error
    moved = sum(max(float(gradients[p].norm()), floor) * float((near.of(p) - p.detach()).norm()) for p in known)
    sizes = moved / float(step.norm())
    return float(along.norm()) / sizes if sizes else 0.0
