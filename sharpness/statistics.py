"""How well a measure ranks models: Kendall's rank correlation with its uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.stats

__all__ = ["Correlation", "kendall"]

Numbers = Sequence[float] | npt.NDArray[np.floating[Any]]
_Array = npt.NDArray[np.float64]
#: Of how often each model counts, (resamples, models), one value a resample.
_Statistic = Callable[[_Array], _Array]


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

    def __str__(self) -> str:
        ties = f", {self.ties} tied pairs" if self.ties else ""
        interval = f"[{self.low:+.2f}, {self.high:+.2f}]"
        return f"{self.name} {self.value:+.2f} {interval}, p = {self.p:.2g}, n = {self.models}{ties}"


def kendall(
    x: Numbers,
    y: Numbers,
    *,
    given: Numbers | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Correlation:
    r"""Compute Kendall's τ-b of two quantities over models, or what is left of it given a third quantity z.

    .. math:: τ_{xy} = \frac{\sum_{i<j} \operatorname{sign}(x_i - x_j) \operatorname{sign}(y_i - y_j)}
              {\sqrt{\#\{i<j : x_i \ne x_j\} \; \#\{i<j : y_i \ne y_j\}}}, \qquad
              τ_{xy \cdot z} = \frac{τ_{xy} - τ_{xz} τ_{yz}}{\sqrt{(1 - τ_{xz}^2)(1 - τ_{yz}^2)}}

    Parameters
    ----------
    x, y : sequence of float, (models,)
        One number a model, for example sharpness and generalisation gap.
    given : sequence of float, (models,), optional
        The quantity z that is controlled for, for example the training loss.
    resamples : int
        Resamples of the percentile bootstrap over models, and permutations of the test of the partial coefficient.
    level : float
        Coverage of the interval.
    seed : int
        Seed of the bootstrap and, plus 1, of the permutations.

    Returns
    -------
    Correlation
        NaN where x or y is constant, or where z determines the order of either.

    Raises
    ------
    ValueError
        Lists of unequal length, fewer than three models, NaN or infinite entries.

    Notes
    -----
    Kendall 1945 for ties, which are counted in the result; Kendall 1942 for the partial coefficient. Its p: the ranks
    of x are regressed on those of z, and the residuals are permuted (Freedman and Lane 1983). It need not vanish for
    quantities that are independent given z; judge it by its p.

    Examples
    --------
    A measure that only repeats the training loss says less than its τ with the gap suggests.

    >>> loss = [0.10, 0.12, 0.15, 0.20, 0.26, 0.30]
    >>> gap = [0.02, 0.03, 0.05, 0.04, 0.08, 0.09]
    >>> measure = [0.2, 0.1, 0.3, 0.4, 0.5, 0.6]
    >>> print(kendall(measure, gap))
    Kendall τ +0.73 [...], p = 0.056, n = 6
    >>> print(kendall(measure, gap, given=loss, resamples=99))
    partial Kendall τ -0.07 [...], p = ..., n = 6
    """
    columns = {"x": x, "y": y, **({} if given is None else {"given": given})}
    a, b, *rest = _columns(**columns)
    tau = _tau(_signs(a), _signs(b))
    if not rest:
        p = float("nan") if np.ptp(a) == 0 or np.ptp(b) == 0 else scipy.stats.kendalltau(a, b).pvalue
        return _bootstrapped("Kendall τ", tau, (a, b), p, resamples, level, seed)
    with_given = [_tau(_signs(v), _signs(rest[0])) for v in (a, b)]

    def statistic(counts: _Array) -> _Array:
        return _partial_tau(tau(counts), *(t(counts) for t in with_given))

    p = _partial_p(a, b, rest[0], resamples, seed)
    return _bootstrapped("partial Kendall τ", statistic, (a, b), p, resamples, level, seed)


def kendall_difference(
    x: Numbers, other: Numbers, y: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Correlation:
    """Compute τ(x, y) − τ(other, y): models are resampled for both at once (paired bootstrap), p is NaN.

    Both τ share the models, so their separate intervals say little of the difference.
    """
    a, b, target = _columns(x=x, other=other, y=y)
    one, two = (_tau(_signs(v), _signs(target)) for v in (a, b))
    p = float("nan")
    return _bootstrapped("difference of τ", lambda n: one(n) - two(n), (a, target), p, resamples, level, seed)


def _columns(**columns: Numbers) -> list[_Array]:
    found = {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}
    sizes = {name: a.shape for name, a in found.items()}
    if len(set(sizes.values())) > 1 or any(a.ndim != 1 for a in found.values()):
        raise ValueError(f"the quantities must be lists of one number a model, of equal length; got shapes {sizes}")
    for name, a in found.items():
        if len(a) < 3:
            raise ValueError(f"a correlation needs at least 3 models, got {len(a)}")
        if not np.isfinite(a).all():
            raise ValueError(f"{name} has NaN or infinite entries; drop these models first")
    return list(found.values())


def _signs(x: _Array) -> _Array:
    found: _Array = np.sign(x[:, None] - x)
    return found


def _tau(x: _Array, y: _Array) -> _Statistic:
    """τ-b of the signs of all differences, for many resamples at once: two copies of a model are a tie."""

    def statistic(counts: _Array) -> _Array:
        score, x_pairs, y_pairs = (((counts @ m) * counts).sum(axis=1) for m in (x * y, np.abs(x), np.abs(y)))
        untied = x_pairs * y_pairs
        found: _Array = score / np.sqrt(np.where(untied > 0, untied, np.nan))
        return found

    return statistic


def _partial_tau(xy: _Array, xz: _Array, yz: _Array) -> _Array:
    rest = (1 - xz**2) * (1 - yz**2)
    found: _Array = (xy - xz * yz) / np.sqrt(np.where(rest > 1e-12, rest, np.nan))
    return found


def _partial_p(x: _Array, y: _Array, z: _Array, resamples: int, seed: int) -> float:
    """Permute what the ranks of z do not explain of those of x; no test of scipy.stats holds a third quantity."""
    once, y_signs, z_signs = np.ones((1, len(x))), _signs(y), _signs(z)
    yz = _tau(y_signs, z_signs)(once)

    def partial(ranks: _Array) -> float:
        signs = _signs(ranks)
        return float(_partial_tau(_tau(signs, y_signs)(once), _tau(signs, z_signs)(once), yz)[0])

    value = partial(x)
    if np.isnan(value):
        return value
    rng = np.random.default_rng(seed + 1)
    x_ranks, z_ranks = scipy.stats.rankdata(x), scipy.stats.rankdata(z)
    slope, intercept = np.polyfit(z_ranks, x_ranks, 1)
    fitted = slope * z_ranks + intercept
    larger = sum(abs(partial(fitted + rng.permutation(x_ranks - fitted))) >= abs(value) for _ in range(resamples))
    return (1 + larger) / (1 + resamples)


def _bootstrapped(
    name: str, statistic: _Statistic, pair: tuple[_Array, _Array], p: float, resamples: int, level: float, seed: int
) -> Correlation:
    """Evaluate a statistic on all models and on resamples of them.

    Not by scipy.stats.bootstrap: it calls kendalltau a resample, which takes a hundred times as long, and has no
    interval where one resample of few models is constant.
    """
    count = len(pair[0])
    chosen = np.random.default_rng(seed).integers(count, size=(resamples, count))
    counts = np.zeros((resamples, count))
    np.add.at(counts, (np.arange(resamples)[:, None], chosen), 1)
    draws = statistic(counts)
    draws = draws[np.isfinite(draws)]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2]) if len(draws) else (np.nan, np.nan)
    value = statistic(np.ones((1, count)))[0]
    i, j = np.triu_indices(count, 1)
    ties = int(np.any([v[i] == v[j] for v in pair], axis=0).sum())
    return Correlation(name, float(value), float(p), float(low), float(high), count, ties)
