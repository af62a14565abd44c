"""Running a sweep: a look at every model, and a loop over the jobs, each of which writes one file of rows."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from quotient_manifolds.errors import is_mendable
from quotient_manifolds.hub import is_name

from ..batches import count_examples
from ..checkpoints import load_state_dict
from ..devices import checked_device, move
from ..errors import called, naming, words_of
from ..evaluation import Worst, progress_bar, statistic_of
from ..files import check_folder, write_json
from ..hub_data import check_source
from ..losses import Objective, RadiusError
from ..measures import Search
from ..models import LoadedModel, load
from ..options import Batches
from ..other_statistics import LOCAL, measure_of
from ..results import SharpnessResult, limits
from .plan import Checkpoint, Sweep, shard_of
from .rows import Row, in_words, job_key, rows_of


def run_sweep(
    sweep: Sweep, folder: str | os.PathLike[str], *, shard: str = "1/1", progress: bool = True, dry_run: bool = False
) -> list[Row]:
    """Run the missing jobs of a sweep; jobs with a result from the same contents are not repeated.

    Before the first one every model that has missing jobs is loaded, and runs on some examples of all data.

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
        Say what is to be done, and show progress bars. What fails is always said on standard error, when it happens.
    dry_run : bool
        Look at all models and data, and measure nothing.

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
    mine, place = shard_of(sweep.checkpoints, shard), Path(folder) / "jobs"
    for choice in sweep.sources():
        check_source(choice.source)
    checked_device(sweep.device)
    jobs = [(checkpoint, job) for checkpoint in mine for job in sweep.jobs(checkpoint)]
    todo = {job_key(job): job for _, job in jobs if _is_missing(job, place)}
    waiting = {job["checkpoint"] for job in todo.values()}
    unsound = _unsound(sweep, [c for c in mine if c.name in waiting])
    first = next((_Inputs(sweep, c) for c in mine if c.name in waiting - unsound.keys()), None)
    if progress:
        done = f"{len(jobs) - len(todo)} of {len(jobs)} jobs are done"
        _say(f"{len(waiting)} of {len(mine)} checkpoints{_estimate(first, list(todo.values()))}; {done}")
    if dry_run:
        return [{"checkpoint": name, "error": error} for name, error in unsound.items()]
    check_folder(place)
    for name in ("results.jsonl", "failed.jsonl"):  # of the sweep before: an interrupted one has none
        (Path(folder) / name).unlink(missing_ok=True)
    failed, inputs = list[Row](), first
    with progress_bar(len(todo), "sweep", "job", progress=progress) as shown:
        for checkpoint, job in jobs:
            if (key := job_key(job)) in todo:
                if inputs is None or inputs.checkpoint is not checkpoint:
                    inputs = _Inputs(sweep, checkpoint)
                shown.set_description(f"{checkpoint.name}, {job.get('measure', job['kind'])}", refresh=False)
                error = unsound.get(checkpoint.name)
                rows = [{"error": error}] if error else _attempt(job, inputs, progress=progress)
                write_json(place / f"{key}.json", [{**job, **row, "job": key, **versions()} for row in rows])
                shown.update()
            failed += (errors := [row for row in rows_of(job, place) if "error" in row])
            for row in errors if checkpoint.name not in unsound else ():
                _say(in_words(row))
    return failed


def _is_missing(job: dict[str, Any], place: Path) -> bool:
    return "error" not in job and all("error" in row for row in rows_of(job, place))


def _estimate(inputs: _Inputs | None, jobs: Sequence[Row]) -> str:
    """Say how long the searches of jobs may take: ten passes for a batch, each three times one without a gradient."""
    searches = sum(max(1, len(job["rho"])) for job in jobs if job["kind"] == "sharpness")
    said = f", {searches} searches"
    with suppress(Exception):  # which the job will report
        assert inputs is not None
        passes = Objective(micro_batch=inputs.sweep.micro_batch)
        passes.value(inputs.loaded.model, inputs.data[0])  # the first pass takes longer
        start = time.perf_counter()
        passes.value(inputs.loaded.model, inputs.data[0])
        seconds = searches * len(inputs.data) * 30 * (time.perf_counter() - start)
        said += f", roughly {f'{seconds:.0f} s' if seconds < 90 else f'{seconds / 60:.0f} min'}"
    return said


