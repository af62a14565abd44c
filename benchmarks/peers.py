"""The maximum found against a straightforward Auto-PGD, at equal steps, batch and radius: adaptive sharpness.

The peer works on the weights themselves and projects on the ellipsoid ‖δ ⊘ |w|‖ ≤ ρ (``tests/support/oracle.py``).
"""

from __future__ import annotations

import argparse
import statistics

import sharpness
from studies import _vit_cifar10
from tests.support.oracle import plain_adaptive_sharpness

from ._common import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _vit_cifar10.arguments(parser)
    parser.add_argument("--size", type=int, default=64, help="images a batch")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rho", type=float, nargs="+", default=[0.1, 0.5, 1.0])
    options = parser.parse_args()
    model = _vit_cifar10.model(options.weights)
    rows = []
    for rho in options.rho:
        for seed in range(options.seeds):
            batch = _vit_cifar10.images(options.images, "train", options.size, seed)
            peer = plain_adaptive_sharpness(model, batch, rho, options.steps)
            found = {
                ascent: float(sharpness.evaluate(
                    model, [batch], measure="adaptive", rho=rho, steps=options.steps, relative_tol=0, ascent=ascent,
                    progress=False,
                ))
                for ascent in ("power", "apgd")
            }  # fmt: skip
            rows.append({"rho": rho, "seed": seed, "peer": peer, **found})
            print(rows[-1], flush=True)
    table = []
    for rho in options.rho:
        mine = [r for r in rows if r["rho"] == rho]
        for ascent in ("power", "apgd"):
            gain = [r[ascent] / r["peer"] - 1 for r in mine]
            table.append(
                {
                    "rho": rho, "ascent": ascent, "steps": options.steps,
                    "at_least_as_high": f"{sum(g >= 0 for g in gain)}/{len(gain)}",
                    "median_gain": statistics.median(gain), "lowest_gain": min(gain),
                }
            )  # fmt: skip
    write("peers", table, cases=rows)


if __name__ == "__main__":
    main()
