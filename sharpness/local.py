"""Measures at the weights themselves, without a radius: the gradient's length, and the Hessian."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import nn

from quotient_manifolds.checks import as_count
from quotient_manifolds.symmetries import SymmetricPair
from quotient_manifolds.symmetries.modules import plain_class

from .batch_loss import BatchLoss, for_each_batch
from .curvature import HessianOperator, hutchpp_trace, largest_eigenvalues
from .distributed import World
from .files import write_json
from .losses import LossFunction, Objective
from .measures import MEASURES, Measure, get_measure
from .space import WeightSpace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LOCAL", "LocalBatch", "LocalResult", "gradient_norm", "hessian", "measure_of"]


@dataclass(frozen=True)
class LocalBatch:
    """Results at the weights on one batch.

    Attributes
    ----------
    batch : int
        Position of the batch.
    base_loss : float
    base_error : float or None
        Fraction of the batch that is misclassified; None if labels or scores are not known.
    gradient_norm : float
        Length of the loss's gradient in the metric, the limit of sharpness/ρ for small ρ.
    max_eigenvalue, trace, std_error : float or None
        Largest eigenvalue and trace of the Hessian in the metric, and the standard error of the trace.
    passes : int
        Passes through the model; a product with the Hessian counts as one.
    seconds : float
        Wall time.

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> found = sharpness.gradient_norm(model, [batch], lambda f, x: 3 * f(x).sum(), measure="euclidean")
    >>> found.batches[0].gradient_norm
    3.0
    """

    batch: int
    base_loss: float
    base_error: float | None
    gradient_norm: float
    max_eigenvalue: float | None
    trace: float | None
    std_error: float | None
    passes: int
    seconds: float


@dataclass(frozen=True)
class LocalResult:
    """Results at a model's weights, averaged over batches; ``print`` shows one line.

    Attributes
    ----------
    measure : Measure
        The measure whose metric is used.
    model : str
        Class of the model.
    batches : tuple of LocalBatch
    remarks : tuple of str
        As in :class:`sharpness.SharpnessResult`.

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    >>> print(sharpness.hessian(model, [batch], lambda f, x: f(x).square().sum(), measure="euclidean"))
    euclidean Hessian of Linear: largest eigenvalue 2, trace 2 ± 0, 1 batch
    """

    measure: Measure
    model: str
    batches: tuple[LocalBatch, ...]
    remarks: tuple[str, ...] = ()

    @property
    def gradient_norm(self) -> float:
        """Length of the gradient in the metric."""
        return fmean(b.gradient_norm for b in self.batches)

    @property
    def max_eigenvalue(self) -> float | None:
        """Largest eigenvalue of the Hessian; None if it was not computed."""
        found = [b.max_eigenvalue for b in self.batches if b.max_eigenvalue is not None]
        return fmean(found) if found else None

    @property
    def trace(self) -> float | None:
        """Estimate of the Hessian's trace; None if it was not computed."""
        found = [b.trace for b in self.batches if b.trace is not None]
        return fmean(found) if found else None

    @property
    def std_error(self) -> float | None:
        """Standard error of the trace's estimate, at most: the batches share the random vectors; None without one."""
        found = [b.std_error for b in self.batches if b.std_error is not None]
        return fmean(found) if found else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, strings, lists and dicts."""
        means = {name: getattr(self, name) for name in ("gradient_norm", "max_eigenvalue", "trace", "std_error")}
        lists = {"batches": [asdict(b) for b in self.batches], "remarks": list(self.remarks)}
        return {**asdict(self), **means, **lists}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file, which is replaced completely or not at all.

        Parameters
        ----------
        path : str or path
        """
        write_json(path, self.to_dict())

    def __str__(self) -> str:
        batches = f"{len(self.batches)} batch{'es' * (len(self.batches) > 1)}"
        if self.trace is None:
            metric = f"in the metric of {self.measure.name}"
            line = f"gradient norm of {self.model} {metric}: {self.gradient_norm:.6g}, {batches}"
        else:
            line = (
                f"{self.measure.name} Hessian of {self.model}: largest eigenvalue {self.max_eigenvalue:.6g}, "
                f"trace {self.trace:.6g} ± {self.std_error or 0.0:.2g}, {batches}"
            )
        return "\n".join([line, *self.remarks])


def gradient_norm(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    measure: str | Measure = "geodesic-inv", pairs: Sequence[SymmetricPair] | None = None,
    normalize_logits: bool = False, micro_batch: int | None = None, group: ProcessGroup | None = None,
) -> LocalResult:  # fmt: skip
    """Measure the length of the loss's gradient in a metric: the limit of sharpness/ρ for small ρ.

    Parameters
    ----------
    model, batches, loss_fn, measure, pairs, normalize_logits, micro_batch, group
        As :func:`sharpness.evaluate` takes them.

    Returns
    -------
    LocalResult

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    >>> sharpness.gradient_norm(model, [batch], lambda f, x: f(x).sum(), measure="euclidean").gradient_norm
    5.0
    """
    objective = Objective(loss_fn, normalize_logits, micro_batch)
    return _at_the_weights(model, batches, objective, get_measure(measure), pairs, group, lambda batch: {})


