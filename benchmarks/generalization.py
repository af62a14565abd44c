"""Does geodesic sharpness rank models by how they generalise? The study's three zoos, and the pilot that came before.

``gather KIND --zoo ZOO`` writes what was measured of a zoo (``python -m reproduction zoo``, ``radii``, and
``sharpness sweep``) to tables in ``results/``. ``vision``, the pilot: 24 fine-tunes of the public ``vit_cifar10`` on
2,000 CIFAR-10 images, each with a random recipe, trained, measured and written to tables; every step resumes where it
was stopped, and ``--shard i/n`` shares the work among processes. ``report`` draws the figures and writes the tables of
docs/ from all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from _common import RESULTS, write

from reproduction.adaptive_norm import AdaptiveNormMeasure
from reproduction.additive import AdditiveMeasure
from reproduction.collection import train_collection
from reproduction.comparison import compare
from reproduction.hypothesis import GIVEN, hypothesis
from reproduction.plots import plot_ablations, plot_radii
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
    plot_partial,
    plot_radius,
    rows_of,
    table,
)
from reproduction.tables import formatted, read_table, write_rows
from reproduction.zoo import KINDS
from sharpness import MEASURES as KNOWN
from sharpness import Measure
from sharpness.data import DataChoice
from sharpness.files import write_json
from sharpness.study import plot_sweep, read_config, read_rows, run_sweep, targets
from sharpness.study.rows import Row, label

DOCS = RESULTS.parent.parent / "docs"
#: Test examples of each collection, and shifted ones.
TESTED = {"pilot": (10_000, 0), "vit": (10_000, 10_000), "minilm": (9_815, 4_530), "scratch": (10_000, 10_000)}
MEASURES = ["geodesic-inv", "geodesic-mix", "adaptive", "gradient-norm"]
RADII = {
    "geodesic-inv": [0.02, 0.05, 0.1, 0.2], "geodesic-mix": [0.01, 0.02, 0.05, 0.1], "adaptive": [0.06, 0.15, 0.5, 0.8],
}  # fmt: skip
#: At ρ = 0.1 in the inv metric, on 64 points. The recorded "relaxation = 0.1" was a floor that the metric had.
ABLATIONS: list[dict[str, Any]] = [
    {"geodesic": "first-order"}, {"geodesic": "exact"}, {"symmetry": "qk"}, {"symmetry": "vo"},
]  # fmt: skip


def of_laboratory(kind: type[Measure], what: str, **changes: Any) -> Measure:
    """Make a measure of the laboratory with the inv metric."""
    return kind(**{**vars(KNOWN["geodesic-inv"]), "name": f"geodesic-inv, {what}", **changes})


#: Beside them, in the words of the tables.
OF_LABORATORY = [
    of_laboratory(RungeKuttaMeasure, "geodesic = rk4"),
    of_laboratory(AdaptiveNormMeasure, "norm = adaptive"),
    of_laboratory(AdditiveMeasure, "relaxation = 0.001, relaxation kind = additive", relaxation=0.001),
    of_laboratory(AdditiveMeasure, "relaxation = 0.1, relaxation kind = additive", relaxation=0.1),
]
KNOWN.update({measure.name: measure for measure in OF_LABORATORY})


def sweeps(folder: Path) -> dict[str, dict[str, Any]]:
    """The configurations of the pilot by name, from the one that the collection came with."""
    base = json.loads((folder / "sweep.json").read_text())
    base |= {"measures": MEASURES, "rho": RADII, "relative_tol": 1e-3}
    part = {k: v for k, v in base.items() if k not in ("test", "train", "initial", "baselines")}
    few = base["data"] | {"num_examples": 64, "batch_size": 64}
    switched = [{}, *(switches | {"measures": ["geodesic-inv"]} for switches in ABLATIONS)]
    measures = ["geodesic-inv", *(measure.name for measure in OF_LABORATORY)]
    ablated = {"measures": measures, "rho": 0.1, "ablations": switched, "data": few}
    return {"vision": base, "vision_ablations": part | ablated}


def measure(out: Path, shard: str) -> None:
    """Run all sweeps of the pilot and write its tables."""
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
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.is_file() else []
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


def ablations() -> list[Row]:
    """Rows of the pilot's ablations with its fits."""
    fits = [r for r in read_table(RESULTS / "vision.csv") if r["kind"] == "fit"]
    return [*fits, *read_table(RESULTS / "vision_ablations.csv")]


