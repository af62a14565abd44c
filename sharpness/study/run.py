"""Running a sweep: a loop over its jobs, each of which writes one file, completely or not at all."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data import Batches, check_source, is_function
from ..distributed import World, everybody, shard_
from ..errors import called, naming, words_of
from ..evaluation import evaluate, progress_bar
from ..files import check_folder, write_json
from ..losses import Objective, count_examples
from ..measures import LOCAL
from ..measuring import RadiusError
from ..models import LoadedModel, load, load_state_dict
from .plan import Checkpoint, Sweep, of_model, shard_of, switched
from .results import Record, read_record

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: Reads the batches for the current model: "data", "train" or "test" of the sweep.
Read = Callable[[str], Batches]


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
        (i, n): this process takes the i-th of n parts of the checkpoints. Under torchrun the processes take
        checkpoints in turn instead, or do each together if the models are sharded. The results do not
        depend on which process runs which job.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list of dict
        The jobs that failed, with their ``error``; the next call tries them again. If only some radii of a measure are
        too large, the results at the others are kept, and each failed radius has a dict with ``rho`` and ``error``.

    Raises
    ------
    ValueError, OSError
        There is no such shard, or no data at a source.

    Examples
    --------
    >>> import tempfile, torch
    >>> from sharpness.study import Checkpoint, Sweep, read_rows
    >>> from sharpness.data import DataChoice
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, f"{place}/train.pt")
    ...     data = DataChoice(f"{place}/train.pt")
    ...     sweep = Sweep(checkpoints=(net,), data=data, test=data, measures=("adaptive",))
    ...     failed = run_sweep(sweep, place, progress=False)
    ...     [(row["checkpoint"], row["kind"], row.get("rho")) for row in read_rows(place)]
    [('net', 'fit', None), ('net', 'sharpness', 0.5)]
    """
    mine = shard_of(sweep.checkpoints, shard)
    for choice in filter(None, (sweep.data, sweep.train, sweep.test)):
        check_source(choice.source)
    place = check_folder(Path(folder) / "jobs")
    with naming(f"the device {sweep.device!r} cannot be used"):
        torch.zeros((), device=sweep.device)
    world = everybody()
    if sweep.sharded and world.group is None:
        raise ValueError("a model is sharded over several processes: start the command by torchrun")
    failed: list[dict[str, Any]] = []
    with progress_bar(len(mine), "checkpoints", "checkpoint", progress=progress) as shown:
        for position, checkpoint in enumerate(mine):
            if sweep.sharded or world.owns(position):
                failed += _run_missing(sweep, checkpoint, place, world.group if sweep.sharded else None)
            shown.update()
    return failed


def _run_missing(sweep: Sweep, checkpoint: Checkpoint, place: Path, group: ProcessGroup | None) -> list[dict[str, Any]]:
    """Run the jobs of a checkpoint that have no result, and return those that failed."""
    jobs, failed = _jobs(sweep, checkpoint)
    loaded: LoadedModel | Exception | None = None

    @functools.cache
    def read(name: str) -> Batches:
        found: Batches = getattr(sweep, name).load(loaded, sweep.device)
        return found

    for job in jobs:
        path = place / f"{job_key(job)}.json"
        record = read_record(path)
        if record is None or not record["rows"]:
            loaded = _loaded(checkpoint, sweep.device, group) if loaded is None else loaded
            record = {"job": job, "versions": versions(), **_attempt(job, sweep, loaded, read, group)}
            if World(group).rank == 0:
                write_json(path, record)
        failed += _failures(record)
    return failed


def _loaded(checkpoint: Checkpoint, device: str, group: ProcessGroup | None) -> LoadedModel | Exception:
    """Load a model, or return the error, so that the sweep continues with the others."""
    try:
        loaded = load(checkpoint.model, checkpoint.weights)
        if group is not None:
            shard_(loaded.model, torch.device(device))
        loaded.model.to(device).eval()
        return loaded
    except Exception as error:
        return error


