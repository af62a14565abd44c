"""Running a sweep, and reading its records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from msgspec import UNSET, Struct, UnsetType

from ..data import Batches, DataChoice, check_source
from ..distributed import World, counter, everybody, shard_
from ..errors import naming, words_of
from ..files import check_folder, write_json
from ..models import LoadedModel, load
from ..progress import bar
from ..rows import AnyRow
from .digests import of_model, versions
from .measuring import do_job
from .plan import Checkpoint, Job, Sweep, as_data, job_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["read_failures", "read_rows", "run_sweep"]

T = TypeVar("T")


def run_sweep(
    sweep: Sweep, folder: str | os.PathLike[str], *, shard: tuple[int, int] = (1, 1), progress: bool = True
) -> list[dict[str, Any]]:
    """Run the missing jobs of a sweep; jobs with a result from the same contents are not repeated.

    Parameters
    ----------
    sweep : Sweep
        The sweep to run.
    folder
        Folder for the results, with one file per job in its folder ``jobs``; see :func:`read_rows`.
    shard : (int, int)
        (i, n): this process takes the i-th of n parts of the checkpoints. Under torchrun the processes draw
        checkpoints from a common counter instead, or do each together if the models are sharded. The results do not
        depend on which process runs which job.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list of dict
        The jobs that failed, with their ``error``; they are recorded, and tried again by the next call. If only some
        radii of a measure are too large, the results at the others are kept, and each failed radius has a dict with
        ``rho`` and ``error``.

    Raises
    ------
    ValueError, OSError
        There is no such shard, no data at a source, or the table of accuracies cannot be used.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from sharpness.sweep import Checkpoint, Sweep, read_rows
    >>> from sharpness.data import DataChoice
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, f"{place}/train.pt")
    ...     sweep = Sweep((net,), DataChoice(f"{place}/train.pt"), measures=("adaptive",), settings={"steps": 3})
    ...     failed = run_sweep(sweep, place, progress=False)
    ...     [(row["checkpoint"], row["kind"], row.get("rho")) for row in read_rows(place)]
    [('net', 'baselines', None), ('net', 'sharpness', 0.5)]
    """
    mine = shard_of(sweep.checkpoints, shard)
    for choice in filter(None, (sweep.data, sweep.train, sweep.test)):
        check_source(choice.source)
    if sweep.accuracies is not None:
        for checkpoint in sweep.checkpoints:
            sweep.accuracies.of(checkpoint.name)
    done = check_folder(Path(folder) / "jobs")
    with naming(f"the device {sweep.device!r} cannot be used"):
        torch.zeros((), device=sweep.device)
    failed: list[dict[str, Any]] = []
    cache = _Cache(torch.device(sweep.device), everybody() if sweep.sharded else None)
    with bar(len(mine), "checkpoints", "checkpoint", progress=progress) as shown:
        for position in range(len(mine)) if sweep.sharded else counter(len(mine)):
            failed += _do_checkpoint(sweep, mine[position], done, cache)
            shown.update()
    return failed


def shard_of(items: Sequence[T], shard: tuple[int, int]) -> Sequence[T]:
    """Take the i-th of n parts, every n-th item."""
    i, n = shard
    if not 1 <= i <= n:
        raise ValueError(f"shards are i/n with 1 ≤ i ≤ n, got {i}/{n}")
    return items[i - 1 :: n]


def read_rows(folder: str | os.PathLike[str], sweep: Sweep | None = None) -> list[dict[str, Any]]:
    """Read the rows of all finished jobs, in the order of checkpoint, kind, measure, ablation and radius.

    Parameters
    ----------
    folder
        The folder of :func:`run_sweep`.
    sweep : Sweep, optional
        Return only rows that belong to it; by default all rows in the folder.

    Returns
    -------
    list of dict
        One row per radius of a measure, one for a checkpoint's fit, and one for its baselines; see
        :mod:`sharpness.rows`.

    Raises
    ------
    FileNotFoundError
        The folder contains no results.

    Examples
    --------
    The loss and error of a network, as a sweep records them:

    >>> import tempfile
    >>> import torch
    >>> from sharpness.data import DataChoice
    >>> from sharpness.sweep import Checkpoint, Sweep
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, f"{place}/data.pt")
    ...     data = DataChoice(f"{place}/data.pt")
    ...     failed = run_sweep(Sweep((net,), data, test=data, measures=(), baselines=False), place, progress=False)
    ...     row = read_rows(place)[0]
    >>> row["checkpoint"], row["kind"], row["test_error"] == row["train_error"]
    ('net', 'fit', True)
    """
    found = _records(Path(folder) / "jobs", sweep)
    rows = [{**row, "job": name, **record["versions"]} for name, record in found for row in record.get("rows", ())]
    return sorted(rows, key=_place)


def read_failures(folder: str | os.PathLike[str], sweep: Sweep) -> list[dict[str, Any]]:
    """Read what failed when it was last tried.

    Parameters
    ----------
    folder : str or path
        As of :func:`read_rows`.
    sweep : Sweep
        As of :func:`read_rows`.

    Returns
    -------
    list of dict
        Of every failure the job and, under ``"error"``, why; where a single radius failed, with that ``"rho"``.

    Raises
    ------
    FileNotFoundError
        Where ``folder`` is not an output folder.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from sharpness.data import DataChoice
    >>> from sharpness.sweep import Checkpoint, Sweep
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.full((4, 4), torch.nan), "y": torch.arange(4)}, f"{place}/data.pt")
    ...     sweep = Sweep((net,), DataChoice(f"{place}/data.pt"), measures=("gradient-norm",), baselines=False)
    ...     failed = run_sweep(sweep, place, progress=False)
    ...     failures = read_failures(place, sweep)
    >>> len(failures), failures[0]["checkpoint"], failures[0]["error"]
    (1, 'net', 'the loss of batch 0 is nan; a sharpness needs a finite loss to start from')
    """
    unread = [failed for c in sweep.checkpoints for failed in _jobs(sweep, c)[1]]
    return unread + [failure for _, record in _records(Path(folder) / "jobs", sweep) for failure in _left_out(record)]


def _records(done: Path, sweep: Sweep | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the records of jobs, by their keys."""
    if not done.is_dir():
        raise FileNotFoundError(f"{done.parent} holds no results of a sweep (a folder 'jobs')")
    paths: Iterable[Path] = sorted(done.glob("*.json"))
    if sweep is not None:
        paths = [done / f"{job_key(job)}.json" for c in sweep.checkpoints for job in _jobs(sweep, c)[0]]
    for path in paths:
        yield path.stem, _read(path)


