"""Sharpness while a network trains: numbers with names for a log; the training is the same as without them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.linalg import as_count
from quotient_manifolds.passes import drawing_again
from quotient_manifolds.weights import trained, weights_of

from .critical import critical_sharpness
from .errors import words_of
from .evaluation import Worst, statistic_of
from .losses import LossFunction, Objective, as_list
from .measures import MEASURES, Measure, Search, checked_radii, get_measure
from .other_statistics import LOCAL, Curvature
from .statistic import Statistic

#: What is measured along the last step of the optimiser.
ALONG = ("critical", "critical-relative")
#: What is measured by default.
QUANTITIES = ("geodesic-inv", "critical")
#: Options of ``evaluate`` that do not belong to its search.
_OWN = ("symmetries", "micro_batch")


def measured(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *,
    quantities: Iterable[str | Measure] = QUANTITIES, before: Mapping[str, Tensor] | None = None,
    other: Iterable[Any] | None = None, **options: Any,
) -> dict[str, float]:  # fmt: skip
    """Measure a network that is being trained, and name the numbers for a log.

    Parameters
    ----------
    model : nn.Module
        As after a step of the optimiser.
    batches, loss_fn
        As :func:`evaluate` takes them.
    quantities : iterable of str or Measure
        ``"geodesic-inv"`` or another measure, with its own radius or one after an @, ``"adaptive@0.2"``;
        ``"gradient-norm"``, ``"riemannian-hessian"``, ``"euclidean-hessian"`` (the largest eigenvalue); ``"critical"``
        and ``"critical-relative"``, see :func:`critical_sharpness`.
    before : mapping of str to Tensor, optional
        Weights before the step, for the latter two, which are left out without it.
    other : iterable, optional
        Batches of other data, for ``"critical-relative"``: their loss along the same step.
    **options
        Of :func:`evaluate`: symmetries, micro_batch, and for measures with a radius those of :class:`Search`.

    Returns
    -------
    dict of str to float
        By names such as ``"sharpness/geodesic-inv@0.1"``, always with the radius, and ``"sharpness/critical"``. What
        does not exist, such as the critical sharpness of a step of length zero, is left out.

    Raises
    ------
    ValueError
        As the functions raise it, or a quantity is unknown.

    Notes
    -----
    Random generators of torch, NumPy and Python, modes, gradients and buffers are afterwards as before.

    Examples
    --------
    >>> import copy, torch, sharpness
    >>> model, batch = torch.nn.Linear(2, 2), (torch.randn(9, 2), torch.arange(9) % 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    >>> before = copy.deepcopy(model.state_dict())
    >>> optimizer.step()
    >>> list(sharpness.measured(model, [batch], quantities=["adaptive@0.2", "critical"], before=before))
    ['sharpness/adaptive@0.2', 'sharpness/critical']
    """
    monitor = Monitor(batches, loss_fn, quantities=quantities, other=other, **options)
    with undrawn():
        return _named((q.name, monitor.value(q, model, before)) for q in monitor.quantities)


def _named(values: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Give values the names that they have in a log, and leave out those that do not exist."""
    return {f"sharpness/{name}": value for name, value in values if value is not None}


@dataclass(frozen=True)
class Quantity:
    """What is measured: its name in a log, and what ``evaluate`` takes; without a measure it is along a step."""

    name: str
    measure: Measure | None = None
    statistic: Statistic | None = None
    rho: float | None = None


def _quantity(given: str | Measure, search: Search) -> Quantity:
    """Read the name of a quantity."""
    if isinstance(given, Measure):
        name, at, radius = given.name, "", ""
    else:
        name, at, radius = str(given).partition("@")
        if given in ALONG:
            return Quantity(given)
        if given in LOCAL:
            statistic = LOCAL[given][1](search.seed)
            if isinstance(statistic, Curvature):  # whose trace is not logged
                statistic = replace(statistic, num_matvecs=3)
            return Quantity(given, get_measure(LOCAL[given][0]), statistic)
        if name not in MEASURES:
            every = ", ".join([*MEASURES, *LOCAL, *ALONG])
            raise ValueError(f"unknown quantity {given!r}; choose of {every}; measures may have a radius, adaptive@0.2")
    measure = given if isinstance(given, Measure) else get_measure(name)
    (rho,) = checked_radii(measure, [radius] if at else None)  # type: ignore[list-item]
    return Quantity(f"{name}@{rho:g}", measure, Worst(search), rho)


@contextmanager
def undrawn() -> Iterator[None]:
    """Put the generators of Python, NumPy and torch back: data that are read may draw from them."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with drawing_again(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class Monitor:
    """What is measured in a training, on which batches, and after which steps: what callbacks share.

    ``every`` is a number of steps; by None it is measured at each evaluation. Batches are read once, so that all
    values are of the same data. The first measurement raises what is wrong; later ones warn, and leave a gap.
    """

    def __init__(
        self, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, every: int | None = None,
        quantities: Iterable[str | Measure] = QUANTITIES, other: Iterable[Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.every = None if every is None else as_count("every", every)
        search = Search(**{k: v for k, v in options.items() if k not in _OWN})
        self.quantities = _quantities(quantities, search, relative=other is not None)
        self.loss_fn, self.micro_batch = loss_fn, options.get("micro_batch")
        self.own = {k: v for k, v in options.items() if k in _OWN}
        Objective(loss_fn, self.micro_batch)  # what is wrong is said now
        self.along = any(q.name in ALONG for q in self.quantities)
        with undrawn():
            self.batches = as_list(batches)
            self.other = [] if other is None else as_list(other)
        self.start(0)

    def value(
        self, quantity: Quantity, model: nn.Module, before: Mapping[str, Tensor] | None, *, progress: bool = False
    ) -> float | None:
        """Measure one quantity; those that take long show their progress."""
        if quantity.statistic is not None and quantity.measure is not None:
            return float(statistic_of(
                quantity.statistic, model, self.batches, self.loss_fn, measure=quantity.measure, rho=quantity.rho,
                keep_directions=False, progress=progress, **self.own,
            ))  # fmt: skip
        if before is None:
            return None
        batches = self.batches if quantity.name == "critical" else self.other
        return critical_sharpness(model, batches, self.loss_fn, before=before, micro_batch=self.micro_batch)

    def start(self, step: int) -> None:
        """Begin a training that has made so many steps."""
        self._last, self._worked = step if self.every else -1, False
        self._before: dict[str, Tensor] | None = None

    def end(self, step: int) -> None:
        """End a training, and forget its last step: the weights may be those of the best checkpoint now."""
        if not self._worked:
            why = "there was no evaluation" if self.every is None else f"it ended before {self.every} steps"
            warnings.warn(f"nothing was measured in this training: {why}; pass a smaller every", stacklevel=3)
        self.start(step)

    def due(self, step: int) -> bool:
        """Whether to measure after so many steps; where optimisers take turns, these may pass the number."""
        return self.every is not None and step // self.every > self._last // self.every

    def due_at_evaluation(self, step: int) -> bool:
        """Whether to measure at an evaluation, once even if it is of several data sets."""
        return self.every is None and step != self._last

    def before_step(self, model: nn.Module, step: int) -> None:
        """Copy the weights before a step if it may be measured; of several optimisers' steps, before the first."""
        if self.along and (self.every is None or (self._before is None and self.due(step + 1))):
            self._before = {name: p.detach().clone() for name, p in trained(weights_of(model)).items()}

    def after_step(self, model: nn.Module, step: int, *, progress: bool = False) -> dict[str, float]:
        """Measure after a number of steps, with a line of progress below that of the training."""
        before, self._before, self._last = self._before, None, step
        found: list[tuple[str, float | None]] = []
        for quantity in self.quantities:
            try:
                with undrawn():
                    found.append((quantity.name, self.value(quantity, model, before, progress=progress)))
            except ValueError as error:
                if not self._worked:
                    raise
                warnings.warn(f"{quantity.name} was not measured at step {step}: {words_of(error)}", stacklevel=2)
        self._worked = True
        return _named(found)


def _quantities(given: Iterable[str | Measure], search: Search, *, relative: bool) -> list[Quantity]:
    """Read the names of quantities; other data belong to the relative one."""
    if isinstance(given, (str, Measure)):
        raise ValueError(f"quantities is the single {given!r}; wrap it in a list")
    found = [_quantity(q, search) for q in given]
    names = {q.name for q in found}
    if not names:
        raise ValueError("quantities is empty; name at least one, such as 'geodesic-inv'")
    if ("critical-relative" in names) != relative:
        raise ValueError("'critical-relative' is measured on other data: pass both this name and other=batches")
    return found
