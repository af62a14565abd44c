"""The study of generalisation: rows of the zoos, partial correlations given the training loss."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from msgspec import structs

from sharpness.checkpoints import load_state_dict
from sharpness.measures import get_measure
from sharpness.models import load
from sharpness.results import LEAVES
from sharpness.study import Checkpoint, Sweep, read_config, read_rows, run_sweep, targets
from sharpness.study.rows import Row

from .baselines import distance, geodesic_distance
from .comparison import CONTROLS, Ranking, compare, curves
from .power import LEVEL
from .radii import LEVELS, PRIMARY, tested
from .statistics import Correlation, kendall, kendall_difference
from .tables import verdicts

__all__ = [
    "account", "agreement", "beside_distance", "differences", "judged", "plain_table", "rows_of", "table",
]  # fmt: skip

#: The targets that a zoo's measures are compared with.
OUTCOMES = ("gap", "test-loss")
#: The measures that are compared with adaptive.
COMPARED = ("geodesic-inv", "geodesic-mix", "complete-inv", "complete-mix")
#: The rankings of a zoo's quantities, by zoo.
Judged = Mapping[str, Sequence[Ranking]]


def rows_of(zoo: Path) -> dict[str, list[dict[str, Any]]]:
    """Collect the measurements of a zoo.

    Parameters
    ----------
    zoo : Path
        A zoo after :func:`reproduction.zoo.build` and the sweeps of ``models/measure.json`` and, perhaps,
        ``models/hessian.json``.

    Returns
    -------
    dict of str to list of dict
        ``""``: those at the radii of the rule and without a radius; ``"_shift"``: fits with shifted data instead of
        test data. Without the models that the plan leaves out (:func:`reproduction.radii.tested`), those that are not
        wholly measured yet, and balls of mix measures that leave the manifold. Warnings tell of each.

    Raises
    ------
    ValueError
        The zoo has no radii, or no tests by this version of the code.
    """
    fits, left_out = tested(zoo)
    if not fits:
        raise ValueError(f"{zoo} has no tests that this version of the code has made; gather with the one that did")
    found, sweep = _inside(_measured(zoo)), read_config(zoo / "models" / "measure.json")
    shifted = read_rows(zoo / "shift", read_config(zoo / "models" / "shift.json"))
    trained = {r["checkpoint"]: {k: r[k] for k in ("train_loss", "train_error")} for r in fits}
    shifted = [r | trained.get(r["checkpoint"], {}) for r in shifted]  # whose own are of few examples
    finished = _finished(zoo, sweep) & {r["checkpoint"] for r in shifted}
    checkpoints = [c for c in sweep.checkpoints if c.name in finished]
    if len(checkpoints) < len(sweep.checkpoints):
        warnings.warn(
            f"only {len(checkpoints)} of {len(sweep.checkpoints)} models are wholly measured; the others are left for "
            "another call", stacklevel=2,
        )  # fmt: skip
    found = [r for r in found if r["checkpoint"] in finished]
    more = from_starts(checkpoints, zoo / "models"), alphas(checkpoints)
    for row in found:
        if row["kind"] == "baselines":
            for by_checkpoint in more:
                row |= by_checkpoint.get(row["checkpoint"], {})
    if left_out:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        warnings.warn(f"{len(left_out)} models are left out ({why})", stacklevel=2)
    counts = Counter((r["kind"], r.get("measure"), r.get("rho")) for r in found)
    few = [
        f"{' '.join(str(k) for k in what if k is not None)}: {n}" for what, n in counts.items() if n < len(checkpoints)
    ]
    if few:
        warnings.warn(f"of {len(checkpoints)} models only some have {'; '.join(few)}", stacklevel=2)
    parts = {"": found, "_shift": shifted}
    return {name: [r for r in rows if r["checkpoint"] in finished - left_out.keys()] for name, rows in parts.items()}


def _finished(zoo: Path, sweep: Sweep) -> set[str]:
    """Return the checkpoints of which every job has been done, or has failed."""
    wanted = {("fit", None), ("baselines", None), *(("sharpness", name) for name in sweep.measures)}
    done = [*read_rows(zoo / "results", sweep), *read_rows(zoo / "results", sweep, failed=True)]
    jobs = {
        c.name: {(r["kind"], r.get("measure")) for r in done if r["checkpoint"] == c.name} for c in sweep.checkpoints
    }
    return {name for name, found in jobs.items() if wanted <= found}


def _inside(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what a mix measure found where its ball leaves the manifold: the breakdown of its retraction."""
    kept = [
        r
        for r in rows
        if not (r.get("measure") in COMPARED and get_measure(r["measure"]).pair_metric == "mix" and r["rho"])
        or r["rho"] <= LEAVES * r["min_singular_value"]
    ]
    if len(kept) < len(rows):
        warnings.warn(
            f"{len(rows) - len(kept)} balls of mix measures leave the manifold, and are left out", stacklevel=3
        )
    return kept


