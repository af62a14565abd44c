"""The mean loss in balls around the weights; the gradient norm and the Hessian at the weights themselves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from torch import Tensor, nn

from quotient_manifolds.linalg import as_count

from .evaluation import random_direction, show, statistic_of
from .losses import BatchLoss, LossFunction
from .measures import MEASURES, Measure, get_measure
from .results import SharpnessResult
from .statistic import BatchResult, Statistic

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
    work: ClassVar[tuple[int, int]] = (1, 1)

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
    work: ClassVar[tuple[int, int]] = (1, 1)

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
    (1, 5)
    """

    num_samples: int = 20
    seed: int = 0

    name: ClassVar[str] = "average"
    title: ClassVar[str] = "average sharpness"
    local: ClassVar[bool] = False
    nested: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", as_count("num_samples", self.num_samples))
        object.__setattr__(self, "seed", _seed(self.seed))

    @property
    def work(self) -> tuple[int, int]:
        """One start, and the number of directions."""
        return 1, self.num_samples

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


def average(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, num_samples: int = 20,
    seed: int = 0, **options: Any,
) -> SharpnessResult:  # fmt: skip
    r"""Measure the average sharpness of a model: by how much its loss rises in the mean over Gaussian directions.

    .. math:: \operatorname{mean}_{\text{batches}}\; \operatorname{mean}_{ξ \sim N(0, ρ^2)} L_{\text{batch}}(R_θ(ξ))
              - L_{\text{batch}}(θ)

    with independent coordinates in which the metric is the identity, each of standard deviation ρ.

    Parameters
    ----------
    model, batches, loss_fn, **options
        As :func:`evaluate` takes them: measure, rho, symmetries, micro_batch, group and so on.
    num_samples : int
        Number of directions, at one forward pass each.
    seed : int
        Seed of the directions, which depend only on (seed, batch, number of the direction).

    Returns
    -------
    SharpnessResult

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> result = sharpness.average(model, [batch], lambda f, x: f(x).square().sum(), measure="euclidean", rho=0.1)
    >>> len(result.batches[0].history)
    20
    """
    return statistic_of(Average(num_samples, seed), model, batches, loss_fn, **options)


def gradient_norm(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, **options: Any
) -> SharpnessResult:
    """Measure the length of the loss's gradient in a metric: the limit of sharpness/ρ for small ρ.

    Of several batches it is the mean of their lengths, not the length of the mean gradient, which is that of one batch
    of all examples; ``micro_batch`` divides it into passes.

    Parameters
    ----------
    model, batches, loss_fn, **options
        As :func:`evaluate` takes them: measure, symmetries, micro_batch, group and so on.

    Returns
    -------
    SharpnessResult

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    >>> float(sharpness.gradient_norm(model, [batch], lambda f, x: f(x).sum(), measure="euclidean"))
    5.0
    """
    return statistic_of(GradientNorm(), model, batches, loss_fn, **options)


def hessian(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, num_matvecs: int = 20, *,
    seed: int = 0, **options: Any,
) -> SharpnessResult:  # fmt: skip
    """Measure the largest eigenvalue and the trace of the Riemannian Hessian (``"euclidean"``: of the ordinary one).

    Of several batches it is the mean of their largest eigenvalues, which is at least that of the mean loss. For the
    latter pass one batch of all examples; ``micro_batch`` divides it into passes.

    Parameters
    ----------
    model, batches, loss_fn, **options
        As :func:`evaluate` takes them: measure, symmetries, micro_batch, group and so on.
    num_matvecs : int
        Products with the Hessian for its trace, rounded down to a multiple of 3.
    seed : int
        Seed of the random vectors.

    Returns
    -------
    SharpnessResult
        ``float(result)`` is the eigenvalue, ``result.trace`` the trace with ``result.std_error``.

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> loss = lambda f, x: (f(x)[0] - 2 * f(x)[1]).square().sum() / 2
    >>> result = sharpness.hessian(model, [batch], loss, measure="euclidean")
    >>> round(float(result), 4), round(result.trace, 4)
    (5.0, 5.0)
    """
    return statistic_of(Curvature(num_matvecs, seed), model, batches, loss_fn, **options)


#: Quantities at the weights by their names in ``sharpness run`` and sweeps: the measure, and the statistic for a seed.
LOCAL: dict[str, tuple[str, Callable[[int], Statistic]]] = {
    "gradient-norm": ("geodesic-inv", lambda _: GradientNorm()),
    "riemannian-hessian": ("geodesic-inv", lambda seed: Curvature(seed=seed)),
    "euclidean-hessian": ("euclidean", lambda seed: Curvature(seed=seed)),
}


def measure_of(name: str) -> Measure:
    """Return the measure with a name in MEASURES or LOCAL."""
    if name not in MEASURES and name not in LOCAL:
        close = "".join(f" (did you mean {other}?)" for other in get_close_matches(name, [*MEASURES, *LOCAL], 1))
        raise ValueError(f"unknown measure {name!r}{close}; choose one of {', '.join([*MEASURES, *LOCAL])}")
    return get_measure(LOCAL[name][0] if name in LOCAL else name)
