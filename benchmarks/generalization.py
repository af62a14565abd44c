"""Does geodesic sharpness rank models by how they generalise? One collection of images, one of texts.

``vision``: 24 fine-tunes of the public ``vit_cifar10`` on 2,000 CIFAR-10 images, each with a random recipe.
``text``: a small BERT, pre-trained on the texts of SST-2, AG News and MNLI, fine-tuned 24 times on 8,000 phrases of
SST-2 with different heads and orders. Both are trained, measured and written to tables in ``results/``. Every step
resumes where it was stopped; ``--shard i/n`` shares the work among processes, and the last call gathers.
``report`` draws the figures and writes the tables of docs/ from those tables.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS

from reproduction.collection import train_collection
from reproduction.plots import plot_ablations
from reproduction.pretrain import pretrain
from reproduction.recipes import Recipe
from sharpness.comparison import compare, formatted, label
from sharpness.data import DataChoice, TextColumns
from sharpness.data.text import read_table, read_texts
from sharpness.files import write_json, write_text
from sharpness.plots import plot_sweep
from sharpness.rows import Row, read_results, targets, write_results
from sharpness.statistics import kendall
from sharpness.sweep import read_config, read_rows, run_sweep

DOCS = RESULTS.parent.parent / "docs"
MEASURES = ["geodesic-inv", "geodesic-mix", "adaptive", "gradient-norm"]
RADII = {
    "vision": {
        "geodesic-inv": [0.02, 0.05, 0.1, 0.2], "geodesic-mix": [0.01, 0.02, 0.05, 0.1],
        "adaptive": [0.06, 0.15, 0.5, 0.8],
    },
    "text": {
        "geodesic-inv": [0.02, 0.05, 0.1, 0.2], "geodesic-mix": [0.01, 0.02, 0.05, 0.1],
        "adaptive": [0.15, 0.5, 0.8, 1.2],
    },
}  # fmt: skip
#: Blocks of the laboratory.
ADAPTIVE, ADDITIVE = "reproduction.adaptive_norm:AdaptiveNormBlock", "reproduction.additive:AdditiveBlock"
RK4 = "reproduction.rk4:RungeKuttaBlock"
#: At ρ = 0.1 in the inv metric, on 64 points.
ABLATIONS: list[dict[str, Any]] = [
    {}, {"geodesic": "first-order"}, {"pair_block": RK4}, {"geodesic": "exact"}, {"pair_block": ADAPTIVE},
    {"symmetry": "qk"}, {"symmetry": "vo"}, {"relaxation": 0.1}, {"relaxation": 0.001, "pair_block": ADDITIVE},
    {"relaxation": 0.1, "pair_block": ADDITIVE},
]  # fmt: skip
#: Text: inv and adaptive at their default radii with other steps, batches and numbers of points.
SENSITIVITY: dict[str, dict[str, Any]] = {
    "64 points": {"num_examples": 64, "batch_size": 64},
    "128 points": {"num_examples": 128, "batch_size": 128},
    "256 points, batches of 64": {"num_examples": 256, "batch_size": 64},
    "64 points, 2 steps": {"num_examples": 64, "batch_size": 64, "steps": 2, "relative_tol": 0},
    "64 points, 5 steps": {"num_examples": 64, "batch_size": 64, "steps": 5, "relative_tol": 0},
    "64 points, 20 steps": {"num_examples": 64, "batch_size": 64, "steps": 20, "relative_tol": 0},
}


def sst2(folder: Path, out: Path) -> tuple[Path, Path]:
    """Phrases of at least eight words to train on, as the sentences of the dev and test parts are; those as test."""
    train, test = out / "train.jsonl", out / "test.jsonl"
    if not test.is_file():
        rows: dict[str, str] = {}
        for r in read_table(folder / "train.tsv"):
            rows.setdefault(r["sentence"].strip(), r["label"])
        chosen = [(t, y) for t, y in rows.items() if len(t.split()) >= 8]
        held = [(r["content"].strip(), r["label"]) for p in ("dev", "test") for r in read_table(folder / f"{p}.tsv")]
        for path, found in ((train, chosen), (test, held)):  # test last: it says that both are there
            text = "".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in found)
            write_text(path, text)
    return train, test


def small_bert(data: Path, folder: Path) -> None:
    """Pre-train, unless it was done."""
    if folder.is_dir():  # written as a whole
        return
    texts = read_texts(data / "sst2" / "train.tsv", ["sentence"])
    with (data / "ag_news" / "alps" / "dev.tsv").open(encoding="utf-8") as file:
        texts += [line.split("\t")[0] for line in file]
    texts += read_texts(data / "mnli" / "train15k" / "multinli.train.en.tsv", ["premise", "hypo"])
    pretrain(texts, folder, steps=9000)


def sweeps(kind: str, folder: Path, measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The configurations of a study by name, from the one that the collection came with."""
    base = json.loads((folder / "sweep.json").read_text())
    base["data"] |= measured
    base |= {"measures": MEASURES, "rho": RADII[kind], "relative_tol": 1e-3}
    part = {k: v for k, v in base.items() if k not in ("test", "train", "initial")} | {"baselines": False}
    few = base["data"] | {"num_examples": 64, "batch_size": 64}
    # The adaptive norm solves a system of size h² a head: half a minute for the heads of the small BERT.
    switches = [a for a in ABLATIONS if kind == "vision" or a.get("pair_block") != ADAPTIVE]
    found = {
        kind: base,
        f"{kind}_ablations": part | {"measures": ["geodesic-inv"], "rho": 0.1, "ablations": switches, "data": few},
    }
    if kind == "text":
        both = {"measures": ["geodesic-inv", "adaptive"], "rho": {"geodesic-inv": 0.1, "adaptive": 0.5}}
        for i, change in enumerate(SENSITIVITY.values()):
            settings = {k: v for k, v in change.items() if k in ("steps", "relative_tol")}
            data = base["data"] | {k: v for k, v in change.items() if k not in settings}
            found[f"text_sensitivity_{i}"] = part | both | settings | {"data": data}
    return found


