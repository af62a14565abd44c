"""The study of generalisation: rows of the zoos, partial correlations given the training loss, and figures."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpness.baselines import distance, geodesic_distance
from sharpness.comparison import CONTROLS, Ranking, compare
from sharpness.models import load, load_state_dict
from sharpness.plots.look import COLOURS, MARKERS, figure
from sharpness.rows import TARGETS, Row, targets
from sharpness.statistics import Correlation, kendall, kendall_difference
from sharpness.sweep import Checkpoint, read_config, read_rows
from sharpness.tables import verdicts

from .power import LEVEL
from .radii import LEVELS, PRIMARY, tested

__all__ = ["account", "agreement", "differences", "plot_partial", "plot_radius", "rows_of", "table"]

#: The targets that a zoo's measures are compared with.
OUTCOMES = ("gap", "test-loss")


def rows_of(zoo: Path) -> dict[str, list[dict[str, Any]]]:
    """Collect the measurements of a zoo.

    Parameters
    ----------
    zoo : Path
        A zoo after :func:`reproduction.zoo.build` and the sweeps of ``models/measure.json``, ``models/hessian.json``
        and, perhaps, ``models/further.json``.

    Returns
    -------
    dict of str to list of dict
        ``""``: those at the radii of the rule and without a radius; ``"_shift"``: fits with shifted data instead of
        test data; ``"_further"``: sharpness at further radii. Without the models that the plan leaves out
        (:func:`reproduction.radii.tested`), of which a warning tells. A warning also tells of missing measurements.
    """
    own, hessians, further = _measured(zoo)
    found, checkpoints = [*own, *hessians], read_config(zoo / "models" / "measure.json").checkpoints
    more = from_starts(checkpoints, zoo / "models"), alphas(checkpoints)
    for row in found:
        if row["kind"] == "baselines":
            for by_checkpoint in more:
                row |= by_checkpoint.get(row["checkpoint"], {})
    _, left_out = tested(zoo)
    if left_out:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        warnings.warn(f"{len(left_out)} models are left out ({why})", stacklevel=2)
    counts = Counter((r["kind"], r.get("measure"), r.get("rho")) for r in found)
    few = [
        f"{' '.join(str(k) for k in what if k is not None)}: {n}" for what, n in counts.items() if n < len(checkpoints)
    ]
    if few:
        warnings.warn(f"of {len(checkpoints)} models only some have {'; '.join(few)}", stacklevel=2)
    shifted = read_rows(zoo / "shift", read_config(zoo / "models" / "shift.json"))
    parts = {"": found, "_shift": shifted, "_further": further}
    return {name: [r for r in rows if r["checkpoint"] not in left_out] for name, rows in parts.items()}


def _measured(zoo: Path) -> list[list[dict[str, Any]]]:
    """Read the rows of the configurations with radii by the rule, of Hessians, and with further radii."""
    configs = [zoo / "models" / f"{name}.json" for name in ("measure", "hessian", "further")]
    if not configs[0].is_file():
        raise ValueError(
            f"{zoo} has no models/measure.json; choose its radii with `python -m reproduction radii` first"
        )
    return [read_rows(zoo / "results", read_config(path)) for path in configs]


def account(zoo: Path) -> dict[str, Any]:
    """Account for a zoo: its models, those that are left out, and the compute.

    Parameters
    ----------
    zoo : Path
        As for :func:`rows_of`.

    Returns
    -------
    dict
        ``models``: number of trained ones; ``left_out``: reasons by checkpoint; ``hours``: of one process each, of
        training, testing and measuring.
    """
    training = [json.loads(path.read_text())["seconds"] for path in (zoo / "models").glob("model_*[0-9].json")]
    tests = [
        r for name in ("results", "shift") for r in read_rows(zoo / name, read_config(zoo / "models" / f"{name}.json"))
    ]
    jobs = {r["job"]: r["seconds"] for rows in _measured(zoo) for r in rows if r["kind"] != "fit"}
    seconds = {"training": sum(training), "testing": sum(r["seconds"] for r in tests), "measuring": sum(jobs.values())}
    hours = {part: round(value / 3600, 3) for part, value in seconds.items()}
    return {"models": len(training), "left_out": tested(zoo)[1], "hours": hours}


def from_starts(checkpoints: Sequence[Checkpoint], models: Path) -> dict[str, dict[str, float | None]]:
    """Compute the distances of networks trained from scratch from their own initial weights, by checkpoint."""
    found = {}
    for c in checkpoints:
        path = models / c.name.replace("model", "start", 1)
        if path.is_file():
            model, start = load(c.model, c.weights).model, load_state_dict(path)
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
        model = load(c.model, c.weights, head=c.head).model
        by_layer = watcher(model=model, log_level=logging.ERROR).analyze()["alpha"]
        if (by_layer > 0).any():
            found[c.name] = {"alpha": float(by_layer[by_layer > 0].mean())}
    return found


def differences(rows: Sequence[Row], target: str, reference: str = "adaptive") -> dict[tuple[str, int], Any]:
    """Compare measures with a reference measure at the same level, by partial τ.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of a zoo whose measures have the same number of radii, chosen by the rule.
    target : str
        See :func:`sharpness.rows.targets`.
    reference : str
        The measure that others are compared with.

    Returns
    -------
    dict of (str, int) to Correlation
        By measure and level, from 0: τ given training loss and error minus the reference's, with a paired bootstrap.
    """
    goal = targets(rows, target)
    fits = {r["checkpoint"]: r for r in rows if r["kind"] == "fit"}
    tables = _by_level(rows, target)
    found = {}
    for name, by_level in tables.items():
        for level, (one, other) in enumerate(zip(by_level, tables.get(reference, []), strict=False)):
            models = [m for m in goal if m in one and m in other]
            if name != reference:
                columns = ([values[m] for m in models] for values in (one, other, goal))
                given = [[fits[m][control] for m in models] for control in CONTROLS]
                found[name, level] = kendall_difference(*columns, given=given, resamples=10_000)
    return found


def agreement(
    zoos: Mapping[str, Sequence[Row]], one: str = "geodesic-inv", other: str = "complete-inv", target: str = "gap"
) -> str:
    """Tabulate how alike two measures rank the models of zoos, and how each ranks the target.

    Parameters
    ----------
    zoos : mapping of str to sequence of mapping
        Rows by name, at radii chosen by the rule.
    one, other : str
        The measures.
    target : str
        See :func:`sharpness.rows.targets`.

    Returns
    -------
    str
        A table in markdown: τ with its interval, at every level that both measures reach. Nothing is controlled for.
    """
    columns = f"τ of {one} and {other} | τ of {one} with the {target} | of {other} | difference"
    lines = [f"| zoo | models | radii | {columns} |", "|---" * 7 + "|"]
    for zoo, rows in zoos.items():
        goal = targets(rows, target)
        levels = [[r for r in _at_radii(compare(rows, target, resamples=1)) if r.quantity == m] for m in (one, other)]
        for pair in zip(*levels, strict=False):
            a, b = (dict(zip(r.models, r.values, strict=True)) for r in pair)
            models = [m for m in goal if m in a and m in b]
            x, y, z = ([of[m] for m in models] for of in (a, b, goal))
            found = kendall(x, y), kendall(x, z), kendall(y, z), kendall_difference(y, x, z)
            cells = [zoo, str(len(models)), f"{pair[0].rho:g}, {pair[1].rho:g}", *map(_with_interval, found)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _by_level(rows: Sequence[Row], target: str) -> dict[str, list[dict[str, float]]]:
    """Return the values of models by measure, one mapping a radius."""
    tables: dict[str, list[dict[str, float]]] = {}
    for r in _at_radii(compare(rows, target, resamples=1)):
        tables.setdefault(r.quantity, []).append(dict(zip(r.models, r.values, strict=True)))
    return tables


def _with_interval(tau: Correlation) -> str:
    return f"{tau.value:+.2f} [{tau.low:+.2f}, {tau.high:+.2f}]"


def _at_radii(found: Sequence[Ranking]) -> list[Ranking]:
    return [r for r in found if r.choice == "ρ" and "," not in r.quantity]


def table(zoos: Mapping[str, Sequence[Row]], target: str, quadratic: bool = False) -> str:
    """Tabulate the partial correlation of every quantity with a target, given training loss and error, by zoo.

    Parameters
    ----------
    zoos : mapping of str to sequence of mapping
        Rows by name.
    target, quadratic
        See :func:`sharpness.comparison.compare`.

    Returns
    -------
    str
        A table in markdown: the verdict, and partial τ with its corrected interval at every radius.
    """
    cells: dict[str, dict[str, str]] = {}
    for zoo, rows in zoos.items():
        found = compare(rows, target, level=LEVEL, quadratic=quadratic)
        for name, words in verdicts(found).items():
            taus = [r.corrected for r in found if r.quantity == name and r.choice in ("ρ", "–")]
            intervals = [_with_interval(t) for t in taus if t is not None]
            # The rule needs both levels.
            words = f"{words}, at one level only" if name in PRIMARY and len(intervals) < len(LEVELS) else words
            cells.setdefault(name, {})[zoo] = f"**{words}**: {'; '.join(intervals)}"
    lines = [f"| given training loss and error | {' | '.join(zoos)} |", "|---" * (len(zoos) + 1) + "|"]
    for name in sorted(cells, key=_order):
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells[name].get(zoo, '') for zoo in zoos)} |")
    return "\n".join(lines) + "\n"


def _order(name: str) -> tuple[int, str]:
    return PRIMARY.index(name) if name in PRIMARY else len(PRIMARY), name


def plot_partial(zoos: Mapping[str, Sequence[Row]], path: str | os.PathLike[str]) -> None:
    """Draw partial τ with its corrected interval for every measure, with a column per zoo and a row per target.

    Parameters
    ----------
    zoos : mapping of str to sequence of mapping
        Rows by name.
    path : str or path
        File for the figure.
    """
    found = {(z, t): compare(rows, t, level=LEVEL) for z, rows in zoos.items() for t in OUTCOMES}
    names = sorted({r.quantity for rows in found.values() for r in rows if r.corrected is not None}, key=_order)
    size = (4.2 * len(zoos) + 2.5, 2 * (0.32 * len(names) + 1.2))
    with figure(path, size, len(OUTCOMES), len(zoos), sharex=True, sharey=True) as (_, grid):
        for (zoo, target), rankings in found.items():
            axes = grid[OUTCOMES.index(target), list(zoos).index(zoo)]
            axes.axvline(0, color="0.6", linewidth=1)
            for place, name in enumerate(names):
                shown = [r for r in rankings if r.quantity == name and r.corrected is not None and r.choice in "ρ–"]
                for k, r in enumerate(shown):
                    _interval(axes, r, place + 0.16 * (k - (len(shown) - 1) / 2))
            axes.set(yticks=range(len(names)), xlim=(-1, 1))
            axes.set_yticklabels([n.replace("_", " ") for n in names])
            axes.set_ylim(len(names) - 0.5, -0.5)
            if target == OUTCOMES[0]:
                axes.set_title(f"{zoo}, {max((len(r.models) for r in rankings), default=0)} models")
            if zoo == next(iter(zoos)):
                axes.set_ylabel(TARGETS[target])
        for axes in grid[-1]:
            axes.set_xlabel("τ given training loss and error")


def _interval(axes: Any, r: Ranking, place: float) -> None:
    tau, colour = r.corrected, COLOURS.get(r.quantity, "0.35")
    assert tau is not None
    axes.plot([tau.low, tau.high], [place, place], color=colour, linewidth=2)
    axes.plot(tau.value, place, MARKERS.get(r.quantity, "o"), color=colour, markersize=5)


def plot_radius(zoos: Mapping[str, Sequence[Row]], target: str, path: str | os.PathLike[str]) -> None:
    """Draw partial τ against the median increase of the loss, with a line per measure and a panel per zoo.

    Parameters
    ----------
    zoos : mapping of str to sequence of mapping
        Rows by name.
    target : str
        See :func:`sharpness.rows.targets`.
    path : str or path
        File for the figure.
    """
    with figure(path, (4.4 * len(zoos), 3.8), 1, len(zoos), sharey=True) as (_, grid):
        for axes, (zoo, rows) in zip(grid[0], zoos.items(), strict=True):
            shown = [r for r in _at_radii(compare(rows, target, level=LEVEL)) if r.corrected is not None]
            for name in sorted({r.quantity for r in shown}, key=_order):
                own = sorted((r for r in shown if r.quantity == name), key=lambda r: r.rho or 0.0)
                x, taus = [r.loss_increase for r in own], [r.corrected for r in own]
                colour, marker = COLOURS.get(name), MARKERS.get(name, "o")
                line = axes.semilogx(x, [t.value for t in taus if t], marker=marker, color=colour, label=name)
                low, high = ([getattr(t, end) for t in taus] for end in ("low", "high"))
                axes.fill_between(x, low, high, color=line[0].get_color(), alpha=0.1)
            axes.axhline(0, color="0.6", linewidth=1)
            axes.set(title=zoo, xlabel="median loss increase")
        grid[0, 0].set_ylabel(f"τ with {TARGETS[target]},\ngiven training loss and error")
        grid[0, -1].legend()
