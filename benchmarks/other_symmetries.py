"""What the equivalent choices of a network's weights do to every measure: ten moves that leave its scores as they are.

The demo's vision transformer, trained for some epochs.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from _common import write
from torch import Tensor, nn

import sharpness
from quotient_manifolds.symmetries import apply_random_symmetry_
from quotient_manifolds.symmetries.whole import apply_random_moves_
from sharpness.demo import digits, train, vision_transformer

MEASURES = {"euclidean": 0.05, "adaptive": 0.5, "geodesic-inv": 0.1, "complete-inv": 0.1, "complete-mix": 0.1}


def _only(kind: str, scale: float = 1.0) -> Callable[[nn.Module], object]:
    return lambda model: apply_random_moves_(model, scale, seed=1, classes=True, kinds=[kind])


#: The moves of one kind start at the canonical form, where the others are folded.
MOVES: dict[str, Callable[[nn.Module], object]] = {
    "canonical form": lambda model: apply_random_moves_(model, kinds=[], classes=True),
    "heads, GL(h)": lambda model: (
        apply_random_moves_(model, kinds=[], classes=True), apply_random_symmetry_(model, condition=30.0),
    ),
    "norm's gain against its readers' columns": _only("gain"),
    "norm's shift against its readers' biases": _only("shift"),
    "readers' null direction": _only("reader", 0.1),
    "writers' null direction": _only("writer", 0.1),
    "key bias": _only("key bias"),
    "value bias against output bias": _only("value bias"),
    "embeddings that are added together": _only("embeddings"),
    "logits of a softmax": _only("classes", 0.1),
    "rotation of the stream": _only("rotation"),
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
    model.eval()
    batch = (images[:128], labels[:128])
    with torch.no_grad():
        before = model(images).logits.log_softmax(-1)
    rows = [{"move": "as trained", "largest change of a log-probability": 0.0, **measured(model, batch)}]
    for name, move in MOVES.items():
        twin = copy.deepcopy(model)
        move(twin)
        with torch.no_grad():
            change = float((twin(images).logits.log_softmax(-1) - before).abs().max())
        rows.append({"move": name, "largest change of a log-probability": change, **measured(twin, batch)})
        print(rows[-1])
    write("other_symmetries", rows)


if __name__ == "__main__":
    main()
