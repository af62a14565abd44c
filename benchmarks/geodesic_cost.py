"""Cost of the exact exponential of 144 heads (769 × 64) against the second-order retraction, and its accuracy."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix
from reproduction.rk4 import rk4

from ._common import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=144)
    parser.add_argument("--rows", type=int, default=769)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    # The lengths are those of one pair; for mix in units of its smallest singular value σ_h.
    for cls, lengths in ((GLQuotientInv, (0.1, 1.0)), (GLQuotientMix, (0.1, 0.7))):
        for length in lengths:
            torch.manual_seed(0)
            manifold = cls(options.rows, options.rows)
            x = 0.05 * torch.randn(options.heads, 2 * options.rows, options.width)
            space = manifold.tangent_space_at(x)
            u = space.proju(torch.randn_like(x))
            scale = length if cls is GLQuotientInv else length * space.gauge.sigma[:, -1]
            u = u * (scale / space.norm(u))[:, None, None]
            times: dict[str, list[float]] = {"retr": [], "rk4": [], "expmap": []}
            for _ in range(options.repeats if cls is GLQuotientInv else 1):
                for name, f in (
                    ("retr", lambda space=space, u=u: space.retr(u)),
                    ("rk4", lambda space=space, u=u: rk4(space, u, 4)),
                    ("expmap", lambda space=space, u=u: space.geodesic(u)[0]),
                ):
                    start = time.perf_counter()
                    found = f()
                    times[name].append(time.perf_counter() - start)
            few = slice(0, 4)
            exact = manifold.expmap(x[few].double(), manifold.proju(x[few].double(), u[few].double()))
            error = float((found[few].double() - exact).norm() / exact.norm())
            median = {k: statistics.median(v) for k, v in times.items()}
            rows.append(
                {
                    "metric": cls.__name__, "heads": options.heads, "shape": f"{options.rows} x {options.width}",
                    "length": length, **{f"{k}_seconds": round(v, 3) for k, v in median.items()},
                    "expmap_over_retr": round(median["expmap"] / median["retr"], 1),
                    "rk4_over_retr": round(median["rk4"] / median["retr"], 1),
                    "float32_error": float(f"{error:.1e}"),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    write("geodesic_cost", rows)


if __name__ == "__main__":
    main()
