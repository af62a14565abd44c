"""The results of a measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from quotient_manifolds.symmetries import Symmetries

from .direction import PARTS, Direction, LayerShare, LayerShares
from .errors import aligned
from .measures import Measure
from .statistic import BatchResult, Statistic, WorstResult

#: Largest ρ/σ_h at which the ball of the mix metric stays on the manifold.
LEAVES = 2**-0.5


#: Sharpness of five small models at the default radius of each measure, the smallest and the largest, in nats
#: (``studies/reference_values.py``).
REFERENCE = {
    "geodesic-inv": (0.021, 0.246),
    "complete-inv": (0.043, 0.960),
    "adaptive": (0.023, 0.286),
    "euclidean": (0.033, 0.267),
}


class NoDirectionError(KeyError):
    """A result holds no direction of a batch at a radius."""


class NoRiseError(ValueError):
    """No direction of a result has a length."""


@dataclass(frozen=True)
class SharpnessResult:
    r"""The sharpness of a model at one or several radii, or at its weights themselves; ``print`` shows the answer.

    ``result[rho]`` is the result at one radius, of the same class; ``float(result[rho])`` is its sharpness, and
    ``float(result)`` the gradient norm or the largest eigenvalue of the Hessian.

    Attributes
    ----------
    measure : Measure
        The metric and retraction.
    statistic : Statistic
        What was measured, with its options: see :class:`sharpness.statistic.Statistic`.
    rhos : tuple of float
        The radii, in the requested order; (0.0,) at the weights themselves.
    model : str
        Class of the model.
    min_singular_value : float or None
        σ_h, the smallest singular value of any pair's G Hᴴ. The mix metric's ball stays on the manifold only while
        ρ < σ_h/√2; beyond that the sharpness reflects the breakdown of the retraction.
    num_null : int
        Number of directions of the pairs that count as absent (σ_i zero to within rounding).
    num_uncertified : int
        Number of pairs that got no gradient from any batch, so that nothing certifies that they are symmetries.
    batches : tuple of BatchResult
        All batches at all radii.
    remarks : tuple of str
        What else was noticed, in sentences: pairs that were found by examination, weights without a gradient, what the
        measure does not divide out.
    symmetries : Symmetries
        Those that were divided out.

    Examples
    --------
    The loss :math:`(w - 1)^2` at w = 2, over :math:`|ξ| \le ρ |w|`:

    >>> import torch, sharpness
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> model.weight.data.fill_(2.0)
    tensor([[2.]])
    >>> loss = lambda model, x: (model(x) - 1).square().sum()
    >>> result = sharpness.evaluate(model, [torch.ones(1, 1)], loss, measure="adaptive", rho=[0.1, 0.2])
    >>> print(result)
    sharpness 0.44 at ρ = 0.1 (adaptive): loss 1.000 → 1.440
    sharpness 0.96 at ρ = 0.2 (adaptive): loss 1.000 → 1.960
    >>> f"{float(result[0.2]):.2f}"
    '0.96'
    """

    measure: Measure
    statistic: Statistic
    rhos: tuple[float, ...]
    model: str
    min_singular_value: float | None
    num_null: int
    num_uncertified: int
    batches: tuple[BatchResult, ...]
    remarks: tuple[str, ...] = ()
    symmetries: Symmetries = field(default=Symmetries(), repr=False)
    _directions: dict[tuple[int, float], Direction] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, rho: float) -> SharpnessResult:
        """Return the result at one of the radii; raise a KeyError if it was not measured."""
        rho = float(rho)
        if rho not in self.rhos:
            raise KeyError(f"rho = {rho} was not measured; the radii are {', '.join(map(str, self.rhos))}")
        directions = {key: d for key, d in self._directions.items() if key[1] == rho}
        batches = tuple(b for b in self.batches if b.rho == rho)
        return replace(self, rhos=(rho,), batches=batches, _directions=directions)

    def _only_rho(self) -> float:
        if len(self.rhos) > 1:
            raise ValueError(f"several radii were measured; take result[rho], one of {', '.join(map(str, self.rhos))}")
        return self.rhos[0]

    def _mean(self, name: str) -> float | None:
        self._only_rho()
        values: list[Any] = [getattr(b, name, None) for b in self.batches]
        return None if None in values else fmean(values)

    def __float__(self) -> float:
        """Average the value over the batches, also eigenvalues; raise a ValueError if there are several radii."""
        self._only_rho()
        return fmean(b.value for b in self.batches)

    @property
    def error_increase(self) -> float | None:
        """Mean over the batches of the largest increase of the error rate, at one radius; None without labels."""
        worst, base = self._mean("worst_error"), self._mean("base_error")
        return None if worst is None or base is None else worst - base

    @property
    def trace(self) -> float | None:
        """Mean over the batches of the Hessian's trace; None if it was not estimated."""
        return self._mean("trace")

    @property
    def std_error(self) -> float | None:
        """Mean over the batches of the standard error, at one radius; at most, where they share random vectors."""
        return self._mean("std_error")

    def direction(self, batch_index: int) -> Direction:
        """Return the worst tangent vector found for a batch, at one radius.

        Parameters
        ----------
        batch_index : int
            Position of the batch.

        Returns
        -------
        Direction
            For :func:`sharpness.perturbed`.

        Raises
        ------
        KeyError
            There is no such batch, or directions were not kept.
        ValueError
            Several radii.
        """
        rho = self._only_rho()
        found = self._directions.get((batch_index, rho))
        if found is None:
            raise NoDirectionError(
                f"no direction for batch {batch_index} at rho = {rho}: it was not measured (an average has none), or "
                "found by another process of the group, or not kept: pass keep_directions=True"
            )
        return found

    def by_layer(self) -> LayerShares:
        """Compute the share of each layer and head in the squared length of the worst directions, at one radius.

        Returns
        -------
        LayerShares
            One row per attention head, and one per layer for its other weights; shares are means over the batches.
            ``print`` shows a table, :func:`sharpness.plots.plot_layers` a heat map.

        Raises
        ------
        KeyError
            As for :meth:`direction`.
        ValueError
            There are several radii, or the loss did not rise at this one.
        """
        moving = [d for d in (self.direction(b.batch) for b in self.batches) if d.norm > 0]
        if not moving:
            raise NoRiseError("the loss did not rise at this radius: the directions have length 0; use a larger one")
        found: dict[tuple[str, str, int | None], float] = {}
        for d in moving:
            for place, square in d.squares.items():
                found[place] = found.get(place, 0.0) + square / d.norm**2 / len(moving)
        return LayerShares(LayerShare(*place, share) for place, share in found.items())

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the directions as plain numbers, strings, lists and dicts; of symmetries a digest."""
        from quotient_manifolds.symmetries.exchange import digest

        found: dict[str, Any] = json.loads(json.dumps(asdict(replace(self, symmetries=Symmetries(), _directions={}))))
        del found["_directions"]
        found["statistic"]["name"] = self.statistic.name
        found["symmetries"] = {"dimension": self.symmetries.dimension, "digest": digest(self.symmetries)}
        return {**found, "sharpness": {str(rho): float(self[rho]) for rho in self.rhos}}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` to a file, which is replaced completely or not at all.

        Parameters
        ----------
        path : str or path
        """
        from .files import write_json

        write_json(path, self.to_dict())

    def _repr_html_(self) -> str:
        """Show a row for each radius, with the share of each part of the network, in a notebook."""
        from quotient_manifolds.notebook import Bar, html_table

        parts = [self[rho] for rho in self.rhos]
        rows = [
            [p.measure.name, p.rhos[0] or None, Bar(float(p)), fmean(b.base_loss for b in p.batches),
             fmean(b.worst_loss for b in p.batches)] for p in parts
        ]  # fmt: skip
        head = ["measure", "ρ", self.statistic.title, "loss", "largest loss"]
        return html_table(head, rows, [*doubts(self), *self.remarks])

    def __str__(self) -> str:
        """Show the answer, a line for each radius, and what else was noticed."""
        return "\n".join([*(headline(self[rho]) for rho in self.rhos), *doubts(self), *self.remarks])


