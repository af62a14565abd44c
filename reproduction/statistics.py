"""Kendall's rank correlation with its uncertainty, of single measures and of families that are judged together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.stats

__all__ = ["Correlation", "kendall", "kendall_difference", "kendall_family"]

Numbers = Sequence[float] | npt.NDArray[np.floating[Any]]
_Array = npt.NDArray[np.float64]
#: A function from how often each model counts, (resamples, models), to one value per resample.
_Statistic = Callable[[Any], _Array]


@dataclass(frozen=True)
class Correlation:
    """A correlation over models; ``print`` shows one line.

    Attributes
    ----------
    name : str
        Name of the coefficient.
    value : float
        The coefficient; NaN if one of the quantities is constant.
    p : float
        Two-sided p-value of the hypothesis of no association, for as many models fewer as there are controls; NaN if no
        test is defined.
    low, high : float
        Percentile bootstrap interval over models; simultaneous if it belongs to a family.
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
    given: Numbers | Sequence[Numbers] | None = None,
    quadratic: bool = False,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Correlation:
    r"""Compute Kendall's τ-b of two quantities over models, or of their residuals given other quantities z.

    .. math:: τ_{xy} = \frac{\sum_{i<j} \operatorname{sign}(x_i - x_j) \operatorname{sign}(y_i - y_j)}
              {\sqrt{\#\{i<j : x_i \ne x_j\} \; \#\{i<j : y_i \ne y_j\}}}, \qquad
              τ_{xy \cdot z} = τ_{e(x), e(y)}, \quad e(x) = s(x) - Z (Z^T Z)^{-1} Z^T s(x)

    with normal scores :math:`s(x)_i = Φ^{-1}((\operatorname{rank}(x_i) - 1/2)/n)` and Z the columns 1 and s(z).

    Parameters
    ----------
    x, y : sequence of float, (models,)
        One number per model, for example sharpness and generalisation gap.
    given : sequence of float, (models,) or (quantities, models), optional
        The controls z: for example the training loss, or the training loss and the training error.
    quadratic : bool
        Let Z have the squares of s(z), too, for relations that are not monotone.
    resamples : int
        Resamples of the percentile bootstrap over models.
    level : float
        Coverage of the interval.
    seed : int
        Seed of the bootstrap.

    Returns
    -------
    Correlation
        NaN if x or y is constant, or if z determines one of them.

    Raises
    ------
    ValueError
        Lists differ in length, there are fewer than three models, or entries are NaN or infinite.

    Notes
    -----
    Kendall 1945 for ties, which are counted in the result. Kendall's own partial coefficient (1942),
    :math:`(τ_{xy} - τ_{xz} τ_{yz}) / \sqrt{(1 - τ_{xz}^2)(1 - τ_{yz}^2)}`, does not vanish for quantities that are
    independent given z: if both have a correlation of 0.9 with a normal z it is 0.19, and its bootstrap interval
    excludes 0. The coefficient of the residuals vanishes whenever monotone functions of x, y and z are jointly normal
    (the nonparanormal of Liu, Lafferty and Wasserman 2009). The residuals are resampled, because estimating both
    regressions changes the coefficient only in second order. ``reproduction/power.py`` computes the errors of both.

    Examples
    --------
    A measure that only repeats the training loss says less than its τ with the gap suggests.

    >>> loss = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    >>> gap = [0.30, 0.27, 0.28, 0.22, 0.23, 0.20]
    >>> measure = [6.0, 4.9, 5.5, 4.2, 3.0, 4.1]
    >>> print(kendall(measure, gap))
    Kendall τ +0.73 [...], p = ..., n = 6
    >>> print(kendall(measure, gap, given=loss))
    partial Kendall τ +0.07 [...], p = ..., n = 6
    """
    family = kendall_family({"x": x}, y, given=given, quadratic=quadratic, resamples=resamples, level=level, seed=seed)
    return family["x"]


