"""Which measure ranks models by generalisation: measures at all their radii, beside baselines that need no search.

A measure's correlation depends on its radius, and sharpness follows the training loss. So each measure is examined at
all its radii, controlling for training loss and error, with intervals corrected for multiple comparisons.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sharpness.study import targets
from sharpness.study.rows import Row

from .statistics import Correlation, kendall, kendall_family

__all__ = ["BASELINES", "CONTROLS", "Ranking", "compare", "curves"]

_Array = npt.NDArray[np.float64]
#: The controls, beyond which a measure should add information.
CONTROLS = ("train_loss", "train_error")
#: Quantities that need no search, by the kind of row that has them.
BASELINES = {"train_loss": "fit", "train_error": "fit"} | dict.fromkeys(
    ("weight_norm", "log_spectral", "distance", "geodesic_distance", "relative_flatness", "margin", "fisher_trace",
     "critical_sharpness", "alpha"), "baselines"
)  # fmt: skip


def label(measure: str, ablation: Mapping[str, Any]) -> str:
    """Return the name of a measure with its changed fields."""
    return ", ".join([measure, *(f"{k} = {v}" for k, v in ablation.items())])


@dataclass(frozen=True)
class Ranking:
    """How one quantity orders the models.

    Attributes
    ----------
    quantity : str
        A measure, with its changed fields if any, or a baseline.
    rho : float or None
        Radius; None for a quantity that has none.
    loss_increase : float or None
        Median of the sharpness over models.
    tau : Correlation
        Kendall's τ with the target.
    partial : Correlation or None
        The same, controlling for the training loss and, where it is known, the training error, or for what else was
        asked for.
    corrected : Correlation or None
        The same with an interval that is simultaneous over the family, which is all measures at all radii, or all
        quantities without a radius, for the models that have them all.
    models : tuple of str
        The models with both the quantity and the target.
    values : tuple of float
        The quantity, one value per model.

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
    rho: float | None
    loss_increase: float | None
    tau: Correlation
    partial: Correlation | None
    corrected: Correlation | None
    models: tuple[str, ...]
    values: tuple[float, ...]


#: Share of the models that a radius of a measure, and a member of a family, must at least have.
FEWEST_SHARED = 0.9


@dataclass(frozen=True)
class Curves:
    """The sharpness, (models, radii), at increasing radii of one measure, of the models with all these values."""

    measure: str
    ablation: Mapping[str, Any]
    rho: _Array
    models: tuple[str, ...]
    values: _Array

    @property
    def name(self) -> str:
        """Measure and switches."""
        return label(self.measure, self.ablation)

    @property
    def medians(self) -> _Array:
        """Median over models at every radius."""
        found: _Array = np.median(self.values, axis=0)
        return found


def curves(rows: Sequence[Row]) -> list[Curves]:
    """Collect the curves of all measures with a radius, and of their ablations.

    Radii that fewer than nine tenths of a measure's models have (they were too large for the others) are left out; and
    so are models that lack one of the others.
    """
    tables: dict[tuple[str, str], dict[str, dict[float, float]]] = {}
    for row in rows:
        if row["kind"] == "sharpness" and row["rho"] > 0:
            table = tables.setdefault((row["measure"], json.dumps(row.get("ablation", {}), sort_keys=True)), {})
            table.setdefault(row["checkpoint"], {})[row["rho"]] = row["sharpness"]
    found = []
    for (measure, ablation), table in tables.items():
        measured = Counter(rho for values in table.values() for rho in values)
        radii = sorted(rho for rho, count in measured.items() if count >= FEWEST_SHARED * len(table))
        models = tuple(sorted(m for m, values in table.items() if values.keys() >= set(radii)))
        if models:
            grid = np.array([[table[m][rho] for rho in radii] for m in models])
            found.append(Curves(measure, json.loads(ablation), np.array(radii), models, grid))
    return found


