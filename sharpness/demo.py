"""The demo: a transformer trained on real images, its sharpness, and that of equivalent networks.

Needs the extra ``demo``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import apply_random_symmetry_
from quotient_manifolds.symmetries.whole import apply_random_moves_

from .direction import Profile, profile
from .errors import require_extra
from .evaluation import evaluate
from .files import check_file, write_json
from .plots.look import COLOURS, MARKERS, check_figure, figure
from .progress import bar
from .results import SharpnessResult

__all__ = ["digits", "moved", "run", "train", "vision_transformer"]

#: The measures and their radii.
RADII = {"euclidean": 0.05, "adaptive": 0.5, "geodesic-inv": 0.1, "complete-inv": 0.1}

#: Moves that leave the network's probabilities unchanged: the kind of symmetry, the size of the move, and its label.
MOVES = {
    "heads": (1.0, "attention heads, GL(h)"),
    "gain": (1.0, "gains of LayerNorms, against the next columns"),
    "shift": (1.0, "shifts of LayerNorms, against the next biases"),
    "reader": (0.1, "null directions of layers after LayerNorms"),
    "writer": (0.1, "null directions of layers before LayerNorms"),
    "key bias": (1.0, "biases of the keys"),
    "value bias": (1.0, "biases of values and outputs"),
    "embeddings": (1.0, "embeddings that are added to each other"),
    "classes": (0.1, "a constant added to the scores of all classes"),
    "rotation": (1.0, "rotation of the residual stream"),
}


def moved(model: nn.Module, kind: str, *, condition: float = 30.0, seed: int = 0) -> nn.Module:
    """Copy a model and move it along one kind of symmetry; all kinds but heads start from its canonical form."""
    twin = copy.deepcopy(model)
    if kind == "heads":
        apply_random_symmetry_(twin, condition, seed)
    else:
        apply_random_moves_(twin, MOVES[kind][0], seed + 1, classes=True, kinds=[kind])
    return twin


def digits(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's 1,797 scanned digits: train images (…, 1, 8, 8) and labels, test images and labels."""
    with require_extra("the digits come from scikit-learn", "demo"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=seed, stratify=data.target)
    return images[train], labels[train], images[test], labels[test]


def vision_transformer() -> nn.Module:
    """Build the demo's ViT: 16 patches of 2 × 2 pixels, 3 layers of 4 heads, width 48."""
    with require_extra("the demo's vision transformer comes from transformers", "demo"):
        from transformers import ViTConfig, ViTForImageClassification
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=96, num_labels=10, initializer_range=0.1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = ViTForImageClassification(config)
    return model


def train(
    model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int = 60, seed: int = 0, progress: bool = True
) -> None:
    """Train by AdamW on images shifted at random by up to one pixel, with a one-cycle learning rate."""
    generator = torch.Generator().manual_seed(seed)
    size, steps = 64, math.ceil(len(labels) / 64)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=3e-3, total_steps=epochs * steps)
    model.train()
    with bar(epochs * steps, "training", "step", progress=progress) as shown:
        for _ in range(epochs):
            for chosen in torch.randperm(len(labels), generator=generator).split(size):
                dx, dy = torch.randint(-1, 2, (2,), generator=generator).tolist()
                x = F.pad(images[chosen], (1, 1, 1, 1), value=-1.0)[:, :, 1 + dy : 9 + dy, 1 + dx : 9 + dx]
                loss = F.cross_entropy(model(x).logits, labels[chosen])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                shown.update()
                shown.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()


@torch.no_grad()
def _logits(model: nn.Module, images: Tensor) -> Tensor:
    found: Tensor = model(images).logits
    return found


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((_logits(model, images).argmax(1) == labels).double().mean())


