"""A single low-rank problem, to high accuracy: solvers of first and second order, on the quotients and beside them.

``python -m benchmarks.second_order``: two functions F(GHᵀ) in float64, five seeds each.

- completion: ½ Σ (GHᵀ − M)² over 40 % of the entries of M, 150 × 100, of rank 4, with singular values from 100 to 3.3
  in a geometric row. It starts at the best approximation of rank 4 to M with zeros for what is unknown, divided by
  0.4. ``error`` is ‖GHᵀ − M‖/‖M‖.
- regression: the mean loss of a multinomial regression with 25 features (standard deviations from 1 to 0.1), 600
  examples and 12 classes, whose weights W = GHᵀ have rank 3, and 0.0005 ‖W‖². It starts at the best approximation of
  rank 3 to the least squares solution. ``error`` is ‖W − W*‖/‖W*‖, W* the solution of smallest gradient.

All solvers get the same functions of NumPy, with gradient and Hessian in closed form. A run ends where √(‖∇F V‖² +
‖Uᵀ∇F‖²), with U and V the singular vectors of GHᵀ, has fallen to 1e-10 of that at the start, after 2 seconds of the
processor, or where the solver gives up; watching it costs no time. One thread. The start has balanced factors, and for
"unbalanced" (30 G, H/30). The learning rates of geoopt's optimisers are those of five with the smallest gradient after
100 steps on a sixth seed.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import geoopt
import numpy as np
import pymanopt
import scipy.optimize
import torch
from pymanopt.manifolds import FixedRankEmbedded
from pymanopt.optimizers import ConjugateGradient, TrustRegions
from scipy.special import logsumexp, softmax

from quotient_manifolds import GLQuotientInv, GLQuotientMix
from quotient_manifolds.pymanopt import as_pymanopt

from ._common import write

SEEDS, TUNING = range(5), 5
GOAL, SECONDS, TUNING_STEPS = 1e-10, 2.0, 100
RATES = {"RiemannianSGD": [0.1, 0.3, 0.6, 1.0, 1.5], "RiemannianAdam": [0.01, 0.1, 1.0, 10.0, 100.0]}


class Completion:
    """Half a sum of squares over known entries."""

    n, m, h, known, unit = 150, 100, 4, 0.4, 2.5

    def __init__(self, rng: np.random.Generator) -> None:
        U, V = (np.linalg.qr(rng.standard_normal((k, self.h))).Q for k in (self.n, self.m))
        self.target = (U * 100 * np.geomspace(1, 1 / 30, self.h)) @ V.T
        self.mask = (rng.random((self.n, self.m)) < self.known).astype(float)

    def loss(self, X: Any) -> float:
        return float((self.mask * (X - self.target) ** 2).sum() / 2)

    def gradient(self, X: Any) -> Any:
        return self.mask * (X - self.target)

    def hessian(self, X: Any, Z: Any) -> Any:
        return self.mask * Z

    def guess(self) -> Any:
        return self.mask * self.target / self.known


class Regression:
    """The mean loss of a multinomial regression, with a penalty."""

    n, m, h, examples, penalty, unit = 25, 12, 3, 600, 1e-3, 30.0

    def __init__(self, rng: np.random.Generator) -> None:
        self.x = rng.standard_normal((self.examples, self.n)) * np.geomspace(1, 0.1, self.n)
        weights = rng.standard_normal((self.n, self.h)) @ rng.standard_normal((self.h, self.m))
        chances = softmax(self.x @ weights, axis=1)
        labels = [rng.choice(self.m, p=p) for p in chances]
        self.y, self.target = np.eye(self.m)[labels], None

    def loss(self, W: Any) -> float:
        scores = self.x @ W
        likely = logsumexp(scores, axis=1) - (self.y * scores).sum(1)
        return float(likely.mean() + self.penalty / 2 * (W**2).sum())

    def gradient(self, W: Any) -> Any:
        return self.x.T @ (softmax(self.x @ W, axis=1) - self.y) / self.examples + self.penalty * W

    def hessian(self, W: Any, Z: Any) -> Any:
        p = softmax(self.x @ W, axis=1)
        moved = p * (self.x @ Z)
        return self.x.T @ (moved - p * moved.sum(1, keepdims=True)) / self.examples + self.penalty * Z

    def guess(self) -> Any:
        return np.linalg.lstsq(self.x, self.y - self.y.mean(0), rcond=None)[0]


class EndError(Exception):
    """The goal is reached, or the time is over."""


class Run:
    """The functions of both factors, counted and watched."""

    def __init__(self, problem: Any, seconds: float = SECONDS) -> None:
        self.problem, self.seconds, self.n = problem, seconds, problem.n
        self.losses = self.gradients = self.hessians = self.steps = 0
        self.paused, self.first, self.last = 0.0, 0.0, np.inf
        self.product: Any = None
        self.at: tuple[Any, Any] | None = None
        U, s, Vt = np.linalg.svd(problem.guess())
        root = np.sqrt(s[: problem.h])
        self.start = np.vstack([U[:, : problem.h] * root, Vt[: problem.h].T * root])
        self.begun = time.process_time()

    def seconds_so_far(self) -> float:
        return time.process_time() - self.begun - self.paused

    def factors(self, x: Any) -> tuple[Any, Any]:
        return x[: self.n], x[self.n :]

    def loss(self, x: Any) -> float:
        G, H = self.factors(x)
        return self.loss_of_product(G @ H.T)

    def loss_of_product(self, X: Any) -> float:
        self.losses += 1
        if self.seconds_so_far() > self.seconds:
            raise EndError
        return self.problem.loss(X)

    def of_product(self, X: Any) -> Any:
        """The gradient at a product, computed once for all Hessians there."""
        if self.at is None or not np.array_equal(X, self.at[0]):
            self.gradients += 1
            self.at = X, self.problem.gradient(X)
            self.watch(*self.at)
        return self.at[1]

    def watch(self, X: Any, E: Any) -> None:
        began = time.process_time()
        U, _, Vt = np.linalg.svd(X, full_matrices=False)
        h = self.problem.h
        self.last, self.product = float(np.hypot(np.linalg.norm(E @ Vt[:h].T), np.linalg.norm(U[:, :h].T @ E))), X
        self.first = self.first or self.last
        self.paused += time.process_time() - began
        if not self.last > GOAL * self.first or self.seconds_so_far() > self.seconds:
            raise EndError

    def gradient(self, x: Any) -> Any:
        G, H = self.factors(x)
        E = self.of_product(G @ H.T)
        return np.vstack([E @ H, E.T @ G])

    def hessian(self, x: Any, u: Any) -> Any:
        (G, H), (dG, dH) = self.factors(x), self.factors(u)
        E = self.of_product(G @ H.T)
        self.hessians += 1
        if self.seconds_so_far() > self.seconds:
            raise EndError
        dE = self.problem.hessian(G @ H.T, dG @ H.T + G @ dH.T)
        return np.vstack([dE @ H + E @ dH, dE.T @ G + E.T @ dG])


ENDLESS = {"max_iterations": 10**9, "max_time": 1e9, "max_cost_evaluations": 10**9, "min_gradient_norm": 0}
ENDLESS |= {"min_step_size": 0, "verbosity": 0}


def on_quotient(optimizer: Any, geometry: Any) -> Callable[[Run], None]:
    """Minimise by pymanopt on a quotient."""

    def solve(run: Run) -> None:
        manifold = as_pymanopt(geometry(run.n, run.problem.m), run.problem.h)
        functions = [pymanopt.function.numpy(manifold)(f) for f in (run.loss, run.gradient, run.hessian)]
        problem = pymanopt.Problem(
            manifold, functions[0], euclidean_gradient=functions[1], euclidean_hessian=functions[2]
        )
        optimizer(**ENDLESS).run(problem, initial_point=run.start)

    return solve


def embedded(run: Run) -> None:
    """Minimise by conjugate gradients on pymanopt's manifold of matrices of fixed rank."""
    manifold = FixedRankEmbedded(run.n, run.problem.m, run.problem.h)

    def loss(u: Any, s: Any, vt: Any) -> float:
        return run.loss_of_product((u * s) @ vt)

    def gradient(u: Any, s: Any, vt: Any) -> Any:
        E = run.of_product((u * s) @ vt)
        return E @ vt.T * s, np.diagonal(u.T @ E @ vt.T), s[:, None] * (u.T @ E)

    cost, slope = pymanopt.function.numpy(manifold)(loss), pymanopt.function.numpy(manifold)(gradient)
    G, H = run.factors(run.start)
    start = manifold.random_point()
    U, s, Vt = np.linalg.svd(G @ H.T, full_matrices=False)
    h = run.problem.h
    start = type(start)(U[:, :h], s[:h], Vt[:h])
    ConjugateGradient(**ENDLESS).run(pymanopt.Problem(manifold, cost, euclidean_gradient=slope), initial_point=start)