def _jobs(sweep: Sweep, checkpoint: Checkpoint) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return the jobs of a checkpoint and what failed: if its own files cannot be read, it has no jobs."""
    try:
        of_model(checkpoint.model, checkpoint.weights)
    except OSError as error:
        return [], [{"checkpoint": checkpoint.name, "kind": "model", "error": words_of(error)}]
    return list(sweep.jobs(checkpoint)), []


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    ablation = json.dumps(row.get("ablation", {}), sort_keys=True)
    return row["checkpoint"], row["kind"], row.get("measure", ""), ablation, row.get("rho", 0.0)


class _Cache:
    """Batches that several checkpoints share: reading thousands of images takes as long as running them.

    ``group`` has the processes over which models are sharded.
    """

    def __init__(self, device: torch.device, group: ProcessGroup | None) -> None:
        self.device, self.group = device, group
        self._batches: dict[str, Batches] = {}

    def batches(self, choice: DataChoice, loaded: LoadedModel) -> Batches:
        key = json.dumps([as_data(choice), loaded.input_key()], sort_keys=True)
        if key not in self._batches:
            if len(self._batches) > 2:  # training, test and measured examples of one kind of model
                self._batches.clear()
            self._batches[key] = choice.load(loaded, self.device)
        return self._batches[key]


def _do_checkpoint(sweep: Sweep, checkpoint: Checkpoint, done: Path, cache: _Cache) -> list[dict[str, Any]]:
    """Run the missing jobs of a checkpoint, and list those that failed."""
    jobs, failed = _jobs(sweep, checkpoint)
    loaded: LoadedModel | str | None = None
    for job in jobs:
        path = done / f"{job_key(job)}.json"
        record = _read(path)
        if "rows" not in record or "error" in record:
            loaded = _loaded(checkpoint, cache) if loaded is None else loaded
            record = {"job": job, "versions": versions(), **_attempt(job, sweep, loaded, cache)}
            if World(cache.group).rank == 0:
                write_json(path, record)
        failed += _left_out(record)
    return failed


def _loaded(checkpoint: Checkpoint, cache: _Cache) -> LoadedModel | str:
    """Load a model, or return the error, so that the sweep continues with the others."""
    try:
        found = load(checkpoint.model, checkpoint.weights)
        if cache.group is not None:
            shard_(found.model, cache.device)
        found.model.to(cache.device).eval()
        return found
    except Exception as error:
        return words_of(error)


def _attempt(job: Job, sweep: Sweep, loaded: LoadedModel | str, cache: _Cache) -> dict[str, Any]:
    if isinstance(loaded, str):
        return {"error": loaded}
    try:
        found = do_job(job, sweep, loaded.model, lambda choice: cache.batches(choice, loaded), cache.group)
        for row in found["rows"] if job["kind"] == "sharpness" else ():
            row["remarks"] = [*loaded.remarks, *row["remarks"]]
        return found
    except Exception as error:
        return {"error": words_of(error)}


def _left_out(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the failed parts of a job: all of it, or some radii."""
    found = [{**record["job"], "error": record["error"]}] if "error" in record else []
    too_large = record.get("too_large", {})
    return found + [{**record["job"], "rho": float(rho), "error": why} for rho, why in too_large.items()]


class _Record(Struct):
    job: dict[str, Any]
    versions: dict[str, str]
    rows: list[AnyRow] | UnsetType = UNSET
    too_large: dict[str, str] | UnsetType = UNSET
    error: str | UnsetType = UNSET


def _read(path: Path) -> dict[str, Any]:
    """Read a job's record; return an empty one if it is missing or invalid."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        msgspec.convert(found, _Record)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError):
        return {}
    return found
