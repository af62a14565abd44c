"""What the rows of a sweep say: of each model, and which measure ranks the models by generalisation (Kendall's τ).

As sharpness follows the training loss, a measure is examined beyond what training loss and error explain, at all radii.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import wraps
from statistics import stdev
from typing import Any, TypeVar

from ..errors import check_flags, require_extra, words_of
from ..measures import MEASURES
from ..plots import COLOURS, MARKERS, figure
from ..results import DOUBTS
from .correlation import Correlation, kendall
from .rows import FITS, Row, are_rows

T = TypeVar("T")

#: The targets that measures are compared with: names and descriptions.
TARGETS = {
    "gap": "test error − training error",
    "loss-gap": "test loss − training loss",
    "test-error": "test error",
    "test-loss": "test loss",
}
#: The controls, beyond which a measure should add information.
CONTROLS = ("train_loss", "train_error")
#: With fewer models a rank correlation says next to nothing: for nine models, one in thirteen unrelated quantities has
#: a τ of at least 0.5 or at most -0.5.
FEWEST_MODELS = 10
_PLACE = ["quantity", "rho"]
_FOUND = ["median", "models", "tau", "low", "high", "p", "partial", "partial_low", "partial_high"]


def _reading_rows(function: Callable[..., T]) -> Callable[..., T]:
    """Let an error of a function say that its first argument is no list of rows, if it is none."""

    @wraps(function)
    def reading(rows: Sequence[Row], *arguments: Any) -> T:
        try:
            return function(rows, *arguments)
        except Exception as error:
            if isinstance(error, ImportError) or are_rows(rows):
                raise
            what = "rows are not those of a sweep, as sharpness.study.read_results returns them"
            raise ValueError(f"{what}: {words_of(error)}") from error

    return reading


def targets(rows: Sequence[Row], target: str = "gap") -> dict[str, float]:
    """Look up the target by checkpoint; checkpoints without it are left out.

    Parameters
    ----------
    rows : sequence of mapping
        Rows as returned by :func:`sharpness.study.read_results`; those of the kind ``"fit"`` are used.
    target : {"gap", "loss-gap", "test-error", "test-loss"}
        Test error minus training error; test loss minus training loss; test error; test loss.

    Returns
    -------
    dict of str to float
        By checkpoint.

    Raises
    ------
    ValueError
        The target is unknown.

    Examples
    --------
    >>> targets([{"checkpoint": "a", "kind": "fit", "train_loss": 0.25, "test_loss": 0.75}], "loss-gap")
    {'a': 0.5}
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    return _differences(rows, "loss" if "loss" in target else "error", "gap" in target)


@_reading_rows
def _differences(rows: Sequence[Row], what: str, gap: bool) -> dict[str, float]:
    """Subtract a quantity on training data, or nothing, from that on test data, for each checkpoint that has both."""
    found = dict[str, float]()
    for fit in (row for row in rows if row["kind"] == "fit"):
        test, train = fit.get(f"test_{what}"), fit.get(f"train_{what}") if gap else 0.0
        if test is not None and train is not None:
            found[fit["checkpoint"]] = test - train
    return found


@_reading_rows
def measurements(rows: Sequence[Row]) -> Any:
    """Collect all quantities in a pandas DataFrame.

    Parameters
    ----------
    rows : sequence of mapping
        Of a sweep, see :func:`sharpness.study.read_results`.

    Returns
    -------
    pandas.DataFrame
        With the columns ``checkpoint``, ``kind``, ``quantity``, ``rho`` (0 without a radius), ``value`` (the mean over
        the batches), ``std_error`` (over the batches; NaN for one batch) and ``unconverged`` (the number of ascents
        that did not converge).

    Examples
    --------
    >>> of = {"checkpoint": "run 7", "kind": "sharpness", "measure": "adaptive"}
    >>> found = measurements([{**of, "rho": 0.5, "sharpness": 0.2, "per_batch": [0.1, 0.3]}])
    >>> print(found.to_string(index=False))
    checkpoint      kind quantity  rho  value  std_error  unconverged
         run 7 sharpness adaptive  0.5    0.2        0.1            0
    """
    with require_extra("tables need pandas", "plot"):
        import pandas as pd
    lines = list[tuple[Any, ...]]()
    for row in rows:
        place = row["checkpoint"], row["kind"]
        if row["kind"] == "sharpness":
            name, batches = row["measure"], row.get("per_batch") or ()
            error = stdev(batches) / len(batches) ** 0.5 if len(batches) > 1 else math.nan
            lines.append((*place, name, row["rho"], row["sharpness"], error, row.get("unconverged") or 0))
            if row.get("trace") is not None:
                lines.append((*place, f"{name}, trace", 0.0, row["trace"], math.nan, 0))
            continue
        for name in FITS if row["kind"] == "fit" else [k for k in row if k != "seconds"]:
            if isinstance(row.get(name), (int, float)) and not isinstance(row[name], bool):
                lines.append((*place, name, 0.0, row[name], math.nan, 0))
    columns = ["checkpoint", "kind", "quantity", "rho", "value", "std_error", "unconverged"]
    return pd.DataFrame(lines, columns=columns)


