"""Sharpness against ρ, and best loss against step: how converged 20 steps are."""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sharpness
from benchmarks._common import RESULTS, write
from sharpness.plots import COLOURS, MARKERS, figure

from . import _vit_cifar10

RADII = {
    "geodesic-inv": (0.01, 0.03, 0.1, 0.2, 0.3),
    "geodesic-mix": (0.003, 0.01, 0.03, 0.1, 0.2),
    "adaptive": (0.05, 0.15, 0.5, 1.0, 1.5),
}
STEPS = (5, 10, 20, 50, 100)


def curve(options: argparse.Namespace, measure: str, rho: float) -> list[dict[str, Any]]:
    """One measure at one radius, all batches."""
    torch.set_num_threads(1)
    model = _vit_cifar10.model(options.weights)
    x, y = _vit_cifar10.images(options.images, "train", options.size * options.batches, seed=0)
    batches = list(zip(x.split(options.size), y.split(options.size), strict=True))
    # Once a thirty-thousandth of the rise is all that is left to gain, further steps change nothing that is drawn.
    result = sharpness.evaluate(
        model,
        batches,
        measure=measure,
        rho=rho,
        steps=max(STEPS),
        relative_tol=3e-5,
        progress=False,
        keep_directions=False,
    )
    rows = []
    for b in result.batches:
        best = np.maximum.accumulate(np.array(b.history)) - b.base_loss
        increase = None if b.worst_error is None else b.worst_error - b.base_error
        rows.append(
            {
                "measure": measure, "rho": rho, "batch": b.batch, "base_loss": b.base_loss, "sharpness": b.value,
                "passes": b.passes, "error_increase": increase,
                "best_by_step": {s: round(float(best[min(s, len(best) - 1)]), 6) for s in STEPS},
                "best": [round(float(v), 6) for v in best], "seconds": round(b.seconds, 1),
            }
        )  # fmt: skip
    print(measure, rho, [r["best_by_step"] for r in rows], flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Left: sharpness against ρ. Right: share of the final rise against step."""
    with figure(path, (12, 4.6), 1, 2) as (_, ((left, right),)):
        for measure in RADII:
            colour = COLOURS[measure]
            mine = [r for r in rows if r["measure"] == measure]
            rhos = sorted({r["rho"] for r in mine})
            values = np.array([[r["sharpness"] for r in mine if r["rho"] == rho] for rho in rhos])
            left.loglog(rhos, values.mean(1), marker=MARKERS[measure], color=colour, label=measure)
            for rho, style in zip(rhos, (":", "-.", "-", "--", (0, (5, 1, 1, 1))), strict=True):
                curves = [np.array(r["best"]) for r in mine if r["rho"] == rho]
                share = np.mean([np.pad(c, (0, 101 - len(c)), mode="edge") / c[-1] for c in curves], axis=0)
                right.semilogx(range(1, 101), 1 - share[1:], linestyle=style, color=colour, label=f"ρ = {rho:g}")
        left.set(xlabel="ρ", ylabel="sharpness", title="rise of the loss, mean of the batches")
        left.legend()
        right.set(xlabel="step", ylabel="share of the rise still missing", title="best loss against step", yscale="log")
        right.axvline(20, color="0.6", linewidth=0.8)
        right.set_ylim(1e-4, 1)
        right.legend(fontsize="xx-small", ncols=3, loc="upper right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _vit_cifar10.arguments(parser)
    parser.add_argument("--size", type=int, default=256, help="images a batch")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--name", default="convergence")
    parser.add_argument("--figure", type=Path, default=RESULTS.parent / "docs" / "images" / "convergence.png")
    options = parser.parse_args()
    jobs = [(options, m, rho) for i in range(5) for m in RADII for rho in (RADII[m][i],)]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for done in pool.map(curve, *zip(*jobs, strict=True)):
            rows += done
    draw(rows, options.figure)
    write(options.name, rows)


if __name__ == "__main__":
    main()
