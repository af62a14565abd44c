"""Which measure ranks models by how they generalise: every measure at comparable radii, beside what costs nothing.

A measure's correlation depends on its radius, and sharpness follows the training loss. So a measure is looked at over
all its radii, at the radii where measures have *equal effect* (equal median rise of the loss), with the training loss
controlled for, and beside baselines.
"""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.optimize

from .measures import MEASURES
from .rows import BASELINES, Row, targets
from .statistics import Correlation, kendall, kendall_difference

__all__ = ["Ranking", "compare", "formatted"]

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranking:
    """How one quantity orders the models.

    Attributes
    ----------
    quantity : str
        A measure, with its switches if any, or a baseline.
    choice : str
        ``"ρ"`` (a radius of the sweep), ``"paper"`` (the measure's default radius), ``"best"`` (the radius of largest
        abs(τ), which flatters it), ``"equal rise"``, or ``"–"`` for what has no radius.
    rho : float or None
        Radius.
    rise : float or None
        Median over models of the sharpness, a rise of the loss.
    tau : Correlation
        Kendall's τ with the target.
    partial : Correlation or None
        The same with the training loss controlled for.
    difference : Correlation or None
        At equal rise: τ minus that of the adaptive measure, with a paired bootstrap interval.
    models : tuple of str
        Those with both the quantity and the target.
    values : tuple of float
        The quantity, one a model.

    Examples
    --------
    >>> rows = [
    ...     {"checkpoint": name, "kind": "fit", "train_loss": loss, "train_error": 0.0, "test_error": error}
    ...     for name, loss, error in (("a", 0.1, 0.02), ("b", 0.3, 0.05), ("c", 0.2, 0.04))
    ... ]
    >>> found = compare(rows)[0]
    >>> found.quantity, found.models, found.values, found.tau.value
    ('train_loss', ('a', 'b', 'c'), (0.1, 0.3, 0.2), 1.0)
    """

    quantity: str
    choice: str
    rho: float | None
    rise: float | None
    tau: Correlation
    partial: Correlation | None
    difference: Correlation | None
    models: tuple[str, ...]
    values: tuple[float, ...]


def label(measure: str, ablation: Mapping[str, Any]) -> str:
    """Name a measure with its switches."""
    return ", ".join(
        [measure, *(f"{k} = {v:g}" if isinstance(v, float) else f"{k} = {v}" for k, v in ablation.items())]
    )


