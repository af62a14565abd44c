"""What sharpness is good for: does it tell what a second task, or rounding of the weights, does to a network?

``python -m studies.second_task run --minilm M --sst2 S --ag-news A --weights W --images I --mnist N`` trains 48
networks of each of three collections (``_second_tasks.py``) on a first task, measures them (predictors), trains copies
on a second task, and rounds the weights (targets). The plan is docs/results/second-task-plan.md. A network is one line
of JSON, appended when it is done; those that are there are not done again. ``--only minilm:3 --out F`` makes one row
again.

``moved`` measures the first three networks of each collection before and after random symmetries, in double precision.
``report`` writes the tables of docs/, ``power`` applies the primary test to simulated collections. One thread.
"""

from __future__ import annotations

import argparse
import copy
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sharpness
from benchmarks._common import RESULTS, write
from quotient_manifolds.symmetries import ALL, canonicalize_, find, move_
from quotient_manifolds.weights import pointing_to
from reproduction.baselines import norms
from sharpness.losses import RadiusError

from . import _second_tasks as tasks
from ._second_report import power, report
from ._second_tasks import COLLECTIONS, Batch, Collection, Data
from .lora_text import keep, kept

BITS, SEEDS = (8, 4, 3, 2), (200, 201)
#: Shares of a row's largest weight at which the outermost level lies; a loss is the mean over them, since one rounding
#: is one draw of its noise.
SCALES = (1.0, 0.95, 0.9)
#: Where the data are, the fields of ``Data``.
PATHS = {
    "minilm": "transformers folder of all-MiniLM-L6-v2",
    "sst2": "folder with train.tsv and dev.tsv",
    "ag_news": "folder with alps/dev.tsv and official/test.csv",
    "weights": "state dict of the vision transformer",
    "images": "zip with cifar10/{train,test}/CLASS/NAME.jpg",
    "mnist": "folder with MNIST's idx files",
}
#: Networks whose second task is also trained by LoRA: the first of the order.
ADAPTED = 12
#: How the same network is written, by a change in place that leaves its function: in which weights are rounded, too.
GAUGES: dict[str, Callable[[nn.Module], Any]] = {
    "own": lambda model: None,
    "balanced": lambda model: move_(model, condition=1.0, seed=0),
    "random": lambda model: move_(model, condition=10.0, seed=0),
    "canonical": lambda model: canonicalize_(model, replace(find(model, scope=ALL), pairs=())),
}


# -- predictors --------------------------------------------------------------------------------------------------------


def increases(model: nn.Module, batch: Batch, measure: str, radii: list[float], statistic: str) -> list[Any]:
    """Measure the increase of the loss at every radius; None where the loss is not finite in the ball."""
    worst = partial(sharpness.evaluate, steps=8, relative_tol=1e-3)
    found = worst if statistic == "worst" else partial(sharpness.average, num_samples=3)
    try:
        result = found(model, [batch], measure=measure, rho=radii, keep_directions=False, progress=False)
        return [float(result[rho]) for rho in radii]
    except RadiusError:
        return [None] if len(radii) == 1 else [increases(model, batch, measure, [r], statistic)[0] for r in radii]


def critical_along(model: nn.Module, batch: Batch, direction: dict[str, Tensor], rise: float = 0.1) -> float | None:
    """Return 2/η for the least step η along a direction that raises the loss by ``rise``; None if none does.

    Along another task's update the loss may rise at once, which leaves no step that does not raise it at all.
    """

    weights = dict(model.named_parameters())

    def loss(step: float) -> float:
        with pointing_to(model, {name: weights[name] + step * d for name, d in direction.items()}):
            return float(F.cross_entropy(*tasks.scores_and_labels(model, batch)))

    with torch.no_grad():
        base, low, high, step = loss(0.0), 0.0, math.inf, 1e-3
        for _ in range(12):
            low, high = (low, step) if not loss(step) <= base + rise else (step, high)
            step = high / 4 if low == 0 else low * 4 if math.isinf(high) else (low * high) ** 0.5
    return 2 / step if low > 0 and math.isfinite(high) else None


def first_update(model: nn.Module, c: Collection, second: Batch, seed: int) -> dict[str, Tensor]:
    """Return the direction of AdamW's first step on the second task, without the head: the sign of the gradient."""
    twin = tasks.with_new_head(model, c.head, tasks.classes_of(second), seed)
    F.cross_entropy(*tasks.scores_and_labels(twin, tasks.take(second, torch.arange(c.points)))).backward()
    moved = dict(twin.named_parameters())
    return {n: -moved[n].grad.sign() for n in body(model, c) if moved[n].grad is not None}  # type: ignore[union-attr]


