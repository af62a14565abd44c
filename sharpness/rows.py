"""The rows of a sweep: their files, and the generalisation gap that they determine.

A row is a dict. Its ``kind`` is ``"fit"`` (losses and errors of a checkpoint on training and test data),
``"baselines"`` (norms and the like) or ``"sharpness"`` (a measure at a radius).
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .errors import naming
from .files import write_text

__all__ = ["BASELINES", "TARGETS", "read_results", "targets"]

Row = Mapping[str, Any]
#: The targets that measures are compared with: names and descriptions.
TARGETS = {
    "gap": "test error − training error",
    "loss-gap": "test loss − training loss",
    "test-error": "test error",
    "test-loss": "test loss",
}
_TEXT = ("checkpoint", "kind", "measure")
_COUNTS = ("passes", "unconverged")

Finite = Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class _Row(msgspec.Struct, tag_field="kind"):
    checkpoint: Name


class _Fit(_Row, tag="fit"):
    train_loss: Finite | None = None
    train_error: Finite | None = None
    test_loss: Finite | None = None
    test_error: Finite | None = None


class _Baselines(_Row, tag="baselines"):
    weight_norm: Finite | None = None
    log_spectral: Finite | None = None
    distance: Finite | None = None
    geodesic_distance: Finite | None = None
    relative_flatness: Finite | None = None
    margin: Finite | None = None
    fisher_trace: Finite | None = None
    critical_sharpness: Finite | None = None
    alpha: Finite | None = None


class _Sharpness(_Row, tag="sharpness"):
    measure: Name
    ablation: dict[str, Any]
    rho: Annotated[float, msgspec.Meta(ge=0, lt=1e300)]
    sharpness: Finite
    trace: Finite | None = None
    per_batch: list[Finite] | None = None
    remarks: list[str] | None = None


#: Required fields of a row of each kind.
AnyRow = _Fit | _Baselines | _Sharpness
_OF_FIT, _OF_BASELINES = (kind.__struct_fields__[1:] for kind in (_Fit, _Baselines))
#: Quantities that need no search, by the kind of row that has them.
BASELINES = {"train_loss": "fit", "train_error": "fit"} | dict.fromkeys(_OF_BASELINES, "baselines")
#: Columns of a .csv file; columns without meaning for a fit or baseline row are empty.
_COLUMNS = (
    *_TEXT, "ablation", "rho", "sharpness", "trace", "base_loss", "error_increase", *_COUNTS, "seconds", "remarks",
    *_OF_FIT, *_OF_BASELINES,
)  # fmt: skip


def write_results(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write one JSON line per row or, to a ``.csv``, the table that comparisons need, with eight digits per number."""
    if Path(path).suffix != ".csv":
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        return
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _cell(row[k]) for k in _COLUMNS if k in row} for row in rows)
    write_text(path, stream.getvalue())


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a sweep's results.

    Parameters
    ----------
    path
        The folder of the sweep, its ``results.jsonl``, or its ``results.csv``.

    Returns
    -------
    list of dict
        The rows, in the order of the file.

    Raises
    ------
    ValueError, OSError
        The file does not exist, or it does not contain such results.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     row = '{"checkpoint": "a", "kind": "fit", "train_loss": 0.25}'
    ...     _ = pathlib.Path(place, "results.jsonl").write_text(row)
    ...     read_results(place)
    [{'checkpoint': 'a', 'kind': 'fit', 'train_loss': 0.25}]
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "results.jsonl").is_file() and (path / "jobs").is_dir():
            raise FileNotFoundError(f"the sweep in {path} is not complete; run `sharpness sweep` again to resume it")
        path = path / "results.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"there are no results at {path}; pass a sweep's folder, its results.jsonl or a .csv")
    with naming(f"{path} holds no results of a sweep"), path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            rows = [_row_of_cells(cells) for cells in csv.DictReader(file)]
        else:
            text = file.read()
            _refuse_one_run(text)
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        if not rows:
            raise ValueError("there is no row in it")
        _check_rows(rows)
    return rows


def targets(rows: Sequence[Row], target: str = "gap") -> dict[str, float]:
    """Look up the target by checkpoint; checkpoints without it are left out.

    Parameters
    ----------
    rows : sequence of mapping
        Rows as returned by :func:`read_results`; those of the kind ``"fit"`` are used.
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
    if not all(isinstance(row, Mapping) for row in rows):
        raise TypeError("rows must be mappings, as returned by sharpness.rows.read_results")
    what = "loss" if "loss" in target else "error"
    found = {}
    for row in rows:
        test, train = row.get(f"test_{what}"), row.get(f"train_{what}") if "gap" in target else 0.0
        if row["kind"] == "fit" and test is not None and train is not None:
            found[row["checkpoint"]] = test - train
    return found


def _cell(value: Any) -> Any:
    if isinstance(value, (Mapping, list)):
        return json.dumps(value, sort_keys=True) if value else ""
    return f"{value:.8g}" if isinstance(value, float) else value


def _row_of_cells(cells: Mapping[str, str]) -> dict[str, Any]:
    def value(column: str, text: str) -> Any:
        if column in ("ablation", "remarks"):
            return json.loads(text)
        return text if column in _TEXT else int(text) if column in _COUNTS else float(text)

    row = {k: value(k, v) for k, v in cells.items() if v not in ("", None)}
    return {"ablation": {}, **row} if row.get("kind") == "sharpness" else row


def _refuse_one_run(text: str) -> None:
    """Raise for what ``sharpness run --out`` or ``to_json`` has written."""
    try:
        found = json.loads(text)
    except ValueError:
        return
    if isinstance(found, Mapping) and ("results" in found or "sharpness" in found) and "kind" not in found:
        raise ValueError("it is the result of one run, not of a sweep; sharpness sweep measures many checkpoints")


def _check_rows(rows: Sequence[Row]) -> None:
    """Raise for a row without its required fields, or for two rows of one place, from two sweeps or data sets."""
    places: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows, 1):
        try:
            msgspec.convert(row, AnyRow)
        except msgspec.ValidationError as error:
            raise ValueError(f"row {number}: {str(error).replace(' - at `$.', ': `')}") from error
        place = (*(row.get(k) for k in (*_TEXT, "rho")), json.dumps(row.get("ablation"), sort_keys=True))
        if place in places:
            raise ValueError(
                f"rows {places[place]} and {number} are of the same checkpoint, measure and radius; keep one of them"
            )
        places[place] = number