def measure(kind: str, out: Path, measured: dict[str, Any], shard: tuple[int, int]) -> None:
    """Run all sweeps of a study and write its tables."""
    for name, config in sweeps(kind, out / "collection", measured).items():
        path = out / "collection" / f"{name}.json"
        write_json(path, config)
        sweep = read_config(path)
        failed = run_sweep(sweep, out / "results", shard=shard)
        if failed:
            raise SystemExit(f"{name}: {failed[0]}")
        write_results(RESULTS / f"{name}.csv", read_rows(out / "results", sweep))


# -- report ------------------------------------------------------------------------------------------------------------


def sensitivity() -> str:
    """τ with the gap under other steps, batches and numbers of points."""
    goal = targets(read_results(RESULTS / "text.csv"))
    lines = ["| setting | geodesic-inv, ρ = 0.1 | adaptive, ρ = 0.5 |", "|---|---|---|"]
    places = [("256 points (the study)", RESULTS / "text.csv")]
    places += [(name, RESULTS / f"text_sensitivity_{i}.csv") for i, name in enumerate(SENSITIVITY)]
    for name, path in places:
        cells = []
        for measure, rho in (("geodesic-inv", 0.1), ("adaptive", 0.5)):
            rows = [r for r in read_results(path) if r.get("measure") == measure and r["rho"] == rho]
            values = {r["checkpoint"]: r["sharpness"] for r in rows}
            tau = kendall([values[m] for m in goal], list(goal.values()))
            cells.append(f"{tau.value:+.2f} [{tau.low:+.2f}, {tau.high:+.2f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ablations(kind: str) -> list[Row]:
    """Rows of the ablations with the fits of the study."""
    fits = [r for r in read_results(RESULTS / f"{kind}.csv") if r["kind"] == "fit"]
    return [*fits, *read_results(RESULTS / f"{kind}_ablations.csv")]


def changes(kind: str) -> str:
    """How much each switch changes the sharpness, and the order of the models."""
    table: dict[str, dict[str, float]] = {}
    for r in read_results(RESULTS / f"{kind}_ablations.csv"):
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


def report(docs: Path = DOCS) -> None:
    """Write the tables and figures of ``docs/generalization.md``."""
    tables, images = docs / "tables", docs / "images"
    for folder in (tables, images):
        folder.mkdir(parents=True, exist_ok=True)
    for kind in ("vision", "text"):
        rows = read_results(RESULTS / f"{kind}.csv")
        for target in ("gap", "test-error"):
            (tables / f"{kind}_{target}.md").write_text(formatted(compare(rows, target)), encoding="utf-8")
        others = [r for r in compare(ablations(kind)) if r.quantity.startswith("geodesic") and r.choice == "ρ"]
        (tables / f"{kind}_ablations.md").write_text(formatted(others), encoding="utf-8")
        (tables / f"{kind}_changes.md").write_text(changes(kind), encoding="utf-8")
        plot_sweep(rows, "gap", images, prefix=f"{kind}_")
        plot_ablations(ablations(kind), "gap", images, prefix=f"{kind}_")
    (tables / "text_sensitivity.md").write_text(sensitivity(), encoding="utf-8")
    with (tables / "collections.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["collection", "models", "train error", "test error", "gap"])
        for kind in ("vision", "text"):
            fits = [r for r in read_results(RESULTS / f"{kind}.csv") if r["kind"] == "fit"]
            columns = [[r["train_error"] for r in fits], [r["test_error"] for r in fits]]
            columns.append([b - a for a, b in zip(*columns, strict=True)])
            writer.writerow([kind, len(fits), *(f"{min(c):.3f} to {max(c):.3f}" for c in columns)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(required=True, dest="kind")
    vision, text = kinds.add_parser("vision"), kinds.add_parser("text")
    kinds.add_parser("report")
    vision.add_argument("--weights", type=Path, required=True, help="state dict of the vision transformer")
    vision.add_argument("--images", type=Path, required=True, help="zip with cifar10/{train,test}/CLASS/NAME.jpg")
    text.add_argument("--data", type=Path, required=True, help="folder with sst2, ag_news and mnli")
    text.add_argument(
        "--bert", type=Path, help="pre-trained small BERT (default: OUT/bert, trained if it is not there)"
    )
    for command in (vision, text):
        command.add_argument("--out", type=Path, required=True, help="folder for models and results")
        command.add_argument("--models", type=int, default=24)
        command.add_argument("--shard", default="1/1")
    options = parser.parse_args()
    if options.kind == "report":
        report()
        return
    torch.set_num_threads(1)
    first, _, last = options.shard.partition("/")
    shard = int(first), int(last)
    options.out.mkdir(parents=True, exist_ok=True)
    collection = options.out / "collection"
    if options.kind == "vision":
        data = DataChoice(f"{options.images}:cifar10/train", num_examples=2000, subset_seed=0)
        test = replace(data, source=f"{options.images}:cifar10/test", num_examples=None, subset_seed=None)
        model = "reproduction.vision:vit_cifar10"
        train_collection(
            model, data, collection, checkpoint=str(options.weights), models=options.models, test=test, shard=shard
        )
        measure("vision", options.out, {}, shard)
        return
    bert = options.bert or options.out / "bert"
    small_bert(options.data, bert)
    train, held = sst2(options.data / "sst2", options.out)
    data = DataChoice(
        str(train), num_examples=8000, subset_seed=0, columns=TextColumns(label_map={"0": 0, "1": 1}, max_length=64)
    )
    test = replace(data, source=str(held), num_examples=None, subset_seed=None)
    recipes = [Recipe(5e-4, epochs=3, batch=32, seed=seed) for seed in range(options.models)]
    train_collection(str(bert), data, collection, recipes=recipes, test=test, shard=shard)
    measure("text", options.out, {"max_length": 32}, shard)


if __name__ == "__main__":
    main()
