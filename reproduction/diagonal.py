r"""Diagonal networks: sharpness in closed form and by true maximisation, against the test loss.

A network is a pair u, v of vectors, β = u ⊙ v, with the loss :math:`L = \|Xβ - y\|^2`. Paper, §5.1, App. E
and Figure 3.
"""

from __future__ import annotations

import csv
import io
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sharpness.ascent import auto_pgd
from sharpness.evaluation import progress_bar
from sharpness.files import check_folder, write_json, write_text

from .statistics import Correlation, kendall
from .trust_region import maximise_quadratic

__all__ = ["CLOSED_FORMS", "MAXIMISED", "Problem", "closed_forms", "maximised", "run", "train"]

_Array = npt.NDArray[np.float64]

#: Columns of the table of closed forms, as the paper uses them: XᵀX = I is assumed and β_* = X⁺y where n < d.
CLOSED_FORMS = ("adaptive", "inv", "mix")
_ORDER = "seeds with tau adaptive > inv > mix (closed forms)"
#: Columns of the table of true maximisation.
MAXIMISED = ("euclidean", "adaptive", "inv", "inv second-order", "mix")


@dataclass(frozen=True)
class Problem:
    """Data of one seed: X (n, d) with entries N(0, 1)/√n, a 90 % sparse β*, y = Xβ*."""

    X: _Array
    y: _Array
    beta: _Array

    @classmethod
    def draw(cls, n: int, d: int, seed: int) -> Problem:
        """Draw a problem."""
        rng = np.random.default_rng(seed)
        X = rng.standard_normal((n, d)) / np.sqrt(n)
        beta = np.zeros(d)
        chosen = rng.choice(d, max(1, d // 10), replace=False)
        beta[chosen] = rng.standard_normal(len(chosen))
        return cls(X, X @ beta, beta)

    def loss(self, beta: _Array) -> _Array:
        """Compute the squared error of β, (…, d) → (…)."""
        return np.square(beta @ self.X.T - self.y).sum(-1)

    def test_loss(self, beta: _Array) -> _Array:
        """Compute the expected squared error on new data, ‖β − β*‖², (…, d) → (…)."""
        return np.square(beta - self.beta).sum(-1)

    def least_norm(self) -> _Array:
        """Compute X⁺y, (d,), which the closed forms assume to be the only minimiser."""
        return np.linalg.pinv(self.X) @ self.y


def train(
    problem: Problem, models: int, alpha: tuple[float, float], seed: int, *,
    lr: float = 0.01, target: float = 1e-5, max_steps: int = 400_000,
) -> tuple[_Array, _Array]:  # fmt: skip
    """Train networks in parallel by gradient descent until each has reached the target loss.

    Parameters
    ----------
    problem : Problem
        Data.
    models : int
        Number of networks.
    alpha : (float, float)
        Range of the scale α of the initial u, v ~ αN(0, 1), drawn log-uniformly for each network.
    seed : int
        Seed of the initial values.
    lr, target, max_steps
        Step size, loss at which a network stops, and the limit.

    Returns
    -------
    (array, array)
        u and v, (models, d), float64.

    Raises
    ------
    ValueError
        Some networks do not reach the target.
    """
    rng = np.random.default_rng([seed, 1])
    d = problem.X.shape[1]
    scale = np.exp(rng.uniform(float(np.log(alpha[0])), float(np.log(alpha[1])), size=(models, 1)))
    u = torch.from_numpy(scale * rng.standard_normal((models, d)))
    v = torch.from_numpy(scale * rng.standard_normal((models, d)))
    X, y = torch.from_numpy(problem.X), torch.from_numpy(problem.y)
    done_u, done_v = u.clone(), v.clone()
    alive = torch.arange(models)
    for _ in range(max_steps):
        residual = (u * v) @ X.T - y
        stop = residual.square().sum(1) <= target
        if bool(stop.any()):
            done_u[alive[stop]], done_v[alive[stop]] = u[stop], v[stop]
            u, v, residual, alive = u[~stop], v[~stop], residual[~stop], alive[~stop]
            if not len(alive):
                return done_u.numpy(), done_v.numpy()
        slope = 2 * lr * (residual @ X)
        u, v = u - slope * v, v - slope * u
    raise ValueError(
        f"{len(alive)} of {models} networks did not reach a loss of {target} in {max_steps} steps; "
        "raise --alpha-min, which determines how slowly the smallest initial values leave zero"
    )


def closed_forms(problem: Problem, beta: _Array, rho: float) -> dict[str, _Array]:
    r"""Evaluate the closed forms, which hold for XᵀX = I and small ρ, with β_* = X⁺y.

    adaptive :math:`2ρ^2 \max β^2`; inv :math:`2\sqrt2 ρ \|β \odot (β - β_*)\|`, and :math:`2ρ^2 \max β^2` where that is
    0; mix :math:`2\sqrt2 ρ \|β - β_*\| + 2ρ^2`.

    Parameters
    ----------
    problem : Problem
        Data.
    beta : array
        (models, d).
    rho : float
        Radius.

    Returns
    -------
    dict of str to array
        By measure, (models,).

    Notes
    -----
    Paper, Eq. 7, 8, 35, with the factors corrected: ‖η‖² = 2‖B‖², so the constraint on B is ρ/√2.
    """
    star = problem.least_norm()
    top = 2 * rho**2 * np.square(beta).max(-1)
    slope = 2 * np.sqrt(2) * rho * np.linalg.norm(beta * (beta - star), axis=-1)
    mix = 2 * np.sqrt(2) * rho * np.linalg.norm(beta - star, axis=-1) + 2 * rho**2
    return {"adaptive": top, "inv": np.where(slope > 0, slope, top), "mix": mix}


def maximised(problem: Problem, u: _Array, v: _Array, rho: float, *, steps: int = 30) -> dict[str, float]:
    r"""Maximise the loss over the ball, for one network.

    inv second-order and mix are trust-region problems for general XᵀX, solved exactly by the secular equation; inv
    along its exact geodesics, adaptive and euclidean are maximised by Auto-PGD, the first two started at the maximiser
    of their second-order model.

    Parameters
    ----------
    problem : Problem
        Data.
    u, v : array
        (d,).
    rho : float
        Radius.
    steps : int
        Steps of Auto-PGD.

    Returns
    -------
    dict of str to float
        Sharpness by measure. Mix ignores that its geodesics leave the manifold where δ/β ≤ −1.
    """
    beta = u * v
    base = float(problem.loss(beta))
    gram = problem.X.T @ problem.X
    g = problem.X.T @ (problem.X @ beta - problem.y)
    r = rho / np.sqrt(2)
    form = 8 * (np.diag(beta * g) + beta[:, None] * gram * beta)
    second, B = maximise_quadratic(4 * beta * g, form, r)
    mix, _ = maximise_quadratic(2 * g, 2 * gram, np.sqrt(2) * rho)
    X, y = torch.from_numpy(problem.X), torch.from_numpy(problem.y)
    tu, tv = torch.from_numpy(u), torch.from_numpy(v)

    def ascend(product: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, radius: float) -> float:
        def f(x: torch.Tensor, out: torch.Tensor | None) -> float:
            z = x.detach().requires_grad_()
            loss = (X @ product(z) - y).square().sum()
            if out is not None:
                out.copy_(torch.autograd.grad(loss, z)[0])
            return float(loss.detach())

        return max(auto_pgd(f, s.clone(), radius, steps).value for s in (start, -start)) - base

    start = torch.from_numpy(B)
    d = len(u)
    ones = torch.randn(2 * d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {
        "euclidean": ascend(lambda z: (tu + z[:d]) * (tv + z[d:]), ones * (rho / ones.norm()), rho),
        "adaptive": ascend(lambda z: tu * (1 + z[:d]) * tv * (1 + z[d:]), torch.cat([start, start]), rho),
        "inv": ascend(lambda z: tu * tv * (2 * z).exp(), start, r),
        "inv second-order": second,
        "mix": mix,
    }


def _one_seed(task: tuple[int, int, int, int, float, float, tuple[float, ...]]) -> list[dict[str, Any]]:
    """Draw, train and measure the networks of one data seed."""
    n, d, models, seed, alpha_min, alpha_max, rhos = task
    problem = Problem.draw(n, d, seed)
    u, v = train(problem, models, (alpha_min, alpha_max), seed)
    beta = u * v
    closed = closed_forms(problem, beta, rhos[0])
    rows = []
    for k in range(models):
        row: dict[str, Any] = {"seed": seed, "model": k, "train_loss": float(problem.loss(beta[k]))}
        row["test_loss"] = float(problem.test_loss(beta[k]))
        row.update({f"closed {name}": float(closed[name][k]) for name in CLOSED_FORMS})
        for rho in rhos:
            found = maximised(problem, u[k], v[k], rho)
            row.update({f"max {name} rho={rho:g}": found[name] for name in MAXIMISED})
        rows.append(row)
    return rows


def run(
    *, n: int = 100, d: int = 200, models: int = 50, seeds: int = 10, seed: int = 0, alpha_min: float = 0.01,
    alpha_max: float = 0.3, rhos: Sequence[float] = (0.001, 0.1), out: Path = Path("diagonal"),
    workers: int | None = None, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Train networks on several data seeds, measure them, and correlate with the test loss.

    Parameters
    ----------
    n, d, models : int
        Data points, dimensions, and networks per seed.
    seeds, seed : int
        Number of data seeds, and the first one.
    alpha_min, alpha_max : float
        Range of the initial scale.
    rhos : sequence of float
        Radii of the true maximisation. (The ranks of the closed forms hardly depend on ρ; they use the first one.)
    out : Path
        Folder for ``diagonal.csv`` (one line per network), ``diagonal.json`` (correlations) and ``diagonal.png``.
    workers : int, optional
        Processes that share the seeds; by default one per core.
    progress : bool
        Show a progress bar.

    Returns
    -------
    dict
        The contents of ``diagonal.json``.

    Raises
    ------
    ValueError
        A number is out of range, or networks do not reach the target loss.
    """
    if not 1e-6 <= alpha_min <= alpha_max <= 1e3:
        raise ValueError(f"alpha-min and alpha-max must be in order, from 1e-6 to 1e3, got {alpha_min} and {alpha_max}")
    if min(n, d, seeds) < 1 or models < 3 or not rhos or not all(1e-9 <= rho <= 1e3 for rho in rhos):
        raise ValueError("n, d and seeds must be at least 1, models at least 3, and every rho from 1e-9 to 1e3")
    check_folder(out)
    rows: list[dict[str, Any]] = []
    tasks = [(n, d, models, s, alpha_min, alpha_max, tuple(rhos)) for s in range(seed, seed + seeds)]
    workers = min(seeds, os.cpu_count() or 1) if workers is None else workers
    with progress_bar(seeds, "diagonal networks", "seed", progress=progress) as shown:
        if workers == 1:
            for task in tasks:
                rows.extend(_one_seed(task))
                shown.update()
        else:  # many small products: one thread per process, and one process per seed
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
                for found in pool.map(_one_seed, tasks):
                    rows.extend(found)
                    shown.update()
    table = {c: _correlated(rows, c, range(seed, seed + seeds)) for c in rows[0] if c.startswith(("closed", "max"))}
    order = [table[f"closed {name}"]["taus"] for name in CLOSED_FORMS]
    result = {
        "settings": {"n": n, "d": d, "models": models, "seeds": seeds, "seed": seed, "alpha": [alpha_min, alpha_max],
                     "rhos": list(rhos)},
        "correlations with the test loss": table,
        _ORDER: int(sum(a > i > m for a, i, m in zip(*order, strict=True))),
    }  # fmt: skip
    table_of_rows = io.StringIO(newline="")
    writer = csv.DictWriter(table_of_rows, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(out / "diagonal.csv", table_of_rows.getvalue())
    write_json(out / "diagonal.json", result)
    _print(result, rhos)
    from .plots import plot_diagonal

    plot_diagonal([r for r in rows if r["seed"] == seed], table, rhos[0], out / "diagonal.png")
    print(f"\n{out}/diagonal.csv, diagonal.json and diagonal.png hold the networks, the correlations and the figure")
    return result


def _correlated(rows: Sequence[Mapping[str, Any]], column: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Correlate a column with the test loss, seed by seed; the first seed has a bootstrap interval."""
    found: list[Correlation] = []
    for s in seeds:
        chosen = [r for r in rows if r["seed"] == s]
        columns = [r[column] for r in chosen], [r["test_loss"] for r in chosen]
        found.append(kendall(*columns, resamples=1 if found else 1000))
    taus = [tau.value for tau in found]
    std = float(np.std(taus, ddof=1)) if len(taus) > 1 else None
    return {"first seed": asdict(found[0]), "taus": taus, "mean": float(np.mean(taus)), "std": std}


def _print(result: dict[str, Any], rhos: Sequence[float]) -> None:
    table, settings = result["correlations with the test loss"], result["settings"]

    def line(column: str, label: str) -> str:
        entry = table[column]
        first = entry["first seed"]
        std = "" if entry["std"] is None else f" ± {entry['std']:.2f}"
        interval = f"{first['value']:+.2f} [{first['low']:+.2f}, {first['high']:+.2f}]"
        return f"  {label:<22} {entry['mean']:+.2f}{std}   {interval}"

    print(f"Kendall τ with the test loss, {settings['models']} networks, n = {settings['n']}, d = {settings['d']}")
    print(f"mean ± std over {settings['seeds']} data seeds, and the first seed with its bootstrap interval\n")
    print("closed forms, as the paper uses them (XᵀX = I assumed, β_* = X⁺y)")
    for name in CLOSED_FORMS:
        print(line(f"closed {name}", name))
    count = result[_ORDER]
    print(f"  adaptive > inv > mix in {count} of {settings['seeds']} seeds")
    for rho in rhos:
        print(f"\ntrue maximisation over the ball, ρ = {rho:g}")
        for name in MAXIMISED:
            print(line(f"max {name} rho={rho:g}", name))
