"""Tables: rows of sweeps, and verdicts in words."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sharpness.files import write_text
from sharpness.study.rows import Row
from sharpness.study.tables import FEWEST_MODELS

from .comparison import BASELINES, CONTROLS, Ranking
from .statistics import Correlation

__all__ = ["controls_in_words", "read_table", "verdicts", "write_rows"]

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
        By quantity: ``"correlated, +"`` or ``"correlated, −"`` if the corrected intervals at all radii exclude 0 on
        the same side; ``"negligible"`` if all of them lie within ±bound; ``"unresolved"`` otherwise, and for fewer
        than ten models.

    Examples
    --------
    A quantity that is the gap itself, and one that is noise, given a training loss of no consequence:

    >>> import numpy as np
    >>> from reproduction.comparison import compare
    >>> rng = np.random.default_rng(0)
    >>> gap, loss, noise = rng.uniform(size=(3, 60))
    >>> of = [{"checkpoint": i, "kind": "fit", "train_loss": loss[i], "test_loss": gap[i] + loss[i]} for i in range(60)]
    >>> of += [{"checkpoint": i, "kind": "baselines", "margin": gap[i], "distance": noise[i]} for i in range(60)]
    >>> verdicts(compare(of, "loss-gap"))
    {'distance': 'unresolved', 'margin': 'correlated, +'}
    """
    intervals: dict[str, list[Correlation]] = {}
    for r in found:
        if r.corrected is not None:
            intervals.setdefault(r.quantity, []).append(r.corrected)
    return {name: _verdict(taus, bound) for name, taus in intervals.items()}


def _verdict(taus: Sequence[Correlation], bound: float) -> str:
    if min(t.models for t in taus) < FEWEST_MODELS:
        return "unresolved"
    if all(t.low > 0 for t in taus) or all(t.high < 0 for t in taus):
        return "correlated, +" if taus[0].value > 0 else "correlated, −"
    return "negligible" if all(-bound < t.low and t.high < bound for t in taus) else "unresolved"


def controls_in_words(given: Sequence[str]) -> str:
    """Name what was controlled for: training loss and error, and what else."""
    return ", ".join(["training loss and error", *(name.replace("_", " ") for name in given if name not in CONTROLS)])
