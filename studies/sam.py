"""Fine-tuning with sharpness-aware minimisation: AdamW, SAM, ASAM and GeodesicSAM, with and without label noise.

The given vision transformer is fine-tuned on 2,500 CIFAR-10 images with AdamW as (base) optimiser, without dropout. One
grid of radii for all, one seed; then five fresh seeds at each method's best radius (least test error), whose networks
are measured. Finished runs are kept in a JSON-lines file; several processes may share it (``--shard i/n``).
``--report`` prints the tables and draws the figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import sharpness
from benchmarks._common import RESULTS, interval
from reproduction.finetune import set_dropout_
from sharpness import GeodesicSAM
from sharpness.plots import figure

from . import _vit_cifar10

METHODS = {"AdamW": None, "SAM": "euclidean", "ASAM": "adaptive", "GeodesicSAM": "geodesic-inv"}
RADII = (0.05, 0.15, 0.5)
NOISES = (0.0, 0.2)
BATCH = 64
#: Radii at which the final weights are measured.
FINAL = {"geodesic-inv": 0.05, "geodesic-mix": 0.05, "adaptive": 0.25, "euclidean": 0.1}


def run(method: str, rho: float, noise: float, seed: int, options: Any) -> dict[str, Any]:
    """Fine-tune once, and measure the result."""
    torch.manual_seed(seed)
    net = _vit_cifar10.model(options.weights)
    set_dropout_(net, 0.0)  # it costs as much as the rest of a step on a CPU
    x, y = _vit_cifar10.images(options.images, "train", 2500, seed=7)
    clean = y.clone()
    wrong = torch.rand(len(y), generator=torch.Generator().manual_seed(9)) < noise
    y[wrong] = torch.randint(10, (int(wrong.sum()),), generator=torch.Generator().manual_seed(8))
    x_test, y_test = _vit_cifar10.images(options.images, "test", 2000, seed=0)
    base = torch.optim.AdamW(net.parameters(), options.lr, weight_decay=0.01)
    measure = METHODS[method]
    optimizer = base if measure is None else GeodesicSAM(net, base, rho=rho, measure=measure)
    total = options.epochs * -(-len(y) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=total)
    losses, errors = [], []
    spent = 0.0
    for _ in range(options.epochs):
        net.train()
        for part in torch.randperm(len(y)).split(BATCH):

            def closure(part: Tensor = part) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x[part]), y[part])
                loss.backward()
                return loss.detach()

            start = time.perf_counter()
            losses.append(float(optimizer.step(closure)))
            spent += time.perf_counter() - start
            schedule.step()
        net.eval()
        with torch.no_grad():
            scores = torch.cat([net(part) for part in x_test.split(500)])
        errors.append(float((scores.argmax(1) != y_test).double().mean()))
    torch.backends.mha.set_fastpath_enabled(False)
    batch = (x[:64], clean[:64])
    final = {
        name: float(
            sharpness.evaluate(net, [batch], measure=name, rho=rho, steps=10, relative_tol=1e-3, progress=False)
        )
        for name, rho in FINAL.items()
        if seed > 0
    }
    return {
        "method": method, "rho": rho, "noise": noise, "seed": seed, "epochs": options.epochs, "lr": options.lr,
        "test_error": errors[-1], "test_loss": float(F.cross_entropy(scores, y_test)), "errors": errors,
        "train_loss": statistics.fmean(losses[-10:]), "sharpness": final, "seconds": round(spent, 1),
        "losses": [round(v, 4) for v in losses],
    }  # fmt: skip


def best(rows: list[dict[str, Any]], method: str, noise: float) -> float:
    """The radius of least test error on the grid's seed."""
    found = [r for r in rows if (r["method"], r["noise"], r["seed"]) == (method, noise, 0)]
    return float(min(found, key=lambda r: r["test_error"])["rho"])


def report(rows: list[dict[str, Any]], path: Path) -> None:
    """Tables in Markdown, and error curves."""
    with figure(path, (5.6 * len(NOISES), 8), 2, len(NOISES)) as (_, grid):
        _report(rows, grid)


def _report(rows: list[dict[str, Any]], grid: Any) -> None:
    import numpy as np

    head = ["method", "ρ", "test error", "paired with AdamW", "test loss", *FINAL, "cost"]
    for (above, below), noise in zip(grid.T, NOISES, strict=True):
        print(f"\n**{noise:.0%} of the labels wrong**\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        reference: dict[int, float] = {}
        base = [r["seconds"] for r in rows if (r["method"], r["noise"]) == ("AdamW", noise) and r["seed"] > 0]
        plain = statistics.median(base)
        for i, method in enumerate(METHODS):
            rho = best(rows, method, noise)
            found = [r for r in rows if (r["method"], r["noise"], r["rho"]) == (method, noise, rho) and r["seed"] > 0]
            errors = {r["seed"]: 100 * r["test_error"] for r in found}
            reference = reference or errors
            apart = interval([errors[s] - reference[s] for s in errors])
            (error, e), (loss, s) = interval(list(errors.values())), interval([r["test_loss"] for r in found])
            ends = [f"{statistics.fmean(r['sharpness'][k] for r in found):.3f}" for k in FINAL]
            cost = statistics.median(r["seconds"] for r in found) / plain
            cells = [method, f"{rho:g}" if METHODS[method] else "", f"{error:.1f} ± {e:.1f} %",
                     f"{apart[0]:+.1f} ± {apart[1]:.1f}" if METHODS[method] else "", f"{loss:.3f} ± {s:.3f}", *ends,
                     f"{cost:.2f}"]  # fmt: skip
            print("| " + " | ".join(cells) + " |")
            losses = np.mean([r["losses"] for r in found], axis=0)
            smooth = np.convolve(losses, np.ones(8) / 8, "valid")
            above.plot(np.arange(8, len(losses) + 1), smooth, f"C{i}", label=method)
            flat = [r["sharpness"]["geodesic-inv"] for r in found]
            below.plot(flat, list(errors.values()), "osD^"[i], color=f"C{i}", label=method)
        above.set(xlabel="step", ylabel="training loss, mean of 8 steps", title=f"{noise:.0%} of the labels wrong")
        below.set(xlabel="geodesic-inv sharpness at the end, ρ = 0.05", ylabel="test error in %")
    grid[0, 0].legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _vit_cifar10.arguments(parser)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=RESULTS / "sam.jsonl")
    parser.add_argument("--figure", type=Path, default=RESULTS.parent / "docs" / "images" / "sam.png")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shard, shards = map(int, options.shard.split("/"))

    def finished() -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in options.runs.read_text(encoding="utf-8").splitlines()]
            if options.runs.exists()
            else []
        )

    def work(units: list[tuple[str, float, float, int]]) -> None:
        done = {(r["method"], r["rho"], r["noise"], r["seed"]) for r in finished()}
        for unit in [u for i, u in enumerate(units) if i % shards == shard - 1 and u not in done]:
            row = run(*unit, options)
            with options.runs.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print({k: v for k, v in row.items() if k != "losses"}, flush=True)

    if options.report:
        report(finished(), options.figure)
        return
    grid = [(m, r, n, 0) for n in NOISES for m in METHODS for r in (RADII if METHODS[m] else (0.0,))]
    work(grid)
    while len({(r["method"], r["rho"], r["noise"]) for r in finished() if r["seed"] == 0}) < len(grid):
        time.sleep(5)  # other shards still work on the grid
    rows = finished()
    work([(m, best(rows, m, n), n, s) for s in range(1, 1 + options.seeds) for n in NOISES for m in METHODS])


if __name__ == "__main__":
    main()
