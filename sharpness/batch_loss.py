"""The loss of a batch as a function of coordinates, after checks that it is one."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from quotient_manifolds.linalg import differentiated, finite
from quotient_manifolds.passes import eager, tensors, to_device
from quotient_manifolds.symmetries import NotASymmetryError
from quotient_manifolds.symmetries.lora import zero_norm

from .losses import SMALL, Objective, computed_in, count_examples, rounding_error, to_float32
from .space import HIDES, WeightSpace

#: Up to this many roundings of the weights' dtype, and never above the second number, two equal passes may differ
#: relatively: threads add up in no fixed order.
_REPEATED, _ROUGHEST = 200, 1e-3
#: A residual that all pairs share is the precision of the computations, at most 0.014 in half precision; up to this it
#: is not the pairs' own, and losses may differ by three times as much.
_SHARED = 0.03


class RadiusError(ValueError):
    """The loss is not finite somewhere in a ball, because the radius is too large."""


class BatchLoss:
    """The loss of a batch as a function of coordinates; radii and starts share the pass at the weights.

    Before anything is measured, the loss must be the same in a second pass and along the orbits of pairs that are not
    certified by their gradient, and the gradient must be finite.

    Attributes
    ----------
    index : int
        Position of the batch.
    base : float
        Loss at the weights.
    base_gradient : Tensor
        (dim,), the gradient there, until it is released.
    slope : float
        Its length.
    base_error, worst_error : float or None
        Fraction of misclassified examples: at the weights, and the largest so far.
    known : dict
        What every result on the batch says.
    passes : int
        Number of passes.
    """

    def __init__(self, space: WeightSpace, objective: Objective, batch: Any, index: int) -> None:
        batch = to_device(batch, space.device)
        batch = to_float32(batch) if space.in_float32 else batch
        self.space, self.objective, self.index, self.passes = space, objective, index, 0
        one = space.world is None
        self.pieces = objective.pieces(space.model, batch) if one else _share(space, objective, batch)
        self.worst_error: float | None = None
        self.base_gradient = torch.empty(space.dim, dtype=space.dtype, device=space.device)
        self.base = self(None, self.base_gradient)
        self.base_error, first = self.worst_error, self._first
        self._check_second_pass(first)
        if objective.micro_batch is not None:
            objective.check_pieces(space.model, batch, all_of_them=index == 0)
        if any(residual > space.tolerance for residual in space.residuals.values()):
            self._check_symmetries(first)
        self.slope = space.norm(self.base_gradient)
        if not math.isfinite(self.slope) and not space.agree(finite(self.base_gradient)):  # it may have overflowed
            raise ValueError(
                f"the gradient of batch {index} at the weights has NaN or infinite entries although the loss is "
                f"{self.base:.6g}; "
                f"{zero_norm(space.model) or 'check the model and loss_fn for a square root or logarithm at zero'}"
            )
        self.known: dict[str, Any] = {"batch": index, "base_loss": self.base, "base_error": self.base_error}

    def forget_errors(self) -> None:
        """Count only misclassified examples at the weights, and from here on."""
        self.worst_error = self.base_error

    def __call__(self, xi: Tensor | None, out: Tensor | None = None) -> float:
        """Evaluate the loss at a vector (None: at the weights), and write the gradient there to ``out``, if given."""
        space, gradient = self.space, dict[str, Tensor]()
        space.move_to(xi)
        if out is None:
            for _ in self.losses(graph=False):
                pass
        else:
            with torch.enable_grad():
                gradient = space.differentiate(self.losses())
            if xi is None:
                space.see(gradient)
        sums = self._sums if space.world is None else space.world.sum(self._sums)
        value, wrong, counted = sums.tolist()
        value = value if space.world is None else value / space.world.size
        if not math.isfinite(value):
            self._refuse(value, xi)
        if counted:
            self.worst_error = max(wrong / counted, self.worst_error or 0.0)
        if out is not None:
            space.pull_back_from_copies(gradient, xi, out)
        return value

    def losses(self, *, graph: bool = True) -> Iterator[Tensor]:
        """Iterate over the losses of the pieces, with their graphs if asked; they add up to the loss of the batch."""
        self.passes += 1
        self._sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        for k, (weight, piece) in enumerate(self.pieces):
            loss, wrong, counted, _ = self.objective(self.space.model, piece, graph=graph)
            value = float(loss.detach())
            if k == 0:
                self._first = value
            if weight:
                self._sums += torch.tensor([weight * value, wrong, counted], dtype=torch.float64, device="cpu")
            yield loss * weight if weight != 1 else loss

    def _refuse(self, value: float, xi: Tensor | None) -> NoReturn:
        """Raise for a loss that is not finite."""
        distance = 0.0 if xi is None else self.space.norm(xi)
        if distance == 0:
            raise ValueError(
                f"the loss of batch {self.index} is {value}; "
                f"{zero_norm(self.space.model) or 'look for NaN in the data, or labels out of range'}"
            )
        raise RadiusError(
            f"the loss of batch {self.index} became {'NaN' if math.isnan(value) else 'infinite'} at a distance of "
            f"{distance:.4g} from the weights; use a smaller rho"
        )

    def _check_second_pass(self, one: float) -> None:
        """Raise if a second pass through the first piece differs, because the sharpness of noise is meaningless."""
        run = partial(self.objective.value, self.space.model, self.pieces[0][1])
        if self.space.unreached.weights:
            with eager(), _Seen() as seen:
                two = run()
            if seen.hidden:
                raise ValueError(HIDES)
        else:
            two = run()

        apart = abs(one - two) / max(abs(one), abs(two), SMALL)
        if self.space.agree(apart == 0 or apart <= min(_REPEATED * rounding_error(self.space.model), _ROUGHEST)):
            return
        if not self.space.agree(apart <= min(_REPEATED * computed_in(run), _ROUGHEST)):
            raise ValueError(
                f"two identical passes through batch {self.index} gave different losses ({one:.8g} and {two:.8g}): "
                "switch off dropout that ignores eval(), random augmentation and sampling inside the model or loss_fn"
            )

    def _check_symmetries(self, before: float) -> None:
        """Raise for a pair that is not a symmetry by its gradient, if a move along its orbit confirms that.

        Near a minimum a gradient may be mostly rounding error, which does not affect moves of the weights. Residuals
        that all pairs share come from the precision of the model's computations.
        """
        residuals, tolerance = self.space.residuals, self.space.tolerance
        least = min(residuals.values())
        several = len({(p.module, p.kind) for p in residuals}) > 1
        shared = 3 * least if several and least < _SHARED else 0.0
        rounding, floor = 0.1 * tolerance + 2e-5, SMALL
        if shared >= rounding:
            rounding, floor = shared, 1.0
        failing = [p for p, r in residuals.items() if r > tolerance]
        for pair in sorted(failing, key=lambda p: (-residuals[p], p.name)):
            self.space.move_along_orbit(pair)
            after = self.objective.value(self.space.model, self.pieces[0][1])
            self.space.move_to(None)
            alike = abs(after - before) <= rounding * max(abs(after), abs(before), floor)
            if not self.space.agree(alike):
                raise NotASymmetryError(pair, residuals[pair], tolerance)


def _share(space: WeightSpace, objective: Objective, batch: Any) -> list[tuple[float, Any]]:
    """Return the pieces of a batch that this process passes through a sharded model; each process has equally many.

    FSDP's gradient is the mean over the processes. Where each has different pieces, their weights are multiplied by the
    number of processes.
    """
    assert space.world is not None
    size, rank = space.world.size, space.world.rank
    if size > 1 and objective.micro_batch is None:
        objective = replace(objective, micro_batch=-(-count_examples(batch) // size))
        objective.check_pieces(space.model, batch, all_of_them=False)
    pieces = objective.pieces(space.model, batch)
    if size == 1:
        return pieces
    mine = [(weight * size, piece) for weight, piece in pieces[rank::size]]
    return mine if len(mine) == -(-len(pieces) // size) else [*mine, (0.0, pieces[0][1])]


class _Seen(TorchFunctionMode):
    """Note a reentrant checkpoint behind which autograd sees no weights, because its inputs need no gradient."""

    hidden = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = None if self.hidden else sys._getframe(1)  # noqa: SLF001
        while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
            frame = frame.f_back
        if frame is not None:
            self.hidden = not differentiated(*tensors(frame.f_locals["args"]))
        return func(*args, **(kwargs or {}))
