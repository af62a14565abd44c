"""The horizontal projection of the inv metric, batched, against a loop of ``scipy.linalg.solve_sylvester``.

144 heads of 769 × 64 (ViT-B), at one point: the factorisation is paid for once, then many vectors are projected, as in
an ascent of 20 steps. Scipy's loop forms its Gram matrices and right-hand side head by head, and has no set-up to share
(its Schur decompositions are inside ``solve_sylvester``).
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import scipy.linalg
import torch

from quotient_manifolds import GLQuotientInv, GLTangentSpace, canonical_gauge

from ._common import write


def loop(G: np.ndarray, H: np.ndarray, xi: np.ndarray, eta: np.ndarray) -> list[np.ndarray]:
    """Head by head: A X + X A = B with A = MN, B = M Hᵀη − ξᵀG N, then (ξ + G Xᵀ, η − H X)."""
    result = []
    for g, h, u, v in zip(G, H, xi, eta, strict=True):
        M, N = g.T @ g, h.T @ h
        A = M @ N
        X = scipy.linalg.solve_sylvester(A, A, M @ (h.T @ v) - (u.T @ g) @ N)
        result.append(np.concatenate([u + g @ X.T, v - h @ X]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=144)
    parser.add_argument("--rows", type=int, default=769)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="projections that share a set-up")
    options = parser.parse_args()
    rows = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        manifold = GLQuotientInv(options.rows, options.rows)
        x = 0.05 * torch.randn(options.heads, 2 * options.rows, options.width, dtype=dtype)
        u, w = torch.randn_like(x), torch.randn_like(x)
        (G, H), (xi, eta) = (tuple(p.numpy() for p in manifold.unpack_tensor(t)) for t in (x, u))
        times: dict[str, list[float]] = {"scipy": [], "set-up": [], "projection": [], "coordinates": [], "products": []}
        for _ in range(options.repeats):
            start = time.perf_counter()
            slow = loop(G, H, xi, eta)
            times["scipy"].append(time.perf_counter() - start)
            # As the ascent does it: in pieces that fit a cache, in the coordinates of the canonical gauge, into memory
            # that is kept.
            start = time.perf_counter()
            gauges = (canonical_gauge(*manifold.unpack_tensor(part)).to(dtype) for part in x.split(10))
            flat = [GLTangentSpace(manifold.metric, gauge) for gauge in gauges]
            times["set-up"].append(time.perf_counter() - start)
            out = torch.zeros_like(w)
            start = time.perf_counter()
            for there, v, o in zip(flat, w.split(10), out.split(10), strict=True):
                o.copy_(there.project_coordinates(v))
            times["coordinates"].append(time.perf_counter() - start)
            space = manifold.tangent_space_at(x)
            start = time.perf_counter()
            fast = space.proju(u)
            times["projection"].append(time.perf_counter() - start)
            # The least that any projection needs: Gᵀξ and Hᵀη, then GΛ and HΛᵀ.
            first, second = manifold.unpack_tensor(x)
            a, b = manifold.unpack_tensor(w)
            start = time.perf_counter()
            K, L = first.mT @ a, second.mT @ b
            a + first @ K, b - second @ L
            times["products"].append(time.perf_counter() - start)
        difference = float((fast - torch.tensor(np.stack(slow))).abs().max() / fast.abs().max())
        median = {k: statistics.median(v) for k, v in times.items()}
        ascent = median["set-up"] + options.steps * median["coordinates"]
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."), "heads": options.heads,
                "shape": f"{options.rows} x {options.width}",
                **{f"{k.replace('-', '')}_seconds": round(v, 4) for k, v in median.items()},
                "projection_faster": round(median["scipy"] / median["projection"], 1),
                "coordinates_faster": round(median["scipy"] / median["coordinates"], 1),
                f"{options.steps}_with_setup_faster": round(options.steps * median["scipy"] / ascent, 1),
                "largest_difference": difference,
            }
        )  # fmt: skip
    write("projection", rows)


if __name__ == "__main__":
    main()
