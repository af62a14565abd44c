"""Tables and figure of ``adapters_merge.py``, from its runs so far: ``python -m studies.adapters_merge_report``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from benchmarks._common import interval
from sharpness.plots import figure

from .adapters_merge import GROUPS, METHODS, STARTS
from .lora_text_report import given, table

NAMES = {"ag_news": "AG News twice", "sst2": "SST-2 twice", "both": "AG News and SST-2", "three": "and MNLI"}
TASKS = {"ag_news": "AG News", "sst2": "SST-2", "mnli": "MNLI"}
#: The factors from which training goes on, in words.
FROM = {
    "parent": "not merged",
    "peft's svd": "peft's `svd`",
    "balanced": "balanced",
    "balanced, 8": "8 B, A / 8",
    "balanced, 32": "32 B, A / 32",
}
Found = dict[tuple[str, str], list[tuple[float, float]]]


def spread(values: Iterable[float], form: str) -> str:
    """Mean, half-width of its 95 % interval, and how many there are where they are not three."""
    values = list(values)
    if len(values) < 2:
        return "".join(f"{v:{form}} (1)" for v in values)
    mean, around = interval(values)
    return f"{mean:{form}} ± {around:{form.lstrip('+')}}" + (f" ({len(values)})" if len(values) != 3 else "")


def merges(rows: list[dict[str, Any]]) -> Found:
    """Accuracy over the parents' and loss above theirs, by group and method."""
    parents = {tuple(row["unit"][1:]): row for row in rows if row["unit"][0] == "parent"}
    found: Found = defaultdict(list)
    for row in rows:
        if row["unit"][0] == "merge" and "tested" in row:
            _, group, method, seed = row["unit"]
            ratios, above = [], []
            for task, values in row["tested"].items():
                own = [parents[p] for p in GROUPS[group](seed) if p[0] == task]
                ratios.append(values["accuracy"] / fmean(p["accuracy"] for p in own))
                above.append(values["loss"] - fmean(p["loss"] for p in own))
            found[group, method].append((100 * fmean(ratios), fmean(above)))
    return found


def trainings(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Runs that went on from a merged adapter, by start, optimiser and seed."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row["unit"][0] == "on":
            found[row["unit"][1], row["unit"][2]][row["unit"][3]] = row
    return found


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Everything, in words."""
    count = sum(len(row.get("losses", ())) for row in rows)
    yield f"{len(rows)} runs, {count} steps of training. ± is a 95 % t-interval over three seeds (else: number)."
    parents = defaultdict(list)
    for row in rows:
        if row["unit"][0] == "parent":
            parents[row["unit"][1], row["unit"][2]].append(row)
    body = [
        [
            TASKS[task],
            str(rank),
            spread((100 * r["accuracy"] for r in of), ".1f"),
            spread((r["loss"] for r in of), ".3f"),
        ]
        for (task, rank), of in parents.items()
    ]
    yield from table(["parents", "rank", "accuracy, %", "test loss"], body)
    found = merges(rows)
    for title, at, form in (("accuracy, % of the parents'", 0, ".1f"), ("test loss above the parents'", 1, "+.3f")):
        for kind in ("rank 4", "rank 16", "mixed"):
            shown = [g for g in GROUPS if g.endswith(kind) and any((g, m) in found for m in METHODS)]
            body = [[m, *(spread((v[at] for v in found.get((g, m), [])), form) for g in shown)] for m in METHODS]
            if shown:
                words = [NAMES[g.partition(",")[0]] for g in shown]
                yield from table([f"{title}; {kind}", *words], [row for row in body if any(row[1:])])
    failed: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if "failed" in row:
            _, group, method, _ = row["unit"]
            failed[method, NAMES[group.partition(",")[0]]] += 1
    if failed:
        yield "\nNo mean was found by " + "; ".join(f"{m} ({g}: {n})" for (m, g), n in failed.items()) + "."
    runs = trainings(rows)
    base, body = runs["balanced", "AdamW"], []
    for start, optimizer in STARTS:
        own = runs[start, optimizer]
        if own:
            size = [fmean(r["size"][f] for r in own.values()) for f in "BA"]
            apart = [own[s]["loss"] - base[s]["loss"] for s in own if s in base]
            cells = [FROM[start], optimizer, f"{size[0]:.4f}, {size[1]:.4f}"]
            for key, form, by in (("accuracy", ".1f", 100), ("loss", ".3f", 1)):
                cells.append(spread((by * r["before"][key] for r in own.values()), form))
                cells.append(spread((by * r[key] for r in own.values()), form))
            body.append([*cells, "" if own is base else spread(apart, "+.3f")])
    head = "120 more steps on AG News, from; by; typical entries of B, A; accuracy before, %; after; loss before; after"
    yield from table([*head.split("; "), "against balanced, AdamW"], body)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """What merges keep, and losses of training that goes on."""
    found, runs = merges(rows), trainings(rows)
    with figure(path, (11, 4.4), 1, 2) as (_, ((left, right),)):
        shown = [m for m in METHODS if any((g, m) in found for g in GROUPS)][::-1]
        for i, group in enumerate(g for g in GROUPS if g.endswith("rank 4") and any((g, m) in found for m in shown)):
            for y, method in enumerate(shown):
                values = [v for v, _ in found.get((group, method), [])]
                name = NAMES[group.partition(",")[0]] if y == 0 else None
                left.plot(values, [y + 0.2 - 0.2 * i] * len(values), "os^D"[i], color=f"C{i}", label=name, markersize=4)
        left.axvline(100, color="#999999", linewidth=1)
        left.set(
            xlim=(84, 102),
            yticks=range(len(shown)),
            yticklabels=shown,
            xlabel="accuracy, % of the parents'",
            title="rank 4",
        )
        left.legend(fontsize="x-small", loc="lower left")
        for i, (start, optimizer) in enumerate(s for s in STARTS if runs[s]):
            losses = pd.DataFrame([r["losses"] for r in runs[start, optimizer].values()]).T.ewm(span=12).mean()
            right.plot(losses.mean(axis=1), color=f"C{i}", label=f"{FROM[start]}, {optimizer}".replace("`", ""))
        right.set(xlabel="step", ylabel="training loss, smoothed", title="training on, AG News", ylim=(0.2, 1.2))
        right.legend(fontsize="x-small")


def main() -> None:
    rows, options = given(__doc__, "adapters_merge")
    options.tables.write_text("\n".join(tables(rows)) + "\n", encoding="utf-8")
    draw(rows, options.figure)


if __name__ == "__main__":
    main()
