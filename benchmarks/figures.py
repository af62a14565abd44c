"""Draw the figures of the documentation again, from the recorded results.

``python benchmarks/figures.py`` draws those of the benchmarks; ``python benchmarks/generalization.py report`` those of
the two collections of models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapters
import convergence
import geodesic_ablation
import logarithm
import lora_text_report
import pandas as pd
import sam
from _common import RESULTS

IMAGES = RESULTS.parent.parent / "docs" / "images"


def rows(name: str) -> list[dict[str, Any]]:
    """Read what a benchmark recorded."""
    path = RESULTS / name
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def main(folder: Path = IMAGES) -> None:
    """Draw all of them into a folder."""
    convergence.draw(rows("convergence.json"), folder / "convergence.png")
    adapters.draw(rows("adapters.json"), folder / "adapters.png")
    geodesic_ablation.draw(rows("geodesic_ablation.json"), folder / "geodesic_ablation.png")
    logarithm.draw(rows("logarithm.json"), folder)
    texts = rows("lora_text.jsonl")
    lora_text_report.draw(texts, pd.DataFrame(texts).drop(columns="losses"), folder / "lora_text.png")
    sam.report(rows("sam.jsonl"), folder / "sam.png")


if __name__ == "__main__":
    main()
