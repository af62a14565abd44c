"""The search in the balls around the weights: the largest loss, or the mean loss in random directions."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .ascent import ASCENTS, Ascent
from .balls import Ball, RoundBall
from .batch_loss import BatchLoss, RadiusError
from .results import BatchResult
from .search import Search
from .space import WeightSpace
from .vectors import Buffers

__all__ = ["BallSearch"]

#: Number of times that the radius is halved to look for a larger loss inside the ball.
_HALVINGS = 12


class BallSearch:
    """Run the independent jobs of a batch, each a (radius, start), in shared memory."""

    def __init__(self, space: WeightSpace, search: Search, statistic: str, bar: Any) -> None:
        self.space, self.search, self.statistic, self.bar = space, search, statistic, bar
        vector = space.empty()
        self._buffers = Buffers(vector)
        self._buffers.adopt(vector)

    def new_gradient(self) -> Tensor:
        """Return memory for the next batch's gradient at the weights."""
        self._buffers.keep()
        gradient = self._buffers.take()
        self._buffers.give(gradient)
        return gradient

    def free(self, vector: Tensor) -> None:
        """Take back a vector that :meth:`run` returned."""
        self._buffers.adopt(vector)

    def run(self, batch: BatchLoss, rho: float, start: int, *, last: bool) -> tuple[BatchResult, Tensor | None]:
        """Do one job and return its result, with the worst vector where one is sought.

        ``last`` says that no other job of the batch follows, so the memory of its gradient may be reused.
        """
        began = time.perf_counter()
        batch.reset()
        if last:  # the gradient at the weights is not needed after this: reuse its memory
            self._buffers.adopt(batch.base_gradient)
        point, found = (self._worst if self.statistic == "worst" else self._average)(batch, rho, start)
        values: dict[str, Any] = {
            "batch": batch.index, "rho": rho, "start": start, "base_loss": batch.base, "base_error": batch.base_error,
            "worst_error": batch.worst_error, "random_start": False, "fw_gap": None, "converged": None,
            "std_error": None, "num_exited_pairs": 0, "distance": 0.0,
            # The pass at the weights is shared, but every job needs it.
            "passes": batch.passes + 1,
        }  # fmt: skip
        return BatchResult(**{**values, **found}, seconds=time.perf_counter() - began), point

    def _average(self, batch: BatchLoss, rho: float, start: int) -> tuple[None, dict[str, Any]]:
        losses = []
        for sample in range(self.search.num_samples):
            losses.append(batch(self._random(batch, sample).mul_(rho)))
            self._show(rho, losses[-1], max(losses))
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
        value = statistics.fmean(losses) - batch.base
        return None, {"value": value, "worst_loss": max(losses), "history": tuple(losses), "std_error": error}

    def _random(self, batch: BatchLoss, number: int) -> Tensor:
        entropy = (self.search.seed, batch.index, number)
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) % 2**63
        xi = self.space.random(torch.Generator().manual_seed(seed))
        if self.space.norm(xi) == 0:
            raise ValueError(
                "there is no direction to move in: all trainable weights are zero or belong to pairs of rank 0 "
                "(LoRA's B = 0 before training); measure a trained model"
            )
        return xi

    def _worst(self, batch: BatchLoss, rho: float, start: int) -> tuple[Tensor, dict[str, Any]]:
        info = torch.finfo(self.space.dtype)
        if rho > 0.1 * info.max:
            raise RadiusError(f"rho = {rho:g} is too large for {self.space.dtype}; use a smaller rho")
        ball = RoundBall(rho, self.space.world)
        flat = ball.linear_max(batch.base_gradient) <= 10 * info.eps * abs(batch.base)
        self._buffers.keep(batch.base_gradient)
        xi, known = self._buffers.take(), None
        if start == 0 and not flat:
            xi.zero_()
            known = (batch.base, batch.base_gradient)
        else:
            ball.to_sphere_(xi.copy_(self._random(batch, start)))
        found = self._inwards(batch, self._ascend(batch, xi, ball, known), rho)
        point, value = found.point, found.value
        if value < batch.base:  # the loss never rose from this start: the centre belongs to the ball
            point, value = point.zero_(), batch.base
        return point, {
            "value": value - batch.base, "worst_loss": value, "history": found.history, "fw_gap": found.fw_gap,
            "converged": found.converged, "random_start": flat, "distance": ball.norm(point),
            "num_exited_pairs": self.space.num_exited_pairs(point),
        }  # fmt: skip

    def _ascend(self, batch: BatchLoss, xi: Tensor, ball: Ball, known: tuple[float, Tensor] | None) -> Ascent:
        def f(x: Tensor, wanted: bool) -> tuple[float, Tensor | None]:
            return batch.with_gradient(x, self._buffers.take) if wanted else (batch(x), None)

        found = ASCENTS[self.search.ascent](
            f, xi, ball, self.search.steps, relative_tol=self.search.relative_tol, base=batch.base, first=known,
            buffers=self._buffers, callback=lambda value, top: self._show(ball.radius, value, top),
        )  # fmt: skip
        self.bar.update(self.search.steps + 1 - len(found.history))
        return found

    def _inwards(self, batch: BatchLoss, found: Ascent, rho: float) -> Ascent:
        """Look for a larger loss inside the ball, on spheres whose radius is halved each time.

        This is done if the loss rose nowhere on the sphere, or falls outwards at the best point: a bounded loss may
        oscillate.
        """
        ball = RoundBall(rho, self.space.world)
        if ball.norm(found.point) == 0:
            return found
        for _ in range(_HALVINGS):
            if found.value > batch.base and not (found.slope is not None and found.slope < 0):
                break
            ball = RoundBall(ball.radius / 2, self.space.world)
            if self.bar.total is not None:
                self.bar.total += self.search.steps
            self._buffers.keep()
            start = ball.to_sphere_(self._buffers.take().copy_(found.point))
            inner = self._ascend(batch, start, ball, None)
            better, worse = (inner, found) if inner.value > found.value else (found, inner)
            self._buffers.adopt(worse.point)
            if better is found and found.value > batch.base:
                break
            found = better
        return found

    def _show(self, rho: float, value: float, top: float) -> None:
        self.bar.update()
        self.bar.set_postfix(rho=rho, loss=f"{value:.4f}", best=f"{top:.4f}", refresh=False)