def _measured(zoo: Path) -> list[dict[str, Any]]:
    """Read the rows of the configurations with radii by the rule, and of Hessians."""
    configs = [zoo / "models" / f"{name}.json" for name in ("measure", "hessian")]
    if not configs[0].is_file():
        raise ValueError(
            f"{zoo} has no models/measure.json; choose its radii with `python -m reproduction radii` first"
        )
    return [row for path in configs for row in read_rows(zoo / "results", read_config(path))]


def account(zoo: Path) -> dict[str, Any]:
    """Account for a zoo: its models, those that are left out, and the compute.

    Parameters
    ----------
    zoo : Path
        As for :func:`rows_of`.

    Returns
    -------
    dict
        ``first``: number of the first model; ``models``: number of trained ones; ``left_out``: reasons by checkpoint;
        ``hours``: of one process each, of training, testing and measuring; ``start``: losses and errors of the model
        that all started from, or None (:func:`fit_of_start`, which tests it and keeps the result in ``start``).
    """
    records = {
        int(p.stem[6:]): json.loads(p.read_text(encoding="utf-8")) for p in (zoo / "models").glob("model_*[0-9].json")
    }
    tests = [
        r for name in ("results", "shift") for r in read_rows(zoo / name, read_config(zoo / "models" / f"{name}.json"))
    ]
    jobs = {r["job"]: r["seconds"] for r in _measured(zoo) if r["kind"] != "fit"}
    seconds = {
        "training": sum(r["seconds"] for r in records.values()),
        "testing": sum(r["seconds"] for r in tests),
        "measuring": sum(jobs.values()),
    }
    hours = {part: round(value / 3600, 3) for part, value in seconds.items()}
    found = {"first": min(records), "models": len(records), "left_out": tested(zoo)[1], "hours": hours}
    return {**found, "start": fit_of_start(zoo)}


def fit_of_start(zoo: Path) -> dict[str, float] | None:
    """Test the model that a zoo started from; None where there is none, or where it has no head for the classes."""
    sweep = read_config(zoo / "models" / "sweep.json")
    if sweep.initial is None or Path(sweep.initial).is_dir():
        return None
    start = structs.replace(sweep.checkpoints[0], name="start", weights=sweep.initial)
    alone = structs.replace(sweep, checkpoints=(start,), measures=(), baselines=None, initial=None)
    failed = run_sweep(alone, zoo / "start", progress=False)
    if failed:
        raise ValueError(f"the start of {zoo} was not tested: {failed[0]['error']}")
    fit = next(r for r in read_rows(zoo / "start", alone) if r["kind"] == "fit")
    return {f"{part}_{what}": fit[f"{part}_{what}"] for part in ("train", "test") for what in ("loss", "error")}


def from_starts(checkpoints: Sequence[Checkpoint], models: Path) -> dict[str, dict[str, float | None]]:
    """Compute the distances of networks trained from scratch from their own initial weights, by checkpoint."""
    found = {}
    for c in checkpoints:
        path = models / c.name.replace("model", "start", 1)
        if path.is_file():
            model = load(c.model, c.weights).model
            start = load_state_dict(path, model.state_dict())
            found[c.name] = {"distance": distance(model, start), "geodesic_distance": geodesic_distance(model, start)}
    return found


