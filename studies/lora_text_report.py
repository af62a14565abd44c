"""Tables and figure of ``lora_text.py``, from its runs so far: ``python -m studies.lora_text_report --runs FILE``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats

from benchmarks._common import RESULTS, interval
from sharpness.plots import figure

from .lora_text import METHODS, RIVALS, SCALES, SEEDS, best, kept

NAMES = {"ag_news": "AG News", "sst2": "SST-2", "mnli": "MNLI"}
RANKS = (4, 16, 64)
#: "±" between spaces at which no line breaks.
PM = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"
OURS = ("QuotientAdam", "QuotientMuon")
OLD = ("QuotientAdam, any rank alike", "QuotientAdam, scalar")  # before they were replaced
LABELS = {"AdamW": "AdamW, α = 2r"}
SHOWN = ("AdamW", *RIVALS, *(m for m in METHODS if m != "AdamW"), *OLD)
DRAWN = {
    "AdamW": ("#D55E00", "s", "-"), RIVALS[0]: ("#E69F00", "v", "--"), RIVALS[1]: ("#CC79A7", "D", "--"),
    RIVALS[2]: ("#999999", "x", "--"), "QuotientAdam": ("#0072B2", "o", "-"), "QuotientMuon": ("#009E73", "^", "-"),
}  # fmt: skip


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a table, after an empty one."""
    head = list(head)
    yield ""
    for cells in (head, ["---"] * len(head), *body):
        yield "| " + " | ".join(cells) + " |"


def joined(frame: pd.DataFrame) -> pd.DataFrame:
    """The final runs, with those of AdamW at other scales or rates; at rank 4 these are AdamW's own."""
    final, scaled = frame[frame.part == "final"], frame[(frame.part == "scale") & frame.method.isin(RIVALS)]
    same = final[(final.method == "AdamW") & (final["rank"] == 4)]
    return pd.concat([final, scaled, *(same.assign(method=m) for m in RIVALS)])


def losses(frame: pd.DataFrame, **where: Any) -> pd.Series:
    """Test losses by seed; a run that diverged counts as infinite."""
    for key, value in where.items():
        frame = frame[frame[key] == value]
    found = frame.set_index("seed").test_loss.astype(float)
    return found[~found.index.duplicated()].fillna(np.inf)


def width(rates: list[float], losses: list[float], slack: float) -> float:
    """Decades of learning rate whose loss, interpolated linearly in log lr, is within ``slack`` of the best."""
    grid = np.linspace(np.log10(rates[0]), np.log10(rates[-1]), 2001)
    found = np.interp(grid, np.log10(rates), losses)
    return float((found <= (1 + slack) * min(losses)).mean() * (grid[-1] - grid[0]))


def cell(values: pd.Series, places: int = 3) -> str:
    """Mean and half-width of its 95 % interval, or what there is."""
    bad = int(np.isinf(values).sum())
    if bad or not len(values):
        return f"{bad} of {len(values)} diverged" if bad else ""
    if len(values) == 1:
        return f"{values.iloc[0]:.{places}f} (1 seed)"
    mean, around = interval(values)
    return f"{mean:.{places}f}{PM}{around:.{places}f}" + (f" ({len(values)} seeds)" if len(values) < len(SEEDS) else "")


def apart(own: pd.Series, base: pd.Series) -> pd.Series:
    """Differences to another method at equal seeds, where neither diverged."""
    return (own - base).replace([np.inf, -np.inf], np.nan).dropna()


def paired(own: pd.Series, base: pd.Series) -> str:
    """Mean difference to another method at equal seeds."""
    found = apart(own, base)
    if len(found) < 2:
        return ""
    mean, around = interval(found)
    return f"{mean:+.3f}{PM}{around:.3f}" + (f" ({len(found)} seeds)" if len(found) < len(SEEDS) else "")


def steps_to(rows: list[dict[str, Any]], level: float) -> float:
    """Median over runs of the first step at which the training loss, smoothed over 8 steps, is below a level."""
    found = []
    for r in rows:
        smooth = pd.Series(r["losses"], dtype=float).ewm(span=8).mean()
        below = smooth.index[smooth < level]
        found.append(float(below[0]) + 1 if len(below) else np.inf)
    return float(np.median(found)) if found else np.nan


