"""Running a sweep: a loop over its jobs, each of which writes one file of rows; and reading the rows.

A row is a dict. Its ``kind`` is ``"fit"`` (losses and errors of a checkpoint on training and test data),
``"baselines"`` (further quantities by name) or ``"sharpness"`` (a measure at a radius).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
import torch
from torch import nn

from ..data import Batches, check_source, is_function
from ..errors import called, naming, words_of
from ..evaluation import evaluate, progress_bar
from ..files import check_folder, write_json, write_text
from ..losses import Objective, count_examples
from ..measures import LOCAL
from ..measuring import RadiusError
from ..models import LoadedModel, checked_device, load, load_state_dict
from .plan import Checkpoint, Sweep, shard_of, switched

Row = Mapping[str, Any]
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
FITS = _Fit.__struct_fields__[1:]
#: What a row is about.
_PLACE = ("checkpoint", "kind", "measure", "ablation", "rho")


def label(measure: str, ablation: Mapping[str, Any]) -> str:
    """Return the name of a measure with its changed fields."""
    return ", ".join([measure, *(f"{k} = {v}" for k, v in ablation.items())])


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
    checked_device(sweep.device)
    (Path(folder) / "results.jsonl").unlink(missing_ok=True)  # of the sweep before: an interrupted one has none
    failed: list[Row] = []
    with progress_bar(len(mine), "checkpoints", "checkpoint", progress=progress) as shown:
        for checkpoint in mine:
            inputs = _Inputs(sweep, checkpoint)
            for job in sweep.jobs(checkpoint):
                rows, key = _rows_of(job, place), job_key(job)
                if all("error" in row for row in rows) and "error" not in job:
                    rows = [{**job, **row, "job": key, **versions()} for row in _attempt(job, inputs)]
                    write_json(place / f"{key}.json", rows)
                failed += [row for row in rows if "error" in row]
            shown.update()
    return failed


class _Inputs:
    """A checkpoint's model and data, which are read when a job needs them."""

    def __init__(self, sweep: Sweep, checkpoint: Checkpoint) -> None:
        self.sweep, self.checkpoint = sweep, checkpoint

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        loaded = load(self.checkpoint.model, self.checkpoint.weights)
        loaded.model.to(self.sweep.device)
        return loaded

    @functools.cached_property
    def data(self) -> Batches:
        return self.sweep.data.load(self.loaded, self.sweep.device)


def _attempt(job: Row, inputs: _Inputs) -> list[Row]:
    """Return the rows of a job; what failed, all of it or a radius at which the loss is not finite, has an error."""
    start = time.perf_counter()
    try:
        if job["kind"] == "sharpness":
            rows = _sharpness(job, inputs)
        else:
            rows = [_fit(inputs) if job["kind"] == "fit" else _baselines(inputs)]
            for name, value in rows[0].items():
                if value is not None and not math.isfinite(value):
                    raise ValueError(f"{name} is {value}; the model has diverged, or does not fit the data")
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


def _sharpness(job: Row, inputs: _Inputs) -> list[Row]:
    """Return a row for each radius."""
    radii, rows = sorted(job["rho"]), list[Row]()
    settings = {**job["settings"], "ablation": job["ablation"], "keep_directions": False, "progress": False}
    while True:
        try:
            result = measured(job["measure"], inputs.loaded.model, inputs.data, rho=radii, **settings)
            break
        except RadiusError as error:
            if len(radii) < 2:
                raise
            rows.append({"rho": radii.pop(), "error": words_of(error)})
    remarks = [*inputs.loaded.remarks, *inputs.data.remarks, *result.remarks]
    for rho in result.rhos:  # 0 for a quantity at the weights
        part, batches = result[rho], result[rho].batches
        row = {"rho": rho, "sharpness": float(part), "per_batch": [b.value for b in batches], "remarks": remarks}
        row |= {k: getattr(part, k) for k in ("trace", "error_increase", "min_singular_value", "num_null")}
        row |= {"base_loss": fmean(b.base_loss for b in batches), "passes": sum(b.passes for b in batches)}
        rows.append({**row, "unconverged": sum(b.converged is False for b in batches)})
    return rows


def _fit(inputs: _Inputs) -> dict[str, float | None]:
    """Compute loss and error on training and test data."""
    row, sweep = dict[str, float | None](), inputs.sweep
    for part, choice in (("train", sweep.train), ("test", sweep.test)):
        if choice is not None or part == "train":
            batches = inputs.data if choice is None else choice.load(inputs.loaded, sweep.device)
            found = _loss_and_error(inputs.loaded.model, batches, Objective(micro_batch=sweep.micro_batch))
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


def _baselines(inputs: _Inputs) -> dict[str, float | None]:
    """Compute what the function of the sweep returns, from the model, the batches and the initial weights."""
    model, initial, start = inputs.loaded.model, inputs.sweep.initial, None
    if initial is not None:
        found = load(initial).model.state_dict() if Path(initial).is_dir() else load_state_dict(initial)
        # A bare body has no prefix, and fine-tuned image towers of CLIP are stored with one more.
        body, names = getattr(model, "base_model_prefix", ""), model.state_dict().keys()
        start = {own: v for k, v in found.items() for own in {k, f"{body}.{k}", k.removeprefix("model.")} & names}
    function = str(inputs.sweep.baselines)
    numbers = called(function, model, inputs.data, start)
    with naming(f"{function} failed"):
        return {str(k): None if v is None else float(v) for k, v in numbers.items()}


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
    >>> from sharpness.study import Checkpoint, Sweep
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
    return [row for job in jobs for row in _rows_of(job, place) if ("error" in row) == failed]


def _rows_of(job: dict[str, Any], place: Path) -> list[dict[str, Any]]:
    """Read the rows of a job, of which those that failed have an error; none if its file is missing or invalid.

    What is known of a job whose model cannot be read is the job itself.
    """
    if "error" in job:
        return [job]
    try:
        rows = msgspec.json.decode((place / f"{job_key(job)}.json").read_bytes(), type=list[dict[str, Any]])
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
        msgspec.convert(rows, list[AnyRow])
        numbers: dict[str, int] = {}
        for number, row in enumerate(rows, 1):  # from two sweeps or data sets
            place = json.dumps([row.get(k) for k in _PLACE], sort_keys=True)
            first = numbers.setdefault(place, number)
            if first < number:
                raise ValueError(
                    f"rows {first} and {number} are of the same checkpoint, measure and radius; keep one of them"
                )
    return rows
