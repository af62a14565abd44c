"""What the equivalent choices of a network's weights do to every measure: ten moves that leave its probabilities alone.

The demo's vision transformer, trained for some epochs.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import sharpness
from benchmarks._common import write
from sharpness.demo import MOVES, digits, moved, train, vision_transformer

MEASURES = {
    "euclidean": 0.05, "adaptive": 0.5, "geodesic-inv": 0.1, "geodesic-mix": 0.1, "complete-inv": 0.1,
    "complete-mix": 0.1,
}  # fmt: skip


def measured(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Measure by all measures."""
    return {
        name: round(float(sharpness.evaluate(model, [batch], measure=name, rho=rho, progress=False)), 6)
        for name, rho in MEASURES.items()
    }


def main() -> None:
    """Train once, move in every way, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels, _, _ = digits()
    model = vision_transformer()
    train(model, images, labels, epochs=options.epochs, progress=False)
    batch = (images[:128], labels[:128])
    with torch.no_grad():
        before = model(images).logits.log_softmax(-1)
    rows = [{"move": "none", "largest change of a log-probability": 0.0, **measured(model, batch)}]
    for kind in MOVES:
        twin = moved(model, kind)
        with torch.no_grad():
            change = float((twin(images).logits.log_softmax(-1) - before).abs().max())
        rows.append({"move": kind, "largest change of a log-probability": change, **measured(twin, batch)})
        print(rows[-1])
    write("other_symmetries", rows)


if __name__ == "__main__":
    main()
