"""Tables and figure of ``lora_quality.py`` from its runs: ``python lora_quality_report.py``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from _common import RESULTS
from lora_quality import DROPPED, METHODS, RATES, best

from sharpness.plots.look import figure

SHOWN = (*METHODS, DROPPED)
NAMES = {"mnist": "MNIST", "corrupted": "corrupted CIFAR-10", "sst2": "SST-2"}


def interval(values: Any) -> tuple[float, float]:
    """Mean and half-width of its 95 % t-interval."""
    v = np.asarray(values, dtype=float)
    return float(v.mean()), float(scipy.stats.t.ppf(0.975, len(v) - 1) * v.std(ddof=1) / len(v) ** 0.5)


def width(rates: list[float], losses: list[float], slack: float) -> float:
    """Decades of learning rate whose loss, interpolated linearly in log lr, is within ``slack`` of the best."""
    grid = np.linspace(np.log10(rates[0]), np.log10(rates[-1]), 2001)
    found = np.interp(grid, np.log10(rates), losses)
    return float((found <= (1 + slack) * min(losses)).mean() * (grid[-1] - grid[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=RESULTS / "lora_quality.jsonl")
    parser.add_argument("--figure", type=Path, default=RESULTS.parent.parent / "docs" / "images" / "lora_quality.png")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = [json.loads(line) for line in options.runs.read_text().splitlines()]
    frame = pd.DataFrame(rows).drop(columns="losses")
    for task, title in NAMES.items():
        if not (frame.task == task).any():
            continue
        print(f"\n**{title}**\n")
        print(
            "| method | best lr | rank 4: test loss | accuracy | against AdamW, paired | rank 16: test loss | accuracy "
            "| against AdamW, paired | within 1 % / 5 % of best, decades of lr |\n|---|---|---|---|---|---|---|---|---|"
        )
        for method in SHOWN:
            lr = best(rows, task, method)
            cells = [method, f"{lr:g}"]
            for rank in (4, 16):
                mine = frame[(frame.task == task) & (frame["rank"] == rank)]
                own = mine[(mine.method == method) & (mine.lr == lr)].sort_values("seed")
                base = mine[(mine.method == "AdamW") & (mine.lr == best(rows, task, "AdamW"))].sort_values("seed")
                loss, error = interval(own.test_loss)
                accuracy, spread = interval(100 * own.accuracy)
                cells += [f"{loss:.3f} ± {error:.3f}", f"{accuracy:.1f} ± {spread:.1f} %"]
                if method == "AdamW":
                    cells.append("")
                else:
                    gain, around = interval(own.test_loss.to_numpy() - base.test_loss.to_numpy())
                    cells.append(f"{gain:+.3f} ± {around:.3f}")
            grid = frame[(frame.task == task) & (frame["rank"] == 4) & (frame.method == method) & (frame.seed < 2)]
            losses = [grid[grid.lr == r].test_loss.fillna(np.inf).mean() for r in RATES]
            losses = [min(v, 99.0) for v in losses]
            cells.append(" / ".join(f"{width(list(RATES), losses, s):.2f}" for s in (0.01, 0.05)))
            print("| " + " | ".join(cells) + " |")
    draw(rows, frame, options.figure)


def draw(rows: list[dict[str, Any]], frame: pd.DataFrame, path: Path) -> None:
    """Test loss against the learning rate, and training curves at each method's best rate."""
    tasks = [t for t in NAMES if (frame.task == t).any()]
    colours = dict(zip(SHOWN, ("#666666", "#E69F00", "#009E73", "#0072B2", "#56B4E9"), strict=True))
    markers = dict(zip(SHOWN, "xs^oD", strict=True))
    with figure(path, (4.6 * len(tasks), 8), 2, len(tasks)) as (_, axes):
        _draw(rows, frame, tasks, colours, markers, axes)


def _draw(
    rows: list[dict[str, Any]],
    frame: pd.DataFrame,
    tasks: list[str],
    colours: dict[str, str],
    markers: dict[str, str],
    axes: Any,
) -> None:
    for column, task in zip(axes.T, tasks, strict=True):
        for method, colour in colours.items():
            grid = frame[(frame.task == task) & (frame["rank"] == 4) & (frame.method == method) & (frame.seed < 2)]
            means = grid.groupby("lr").test_loss.mean()
            column[0].plot(means.index, means, marker=markers[method], color=colour, label=method)
            lr = best(rows, task, method)
            curves = [
                r["losses"] for r in rows
                if (r["task"], r["rank"], r["method"], r["lr"]) == (task, 4, method, lr) and not r["diverged"]
            ]  # fmt: skip
            mean = pd.Series(np.mean(curves, axis=0)).ewm(span=8).mean()
            column[1].plot(mean, color=colour, label=f"{method}, lr {lr:g}")
        column[0].set(xscale="log", xlabel="learning rate", ylabel="test loss", title=NAMES[task])
        top = frame[(frame.task == task) & frame.test_loss.notna()].test_loss
        column[0].set_ylim(top.min() - 0.03, min(top.max(), 1.6 * top.median()))
        column[1].set(xlabel="step", ylabel="training loss (smoothed)")
        column[1].legend(fontsize="x-small")
    axes[0, 0].legend(fontsize="x-small")


if __name__ == "__main__":
    main()