def changes() -> str:
    """How much each switch changes the sharpness, and the order of the models."""
    table: dict[str, dict[str, float]] = {}
    for r in read_table(RESULTS / "vision_ablations.csv"):
        table.setdefault(label(r["measure"], r["ablation"]), {})[r["checkpoint"]] = r["sharpness"]
    names = list(table)
    base = table["geodesic-inv"]
    lines = [
        "| geodesic-inv, ρ = 0.1 | median ratio | smallest, largest | τ with the measure itself |",
        "|---|---|---|---|",
    ]
    for name in names:
        ratios = sorted(table[name][m] / base[m] for m in base)
        tau = kendall([table[name][m] for m in base], list(base.values())).value
        middle = ratios[len(ratios) // 2]
        switch = name.removeprefix("geodesic-inv, ").replace("geodesic-inv", "itself")
        lines.append(f"| {switch} | {middle:.4g} | {ratios[0]:.4g}, {ratios[-1]:.4g} | {tau:+.2f} |")
    return "\n".join(lines) + "\n"


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


def resolution(
    rows: Sequence[Row], shifted: Sequence[Row], examples: tuple[int, int], trained: int, hours: Mapping[str, float]
) -> str:
    """Describe a collection: its models, errors, and the ratios of test errors' standard errors to their spread."""
    fits, others = ([r for r in part if r["kind"] == "fit"] for part in (rows, shifted))
    columns = [[r[name] for r in fits] for name in ("train_error", "test_error")]
    columns.append([b - a for a, b in zip(*columns, strict=True)])
    ranges = [f"{min(c):.3f} to {max(c):.3f}" for c in columns]
    tests = [columns[1], [r["test_error"] for r in others]]
    ratios = [
        f"{fmean((e * (1 - e) / n) ** 0.5 for e in errors) / stdev(errors):.2f}" if errors else ""
        for errors, n in zip(tests, examples, strict=True)
    ]
    times = [f"{hours[part]:.1f}" if part in hours else "" for part in ("training", "testing", "measuring")]
    return ",".join([str(trained), str(trained - len(fits)), *ranges, *ratios, *times])


def report(docs: Path = DOCS) -> None:
    """Write the tables and figures of ``docs/results/generalization.md``."""
    tables, images = docs / "tables", docs / "images"
    for folder in (tables, images):
        folder.mkdir(parents=True, exist_ok=True)
    rows = read_table(RESULTS / "vision.csv")
    for target in ("gap", "test-error"):
        (tables / f"vision_{target}.md").write_text(formatted(compare(rows, target)), encoding="utf-8")
    others = [r for r in compare(ablations()) if r.quantity.startswith("geodesic") and r.choice == "ρ"]
    (tables / "vision_ablations.md").write_text(formatted(others), encoding="utf-8")
    (tables / "vision_changes.md").write_text(changes(), encoding="utf-8")
    plot_sweep(rows, "gap", images / "vision_scatter.png")
    plot_radii(rows, "gap", images / "vision_radius.png")
    plot_ablations(ablations(), "gap", images, prefix="vision_")
    own, shifted = zoos()
    lines = [
        "collection,models,left out,train error,test error,gap,standard error of a test error / spread,"
        "of one under shift / spread,hours of a process: training,testing,measuring"
    ]
    for kind, found in {"pilot": rows, **own}.items():
        models = len(targets(found)) if kind == "pilot" else trained(kind, found)
        lines.append(f"{kind},{resolution(found, shifted.get(kind, ()), TESTED[kind], models, hours(kind))}")
    (tables / "collections.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if own:
        (tables / "agreement.md").write_text(agreement(own), encoding="utf-8")
        found = {target: judged(own, target) for target in OUTCOMES}
        apart = {target: judged(own, target, given=GIVEN) for target in OUTCOMES}
        parts = {"shift": table(judged(shifted, "test-error")), "plain": plain_table(found)}
        parts["distance"] = beside_distance(own)
        for target, rankings in found.items():
            parts[target], parts[f"{target}_differences"] = table(rankings), differences(own, target)
            parts[f"{target}_squared"] = table(judged(own, target, quadratic=True))
            parts[f"{target}_distance"] = table(apart[target], GIVEN)
            plot_radius(rankings, target, images / f"zoos_radius_{target}.png")
        if "minilm" in own:
            seen = {r["checkpoint"] for r in read_table(RESULTS / "agreement_minilm.csv")}
            parts["hypothesis"] = hypothesis(own["minilm"], seen)
        squared = judged(own, "test-loss", quadratic=True, given=GIVEN)
        parts["test-loss_distance_squared"] = table(squared, GIVEN)
        for name, text in parts.items():
            (tables / f"zoos_{name}.md").write_text(text, encoding="utf-8")
        plot_partial(found, images / "zoos_partial.png")
        plot_partial(apart, images / "zoos_partial_distance.png", GIVEN)


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
