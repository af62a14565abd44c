"""How well a measure ranks models: rank correlations with their uncertainty."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.stats

__all__ = [
    "Correlation",
    "granulated_kendall",
    "kendall",
    "kendall_difference",
    "partial_kendall",
    "pearson",
    "spearman",
]

Numbers = Sequence[float] | npt.NDArray[np.floating[Any]]
_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Correlation:
    """A correlation over models.

    Attributes
    ----------
    name : str
    value : float
        NaN where one of the quantities is constant.
    p : float
        Two-sided, of the hypothesis of no association; NaN where no test is defined.
    low, high : float
        Percentile bootstrap interval over models.
    models : int
    ties : int
        Pairs of models with equal values of either quantity.
    """

    name: str
    value: float
    p: float
    low: float
    high: float
    models: int
    ties: int

    def to_dict(self) -> dict[str, Any]:
        """Give plain numbers."""
        return asdict(self)

    def __str__(self) -> str:
        ties = f", {self.ties} tied pairs" if self.ties else ""
        interval = f"[{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.name} {self.value:+.2f} {interval}, p = {self.p:.2g}, n = {self.models}{ties}"


def _columns(**columns: Numbers) -> dict[str, _Array]:
    found = {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}
    sizes = {name: a.shape for name, a in found.items()}
    if len(set(sizes.values())) > 1 or any(a.ndim != 1 for a in found.values()):
        raise ValueError(f"the quantities must be lists of one number a model, of equal length; got shapes {sizes}")
    for name, a in found.items():
        if len(a) < 3:
            raise ValueError(f"a correlation needs at least 3 models, got {len(a)}")
        if not np.isfinite(a).all():
            raise ValueError(f"{name} has NaN or infinite entries; drop these models first")
    return found


def _ties(x: _Array, y: _Array) -> int:
    i, j = np.triu_indices(len(x), 1)
    return int(((x[i] == x[j]) | (y[i] == y[j])).sum())


def _bootstrapped(
    name: str,
    statistic: Callable[[_Array], _Array],
    columns: Sequence[_Array],
    p: float,
    resamples: int,
    level: float,
    seed: int,
) -> Correlation:
    """A statistic of how often each model counts, (resamples, models), on all models and on resamples of them."""
    rng = np.random.default_rng(seed)
    count = len(columns[0])
    chosen = [np.bincount(rng.integers(count, size=count), minlength=count) for _ in range(resamples)]
    draws = statistic(np.stack(chosen).astype(np.float64))
    finite = draws[np.isfinite(draws)]
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2]) if len(finite) else (np.nan, np.nan)
    value = statistic(np.ones((1, count)))[0]
    return Correlation(name, float(value), float(p), float(low), float(high), count, _ties(columns[0], columns[1]))


def _signs(x: _Array) -> _Array:
    found: _Array = np.sign(x[:, None] - x[None, :])
    return found


def _taus(x: _Array, y: _Array) -> Callable[[_Array], _Array]:
    r"""Kendall's τ-b as a function of how often each model counts, for many resamples at once.

    With signs :math:`S_{ij}` of the differences and counts c it is
    :math:`c^T (S^x ∘ S^y) c / \sqrt{c^T |S^x| c \; c^T |S^y| c}`: two copies of a model are a tie.
    """
    a, b = _signs(x), _signs(y)

    def statistic(counts: _Array) -> _Array:
        def form(matrix: _Array) -> _Array:
            found: _Array = ((counts @ matrix) * counts).sum(axis=1)
            return found

        below = form(np.abs(a)) * form(np.abs(b))
        found: _Array = np.divide(form(a * b), np.sqrt(below), out=np.full(len(counts), np.nan), where=below > 0)
        return found

    return statistic


def _tau(x: _Array, y: _Array) -> float:
    return float(_taus(x, y)(np.ones((1, len(x))))[0])


def kendall(x: Numbers, y: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Correlation:
    """Compute Kendall's τ-b of two quantities over models.

    Parameters
    ----------
    x, y : sequence of float
        One number a model, for example sharpness and generalisation gap.
    resamples, level, seed
        Of the percentile bootstrap over models.

    Returns
    -------
    Correlation

    Notes
    -----
    The paper reports τ. Ties are accounted for by τ-b and counted in the result.
    """
    c = _columns(x=x, y=y)
    p = float("nan") if np.isnan(_tau(c["x"], c["y"])) else scipy.stats.kendalltau(c["x"], c["y"]).pvalue
    return _bootstrapped("Kendall τ", _taus(c["x"], c["y"]), [c["x"], c["y"]], p, resamples, level, seed)


def kendall_difference(
    x: Numbers, other: Numbers, y: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Correlation:
    r"""Compute τ(x, y) − τ(other, y), with a bootstrap interval over models that resamples all three together.

    Parameters
    ----------
    x, other, y : sequence of float
        One number a model: two measures, and what both are to predict.
    resamples, level, seed
        Of the bootstrap. p is not defined; see whether the interval holds 0.

    Returns
    -------
    Correlation
    """
    c = _columns(x=x, other=other, y=y)

    one, two = _taus(c["x"], c["y"]), _taus(c["other"], c["y"])
    columns = [c["x"], c["y"]]
    return _bootstrapped("difference of τ", lambda n: one(n) - two(n), columns, float("nan"), resamples, level, seed)


def _classical(name: str, test: Any, x: Numbers, y: Numbers, resamples: int, level: float, seed: int) -> Correlation:
    c = _columns(x=x, y=y)

    def statistic(counts: _Array) -> _Array:
        def one(times: _Array) -> float:
            a, b = (np.repeat(c[k], times.astype(int)) for k in ("x", "y"))
            return float("nan") if np.ptp(a) == 0 or np.ptp(b) == 0 else float(test(a, b).statistic)

        return np.array([one(times) for times in counts])

    p = float("nan") if np.isnan(statistic(np.ones((1, len(c["x"]))))[0]) else test(c["x"], c["y"]).pvalue
    return _bootstrapped(name, statistic, [c["x"], c["y"]], p, resamples, level, seed)


def spearman(x: Numbers, y: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Correlation:
    """Compute Spearman's rank correlation; parameters as for :func:`kendall`."""
    return _classical("Spearman", scipy.stats.spearmanr, x, y, resamples, level, seed)


