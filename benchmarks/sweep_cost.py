"""What measuring a checkpoint costs beyond its forward and backward passes (small vision transformer, batches of 256).

For every batch and measure, ``evaluate`` with 20 steps and as many bare passes (loss, gradient of all parameters) on
the same batch take turns; the ratio of the sums is what counts. Loading the checkpoint and reading the images are timed
too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from sharpness import evaluate
from sharpness.data import DataChoice
from sharpness.models import load

from ._common import write

MEASURES = {"geodesic-inv": 0.1, "geodesic-mix": 0.05, "adaptive": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="state dict of the vision transformer")
    parser.add_argument("--images", type=Path, required=True, help="folder with {train,test}/CLASS/NAME.jpg")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--ascent", default="apgd")
    options = parser.parse_args()
    torch.backends.mha.set_fastpath_enabled(False)
    start = time.perf_counter()
    found = load("reproduction.vision:vit_cifar10", str(options.weights))
    data = DataChoice(str(options.images / "train"), num_examples=256 * options.batches, subset_seed=0)
    batches = data.load(found)
    reading = time.perf_counter() - start
    net = found.model
    rows = []
    for x, y in batches[:1]:  # warm up
        F.cross_entropy(net(x), y).backward()
    for name, rho in MEASURES.items():
        measured, bare, passes = 0.0, 0.0, 0
        for x, y in batches:
            start = time.perf_counter()
            result = evaluate(
                net, [(x, y)], measure=name, rho=rho, steps=20, relative_tol=0, ascent=options.ascent, progress=False,
                keep_directions=False,
            )  # fmt: skip
            measured += time.perf_counter() - start
            count = result.batches[0].passes
            start = time.perf_counter()
            for _ in range(count):
                net.zero_grad()
                F.cross_entropy(net(x), y).backward()
            bare += time.perf_counter() - start
            passes += count
        rows.append({"measure": name, "passes": passes, "seconds": round(measured, 2), "bare": round(bare, 2),
                     "ratio": round(measured / bare, 3)})  # fmt: skip
        print(rows[-1], flush=True)
    seconds, bare = sum(r["seconds"] for r in rows), sum(r["bare"] for r in rows)
    total = {"images": 256 * options.batches, "reading": round(reading, 2), "ratio": round(seconds / bare, 3),
             "ratio_with_reading": round((seconds + reading) / bare, 3)}  # fmt: skip
    write("sweep_cost", rows, total=total)
    print(total)


if __name__ == "__main__":
    main()
