"""Tables and figure of ``lora_text.py`` from the runs so far: ``python lora_text_report.py --runs runs.jsonl``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from _common import RESULTS
from lora_quality_report import interval
from lora_text import METHODS, SEEDS, best

from sharpness.plots.look import figure

NAMES = {"ag_news": "AG News", "sst2": "SST-2", "mnli": "MNLI"}
COLOURS = dict(zip(METHODS, ("#666666", "#D55E00", "#0072B2", "#CC79A7", "#E69F00", "#009E73", "#56B4E9", "#999933"),
                   strict=True))  # fmt: skip


def losses(frame: pd.DataFrame, **where: Any) -> pd.Series:
    """Test losses by seed; a run that diverged counts as infinite."""
    for key, value in where.items():
        frame = frame[frame[key] == value]
    found = frame.set_index("seed").test_loss.astype(float)
    return found[~found.index.duplicated()].fillna(np.inf)


def cell(values: pd.Series, places: int = 3) -> str:
    """Mean and half-width of its 95 % interval, or what there is."""
    bad = int(np.isinf(values).sum())
    if bad or not len(values):
        return f"{bad} of {len(values)} diverged" if bad else ""
    if len(values) == 1:
        return f"{values.iloc[0]:.{places}f} (1 seed)"
    mean, around = interval(values)
    return f"{mean:.{places}f} ± {around:.{places}f}" + (f" ({len(values)} seeds)" if len(values) < len(SEEDS) else "")


def paired(own: pd.Series, base: pd.Series) -> str:
    """Difference to another method at equal seeds."""
    both = own.index.intersection(base.index)
    found = (own[both] - base[both]).replace([np.inf, -np.inf], np.nan).dropna()
    if len(found) < 2:
        return ""
    mean, around = interval(found)
    return f"{mean:+.3f} ± {around:.3f}" + (f" ({len(found)} seeds)" if len(found) < len(SEEDS) else "")


def steps_to(rows: list[dict[str, Any]], level: float) -> float:
    """Median over runs of the first step at which the training loss, smoothed over 8 steps, is below a level."""
    found = []
    for r in rows:
        smooth = pd.Series(r["losses"], dtype=float).ewm(span=8).mean()
        below = smooth.index[smooth < level]
        found.append(float(below[0]) + 1 if len(below) else np.inf)
    return float(np.median(found)) if found else np.nan


def finals(rows: list[dict[str, Any]], frame: pd.DataFrame, task: str) -> None:
    """Print the table of the final runs of a task."""
    final = frame[(frame.task == task) & (frame.part == "final")]
    print("| method | rate | rank 4 | accuracy | against AdamW | rank 16, the same rate | against AdamW "
          "| rank 64, the same rate | against AdamW | steps to AdamW's last loss |\n|" + "---|" * 10)  # fmt: skip
    of = [r for r in rows if (r["task"], r["part"], r["rank"]) == (task, "final", 4)]
    reference = [v for r in of if r["method"] == "AdamW" for v in r["losses"][-16:]]
    for method in METHODS:
        if not ((frame.task == task) & (frame.method == method)).any():
            continue
        cells = [method, f"{best(rows, task, method):g}"]
        for rank in (4, 16, 64):
            own, base = (losses(final, method=m, rank=rank) for m in (method, "AdamW"))
            cells.append(cell(own))
            if rank == 4:
                accuracy = final[(final.method == method) & (final["rank"] == 4)].accuracy.dropna()
                cells.append(cell(100 * accuracy, 1))
            cells.append("" if method == "AdamW" else paired(own, base))
        mine = [r for r in of if r["method"] == method]
        cells.append(f"{steps_to(mine, float(np.mean(reference))):.0f}" if reference and mine else "")
        print("| " + " | ".join(cells) + " |")


def rates(rows: list[dict[str, Any]], frame: pd.DataFrame, task: str) -> None:
    """Print the loss on the grid, and half a decade from the best rate at other ranks."""
    tune = frame[(frame.task == task) & (frame.part == "tune")]
    grid = sorted(tune.lr.unique())
    print("\n| method, rank 4, one seed | " + " | ".join(f"{lr:g}" for lr in grid) + " |\n|" + "---|" * (len(grid) + 1))
    for method, own in tune.groupby("method", sort=False):
        by_rate = own.drop_duplicates("lr").set_index("lr").test_loss.astype(float)
        found = [by_rate.get(lr) for lr in grid]
        cells = ["" if v is None else "diverged" if np.isnan(v) else f"{v:.3f}" for v in found]
        print(f"| {method} | " + " | ".join(cells) + " |")
    moved = frame[(frame.task == task) & frame.part.isin(["transfer", "final"]) & (frame.seed == SEEDS[0])]
    if (moved.part == "transfer").any():
        print("\n| best rate at this rank over that of rank 4 (one seed) | rank 16 | rank 64 |\n|---|---|---|")
        for method, own in moved.groupby("method", sort=False):
            cells = []
            for rank in (16, 64):
                at = own[own["rank"] == rank].dropna(subset="test_loss")
                cells.append(
                    f"{at.loc[at.test_loss.idxmin()].lr / best(rows, task, method):.2g}" if len(at) > 2 else ""
                )
            print(f"| {method} | " + " | ".join(cells) + " |")


def starts(frame: pd.DataFrame) -> None:
    """Print how far runs from equivalent factors end from each other."""
    moved = frame[frame.part == "moved"]
    if not len(moved):
        return
    print("\n| AG News from equivalent factors, cond(M) = 30 | test loss there | its distance to the plain start |")
    print("|---|---|---|")
    final = frame[(frame.part == "final") & (frame["rank"] == 4) & (frame.task == "ag_news")]
    for method in moved.method.unique():
        there, plain = losses(moved, method=method), losses(final, method=method)
        distance = (there - plain).abs().dropna()
        print(f"| {method} | {cell(there)} | {distance.mean():.4f} |")


def draw(rows: list[dict[str, Any]], frame: pd.DataFrame, path: Path) -> None:
    """Test loss against the rate, and at the rate of rank 4 against the rank."""
    tasks = [t for t in NAMES if ((frame.task == t) & (frame.part == "tune")).any()]
    with figure(path, (4.6 * len(tasks), 8), 2, len(tasks)) as (_, axes):
        for column, task in zip(np.asarray(axes).reshape(2, -1).T, tasks, strict=True):
            own = frame[frame.task == task]
            for method in own.method.unique():
                wide = 2.4 if method.startswith("Quotient") else 1.2
                look = {"color": COLOURS[method], "label": method, "linewidth": wide}
                tune = own[(own.method == method) & (own.part == "tune")].sort_values("lr")
                column[0].plot(tune.lr, tune.test_loss, marker="o", markersize=4, **look)
                means = own[(own.method == method) & (own.part == "final")].groupby("rank").test_loss.mean()
                if len(means):
                    column[1].plot([str(r) for r in means.index], means, marker="o", markersize=4, **look)
            low = float(own.test_loss.min())
            column[0].set(xscale="log", xlabel="learning rate, rank 4", ylabel="test loss", title=NAMES[task],
                          ylim=(low - 0.02, low + 0.4))  # fmt: skip
            column[1].set(xlabel="rank, at the rate of rank 4", ylabel="test loss", ylim=(low - 0.02, low + 0.4))
            column[0].legend(fontsize="x-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=RESULTS / "lora_text.jsonl")
    parser.add_argument("--figure", type=Path, default=RESULTS.parent.parent / "docs" / "images" / "lora_text.png")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = [json.loads(line) for line in options.runs.read_text().splitlines()]
    frame = pd.DataFrame(rows).drop(columns="losses")
    print(f"{len(rows)} runs, {frame.seconds.sum() / 3600:.1f} h of training.")
    for task, title in NAMES.items():
        if (frame.task == task).any():
            print(f"\n**{title}**\n")
            finals(rows, frame, task)
            rates(rows, frame, task)
    starts(frame)
    draw(rows, frame, options.figure)


if __name__ == "__main__":
    main()