def headline(result: SharpnessResult) -> str:
    """Say what was found at one radius, or at the weights; what is longer than a line stands on two."""
    said = f"{result.statistic.title} {_amount(result)}"
    if result.statistic.local:
        error = "" if result.std_error is None else f" ± {result.std_error:.2g}"
        trace = "" if result.trace is None else f", trace {result.trace:.3g}{error}"
        count = len(result.batches)
        several = f", mean over {count} batches" if count > 1 else ""
        return f"{said}{trace}{several} ({result.measure.name})"
    found, nats, between = result.batches, "", " "
    base = fmean(b.base_loss for b in found)
    rise = f"loss {base:.3f} → {base + float(result):.3f}"
    if result.error_increase is not None:  # of classes, so that the loss is a cross-entropy
        errors = (fmean(getattr(b, name) for b in found) for name in ("base_error", "worst_error"))
        nats, between, rise = " nats", "\n    ", f"{rise}, error rate {' → '.join(f'{e:.1%}' for e in errors)}"
    return f"{said}{nats} at ρ = {result.rhos[0]:.4g} ({result.measure.name}):{between}{rise}"


def _amount(result: SharpnessResult) -> str:
    """Write the value at one radius, with its standard error over several batches and as many digits as that has."""
    value, count = float(result), len(result.batches)
    error = stdev(b.value for b in result.batches) / count**0.5 if count > 1 else 0.0
    if not error:
        return f"{value:.3g}"
    digits = max(0, 1 - int(f"{error:.1e}".partition("e")[2]))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def summary(results: Sequence[SharpnessResult]) -> str:
    """Tabulate several measures and radii, with the shares of the parts of the network in the worst directions."""
    lines, shares = list[list[str]](), list[dict[str, float]]()
    for part in (result[rho] for result in results for rho in result.rhos if rho):
        done = len(part.batches) - limits(part)["unconverged"]
        lines.append([part.measure.name, f"{part.rhos[0]:.4g}", _amount(part), f"{done} of {len(part.batches)}"])
        try:
            shares.append(part.by_layer().by_part())
        except (NoDirectionError, NoRiseError):  # an average, no rise, or no room for the directions
            shares.append({})
    if not lines:
        return ""
    parts = [name for name in PARTS if any(name in share for share in shares)]
    head = ["measure", "ρ", "sharpness", "converged", *(name.split()[0][:5] for name in parts)]
    cells = [[f"{share[name]:.0%}" if name in share else "" for name in parts] for share in shares]
    return aligned([head, *(line + cell for line, cell in zip(lines, cells, strict=True))])


