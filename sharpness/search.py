"""A unit of work: one batch, one radius, one start, and what is sought there."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .ascent import ASCENTS, Ascent, Ball, Buffers, CubeBall, RoundBall
from .hessian import HessianOperator, hutch_plus_plus, largest_eigenvalues
from .losses import Objective, to_float32
from .results import BatchResult
from .space import WeightSpace

__all__ = ["BatchLoss", "RadiusError", "Search"]


#: Times that the radius is halved in search of a larger loss inside the ball.
_HALVINGS = 12


def _generator(*entropy: int) -> torch.Generator:
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed % 2**63)


class RadiusError(ValueError):
    """The loss is not finite somewhere in a ball: the radius is too large."""


class BatchLoss:
    """A batch as a function of coordinates; shares the pass at the weights between radii and starts."""

    def __init__(self, space: WeightSpace, objective: Objective, batch: Any, index: int, gradient: Tensor) -> None:
        self.space, self.objective, self.index = space, objective, index
        if space.half_precision:
            batch = to_float32(batch)
        self.batch, self.pieces = batch, objective.pieces(space.model, batch)
        self.worst_error: float | None = None
        self.passes = 0
        self.base_gradient = gradient
        self.parts: list[float] = []
        self.base = self(None, gradient)
        self._check_again()
        if not bool(self.base_gradient.isfinite().all()):
            raise ValueError(
                f"the gradient of batch {index} at the weights has NaN or infinite entries although the loss is "
                f"{self.base:.6g}; look for a square root or logarithm at zero in the model or loss_fn"
            )
        self.base_error = self.worst_error

    def __call__(self, xi: Tensor | None, out: Tensor | None) -> float:
        """Evaluate the loss at the vector with coordinates xi (None: the weights), its gradient into ``out``."""
        self.space.move_to(xi)
        self.passes += 1
        value, wrong, counted = 0.0, 0, 0

        def losses() -> Iterator[Tensor]:
            nonlocal value, wrong, counted
            for weight, piece in self.pieces:
                outcome = self.objective(self.space.model, piece)
                part = float(outcome.loss.detach())
                if not math.isfinite(part):
                    raise self._not_finite(part, xi)
                value += weight * part
                if xi is None:
                    self.parts.append(part)
                wrong += outcome.wrong or 0
                counted += outcome.counted or 0
                if out is not None and not outcome.loss.requires_grad:
                    raise ValueError(
                        "the loss does not depend on any trainable parameter; check loss_fn and requires_grad"
                    )
                yield outcome.loss * weight if weight != 1 else outcome.loss

        with torch.set_grad_enabled(out is not None or self.objective.loss_fn is not None):
            if out is None:
                for _ in losses():
                    pass
            else:
                self.space.gradient(losses(), out)
        if counted:
            self.worst_error = max(wrong / counted, self.worst_error or 0.0)
        return value

    def _check_again(self) -> None:
        """Raise if a second pass through the first piece differs: a sharpness of noise means nothing."""
        with torch.set_grad_enabled(self.objective.loss_fn is not None):
            one, two = self.parts[0], float(self.objective(self.space.model, self.pieces[0][1]).loss.detach())
        eps = max(torch.finfo(p.dtype).eps for p in self.space.model.parameters() if p.is_floating_point())
        if not abs(one - two) <= min(200 * eps, 1e-3) * max(abs(one), abs(two), 1e-3):
            raise ValueError(
                f"two identical passes through batch {self.index} gave different losses ({one:.8g} and {two:.8g}): "
                "switch off dropout that ignores eval(), random augmentation and sampling inside the model or loss_fn"
            )
        if self.index > 0:  # of batch 0 all pieces were looked at
            self.objective.check_pieces(self.space.model, self.batch, all_of_them=False)

    def losses(self) -> Iterator[Tensor]:
        """Walk through the losses of the pieces, which add up to the batch's, with their graphs."""
        for weight, piece in self.pieces:
            yield self.objective(self.space.model, piece).loss * weight

    def _not_finite(self, value: float, xi: Tensor | None) -> ValueError:
        distance = 0.0 if xi is None else float(torch.linalg.vector_norm(xi))
        if distance == 0:
            return ValueError(
                f"the loss of batch {self.index} is {value}; look for NaN in the data, or labels out of range"
            )
        word = "NaN" if math.isnan(value) else "infinite"
        return RadiusError(
            f"the loss of batch {self.index} became {word} at a distance of {distance:.4g} from the weights; "
            "use a smaller rho"
        )


