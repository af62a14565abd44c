"""Distances between any two points: how many are found, how exactly, and in what time.

Random pairs of several sizes (inv), all pairs of two fine-tunes of a small vision transformer, which start from one
model, of two of the same architecture that are trained apart, and heads of the size of ViT-B/32's with independent
random weights. Seconds of the processor, of all threads, and of the clock, which other programs lengthen.

    python -m benchmarks.logarithm --weights WEIGHTS.pth --images cifar10.zip
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds import GLQuotientInv, frechet_mean
from quotient_manifolds.symmetries import ModelDistance, PairDistance, model_distance
from reproduction.plots import plot_distances
from studies import _vit_cifar10

from ._common import write

SHAPES = {(5, 4, 2): 64, (10, 10, 3): 32, (50, 40, 4): 16, (100, 100, 8): 8}


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run a function; give its result, and both times."""
    wall, processor = time.perf_counter(), time.process_time()
    found = function()
    return found, {"cpu_s": time.process_time() - processor, "wall_s": time.perf_counter() - wall}


def accuracy(manifold: GLQuotientInv, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Find logarithms; what they miss of the targets, and how far the distance is from symmetric."""
    u, times = timed(lambda: manifold.logmap(x, y, on_error="nan"))
    solved = u.isfinite().all(-1).all(-1)
    x, y, u = x[solved], y[solved], u[solved]
    targets = manifold.to_matrix(y)
    missing = torch.linalg.matrix_norm(manifold.to_matrix(manifold.expmap(x, u)) - targets)
    d = manifold.norm(x, u)
    return {
        "shape": [manifold.n, manifold.m, x.shape[-1]],
        "pairs": len(solved),
        "solved": int(solved.sum()),
        "residual": float((missing / torch.linalg.matrix_norm(targets)).max()),
        "length": [float(d.min()), float(d.max())],
        "asymmetry": float((manifold.dist(y[:16], x[:16]) - d[:16]).abs().max()),
        **times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _vit_cifar10.arguments(parser)
    parser.add_argument("--heads", type=int, default=144, help="of size 769 × 769, h = 64")
    parser.add_argument("--count", type=int, default=1280, help="training images")
    parser.add_argument("--epochs", type=int, default=12, help="of the models that are trained apart")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    rows = []
    for (n, m, h), count in SHAPES.items():
        torch.manual_seed(0)
        manifold = GLQuotientInv(n, m)
        rows.append({"what": "random", **accuracy(manifold, *(manifold.random(count, n + m, h) for _ in range(2)))})
    torch.set_default_dtype(torch.float32)
    recipe = {"lr": 1e-4, "decay": 0.05, "epochs": 1, "noise": 0.0, "batch": 64}
    from_one = [_vit_cifar10.fine_tuned(options.weights, options.images, recipe, s, options.count) for s in (1, 2)]
    recipe |= {"lr": 1e-3, "epochs": options.epochs}
    apart = [_vit_cifar10.fine_tuned(None, options.images, recipe, s, options.count) for s in (3, 4)]
    test = _vit_cifar10.images(options.images, "test", 1000, seed=0)
    for what, models, settings in (
        ("fine-tunes", from_one, {"metric": "inv"}),
        ("fine-tunes", from_one, {"metric": "mix"}),
        ("trained apart", apart, {"metric": "inv"}),
    ):
        found, times = timed(lambda models=models, settings=settings: model_distance(*models, **settings))
        distances = [p.distance for p in found.pairs]
        with torch.no_grad():
            accuracies = [float((m(test[0]).argmax(1) == test[1]).double().mean()) for m in models]
        rows.append(
            {"what": what, **settings, "pairs": len(distances), "unsolved": sum(d != d for d in distances), **times}
            | {"total": found.total, "mean": sum(distances) / len(distances), "largest": max(distances)}
            | {"accuracies": accuracies}
            | {"distances": [[p.module, p.kind, p.head, round(p.distance, 4)] for p in found.pairs]}
        )
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    manifold = GLQuotientInv(5, 4)
    points = manifold.random(20, 9, 2)
    moved = manifold.act(points, torch.randn(20, 2, 2))[torch.randperm(20)]
    (one, other), times = timed(lambda: [frechet_mean(manifold, p) for p in (points, moved)])
    apart = float((manifold.to_matrix(one.point) - manifold.to_matrix(other.point)).abs().max())
    certificates = [float(f.certificate) for f in (one, other)]
    rows.append({"what": "mean of 20, twice", "certificates": certificates, "difference": apart, **times})
    manifold = GLQuotientInv(769, 769)
    x, y = (manifold.random(options.heads, 2 * 769, 64) for _ in range(2))
    rows.append({"what": "random", **accuracy(manifold, x, y)})
    write("logarithm", rows)


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw the distances of the heads, a figure for fine-tunes and one for models trained apart."""
    for name, what in (("fine_tunes", "fine-tunes"), ("apart", "trained apart")):
        row = next(r for r in rows if r["what"] == what and r["metric"] == "inv")
        pairs = (PairDistance("", m.removeprefix("transformer."), k, h, h, d) for m, k, h, d in row["distances"])
        plot_distances(ModelDistance("inv", tuple(pairs)), folder / f"distances_{name}.png")


if __name__ == "__main__":
    main()