def settings(result: SharpnessResult) -> str:
    """Say how it was measured."""
    count, passes = len(result.batches) // len(result.rhos), fmean(b.passes for b in result.batches)
    how = [f"{count} batches", repr(result.measure), repr(result.statistic), f"{passes:.1f} passes a batch and radius"]
    return f"{result.statistic.name} of {result.model}: {', '.join(how)}"


#: What limits numbers, by the name of its count.
DOUBTS = {
    "breakdown": "beyond 0.71 the ball of the mix metric leaves the manifold: the largest radii measure the breakdown "
    "of its retraction, not the network",
    "num_uncertified": "{} pairs got no gradient from these data, so nothing certifies their symmetry",
    "num_null": "{} directions of pairs are zero to within rounding and are not moved",
    "random_start": "{} of {} ascents began in a random direction: the gradient at the weights was zero to within "
    "rounding",
    "num_exited_pairs": "{} of {} worst points have pairs whose geodesic would leave the manifold; it was shortened",
    "unconverged": "{} of {} ascents used all their steps and did not converge; more steps may give a larger value",
}


def _ratio(result: SharpnessResult) -> float:
    """Return the largest radius in units of the smallest singular value of a pair, which limits the mix metric."""
    smallest = result.min_singular_value
    return max(result.rhos) / smallest if result.measure.pair_metric == "mix" and smallest else 0.0


def limits(result: SharpnessResult) -> dict[str, int]:
    """Count what limits the numbers, by the names of DOUBTS."""
    worst = [b for b in result.batches if isinstance(b, WorstResult)]
    return {
        "breakdown": int(_ratio(result) > LEAVES),
        "num_uncertified": result.num_uncertified,
        "num_null": result.num_null,
        "random_start": sum(b.random_start for b in worst),
        "num_exited_pairs": sum(b.num_exited_pairs > 0 for b in worst),
        "unconverged": sum(b.converged is False for b in worst),
    }


def doubts(result: SharpnessResult) -> Iterator[str]:
    """Say what limits the numbers."""
    if ratio := _ratio(result):
        yield f"largest rho over the smallest singular value of a pair: {ratio:.3g}"
    yield from (DOUBTS[k].format(count, len(result.batches)) for k, count in limits(result).items() if count)
