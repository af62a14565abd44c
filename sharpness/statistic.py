"""Statistics of a loss in balls around the weights, or at the weights themselves, and what each finds on a batch."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.linalg import as_count

from .batch_loss import BatchLoss
from .errors import blocks

__all__ = ["Average", "AverageResult", "Curvature", "CurvatureResult", "GradientNorm", "Statistic"]


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The result on one batch at one radius, or at the weights themselves (radius 0): of the gradient norm, its value.

    Attributes
    ----------
    batch : int
        Position of the batch.
    rho : float
        Radius of the ball; 0 for the gradient norm and the Hessian.
    value : float
        The sharpness: the worst or the mean perturbed loss, minus the base loss; or the gradient norm, or the largest
        eigenvalue of the Hessian.
    base_loss, worst_loss : float
        Loss at the weights, and the largest loss found.
    base_error, worst_error : float or None
        Fraction of the batch that is misclassified: at the weights, and the largest at any point evaluated. None if
        labels or scores are not known.
    passes : int
        Passes through the model for the batch and radius, including the one at the weights; a product with the Hessian
        counts as one.
    seconds : float
        Wall time.

    Examples
    --------
    The loss at the weights, how far it rises, and where that ends:

    >>> import torch, sharpness
    >>> model, batch = torch.nn.Linear(2, 2, bias=False), (torch.eye(2), torch.tensor([0, 1]))
    >>> model.weight.data = torch.eye(2)
    >>> found = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.5).batches[0]
    >>> print(f"{found.base_loss:.3f} + {found.value:.3f} = {found.worst_loss:.3f} in {found.passes} passes")
    0.313 + 0.108 = 0.421 in 2 passes
    """

    batch: int
    rho: float
    value: float
    base_loss: float
    worst_loss: float
    base_error: float | None
    worst_error: float | None = None
    passes: int = 1
    seconds: float = 0.0

    def inside(self, rho: float) -> BatchResult:
        """Return what it says of a larger ball around its own."""
        return replace(self, rho=rho)


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


class Statistic(Protocol):
    """What is measured on every batch.

    Attributes
    ----------
    name, title : str
        In files and messages; and before a number that is shown.
    local : bool
        It is that at the weights, without a radius.
    nested : bool
        What is found in a ball counts in a larger one.
    starts : int
        Number of times that it is measured at a radius; the largest value counts.
    work : int
        Steps that a progress bar shows for a radius.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    local: ClassVar[bool]
    nested: ClassVar[bool]

    @property
    def starts(self) -> int: ...  # noqa: D102

    @property
    def work(self) -> int: ...  # noqa: D102

    def measure(
        self, loss: BatchLoss, rho: float, start: int, bar: Any, *, last: bool
    ) -> tuple[BatchResult, Tensor | None]:
        """Measure it on a batch, and return where it was found too; it may be the batch's last start and radius."""
        ...


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
        return BatchResult(**known_of(loss, rho), value=loss.slope, worst_loss=loss.base), None


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
        known = known_of(loss, rho)
        return CurvatureResult(**known, value=value, worst_loss=loss.base, trace=trace, std_error=error), None


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
        known = {**known_of(loss, rho), "worst_loss": max(losses), "history": tuple(losses)}
        return AverageResult(**known, value=value, std_error=error), None


def known_of(loss: BatchLoss, rho: float) -> dict[str, Any]:
    """Return what every result on a batch says."""
    return {"batch": loss.index, "rho": rho, "base_loss": loss.base, "base_error": loss.base_error}


def random_direction(loss: BatchLoss, seed: int, number: int) -> Tensor:
    """Draw the direction of a number, which is another one for each batch."""
    entropy = (seed, loss.index, number)
    own = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) % 2**63
    xi = loss.space.random(torch.Generator().manual_seed(own))
    if loss.space.norm(xi) == 0:
        raise ValueError(
            "there is no direction to move in: all trainable weights are zero or belong to pairs of rank 0 "
            "(LoRA's B = 0 before training); measure a trained model"
        )
    return xi


def show(bar: Any, rho: float, losses: list[float]) -> None:
    """Show the best loss of a radius, and the last ones."""
    bar.update()
    if not bar.disable:
        bar.set_postfix_str(f"rho={rho:g}, best={max(losses):.4f} {blocks(losses[-20:], min(losses))}", refresh=False)


def _seed(seed: Any) -> int:
    return as_count("seed", seed, least=0, most=2**63)