def _unsound(sweep: Sweep, checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    """Load every checkpoint, and pass some examples of all data through it; say at once what does not work."""
    found = dict[str, str]()
    for checkpoint in checkpoints:
        try:
            inputs = _Inputs(sweep, checkpoint)
            for choice in sweep.sources():
                few = replace(choice, batches=1, batch_size=min(4, choice.batch_size))
                batch = few.load(inputs.loaded, sweep.device)[0]
                with torch.no_grad():
                    Objective()(inputs.loaded.model, batch)
        except Exception as error:  # the sweep continues with the others
            found[checkpoint.name] = _recorded(error)
            _say(f"{checkpoint.name}: {words_of(error)}")
    return found


def _recorded(error: Exception) -> str:
    """Describe an error for the rows; of a defect of ours, show the traceback."""
    if not is_mendable(error):
        _say("".join(traceback.format_exception(error)))
    return words_of(error)


def _say(text: str) -> None:
    """Write to standard error, above the bars."""
    tqdm.write(f"sharpness: {text}", file=sys.stderr)


class _Inputs:
    """A checkpoint's model and data, which are read when a job needs them."""

    def __init__(self, sweep: Sweep, checkpoint: Checkpoint) -> None:
        self.sweep, self.checkpoint = sweep, checkpoint

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        loaded = load(self.checkpoint.model, self.checkpoint.weights)
        move(loaded.model, self.sweep.device)
        return loaded

    @functools.cached_property
    def data(self) -> Batches:
        return self.sweep.data.load(self.loaded, self.sweep.device)


def _attempt(job: Row, inputs: _Inputs, *, progress: bool) -> list[Row]:
    """Return the rows of a job; what failed, all of it or a radius at which the loss is not finite, has an error."""
    start = time.perf_counter()
    try:
        if job["kind"] == "sharpness":
            rows = _sharpness(job, inputs, progress)
        else:
            rows = [_fit(inputs) if job["kind"] == "fit" else _baselines(inputs)]
            for name, value in rows[0].items():
                if value is not None and not math.isfinite(value):
                    raise ValueError(f"{name} is {value}; the model has diverged, or does not fit the data")
    except Exception as error:  # the sweep continues with the others
        return [{"error": _recorded(error)}]
    return [{**row, "seconds": time.perf_counter() - start} for row in rows]


def quantity(
    name: str, model: nn.Module, batches: Any, search: Search, rho: Any = None, **options: Any
) -> SharpnessResult:
    """Measure a quantity by its name in ``MEASURES`` or ``LOCAL``; one at the weights has no radius."""
    if name in LOCAL:
        return statistic_of(LOCAL[name][1](search.seed), model, batches, measure=measure_of(name), **options)
    return statistic_of(Worst(search), model, batches, measure=measure_of(name), rho=rho, **options)


def _sharpness(job: Row, inputs: _Inputs, progress: bool) -> list[Row]:
    """Return a row for each radius."""
    radii, rows = sorted(job["rho"]), list[Row]()
    settings = {k: v for k, v in job["settings"].items() if k in Search.__dataclass_fields__}
    options = {"micro_batch": job["settings"]["micro_batch"], "keep_directions": False, "progress": progress}
    while True:
        try:
            result = quantity(job["measure"], inputs.loaded.model, inputs.data, Search(**settings), radii, **options)
            break
        except RadiusError as error:
            if len(radii) < 2:
                raise
            rows.append({"rho": radii.pop(), "error": words_of(error)})
    remarks = [*inputs.loaded.remarks, *inputs.data.remarks, *result.remarks]
    for rho in result.rhos:  # 0 for a quantity at the weights
        part, batches = result[rho], result[rho].batches
        row = {"rho": rho, "sharpness": float(part), "per_batch": [b.value for b in batches], "remarks": remarks}
        row |= {k: getattr(part, k) for k in ("trace", "error_increase", "min_singular_value")}
        row |= {"base_loss": fmean(b.base_loss for b in batches), "passes": sum(b.passes for b in batches)}
        rows.append({**row, **limits(part)})
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
        body, names = getattr(model, "base_model_prefix", ""), model.state_dict().keys()
        whole = Path(initial).is_dir() or is_name(initial)
        found = load(initial).model.state_dict() if whole else load_state_dict(initial, names)
        # A bare body has no prefix, and fine-tuned image towers of CLIP are stored with one more.
        start = {own: v for k, v in found.items() for own in {k, f"{body}.{k}", k.removeprefix("model.")} & names}
    function = str(inputs.sweep.baselines)
    numbers = called(function, model, inputs.data, start)
    with naming(f"{function} failed"):
        return {str(k): None if v is None else float(v) for k, v in numbers.items()}


@functools.cache  # reading it took a seventh of the time of a sweep over small models
def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    return {name: version(name) for name in ("torch", "geoopt", "quotient-manifolds")}