def plain(method: str, imbalance: float = 1.0) -> Callable[[Run], None]:
    """Minimise over the factors by scipy."""
    options = {
        "L-BFGS-B": {"maxcor": 20, "ftol": 0, "gtol": 0, "maxiter": 10**6, "maxfun": 10**6},
        "trust-ncg": {"gtol": 0, "maxiter": 10**6},
    }[method]

    def solve(run: Run) -> None:
        shape = run.start.shape
        G, H = run.factors(run.start)
        start = np.vstack([G * imbalance, H / imbalance])

        def step(_: Any) -> None:
            run.steps += 1

        second = {"hessp": lambda x, u: run.hessian(x.reshape(shape), u.reshape(shape)).ravel()}
        scipy.optimize.minimize(
            lambda x: run.loss(x.reshape(shape)), start.ravel(), method=method, options=options, callback=step,
            jac=lambda x: run.gradient(x.reshape(shape)).ravel(), **(second if method == "trust-ncg" else {}),
        )  # fmt: skip

    return solve


def by_geoopt(name: str, lr: float, steps: int = 10**9) -> Callable[[Run], None]:
    """Minimise by an optimiser of geoopt on GLQuotientMix."""

    def solve(run: Run) -> None:
        geometry = GLQuotientMix(run.n, run.problem.m)
        x = geoopt.ManifoldParameter(torch.from_numpy(run.start.copy()), manifold=geometry)
        optimizer = getattr(geoopt.optim, name)([x], lr=lr)
        while run.steps < steps:
            x.grad = torch.from_numpy(run.gradient(x.detach().numpy()))
            optimizer.step()
            run.steps += 1

    return solve