def alphas(checkpoints: Sequence[Checkpoint]) -> dict[str, dict[str, float]]:
    """Compute WeightWatcher's α of models, by checkpoint; empty if the package weightwatcher is not installed.

    The mean over layers of the exponent of a power law that is fitted to the eigenvalues of :math:`W^T W` (Martin,
    Peng, Mahoney 2021). It sees linear layers and convolutions, not the packed projections of torch's attention; layers
    whose fit fails, which it marks by −1, are left out.
    """
    if importlib.util.find_spec("weightwatcher") is None:
        warnings.warn("α is left out: pip install weightwatcher", stacklevel=2)
        return {}
    watcher = importlib.import_module("weightwatcher").WeightWatcher
    found = {}
    for c in checkpoints:
        model = load(c.model, c.weights).model
        by_layer = watcher(model=model, log_level=logging.ERROR).analyze()["alpha"]
        if (by_layer > 0).any():
            found[c.name] = {"alpha": float(by_layer[by_layer > 0].mean())}
    return found


def differences(zoos: Mapping[str, Sequence[Row]], target: str, reference: str = "adaptive") -> pd.DataFrame:
    """Tabulate the geodesic and complete measures minus a reference measure at the same level, by partial τ.

    Parameters
    ----------
    zoos : mapping of str to sequence of mapping
        Rows by name, of measures with radii chosen by the rule.
    target : str
        See :func:`sharpness.study.targets`.
    reference : str
        The measure that others are compared with.

    Returns
    -------
    pandas.DataFrame
        τ given training loss and error minus the reference's, with a paired bootstrap at 95 %.
    """
    lines = []
    for zoo, rows in zoos.items():
        goal, values = targets(rows, target), _by_level(rows)
        fits = {r["checkpoint"]: r for r in rows if r["kind"] == "fit"}
        for name in (n for n in COMPARED if n in values and n != reference):
            for level, one, other in zip(
                LEVELS, *(values.get(m, {}).values() for m in (name, reference)), strict=False
            ):
                models = [m for m in goal if m in one and m in other]
                columns = ([of[m] for m in models] for of in (one, other, goal))
                given = [[fits[m][control] for m in models] for control in CONTROLS]
                tau = kendall_difference(*columns, given=given, resamples=10_000)
                where = {"target": target, "collection": zoo, "measure": name, "nats": level}
                lines.append({**where, **_with_interval(tau)})
    return pd.DataFrame(lines)


def beside_distance(zoos: Mapping[str, Sequence[Row]]) -> pd.DataFrame:
    """Tabulate how the measures follow the distance from the initial weights, given training loss and error.

    Parameters
    ----------
    zoos : mapping of str to sequence of mapping
        Rows by name, of measures with radii chosen by the rule.

    Returns
    -------
    pandas.DataFrame
        Partial τ with the distance at every radius, with a bootstrap at 95 %.
    """
    lines = []
    for zoo, rows in zoos.items():
        known = {kind: {r["checkpoint"]: r for r in rows if r["kind"] == kind} for kind in ("fit", "baselines")}
        for name, by_radius in sorted(_by_level(rows).items(), key=lambda item: _order(item[0])):
            for rho, values in by_radius.items():
                models = [m for m in values if m in known["fit"] and m in known["baselines"]]
                given = [[known["fit"][m][control] for m in models] for control in CONTROLS]
                distances = [known["baselines"][m]["distance"] for m in models]
                tau = kendall([values[m] for m in models], distances, given=given)
                lines.append({"collection": zoo, "measure": name, "radius": rho, **_with_interval(tau)})
    return pd.DataFrame(lines)


def agreement(
    zoos: Mapping[str, Sequence[Row]], one: str = "geodesic-inv", other: str = "complete-inv", target: str = "gap"
) -> pd.DataFrame:
    """Tabulate how alike two measures rank the models of zoos, and how each ranks the target.

    Parameters
    ----------
    zoos : mapping of str to sequence of mapping
        Rows by name, at radii chosen by the rule.
    one, other : str
        The measures.
    target : str
        See :func:`sharpness.study.targets`.

    Returns
    -------
    pandas.DataFrame
        τ with its interval, at every level that both measures reach. Nothing is controlled for.
    """
    lines = []
    for zoo, rows in zoos.items():
        goal, values = targets(rows, target), _by_level(rows)
        for level, a, b in zip(LEVELS, *(values.get(m, {}).values() for m in (one, other)), strict=False):
            models = [m for m in goal if m in a and m in b]
            x, y, z = ([of[m] for m in models] for of in (a, b, goal))
            found = {
                f"{one}, {other}": kendall(x, y), f"{one}, {target}": kendall(x, z),
                f"{other}, {target}": kendall(y, z), "the last minus the one before": kendall_difference(y, x, z),
            }  # fmt: skip
            where = {"collection": zoo, "models": len(models), "nats": level}
            lines += [{**where, "τ of": of, **_with_interval(tau)} for of, tau in found.items()]
    return pd.DataFrame(lines)


