"""Running a sweep: a loop over its jobs, each of which writes one file, completely or not at all."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batches, check_source, is_function
from ..errors import called, naming, words_of
from ..evaluation import evaluate, progress_bar
from ..files import check_folder, write_json
from ..losses import Objective, count_examples
from ..measures import LOCAL
from ..measuring import RadiusError
from ..models import LoadedModel, load, load_state_dict
from .plan import Checkpoint, Sweep, shard_of, switched
from .results import Row, read_job


def run_sweep(sweep: Sweep, folder: str | os.PathLike[str], *, shard: str = "1/1", progress: bool = True) -> list[Row]:
    """Run the missing jobs of a sweep; jobs with a result from the same contents are not repeated.

    Parameters
    ----------
    sweep : Sweep
        The sweep to run.
    folder
        Folder for the results, with one file per job in its folder ``jobs``; see :func:`read_rows`.
    shard : str
        i/n: this process takes the i-th of n parts of the checkpoints. The results do not depend on which process runs
        which job.
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
    ...     [(row["checkpoint"], row["kind"], row.get("rho")) for row in read_rows(place, sweep)]
    [('net', 'fit', None), ('net', 'sharpness', 0.5)]
    """
    mine = shard_of(sweep.checkpoints, shard)
    for choice in filter(None, (sweep.data, sweep.train, sweep.test)):
        check_source(choice.source)
    place = check_folder(Path(folder) / "jobs")
    with naming(f"the device {sweep.device!r} cannot be used"):
        torch.zeros((), device=sweep.device).item()
    (Path(folder) / "results.jsonl").unlink(missing_ok=True)  # of the sweep before: an interrupted one has none
    failed: list[Row] = []
    with progress_bar(len(mine), "checkpoints", "checkpoint", progress=progress) as shown:
        for checkpoint in mine:
            failed += _run_missing(sweep, checkpoint, place)
            shown.update()
    return failed


def _run_missing(sweep: Sweep, checkpoint: Checkpoint, place: Path) -> list[Row]:
    """Run the jobs of a checkpoint that have no result, and return those that failed."""

    @functools.cache
    def loaded() -> LoadedModel:
        found = load(checkpoint.model, checkpoint.weights)
        found.model.to(sweep.device).eval()
        return found

    @functools.cache
    def read(name: str) -> Batches:
        found: Batches = getattr(sweep, name).load(loaded(), sweep.device)
        return found

    failed: list[Row] = []
    for job in sweep.jobs(checkpoint):
        rows = _rows_of(job, place)
        if all("error" in row for row in rows) and "error" not in job:
            found = _attempt(job, sweep, loaded, read)
            rows = [{**job, **row, "job": job_key(job), **versions()} for row in found]
            write_json(place / f"{job_key(job)}.json", rows)
        failed += [row for row in rows if "error" in row]
    return failed


def _attempt(job: Row, sweep: Sweep, loaded: Callable[[], LoadedModel], read: Callable[[str], Batches]) -> list[Row]:
    """Return the rows of a job; what failed, all of it or a radius at which the loss is not finite, has an error."""
    start = time.perf_counter()
    try:
        model = loaded()
        if job["kind"] == "sharpness":
            rows = _sharpness(job, model, read("data"))
        else:
            rows = [(_fit if job["kind"] == "fit" else _baselines)(sweep, model.model, read)]
            wrong = [k for k, v in rows[0].items() if isinstance(v, float) and not math.isfinite(v)]
            if wrong:
                raise ValueError(f"{wrong[0]} is {rows[0][wrong[0]]}; the model has diverged, or does not fit the data")
    except Exception as error:  # the sweep continues with the others
        return [{"error": words_of(error)}]
    return [{**row, "seconds": time.perf_counter() - start} for row in rows]


def measured(name: str, model: nn.Module, batches: Any, *, ablation: Mapping[str, Any], **settings: Any) -> Any:
    """Measure a quantity by its name in ``MEASURES`` or ``LOCAL``, with the settings of a sweep."""
    statistic = ablation.get("statistic", "worst")
    if name in LOCAL:
        statistic = LOCAL[name][1]
        own = ("micro_batch", "normalize_logits", "group", "progress", "seed")
        settings = {k: v for k, v in settings.items() if k in own}
    return evaluate(model, batches, measure=switched(name, ablation), statistic=statistic, **settings)


def _sharpness(job: Row, loaded: LoadedModel, data: Batches) -> list[Row]:
    """Return a row for each radius."""
    radii, rows = sorted(job["rho"]), list[Row]()
    settings = {**job["settings"], "ablation": job["ablation"], "keep_directions": False, "progress": False}
    while True:
        try:
            result = measured(job["measure"], loaded.model, data, rho=radii, **settings)
            break
        except RadiusError as error:
            if len(radii) < 2:
                raise
            rows.append({"rho": radii.pop(), "error": words_of(error)})
    remarks = [*loaded.remarks, *data.remarks, *result.remarks]
    for rho in result.rhos:  # 0 for a quantity at the weights
        part, batches = result[rho], result[rho].batches
        row = {"rho": rho, "sharpness": float(part), "per_batch": [b.value for b in batches]}
        row |= {k: getattr(part, k) for k in ("trace", "error_increase", "min_singular_value", "num_null")}
        row |= {"base_loss": fmean(b.base_loss for b in batches), "passes": sum(b.passes for b in batches)}
        rows.append({**row, "unconverged": sum(b.converged is False for b in batches), "remarks": remarks})
    return rows


def _fit(sweep: Sweep, model: nn.Module, read: Callable[[str], Batches]) -> dict[str, Any]:
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


def _baselines(sweep: Sweep, model: nn.Module, read: Callable[[str], Batches]) -> dict[str, Any]:
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


def read_rows(folder: str | os.PathLike[str], sweep: Sweep) -> list[dict[str, Any]]:
    """Read the rows of all finished jobs, in the order of the sweep.

    Parameters
    ----------
    folder
        The folder of :func:`run_sweep`.
    sweep : Sweep
        Whose rows are returned; the folder may have those of others too.

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
    ...     row = read_rows(place, sweep)[0]
    >>> row["checkpoint"], row["kind"], row["test_error"] == row["train_error"]
    ('net', 'fit', True)
    """
    return [row for row in _read(folder, sweep) if "error" not in row]


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
    return [row for row in _read(folder, sweep) if "error" in row]


def _read(folder: str | os.PathLike[str], sweep: Sweep) -> list[dict[str, Any]]:
    """Read the rows of jobs, failed ones too."""
    place = Path(folder) / "jobs"
    if not place.is_dir():
        raise FileNotFoundError(f"{folder} holds no results of a sweep (a folder 'jobs')")
    return [row for checkpoint in sweep.checkpoints for job in sweep.jobs(checkpoint) for row in _rows_of(job, place)]


def _rows_of(job: dict[str, Any], place: Path) -> list[dict[str, Any]]:
    """Read what is known of a job: itself where its model cannot be read."""
    return [job] if "error" in job else read_job(place / f"{job_key(job)}.json")
