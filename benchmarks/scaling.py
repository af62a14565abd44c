"""Wall time of one measurement spread over processes, and of a list of radii against separate calls."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from _common import write

import sharpness


def model() -> torch.nn.Module:
    """A small vision transformer."""
    import timm

    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10).eval()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eight batches of noise."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 3, 224, 224, generator=generator), torch.randint(10, (16,), generator=generator))
        for _ in range(8)
    ]


def spread(world: int, steps: int) -> tuple[float, list[float]]:
    """Seconds of the search itself, and values, of a run with so many processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(world), "-m", "sharpness", "run", "scaling:model", "scaling:batches"]
        command += ["--rho", "0.1", "--steps", str(steps), "--relative-tol", "0", "--quiet", "--out", str(out)]
        settings = {**os.environ, "OMP_NUM_THREADS": "1"}
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parent, env=settings)
        seconds = time.perf_counter() - start
        rows = json.loads(out.read_text())[0]["batches"]
    return seconds, [row["value"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    times: dict[int, list[float]] = {w: [] for w in options.worlds}
    values = {}
    for _ in range(options.repeats):
        for world in options.worlds:
            seconds, found = spread(world, options.steps)
            times[world].append(seconds)
            assert values.setdefault("first", found) == found, "the values depend on the number of processes"
    rows = [
        {
            "what": "processes", "world": world, "seconds": round(statistics.median(times[world]), 1),
            "speed_up": round(statistics.median(times[options.worlds[0]]) / statistics.median(times[world]), 2),
        }
        for world in options.worlds
    ]  # fmt: skip
    torch.set_num_threads(1)
    net, data, rhos = model(), batches()[:2], [0.02, 0.05, 0.1]
    together, apart = [], []
    for _ in range(options.repeats):
        start = time.perf_counter()
        sharpness.evaluate(net, data, rho=rhos, progress=False)
        together.append(time.perf_counter() - start)
        start = time.perf_counter()
        for rho in rhos:
            sharpness.evaluate(net, data, rho=rho, progress=False)
        apart.append(time.perf_counter() - start)
    ratio = statistics.median(apart) / statistics.median(together)
    rows.append({"what": "3 radii in one call against 3 calls", "ratio": round(ratio, 2)})
    write("scaling", rows)


if __name__ == "__main__":
    main()