def finals(rows: list[dict[str, Any]], frame: pd.DataFrame, task: str) -> Iterator[str]:
    """The final runs of a task."""
    final = joined(frame[frame.task == task])
    of = [r for r in rows if (r["task"], r["part"], r["rank"]) == (task, "final", 4)]
    reference = [v for r in of if r["method"] == "AdamW" for v in r["losses"][-16:]]
    body = []
    for method in (m for m in SHOWN if (final.method == m).any()):
        cells = [method, f"{best(rows, task, 'AdamW' if method in RIVALS else method):g}"]
        for rank in RANKS:
            own, base = (losses(final, method=m, rank=rank) for m in (method, "AdamW"))
            cells += [cell(own), "" if own.equals(base) else paired(own, base)]
        accuracy = final[(final.method == method) & (final["rank"] == 4)].accuracy.dropna()
        cells.insert(2, cell(100 * accuracy, 1))
        mine = [r for r in of if r["method"] == method]
        cells.append(f"{steps_to(mine, float(np.mean(reference))):.0f}" if reference and mine else "")
        body.append(cells)
    head = ["method", "rate", "accuracy, rank 4", "test loss, rank 4", "against AdamW", "rank 16, the same rate",
            "against AdamW", "rank 64, the same rate", "against AdamW", "steps to AdamW's loss, rank 4"]  # fmt: skip
    yield from table(head, body)


def rates(rows: list[dict[str, Any]], frame: pd.DataFrame, task: str) -> Iterator[str]:
    """The loss on the grid, how far the rate may be off, and the best rates at other ranks."""
    own = frame[frame.task == task]
    tune = own[own.part == "tune"]
    grid = sorted(tune.lr.unique())
    near = own[own.part.isin(["transfer", "final"]) & (own.seed == SEEDS[0])]
    body = []
    for method, mine in tune.groupby("method", sort=False):
        by_rate = mine.drop_duplicates("lr").set_index("lr").test_loss.astype(float)
        found = [by_rate.get(lr) for lr in grid]
        cells = [str(method), *("" if v is None else "diverged" if np.isnan(v) else f"{v:.3f}" for v in found)]
        by_rate = by_rate.fillna(99.0).sort_index()
        cells.append(f"{width(list(by_rate.index), list(by_rate), 0.05):.2f}")
        for rank in RANKS[1:]:
            at = near[(near.method == method) & (near["rank"] == rank)]
            sound = at.dropna(subset="test_loss")
            ratio = f"{sound.loc[sound.test_loss.idxmin()].lr / best(rows, task, method):.2g}" if len(at) > 2 else ""
            cells.append(ratio)
        body.append(cells)
    head = ["test loss at rank 4, one seed, at the rate", *(f"{lr:g}" for lr in grid), "decades within 5 %",
            "best rate, rank 16 over 4", "rank 64 over 4"]  # fmt: skip
    yield from table(head, body)


def against(frame: pd.DataFrame) -> Iterator[str]:
    """Differences of our optimisers to the others, bold where they stand after Holm's correction of all of them."""
    final = joined(frame)
    places = [(t, k) for t in NAMES for k in RANKS if ((final.task == t) & (final["rank"] == k)).any()]
    names = [(a, b) for a in OURS for b in (*METHODS, *RIVALS) if b != a and (a, b) != OURS[::-1]]
    found = {}
    for a, b in names:
        for t, k in (place for place in places if b not in RIVALS or place[1] > 4):
            between = apart(*(losses(final, method=m, task=t, rank=k) for m in (a, b)))
            if len(between) > 2:
                p = float(scipy.stats.ttest_1samp(between, 0).pvalue)
                found[a, b, t, k] = p, f"{{:+.3f}}{PM}{{:.3f}}".format(*interval(between))
    shown, stands = {}, True
    for i, (place, (p, words)) in enumerate(sorted(found.items(), key=lambda item: item[1])):
        stands = stands and p <= 0.05 / (len(found) - i)
        shown[place] = f"**{words}**" if stands else words
    body = [[f"{a} − {b}", *(shown.get((a, b, t, k), "") for t, k in places)] for a, b in names]
    yield from table(["test loss, at equal seeds", *(f"{NAMES[t]}, rank {k}" for t, k in places)], body)
    yield f"\nBold: p < 0.05 after Holm's correction of {len(found)} paired t-tests."