def hessian(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    measure: str | Measure = "geodesic-inv", num_matvecs: int = 20, seed: int = 0,
    pairs: Sequence[SymmetricPair] | None = None, normalize_logits: bool = False, micro_batch: int | None = None,
    group: ProcessGroup | None = None,
) -> LocalResult:  # fmt: skip
    """Measure the largest eigenvalue and the trace of the Riemannian Hessian, see :mod:`sharpness.curvature`.

    Parameters
    ----------
    model, batches, loss_fn, measure, pairs, normalize_logits, micro_batch, group
        As :func:`sharpness.evaluate` takes them.
    num_matvecs : int
        Products with the Hessian for its trace, rounded down to a multiple of 3.
    seed : int
        Seed of the random vectors.

    Returns
    -------
    LocalResult

    Raises
    ------
    ValueError
        As for :func:`sharpness.evaluate`; or ``num_matvecs`` is below 1, or the seed is negative.

    Notes
    -----
    Computed by Lanczos' method and Hutch++; with ``measure="euclidean"`` the results are those of the ordinary Hessian.

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> loss = lambda f, x: (f(x)[0] - 2 * f(x)[1]).square().sum() / 2
    >>> found = sharpness.hessian(model, [batch], loss, measure="euclidean")
    >>> round(found.max_eigenvalue, 4), round(found.trace, 4)
    (5.0, 5.0)
    """
    measure = get_measure(measure)
    num_matvecs, seed = as_count("num_matvecs", num_matvecs), as_count("seed", seed, least=0, most=2**63)
    if measure.divides and measure.geodesic == "exact":  # the same Hessian
        measure = replace(measure, geodesic="second-order")

    def of_batch(batch: BatchLoss) -> dict[str, Any]:
        operator = HessianOperator(batch.space, batch.losses)
        top = float(largest_eigenvalues(operator, seed=seed)[0])
        trace, std_error = hutchpp_trace(operator, num_matvecs, seed=seed)
        passes = batch.passes + operator.num_matvecs
        return {"max_eigenvalue": top, "trace": trace, "std_error": std_error, "passes": passes}

    objective = Objective(loss_fn, normalize_logits, micro_batch)
    return _at_the_weights(model, batches, objective, measure, pairs, group, of_batch)


def _at_the_weights(
    model: nn.Module, batches: Iterable[Any], objective: Objective, measure: Measure,
    pairs: Sequence[SymmetricPair] | None, group: ProcessGroup | None, more: Callable[[BatchLoss], dict[str, Any]],
) -> LocalResult:  # fmt: skip
    if measure.ball_norm != 2:
        raise ValueError(f"the measure {measure.name!r} defines no length of vectors; use one with ball_norm=2")
    found: list[LocalBatch] = []

    def work(space: WeightSpace, index: int, batch: Any, mine: list[int]) -> None:
        began = time.perf_counter()
        loss = BatchLoss(space, objective, batch, index)
        values: dict[str, Any] = {
            "batch": index, "base_loss": loss.base, "base_error": loss.base_error,
            "gradient_norm": space.norm(loss.base_gradient), "passes": loss.passes,
            "max_eigenvalue": None, "trace": None, "std_error": None,
        }  # fmt: skip
        values |= more(loss)
        found.append(LocalBatch(**values, seconds=time.perf_counter() - began))

    with World(group).losing_others():
        space, world = for_each_batch(model, batches, measure, objective, work, pairs=pairs, group=group)
        shares = world.gather([(found, space.unreached())])
        found = sorted((b for mine, _ in shares for b in mine), key=lambda b: b.batch)
        remarks = space.without_gradient(set.intersection(*(unreached for _, unreached in shares)))
    return LocalResult(measure, plain_class(model).__name__, tuple(found), (*space.remarks, *remarks))


#: Quantities besides the measures in ``sharpness run`` and sweeps, by name: the function and its measure.
LOCAL: dict[str, tuple[Callable[..., LocalResult], str]] = {
    "gradient-norm": (gradient_norm, "geodesic-inv"),
    "riemannian-hessian": (hessian, "geodesic-inv"),
    "euclidean-hessian": (hessian, "euclidean"),
}


def measure_of(name: str, **changes: Any) -> Measure:
    """Return the measure with a name in MEASURES or LOCAL, with some fields changed."""
    if name not in MEASURES and name not in LOCAL:
        raise ValueError(f"unknown measure {name!r}; choose one of {', '.join([*MEASURES, *LOCAL])}")
    return get_measure(LOCAL[name][1] if name in LOCAL else name, **changes)