def kendall_family(
    xs: Mapping[str, Numbers],
    y: Numbers,
    *,
    given: Numbers | Sequence[Numbers] | None = None,
    quadratic: bool = False,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Correlation]:
    """Compute τ of many quantities with one, like :func:`kendall`, with simultaneous intervals.

    Parameters
    ----------
    xs : mapping of str to sequence of float, (models,)
        The family: every quantity that was examined, not only those of interest.
    y, given, quadratic, seed
        As for :func:`kendall`.
    resamples : int
        Resamples of the bootstrap over models, the same for all quantities.
    level : float
        Probability that all intervals contain their coefficients.

    Returns
    -------
    dict of str to Correlation
        Correlations by the names of ``xs``. Each p is that of one coefficient, not corrected. Coefficients that are NaN
        are not part of the family.

    Raises
    ------
    ValueError
        As for :func:`kendall`.

    Notes
    -----
    Balanced simultaneous percentile intervals (Beran 1988): all are of one level β, the smallest at which a share
    ``level`` of the resamples lies within all of them. Measures that order the models similarly hardly widen the
    intervals.

    Examples
    --------
    Of twenty quantities that mean nothing, some have intervals without 0, unless they are corrected.

    >>> import numpy as np
    >>> rng = np.random.default_rng(4)
    >>> xs = {str(i): rng.standard_normal(40) for i in range(20)}
    >>> y = rng.standard_normal(40)
    >>> alone = [kendall(x, y) for x in xs.values()]
    >>> together = kendall_family(xs, y).values()
    >>> [sum(not t.low <= 0 <= t.high for t in found) for found in (alone, together)]
    [2, 0]
    """
    if not xs:
        return {}
    controls = _controls(given)
    *columns, target = _prepared([*xs.items(), ("y", y)], controls, quadratic)
    pairs = [(column, target) for column in columns]
    name = "partial Kendall τ" if controls else "Kendall τ"
    ps = [_p_value(a, b, (1 + quadratic) * len(controls)) for a, b in pairs]
    statistics = [_tau(_signs(a), _signs(b)) for a, b in pairs]
    return dict(zip(xs, _bootstrapped(name, statistics, pairs, ps, resamples, level, seed), strict=True))


def kendall_difference(
    x: Numbers, other: Numbers, y: Numbers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0,
    given: Numbers | Sequence[Numbers] | None = None,
) -> Correlation:  # fmt: skip
    """Compute τ(x, y) − τ(other, y), resampling models for both at once (paired bootstrap); p is NaN.

    Both τ share the models, so their separate intervals say little about the difference.
    """
    a, b, target = _prepared([("x", x), ("other", other), ("y", y)], _controls(given))
    one, two = (_tau(_signs(v), _signs(target)) for v in (a, b))
    p = float("nan")
    return _bootstrapped(
        "difference of τ", [lambda n: one(n) - two(n)], [(a, target)], [p], resamples, level, seed
    )[0]  # fmt: skip


def _controls(given: Numbers | Sequence[Numbers] | None) -> list[Any]:
    """List the controls: none, one, or several."""
    if given is None or not len(given):
        return []
    return list(given) if np.ndim(given[0]) else [given]


def _p_value(a: _Array, b: _Array, controls: int) -> float:
    """Test τ = 0; of residuals by its normal approximation for as many models fewer as there are controls."""
    if np.ptp(a) == 0:
        return float("nan")
    found = scipy.stats.kendalltau(a, b)
    n = len(a) - controls
    if not controls or n < 2:
        return float(found.pvalue) if not controls else float("nan")
    return float(2 * scipy.stats.norm.sf(abs(found.statistic) / (2 * (2 * n + 5) / (9 * n * (n - 1))) ** 0.5))


def _prepared(named: Sequence[tuple[str, Numbers]], controls: Sequence[Any], quadratic: bool = False) -> list[_Array]:
    """Check quantities, and return them or, with controls, their residuals."""
    found = _columns([*named, *((f"given {i}", z) for i, z in enumerate(controls))])
    columns, rest = found[: len(named)], found[len(named) :]
    if not rest:
        return columns
    given = [_normal_scores(z) for z in rest]
    Z = np.column_stack([np.ones(len(rest[0])), *given, *(z**2 for z in given if quadratic)])
    scores = np.column_stack([_normal_scores(v) for v in columns])
    left = scores - Z @ np.linalg.lstsq(Z, scores, rcond=None)[0]
    return list(np.where(np.abs(left) < 1e-9, 0.0, left).T)


def _normal_scores(x: _Array) -> _Array:
    found: _Array = scipy.stats.norm.ppf((scipy.stats.rankdata(x) - 0.5) / len(x))
    return found


def _columns(columns: Sequence[tuple[str, Numbers]]) -> list[_Array]:
    found = [(name, np.asarray(values, dtype=np.float64)) for name, values in columns]
    sizes = ", ".join(f"{name} {a.shape}" for name, a in found)
    if len({a.shape for _, a in found}) > 1 or any(a.ndim != 1 for _, a in found):
        raise ValueError(f"the quantities must be lists of one number per model, of equal length; got shapes {sizes}")
    for name, a in found:
        if len(a) < 3:
            raise ValueError(f"a correlation needs at least 3 models, got {len(a)}")
        if not np.isfinite(a).all():
            raise ValueError(f"{name} has NaN or infinite entries; drop these models first")
    return [a for _, a in found]


