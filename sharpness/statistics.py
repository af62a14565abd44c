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
    """A correlation over models; ``print`` gives one line.

    Attributes
    ----------
    name : str
        Name of the coefficient.
    value : float
        NaN where one of the quantities is constant.
    p : float
        Two-sided, of the hypothesis of no association; NaN where no test is defined.
    low, high : float
        Percentile bootstrap interval over models.
    models : int
        Number of models.
    ties : int
        Pairs of models with equal values of either quantity.

    Examples
    --------
    >>> found = kendall([1, 2, 3, 4, 5], [0.1, 0.3, 0.2, 0.4, 0.4])
    >>> found.ties  # two models with the same gap
    1
    >>> found.low <= found.value <= found.high
    True
    """

    name: str
    value: float
    p: float
    low: float
    high: float
    models: int
    ties: int

    def to_dict(self) -> dict[str, Any]:
        """Give the fields by name, as plain numbers."""
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
    """Evaluate a statistic of how often each model counts, (resamples, models), on all models and on resamples."""
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
    r"""Compute Kendall's τ-b of two quantities over models.

    .. math:: τ_b = \frac{\sum_{i<j} \operatorname{sign}(x_i - x_j) \operatorname{sign}(y_i - y_j)}
              {\sqrt{\#\{i<j : x_i \ne x_j\} \; \#\{i<j : y_i \ne y_j\}}}

    Parameters
    ----------
    x, y : sequence of float, (models,)
        One number a model, for example sharpness and generalisation gap.
    resamples : int
        Resamples of the percentile bootstrap over models.
    level : float
        Coverage of the interval.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    Correlation
        NaN where x or y is constant.

    Raises
    ------
    ValueError
        Lists of unequal length, fewer than three models, NaN or infinite entries.

    Notes
    -----
    Kendall 1945 for ties, which are counted in the result. The paper reports τ.

    Examples
    --------
    Does sharpness order six models as their generalisation gap does?

    >>> sharpness = [0.1, 0.2, 0.4, 0.5, 0.7, 0.9]
    >>> gap = [0.02, 0.05, 0.04, 0.08, 0.09, 0.12]
    >>> print(kendall(sharpness, gap))
    Kendall τ +0.87 [...], p = 0.017, n = 6
    """
    c = _columns(x=x, y=y)
    p = float("nan") if np.isnan(_tau(c["x"], c["y"])) else scipy.stats.kendalltau(c["x"], c["y"]).pvalue
    return _bootstrapped("Kendall τ", _taus(c["x"], c["y"]), [c["x"], c["y"]], p, resamples, level, seed)