def one_radius(frame: Any) -> Any:
    """Take one radius for each measure: its default if it is there, else the middle one; what has no radius stays."""
    kept = {}
    for name, radii in frame[frame["rho"] > 0].groupby("quantity")["rho"]:
        measure, several = name.split(",")[0], sorted(set(radii))
        default = MEASURES[measure].rho if measure in MEASURES else None
        kept[name] = default if default in several else several[len(several) // 2]
    return frame[(frame["rho"] == 0) | (frame["rho"] == frame["quantity"].map(kept))]


def per_model(rows: Sequence[Row], *, short: bool = False) -> Any:
    """Tabulate a sweep with one row per checkpoint.

    Parameters
    ----------
    rows : sequence of mapping
        Of a sweep, see :func:`sharpness.study.read_results`.
    short : bool
        Take one radius for each measure: its default if the sweep has it, else the middle one.

    Returns
    -------
    pandas.DataFrame
        Losses and errors on training and test data, the gap (test error minus training error), and every measure with
        its radius; the standard error over the batches, if there are several, and the number of ascents that did not
        converge, if there are any, have columns of their own.

    Examples
    --------
    >>> fit = {"checkpoint": "run 7", "kind": "fit", "train_error": 0.25, "test_error": 0.375}
    >>> per_model([fit]).to_dict("records")
    [{'model': 'run 7', 'train error': 0.25, 'test error': 0.375, 'gap': 0.125}]
    """
    check_flags(short=short)
    frame, gaps = measurements(rows), targets(rows, "gap")
    values = (one_radius(frame) if short else frame).set_index("checkpoint")
    table = values.loc[~values.index.duplicated(), []]
    for name in FITS:
        if (values["quantity"] == name).any():
            table[name.replace("_", " ")] = values.loc[values["quantity"] == name, "value"]
    if gaps:
        table["gap"] = table.index.map(gaps)
    for (name, rho), part in values[values["kind"] == "sharpness"].groupby(["quantity", "rho"]):
        column = f"{name}, rho = {rho:g}" if rho else name
        table[column] = part["value"]
        if part["std_error"].notna().any():
            table[f"{column}, standard error"] = part["std_error"]
        if part["unconverged"].any():
            table[f"{column}, unconverged"] = part["unconverged"]
    return table.rename_axis("model").reset_index()


@_reading_rows
def remarks(rows: Sequence[Row]) -> list[str]:
    """List what was remarked on the measurements of a sweep and what limits them, each once, with the models.

    Parameters
    ----------
    rows : sequence of mapping
        Of a sweep, see :func:`sharpness.study.read_results`.

    Returns
    -------
    list of str

    Examples
    --------
    >>> row = {"checkpoint": "run 7", "kind": "sharpness", "measure": "adaptive", "remarks": ["so"]}
    >>> remarks([row, row])
    ['so (adaptive; run 7)']
    """
    about: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    said = [(remark, row) for row in rows for remark in row.get("remarks") or ()]
    for name, text in DOUBTS.items():
        counted = [row for row in rows if row["kind"] == "sharpness" and row.get(name) is not None]
        numbers = [row[name] for row in counted]
        total = sum(max(row[name], len(row.get("per_batch") or "1")) for row in counted if row["rho"])
        several = sum(numbers) if "{} of {}" in text else max(numbers, default=0)  # pairs are those of every radius
        said += [(text.format(several, total), row) for row in counted if row[name]]
    for remark, row in said:
        measures, models = about.setdefault(remark, ({}, {}))
        measures[row["measure"]] = models[row["checkpoint"]] = None
    return [
        f"{remark} ({', '.join(measures)}; {', '.join(models) if len(models) <= 3 else f'{len(models)} models'})"
        for remark, (measures, models) in about.items()
    ]


def compare(rows: Sequence[Row], target: str = "gap", *, given: Sequence[str] = CONTROLS) -> Any:
    """Correlate every quantity of a sweep, at every radius, with the target.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of a sweep, see :func:`sharpness.study.read_results`.
    target : {"gap", "loss-gap", "test-error", "test-loss"}
        See :func:`sharpness.study.targets`.
    given : sequence of str
        What to control for: quantities without a radius; training loss and error where they are known.

    Returns
    -------
    pandas.DataFrame
        With the columns ``quantity``, ``rho``, ``median`` (over models), ``models``, ``tau``, ``low``, ``high``, ``p``,
        and ``partial``, ``partial_low``, ``partial_high`` (τ given the controls), sorted as in the rows. Intervals are
        at 95 %; those of the partial τ hold all at once (Bonferroni). Quantities of fewer than three models are left
        out. If ascents did not converge, ``unconverged`` is the number of models with such.

    Raises
    ------
    ValueError
        Fewer than three models have a target, the target or a control is unknown, or models lack a control other than
        training loss and error.

    Examples
    --------
    >>> gap = {"a": 0.02, "b": 0.05, "c": 0.04, "d": 0.09}
    >>> rows = [{"checkpoint": m, "kind": "fit", "train_error": 0.0, "test_error": g} for m, g in gap.items()]
    >>> of = {"kind": "sharpness", "measure": "adaptive"}
    >>> rows += [{**of, "checkpoint": m, "rho": r, "sharpness": g * r**2} for m, g in gap.items() for r in (0.5, 1.0)]
    >>> compare(rows)[["quantity", "rho", "tau"]].values.tolist()
    [['train_error', 0.0, nan], ['adaptive', 0.5, 1.0], ['adaptive', 1.0, 1.0]]
    """
    goal, frame = targets(rows, target), measurements(rows)
    if len(goal) < 3:
        raise ValueError(f"only {len(goal)} models have a {target}; give the sweep more models, or test data")
    frame = frame[frame["checkpoint"].isin(goal) & ~frame["quantity"].isin(["test_loss", "test_error"])]
    columns = {place: part.set_index("checkpoint")["value"] for place, part in frame.groupby(_PLACE, sort=False)}
    without_radius = {quantity: values for (quantity, rho), values in columns.items() if not rho}
    for name in given:
        lacking = len(goal) - len(without_radius.get(name, ()))
        if lacking and name not in CONTROLS:
            raise ValueError(f"{lacking} models have no {name} to control for; there are {', '.join(without_radius)}")
    controls = {name: without_radius[name] for name in given if name in without_radius}
    columns = {place: values for place, values in columns.items() if len(values) > 2}
    lines = []
    for (quantity, rho), values in columns.items():
        y = [goal[model] for model in values.index]
        tau = kendall(values, y)
        known = [c[values.index] for c in controls.values() if values.index.isin(c.index).all()]
        partial = Correlation(*[math.nan] * 4)
        if known and quantity not in controls:
            partial = kendall(values, y, known, level=1 - 0.05 / len(columns))
        lines.append((quantity, rho, values.median(), len(values), *tau, *partial[:3]))
    shown = frame.iloc[:0].from_records(lines, columns=[*_PLACE, *_FOUND])
    if frame["unconverged"].any():
        counts = (frame["unconverged"] > 0).groupby([frame[name] for name in _PLACE]).sum()
        shown["unconverged"] = [counts[place] for place in zip(*(shown[name] for name in _PLACE), strict=True)]
    return shown


def plot_sweep(rows: Sequence[Row], target: str, path: str | os.PathLike[str]) -> Any:
    """Draw the target of every model against every measure, at its default radius or the middle one, with τ.

    Markers of models with ascents that did not converge are hollow.

    Parameters
    ----------
    rows, target
        As for :func:`sharpness.study.compare`.
    path : str or path
        File for the figure.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        Fewer than three models have the target.

    Examples
    --------
    Three models, one measure:

    >>> import tempfile
    >>> rows = [{"checkpoint": m, "kind": "fit", "train_error": 0.0, "test_error": 0.1 * m} for m in (1, 2, 3)]
    >>> of = {"kind": "sharpness", "measure": "adaptive"}
    >>> rows += [{**of, "checkpoint": m, "rho": rho, "sharpness": m * rho} for m in (1, 2, 3) for rho in (0.1, 0.5)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     drawn = plot_sweep(rows, "gap", f"{folder}/scatter.png")
    """
    found, goal = compare(rows, target).set_index(_PLACE), targets(rows, target)
    frame = one_radius(measurements([row for row in rows if row["kind"] == "sharpness"]))
    frame = frame[frame["checkpoint"].isin(goal) & ~frame["quantity"].str.endswith(", trace")]
    parts = list(frame.groupby(_PLACE))
    with figure(path, (3.6 * max(len(parts), 1), 3.6), 1, max(len(parts), 1), sharey=True) as (drawn, grid):
        for axes, ((quantity, rho), part) in zip(grid[0], parts, strict=False):
            colour = COLOURS.get(quantity, "0.4")
            axes.plot(part["value"], part["checkpoint"].map(goal), MARKERS.get(quantity, "o"), color=colour)
            if len(hollow := part[part["unconverged"] > 0]):
                options = {"color": colour, "markerfacecolor": "white", "linestyle": "", "label": "not converged"}
                axes.plot(hollow["value"], hollow["checkpoint"].map(goal), marker=MARKERS.get(quantity, "o"), **options)
                axes.legend()
            said = "too few to correlate"
            if len(part) >= FEWEST_MODELS:
                said = "τ = {tau:+.2f} [{low:+.2f}, {high:+.2f}]".format(**found.loc[(quantity, rho)])
            axes.set_title(f"{quantity}{f', ρ = {rho:g}' if rho else ''}\n{said}", fontsize="small")
            axes.set_xlabel("sharpness" if rho else "")
            axes.locator_params(nbins=4)
        grid[0, 0].set_ylabel(TARGETS[target])
    return drawn
