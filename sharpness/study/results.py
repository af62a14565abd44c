"""The rows of a sweep: their file, the generalisation gap that they determine, and a table with a row for each model.

A row is a dict. Its ``kind`` is ``"fit"`` (losses and errors of a checkpoint on training and test data),
``"baselines"`` (further quantities by name) or ``"sharpness"`` (a measure at a radius).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Annotated, Any

import msgspec

from ..errors import naming, require_extra
from ..files import write_text
from ..measures import MEASURES

Row = Mapping[str, Any]
#: The targets that measures are compared with: names and descriptions.
TARGETS = {
    "gap": "test error − training error",
    "loss-gap": "test loss − training loss",
    "test-error": "test error",
    "test-loss": "test loss",
}
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
    """Its numbers have names of their own."""


class _Sharpness(_Row, tag="sharpness"):
    measure: Name
    ablation: dict[str, Any]
    rho: Annotated[float, msgspec.Meta(ge=0, lt=1e300)]
    sharpness: Finite
    trace: Finite | None = None
    per_batch: list[Finite] | None = None
    remarks: list[str] | None = None


#: A row, by its kind.
AnyRow = _Fit | _Baselines | _Sharpness
_FITS = _Fit.__struct_fields__[1:]


def read_job(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a job's file, of which those that failed have an error; none if it is missing or invalid."""
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        msgspec.convert([row for row in rows if "error" not in row], list[AnyRow])
    except (OSError, ValueError, RecursionError):
        return []
    return rows


def write_results(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write one JSON line per row."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a sweep's results.

    Parameters
    ----------
    path
        The folder of the sweep, or its ``results.jsonl``.

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
        raise FileNotFoundError(f"there are no results at {path}; pass a sweep's folder, or its results.jsonl")
    with naming(f"{path} holds no results of a sweep"):
        text = path.read_text(encoding="utf-8")
        if text.startswith("{\n"):
            raise ValueError("it is the result of one run, not of a sweep; sharpness sweep measures many checkpoints")
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        if not rows:
            raise ValueError("there is no row in it")
        _check_rows(rows)
    return rows


def _check_rows(rows: Sequence[Row]) -> None:
    """Raise for a row without its required fields, or for two rows of one place, from two sweeps or data sets."""
    numbers: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        try:
            msgspec.convert(row, AnyRow)
        except msgspec.ValidationError as error:
            raise ValueError(f"row {number}: {str(error).replace(' - at `$.', ': `')}") from error
        place = json.dumps([row.get(k) for k in ("checkpoint", "kind", "measure", "ablation", "rho")], sort_keys=True)
        first = numbers.setdefault(place, number)
        if first < number:
            raise ValueError(
                f"rows {first} and {number} are of the same checkpoint, measure and radius; keep one of them"
            )


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
    what, found = "loss" if "loss" in target else "error", {}
    for fit in (row for row in rows if row["kind"] == "fit"):
        test, train = fit.get(f"test_{what}"), fit.get(f"train_{what}") if "gap" in target else 0.0
        if test is not None and train is not None:
            found[fit["checkpoint"]] = test - train
    return found


def label(measure: str, ablation: Mapping[str, Any]) -> str:
    """Return the name of a measure with its changed fields."""
    return ", ".join([measure, *(f"{k} = {v}" for k, v in ablation.items())])


def measurements(rows: Sequence[Row]) -> Any:
    """Collect all quantities in a pandas DataFrame.

    Parameters
    ----------
    rows : sequence of mapping
        Of a sweep, see :func:`read_results`.

    Returns
    -------
    pandas.DataFrame
        With the columns ``checkpoint``, ``kind``, ``quantity``, ``rho`` (0 without a radius), ``value`` (the mean over
        the batches) and ``std_error`` (over the batches; NaN for one batch).

    Examples
    --------
    >>> of = {"checkpoint": "run 7", "kind": "sharpness", "measure": "adaptive", "ablation": {}}
    >>> found = measurements([{**of, "rho": 0.5, "sharpness": 0.2, "per_batch": [0.1, 0.3]}])
    >>> print(found.to_string(index=False))
    checkpoint      kind quantity  rho  value  std_error
         run 7 sharpness adaptive  0.5    0.2        0.1
    """
    with require_extra("tables need pandas", "plot"):
        import pandas as pd
    columns = ["checkpoint", "kind", "quantity", "rho", "value", "std_error"]
    return pd.DataFrame([line for row in rows for line in _lines(row)], columns=columns)


def _lines(row: Row) -> Iterator[tuple[Any, ...]]:
    checkpoint, kind = row["checkpoint"], row["kind"]
    if kind == "sharpness":
        name, batches = label(row["measure"], row["ablation"]), row.get("per_batch") or ()
        error = stdev(batches) / len(batches) ** 0.5 if len(batches) > 1 else math.nan
        yield checkpoint, kind, name, row["rho"], row["sharpness"], error
        if row.get("trace") is not None:
            yield checkpoint, kind, f"{name}, trace", 0.0, row["trace"], math.nan
        return
    for name in _FITS if kind == "fit" else row:
        if isinstance(row.get(name), (int, float)) and not isinstance(row[name], bool) and name != "seconds":
            yield checkpoint, kind, name, 0.0, row[name], math.nan


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
        Of a sweep, see :func:`read_results`.
    short : bool
        Take one radius for each measure: its default if the sweep has it, else the middle one.

    Returns
    -------
    pandas.DataFrame
        Losses and errors on training and test data, the gap (test error minus training error), and every measure with
        its radius; the standard error over the batches, if there are several, has a column of its own.

    Examples
    --------
    >>> fit = {"checkpoint": "run 7", "kind": "fit", "train_error": 0.25, "test_error": 0.375}
    >>> per_model([fit]).to_dict("records")
    [{'model': 'run 7', 'train error': 0.25, 'test error': 0.375, 'gap': 0.125}]
    """
    frame, gaps = measurements(rows), targets(rows, "gap")
    values = (one_radius(frame) if short else frame).set_index("checkpoint")
    table = values.loc[~values.index.duplicated(), []]
    for name in _FITS:
        if (values["quantity"] == name).any():
            table[name.replace("_", " ")] = values.loc[values["quantity"] == name, "value"]
    if gaps:
        table["gap"] = table.index.map(gaps)
    for (name, rho), part in values[values["kind"] == "sharpness"].groupby(["quantity", "rho"]):
        column = f"{name}, rho = {rho:g}" if rho else name
        table[column] = part["value"]
        if part["std_error"].notna().any():
            table[f"{column}, standard error"] = part["std_error"]
    return table.rename_axis("model").reset_index()


def remarks(rows: Sequence[Row]) -> list[str]:
    """List what was remarked on the measurements of a sweep, each once, with the models that it is about.

    Parameters
    ----------
    rows : sequence of mapping
        Of a sweep, see :func:`read_results`.

    Returns
    -------
    list of str

    Examples
    --------
    >>> row = {"checkpoint": "run 7", "kind": "sharpness", "measure": "adaptive", "ablation": {}, "remarks": ["so"]}
    >>> remarks([row, row])
    ['so (adaptive; run 7)']
    """
    about: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        for remark in row.get("remarks") or ():
            measures, models = about.setdefault(remark, ({}, {}))
            measures[label(row["measure"], row["ablation"])] = models[row["checkpoint"]] = None
    return [
        f"{remark} ({', '.join(measures)}; {', '.join(models) if len(models) <= 3 else f'{len(models)} models'})"
        for remark, (measures, models) in about.items()
    ]
