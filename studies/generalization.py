"""Does geodesic sharpness rank models by how they generalise? The study's three collections, or zoos.

``gather KIND --zoo ZOO`` writes what was measured of a zoo (``python -m reproduction zoo``, ``radii``, and
``sharpness sweep``) to tables in ``results/``. ``vision`` trains 24 fine-tunes of the public ``vit_cifar10`` on 2,000
CIFAR-10 images, each with a random recipe, and measures them with and without parts of the measure; every step resumes
where it was stopped, and ``--shard i/n`` shares the work among processes. ``report`` draws the figures and writes the
tables of docs/ from all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
import torch

from benchmarks._common import RESULTS, write
from reproduction.adaptive_norm import AdaptiveNormMeasure
from reproduction.additive import AdditiveMeasure
from reproduction.collection import train_collection
from reproduction.comparison import label
from reproduction.hypothesis import GIVEN, hypothesis
from reproduction.plots import WORDS, plot_partial
from reproduction.radii import PRIMARY
from reproduction.rk4 import RungeKuttaMeasure
from reproduction.statistics import kendall
from reproduction.study import (
    OUTCOMES,
    account,
    agreement,
    beside_distance,
    differences,
    judged,
    plain_table,
    rows_of,
    table,
)
from reproduction.tables import read_table, write_rows
from reproduction.zoo import KINDS
from sharpness import MEASURES as KNOWN
from sharpness import Measure
from sharpness.data import DataChoice
from sharpness.files import write_json, write_text
from sharpness.study import read_config, read_rows, run_sweep
from sharpness.study.rows import Row

DOCS = RESULTS.parent / "docs"
#: Test examples of each collection, and shifted ones.
TESTED = {"vit": (10_000, 10_000), "minilm": (9_815, 4_530), "scratch": (10_000, 10_000)}
MEASURES = ["geodesic-inv", "geodesic-mix", "adaptive", "gradient-norm"]
RADII = {
    "geodesic-inv": [0.02, 0.05, 0.1, 0.2], "geodesic-mix": [0.01, 0.02, 0.05, 0.1], "adaptive": [0.06, 0.15, 0.5, 0.8],
}  # fmt: skip


#: At ρ = 0.1 in the inv metric, on 64 points. The recorded "relaxation = 0.1" was a floor that the metric had.
def ablation(kind: type[Measure], what: str, **changes: Any) -> Measure:
    """Make a measure with the inv metric, called as in the tables."""
    return kind(**{**vars(KNOWN["geodesic-inv"]), "name": f"geodesic-inv, {what}", **changes})


ABLATIONS = [
    ablation(Measure, "geodesic = first-order", geodesic="first-order"),
    ablation(Measure, "geodesic = exact", geodesic="exact"),
    ablation(Measure, "symmetry = qk", symmetry="qk"),
    ablation(Measure, "symmetry = vo", symmetry="vo"),
    ablation(RungeKuttaMeasure, "geodesic = rk4"),
    ablation(AdaptiveNormMeasure, "norm = adaptive"),
    ablation(AdditiveMeasure, "relaxation = 0.001, relaxation kind = additive", relaxation=0.001),
    ablation(AdditiveMeasure, "relaxation = 0.1, relaxation kind = additive", relaxation=0.1),
]
KNOWN.update({measure.name: measure for measure in ABLATIONS})


def sweeps(folder: Path) -> dict[str, dict[str, Any]]:
    """The configurations of ``vision`` by name, from the one that the collection came with."""
    base = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    base |= {"measures": MEASURES, "rho": RADII, "relative_tol": 1e-3}
    part = {k: v for k, v in base.items() if k not in ("test", "train", "initial", "baselines")}
    few = base["data"] | {"num_examples": 64, "batch_size": 64}
    measures = ["geodesic-inv", *(measure.name for measure in ABLATIONS)]
    ablated = {"measures": measures, "rho": 0.1, "data": few}
    return {"vision": base, "vision_ablations": part | ablated}


def measure(out: Path, shard: str) -> None:
    """Run all sweeps of ``vision`` and write its tables."""
    for name, config in sweeps(out / "collection").items():
        path = out / "collection" / f"{name}.json"
        write_json(path, config)
        sweep = read_config(path)
        failed = run_sweep(sweep, out / "results", shard=shard)
        if failed:
            raise SystemExit(f"{name}: {failed[0]}")
        write_rows(RESULTS / f"{name}.csv", read_rows(out / "results", sweep))


def gather(kind: str, zoo: Path) -> None:
    """Add the models of a zoo that are wholly measured to its tables, and the zoo to its account.

    Rows and accounts of other parts stay, so that a zoo can be trained and measured in parts, in folders of their own.
    """
    for part, rows in rows_of(zoo).items():
        if rows:
            add_rows(RESULTS / f"zoo_{kind}{part}.csv", rows)
    one = account(zoo)
    others = [r for r in accounts_of(kind) if r.get("first", 0) != one["first"]]
    write(f"zoo_{kind}", sorted([*others, one], key=lambda r: r.get("first", 0)))


def accounts_of(kind: str) -> list[dict[str, Any]]:
    """Accounts of the parts of a zoo."""
    path = RESULTS / f"zoo_{kind}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return found


def add_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a table, in place of those of the same models."""
    names = {r["checkpoint"] for r in rows}
    before = read_table(path) if path.is_file() else []
    write_rows(path, sorted([*(r for r in before if r["checkpoint"] not in names), *rows], key=by_number))


