"""What is measured on every batch, and the results on it.

:mod:`sharpness.evaluation` has the largest loss in a ball, :mod:`sharpness.other_statistics` the mean loss, the
gradient norm, and the Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from .losses import BatchLoss

__all__ = ["BatchResult", "Statistic", "WorstResult"]


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
    work : tuple of int and int
        Number of starts at a radius, of which the largest value counts; and steps of each, for a progress bar.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    local: ClassVar[bool]
    nested: ClassVar[bool]

    @property
    def work(self) -> tuple[int, int]: ...  # noqa: D102

    def measure(
        self, loss: BatchLoss, rho: float, start: int, bar: Any, *, last: bool
    ) -> tuple[BatchResult, Tensor | None]:
        """Measure it on a batch, and return where it was found too; it may be the batch's last start and radius."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorstResult(BatchResult):
    """The largest loss of a batch in a ball.

    Attributes
    ----------
    history : tuple of float
        Loss at every iterate of the best ascent.
    distance : float
        Distance of the worst point from the weights, in the ball's norm: ρ, or less where the loss is larger inside the
        ball.
    random_start : bool
        The gradient at the weights was zero to within rounding, so the ascent began in a random direction.
    fw_gap : float or None
        Frank–Wolfe gap: the first-order estimate of what a further step from the worst point can gain, see
        :class:`sharpness.ascent.Ascent`. None if it is not known, as for a worst point found in a smaller ball.
    converged : bool or None
        Whether the gap is known to be below the tolerance; None without a tolerance.
    num_exited_pairs : int
        Number of pairs whose exact mix geodesic to the worst point would have left the manifold and was shortened.
    """

    history: tuple[float, ...]
    distance: float
    random_start: bool
    fw_gap: float | None
    converged: bool | None
    num_exited_pairs: int

    def inside(self, rho: float) -> WorstResult:
        """Return what it says of a larger ball: how far the search got in its own says nothing of that."""
        return replace(self, rho=rho, fw_gap=None, converged=None if self.converged is None else False)
