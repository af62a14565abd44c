"""Merge one adapter of every kind with itself, by peft and by us, and write docs/tables/adapter_identity.csv.

An entry is the relative error of what the merged adapter changes in the model's outputs
(tests/support/adapter_variants.py).
"""

from __future__ import annotations

import csv
import warnings
from importlib.metadata import version
from pathlib import Path

from tests.support.adapter_variants import CASES, TOOLS, error

TABLE = Path(__file__).parents[1] / "docs/tables/adapter_identity.csv"
HEAD = ["adapter", "weights", *(f"peft {version('peft')}, {tool}" for tool in TOOLS[:3]), "ours, folders", "in memory"]


def entry(found: float | Exception) -> str:
    """An error in words."""
    if isinstance(found, Exception):
        sentence = f"{' '.join(str(found).split())} ".partition(". ")[0].strip()
        return f"{'fails' if isinstance(found, RuntimeError) else 'refused'}: {sentence}"
    return "< 1e-6" if found < 1e-6 else f"{100 * found:.{int(found < 0.1)}f} %"


def main() -> None:
    warnings.simplefilter("ignore")
    rows = [HEAD]
    for name, weights in CASES:
        rows.append([name, ", ".join(f"{w:g}" for w in weights), *(entry(error(name, weights, t)) for t in TOOLS)])
        print(*rows[-1], sep=" | ", flush=True)
    with TABLE.open("w", newline="", encoding="utf-8") as file:  # at the end: a run that is stopped leaves the last one
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
