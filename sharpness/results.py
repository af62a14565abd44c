"""What a measurement returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .direction import Direction
from .extras import require_extra
from .files import write_json
from .layers import LayerShares, layer_shares
from .measures import Measure

__all__ = ["BatchResult", "SharpnessResult"]


@dataclass(frozen=True)
class BatchResult:
    """What was found on one batch at one radius.

    Attributes
    ----------
    batch : int
        Position of the batch.
    rho : float
        0 for the gradient norm.
    start : int
        0 for the ascent from the weights, else the number of the random start that came out best.
    value : float
        The sharpness: worst loss minus base loss, mean perturbed loss minus base loss, the gradient's norm, or the
        Hessian's largest eigenvalue.
    base_loss, worst_loss : float
        Loss at the weights, and the largest that was met.
    base_error, worst_error : float or None
        Fraction of the batch that is classified wrongly: at the weights, and the largest at any point looked at. None
        where labels or scores are not known.
    random_start : bool
        The gradient at the weights was at rounding level, so the ascent began in a random direction.
    passes : int
        Passes through the model for the batch and radius, the one at the weights included.
    gap : float or None
        What a first-order step from the worst point still offers, see :class:`sharpness.ascent.Ascent`.
    converged : bool or None
        Whether that is below the tolerance; None if there was none.
    spread : float or None
        Standard error of an average over random directions, or of the trace.
    trace : float or None
        Estimate of the Hessian's trace.
    distance : float
        Of the worst point from the weights, in the metric (for p = inf in that norm): ρ, or less where the loss is
        larger inside the ball. 0 for what is no worst case.
    leaving : int
        Pairs whose exact mix geodesic would have left the manifold at the worst point, and was shortened.
    history : tuple of float
        Loss at every iterate of the best ascent, or in every random direction.
    seconds : float
        Wall time.

    Examples
    --------
    The loss at the weights, its worst rise, and where that ends:

    >>> import torch, sharpness
    >>> model, batch = torch.nn.Linear(2, 2, bias=False), (torch.eye(2), torch.tensor([0, 1]))
    >>> model.weight.data = torch.eye(2)
    >>> found = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.5).batches[0]
    >>> print(f"{found.base_loss:.3f} + {found.sharpness:.3f} = {found.worst_loss:.3f} in {found.passes} passes")
    0.313 + 0.108 = 0.421 in 2 passes
    """

    batch: int
    rho: float
    start: int
    value: float
    base_loss: float
    worst_loss: float
    base_error: float | None
    worst_error: float | None
    random_start: bool
    passes: int
    gap: float | None
    converged: bool | None
    spread: float | None
    trace: float | None
    distance: float
    leaving: int
    history: tuple[float, ...]
    seconds: float

    @property
    def sharpness(self) -> float:
        """The same as ``value``."""
        return self.value

    @property
    def error_increase(self) -> float | None:
        """Worst error minus base error."""
        if self.worst_error is None or self.base_error is None:
            return None
        return self.worst_error - self.base_error


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class SharpnessResult:
    r"""The sharpness of a model; ``print`` gives a table.

    Attributes
    ----------
    how : Measure
        The metric and retraction; ``measure`` and ``geodesic`` are its names.
    rhos : tuple of float
        The radii, in the order asked for.
    steps : int
        Upper bound on the steps of an ascent.
    tol : float
        What ended an ascent before that.
    ascent : str
        ``"power"`` or ``"apgd"``.
    restarts, samples, seed : int
        As :func:`sharpness.evaluate` had them.
    model : str
        Class of the model.
    weakest : float or None
        σ_h, the smallest singular value of any pair's G Hᴴ. The mix metric's ball stays on the manifold only while
        ρ < σ_h/√2; beyond that its value is set by the breakdown of the retraction.
    absent : int
        Directions of the pairs that count as absent (σ_i at rounding level).
    floored : int
        Directions of the pairs whose σ_i the metric's floor replaces.
    batches : tuple of BatchResult
        All batches at all radii.
    scalar : bool
        A single radius was asked for by a number.

    Examples
    --------
    The loss :math:`(w - 1)^2` at w = 2, over :math:`|ξ| \le ρ |w|`:

    >>> import torch, sharpness
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> model.weight.data.fill_(2.0)
    tensor([[2.]])
    >>> loss = lambda model, x: (model(x) - 1).square().sum()
    >>> print(sharpness.evaluate(model, [torch.ones(1, 1)], loss, measure="adaptive", rho=[0.1, 0.2]))
    adaptive sharpness of Linear: 1 batch, power ascent of 20 steps or until 0.0003 of the rise, seed 0
           rho   base loss  worst loss   sharpness        error rate   passes
           0.1     1.00000     1.44000     0.44000                 -      2.0
           0.2     1.00000     1.96000     0.96000                 -      2.0
    """

    how: Measure
    rhos: tuple[float, ...]
    steps: int
    tol: float
    ascent: str
    restarts: int
    samples: int
    seed: int
    model: str
    weakest: float | None
    absent: int
    floored: int
    batches: tuple[BatchResult, ...]
    scalar: bool
    _directions: dict[tuple[int, float], Direction] = field(default_factory=dict, repr=False, compare=False)

    @property
    def measure(self) -> str:
        """Name of the measure."""
        return self.how.name

    @property
    def geodesic(self) -> str:
        """How pairs move along a tangent vector."""
        return self.how.geodesic

    def at(self, rho: float) -> tuple[BatchResult, ...]:
        """List the batches at one radius.

        Parameters
        ----------
        rho : float
            One of :attr:`rhos`.

        Returns
        -------
        tuple of BatchResult

        Raises
        ------
        KeyError
            The radius was not measured.
        """
        rho = float(rho)
        found = tuple(b for b in self.batches if b.rho == rho)
        if not found:
            raise KeyError(f"rho = {rho} was not measured; the radii are {', '.join(map(str, self.rhos))}")
        return found

    def mean(self, rho: float) -> float:
        """Average the sharpness over the batches at one radius.

        Parameters
        ----------
        rho : float
            One of :attr:`rhos`.

        Returns
        -------
        float

        Raises
        ------
        KeyError
            The radius was not measured.
        """
        return _mean([b.sharpness for b in self.at(rho)])

    @property
    def value(self) -> float | dict[float, float]:
        """Mean sharpness over the batches; by radius if several were asked for."""
        values = {rho: self.mean(rho) for rho in self.rhos}
        return values[self.rhos[0]] if self.scalar else values

    @property
    def error_increase(self) -> float | dict[float, float] | None:
        """Mean over the batches of the largest rise of the error rate; None where labels are not known."""
        values = {}
        for rho in self.rhos:
            rises = [b.error_increase for b in self.at(rho)]
            known = [r for r in rises if r is not None]
            if len(known) < len(rises):
                return None
            values[rho] = _mean(known)
        return values[self.rhos[0]] if self.scalar else values

    @property
    def per_batch(self) -> tuple[BatchResult, ...] | dict[float, tuple[BatchResult, ...]]:
        """The batches; by radius if several were asked for."""
        return self.at(self.rhos[0]) if self.scalar else {rho: self.at(rho) for rho in self.rhos}

    def direction(self, batch_index: int, rho: float | None = None) -> Direction:
        """Give the worst tangent vector found for a batch.

        Parameters
        ----------
        batch_index : int
            Position of the batch.
        rho : float, optional
            Radius; may be left out if there is only one.

        Returns
        -------
        Direction
            For :func:`sharpness.perturbed`.

        Raises
        ------
        KeyError
            No such batch or radius, several radii and none named, or directions were not kept.
        """
        if rho is None:
            if len(self.rhos) > 1:
                raise KeyError(f"several radii were measured; name one of {', '.join(map(str, self.rhos))}")
            rho = self.rhos[0]
        found = self._directions.get((batch_index, rho))
        if found is None:
            raise KeyError(
                f"no direction for batch {batch_index} at rho = {rho}: there is no such measurement, or "
                "it was not kept; pass keep_directions=True"
            )
        return found

    def by_layer(self, rho: float | None = None) -> LayerShares:
        """Say which layers and heads the worst directions move: shares of their squared length.

        Parameters
        ----------
        rho : float, optional
            Radius; may be left out if there is only one.

        Returns
        -------
        LayerShares
            A row a head of every attention layer, and one a layer for its other weights, in the mean over the batches.
            ``print`` gives a table, :func:`sharpness.plots.plot_layers` a heat map.

        Raises
        ------
        KeyError
            As :meth:`direction`; a case without a worst direction.
        ValueError
            The loss did not rise at this radius.
        """
        if self.how.case != "worst":
            raise KeyError(f"there is no worst direction for case={self.how.case!r}")
        indices = dict.fromkeys(b.batch for b in self.batches)
        return layer_shares([self.direction(i, rho) for i in indices])

    def to_dict(self) -> dict[str, Any]:
        """Give everything but the directions as plain numbers, strings, lists and dicts."""
        rows = []
        for b in self.batches:
            row = asdict(b)
            row.update(sharpness=b.sharpness, error_increase=b.error_increase, history=list(b.history))
            rows.append(row)
        mean = {str(rho): self.mean(rho) for rho in self.rhos}
        return {
            **asdict(self.how),
            "measure": self.measure,
            "rho_over_weakest_singular_value": {str(rho): self._relative(rho) for rho in self.rhos},
            "weakest_singular_value": self.weakest,
            "absent_directions": self.absent,
            "floored_directions": self.floored,
            "model": self.model,
            "rho": list(self.rhos),
            "steps": self.steps,
            "tol": self.tol,
            "ascent": self.ascent,
            "restarts": self.restarts,
            "samples": self.samples,
            "seed": self.seed,
            "sharpness": mean,
            "batches": rows,
        }

    def _relative(self, rho: float) -> float | None:
        """ρ/σ_h."""
        return rho * self.how.metric_scale**-0.5 / self.weakest if self.weakest else None

    def to_dataframe(self) -> Any:
        """Give a pandas DataFrame with a row a batch and radius; columns are the fields of :class:`BatchResult`.

        Raises
        ------
        ImportError
            Without pandas, with the extra to install.
        """
        with require_extra("to_dataframe needs pandas", "plot"):
            import pandas as pd
        return pd.DataFrame([{"measure": self.measure, **row} for row in self.to_dict()["batches"]])

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file, which is replaced as a whole or not at all.

        Parameters
        ----------
        path : str or path
        """
        write_json(path, self.to_dict())

    def __str__(self) -> str:
        count = len(self.batches) // len(self.rhos)
        batches = f"{count} batch{'es' * (count > 1)}"
        how = self.how
        if how.case == "gradient-norm":
            return f"gradient norm of {self.model} in the metric of {self.measure}: {self.mean(0.0):.6g}, {batches}"
        if how.case == "hessian":
            trace = _mean([b.trace for b in self.batches if b.trace is not None])
            return (
                f"{self.measure} of {self.model}: largest eigenvalue {self.mean(0.0):.6g}, trace {trace:.6g}, {batches}"
            )
        lines = [f"{self.measure} sharpness of {self.model}: {batches}, {self._effort()}, seed {self.seed}"]
        switched = self._switches()
        if switched:
            lines.append(", ".join(switched))
        worst = "worst loss" if how.case == "worst" else "mean loss"
        lines.append(
            f"{'rho':>10}  {'base loss':>10}  {worst:>10}  {'sharpness':>10}  {'error rate':>16}  {'passes':>7}"
        )
        for rho in self.rhos:
            found = self.at(rho)
            base, value = _mean([b.base_loss for b in found]), self.mean(rho)
            errors = "-"
            if all(b.worst_error is not None for b in found):
                e0 = _mean([b.base_error or 0.0 for b in found])
                e1 = _mean([b.worst_error or 0.0 for b in found])
                errors = f"{e0:.1%} → {e1:.1%}"
            passes = _mean([b.passes for b in found])
            lines.append(
                f"{rho:>10.4g}  {base:>10.5f}  {base + value:>10.5f}  {value:>10.5f}  {errors:>16}  {passes:>7.1f}"
            )
        return "\n".join(lines + self._remarks())

    def _effort(self) -> str:
        if self.how.case == "average":
            return f"mean of {self.samples} Gaussian directions"
        stop = f" or until {self.tol:g} of the rise" if self.tol else ""
        starts = f", {self.restarts} restart{'s' * (self.restarts > 1)}" * bool(self.restarts)
        return f"{self.ascent} ascent of {self.steps} steps{stop}{starts}"

    def _switches(self) -> list[str]:
        """Name what of the measure is worth naming beside its name."""
        how, found = self.how, []
        if how.divides:
            found.append(f"{how.geodesic} geodesics")
        found += [
            f"{name}={getattr(how, name)!r}"
            for name in ("norm", "symmetry", "relaxation_kind", "p")
            if getattr(how, name) != Measure.__dataclass_fields__[name].default
        ]
        if how.relaxation != Measure.__dataclass_fields__["relaxation"].default:
            found.append(f"relaxation={how.relaxation:g}")
        return found

    def _remarks(self) -> list[str]:
        lines = []
        top = self._relative(max(self.rhos))
        if self.how.pairs == "mix" and top is not None:
            lines.append(f"largest rho over the smallest singular value of a pair: {top:.3g}")
            if top > 2**-0.5:
                lines.append(
                    "beyond 0.71 the ball of the mix metric leaves the manifold: the largest radii measure the "
                    "breakdown of its retraction, not the network"
                )
        if self.floored:
            lines.append(f"the metric's floor replaces {self.floored} singular values of pairs")
        if self.absent:
            lines.append(f"{self.absent} directions of pairs are at rounding level and count as absent")
        randoms = sum(b.random_start for b in self.batches)
        if randoms:
            lines.append(
                f"{randoms} of {len(self.batches)} ascents began in a random direction: the gradient at the weights "
                "was at rounding level"
            )
        leaving = sum(b.leaving > 0 for b in self.batches)
        if leaving:
            lines.append(
                f"{leaving} of {len(self.batches)} worst points have pairs whose geodesic would leave the manifold; "
                "it was shortened"
            )
        unfinished = sum(b.converged is False for b in self.batches)
        if unfinished:
            lines.append(
                f"{unfinished} of {len(self.batches)} ascents used all their steps; more may raise their value"
            )
        return lines
