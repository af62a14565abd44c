"""What stopping early costs: the default tolerance against runs of 200 steps, over checkpoints, measures and radii.

Every case runs the power method for 200 steps (ended only where nothing is left to gain, gap < 1e-6 of the rise),
from whose losses and gaps the result of any tolerance and any number of steps follows; for the larger radii also
Auto-PGD with 200 steps. The reference is the higher of the two.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks._common import write
from quotient_manifolds.weights import preserve_model_state
from sharpness.ascent import ASCENTS
from sharpness.losses import BatchLoss, Objective
from sharpness.measures import MEASURES
from sharpness.space import WeightSpace

from . import _vit_cifar10

#: Two decades a measure, up to the largest radius at which the given network's loss rises by 1 to 4.
RADII = {
    "geodesic-inv": (0.003, 0.01, 0.03, 0.1, 0.3),
    "geodesic-mix": (0.001, 0.003, 0.01, 0.03, 0.1),
    "adaptive": (0.015, 0.05, 0.15, 0.5, 1.5),
    "euclidean": (0.0015, 0.005, 0.015, 0.05, 0.15),
}
#: The network as it is, and four fine-tunes of different training.
CHECKPOINTS: tuple[dict[str, float] | None, ...] = (
    None,
    {"lr": 1e-4, "decay": 0.0, "epochs": 2, "noise": 0.0, "batch": 64},
    {"lr": 1e-3, "decay": 0.05, "epochs": 3, "noise": 0.0, "batch": 64},
    {"lr": 5e-4, "decay": 0.1, "epochs": 3, "noise": 0.2, "batch": 32},
    {"lr": 3e-3, "decay": 0.0, "epochs": 2, "noise": 0.0, "batch": 128},
)


def case(options: argparse.Namespace, checkpoint: int, name: str) -> list[dict[str, Any]]:
    """All radii of one checkpoint and measure."""
    torch.set_num_threads(1)
    recipe = CHECKPOINTS[checkpoint]
    if recipe is None:
        net = _vit_cifar10.model(options.weights)
    else:
        net = _vit_cifar10.fine_tuned(options.weights, options.images, recipe, checkpoint)
    rows = []
    for draw in range(options.batches):
        batch = _vit_cifar10.images(options.images, "train", options.size, seed=100 + 10 * checkpoint + draw)

        state, space = preserve_model_state(net), WeightSpace(net, MEASURES[name])
        with state, state, space.attached():
            task = BatchLoss(space, Objective(), batch, 0)
            for index, rho in enumerate(RADII[name]):
                gaps: list[float] = []
                zero = space.empty().zero_()
                found = ASCENTS["power"](recorded(task, rho, gaps), zero, rho, options.steps, relative_tol=1e-6)
                peer, reference = None, found.value
                if index >= len(RADII[name]) - options.peer:
                    other = ASCENTS["apgd"](recorded(task, rho, []), space.empty().zero_(), rho, options.steps)
                    peer, reference = other.value - task.base, max(reference, other.value)
                rows.append(
                    {
                        "checkpoint": checkpoint, "batch": draw, "measure": name, "rho": rho, "base": task.base,
                        "reference": reference - task.base, "apgd": peer,
                        "history": [v - task.base for v in found.history], "gaps": gaps,
                    }
                )  # fmt: skip
    return rows


def recorded(task: BatchLoss, rho: float, gaps: list[float]) -> Any:
    """A batch's loss as a function to maximise, which notes the gap at the start and at every new best point."""
    values: list[float] = []

    def f(x: torch.Tensor, g: torch.Tensor | None) -> float:
        value = task(x if values else None, g)
        # The start does not count: the first iterate replaces it, whatever its value.
        if g is not None and value > max(values[1:], default=-float("inf")):
            gaps.append(rho * float(g.norm()) - float(g @ x))
        values.append(value)
        return value

    return f


def stopped(row: dict[str, Any], tol: float, steps: int) -> tuple[float, int]:
    """Value and passes (the one at the weights included) that a tolerance would have given."""
    best, passes, gap = 0.0, 1, 0
    noise = 4 * torch.finfo(torch.float32).eps
    for k, value in enumerate(row["history"][1 : steps + 1]):
        passes += 1
        if k == 0 or value > best:
            best, gap = value, gap + 1
            limit = tol * best + noise * (2 * abs(row["base"]) + abs(best))
            if k + 1 < steps and gap < len(row["gaps"]) and row["gaps"][gap] <= limit:
                break
    return best, passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _vit_cifar10.arguments(parser)
    parser.add_argument("--size", type=int, default=32, help="images a batch")
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--peer", type=int, default=2, help="number of the largest radii that Auto-PGD runs too")
    parser.add_argument("--measures", nargs="+", default=["geodesic-inv", "geodesic-mix", "adaptive"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--name", default="tolerance")
    options = parser.parse_args()
    jobs = [(options, c, m) for c in range(len(CHECKPOINTS)) for m in options.measures]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for done in pool.map(case, *zip(*jobs, strict=True)):
            rows += done
            print(f"{len(rows)} cases", flush=True)
    table = [summary(rows, tol, steps) for steps in (10, 20, 50) for tol in (1e-2, 3e-3, 1e-3, 3e-4, 0.0)]
    for row in rows:
        row["history"] = [round(v, 6) for v in row["history"][:51]]
        row["gaps"] = [float(f"{g:.3g}") for g in row["gaps"][:51]]
    write(options.name, table, cases=rows)


def summary(rows: list[dict[str, Any]], tol: float, steps: int) -> dict[str, Any]:
    """Share of cases within half a percent of their reference, and passes: over all, and radius by radius."""

    def over(some: list[dict[str, Any]]) -> dict[str, Any]:
        found = [stopped(r, tol, steps) for r in some]
        shares = [value / r["reference"] for (value, _), r in zip(found, some, strict=True)]
        return {
            "within_half_percent": f"{sum(s >= 0.995 for s in shares)}/{len(shares)}",
            "lowest": round(min(shares), 4),
            "passes": round(sum(p for _, p in found) / len(found), 2),
        }

    by_radius = [over([r for r in rows if RADII[r["measure"]].index(r["rho"]) == i]) for i in range(5)]
    return {"steps": steps, "relative_tol": tol, **over(rows), "by_radius": by_radius}


if __name__ == "__main__":
    main()