SOLVERS: dict[str, Callable[[Run], None]] = {
    "TrustRegions, mix": on_quotient(TrustRegions, GLQuotientMix),
    "TrustRegions, inv": on_quotient(TrustRegions, GLQuotientInv),
    "ConjugateGradient, mix": on_quotient(ConjugateGradient, GLQuotientMix),
    "ConjugateGradient, FixedRankEmbedded": embedded,
    "trust-ncg, factors": plain("trust-ncg"),
    "L-BFGS-B, factors": plain("L-BFGS-B"),
    "trust-ncg, unbalanced factors": plain("trust-ncg", 30.0),
    "L-BFGS-B, unbalanced factors": plain("L-BFGS-B", 30.0),
}


def ended(solve: Callable[[Run], None], run: Run) -> Run:
    """Run a solver to its end."""
    np.random.seed(0)
    # Reached, out of time, or off the manifold: the last gradient says which.
    with contextlib.suppress(EndError, ValueError, RuntimeError, ArithmeticError):
        solve(run)
    return run


def best_rate(make: type, name: str) -> float:
    """The rate with the smallest gradient on a seed of its own."""

    def left(lr: float) -> float:
        run = ended(by_geoopt(name, lr, TUNING_STEPS), Run(make(np.random.default_rng(TUNING))))
        return run.last if np.isfinite(run.last) else np.inf

    return min((rate * make.unit if name == "RiemannianSGD" else rate for rate in RATES[name]), key=left)  # type: ignore[attr-defined]


def row(label: str, name: str, seed: int, run: Run, seconds: float) -> dict[str, Any]:
    """What is kept of a run."""
    steps = run.steps or (run.losses if name.startswith("Trust") else run.gradients) - 1
    return {
        "problem": label, "solver": name, "seed": seed,
        "reached": bool(run.last <= GOAL * run.first), "iterations": steps,
        "functions": run.losses, "gradients": run.gradients, "hessians": run.hessians,
        "seconds": round(seconds, 3),
        "relative_gradient": run.last / run.first, "loss": run.problem.loss(run.product), "product": run.product,
    }  # fmt: skip


def with_errors(rows: list[dict[str, Any]], target: Any) -> list[dict[str, Any]]:
    """Put the error of the product in the place of the product."""
    if target is None:
        target = min(rows, key=lambda r: r["relative_gradient"])["product"]
    errors = [float(np.linalg.norm(r.pop("product") - target) / np.linalg.norm(target)) for r in rows]
    return [{**r, "error": error} for r, error in zip(rows, errors, strict=True)]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    rates: dict[str, dict[str, float]] = {}
    for label, make in (("completion", Completion), ("regression", Regression)):
        rates[label] = {name: best_rate(make, name) for name in RATES}
        solvers = SOLVERS | {name + ", mix": by_geoopt(name, lr) for name, lr in rates[label].items()}
        for seed in SEEDS:
            problem, found = make(np.random.default_rng(seed)), []
            for name, solve in solvers.items():
                run = ended(solve, Run(problem))
                found.append(row(label, name, seed, run, run.seconds_so_far()))
            rows += with_errors(found, problem.target)
            for kept in rows[-len(solvers) :]:
                print(
                    seed,
                    kept["solver"],
                    kept["reached"],
                    kept["iterations"],
                    kept["seconds"],
                    kept["error"],
                    flush=True,
                )
    write("second_order", rows, learning_rates=rates, pymanopt=pymanopt.__version__)
    for label in rates:
        for name in dict.fromkeys(r["solver"] for r in rows if r["problem"] == label):
            own = [r for r in rows if r["problem"] == label and r["solver"] == name]
            middle = {
                k: median(r[k] for r in own) for k in ("iterations", "functions", "gradients", "hessians", "seconds")
            }
            print(label, name, sum(r["reached"] for r in own), middle, median(r["error"] for r in own))


if __name__ == "__main__":
    main()
