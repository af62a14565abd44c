"""Tables: rows of sweeps, rankings, and verdicts in words."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sharpness.files import write_text
from sharpness.study.rows import Row
from sharpness.study.tables import FEWEST_MODELS

from .comparison import BASELINES, CONTROLS, Ranking
from .statistics import Correlation

__all__ = ["controls_in_words", "formatted", "read_table", "verdicts", "write_rows"]

#: Columns of a table of rows; columns without meaning for a fit or baseline row are empty.
_COLUMNS = [
    "checkpoint", "kind", "measure", "ablation", "rho", "sharpness", "trace", "base_loss", "error_increase", "passes",
    "unconverged", "seconds", "remarks", "train_loss", "train_error", "test_loss", "test_error",
    *(name for name, kind in BASELINES.items() if kind == "baselines"),
]  # fmt: skip


def write_rows(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Write rows of a sweep as a ``.csv`` with eight digits per number."""
    frame = pd.DataFrame(list(rows), columns=_COLUMNS)
    for name in ("ablation", "remarks"):
        frame[name] = [json.dumps(v, sort_keys=True) if isinstance(v, (dict, list)) and v else "" for v in frame[name]]
    write_text(path, frame.to_csv(index=False, float_format="%.8g", lineterminator="\n"))


def read_table(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read rows of a sweep that :func:`write_rows` wrote."""
    words = ("checkpoint", "kind", "measure")
    with Path(path).open(encoding="utf-8", newline="") as file:
        cells = [{k: v for k, v in line.items() if v} for line in csv.DictReader(file)]
    rows = [{k: v if k in words else json.loads(v) for k, v in line.items()} for line in cells]
    return [{"ablation": {}, **row} if row["kind"] == "sharpness" else row for row in rows]


def verdicts(found: Sequence[Ranking], bound: float = 0.3) -> dict[str, str]:
    """Say for every quantity whether it predicts anything of the target beyond training loss and error.

    Parameters
    ----------
    found : sequence of Ranking
        Result of :func:`compare`. Rankings with a corrected interval are used, those of a measure at all its radii
        together.
    bound : float
        A partial τ within ±bound counts as negligible.

    Returns
    -------
    dict of str to str
        By quantity: ``"yes, +"`` or ``"yes, −"`` if the corrected intervals at all radii exclude 0 on the same side;
        ``"nothing of size"`` if all of them lie within ±bound; ``"unresolved"`` otherwise, and for fewer than ten
        models.

    Examples
    --------
    A quantity that is the gap itself, and one that is noise, given a training loss of no consequence:

    >>> from reproduction.comparison import compare
    >>> rng = np.random.default_rng(0)
    >>> gap, loss, noise = rng.uniform(size=(3, 60))
    >>> of = [{"checkpoint": i, "kind": "fit", "train_loss": loss[i], "test_loss": gap[i] + loss[i]} for i in range(60)]
    >>> of += [{"checkpoint": i, "kind": "baselines", "margin": gap[i], "distance": noise[i]} for i in range(60)]
    >>> verdicts(compare(of, "loss-gap"))
    {'distance': 'unresolved', 'margin': 'yes, +'}
    """
    intervals: dict[str, list[Correlation]] = {}
    for r in found:
        if r.corrected is not None and r.choice in ("ρ", "–"):
            intervals.setdefault(r.quantity, []).append(r.corrected)
    return {name: _verdict(taus, bound) for name, taus in intervals.items()}


def _verdict(taus: Sequence[Correlation], bound: float) -> str:
    if min(t.models for t in taus) < FEWEST_MODELS:
        return "unresolved"
    if all(t.low > 0 for t in taus) or all(t.high < 0 for t in taus):
        return "yes, +" if taus[0].value > 0 else "yes, −"
    return "nothing of size" if all(-bound < t.low and t.high < bound for t in taus) else "unresolved"


def controls_in_words(given: Sequence[str]) -> str:
    """Name what was controlled for: training loss and error, and what else."""
    return ", ".join(["training loss and error", *(name.replace("_", " ") for name in given if name not in CONTROLS)])


_HEAD = [
    "quantity", "radius", "ρ", "median loss increase", "models", "τ", "95 % interval", "p",
    "τ given train loss and error", "p", "corrected interval", "τ − adaptive",
]  # fmt: skip


def _cells(row: Ranking) -> list[str]:
    def number(value: float | None, digits: str) -> str:
        return "" if value is None else "–" if np.isnan(value) else format(value, digits)

    def interval(tau: Correlation) -> str:
        return "" if np.isnan(tau.value) else f"[{tau.low:+.2f}, {tau.high:+.2f}]"

    def judged(tau: Correlation) -> str:
        fewer = tau.models != row.tau.models  # the models that its whole family has
        return f"{tau.value:+.2f} {interval(tau)}, {tau.models} models" if fewer else interval(tau)

    partial, difference = row.partial, row.difference
    return [
        row.quantity if ":" in row.quantity else row.quantity.replace("_", " "),
        row.choice.replace("_", " "),
        number(row.rho, ".3g"),
        number(row.loss_increase, ".3g"),
        str(row.tau.models),
        number(row.tau.value, "+.2f"),
        interval(row.tau),
        number(row.tau.p, ".2g"),
        number(None if partial is None else partial.value, "+.2f"),
        number(None if partial is None else partial.p, ".2g"),
        "" if row.corrected is None else judged(row.corrected),
        "" if difference is None else f"{difference.value:+.2f} {interval(difference)}",
    ]


def formatted(found: Sequence[Ranking]) -> str:
    """Tabulate rankings in markdown.

    Parameters
    ----------
    found : sequence of Ranking
        Result of :func:`reproduction.comparison.compare`.

    Returns
    -------
    str

    Examples
    --------
    >>> from reproduction.comparison import compare
    >>> rows = [{"checkpoint": i, "kind": "fit", "train_error": 0.1 * i, "test_error": 0.3 * i} for i in range(3)]
    >>> print(formatted(compare(rows)).splitlines()[2])
    | train error | – |  |  | 3 | +1.00 | [...
    """
    lines = [_HEAD, ["---"] * len(_HEAD), *map(_cells, found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace(" --- ", "---")