def kendall_difference(
    x: Numbers, other: Numbers, y: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Correlation:
    """Compute τ(x, y) − τ(other, y), with a bootstrap interval over models that resamples all three together.

    Parameters
    ----------
    x, other, y : sequence of float, (models,)
        One number a model: two measures, and what both are to predict.
    resamples : int
        Resamples of the percentile bootstrap over models.
    level : float
        Coverage of the interval.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    Correlation
        Its p is NaN; see whether the interval holds 0.

    Raises
    ------
    ValueError
        Lists of unequal length, fewer than three models, NaN or infinite entries.

    Notes
    -----
    Paired bootstrap: Efron and Tibshirani 1993. Both τ share the models, so their separate intervals say little of the
    difference.

    Examples
    --------
    >>> gap = [0.02, 0.04, 0.05, 0.08, 0.09, 0.12]
    >>> good, poor = [0.1, 0.2, 0.4, 0.5, 0.7, 0.9], [3, 1, 2, 6, 4, 5]
    >>> round(kendall_difference(good, poor, gap).value, 2)
    0.53
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
    r"""Compute Spearman's rank correlation of two quantities over models.

    .. math:: r_s = \operatorname{corr}(\operatorname{rank} x, \operatorname{rank} y)

    Parameters
    ----------
    x, y : sequence of float, (models,)
        One number a model.
    resamples : int
        Resamples of the percentile bootstrap over models.
    level : float
        Coverage of the interval.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    Correlation
        NaN where x or y is constant.

    Raises
    ------
    ValueError
        Lists of unequal length, fewer than three models, NaN or infinite entries.

    Notes
    -----
    Spearman 1904; equal values share their mean rank.

    Examples
    --------
    One swap of neighbours costs less than in :func:`kendall`.

    >>> sharpness, gap = [0.1, 0.2, 0.4, 0.5, 0.7], [0.02, 0.05, 0.04, 0.08, 0.09]
    >>> round(spearman(sharpness, gap).value, 3), round(kendall(sharpness, gap).value, 3)
    (0.9, 0.8)
    """
    return _classical("Spearman", scipy.stats.spearmanr, x, y, resamples, level, seed)


def pearson(x: Numbers, y: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Correlation:
    r"""Compute Pearson's linear correlation of two quantities over models.

    .. math:: r = \frac{\sum_i (x_i - \bar x)(y_i - \bar y)}
              {\sqrt{\sum_i (x_i - \bar x)^2 \sum_i (y_i - \bar y)^2}}

    Parameters
    ----------
    x, y : sequence of float, (models,)
        One number a model.
    resamples : int
        Resamples of the percentile bootstrap over models.
    level : float
        Coverage of the interval.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    Correlation
        NaN where x or y is constant.

    Raises
    ------
    ValueError
        Lists of unequal length, fewer than three models, NaN or infinite entries.

    Notes
    -----
    Pearson 1895. Unlike the rank correlations it changes under a monotone map, such as the logarithm of sharpness.

    Examples
    --------
    >>> sharpness, gap = [0.001, 0.01, 0.1, 1.0], [0.02, 0.04, 0.06, 0.08]
    >>> round(pearson(sharpness, gap).value, 2), kendall(sharpness, gap).value
    (0.82, 1.0)
    """
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
    x, y, z : sequence of float, (models,)
        One number a model; z is, say, the training loss.
    resamples : int
        Resamples of the percentile bootstrap over models, and permutations of the test that gives p.
    level : float
        Coverage of the interval.
    seed : int
        Seed of the bootstrap and, plus 1, of the permutations.

    Returns
    -------
    Correlation
        NaN where z determines the order of x or y.

    Raises
    ------
    ValueError
        Lists of unequal length, fewer than three models, NaN or infinite entries.

    Notes
    -----
    Kendall 1942. For p, the ranks of x are regressed on those of z, and the residuals are permuted (Freedman and Lane
    1983). The coefficient need not vanish for quantities that are independent given z; judge it by its p.

    Examples
    --------
    A measure that only repeats the training loss says less than its τ with the gap suggests.

    >>> loss = [0.10, 0.12, 0.15, 0.20, 0.26, 0.30]
    >>> gap = [0.02, 0.03, 0.05, 0.04, 0.08, 0.09]
    >>> measure = [0.2, 0.1, 0.3, 0.4, 0.5, 0.6]
    >>> round(kendall(measure, gap).value, 2), round(partial_kendall(measure, gap, loss, resamples=99).value, 2)
    (0.73, -0.07)
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

    .. math:: Ψ = \operatorname{mean}_i ψ_i, \qquad ψ_i = \operatorname{mean}_{θ_{-i}}\;
              τ\bigl(\{\text{models of settings } θ_{-i} \text{ of all hyperparameters but } i\}\bigr)

    For every hyperparameter i, τ is computed among the models that differ in it alone, and averaged over all
    settings of the others: ψ_i. The coefficient Ψ is the mean of the ψ_i. A measure that merely tracks one
    hyperparameter scores badly on the others.

    Parameters
    ----------
    x, y : sequence of float, (models,)
        One number a model.
    hyperparameters : mapping of str to sequence
        Values by name, one a model.

    Returns
    -------
    (float, dict of str to float)
        Ψ, and ψ by hyperparameter; NaN for one that never varies alone, which Ψ leaves out.

    Raises
    ------
    ValueError
        As :func:`kendall`; no hyperparameter, or one with another number of values.

    Notes
    -----
    Jiang et al., *Fantastic Generalization Measures*, 2020. A pair that is tied in x or y counts as 0 (τ-a).

    Examples
    --------
    A measure that follows the learning rate alone explains nothing of the width.

    >>> lr, width = [1, 1, 2, 2, 3, 3], [10, 20, 10, 20, 10, 20]
    >>> gap = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]
    >>> granulated_kendall(lr, gap, {"lr": lr, "width": width})
    (0.5, {'lr': 1.0, 'width': 0.0})
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