def starts(frame: pd.DataFrame) -> Iterator[str]:
    """How far runs from equivalent factors end from each other."""
    moved = frame[frame.part == "moved"]
    final = frame[(frame.part == "final") & (frame["rank"] == 4) & (frame.task == "ag_news")]
    body = []
    for method in moved.method.unique():
        there, plain = losses(moved, method=method), losses(final, method=method)
        distance = (there - plain).abs().dropna()
        body.append([method, cell(there), f"{distance.mean():.4f}"])
    yield from table(["AG News, equivalent factors", "test loss", "distance to that of the plain start"], body)


def scales(frame: pd.DataFrame) -> Iterator[str]:
    """Our optimisers at three scales of the update: loss, and the largest difference of a training loss."""
    at, body = frame[frame.part == "scale"], []
    for method in OURS:
        for task, title in NAMES.items():
            own = at[at.task == task].set_index("method")
            found = [own.loc[how] for how in (method, *(f"{method}, {s}" for s in SCALES)) if how in own.index]
            if found:
                apart = [max(abs(a - b) for a, b in zip(found[0].losses, f.losses, strict=True)) for f in found[1:]]
                largest = f"{max(apart, default=0):.4f}"
                body.append([method, title, *(f"{f.test_loss:.4f}" for f in found), largest])
    head = ["rank 64, one seed", "task", "α = 2r", *SCALES, "largest difference of a training loss"]
    yield from table(head, body)


def costs(frame: pd.DataFrame) -> Iterator[str]:
    """Time of the optimiser's own steps."""
    own = frame[frame.part.isin(["tune", "final"])]
    shown = [m for m in SHOWN if (own.method == m).any()]
    medians = own.groupby(["method", "rank"]).optimizer_ms.median()
    body = [[m, *(f"{medians[m, r]:.0f}" if (m, r) in medians else "" for r in RANKS)] for m in shown]
    yield from table(["only the optimiser's step, ms", *(f"rank {r}" for r in RANKS)], body)


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Test loss against the rank at the rate of rank 4, with 95 % t-intervals over seeds."""
    final = joined(frame)
    with figure(path, (4 * len(NAMES), 4.4), 1, len(NAMES)) as (_, ((axes),)):
        for panel, (task, title) in zip(axes, NAMES.items(), strict=True):
            for place, (method, (colour, marker, line)) in enumerate(DRAWN.items()):
                found = [interval(losses(final, task=task, method=method, rank=rank)) for rank in RANKS]
                means, ends = zip(*found, strict=True)
                x = np.arange(len(RANKS)) + 0.06 * (place - 2.5)
                style = {"marker": marker, "color": colour, "linestyle": line, "linewidth": 2}
                panel.errorbar(x, means, ends, label=LABELS.get(method, method), capsize=3, **style)
            panel.set(xticks=range(len(RANKS)), xlabel="rank (learning rate tuned at rank 4)", title=title)
            panel.set_xticklabels(map(str, RANKS))
        axes[0].set_ylabel("test loss")
        axes[1].legend(loc="upper left")


def given(description: str | None, name: str) -> tuple[list[dict[str, Any]], argparse.Namespace]:
    """Read the runs of a study, and where its figure and its tables go."""
    docs = RESULTS.parent / "docs"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--runs", type=Path, default=RESULTS / f"{name}.jsonl")
    parser.add_argument("--figure", type=Path, default=docs / "images" / f"{name}.png")
    parser.add_argument("--tables", type=Path, default=docs / "tables" / f"{name}.md")
    options = parser.parse_args()
    return kept(options.runs), options


def main() -> None:
    rows, options = given(__doc__, "lora_text")
    runs = pd.DataFrame(rows)
    frame = runs.drop(columns="losses")
    lines = [f"{len(rows)} runs, {frame.seconds.sum() / 3600:.1f} hours of training."]
    for task, title in NAMES.items():
        if ((frame.task == task) & (frame.part == "final")).any():
            lines += ["", f"**{title}**", *finals(rows, frame, task), *rates(rows, frame, task)]
    lines += ["", "**Ours against the others**", *against(frame)]
    if (frame.part == "moved").any():
        lines += starts(frame)
    if (frame.part == "scale").any():
        lines += scales(runs)
    lines += costs(frame)
    options.tables.write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(frame, options.figure)


if __name__ == "__main__":
    main()
