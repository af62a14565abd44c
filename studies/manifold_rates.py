"""Which metric, which of geoopt's optimisers, which rate: a 100 × 80 matrix of rank 5 is factorised.

``python -m studies.manifold_rates``: the loss is ½‖GHᵀ − M‖² in float64, from the random start of README's
example. M has singular values from 1 to 1/κ in a geometric row, κ = 1 and κ = 100, and the Frobenius norm of a
product of standard normal factors over √5. Relative error ‖GHᵀ − M‖/‖M‖ after 100 steps, the median of three
seeds; ``null`` where a run left the floating-point numbers.
"""

from __future__ import annotations

import math
from itertools import product
from statistics import median
from typing import Any

import geoopt
import torch

from benchmarks._common import write
from quotient_manifolds import GLQuotientInv, GLQuotientMix

N, M, H = 100, 80, 5
MANIFOLDS: dict[str, Any] = {
    "GLQuotientMix": lambda: GLQuotientMix(N, M), "GLQuotientInv": lambda: GLQuotientInv(N, M),
    "factors": lambda: geoopt.Euclidean(ndim=2),
}  # fmt: skip
OPTIMISERS = {"RiemannianSGD": geoopt.optim.RiemannianSGD, "RiemannianAdam": geoopt.optim.RiemannianAdam}
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3)
CONDITIONS = (1, 100)
STEPS, SEEDS = 100, range(3)


def error(name: str, optimiser: str, lr: float, seed: int, condition: float) -> float:
    """Relative error at the end, infinite where the steps left the floating-point numbers."""
    torch.manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(k, H, dtype=torch.float64)).Q for k in (N, M))
    target = (U * condition ** -torch.linspace(0, 1, H, dtype=torch.float64)) @ V.mT
    target *= (N * M) ** 0.5 / target.norm()
    start = GLQuotientMix(N, M).random(N + M, H, dtype=torch.float64)
    x = geoopt.ManifoldParameter(start.data, manifold=MANIFOLDS[name]())
    made = OPTIMISERS[optimiser]([x], lr=lr)
    for _ in range(STEPS):
        made.zero_grad()
        loss = (x[:N] @ x[N:].mT - target).square().sum() / 2
        if not loss < 1e30:
            return math.inf
        loss.backward()
        try:
            made.step()
        except (ValueError, RuntimeError):
            return math.inf
    found = float((x[:N] @ x[N:].mT - target).detach().norm() / target.norm())
    return found if math.isfinite(found) else math.inf


def main() -> None:
    rows = []
    for condition, name, optimiser, lr in product(CONDITIONS, MANIFOLDS, OPTIMISERS, RATES):
        found = median(error(name, optimiser, lr, seed, condition) for seed in SEEDS)
        kind = {"condition": condition, "manifold": name, "optimiser": optimiser, "lr": lr}
        rows.append({**kind, "relative_error": found if math.isfinite(found) else None})
    write("manifold_rates", rows)


if __name__ == "__main__":
    main()