class Search:
    """Runs the units of work: (batch, radius, start), each independent of the others."""

    def __init__(
        self, space: WeightSpace, *, ascent: str, steps: int, tol: float, samples: int, seed: int, bar: Any
    ) -> None:
        self.space, self.how, self.ascend, self.bar = space, space.measure, ASCENTS[ascent], bar
        self.steps, self.tol, self.samples, self.seed = steps, tol, samples, seed
        self.gradient = space.empty()
        self.buffers = Buffers(self.gradient)

    def run(self, batch: BatchLoss, rho: float, start: int, *, last: bool) -> tuple[BatchResult, Tensor | None]:
        """Do one unit, the last of its batch or not; the worst vector comes with it where one is sought."""
        began = time.perf_counter()
        batch.worst_error, batch.passes = batch.base_error, 0
        if self.how.case == "gradient-norm":
            norm = float(torch.linalg.vector_norm(batch.base_gradient))
            return self._result(batch, rho, start, began, value=norm, history=(batch.base,)), None
        if self.how.case == "hessian":
            return self._hessian(batch, rho, start, began), None
        if self.how.case == "average":
            return self._average(batch, rho, start, began), None
        if last:  # nobody needs the gradient at the weights after this: work in its memory
            self.buffers.adopt(self.gradient)
        found = self._worst(batch, rho, start, began)
        if last:
            self.buffers.keep(found[1])
            self.gradient = self.buffers.take()
            self.buffers.give(self.gradient)
        return found

    def _result(self, batch: BatchLoss, rho: float, start: int, began: float, **found: Any) -> BatchResult:
        values: dict[str, Any] = {
            "batch": batch.index, "rho": rho, "start": start, "base_loss": batch.base, "worst_loss": batch.base,
            "base_error": batch.base_error, "worst_error": batch.worst_error, "random_start": False,
            # The pass at the weights is shared, but every unit needs it.
            "passes": batch.passes + 1, "gap": None, "converged": None, "spread": None, "trace": None, "leaving": 0,
            "distance": 0.0,
        }  # fmt: skip
        return BatchResult(**{**values, **found}, seconds=time.perf_counter() - began)

    def _hessian(self, batch: BatchLoss, rho: float, start: int, began: float) -> BatchResult:
        operator = HessianOperator(self.space, batch.losses)
        top = float(largest_eigenvalues(operator, seed=self.seed)[0])
        trace, spread = hutch_plus_plus(operator, self.samples, seed=self.seed)
        batch.passes += operator.products
        return self._result(batch, rho, start, began, value=top, history=(batch.base,), trace=trace, spread=spread)

    def _average(self, batch: BatchLoss, rho: float, start: int, began: float) -> BatchResult:
        losses = []
        for sample in range(self.samples):
            xi = self._random(batch, sample).mul_(rho)
            losses.append(batch(xi, None))
            self._show(rho, losses[-1], max(losses))
        mean = statistics.fmean(losses)
        spread = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
        return self._result(
            batch, rho, start, began, value=mean - batch.base, worst_loss=max(losses), history=tuple(losses),
            spread=spread,
        )  # fmt: skip

    def _random(self, batch: BatchLoss, number: int) -> Tensor:
        xi = self.space.random(_generator(self.seed, batch.index, number))
        if not bool(xi.any()):
            raise ValueError(
                "there is no direction to move in: all trainable weights are zero or belong to pairs of rank 0 "
                "(LoRA's B = 0 before training); measure a trained model"
            )
        return xi

    def _worst(self, batch: BatchLoss, rho: float, start: int, began: float) -> tuple[BatchResult, Tensor]:
        if rho > 0.1 * torch.finfo(self.space.dtype).max:
            raise RadiusError(f"rho = {rho:g} is beyond the numbers of {self.space.dtype}; use a smaller rho")
        ball: Ball = RoundBall(rho) if self.how.p == 2 else CubeBall(rho)
        flat = ball.reach(batch.base_gradient) <= 10 * torch.finfo(self.space.dtype).eps * abs(batch.base)
        self.buffers.keep(batch.base_gradient)
        xi, known = self.buffers.take(), None
        if start == 0 and not flat:
            xi.zero_()
            known = (batch.base, batch.base_gradient)
        else:
            ball.to_sphere_(xi.copy_(self._random(batch, start)))
        found = self._ascend(batch, xi, ball, known)
        if self.how.p == 2:
            found = self._inwards(batch, found, rho)
        point, value = found.point, found.value
        if value < batch.base:  # a start that never rose: the centre belongs to the ball
            point, value = point.zero_(), batch.base
        rise = value - batch.base
        leaving = 0
        if self.how.geodesic == "exact" and self.how.pairs == "mix":
            self.space.move_to(point)
            leaving = self.space.leaving()
        return self._result(
            batch, rho, start, began, value=rise, worst_loss=value, history=found.history, gap=found.gap,
            converged=found.converged, random_start=flat, leaving=leaving, distance=ball.norm(point),
        ), point  # fmt: skip

    def _ascend(self, batch: BatchLoss, xi: Tensor, ball: Ball, known: tuple[float, Tensor] | None) -> Ascent:
        found = self.ascend(
            batch, xi, ball, self.steps, tol=self.tol, base=batch.base, first=known, buffers=self.buffers,
            callback=lambda value, top: self._show(ball.radius, value, top),
        )  # fmt: skip
        self.bar.update(self.steps + 1 - len(found.history))
        return found

    def _inwards(self, batch: BatchLoss, found: Ascent, rho: float) -> Ascent:
        """Look for a larger loss inside the ball, on spheres of half the radius each, where the sphere shows there is.

        There is one where nothing rose, or the loss falls outwards at the best point: a bounded loss may oscillate.
        """
        ball = RoundBall(rho)
        if ball.norm(found.point) == 0:
            return found
        for _ in range(_HALVINGS):
            if found.value > batch.base and not (found.slope is not None and found.slope < 0):
                break
            ball = RoundBall(ball.radius / 2)
            if self.bar.total is not None:
                self.bar.total += self.steps
            self.buffers.keep()
            start = ball.to_sphere_(self.buffers.take().copy_(found.point))
            inner = self._ascend(batch, start, ball, None)
            better, worse = (inner, found) if inner.value > found.value else (found, inner)
            self.buffers.adopt(worse.point)
            if better is found and found.value > batch.base:
                break
            found = better
        return found

    def _show(self, rho: float, value: float, top: float) -> None:
        self.bar.update()
        self.bar.set_postfix(rho=rho, loss=f"{value:.4f}", best=f"{top:.4f}", refresh=False)
