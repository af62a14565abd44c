"""The small vision transformer that several benchmarks measure, and CIFAR-10 images for it, from files given by path.

``--weights``: a state dict of a ViT with 4 × 4 patches, width 128, 6 post-norm encoder layers of 8 heads.
``--images``: a zip of ``cifar10/{train,test}/CLASS/NAME.jpg``.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from reproduction.vision import SmallViT, vit_cifar10

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the paths to a benchmark's arguments."""
    parser.add_argument("--weights", type=Path, required=True, help="state dict of the vision transformer")
    parser.add_argument("--images", type=Path, required=True, help="zip with cifar10/{train,test}/CLASS/NAME.jpg")


def model(weights: Path | None) -> SmallViT:
    """Build the model in evaluation mode; without a file its weights are random."""
    found = vit_cifar10()
    if weights is not None:
        found.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"))
    return found.eval()


def images(path: Path, split: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images without replacement, (count, 3, 32, 32) normalised, and their classes."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith(f"cifar10/{split}/") and n.endswith(".jpg"))
        classes = sorted({n.split("/")[2] for n in names})
        chosen = [names[i] for i in np.random.default_rng(seed).choice(len(names), count, replace=False)]
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(n))).convert("RGB")) for n in chosen])
    x = torch.tensor(pixels).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    return (x - mean) / std, torch.tensor([classes.index(n.split("/")[2]) for n in chosen])


def fine_tuned(weights: Path | None, path: Path, recipe: dict[str, float], seed: int, count: int = 2560) -> SmallViT:
    """Train the model on a subset with AdamW: ``lr``, ``decay``, ``epochs``, ``noise`` (labels), ``batch``."""
    torch.manual_seed(seed)
    net = model(weights).train()
    x, y = images(path, "train", count, seed=5)
    noisy = torch.rand(count) < recipe["noise"]
    y[noisy] = torch.randint(10, (int(noisy.sum()),))
    optimizer = torch.optim.AdamW(net.parameters(), recipe["lr"], weight_decay=recipe["decay"])
    for _ in range(int(recipe["epochs"])):
        for part in torch.randperm(count).split(int(recipe["batch"])):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
    return net.eval()
