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

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class ViT(nn.Module):
    """Names of the parameters as in the state dict."""

    def __init__(self, width: int = 128, depth: int = 6, heads: int = 8, hidden: int = 256, classes: int = 10) -> None:
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 65, width))
        layer = nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed.proj(x).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.mlp_head(self.transformer(x)[:, 0])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the paths to a benchmark's arguments."""
    parser.add_argument("--weights", type=Path, required=True, help="state dict of the vision transformer")
    parser.add_argument("--images", type=Path, required=True, help="zip with cifar10/{train,test}/CLASS/NAME.jpg")


def model(weights: Path) -> ViT:
    """Build the model in evaluation mode."""
    found = ViT()
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


def fine_tuned(weights: Path, path: Path, recipe: dict[str, float], seed: int, count: int = 2560) -> ViT:
    """Fine-tune the model on a subset with AdamW: ``lr``, ``decay``, ``epochs``, ``noise`` (labels), ``batch``."""
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