def body(model: nn.Module, c: Collection) -> dict[str, nn.Parameter]:
    """Return all parameters but those of the head, which the two tasks do not share."""
    return {n: p for n, p in model.named_parameters() if not c.head or not n.startswith(f"{c.head}.")}


def predictors(model: nn.Module, c: Collection, data: list[Batch]) -> dict[str, Any]:
    """Measure all that may predict, on examples of the first task's training data."""
    batch, few = (tasks.take(data[0], torch.arange(n)) for n in (c.points, c.curvature_points))
    found: dict[str, Any] = {}
    for measure, rho in c.rho.items():
        for statistic, radii in (("worst", rho[:2]), ("average", rho[2:])):
            values = increases(model, batch, measure, radii, statistic)
            found |= {f"{measure} {statistic} {k}": v for k, v in zip(("small", "large"), values, strict=True)}
    for measure in ("euclidean", "geodesic-inv"):
        quiet = {"measure": measure, "progress": False}
        found[f"{measure} gradient norm"] = float(sharpness.gradient_norm(model, [batch], **quiet))
        curvature = sharpness.hessian(model, [few], num_matvecs=9, **quiet)
        found |= {f"{measure} eigenvalue": float(curvature), f"{measure} trace": curvature.trace}
    found["critical sharpness"] = sharpness.critical_sharpness(model, [batch])
    along = [critical_along(model, batch, first_update(model, c, data[2], s)) for s in SEEDS]
    found["critical sharpness, second task"] = None if None in along else fmean(along)
    return found | norms(model)


# -- targets -----------------------------------------------------------------------------------------------------------


def second_tasks(model: nn.Module, c: Collection, data: list[Batch], methods: list[str]) -> list[dict[str, Any]]:
    """Train on the second task: the first task's test loss afterwards, with its own head, and what was learnt."""
    rows = []
    before = {n: p.detach().clone() for n, p in body(model, c).items()}
    for method, seed in product(methods, SEEDS):
        after = tasks.second_training(copy.deepcopy(model), c, method, seed, data[2])
        learnt = tasks.tested(after, data[3])
        moved = sum(float((p.detach() - before[n]).double().square().sum()) for n, p in body(after, c).items()) ** 0.5
        if c.head:
            after.set_submodule(c.head, model.get_submodule(c.head))
        loss, error = tasks.tested(after, data[1])
        rows.append({"method": method, "seed": seed, "loss": loss, "error": error, "learnt_loss": learnt[0],
                     "learnt_error": learnt[1], "distance": moved})  # fmt: skip
    return rows


def rounded_(model: nn.Module, bits: int, share: float) -> nn.Module:
    """Round the matrices of hidden layers, a scale for each row, to 2ᵇ − 1 levels; tables and last layers stay."""
    tables, top = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}, 2 ** (bits - 1) - 1
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2 and p not in tables and not name.startswith(("classifier.", "mlp_head.", "lm_head.")):
                scale = share * p.abs().amax(1, keepdim=True).clamp_min(1e-12) / top
                p.copy_((p / scale).round().clamp(-top, top) * scale)
    return model


def roundings(model: nn.Module, c: Collection, data: list[Batch]) -> dict[str, Any]:
    """Test losses after rounding, in every gauge; and what the measures that depend on the gauge say there."""
    batch, found = tasks.take(data[0], torch.arange(c.points)), dict[str, dict[str, Any]]()
    for gauge, written in GAUGES.items():
        twin = copy.deepcopy(model)
        written(twin)
        for b in BITS:
            losses = [tasks.tested(rounded_(copy.deepcopy(twin), b, share), data[1])[0] for share in SCALES]
            found.setdefault(gauge, {})[f"{b} bits"] = fmean(losses)
        found[gauge]["unrounded"] = tasks.tested(twin, data[1])[0]
        if gauge != "own":
            for measure in ("euclidean", "adaptive"):
                found[gauge][measure] = increases(twin, batch, measure, c.rho[measure][1:2], "worst")[0]
    return found


# -- rows --------------------------------------------------------------------------------------------------------------


def trained(name: str, recipe: tasks.Recipe, data: Data) -> tuple[nn.Module, list[Batch]]:
    """Train a network on its first task."""
    c = COLLECTIONS[name]
    model, batches = tasks.start(name, data, c.sizes, recipe.seed)
    tasks.first_training(model, c, recipe, batches[0])
    return model, batches


