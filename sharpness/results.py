"""What a measurement returns."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .measures import Measure
from .space import Direction

__all__ = ["BatchResult", "SharpnessResult"]


@dataclass(frozen=True)
class BatchResult:
    """The ascent on one batch at one radius.

    Attributes
    ----------
    batch : int
        Position of the batch.
    rho : float
    base_loss, worst_loss : float
        Loss at the weights, and the largest found in the ball.
    sharpness : float
        Their difference, ≥ 0.
    base_error, worst_error : float or None
        Fraction of the batch that is classified wrongly: at the weights, and the largest at any iterate. None where
        labels or scores are not known.
    random_start : bool
        The gradient at the weights was at rounding level, so the ascent began in a random direction.
    steps : int
        Steps of every ascent.
    history : tuple of float
        Loss at every iterate of the best ascent.
    seconds : float
        Wall time.
    """

    batch: int
    rho: float
    base_loss: float
    worst_loss: float
    base_error: float | None
    worst_error: float | None
    random_start: bool
    steps: int
    history: tuple[float, ...]
    seconds: float

    @property
    def sharpness(self) -> float:
        """Worst loss minus base loss."""
        return self.worst_loss - self.base_loss

    @property
    def error_increase(self) -> float | None:
        """Worst error minus base error."""
        if self.worst_error is None or self.base_error is None:
            return None
        return self.worst_error - self.base_error


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class SharpnessResult:
    """The sharpness of a model; ``print`` gives a table.

    Attributes
    ----------
    how : Measure
        The metric and retraction; ``measure`` and ``geodesic`` are its names.
    rhos : tuple of float
        The radii, in the order asked for.
    steps, restarts, seed : int
    model : str
        Class of the model.
    weakest : float or None
        σ_h, the smallest singular value of any pair's G Hᴴ. The mix metric's ball stays on the manifold only while
        ρ < σ_h/√2; beyond that its value is set by the breakdown of the retraction.
    absent : int
        Directions of the pairs that count as absent (σ_i at rounding level).
    batches : tuple of BatchResult
        All batches at all radii.
    scalar : bool
        A single radius was asked for by a number.
    """

    how: Measure
    rhos: tuple[float, ...]
    steps: int
    restarts: int
    seed: int
    model: str
    weakest: float | None
    absent: int
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
        """List the batches at one radius."""
        found = tuple(b for b in self.batches if b.rho == rho)
        if not found:
            raise KeyError(f"rho = {rho} was not measured; the radii are {', '.join(map(str, self.rhos))}")
        return found

    def mean(self, rho: float) -> float:
        """Mean sharpness over the batches at one radius."""
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

    def to_dict(self) -> dict[str, Any]:
        """Give everything but the directions as plain numbers, strings, lists and dicts."""
        rows = []
        for b in self.batches:
            row = asdict(b)
            row.update(sharpness=b.sharpness, error_increase=b.error_increase, history=list(b.history))
            rows.append(row)
        mean = {str(rho): self.mean(rho) for rho in self.rhos}
        return {
            "measure": self.measure,
            "geodesic": self.geodesic,
            "relaxation": self.how.relaxation,
            "metric_scale": self.how.metric_scale,
            "weakest_singular_value": self.weakest,
            "absent_directions": self.absent,
            "model": self.model,
            "rho": list(self.rhos),
            "steps": self.steps,
            "restarts": self.restarts,
            "seed": self.seed,
            "sharpness": mean,
            "batches": rows,
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file, which is replaced as a whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        partial.replace(path)

    def __str__(self) -> str:
        count = len(self.batches) // len(self.rhos)
        lines = [
            f"{self.measure} sharpness of {self.model}: {count} batch{'es' * (count > 1)}, {self.steps} steps, "
            f"{self.geodesic} geodesics, seed {self.seed}",
            f"{'rho':>10}  {'base loss':>10}  {'worst loss':>10}  {'sharpness':>10}  {'error rate':>16}",
        ]
        for rho in self.rhos:
            found = self.at(rho)
            base, worst = _mean([b.base_loss for b in found]), _mean([b.worst_loss for b in found])
            errors = "-"
            if all(b.worst_error is not None for b in found):
                e0 = _mean([b.base_error or 0.0 for b in found])
                e1 = _mean([b.worst_error or 0.0 for b in found])
                errors = f"{e0:.1%} → {e1:.1%}"
            lines.append(f"{rho:>10.4g}  {base:>10.5f}  {worst:>10.5f}  {worst - base:>10.5f}  {errors:>16}")
        if self.how.pairs == "mix" and self.weakest:
            top = max(self.rhos) * self.how.metric_scale**-0.5 / self.weakest
            lines.append(f"largest rho over the smallest singular value of a pair: {top:.3g}")
            if top > 2**-0.5:
                lines.append(
                    "beyond 0.71 the ball of the mix metric leaves the manifold: the largest radii measure the "
                    "breakdown of its retraction, not the network"
                )
        if self.absent:
            lines.append(f"{self.absent} directions of pairs are at rounding level and count as absent")
        randoms = sum(b.random_start for b in self.batches)
        if randoms:
            lines.append(
                f"{randoms} of {len(self.batches)} ascents began in a random direction: the gradient at the weights "
                "was at rounding level"
            )
        return "\n".join(lines)
