"""The demo: a transformer trained on real images, its sharpness, and that of an equivalent network.

Needs the extra ``demo``.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import apply_random_symmetry_, find_symmetric_pairs

from .evaluation import evaluate
from .extras import require_extra
from .files import check_file, write_json
from .plots import check_figure, plot_symmetry_demo
from .profiles import profile
from .progress import bar
from .results import SharpnessResult

__all__ = ["Demo", "digits", "run", "train"]

RADII = {
    "geodesic-inv": (0.05, 0.1, 0.2, 0.4),
    "geodesic-mix": (0.01, 0.02, 0.05, 0.1),
    "adaptive": (0.1, 0.2, 0.5, 1.0),
    "euclidean": (0.02, 0.05, 0.1, 0.2),
}


@dataclass(frozen=True)
class Demo:
    """What the demo found: accuracies, and the results of the network and of its equivalent, by measure."""

    train_accuracy: float
    test_accuracy: float
    pairs: int
    condition: float
    output_change: float
    before: dict[str, SharpnessResult]
    after: dict[str, SharpnessResult]

    def rows(self) -> list[dict[str, Any]]:
        """Give one row a measure and radius: sharpness, that of the equivalent network, relative change."""
        found = []
        for name, result in self.before.items():
            for rho in result.rhos:
                one, two = result.mean(rho), self.after[name].mean(rho)
                found.append(
                    {"measure": name, "rho": rho, "sharpness": one, "equivalent": two, "change": two / one - 1}
                )
        return found

    def table(self) -> str:
        """Write the rows as a table."""
        lines = [f"{'measure':<14}{'rho':>6}{'sharpness':>13}{'equivalent network':>21}{'relative change':>18}"]
        lines += [
            f"{r['measure']:<14}{r['rho']:>6g}{r['sharpness']:>13.5f}{r['equivalent']:>21.5f}{r['change']:>18.1e}"
            for r in self.rows()
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Give everything but the results themselves as plain data."""
        names = ("train_accuracy", "test_accuracy", "pairs", "condition", "output_change")
        return {**{name: getattr(self, name) for name in names}, "rows": self.rows()}


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
) -> Demo:
    """Train, measure, move along the symmetry, measure again; print a table and draw a figure.

    Parameters
    ----------
    seed : int
        Of the split of the data, the training and the group elements.
    out : Path
        Where the figure goes; a JSON file with the numbers lies beside it.
    condition : float
        Condition number of the random group elements.
    progress : bool
        Show progress bars.

    Returns
    -------
    Demo

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        A condition number below 1; no place for the figure, or no such kind of one; the extra ``demo`` is not
        installed.
    """
    if not 1 <= condition < math.inf:
        raise ValueError(f"a condition number is at least 1, got {condition}")
    torch.manual_seed(seed)
    x_train, y_train, x_test, y_test = digits(seed)
    model = vision_transformer()
    check_figure(out)
    check_file(out.with_suffix(".json"))
    train(model, x_train, y_train, seed=seed, progress=progress)
    accuracies = _accuracy(model, x_train, y_train), _accuracy(model, x_test, y_test)
    print(f"a vision transformer on {len(y_train)} scanned digits: {accuracies[0]:.1%} of them right, "
          f"{accuracies[1]:.1%} of {len(y_test)} test digits")  # fmt: skip
    twin = copy.deepcopy(model)
    pairs = apply_random_symmetry_(twin, condition, seed)
    change = float((_logits(twin, x_test) - _logits(model, x_test)).abs().max())
    print(f"an equivalent network: {pairs} attention pairs moved along their orbits by group elements of condition "
          f"{condition:g}; largest change of a score {change:.1e}\n")  # fmt: skip
    print(find_symmetric_pairs(model), "\n", sep="")
    batches = [(x_train[i : i + 128], y_train[i : i + 128]) for i in (0, 128)]
    before, after, profiles = {}, {}, {}
    for name, radii in RADII.items():
        before[name] = evaluate(model, batches, measure=name, rho=radii, seed=seed, progress=progress)
        after[name] = evaluate(
            twin, batches, measure=name, rho=radii, seed=seed, progress=progress, keep_directions=False
        )
        worst = before[name].direction(0, radii[-1])
        profiles[name] = profile(model, batches[0], worst, ways=(worst.measure.geodesic,), reach=1)
    demo = Demo(*accuracies, pairs, condition, change, before, after)
    print(demo.table())
    plot_symmetry_demo(before, after, profiles, out)
    write_json(out.with_suffix(".json"), demo.to_dict())
    print(f"\nthe picture is in {out}, the numbers in {out.with_suffix('.json')}")
    return demo