def pearson(x: Numbers, y: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Correlation:
    """Compute Pearson's correlation; parameters as for :func:`kendall`."""
    return _classical("Pearson", scipy.stats.pearsonr, x, y, resamples, level, seed)


def _partial_taus(x: _Array, y: _Array, z: _Array) -> Callable[[_Array], _Array]:
    """As :func:`_taus`, of x and y given z."""
    taus = _taus(x, y), _taus(x, z), _taus(y, z)

    def statistic(counts: _Array) -> _Array:
        xy, xz, yz = (tau(counts) for tau in taus)
        room = (1 - xz**2) * (1 - yz**2)
        known = room > 1e-12
        found: _Array = np.divide(
            xy - xz * yz, np.sqrt(np.where(known, room, 1)), out=np.full_like(xy, np.nan), where=known
        )
        return found

    return statistic


def _partial_tau(x: _Array, y: _Array, z: _Array) -> float:
    return float(_partial_taus(x, y, z)(np.ones((1, len(x))))[0])


def partial_kendall(
    x: Numbers, y: Numbers, z: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Correlation:
    r"""Compute Kendall's τ of x and y that is left when a third quantity z is controlled for.

    .. math:: τ_{xy \cdot z} = \frac{τ_{xy} - τ_{xz} τ_{yz}}{\sqrt{(1 - τ_{xz}^2)(1 - τ_{yz}^2)}}

    Parameters
    ----------
    x, y, z : sequence of float
        One number a model; z is, say, the training loss.
    resamples, level, seed
        Of the bootstrap; p is that of a permutation test of x with as many permutations.

    Returns
    -------
    Correlation

    Notes
    -----
    Kendall 1942. NaN where z determines the order of x or y. The coefficient need not vanish for quantities that are
    independent given z; judge it by its p.
    """
    c = _columns(x=x, y=y, z=z)
    value = _partial_tau(c["x"], c["y"], c["z"])
    p = float("nan")
    if np.isfinite(value):
        rng = np.random.default_rng(seed + 1)
        # Ranks of x given z: permute what z does not explain.
        ranks = {k: scipy.stats.rankdata(v) for k, v in c.items()}
        slope, intercept = np.polyfit(ranks["z"], ranks["x"], 1)
        fitted = slope * ranks["z"] + intercept
        rest = ranks["x"] - fitted
        null = [_partial_tau(fitted + rng.permutation(rest), c["y"], c["z"]) for _ in range(resamples)]
        p = (1 + sum(abs(v) >= abs(value) for v in null)) / (1 + resamples)
    statistic = _partial_taus(c["x"], c["y"], c["z"])
    return _bootstrapped("partial Kendall τ", statistic, [c["x"], c["y"], c["z"]], p, resamples, level, seed)


def granulated_kendall(
    x: Numbers, y: Numbers, hyperparameters: Mapping[str, Sequence[Any]]
) -> tuple[float, dict[str, float]]:
    r"""Compute the granulated Kendall coefficient of a sweep over several hyperparameters.

    For every hyperparameter i, τ is computed among the models that differ in it alone, and averaged over all
    settings of the others: ψ_i. The coefficient Ψ is the mean of the ψ_i. A measure that merely tracks one
    hyperparameter scores badly on the others.

    Parameters
    ----------
    x, y : sequence of float
        One number a model.
    hyperparameters : mapping of str to sequence
        Values by name, one a model.

    Returns
    -------
    (float, dict of str to float)
        Ψ, and ψ by hyperparameter; NaN for one that never varies alone.

    Notes
    -----
    Jiang et al., *Fantastic Generalization Measures*, 2020, Eq. 5–6.
    """
    c = _columns(x=x, y=y)
    count = len(c["x"])
    for name, values in hyperparameters.items():
        if len(values) != count:
            raise ValueError(f"hyperparameter {name!r} has {len(values)} values for {count} models")
    if not hyperparameters:
        raise ValueError("granulated_kendall needs at least one hyperparameter")
    psi = {}
    for name in hyperparameters:
        others = [k for k in hyperparameters if k != name]
        cells: dict[tuple[Any, ...], list[int]] = {}
        for i in range(count):
            cells.setdefault(tuple(hyperparameters[k][i] for k in others), []).append(i)
        taus = []
        for members in cells.values():
            signs = [
                np.sign(c["x"][i] - c["x"][j]) * np.sign(c["y"][i] - c["y"][j])
                for i, j in itertools.combinations(members, 2)
                if hyperparameters[name][i] != hyperparameters[name][j]
            ]
            if signs:
                taus.append(float(np.mean(signs)))
        psi[name] = float(np.mean(taus)) if taus else float("nan")
    known = [v for v in psi.values() if np.isfinite(v)]
    return (float(np.mean(known)) if known else float("nan")), psi
