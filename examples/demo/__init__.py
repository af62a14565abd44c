"""The demo: a transformer trained on real images, its sharpness, and that of equivalent networks.

It is installed as ``sharpness.demo``, for the command ``sharpness demo``. Needs the extra ``demo``.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import ALL, canonicalize_, find, move_
from sharpness.errors import require_extra
from sharpness.evaluation import evaluate, progress_bar
from sharpness.files import check_file, write_json
from sharpness.plots import COLOURS, MARKERS, figure

#: The measures and their radii.
RADII = {"euclidean": 0.05, "adaptive": 0.5, "geodesic-inv": 0.1, "complete-inv": 0.1}

#: Reparametrisations that leave the network's probabilities unchanged: their kind, their size, and their label.
MOVES = {
    "heads": (1.0, "invertible matrices in heads"),
    "gain": (1.0, "LayerNorm gains and next weights"),
    "shift": (1.0, "LayerNorm shifts and next biases"),
    "reader": (0.1, "null directions after LayerNorms"),
    "writer": (0.1, "null directions before LayerNorms"),
    "key bias": (1.0, "key biases"),
    "value bias": (1.0, "value biases and output biases"),
    "embeddings": (1.0, "embeddings that are added"),
    "classes": (0.1, "a constant in all scores"),
    "rotation": (1.0, "rotation of the residual stream"),
}


def moved(model: nn.Module, kind: str, *, seed: int = 0) -> nn.Module:
    """Copy a model, in canonical form, and move it along one kind of symmetry."""
    twin = copy.deepcopy(model)
    if kind == "heads":
        move_(twin, seed=seed, condition=30.0)
    else:
        move_(twin, find(twin, scope=ALL, classes=True), seed=seed + 1, scale=MOVES[kind][0], kinds=[kind])
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
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=48, intermediate_size=96,
        num_hidden_layers=3, num_attention_heads=4, initializer_range=0.1,
    )  # fmt: skip
    model: nn.Module = ViTForImageClassification(config)
    return model


def train(
    model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int = 60, seed: int = 0, progress: bool = True
) -> None:
    """Train by AdamW on images shifted at random by up to one pixel, with a one-cycle learning rate."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    steps = epochs * -(-len(labels) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=3e-3, total_steps=steps)
    model.train()
    with progress_bar(steps, "training", "step", progress=progress) as shown:
        for _ in range(epochs):
            for chosen in torch.randperm(len(labels), generator=generator).split(64):
                dx, dy = torch.randint(-1, 2, (2,), generator=generator).tolist()
                x = F.pad(images[chosen], (1, 1, 1, 1), value=-1.0)[:, :, 1 + dy : 9 + dy, 1 + dx : 9 + dx]
                optimiser.zero_grad()
                F.cross_entropy(model(x).logits, labels[chosen]).backward()
                optimiser.step()
                schedule.step()
                shown.update()
    model.eval()


@torch.no_grad()
def _log_probabilities(model: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = model(images).logits
    return logits.log_softmax(-1)


def times(factor: float) -> str:
    """Write a factor in three digits at most: 0.98× or 41×."""
    return f"{factor:.0f}×" if factor >= 9.995 else f"{factor:.2f}×"


def draw(factors: Any, out: Path) -> None:
    """Draw a row for each reparametrisation, and in it the factor of every measure (a column of the table)."""
    with figure(out, (8.5, 5.2)) as (_, ((axes,),)):
        axes.axvline(1, color="0.7", linewidth=1, zorder=0)
        for place, (name, values) in enumerate(factors.items()):
            style = {"linestyle": "", "color": COLOURS[name], "marker": MARKERS[name], "markersize": 7}
            axes.plot(values, np.arange(len(values)) + 0.17 * (place - 1.5), label=name, **style)
        axes.set_yticks(range(len(factors)), factors.index)
        axes.set_title("Ten reparametrisations of one network: the same function, other weights", x=0.3)
        axes.set(xscale="log", xlabel="sharpness, relative to the original network")
        axes.tick_params(axis="y", labelsize="small")
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
        axes.invert_yaxis()
        axes.legend(loc="center right")
        axes.set_xticks([1, 2, 5, 10, 20, 40], ["1×", "2×", "5×", "10×", "20×", "40×"])
        axes.set_xticks([], minor=True)


def run(*, seed: int = 0, out: Path = Path("sharpness-demo.png"), progress: bool = True) -> None:
    """Train, measure, reparametrise in ten ways, and measure again; print a table, draw a figure and write JSON.

    The seed is that of the split of the data, of the training and of the reparametrisations.
    """
    with require_extra("the demo needs matplotlib and pandas", "demo"):
        import matplotlib  # noqa: F401
        import pandas as pd
    x_train, y_train, x_test, y_test = digits(seed)
    torch.manual_seed(seed)
    model, numbers = vision_transformer(), out.with_suffix(".json")
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"{str(out)!r} is not a figure: its name must end in .png, .pdf or .svg")
    check_file(out)
    check_file(numbers)
    if numbers.exists() and '"output_change"' not in numbers.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{numbers}, which the numbers would replace, is not from a demo; choose another picture")
    train(model, x_train, y_train, seed=seed, progress=progress)
    # Where the moves outside heads start, so that a factor shows its move only.
    canonicalize_(model, replace(find(model, scope=ALL, classes=True), pairs=()))
    before = _log_probabilities(model, x_test)
    right_in_test = float((before.argmax(1) == y_test).double().mean())
    right = float((_log_probabilities(model, x_train).argmax(1) == y_train).double().mean())
    change, rows = 0.0, list[dict[str, Any]]()
    with progress_bar(1 + len(MOVES), "equivalent networks", "network", progress=progress) as shown:
        for kind in ("the network", *MOVES):
            twin = moved(model, kind, seed=seed) if kind in MOVES else model
            change = max(change, float((_log_probabilities(twin, x_test) - before).abs().max()))
            options: dict[str, Any] = {"batches": [(x_train[:128], y_train[:128])], "seed": seed, "progress": False}
            values = {name: float(evaluate(twin, measure=name, rho=rho, **options)) for name, rho in RADII.items()}
            rows.append({"move": kind, **values})
            shown.update()
    table = pd.DataFrame(rows).set_index("move")
    factors = (table / table.iloc[0])[1:].rename({kind: label for kind, (_, label) in MOVES.items()})
    draw(factors, out)
    accuracies = {"train_accuracy": right, "test_accuracy": right_in_test}
    write_json(numbers, {**accuracies, "output_change": change, "rows": rows})
    print(
        f"a vision transformer on {len(y_train)} scanned digits: {right:.1%} right, "
        f"{right_in_test:.1%} of {len(y_test)} test digits\n"
    )
    print(table[:1].rename({"the network": "sharpness"}).to_string(index_names=False, float_format="{:.2f}".format))
    print("\ntimes as sharp, with the same probabilities, after a reparametrisation of")
    print(factors.to_string(index_names=False, float_format=times))
    print(f"\nlargest change of a log-probability {change:.0e}")
    print(f"the picture is in {out}, the numbers in {numbers}")
