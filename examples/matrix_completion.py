"""Matrix completion with geoopt's own optimisers: on the quotient, the balance of the factors makes no difference.

A 500 × 400 matrix of rank 5 is known in 15 % of its entries. The descent starts from random factors (cG, H/c): the
product is the same for every c, the imbalance. Each optimiser is shown at its best learning rate, by the error on the
unknown entries. Rates begin a factor 4 apart; the grid grows until half and twice the best rate are in it, and worse.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import geoopt

from quotient_manifolds import GLQuotientMix

N, M, RANK, KNOWN = 500, 400, 5, 0.15
LARGEST = 40  # The grid of rates stops growing here.

# The optimiser, whether on the quotient, its settings, and the exponents of 2 of the first learning rates.
RUNS = {
    "RiemannianSGD, GLQuotientMix": (geoopt.optim.RiemannianSGD, True, {}, range(-6, 3, 2)),
    "RiemannianAdam, GLQuotientMix": (geoopt.optim.RiemannianAdam, True, {}, range(2, 13, 2)),
    "SGD, factors": (torch.optim.SGD, False, {}, range(-16, -5, 2)),
    "SGD with momentum, factors": (torch.optim.SGD, False, {"momentum": 0.9}, range(-18, -5, 2)),
    "Adam, factors": (torch.optim.Adam, False, {}, range(-8, 5, 2)),
}


def complete(run: str, imbalance: float, lr: float, steps: list[int], seed: int) -> list[float]:
    """Complete a matrix; give the relative error on the unknown entries after so many steps, infinite if diverged."""
    generator = torch.Generator().manual_seed(seed)
    manifold = GLQuotientMix(N, M)
    truth = manifold.to_matrix(torch.randn(N + M, RANK, generator=generator, dtype=torch.float64))
    known = torch.rand(N, M, generator=generator) < KNOWN
    start = torch.randn(N + M, RANK, generator=generator, dtype=torch.float64) / 2
    start[:N] *= imbalance
    start[N:] /= imbalance

    optimizer_class, quotient, settings, _ = RUNS[run]
    x = geoopt.ManifoldParameter(start, manifold=manifold) if quotient else torch.nn.Parameter(start)
    optimizer = optimizer_class([x], lr=lr, **settings)
    errors = []
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        try:
            loss = (((manifold.to_matrix(x) - truth) * known) ** 2).sum() * (0.5 / KNOWN)
            if not loss.isfinite():
                break
            loss.backward()
            optimizer.step()
            product = manifold.to_matrix(x).detach()
        except ValueError:  # The manifold refuses factors that have lost their rank, and products beyond its numbers.
            break
        if step in steps:
            errors.append(float(((product - truth) * ~known).norm() / (truth * ~known).norm()))
    return [e if math.isfinite(e) else math.inf for e in errors] + [math.inf] * (len(steps) - len(errors))


def search(run: str, imbalance: float, steps: list[int], seeds: int) -> list[tuple[float, list[float], str]]:
    """Give, for each number of steps: the rate of least median error, the error of each seed at it, and a remark."""
    tried: dict[int, list[tuple[float, ...]]] = {}  # exponent of the rate → number of steps → seed
    ahead = set(RUNS[run][-1])
    while ahead and len(tried) < LARGEST:
        for k in ahead:
            tried[k] = list(zip(*(complete(run, imbalance, 2.0**k, steps, s) for s in range(seeds)), strict=True))
        best = [min(sorted(tried), key=lambda k, i=i: statistics.median(tried[k][i])) for i in range(len(steps))]
        ahead = {k + side for k in best for side in (-1, 1)} - set(tried)
    ends = min(tried), max(tried)
    return [(2.0**k, list(tried[k][i]), "at the end of its grid" * (k in ends)) for i, k in enumerate(best)]


def main(arguments: list[str] | None = None) -> dict[tuple[str, int, int], float]:
    """Run the example; give the error by optimiser, imbalance and number of steps, each at its best learning rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the table of the documentation: ten minutes")
    full = parser.parse_args(arguments).full
    checkpoints, imbalances, seeds = ([100, 300], (1, 10, 1000), 5) if full else ([30], (1, 1000), 1)
    table = {}
    print(f"{'optimiser':<30}{'imbalance':>10}{'steps':>6}{'error':>9}{'least':>9}{'largest':>9}{'rate':>9}")
    for run in RUNS:
        for imbalance in imbalances:
            results = search(run, imbalance, checkpoints, seeds)
            for steps, (rate, errors, remark) in zip(checkpoints, results, strict=True):
                table[run, imbalance, steps] = error = statistics.median(errors)
                figures = "".join(f"{figure:>9.1e}" for figure in (error, min(errors), max(errors), rate))
                print(f"{run:<30}{imbalance:>10g}{steps:>6}{figures} {remark}".rstrip(), flush=True)
    return table


if __name__ == "__main__":
    main()