def _by_level(rows: Sequence[Row]) -> dict[str, dict[float, dict[str, float]]]:
    """Return the values of models by measure and radius, in increasing order."""
    own = (c for c in curves(rows) if not c.ablation)
    return {
        c.name: {rho: dict(zip(c.models, values, strict=True)) for rho, values in zip(c.rho, c.values.T, strict=True)}
        for c in own
    }


def _with_interval(tau: Correlation) -> dict[str, float]:
    return {"τ": tau.value, "low": tau.low, "high": tau.high}


def judged(
    zoos: Mapping[str, Sequence[Row]], target: str, quadratic: bool = False, given: Sequence[str] = CONTROLS
) -> dict[str, list[Ranking]]:
    """Correlate all quantities of zoos with a target as the plan says.

    Parameters
    ----------
    zoos : mapping of str to sequence of mapping
        Rows by name.
    target, quadratic, given
        See :func:`reproduction.comparison.compare`.

    Returns
    -------
    dict of str to list of Ranking
        By zoo: quantities without a radius, and measures at their radii.
    """
    every = {zoo: compare(rows, target, level=LEVEL, quadratic=quadratic, given=given) for zoo, rows in zoos.items()}
    return {  # without ablations
        zoo: [r for r in found if r.rho is None or "," not in r.quantity] for zoo, found in every.items()
    }


def table(zoos: Judged, given: Sequence[str] = CONTROLS) -> pd.DataFrame:
    """Tabulate the partial correlation of every quantity with a target, given the controls, by zoo.

    Parameters
    ----------
    zoos : mapping of str to sequence of Ranking
        Of one target (:func:`judged`).
    given : sequence of str
        What was controlled for.

    Returns
    -------
    pandas.DataFrame
        The verdict on every quantity, and partial τ with its corrected interval at every radius.
    """
    lines: list[dict[str, Any]] = []
    names = sorted({r.quantity for found in zoos.values() for r in found} - {*given}, key=_order)
    for zoo, found in zoos.items():
        words = verdicts(found)
        for name in names:
            own = [r for r in found if r.quantity == name]
            line = dict[str, Any](collection=zoo, quantity=name, verdict=_verdict(name, own, words.get(name)))
            taus = [(r.rho, r.corrected) for r in own if r.corrected is not None]
            lines += [{**line, "radius": rho, "models": tau.models, **_with_interval(tau)} for rho, tau in taus]
            lines += [] if taus else [line]
    return pd.DataFrame(lines)


def _verdict(name: str, found: Sequence[Ranking], verdict: str | None) -> str:
    if verdict is None:
        return "fewer than nine tenths of the models" if found else "no radius" if name in PRIMARY else "not measured"
    if name in PRIMARY and sum(r.corrected is not None for r in found) < len(LEVELS):  # the rule needs both
        return "unresolved, at one level only"
    return verdict


def plain_table(by_target: Mapping[str, Judged]) -> pd.DataFrame:
    """Tabulate τ of every quantity without any controls, with the radii and what the loss increases by there.

    Parameters
    ----------
    by_target : mapping of str to mapping
        By target: :func:`judged`.

    Returns
    -------
    pandas.DataFrame
        With 95 % bootstrap intervals that are not corrected for their number.
    """
    return pd.DataFrame(
        {
            "target": target, "collection": zoo, "quantity": r.quantity, "radius": r.rho,
            "median increase": r.loss_increase, **_with_interval(r.tau),
        }
        for target, zoos in by_target.items()
        for zoo, found in zoos.items()
        for r in sorted(found, key=lambda r: (_order(r.quantity), r.rho or 0.0))
    )  # fmt: skip


def _order(name: str) -> tuple[int, str]:
    return PRIMARY.index(name) if name in PRIMARY else len(PRIMARY), name
