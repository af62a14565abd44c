"""The jobs of a sweep: the losses and errors of a model, its baselines, or its sharpness."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quotient_manifolds.linalg import at_least_float32

from ..baselines import (
    critical_sharpness,
    distance,
    fisher_trace,
    geodesic_distance,
    margin,
    norms,
    relative_flatness,
)  # fmt: skip
from ..batch_loss import RadiusError
from ..data import Batches, DataChoice
from ..errors import words_of
from ..evaluation import evaluate
from ..hessian import LOCAL, LocalResult, hessian
from ..losses import Objective, count_examples, to_float32
from ..models import load, load_state_dict
from ..perturb import becomes_float32, pointing_to
from ..results import SharpnessResult
from .plan import Checkpoint, Job, Sweep, switched

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["do_job"]

#: Returns the batches of a choice of data for the current model.
Read = Callable[[DataChoice], Batches]


def do_job(
    job: Job, sweep: Sweep, model: torch.nn.Module, read: Read, group: ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the rows of a job and, for radii at which the loss is not finite, the reasons.

    ``group`` has the processes over which the model is sharded; they do the job together.
    """
    start = time.perf_counter()
    if job["kind"] == "sharpness":
        batches = read(sweep.data)
        if job["measure"] in LOCAL:
            local = _local(job, model, batches, group)
            about = {"remarks": [*batches.remarks, *local.remarks], "seconds": time.perf_counter() - start}
            return {"rows": [{**job, **_local_row(local), **about}]}
        result, too_large = _measured(job, model, batches, group)
        about = {"remarks": [*batches.remarks, *result.remarks], "seconds": time.perf_counter() - start}
        return {"rows": [{**job, **row, **about} for row in _rows(result)], "too_large": too_large}
    found = _fit(job, sweep, model, read) if job["kind"] == "fit" else _baselines(sweep, model, read)
    wrong = [k for k, v in found.items() if isinstance(v, float) and not math.isfinite(v)]
    if wrong:
        raise ValueError(f"{wrong[0]} is {found[wrong[0]]}; the model has diverged, or does not fit the data")
    return {"rows": [{**job, **found, "seconds": time.perf_counter() - start}]}


def _measured(
    job: Job, model: torch.nn.Module, batches: list[Any], group: ProcessGroup | None
) -> tuple[SharpnessResult, dict[str, str]]:
    radii, too_large = sorted(job["rho"]), dict[str, str]()
    while True:
        try:
            result = evaluate(
                model, batches, measure=switched(job["measure"], job["ablation"]), rho=radii or None,
                statistic=job["ablation"].get("statistic", "worst"), keep_directions=False, progress=False,
                group=group, **job["settings"],
            )  # fmt: skip
            return result, too_large
        except RadiusError as error:
            if len(radii) < 2:
                raise
            too_large[str(radii.pop())] = words_of(error)


def _rows(result: SharpnessResult) -> Iterator[dict[str, Any]]:
    for rho in result.rhos:
        batches = result[rho].batches
        yield {
            "rho": rho,
            "sharpness": float(result[rho]),
            "per_batch": [b.value for b in batches],
            "base_loss": fmean(b.base_loss for b in batches),
            "error_increase": result[rho].error_increase,
            "passes": sum(b.passes for b in batches),
            "unconverged": sum(b.converged is False for b in batches),
            "min_singular_value": result.min_singular_value,
            "num_null": result.num_null,
        }


def _local(job: Job, model: torch.nn.Module, batches: list[Any], group: ProcessGroup | None) -> LocalResult:
    function, settings = LOCAL[job["measure"]][0], job["settings"]
    options = {k: settings[k] for k in ("micro_batch", "normalize_logits", *(["seed"] if function is hessian else []))}
    return function(model, batches, measure=switched(job["measure"], job["ablation"]), group=group, **options)


def _local_row(result: LocalResult) -> dict[str, Any]:
    values = [b.gradient_norm if b.max_eigenvalue is None else b.max_eigenvalue for b in result.batches]
    return {
        "rho": 0.0,
        "sharpness": fmean(values),
        "trace": result.trace,
        "per_batch": values,
        "base_loss": fmean(b.base_loss for b in result.batches),
        "error_increase": None,
        "passes": sum(b.passes for b in result.batches),
        "unconverged": 0,
        "min_singular_value": None,
        "num_null": 0,
    }


def _fit(job: Job, sweep: Sweep, model: torch.nn.Module, read: Read) -> dict[str, Any]:
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
            objective = Objective(micro_batch=sweep.settings.get("micro_batch"))
            row.update({f"{part}_{k}": v for k, v in _loss_and_error(model, read(choice), objective).items()})
    return row


def _loss_and_error(model: torch.nn.Module, batches: Iterable[Any], objective: Objective) -> dict[str, float | None]:
    """Compute means over examples."""
    loss, wrong, counted, total = 0.0, 0, 0, 0
    with torch.no_grad():
        for batch in batches:
            found = [(weight, objective(model, part)) for weight, part in objective.pieces(model, batch)]
            labels = sum(outcome.counted or 0 for _, outcome in found)
            size = labels or count_examples(batch)
            loss += size * sum(weight * float(outcome.loss) for weight, outcome in found)
            wrong, counted = wrong + sum(outcome.wrong or 0 for _, outcome in found), counted + labels
            total += size
    return {"loss": loss / total, "error": wrong / counted if counted else None}


def _baselines(sweep: Sweep, model: torch.nn.Module, read: Read) -> dict[str, Any]:
    batches, size = read(sweep.data), sweep.settings.get("micro_batch")
    # Small steps would be rounded away in half precision.
    moving = [p for p in model.parameters() if p.requires_grad and p.dtype != at_least_float32(p.dtype)]
    wide: dict[Tensor, Tensor] = {p: p.data.to(at_least_float32(p.dtype)) for p in moving}
    if becomes_float32(model, moving):
        batches = Batches(to_float32(batch) for batch in batches)
    with pointing_to(model, wide):
        parts = [part for batch in batches for _, part in Objective(micro_batch=size).pieces(model, batch)]
        row = {
            **norms(model), "relative_flatness": relative_flatness(model, parts), "margin": margin(model, parts),
            "fisher_trace": fisher_trace(model, parts),
            "critical_sharpness": critical_sharpness(model, batches[0], micro_batch=size),
        }  # fmt: skip
    return row if sweep.initial is None else {**row, **_distances(sweep.initial, model)}


def _distances(initial: Checkpoint, model: torch.nn.Module) -> dict[str, float | None]:
    """Compute both distances from the initial weights, read like the checkpoint, or as a plain state dict."""
    path = Path(initial.model)
    if path.is_dir():
        found = load(str(path)).model
        # The parameters of a bare body have no prefix.
        body = getattr(model, "base_model", None)
        same = getattr(found, "base_model_prefix", "") and found is getattr(found, "base_model", None)
        model = body if same and body is not None else model
        start = found.state_dict()
    else:
        start = load_state_dict(path)
        # Fine-tuned image towers of CLIP are stored with two prefixes.
        start = {**start, **{k.removeprefix("model."): v for k, v in start.items()}}
    return {"distance": distance(model, start), "geodesic_distance": geodesic_distance(model, start)}
