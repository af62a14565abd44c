"""Peak memory of a measurement above that of a bare forward and backward pass, in units of the parameters' bytes.

Each number comes from a process of its own: the largest resident set on a CPU, the largest allocation on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys

import torch
from torch.nn import functional as F

import sharpness

from ._common import write
from .iteration_cost import RADII, Classifier


def one(options: argparse.Namespace) -> None:
    """Run in a process of its own: print the peak in bytes."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = Classifier(options.model).to(device).eval()
    x = torch.randn(options.batch, 3, 224, 224, device=device)
    y = torch.randint(1000, (options.batch,), device=device)
    if options.one == "bare":
        for _ in range(2):
            torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    else:
        measure, ascent = options.one.split(":")
        sharpness.evaluate(
            model, [(x, y)], measure=measure, rho=RADII[measure], steps=6, relative_tol=0, ascent=ascent,
            progress=False, keep_directions=options.keep,
        )  # fmt: skip
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(json.dumps({"peak": peak, "parameters": size}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measures", nargs="+", default=list(RADII))
    parser.add_argument("--ascents", nargs="+", default=["power", "apgd"])
    parser.add_argument("--keep", action="store_true", help="keep the worst direction too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options)
        return
    # Large blocks go back to the system at once, so that the resident set is what is in use.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}

    def run(which: str) -> dict[str, int]:
        command = [sys.executable, "-W", "ignore", "-m", str(__spec__.name), "--one", which, "--model", options.model]
        command += ["--batch", str(options.batch), "--device", options.device, *["--keep"] * options.keep]
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, env=settings, encoding="utf-8"
        ).stdout
        return json.loads(output.splitlines()[-1])

    bare = run("bare")
    rows = []
    for ascent in options.ascents:
        for measure in options.measures:
            found = run(f"{measure}:{ascent}")
            rows.append(
                {
                    "model": options.model, "batch": options.batch, "device": options.device, "measure": measure,
                    "ascent": ascent, "directions": options.keep,
                    "parameters_MiB": round(bare["parameters"] / 2**20), "bare_peak_MiB": round(bare["peak"] / 2**20),
                    "peak_MiB": round(found["peak"] / 2**20),
                    "ratio": round((found["peak"] - bare["peak"]) / bare["parameters"], 2),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    write("memory", rows)


if __name__ == "__main__":
    main()
