"""Running a sweep: a loop over its jobs, each of which writes one file, completely or not at all."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..batch_loss import RadiusError
from ..building import trainable
from ..data import Batches, DataChoice, check_source
from ..distributed import World, counter, everybody, shard_
from ..errors import called, naming, words_of
from ..evaluation import evaluate
from ..files import check_folder, write_json
from ..hessian import LOCAL, hessian
from ..losses import Objective, count_examples
from ..models import LoadedModel, load, load_state_dict
from ..progress import bar
from .plan import Checkpoint, Job, Sweep, as_data, job_key, of_model, shard_of, switched, versions
from .results import read_record

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["distance", "read_failures", "read_rows", "run_sweep"]

#: Returns the batches of a choice of data for the current model.
Read = Callable[[DataChoice], Batches]


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
        The jobs that failed, with their ``error``; the next call tries them again. If only some radii of a measure are
        too large, the results at the others are kept, and each failed radius has a dict with ``rho`` and ``error``.

    Raises
    ------
    ValueError, OSError
        There is no such shard, no data at a source, or the table of accuracies cannot be used.

    Examples
    --------
    >>> import tempfile, torch
    >>> from sharpness.study import Checkpoint, Sweep, read_rows
    >>> from sharpness.data import DataChoice
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, f"{place}/train.pt")
    ...     data = DataChoice(f"{place}/train.pt")
    ...     sweep = Sweep(checkpoints=(net,), data=data, test=data, measures=("adaptive",), steps=3)
    ...     failed = run_sweep(sweep, place, progress=False)
    ...     [(row["checkpoint"], row["kind"], row.get("rho")) for row in read_rows(place)]
    [('net', 'fit', None), ('net', 'sharpness', 0.5)]
    """
    mine = shard_of(sweep.checkpoints, shard)
    for choice in filter(None, (sweep.data, sweep.train, sweep.test)):
        check_source(choice.source)
    if sweep.accuracies is not None:
        for checkpoint in mine:
            sweep.accuracies.of(checkpoint.name)
    place = check_folder(Path(folder) / "jobs")
    with naming(f"the device {sweep.device!r} cannot be used"):
        torch.zeros((), device=sweep.device)
    reader, group = _Reader(sweep.device), everybody() if sweep.sharded else None
    failed: list[dict[str, Any]] = []
    with bar(len(mine), "checkpoints", "checkpoint", progress=progress) as shown:
        for position in range(len(mine)) if sweep.sharded else counter(len(mine)):
            jobs, unread = _jobs(sweep, mine[position])
            failed += unread
            loaded: LoadedModel | Exception | None = None
            for job in jobs:
                path = place / f"{job_key(job)}.json"
                record = read_record(path)
                if "rows" not in record or "error" in record:
                    loaded = _loaded(mine[position], sweep.device, group) if loaded is None else loaded
                    record = {"job": job, "versions": versions(), **_attempt(job, sweep, loaded, reader, group)}
                    if World(group).rank == 0:
                        write_json(path, record)
                failed += _left_out(record)
            shown.update()
    return failed