class Curves:
    """The sharpness of every model over the radii of one measure.

    Attributes
    ----------
    measure : str
    ablation : mapping
    rho : array of float
        Increasing.
    models : tuple of str
        Those with a value at every radius.
    values : array of float, shape (models, radii)
    """

    def __init__(self, measure: str, ablation: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self.measure, self.ablation = measure, ablation
        table: dict[str, dict[float, float]] = {}
        for row in rows:
            table.setdefault(row["checkpoint"], {})[row["rho"]] = row["sharpness"]
        radii = sorted({rho for found in table.values() for rho in found})
        self.rho: _Array = np.array(radii)
        self.models = tuple(sorted(m for m, found in table.items() if len(found) == len(radii)))
        self.values: _Array = np.array([[table[m][r] for r in radii] for m in self.models])

    def among(self, models: Collection[str]) -> Curves:
        """Take the curves of some models."""
        found = copy.copy(self)
        keep = [i for i, m in enumerate(self.models) if m in models]
        found.models, found.values = tuple(self.models[i] for i in keep), self.values[keep]
        return found

    @property
    def name(self) -> str:
        """Measure and switches."""
        return label(self.measure, self.ablation)

    @property
    def medians(self) -> _Array:
        """Median rise over models at every radius."""
        found: _Array = np.median(self.values, axis=0)
        return found

    def at_rise(self, rise: float) -> tuple[float, _Array]:
        """Find the radius of a given median rise, and every model's sharpness there, linear in log–log."""
        tiny = np.finfo(float).tiny
        x, y = np.log(self.rho), np.log(np.maximum(self.values, tiny))

        def values(place: float) -> _Array:
            found: _Array = np.exp([np.interp(place, x, row) for row in y])
            return found

        def excess(place: float) -> float:
            return float(np.log(np.median(values(place)) / rise))

        if excess(x[0]) >= 0 or excess(x[-1]) <= 0:  # an end of the range, but for rounding
            place = float(x[0] if excess(x[0]) >= 0 else x[-1])
        else:
            place = float(scipy.optimize.brentq(excess, x[0], x[-1]))
        return float(np.exp(place)), values(place)


def curves(rows: Sequence[Row], *, ablations: bool = True) -> list[Curves]:
    """Collect the curves of all measures with a radius, with their ablations or without."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["kind"] == "sharpness" and row["rho"] > 0 and (ablations or not row["ablation"]):
            groups.setdefault((row["measure"], json.dumps(row["ablation"], sort_keys=True)), []).append(row)
    return [Curves(measure, json.loads(key), found) for (measure, key), found in groups.items()]


def common_rises(found: Iterable[Curves], count: int = 3) -> list[float]:
    """Choose median rises of the loss that all measures reach, from small to large; none if there are none."""
    found = [c for c in found if len(c.rho) > 1]
    if len(found) < 2:
        return []
    low, high = max(c.medians.min() for c in found), min(c.medians.max() for c in found)
    return [] if not 0 < low < high else [float(v) for v in np.geomspace(low, high, count)]


def compare(
    rows: Sequence[Row], target: str = "gap", *, resamples: int = 1000, seed: int = 0, every_radius: bool = True
) -> list[Ranking]:
    """Correlate every measure and baseline with what is to be predicted.

    Parameters
    ----------
    rows : sequence of mapping
        Of a sweep, see :func:`sharpness.rows.read_results`.
    target : {"gap", "loss-gap", "test-error", "test-loss"}
        See :func:`sharpness.rows.targets`.
    resamples, seed : int
        Of the bootstrap over models, see :func:`sharpness.statistics.kendall`.
    every_radius : bool
        Every measure at all radii of the sweep too, not only at those that were chosen; ablations always are.

    Returns
    -------
    list of Ranking
        Baselines; measures without a radius; measures at their radii, at the paper's and at their best; all of them at
        equal rise; ablations at their radii.

    Raises
    ------
    ValueError
        Fewer than three models with a target, or an unknown target.

    Notes
    -----
    At equal rise, radii are interpolated so that the median over models of the sharpness is the same for all measures,
    at three values that all of them reach; only models with every measure at every radius count there. The paper
    compares measures at a radius each.

    Examples
    --------
    >>> gap = {"a": 0.02, "b": 0.05, "c": 0.04, "d": 0.09}
    >>> rows = [{"checkpoint": m, "kind": "fit", "train_error": 0.0, "test_error": g} for m, g in gap.items()]
    >>> of = {"kind": "sharpness", "measure": "adaptive", "ablation": {}}
    >>> rows += [{**of, "checkpoint": m, "rho": r, "sharpness": g * r**2} for m, g in gap.items() for r in (0.5, 1.0)]
    >>> for found in compare(rows)[1:]:  # the first is the training error
    ...     print(found.quantity, found.choice, found.rho, found.tau.value)
    adaptive ρ 0.5 1.0
    adaptive ρ 1.0 1.0
    adaptive paper 0.5 1.0
    adaptive best 0.5 1.0
    """
    goal = targets(rows, target)
    if len(goal) < 3:
        raise ValueError(
            f"{len(goal)} models have a {target}; a ranking needs at least 3. Give the sweep test data or accuracies"
        )
    loss = {r["checkpoint"]: r["train_loss"] for r in rows if r["kind"] == "fit" and r.get("train_loss") is not None}
    result: list[Ranking] = []

    def rank(
        quantity: str, choice: str, values: Mapping[str, float], rho: float | None = None, rise: float | None = None,
        against: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        models = [m for m in goal if m in values and np.isfinite(values[m])]
        if len(models) < 3:
            return
        x, y = [values[m] for m in models], [goal[m] for m in models]
        options: dict[str, Any] = {"resamples": resamples, "seed": seed}
        controlled = quantity != "train_loss" and all(m in loss for m in models)
        partial = kendall(x, y, given=[loss[m] for m in models], **options) if controlled else None
        apart = None
        if against is not None and all(m in against for m in models):
            apart = kendall_difference(x, [against[m] for m in models], y, **options)
        tau = kendall(x, y, **options)
        result.append(Ranking(quantity, choice, rho, rise, tau, partial, apart, tuple(models), tuple(x)))

    def rank_radii(c: Curves) -> None:
        for j, rho in enumerate(c.rho):
            rank(c.name, "ρ", dict(zip(c.models, c.values[:, j], strict=True)), float(rho), float(c.medians[j]))

    for name, kind in BASELINES.items():
        rank(name, "–", {r["checkpoint"]: r[name] for r in rows if r["kind"] == kind and r.get(name) is not None})
    local: dict[str, dict[str, float]] = {}  # measures without a radius
    for row in rows:
        if row["kind"] == "sharpness" and row["rho"] == 0:
            local.setdefault(label(row["measure"], row["ablation"]), {})[row["checkpoint"]] = row["sharpness"]
    for name, by_checkpoint in local.items():
        rank(name, "–", by_checkpoint)
    own = curves(rows, ablations=False)
    for c in own:
        first = len(result)
        rank_radii(c)
        at_radii = result[first:]
        if not every_radius:
            del result[first:]
        default = MEASURES[c.measure].rho if c.measure in MEASURES else None
        for choice, found in (
            ("paper", [r for r in at_radii if r.rho == default]),
            ("best", sorted((r for r in at_radii if np.isfinite(r.tau.value)), key=lambda r: -abs(r.tau.value))[:1]),
        ):
            result += [replace(r, choice=choice) for r in found]
    several = [c for c in own if len(c.rho) > 1]
    shared = set(goal).intersection(*(c.models for c in several))
    several = [c.among(shared) for c in several] if shared else []
    for rise in common_rises(several):
        reference: dict[str, float] | None = None
        for c in sorted(several, key=lambda c: c.measure != "adaptive"):  # the reference first
            rho, values = c.at_rise(rise)
            if abs(np.median(values) / rise - 1) > 0.01:  # medians that do not grow with the radius
                continue
            by_model = dict(zip(c.models, values, strict=True))
            rank(c.name, "equal rise", by_model, rho, rise, reference)
            if c.measure == "adaptive":
                reference = by_model
    for c in curves(rows):
        if c.ablation:
            rank_radii(c)
    return result


# -- tables ------------------------------------------------------------------------------------------------------------

_HEAD = (
    "quantity",
    "radius",
    "ρ",
    "median rise",
    "models",
    "τ",
    "95 % interval",
    "p",
    "τ given train loss",
    "p",
    "τ − adaptive",
)


def _cells(row: Ranking) -> list[str]:
    def number(value: float | None, digits: str) -> str:
        return "" if value is None else "–" if np.isnan(value) else format(value, digits)

    tau, partial, apart = row.tau, row.partial, row.difference
    difference = "" if apart is None else f"{apart.value:+.2f} [{apart.low:+.2f}, {apart.high:+.2f}]"
    return [
        row.quantity.replace("_", " "), row.choice, number(row.rho, ".3g"), number(row.rise, ".3g"),
        str(tau.models), number(tau.value, "+.2f"), f"[{tau.low:+.2f}, {tau.high:+.2f}]", number(tau.p, ".2g"),
        number(None if partial is None else partial.value, "+.2f"),
        number(None if partial is None else partial.p, ".2g"), difference,
    ]  # fmt: skip


def formatted(found: Sequence[Ranking], style: str = "markdown") -> str:
    """Format rankings as a table.

    Parameters
    ----------
    found : sequence of Ranking
        One a line.
    style : {"markdown", "latex", "csv"}
        LaTeX's rules are those of booktabs.

    Returns
    -------
    str
        The table, with a head, and a line break at the end.

    Raises
    ------
    ValueError
        Any other style.

    Examples
    --------
    >>> rows = [
    ...     {"checkpoint": name, "kind": "fit", "train_loss": loss, "train_error": 0.0, "test_error": error}
    ...     for name, loss, error in (("a", 0.1, 0.02), ("b", 0.3, 0.05), ("c", 0.2, 0.04))
    ... ]
    >>> print(formatted(compare(rows)[:1], "csv"))
    quantity,radius,ρ,median rise,models,τ,95 % interval,p,τ given train loss,p,τ − adaptive
    train loss,–,,,3,+1.00,"[+1.00, +1.00]",0.33,,,
    """
    lines = [list(_HEAD), *(_cells(row) for row in found)]
    if style == "csv":
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(lines)
        return stream.getvalue()
    if style == "markdown":
        rows = ["| " + " | ".join(cells) + " |" for cells in lines]
        return "\n".join([rows[0], "|" + "---|" * len(_HEAD), *rows[1:]]) + "\n"
    if style == "latex":
        words = str.maketrans({"%": r"\%", "_": r"\_", "τ": r"$\tau$", "ρ": r"$\rho$", "−": "$-$", "–": "--"})
        rows = [" & ".join(cell.translate(words) for cell in cells) + r" \\" for cells in lines]
        body = "\n".join(rows[1:])
        spec = "ll" + "r" * (len(_HEAD) - 2)
        return (
            f"\\begin{{tabular}}{{{spec}}}\n\\toprule\n{rows[0]}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
        )
    raise ValueError(f"a table is markdown, latex or csv, not {style!r}")