def _attempt(
    job: Mapping[str, Any], sweep: Sweep, loaded: LoadedModel | Exception, read: Read, group: ProcessGroup | None
) -> dict[str, Any]:
    """Return the rows of a job, and what failed: all of it, or the radii at which the loss is not finite."""
    start = time.perf_counter()
    failed: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    try:
        if isinstance(loaded, Exception):
            raise loaded
        if job["kind"] == "sharpness":
            batches = read("data")
            rows, failed, remarks = _sharpness(job, loaded.model, batches, group)
            about = {"remarks": [*loaded.remarks, *batches.remarks, *remarks]}
        else:
            rows = [(_fit if job["kind"] == "fit" else _baselines)(sweep, loaded.model, read)]
            wrong = [k for k, v in rows[0].items() if isinstance(v, float) and not math.isfinite(v)]
            if wrong:
                raise ValueError(f"{wrong[0]} is {rows[0][wrong[0]]}; the model has diverged, or does not fit the data")
    except Exception as error:
        return {"rows": [], "failed": [{"error": words_of(error)}]}
    about["seconds"] = time.perf_counter() - start
    return {"rows": [{**job, **row, **about} for row in rows], "failed": failed}


def measured(name: str, model: nn.Module, batches: Any, *, ablation: Mapping[str, Any], **settings: Any) -> Any:
    """Measure a quantity by its name in ``MEASURES`` or ``LOCAL``, with the settings of a sweep."""
    measure = switched(name, ablation)
    if name in LOCAL:
        own = ("micro_batch", "normalize_logits", "group", "progress", "seed")
        settings = {k: v for k, v in settings.items() if k in own}
        return evaluate(model, batches, measure=measure, statistic=LOCAL[name][1], **settings)
    return evaluate(model, batches, measure=measure, statistic=ablation.get("statistic", "worst"), **settings)


def _sharpness(
    job: Mapping[str, Any], model: nn.Module, data: Batches, group: ProcessGroup | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], tuple[str, ...]]:
    """Return a row for each radius, the radii that failed, and remarks."""
    radii, failed = sorted(job["rho"]), list[dict[str, Any]]()
    settings = {**job["settings"], "ablation": job["ablation"], "group": group}
    while True:
        try:
            result = measured(job["measure"], model, data, rho=radii, keep_directions=False, progress=False, **settings)
            break
        except RadiusError as error:
            if len(radii) < 2:
                raise
            failed.append({"rho": radii.pop(), "error": words_of(error)})
    rows = []
    for rho in result.rhos:  # 0 for a quantity at the weights
        part, batches = result[rho], result[rho].batches
        row = {"rho": rho, "sharpness": float(part), "per_batch": [b.value for b in batches], "trace": part.trace}
        about = {"base_loss": fmean(b.base_loss for b in batches), "error_increase": part.error_increase}
        counts = {"passes": sum(b.passes for b in batches), "unconverged": sum(b.converged is False for b in batches)}
        rows.append(
            {**row, **about, **counts, "min_singular_value": part.min_singular_value, "num_null": part.num_null}
        )
    return rows, failed, result.remarks


def _fit(sweep: Sweep, model: nn.Module, read: Read) -> dict[str, Any]:
    """Compute loss and error on training and test data."""
    row: dict[str, Any] = {}
    for part, name in (("train", "data" if sweep.train is None else "train"), ("test", "test")):
        if getattr(sweep, name) is not None:
            found = _loss_and_error(model, read(name), Objective(micro_batch=sweep.micro_batch))
            row |= {f"{part}_{k}": v for k, v in found.items()}
    return row


@torch.no_grad()
def _loss_and_error(model: nn.Module, batches: Iterable[Any], objective: Objective) -> dict[str, float | None]:
    """Compute means over examples."""
    loss, wrong, counted, total = 0.0, 0, 0, 0
    for batch in batches:
        parts = [(weight, objective(model, part)) for weight, part in objective.pieces(model, batch)]
        labels = sum(outcome.counted for _, outcome in parts)
        size = labels or count_examples(batch)
        loss += size * sum(weight * float(outcome.loss) for weight, outcome in parts)
        wrong, counted = wrong + sum(outcome.wrong for _, outcome in parts), counted + labels
        total += size
    return {"loss": loss / total, "error": wrong / counted if counted else None}


def _baselines(sweep: Sweep, model: nn.Module, read: Read) -> dict[str, Any]:
    """Compute what the function of the sweep returns."""
    start = None if sweep.initial is None else _start(sweep.initial, model)
    found = called(str(sweep.baselines), model, read("data"), start)
    with naming(f"{sweep.baselines} failed"):
        return {str(k): None if v is None else float(v) for k, v in found.items()}