def by_number(row: Row) -> int:
    """Number of a row's model."""
    return int(row["checkpoint"].removeprefix("model_").partition(".")[0])


# -- report ------------------------------------------------------------------------------------------------------------


def changes() -> pd.DataFrame:
    """How much each switch changes the sharpness of the fine-tunes of ``vision``, and their order."""
    table: dict[str, dict[str, float]] = {}
    for r in read_table(RESULTS / "vision_ablations.csv"):
        table.setdefault(label(r["measure"], r["ablation"]), {})[r["checkpoint"]] = r["sharpness"]
    base = table["geodesic-inv"]
    lines = []
    for name in table:
        ratios = [table[name][m] / base[m] for m in base]
        lines.append(
            {
                "geodesic-inv, ρ = 0.1": name.removeprefix("geodesic-inv, ").replace("geodesic-inv", "itself"),
                "median ratio": sorted(ratios)[len(ratios) // 2], "smallest": min(ratios), "largest": max(ratios),
                "τ with the measure itself": kendall([table[name][m] for m in base], list(base.values())).value,
            }
        )  # fmt: skip
    return pd.DataFrame(lines)


def zoos() -> tuple[dict[str, list[Row]], ...]:
    """Rows of the zoos of which every model was measured, by name; and with the shifted data as test data."""
    own, shift = (
        {kind: list(read_table(path)) for kind in KINDS if (path := RESULTS / f"zoo_{kind}{part}.csv").is_file()}
        for part in ("", "_shift")
    )
    own = {kind: rows for kind, rows in own.items() if trained(kind, rows) >= KINDS[kind][0]}
    shifted = {kind: [*shift.get(kind, ()), *(r for r in rows if r["kind"] != "fit")] for kind, rows in own.items()}
    return own, shifted


def trained(kind: str, rows: Sequence[Row]) -> int:
    """Count the models of a zoo: those with rows, and those that are left out."""
    left_out = [name for part in accounts_of(kind) for name in part["left_out"]]
    return len({*left_out, *(r["checkpoint"] for r in rows if r["kind"] == "fit")})


def hours(kind: str) -> dict[str, float]:
    """Hours of a zoo's parts together."""
    parts = [part["hours"] for part in accounts_of(kind)]
    return {name: sum(part[name] for part in parts) for part in parts for name in part}


def described(kind: str, rows: Sequence[Row], shifted: Sequence[Row]) -> dict[str, Any]:
    """Describe a collection: its models, errors, and the ratios of test errors' standard errors to their spread."""
    fits, others = ([r for r in part if r["kind"] == "fit"] for part in (rows, shifted))
    errors = {name: [r[f"{name}_error"] for r in fits] for name in ("train", "test")}
    gaps = [b - a for a, b in zip(*errors.values(), strict=True)]
    tests = [errors["test"], [r["test_error"] for r in others]]
    ratios = [
        fmean((e * (1 - e) / n) ** 0.5 for e in found) / stdev(found)
        for found, n in zip(tests, TESTED[kind], strict=True)
    ]
    parts = hours(kind)
    return {
        "collection": WORDS[kind], "models": len(fits), "left out": trained(kind, rows) - len(fits),
        "train error": between(errors["train"]), "test error": between(errors["test"]), "gap": between(gaps),
        "test ratio": f"{ratios[0]:.2f}", "shift ratio": f"{ratios[1]:.2f}",
        "hours": " + ".join(f"{parts[part]:.1f}" for part in ("training", "testing", "measuring")),
    }  # fmt: skip


def between(values: Sequence[float]) -> str:
    """Smallest and largest value."""
    return f"{min(values):.3f}…{max(values):.3f}"


def report(docs: Path = DOCS) -> None:
    """Write the tables and figures of ``docs/results/generalization.md`` and of the page with its details."""
    tables, images = docs / "tables", docs / "images"
    for folder in (tables, images):
        folder.mkdir(parents=True, exist_ok=True)
    own, shifted = zoos()
    found = {target: judged(own, target) for target in OUTCOMES}
    given = {target: table(zoos) for target, zoos in found.items()}
    apart = {target: table(judged(own, target, given=GIVEN), GIVEN) for target in OUTCOMES}
    partial = [
        *(frame.assign(target=t, controls="loss, error") for t, frame in given.items()),
        table(judged(shifted, "test-error")).assign(target="test error under shift", controls="loss, error"),
        *(table(judged(own, t, quadratic=True)).assign(target=t, controls="with squares") for t in OUTCOMES),
        *(frame.assign(target=t, controls="with distance") for t, frame in apart.items()),
        table(judged(own, "test-loss", quadratic=True, given=GIVEN), GIVEN).assign(
            target="test-loss", controls="with distance and squares"
        ),
    ]
    columns = ["target", "controls", "collection", "quantity", "radius", "models", "τ", "low", "high", "verdict"]
    seen = {r["checkpoint"] for r in read_table(RESULTS / "agreement_minilm.csv")}
    parts = {
        "collections": pd.DataFrame([described(kind, own[kind], shifted[kind]) for kind in own]),
        "partial": pd.concat(partial)[columns],
        "uncontrolled": plain_table(found),
        "differences": pd.concat([differences(own, target) for target in OUTCOMES]),
        "distance": beside_distance(own),
        "agreement": agreement(own),
        "hypothesis": hypothesis(own["minilm"], seen),
        "ablations": changes(),
    }
    for name, frame in parts.items():
        write_text(tables / f"{name}.csv", frame.to_csv(index=False, float_format="%.4g", lineterminator="\n"))
    plot_partial({"gap": given["gap"]}, images / "gap.png", names=PRIMARY)
    plot_partial(given, images / "partial.png")
    plot_partial(apart, images / "partial_distance.png", GIVEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    vision, collected = commands.add_parser("vision"), commands.add_parser("gather")
    commands.add_parser("report")
    vision.add_argument("--weights", type=Path, required=True, help="state dict of the vision transformer")
    vision.add_argument("--images", type=Path, required=True, help="folder with {train,test}/CLASS/NAME.jpg")
    vision.add_argument("--out", type=Path, required=True, help="folder for models and results")
    vision.add_argument("--models", type=int, default=24)
    vision.add_argument("--shard", default="1/1")
    collected.add_argument("kind", choices=list(KINDS))
    collected.add_argument("--zoo", type=Path, required=True, help="folder of the zoo")
    options = parser.parse_args()
    if options.command == "report":
        report()
        return
    if options.command == "gather":
        gather(options.kind, options.zoo)
        return
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    collection = options.out / "collection"
    data = DataChoice(str(options.images / "train"), num_examples=2000, subset_seed=0)
    test = replace(data, source=str(options.images / "test"), num_examples=None, subset_seed=None)
    model = "reproduction.vision:vit_cifar10"
    train_collection(
        model,
        data,
        collection,
        checkpoint=str(options.weights),
        models=options.models,
        test=test,
        shard=options.shard,
    )
    measure(options.out, options.shard)


if __name__ == "__main__":
    main()
