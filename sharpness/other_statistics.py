"""The mean loss in balls around the weights; the gradient norm and the Hessian at the weights themselves."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from quotient_manifolds.linalg import as_count

from .batch_loss import BatchLoss
from .statistic import BatchResult, random_direction, show

__all__ = ["Average", "AverageResult", "Curvature", "CurvatureResult", "GradientNorm"]


@dataclass(frozen=True, kw_only=True)
class AverageResult(BatchResult):
    """The mean loss of a batch over random directions.

    Attributes
    ----------
    history : tuple of float
        Loss in every direction.
    std_error : float or None
        Standard error of the mean; None of a single direction.
    """

    history: tuple[float, ...]
    std_error: float | None


@dataclass(frozen=True, kw_only=True)
class CurvatureResult(BatchResult):
    """The largest eigenvalue of the Hessian of a batch.

    Attributes
    ----------
    trace : float
        An estimate of the Hessian's trace.
    std_error : float or None
        Standard error of the trace; None from a single random vector.
    """

    trace: float
    std_error: float | None


@dataclass(frozen=True)
class GradientNorm:
    """The length of the loss's gradient.

    Examples
    --------
    >>> GradientNorm().local, GradientNorm().title
    (True, 'gradient norm')
    """

    name: ClassVar[str] = "gradient norm"
    title: ClassVar[str] = "gradient norm"
    local: ClassVar[bool] = True
    nested: ClassVar[bool] = False
    starts: ClassVar[int] = 1
    work: ClassVar[int] = 1

    def measure(
        self, loss: BatchLoss, rho: float, start: int, bar: Any, *, last: bool
    ) -> tuple[BatchResult, Tensor | None]:
        """Return the length."""
        bar.update()
        return BatchResult(**loss.known, rho=rho, value=loss.slope, worst_loss=loss.base), None


@dataclass(frozen=True)
class Curvature:
    """The largest eigenvalue of the Riemannian Hessian, and its trace.

    Attributes
    ----------
    num_matvecs : int
        Products for the trace, rounded down to a multiple of 3.
    seed : int
        Seed of the random vectors.

    Examples
    --------
    >>> Curvature(num_matvecs=9)
    Curvature(num_matvecs=9, seed=0)
    """

    num_matvecs: int = 20
    seed: int = 0

    name: ClassVar[str] = "Hessian"
    title: ClassVar[str] = "largest eigenvalue"
    local: ClassVar[bool] = True
    nested: ClassVar[bool] = False
    starts: ClassVar[int] = 1
    work: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_matvecs", as_count("num_matvecs", self.num_matvecs))
        object.__setattr__(self, "seed", _seed(self.seed))

    def measure(
        self, loss: BatchLoss, rho: float, start: int, bar: Any, *, last: bool
    ) -> tuple[BatchResult, Tensor | None]:
        """Find both by products with the Hessian."""
        from .curvature import HessianOperator

        operator = HessianOperator(loss.space, loss.losses)
        value = operator.largest_eigenvalue(seed=self.seed)
        trace, error = operator.trace(self.num_matvecs, seed=self.seed)
        bar.update()
        known = {**loss.known, "rho": rho, "worst_loss": loss.base}
        return CurvatureResult(**known, value=value, trace=trace, std_error=error), None


@dataclass(frozen=True)
class Average:
    """The mean loss over Gaussian directions, whose coordinates have the standard deviation ρ.

    Attributes
    ----------
    num_samples : int
        Number of directions, at one forward pass each.
    seed : int
        Seed of the directions, which depend only on (seed, batch, number of the direction).

    Examples
    --------
    >>> Average(num_samples=5).work
    5
    """

    num_samples: int = 20
    seed: int = 0

    name: ClassVar[str] = "average"
    title: ClassVar[str] = "average sharpness"
    local: ClassVar[bool] = False
    nested: ClassVar[bool] = False
    starts: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", as_count("num_samples", self.num_samples))
        object.__setattr__(self, "seed", _seed(self.seed))

    @property
    def work(self) -> int:
        """Number of directions."""
        return self.num_samples

    def measure(
        self, loss: BatchLoss, rho: float, start: int, bar: Any, *, last: bool
    ) -> tuple[BatchResult, Tensor | None]:
        """Average the loss."""
        losses = list[float]()
        loss.forget_errors()
        for sample in range(self.num_samples):
            losses.append(loss(random_direction(loss, self.seed, sample).mul_(rho)))
            show(bar, rho, losses)
        value = statistics.fmean(losses) - loss.base
        error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
        known = {**loss.known, "rho": rho, "worst_loss": max(losses), "history": tuple(losses)}
        return AverageResult(**known, value=value, std_error=error), None


def _seed(seed: Any) -> int:
    return as_count("seed", seed, least=0, most=2**63)