def run(
    *, seed: int = 0, out: Path = Path("sharpness-demo.png"), condition: float = 30.0, progress: bool = True
) -> dict[str, Any]:
    """Train, measure, move along every symmetry, and measure again; print a table, draw a figure and write JSON.

    The seed is that of the split of the data, of the training and of the moves; the condition number is that of the
    group elements that act on heads. Returns what the JSON file holds.
    """
    if not 1 <= condition < math.inf:
        raise ValueError(f"a condition number is at least 1, got {condition}")
    torch.manual_seed(seed)
    x_train, y_train, x_test, y_test = digits(seed)
    model = vision_transformer()
    numbers = out.with_suffix(".json")
    check_figure(out)
    check_file(numbers)
    if numbers.exists() and '"output_change"' not in numbers.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{numbers}, which the numbers would replace, is not from a demo; choose another picture")
    train(model, x_train, y_train, seed=seed, progress=progress)
    right, right_in_test = _accuracy(model, x_train, y_train), _accuracy(model, x_test, y_test)
    print(
        f"a vision transformer on {len(y_train)} scanned digits: {right:.1%} of them correct, "
        f"{right_in_test:.1%} of {len(y_test)} test digits\n"
    )
    batch = (x_train[:128], y_train[:128])

    def measure(network: nn.Module, **options: Any) -> dict[str, SharpnessResult]:
        return {
            name: evaluate(network, [batch], measure=name, rho=rho, seed=seed, progress=False, **options)
            for name, rho in RADII.items()
        }

    before = measure(model)
    lines = {name: profile(model, batch, r.direction(0), reach=1) for name, r in before.items()}
    rows: list[dict[str, Any]] = [{"move": "the network", **{name: float(r) for name, r in before.items()}}]
    print(f"{'':<45}" + "".join(f"{name:>14}" for name in RADII))
    print(f"{'sharpness of the network':<45}" + "".join(f"{float(r):>14.4f}" for r in before.values()))
    print("times as sharp, with the same probabilities, after a move of")
    largest, log_probabilities = 0.0, _logits(model, x_test).log_softmax(-1)
    with bar(len(MOVES), "equivalent networks", "network", progress=progress) as shown:
        for kind, (_, label) in MOVES.items():
            twin = moved(model, kind, condition=condition, seed=seed)
            largest = max(largest, float((_logits(twin, x_test).log_softmax(-1) - log_probabilities).abs().max()))
            after = measure(twin, keep_directions=False)
            rows.append({"move": kind, **{name: float(r) for name, r in after.items()}})
            factors = [float(after[name]) / float(before[name]) for name in RADII]
            print(f"  {label:<43}" + "".join(f"{f:>14.4f}" for f in factors))
            shown.update()
    print(f"\nlargest change of a log-probability {largest:.0e}")
    _draw(rows, lines, out)
    found = {"train_accuracy": right, "test_accuracy": right_in_test, "condition": condition,
             "output_change": largest, "rows": rows}  # fmt: skip
    write_json(numbers, found)
    print(f"the picture is in {out}, the numbers in {numbers}")
    return found


def _draw(rows: Sequence[Mapping[str, Any]], lines: Mapping[str, Profile], path: Path) -> None:
    """Draw the loss along the worst direction of each measure, and what equivalent choices of the weights do to it."""
    first, *others = rows
    with figure(path, (12.5, 5.2), 1, 2, width_ratios=(1, 1.3)) as (_, ((left, right),)):
        for name, line in lines.items():
            look: dict[str, Any] = {"color": COLOURS[name], "marker": MARKERS[name], "label": name}
            losses = next(iter(line.losses.values()))
            left.plot(line.lengths, losses, markevery=8, **look)
            right.plot([r[name] / first[name] for r in others], range(len(others)), linestyle="", markersize=9, **look)
        left.set(xlabel="distance from the weights", ylabel="loss", title="Loss along the worst direction")
        left.legend()
        right.set(
            xscale="log", xlabel="sharpness, relative to the network itself", title="The same function, other weights"
        )
        right.set_yticks(range(len(others)), [MOVES[r["move"]][1] for r in others], fontsize="small")
        right.invert_yaxis()
        right.axvline(1, color="0.7", linewidth=1, zorder=0)
        right.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        right.minorticks_off()