def _start(initial: str, model: nn.Module) -> Mapping[str, Tensor]:
    """Read the initial weights, a transformers folder or a plain state dict, by the names of the model."""
    found = load(initial).model.state_dict() if Path(initial).is_dir() else load_state_dict(initial)
    # A bare body has no prefix, and fine-tuned image towers of CLIP are stored with one more.
    body, names = getattr(model, "base_model_prefix", ""), model.state_dict().keys()
    return {own: v for k, v in found.items() for own in {k, f"{body}.{k}", k.removeprefix("model.")} & names}


def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    return {name: version(name) for name in ("torch", "geoopt", "quotient-manifolds")}


def job_key(job: Mapping[str, Any]) -> str:
    """Hash a job for the name of its file, by contents and not by paths."""
    known = {k: v for k, v in job.items() if k != "model" or not Path(v).exists()}
    for name in ("data", "train", "test"):
        if name in known and not is_function(known[name]["source"]):
            known[name] = {k: v for k, v in known[name].items() if k != "source"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:20]


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
        :func:`sharpness.study.read_results`.

    Raises
    ------
    FileNotFoundError
        The folder contains no results.

    Examples
    --------
    The loss and error of a network, as a sweep records them:

    >>> import tempfile, torch
    >>> from sharpness.data import DataChoice
    >>> from sharpness.study import Checkpoint, Sweep
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, f"{place}/data.pt")
    ...     data = DataChoice(f"{place}/data.pt")
    ...     sweep = Sweep(checkpoints=(net,), data=data, test=data, measures=())
    ...     failed = run_sweep(sweep, place, progress=False)
    ...     row = read_rows(place)[0]
    >>> row["checkpoint"], row["kind"], row["test_error"] == row["train_error"]
    ('net', 'fit', True)
    """

    def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
        ablation = json.dumps(row.get("ablation", {}), sort_keys=True)
        return row["checkpoint"], row["kind"], row.get("measure", ""), ablation, row.get("rho", 0.0)

    rows = [
        {**row, "job": name, **record["versions"]}
        for name, record in _records(Path(folder) / "jobs", sweep)
        for row in record["rows"]
    ]
    return sorted(rows, key=order)


def read_failures(folder: str | os.PathLike[str], sweep: Sweep) -> list[dict[str, Any]]:
    """Read what failed when it was last tried.

    Parameters
    ----------
    folder, sweep
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
    >>> import tempfile, torch
    >>> from sharpness.data import DataChoice
    >>> from sharpness.study import Checkpoint, Sweep
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.full((4, 4), torch.nan), "y": torch.arange(4)}, f"{place}/data.pt")
    ...     sweep = Sweep(checkpoints=(net,), data=DataChoice(f"{place}/data.pt"), measures=("gradient-norm",))
    ...     failed = run_sweep(sweep, place, progress=False)
    ...     failures = read_failures(place, sweep)
    >>> len(failures), failures[0]["checkpoint"], failures[0]["error"]
    (1, 'net', 'the loss of batch 0 is nan; a sharpness needs a finite loss to start from')
    """
    unread = [failed for c in sweep.checkpoints for failed in _jobs(sweep, c)[1]]
    return unread + [failed for _, record in _records(Path(folder) / "jobs", sweep) for failed in _failures(record)]


def _records(place: Path, sweep: Sweep | None) -> Iterator[tuple[str, Record]]:
    """Read the records of jobs, by their keys."""
    if not place.is_dir():
        raise FileNotFoundError(f"{place.parent} holds no results of a sweep (a folder 'jobs')")
    keys: Iterable[str] = sorted(path.stem for path in place.glob("*.json"))
    if sweep is not None:
        keys = [job_key(job) for c in sweep.checkpoints for job in _jobs(sweep, c)[0]]
    for key in keys:
        record = read_record(place / f"{key}.json")
        if record is not None:
            yield key, record


def _jobs(sweep: Sweep, checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the jobs of a checkpoint and what failed: if its own files cannot be read, it has no jobs."""
    try:
        of_model(checkpoint.model, checkpoint.weights)
    except OSError as error:
        return [], [{"checkpoint": checkpoint.name, "kind": "model", "error": words_of(error)}]
    return list(sweep.jobs(checkpoint)), []


def _failures(record: Record) -> list[dict[str, Any]]:
    """List the failed parts of a job: all of it, or some radii."""
    return [{**record["job"], **failed} for failed in record["failed"]]
