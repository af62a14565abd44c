"""The rows of a sweep: a file per job, from which the results are read.

A row is a dict. Its ``kind`` is ``"fit"`` (losses and errors of a checkpoint on training and test data),
``"baselines"`` (further quantities by name) or ``"sharpness"`` (a measure at a radius).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quotient_manifolds.hub import is_name

from ..errors import naming
from ..files import write_text
from ..hub_data import is_function
from .plan import Sweep

Row = Mapping[str, Any]
Finite = Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)] | None


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
    rho: Annotated[float, msgspec.Meta(ge=0, lt=1e300)]
    sharpness: Finite
    trace: Finite | None = None
    per_batch: list[Finite] | None = None
    remarks: list[str] | None = None
    # The names of ``sharpness.results.DOUBTS``.
    breakdown: Count = None
    num_uncertified: Count = None
    num_null: Count = None
    random_start: Count = None
    num_exited_pairs: Count = None
    unconverged: Count = None


#: A row, by its kind.
AnyRow = _Fit | _Baselines | _Sharpness
FITS = _Fit.__struct_fields__[1:]
#: What a row is about.
_PLACE = ("checkpoint", "kind", "measure", "rho")


def in_words(failure: Row) -> str:
    """Say what failed, and why."""
    # Where a single radius failed, the results at the others are kept.
    at = f" at rho = {failure['rho']:g}" if isinstance(failure.get("rho"), float) else ""
    return f"{failure['checkpoint']}, {failure.get('measure', failure['kind'])}{at}: {failure['error']}"


def job_key(job: Mapping[str, Any]) -> str:
    """Hash a job for the name of its file, by contents and not by paths."""
    known = {k: v for k, v in job.items() if k != "model" or not Path(v).exists()}
    for name in ("data", "train", "test"):
        if name in known and not (is_function(known[name]["source"]) or is_name(known[name]["source"], 4)):
            known[name] = {k: v for k, v in known[name].items() if k != "source"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:20]


def read_rows(folder: str | os.PathLike[str], sweep: Sweep, *, failed: bool = False) -> list[dict[str, Any]]:
    """Read the rows of all finished jobs, in the order of the sweep.

    Parameters
    ----------
    folder
        The folder of :func:`run_sweep`.
    sweep : Sweep
        Whose rows are returned; the folder may have those of others too.
    failed : bool
        Read instead what failed when it was last tried: of every failure the job and, under ``"error"``, why; where a
        single radius failed, with that ``"rho"``.

    Returns
    -------
    list of dict
        One row per radius of a measure, one for a checkpoint's fit, and one for its baselines; see
        :func:`sharpness.study.read_results`.

    Raises
    ------
    FileNotFoundError
        The folder contains no results.

    Examples
    --------
    A network whose data have no finite loss can be tested, but not measured:

    >>> import tempfile, torch
    >>> from sharpness.data import DataChoice
    >>> from sharpness.study import Checkpoint, Sweep, run_sweep
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, f"{place}/data.pt")
    ...     torch.save({"x": torch.full((4, 4), torch.nan), "y": torch.arange(4)}, f"{place}/nan.pt")
    ...     data, other = DataChoice(f"{place}/data.pt"), DataChoice(f"{place}/nan.pt")
    ...     sweep = Sweep(checkpoints=(net,), data=other, train=data, test=data, measures=("gradient-norm",))
    ...     _ = run_sweep(sweep, place, progress=False)
    ...     (row,), (failure,) = read_rows(place, sweep), read_rows(place, sweep, failed=True)
    >>> row["checkpoint"], row["kind"], row["test_error"] == row["train_error"]
    ('net', 'fit', True)
    >>> failure["measure"], failure["error"]
    ('gradient-norm', 'the loss of batch 0 is nan; a sharpness needs a finite loss to start from')
    """
    place = Path(folder) / "jobs"
    if not place.is_dir():
        raise FileNotFoundError(f"{folder} holds no results of a sweep (a folder 'jobs')")
    jobs = (job for checkpoint in sweep.checkpoints for job in sweep.jobs(checkpoint))
    return [row for job in jobs for row in rows_of(job, place) if ("error" in row) == failed]


def rows_of(job: dict[str, Any], place: Path) -> list[dict[str, Any]]:
    """Read the rows of a job, of which those that failed have an error; none if its file is missing or invalid.

    What is known of a job whose model cannot be read is the job itself.
    """
    if "error" in job:
        return [job]
    try:
        rows = msgspec.json.decode((place / f"{job_key(job)}.json").read_bytes(), type=list[dict[str, Any]])
        msgspec.convert([row for row in rows if "error" not in row], list[AnyRow])
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return []
    return rows


def read_failures(path: str | os.PathLike[str]) -> list[str]:
    """Say which jobs of a finished sweep failed, and why.

    Parameters
    ----------
    path
        The folder of the sweep, or its ``results.jsonl``.

    Returns
    -------
    list of str

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     row = '{"checkpoint": "a", "kind": "fit", "error": "the file is broken"}'
    ...     _ = pathlib.Path(place, "failed.jsonl").write_text(row, encoding="utf-8")
    ...     read_failures(place)
    ['a (fit): the file is broken']
    """
    file = (Path(path) if Path(path).is_dir() else Path(path).parent) / "failed.jsonl"
    found: dict[Any, dict[str, None]] = {}
    with naming(str(file)):
        for row in map(json.loads, file.read_text(encoding="utf-8-sig").splitlines() if file.is_file() else ()):
            found.setdefault((row["checkpoint"], row["error"]), {})[row.get("measure", row["kind"])] = None
    return [f"{checkpoint} ({', '.join(jobs)}): {error}" for (checkpoint, error), jobs in found.items()]


def are_rows(rows: Iterable[Row]) -> bool:
    """Return whether these are rows as a sweep has them."""
    try:
        msgspec.convert(list(rows), list[AnyRow])
    except Exception:  # numbers of numpy raise errors of their own
        return False
    return True


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
    ...     _ = pathlib.Path(place, "results.jsonl").write_text(row, encoding="utf-8")
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
        text = path.read_text(encoding="utf-8-sig")
        if text.startswith("{\n"):
            raise ValueError("it is the result of one run, not of a sweep; sharpness sweep measures many checkpoints")
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        if not rows:
            raise ValueError("there is no row in it")
        msgspec.convert(rows, list[AnyRow])
        ((place, count),) = Counter(json.dumps([row.get(k) for k in _PLACE]) for row in rows).most_common(1)
        if count > 1:  # from two sweeps or data sets
            raise ValueError(f"{count} rows are of the same checkpoint, measure and radius, {place}; keep one of them")
    return rows