@dataclass(frozen=True)
class _Judge:
    """Correlations of quantities with the target, given the controls."""

    goal: Mapping[str, float]
    controls: Mapping[str, Mapping[str, float]]
    quadratic: bool
    options: Mapping[str, Any]

    def rank(
        self, quantity: str, values: Mapping[str, float], rho: float | None = None, loss_increase: float | None = None
    ) -> list[Ranking]:
        """Return one ranking in a list, which is empty for fewer than three models."""
        models = [m for m in self.goal if m in values and np.isfinite(values[m])]
        if len(models) < 3:
            return []
        x, y = [values[m] for m in models], [self.goal[m] for m in models]
        partial = None
        first = next(iter(self.controls.values()), {})
        if quantity not in self.controls and all(m in first for m in models):
            partial = kendall(x, y, given=self.given(models), quadratic=self.quadratic, **self.options)
        tau = kendall(x, y, **self.options)
        return [Ranking(quantity, rho, loss_increase, tau, partial, None, tuple(models), tuple(x))]

    def given(self, models: Sequence[str]) -> list[list[float]]:
        """Return the controls that are known for all these models."""
        return [[c[m] for m in models] for c in self.controls.values() if all(m in c for m in models)]

    def corrected(self, family: Sequence[Ranking], level: float) -> list[Ranking]:
        """Add the simultaneous intervals of a family, over the models that all members have.

        A member with which fewer than nine tenths of the models were left is not judged: it would decide which models
        the others are judged on.
        """
        members = list[Ranking]()
        shared = set(self.goal)
        candidates = sorted((r for r in family if r.partial is not None), key=lambda r: -len(r.models))
        for r in candidates:
            if len(shared.intersection(r.models)) >= FEWEST_SHARED * len(candidates[0].models):
                members.append(r)
                shared.intersection_update(r.models)
        models = [m for m in self.goal if m in shared]
        if not members or len(models) < 3:
            return list(family)
        tables = [dict(zip(r.models, r.values, strict=True)) for r in members]
        xs = {str(i): [table[m] for m in models] for i, table in enumerate(tables)}
        goal = [self.goal[m] for m in models]
        found = kendall_family(
            xs, goal, given=self.given(models), quadratic=self.quadratic, level=level, seed=self.options["seed"],
            resamples=100 * self.options["resamples"],  # each interval has a level of about 0.997: few lie outside
        ).values()  # fmt: skip
        by_member = dict(zip(map(id, members), found, strict=True))
        return [replace(r, corrected=by_member.get(id(r))) for r in family]

    def at_radii(self, c: Curves) -> list[Ranking]:
        """Rank at every radius."""
        places = zip(c.rho, c.values.T, c.medians, strict=True)
        return [
            ranking
            for rho, values, median in places
            for ranking in self.rank(c.name, dict(zip(c.models, values, strict=True)), float(rho), float(median))
        ]


def _without_radius(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, float]]]:
    """Return baselines, and measures without a radius."""
    for name, kind in BASELINES.items():
        yield name, {r["checkpoint"]: r[name] for r in rows if r["kind"] == kind and r.get(name) is not None}
    local: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "sharpness" and row["rho"] == 0:
            name = label(row["measure"], row.get("ablation", {}))
            local.setdefault(name, {})[row["checkpoint"]] = row["sharpness"]
            if row.get("trace") is not None:
                local.setdefault(f"{name}, trace", {})[row["checkpoint"]] = row["trace"]
    yield from local.items()


def compare(
    rows: Sequence[Row], target: str = "gap", *, resamples: int = 1000, seed: int = 0, level: float = 0.95,
    quadratic: bool = False, given: Sequence[str] = CONTROLS,
) -> list[Ranking]:  # fmt: skip
    """Correlate every measure and baseline with the target.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of a sweep, see :func:`sharpness.study.read_results`.
    target : {"gap", "loss-gap", "test-error", "test-loss"}
        See :func:`sharpness.study.targets`.
    resamples, seed : int
        Resamples and seed of the bootstrap over models, see :func:`reproduction.statistics.kendall`; families take a
        hundred times as many resamples.
    level : float
        Probability that all corrected intervals of a family hold at once; raise it if you look at several targets.
    quadratic : bool
        Control for the squared scores of the controls, too, see :func:`reproduction.statistics.kendall`.
    given : sequence of str
        What to control for: names of ``BASELINES``, for example ``("train_loss", "train_error",
        "distance")``.

    Returns
    -------
    list of Ranking
        Baselines; measures without a radius; measures at their radii; ablations at theirs.

    Raises
    ------
    ValueError
        Fewer than three models have a target, the target or a control is unknown, or models lack a control other than
        training loss and error.

    Examples
    --------
    >>> gap = {"a": 0.02, "b": 0.05, "c": 0.04, "d": 0.09}
    >>> rows = [{"checkpoint": m, "kind": "fit", "train_error": 0.0, "test_error": g} for m, g in gap.items()]
    >>> of = {"kind": "sharpness", "measure": "adaptive", "ablation": {}}
    >>> rows += [{**of, "checkpoint": m, "rho": r, "sharpness": g * r**2} for m, g in gap.items() for r in (0.5, 1.0)]
    >>> for found in compare(rows)[1:]:  # the first is the training error
    ...     print(found.quantity, found.rho, found.tau.value)
    adaptive 0.5 1.0
    adaptive 1.0 1.0
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    goal = targets(rows, target)
    if len(goal) < 3:
        raise ValueError(
            f"only {len(goal)} models have a {target}, and a ranking needs at least 3; give the sweep test data or "
            "accuracies"
        )
    baselines = dict(_without_radius(rows))
    for name in given:
        if name not in BASELINES:
            raise ValueError(f"{name!r} cannot be controlled for; choose from {', '.join(BASELINES)}")
        if lacking := [m for m in goal if name not in CONTROLS and m not in baselines[name]]:
            raise ValueError(f"{len(lacking)} models have no {name} to control for ({lacking[0]}, …)")
    controls = {name: baselines[name] for name in given if baselines[name]}
    judge = _Judge(goal, controls, quadratic, {"resamples": resamples, "seed": seed})
    found = judge.corrected([r for name, values in baselines.items() for r in judge.rank(name, values)], level)
    everything = curves(rows)
    own = [c for c in everything if not c.ablation]
    found += judge.corrected([r for c in own for r in judge.at_radii(c)], level)
    return found + [r for c in everything if c.ablation for r in judge.at_radii(c)]
