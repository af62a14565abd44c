"""The demo: a transformer trained on real images, its sharpness, and that of an equivalent network.

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

from quotient_manifolds.symmetries import apply_random_symmetry_, find_symmetric_pairs

from .evaluation import evaluate
from .extras import require_extra
from .files import check_file, write_json
from .plots.look import COLOURS, MARKERS, check_figure, figure
from .profiles import Profile, profile
from .progress import bar
from .results import SharpnessResult

__all__ = ["digits", "run", "train", "vision_transformer"]

RADII = {
    "geodesic-inv": (0.05, 0.1, 0.2, 0.4),
    "geodesic-mix": (0.01, 0.02, 0.05, 0.1),
    "adaptive": (0.1, 0.2, 0.5, 1.0),
    "euclidean": (0.02, 0.05, 0.1, 0.2),
}


def digits(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give scikit-learn's 1,797 scanned digits: train images (…, 1, 8, 8) and labels, test images and labels."""
    with require_extra("the digits are scikit-learn's", "demo"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=seed, stratify=data.target)
    return images[train], labels[train], images[test], labels[test]


def vision_transformer() -> nn.Module:
    """Build the demo's ViT: 16 patches of 2 × 2 pixels, 3 layers of 4 heads, width 48."""
    with require_extra("the demo's vision transformer is of transformers", "demo"):
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
) -> None:
    """Train, measure, move along the symmetry, measure again; print a table, draw a figure, and write a JSON beside it.

    The seed is that of the split of the data, of the training and of the group elements, whose condition number is
    ``condition``.
    """
    if not 1 <= condition < math.inf:
        raise ValueError(f"a condition number is at least 1, got {condition}")
    torch.manual_seed(seed)
    x_train, y_train, x_test, y_test = digits(seed)
    model = vision_transformer()
    numbers = out.with_suffix(".json")
    check_figure(out)
    check_file(numbers)
    train(model, x_train, y_train, seed=seed, progress=progress)
    right, right_in_test = _accuracy(model, x_train, y_train), _accuracy(model, x_test, y_test)
    print(f"a vision transformer on {len(y_train)} scanned digits: {right:.1%} of them right, "
          f"{right_in_test:.1%} of {len(y_test)} test digits")  # fmt: skip
    twin = copy.deepcopy(model)
    pairs = apply_random_symmetry_(twin, condition, seed)
    change = float((_logits(twin, x_test) - _logits(model, x_test)).abs().max())
    print(f"an equivalent network: {pairs} attention pairs moved along their orbits by group elements of condition "
          f"{condition:g}; largest change of a score {change:.1e}\n")  # fmt: skip
    print(find_symmetric_pairs(model), "\n", sep="")
    batches = [(x_train[i : i + 128], y_train[i : i + 128]) for i in (0, 128)]
    results, lines = {}, {}
    for name, radii in RADII.items():
        how: dict[str, Any] = {"measure": name, "rho": radii, "seed": seed, "progress": progress}
        before = evaluate(model, batches, **how)
        results[name] = before, evaluate(twin, batches, **how, keep_directions=False)
        worst = before[radii[-1]].direction(0)
        lines[name] = profile(model, batches[0], worst, ways=(worst.measure.geodesic,), reach=1)
    rows = [_row(name, rho, *two) for name, two in results.items() for rho in RADII[name]]
    print(f"{'measure':<14}{'rho':>6}{'sharpness':>13}{'equivalent network':>21}{'relative change':>18}")
    for r in rows:
        print(f"{r['measure']:<14}{r['rho']:>6g}{r['sharpness']:>13.5f}{r['equivalent']:>21.5f}{r['change']:>18.1e}")
    _draw(rows, lines, out)
    about = {"train_accuracy": right, "test_accuracy": right_in_test, "pairs": pairs, "condition": condition}
    write_json(numbers, {**about, "output_change": change, "rows": rows})
    print(f"\nthe picture is in {out}, the numbers in {numbers}")


def _row(name: str, rho: float, before: SharpnessResult, after: SharpnessResult) -> dict[str, Any]:
    one, two = float(before[rho]), float(after[rho])
    return {"measure": name, "rho": rho, "sharpness": one, "equivalent": two, "change": two / one - 1}


def _draw(rows: Sequence[Mapping[str, Any]], lines: Mapping[str, Profile], path: Path) -> None:
    """Draw the loss along the worst direction of each measure, and what a symmetry does to the sharpness."""
    with figure(path, (12.5, 4.4), 1, 3) as (_, ((left, middle, right),)):
        for name, line in lines.items():
            look: dict[str, Any] = {"color": COLOURS[name], "marker": MARKERS[name], "label": name}
            (losses,) = line.losses.values()
            left.plot(line.lengths, losses, markevery=8, **look)
            rhos, one, two, change = (
                [r[key] for r in rows if r["measure"] == name] for key in ("rho", "sharpness", "equivalent", "change")
            )
            middle.loglog(rhos, one, **look)
            middle.loglog(rhos, two, "x--", color=COLOURS[name], markersize=8)
            right.loglog(rhos, [max(abs(v), 1e-8) for v in change], **look)
        left.set(xlabel="distance from the weights", ylabel="loss", title="Loss along the worst direction")
        left.legend()
        middle.set(xlabel="radius ρ", ylabel="sharpness", title="The network, and an equivalent one (×)")
        right.set(xlabel="radius ρ", ylabel="relative change", title="What the symmetry changes")
        right.axhline(1e-3, color="0.7", linewidth=1)
