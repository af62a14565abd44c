"""Cost of a step of GeodesicSAM against a plain step of its base optimiser (ViT-B/32, random weights).

Steps alternate in one process; ratios are of medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from sharpness import GeodesicSAM

from ._common import write


def main() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    net = ViTForImageClassification(ViTConfig(patch_size=32, num_labels=10)).to(options.device)
    x = torch.randn(options.batch, 3, 224, 224, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    steps: dict[str, Callable[[], object]] = {}

    def add(name: str, measure: str | None, refresh: int = 20) -> None:
        model = copy.deepcopy(net)
        base = torch.optim.AdamW(model.parameters(), 1e-5)
        used = base if measure is None else GeodesicSAM(model, base, rho=0.05, measure=measure, refresh=refresh)

        def closure() -> torch.Tensor:
            used.zero_grad()
            loss = F.cross_entropy(model(x).logits, y)
            loss.backward()
            return loss.detach()

        steps[name] = lambda: used.step(closure)

    add("AdamW", None)
    add("euclidean", "euclidean")
    add("adaptive", "adaptive")
    add("geodesic-inv", "geodesic-inv")
    add("geodesic-mix", "geodesic-mix")
    add("geodesic-inv, refresh=1", "geodesic-inv", 1)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if options.device != "cpu":
                torch.cuda.synchronize()
            if repeat:  # the first one makes room and factorises
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times["AdamW"])
    rows = [
        {"step": name, "seconds": round(statistics.median(t), 3), "over_plain": round(statistics.median(t) / base, 2)}
        for name, t in times.items()
    ]
    write("sam_cost" if options.device == "cpu" else f"sam_cost_{options.device}", rows, batch=options.batch)


if __name__ == "__main__":
    main()