def run(name: str, number: int, data: Data) -> dict[str, Any]:
    """Make the row of a network."""
    c, recipe, clock = COLLECTIONS[name], tasks.grid()[number], [time.process_time()]

    def lap() -> float:
        clock.append(time.process_time())
        return round(clock[-1] - clock[-2], 1)

    model, batches = trained(name, recipe, data)
    seconds = {"first": lap()}
    loss, error = tasks.tested(model, batches[1])
    row: dict[str, Any] = {"collection": name, "number": number, **recipe._asdict(), "loss": loss, "error": error}
    if not math.isfinite(loss) or error >= most_frequent(batches[1]):
        return {**row, "left_out": "it has learned nothing", "seconds": seconds}
    few = tasks.take(batches[0], torch.arange(min(256, len(tasks.labels_of(batches[0])))))
    row["train_loss"], row["train_error"] = tasks.tested(model, few)
    row["predictors"] = predictors(model, c, batches)
    seconds["predictors"] = lap()
    row["second"] = second_tasks(model, c, batches, list(tasks.METHODS)[: 3 if number < ADAPTED else 1])
    seconds["second"] = lap()
    row["rounding"] = roundings(model, c, batches)
    seconds["rounding"] = lap()
    return {**row, "seconds": seconds, "commit": commit(), "torch": torch.__version__}


def most_frequent(batch: Batch) -> float:
    """Return the error of always naming the most frequent class."""
    labels = tasks.labels_of(batch).flatten()
    return 1 - float(labels.bincount().max()) / len(labels)


def commit() -> str:
    """Name the commit of the code."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        encoding="utf-8",
    )  # fmt: skip
    return found.stdout.strip()


def moved(name: str, number: int, data: Data) -> dict[str, Any]:
    """Measure a network in double precision, then after moving its heads, and after moving all that it can."""
    model, batches = trained(name, tasks.grid()[number], data)
    model = model.double()
    c, row = COLLECTIONS[name], {"collection": name, "number": number}
    batch = tasks.take(batches[0], torch.arange(c.points // 2))
    if not isinstance(batch, dict):
        batch = (batch[0].double(), batch[1])
    found = find(model, scope=ALL)
    every, heads = set(found.dimensions), {p.kind for p in find(model).pairs}
    kinds = {"none": (), "heads": heads, "all": every, "all but rotation": every - {"rotation"}}
    for move, moving in kinds.items():  # averages follow a rotation in distribution only
        twin = copy.deepcopy(model)
        if moving:
            move_(twin, found, seed=1, kinds=moving)
        row[move] = {"loss": float(F.cross_entropy(*tasks.scores_and_labels(twin, batch)))}
        for measure, rho in c.rho.items():
            for statistic, radius in (("worst", rho[1]), ("average", rho[3])):
                row[move][f"{measure} {statistic}"] = increases(twin, batch, measure, [radius], statistic)[0]
        for measure in ("euclidean", "geodesic-inv"):
            quiet = {"measure": measure, "progress": False}
            row[move][f"{measure} gradient norm"] = float(sharpness.gradient_norm(twin, [batch], **quiet))
    return row


def units(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """What is to be done, in order: all collections grow at the same time."""
    if options.only:
        for one in options.only:
            name, _, number = one.partition(":")
            yield name, int(number)
        return
    for number in range(3 if options.command == "moved" else len(tasks.grid())):
        yield from ((name, number) for name in COLLECTIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "moved", "report", "power"))
    for name, what in PATHS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, help=what)
    parser.add_argument("--out", type=Path, help="file of the rows")
    parser.add_argument("--only", nargs="+", help="networks, such as minilm:3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # it would pass by LoRA
    if options.command == "power":
        write("second_task_power", power())
        return
    if options.command == "report":
        report(kept(options.out or RESULTS / "second_task.jsonl"), RESULTS.parent / "docs" / "tables")
        return
    data = Data(**{name: getattr(options, name) for name in PATHS})
    make, name = (run, "second_task") if options.command == "run" else (moved, "second_task_moved")
    out = options.out or RESULTS / f"{name}.jsonl"
    done = {(r["collection"], r["number"]) for r in kept(out)}
    for unit in units(options):
        if unit not in done:
            keep(make(*unit, data), out)


if __name__ == "__main__":
    main()
