"""Rank correlations over models, with their intervals, also given other quantities (Kendall's τ)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]
Numbers = Sequence[float] | npt.NDArray[np.floating[Any]]
_RESAMPLES = 10_000


class Correlation(NamedTuple):
    """A rank correlation over models.

    Attributes
    ----------
    value : float
        Kendall's τ-b; NaN if one of the quantities is constant.
    low, high : float
        Percentile bootstrap interval over models.
    p : float
        Two-sided p-value of no association; NaN given other quantities.

    Examples
    --------
    >>> kendall([1, 2, 3, 4], [1, 2, 3, 4]).value
    1.0
    """

    value: float
    low: float
    high: float
    p: float


def kendall(x: Numbers, y: Numbers, given: Sequence[Numbers] = (), level: float = 0.95) -> Correlation:
    r"""Compute Kendall's τ-b of two quantities over models, or of their residuals given other quantities z.

    .. math:: τ_{xy \cdot z} = τ_{e(x), e(y)}, \qquad e(x) = s(x) - Z (Z^T Z)^{-1} Z^T s(x)

    with normal scores :math:`s(x)_i = Φ^{-1}((\operatorname{rank}(x_i) - 1/2)/n)` and Z the columns 1 and s(z).

    Parameters
    ----------
    x, y : sequence of float, (models,)
        One number per model, for example sharpness and generalisation gap.
    given : sequence of sequence of float, (quantities, models)
        The controls z.
    level : float
        Coverage of the interval, by the percentile bootstrap over models with 10,000 resamples.

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
    Kendall's own partial coefficient of 1942 does not vanish for quantities that are independent given z. That of the
    residuals vanishes whenever monotone functions of x, y and z are jointly normal (Liu, Lafferty, Wasserman 2009).

    Examples
    --------
    A measure that only repeats the training loss says less than its τ with the gap suggests.

    >>> loss = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    >>> gap = [0.30, 0.27, 0.28, 0.22, 0.23, 0.20]
    >>> measure = [6.0, 4.9, 5.5, 4.2, 3.0, 4.1]
    >>> round(kendall(measure, gap).value, 2), round(kendall(measure, gap, [loss]).value, 2)
    (0.73, 0.07)
    """
    import scipy.stats  # takes a second, for which no other command should wait

    table = np.array([x, y, *given], dtype=np.float64)
    if table.shape[1] < 3 or not np.isfinite(table).all():
        raise ValueError("a correlation needs at least 3 models, and finite numbers")
    if len(given):
        ranks = scipy.stats.rankdata(table, axis=1)
        scores = scipy.stats.norm.ppf((ranks - 0.5) / table.shape[1]).T
        Z = np.column_stack([np.ones(len(scores)), scores[:, 2:]])
        left = scores[:, :2] - Z @ np.linalg.lstsq(Z, scores[:, :2], rcond=None)[0]
        table = np.where(np.abs(left) < 1e-9, 0.0, left).T
    sx, sy = (np.sign(v[:, None] - v) for v in table[:2])

    def tau(counts: _Array) -> _Array:
        """τ-b of resamples, from how often they hold each model, (resamples, models): copies of a model are tied."""
        score, x_pairs, y_pairs = (((counts @ m) * counts).sum(1) for m in (sx * sy, np.abs(sx), np.abs(sy)))
        pairs = np.sqrt(x_pairs * y_pairs)
        return score / np.where(pairs > 0, pairs, np.nan)

    value = float(tau(np.ones((1, len(sx))))[0])
    drawn = tau(_resampled(len(sx)))
    if not math.isfinite(value) or np.isnan(drawn).all():
        return Correlation(value, math.nan, math.nan, math.nan)
    low, high = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    p = math.nan if len(given) else float(scipy.stats.kendalltau(*table).pvalue)
    return Correlation(value, float(low), float(high), p)


@lru_cache(maxsize=4)
def _resampled(count: int) -> _Array:
    """Return how often each resample has each model: the same for all quantities of a table."""
    chosen = np.random.default_rng(0).integers(count, size=(_RESAMPLES, count))
    return np.stack([np.bincount(row, minlength=count) for row in chosen]).astype(np.float64)