class _Reader:
    """Batches that several checkpoints share: reading thousands of images takes as long as running them."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._batches: dict[str, Batches] = {}

    def batches(self, choice: DataChoice, loaded: LoadedModel) -> Batches:
        key = json.dumps([as_data(choice), loaded.input_key()], sort_keys=True)
        if key not in self._batches:
            if len(self._batches) > 2:  # training, test and measured examples of one kind of model
                self._batches.clear()
            self._batches[key] = choice.load(loaded, self.device)
        return self._batches[key]


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
    job: Job, sweep: Sweep, loaded: LoadedModel | Exception, reader: _Reader, group: ProcessGroup | None
) -> dict[str, Any]:
    """Return the rows of a job, and the radii at which the loss is not finite with the reasons; or its error."""
    start = time.perf_counter()
    too_large: dict[str, str] = {}
    about: dict[str, Any] = {}
    try:
        if isinstance(loaded, Exception):
            raise loaded
        if job["kind"] == "sharpness":
            batches = reader.batches(sweep.data, loaded)
            rows, remarks, too_large = _sharpness(job, loaded.model, batches, group)
            about = {"remarks": [*loaded.remarks, *batches.remarks, *remarks]}
        else:
            quantities = _fit if job["kind"] == "fit" else _baselines
            rows = [quantities(job, sweep, loaded.model, lambda choice: reader.batches(choice, loaded))]
            wrong = [k for k, v in rows[0].items() if isinstance(v, float) and not math.isfinite(v)]
            if wrong:
                raise ValueError(f"{wrong[0]} is {rows[0][wrong[0]]}; the model has diverged, or does not fit the data")
    except Exception as error:
        return {"error": words_of(error)}
    about |= {"seconds": time.perf_counter() - start}
    return {"rows": [{**job, **row, **about} for row in rows], "too_large": too_large}


def _sharpness(
    job: Job, model: nn.Module, batches: list[Any], group: ProcessGroup | None
) -> tuple[list[dict[str, Any]], tuple[str, ...], dict[str, str]]:
    measure, settings, ablation = switched(job["measure"], job["ablation"]), job["settings"], job["ablation"]
    if job["measure"] in LOCAL:
        function = LOCAL[job["measure"]][0]
        own = ("micro_batch", "normalize_logits", *(["seed"] if function is hessian else []))
        local = function(model, batches, measure=measure, group=group, **{k: settings[k] for k in own})
        values = [b.gradient_norm if b.max_eigenvalue is None else b.max_eigenvalue for b in local.batches]
        return [{"rho": 0.0, "trace": local.trace, **_row(local, values)}], local.remarks, {}
    radii, too_large = sorted(job["rho"]), dict[str, str]()
    while True:
        try:
            result = evaluate(
                model, batches, measure=measure, rho=radii, statistic=ablation.get("statistic", "worst"),
                keep_directions=False, progress=False, group=group, **settings,
            )  # fmt: skip
            break
        except RadiusError as error:
            if len(radii) < 2:
                raise
            too_large[str(radii.pop())] = words_of(error)
    about = {"min_singular_value": result.min_singular_value, "num_null": result.num_null}
    rows = [
        {
            "rho": rho,
            **_row(result[rho], [b.value for b in result[rho].batches]),
            "error_increase": result[rho].error_increase,
            "unconverged": sum(b.converged is False for b in result[rho].batches),
            **about,
        }
        for rho in result.rhos
    ]
    return rows, result.remarks, too_large


def _row(result: Any, values: list[float]) -> dict[str, Any]:
    return {
        "sharpness": fmean(values),
        "per_batch": values,
        "base_loss": fmean(b.base_loss for b in result.batches),
        "passes": sum(b.passes for b in result.batches),
    }


def _fit(job: Job, sweep: Sweep, model: nn.Module, read: Read) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if sweep.accuracies is not None:
        known = job["known"]
        if known is None:
            raise ValueError(f"{sweep.accuracies.file} has no accuracy for {job['checkpoint']!r}")
        row = {f"{part}_error": 1 - value for part, value in known.items()}
        if "train" in known:
            return row
    for part, choice in (("train", sweep.train or sweep.data), ("test", sweep.test)):
        if choice is not None:
            objective = Objective(micro_batch=sweep.micro_batch)
            row |= {f"{part}_{k}": v for k, v in _loss_and_error(model, read(choice), objective).items()}
    return row


@torch.no_grad()
def _loss_and_error(model: nn.Module, batches: Iterable[Any], objective: Objective) -> dict[str, float | None]:
    """Compute means over examples."""
    loss, wrong, counted, total = 0.0, 0, 0, 0
    for batch in batches:
        parts = [(weight, objective(model, part)) for weight, part in objective.pieces(model, batch)]
        labels = sum(outcome.counted or 0 for _, outcome in parts)
        size = labels or count_examples(batch)
        loss += size * sum(weight * float(outcome.loss) for weight, outcome in parts)
        wrong, counted = wrong + sum(outcome.wrong or 0 for _, outcome in parts), counted + labels
        total += size
    return {"loss": loss / total, "error": wrong / counted if counted else None}


def _baselines(job: Job, sweep: Sweep, model: nn.Module, read: Read) -> dict[str, Any]:
    """Compute the distance from the initial weights, and what the function of the sweep returns."""
    start: Mapping[str, Tensor] | None = None
    row: dict[str, Any] = {}
    if sweep.initial is not None:
        start = _start(sweep.initial, model)
        row["distance"] = distance(model, start)
    if sweep.baselines is not None:
        values = called(sweep.baselines, model, read(sweep.data), start)
        with naming(f"{sweep.baselines} failed"):
            row |= {str(k): None if v is None else float(v) for k, v in values.items()}
    return row


def _start(initial: Checkpoint, model: nn.Module) -> Mapping[str, Tensor]:
    """Read the initial weights, a transformers folder or a plain state dict, by the names of the model."""
    if Path(initial.model).is_dir():
        first = load(initial.model).model
        # The parameters of a bare body have no prefix.
        body = str(getattr(first, "base_model_prefix", ""))
        bare = body and first is getattr(first, "base_model", None) and hasattr(model, body)
        return {f"{body}.{k}" if bare else k: v for k, v in first.state_dict().items()}
    start = load_state_dict(initial.model)
    # Fine-tuned image towers of CLIP are stored with two prefixes.
    return {**start, **{k.removeprefix("model."): v for k, v in start.items()}}


@torch.no_grad()
def distance(model: nn.Module, start: Mapping[str, Tensor]) -> float:
    r"""Compute the distance from the initial weights, :math:`\|θ - θ_0\|_2` (Jiang et al. 2020, App. C).

    Trainable weights that the state dict θ₀ has too, by name and shape, are compared, in double precision. It is not
    invariant.
    """
    trained = trainable(model)
    common = {name: p for name, p in trained.items() if name in start and start[name].shape == p.shape}
    known, total = (sum(p.numel() for p in named.values()) for named in (common, trained))
    if known < 0.5 * total:
        raise ValueError(
            f"the initial weights have {known:,} of the {total:,} weights of {type(model).__name__}; name the model "
            "that it was fine-tuned from, or leave initial out"
        )
    squares = ((p.double() - start[name].to(p.device, torch.float64)).square().sum() for name, p in common.items())
    return sum(map(float, squares)) ** 0.5


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
        for row in record.get("rows", ())
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
    return unread + [failed for _, record in _records(Path(folder) / "jobs", sweep) for failed in _left_out(record)]


def _records(place: Path, sweep: Sweep | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the records of jobs, by their keys."""
    if not place.is_dir():
        raise FileNotFoundError(f"{place.parent} holds no results of a sweep (a folder 'jobs')")
    keys: Iterable[str] = sorted(path.stem for path in place.glob("*.json"))
    if sweep is not None:
        keys = [job_key(job) for c in sweep.checkpoints for job in _jobs(sweep, c)[0]]
    for key in keys:
        yield key, read_record(place / f"{key}.json")


def _jobs(sweep: Sweep, checkpoint: Checkpoint) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return the jobs of a checkpoint and what failed: if its own files cannot be read, it has no jobs."""
    try:
        of_model(checkpoint.model, checkpoint.weights)
    except OSError as error:
        return [], [{"checkpoint": checkpoint.name, "kind": "model", "error": words_of(error)}]
    return list(sweep.jobs(checkpoint)), []


def _left_out(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the failed parts of a job: all of it, or some radii."""
    whole = [{**record["job"], "error": record["error"]}] if "error" in record else []
    too_large = record.get("too_large", {})
    return whole + [{**record["job"], "rho": float(rho), "error": why} for rho, why in too_large.items()]
