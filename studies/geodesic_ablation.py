"""How the sharpness depends on the way geodesics are followed: first order, second order, Runge–Kutta, exact.

Each is maximised on its own; then all four move along the exact measure's worst direction, which compares end points.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from benchmarks._common import RESULTS, write
from reproduction.rk4 import RungeKuttaMeasure
from sharpness import get_measure
from sharpness.plots import figure

from . import _vit_cifar10

RADII = {"geodesic-inv": (0.03, 0.1, 0.3, 1.0), "geodesic-mix": (0.006, 0.02, 0.06, 0.2)}
WAYS = ("first-order", "second-order", "rk4", "exact")


def along(measure: str, way: str) -> sharpness.Measure:
    """Give a measure whose pairs move in one of the ways."""
    if way == "rk4":
        return RungeKuttaMeasure(**vars(get_measure(measure)))
    return get_measure(measure, geodesic=way)


def one(options: argparse.Namespace, measure: str, rho: float) -> dict[str, Any]:
    """One measure at one radius."""
    torch.set_num_threads(1)
    model = _vit_cifar10.model(options.weights)
    x, y = _vit_cifar10.images(options.images, "train", options.size, seed=0)
    found = {
        way: sharpness.evaluate(model, [(x, y)], measure=along(measure, way), rho=rho, progress=False) for way in WAYS
    }
    row: dict[str, Any] = {
        "measure": measure, "rho": rho, "rho_over_weakest": rho / (found["exact"].min_singular_value or float("nan")),
        "base_loss": found["exact"].batches[0].base_loss,
        "sharpness": {way: float(r) for way, r in found.items()},
        "passes": {way: r.batches[0].passes for way, r in found.items()},
        "seconds": {way: round(r.batches[0].seconds, 1) for way, r in found.items()},
        "shortened_pairs": found["exact"].batches[0].num_exited_pairs,
    }  # fmt: skip
    # Along one vector: the worst of the exact measure.
    direction = found["exact"].direction(0)
    ends, losses = {}, {}
    for way in WAYS:
        moved = replace(direction, measure=along(measure, way))
        with sharpness.perturbed(model, moved) as there, torch.no_grad():
            losses[way] = float(F.cross_entropy(there(x), y))
            ends[way] = products(there, direction)
    with torch.no_grad():
        travelled = (ends["exact"] - products(model, direction)).norm()
    row["loss_along_the_exact_worst_direction"] = losses
    row["endpoint_error"] = {k: float(f"{float((v - ends['exact']).norm() / travelled):.3g}") for k, v in ends.items()}
    print(row, flush=True)
    return row


def products(model: nn.Module, direction: sharpness.Direction) -> torch.Tensor:
    """What the network sees of all pairs."""
    weights = dict(model.named_parameters())
    return torch.cat([p.manifold().to_matrix(p.gather(weights)).flatten() for p in direction.symmetries.pairs])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Sharpness relative to the exact one, and the error of the end point, against ρ."""
    with figure(path, (11, 7.4), 2, 2) as (_, axes):
        for (measure, rhos), (left, right) in zip(RADII.items(), axes, strict=True):
            mine = sorted((r for r in rows if r["measure"] == measure), key=lambda r: r["rho"])
            for way, marker in zip(WAYS, "osD^", strict=False):
                ratios = [r["sharpness"][way] / r["sharpness"]["exact"] for r in mine]
                left.semilogx(rhos, ratios, marker=marker, label=way)
                if way != "exact":
                    right.loglog(rhos, [r["endpoint_error"][way] for r in mine], marker=marker, label=way)
            left.set(xlabel="ρ", title=f"{measure}: sharpness ÷ exact")
            right.set(xlabel="ρ", title=f"{measure}: error of the end point")
            left.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _vit_cifar10.arguments(parser)
    parser.add_argument("--size", type=int, default=64, help="images")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--figure", type=Path, default=RESULTS.parent / "docs" / "images" / "geodesic_ablation.png")
    options = parser.parse_args()
    jobs = [(options, m, rho) for i in range(4) for m in RADII for rho in (RADII[m][i],)]
    with ProcessPoolExecutor(options.workers) as pool:
        rows = list(pool.map(one, *zip(*jobs, strict=True)))
    draw(rows, options.figure)
    write("geodesic_ablation", rows)


if __name__ == "__main__":
    main()