def _signs(x: _Array) -> _Array:
    found: _Array = np.sign(x[:, None] - x)
    return found


def _tau(x: _Array, y: _Array) -> _Statistic:
    """τ-b of the signs of all differences, for many resamples at once; copies of one model are tied."""

    def prepared(m: _Array) -> _Array | None:
        """None if all pairs count, but models with themselves."""
        return None if np.count_nonzero(m) == m.size - len(m) and (m >= 0).all() else m.astype(np.float32)

    tables = [prepared(m) for m in (x * y, np.abs(x), np.abs(y))]

    def statistic(counts: Any) -> _Array:
        every = np.einsum("ij->i", counts) ** 2 - np.einsum("ij,ij->i", counts, counts)
        sums = (every if m is None else np.einsum("ij,ij->i", counts @ m, counts) for m in tables)
        score, x_pairs, y_pairs = (s.astype(np.float64) for s in sums)
        both = x_pairs * y_pairs
        found: _Array = score / np.sqrt(np.where(both > 0, both, np.nan))
        return found

    return statistic


@lru_cache(maxsize=32)  # the sizes that the tables of a report take turns with
def _counts(count: int, resamples: int, seed: int) -> Any:
    """Return how often each resample, (resamples, count), has each model: the same for all quantities of a table."""
    chosen = np.random.default_rng(seed).integers(count, size=(resamples, count))
    places = (chosen + count * np.arange(resamples)[:, None]).ravel()
    found = np.bincount(places, minlength=resamples * count).reshape(resamples, count)
    found = found.astype(np.min_scalar_type(count))
    found.flags.writeable = False
    return found


def _bootstrapped(
    name: str, statistics: Sequence[_Statistic], pairs: Sequence[tuple[_Array, _Array]], ps: Sequence[float],
    resamples: int, level: float, seed: int,
) -> list[Correlation]:  # fmt: skip
    """Evaluate statistics on all models and on the same resamples of them.

    scipy.stats.bootstrap is not used: it calls kendalltau for each resample, which takes a hundred times as long, and
    returns no interval if one resample of few models is constant.
    """
    count = len(pairs[0][0])
    counts = _counts(count, resamples, seed)
    values = [float(statistic(np.ones((1, count)))[0]) for statistic in statistics]
    # What is computed of them are whole numbers up to count², exact in single precision where these are below 2²⁴.
    dtype = np.float32 if count < 4096 else np.float64
    parts = np.array_split(counts, resamples // 1000 + 1)  # products of blocks that fit into the cache are faster
    drawn = [[statistic(part) for statistic in statistics] for part in (p.astype(dtype) for p in parts)]
    draws = list(np.concatenate(drawn, axis=1))
    i, j = np.triu_indices(count, 1)
    each = _balanced([d for d, v in zip(draws, values, strict=True) if np.isfinite(v)], level)
    found = []
    for value, pair, p, sample in zip(values, pairs, ps, draws, strict=True):
        sample = sample[np.isfinite(sample)]
        low, high = np.quantile(sample, [(1 - each) / 2, (1 + each) / 2]) if len(sample) else (np.nan, np.nan)
        ties = int(np.any([v[i] == v[j] for v in pair], axis=0).sum())
        found.append(Correlation(name, value, p, float(low), float(high), count, ties))
    return found


def _balanced(draws: Sequence[_Array], level: float) -> float:
    """Find the level of the single intervals at which a share ``level`` of the resamples lies in all of them."""
    if len(draws) < 2 or not len(draws[0]):
        return level
    finite = np.isfinite(draws).all(axis=0)
    count = int(finite.sum())
    if not count:
        return level
    # What lies outside an interval is among the outer 1 − level of its column: only these need ranks.
    outer = min(int(np.ceil((1 - level) * count)), count - 1)
    farthest = np.zeros(count)
    for column in (d[finite] for d in draws):
        ordered = np.sort(column)
        far = np.flatnonzero((column <= ordered[outer]) | (column >= ordered[-1 - outer]))
        ranks = sum(np.searchsorted(ordered, column[far], side) for side in ("left", "right"))
        farthest[far] = np.maximum(farthest[far], np.abs(ranks / count - 1))
    return float(np.quantile(farthest, level))
