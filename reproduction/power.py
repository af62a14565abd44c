"""How many models a study of generalisation needs: its decision rule, applied to models drawn at random."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.stats

from sharpness.evaluation import progress_bar

from .statistics import kendall, kendall_family

__all__ = ["LEVEL", "alone", "draw", "power", "resolved"]

_Array = npt.NDArray[np.float64]
#: Level of the intervals of one family. All intervals of two families, one per target, are to hold with probability
#: 0.95 (Bonferroni). Percentile intervals of 48 or 96 models are slightly too short, so 0.975 would not be enough.
LEVEL = 0.985
_MEASURES, _RADII = 6, 2


def draw(rng: np.random.Generator, models: int, effect: float) -> tuple[_Array, _Array, _Array]:
    r"""Draw controls (2, models), measures at their radii (12, models) and a target (models,).

    All are normal. The controls, training loss and error, have a correlation of 0.9; measures and target have one of
    0.85 with their mean, measures one of 0.9 with each other given the controls, as pilots had it, and each measure has
    the conditional Kendall's τ ``effect`` with the target given the controls.

    Parameters
    ----------
    rng : numpy.random.Generator
    models : int
    effect : float
        :math:`τ = \frac{2}{π} \arcsin r` of the conditional correlation r (Greiner 1909).

    Returns
    -------
    tuple of arrays

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> controls, measures, target = draw(rng, 1000, 0.3)
    >>> round(kendall(measures[0], target, given=list(controls), resamples=1).value, 1)
    0.3
    """
    r = math.sin(math.pi * effect / 2)
    common = rng.standard_normal(models)
    controls = math.sqrt(0.9) * common + math.sqrt(0.1) * rng.standard_normal((2, models))
    middle = controls.mean(0) / math.sqrt(0.95)
    count = _MEASURES * _RADII
    shared = rng.standard_normal(models)
    own = math.sqrt(0.9) * shared + math.sqrt(0.1) * rng.standard_normal((count, models))
    # The best linear predictor of the target from all measures is their mean; each has the same r with the target.
    part = r / math.sqrt(0.9)
    left = part * shared + math.sqrt(1 - part**2) * rng.standard_normal(models)
    explained = 0.85
    measures = explained * middle + math.sqrt(1 - explained**2) * own
    target = -explained * middle + math.sqrt(1 - explained**2) * left
    return controls, measures, target


def resolved(controls: _Array, measures: _Array, target: _Array, resamples: int) -> npt.NDArray[np.int64]:
    """Return the sign of each coefficient whose corrected interval excludes 0, else 0: (measures, radii)."""
    named = {str(i): x for i, x in enumerate(measures)}
    found = kendall_family(named, target, given=list(controls), level=LEVEL, resamples=resamples).values()
    signs = [int(np.sign(t.value)) if not t.low <= 0 <= t.high else 0 for t in found]
    return np.array(signs).reshape(-1, _RADII)


def alone(models: int, effect: float, *, studies: int = 400, seed: int = 0) -> float:
    """Simulate one test at one radius, given a third control: the share of 95 % intervals that lie above 0.

    Parameters
    ----------
    models : int
    effect : float
        See :func:`draw`; the third control has a correlation of 0.7 with the first.
    studies, seed : int

    Returns
    -------
    float

    Examples
    --------
    >>> alone(48, 0.5, studies=10) > 0.5
    True
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(studies):
        controls, measures, target = draw(rng, models, effect)
        third = (controls[0] + rng.standard_normal(models)) / math.sqrt(2)
        found.append(kendall(measures[0], target, given=[*controls, third]).low > 0)
    return float(np.mean(found))


def classical(controls: _Array, x: _Array, y: _Array) -> float:
    """Compute Kendall's partial coefficient of 1942, from the inverse of the matrix of all τ."""
    columns = [x, y, *controls]
    taus = np.array([[scipy.stats.kendalltau(a, b).statistic for b in columns] for a in columns])
    inverse = np.linalg.inv(taus)
    return float(-inverse[0, 1] / math.sqrt(inverse[0, 0] * inverse[1, 1]))


def power(
    models: tuple[int, ...] = (48, 96), effects: tuple[float, ...] = (0.0, 0.3, 0.4), *,
    studies: int = 400, resamples: int = 2000, seed: int = 0, progress: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """Apply the rule of the study to simulated zoos.

    Parameters
    ----------
    models, effects : tuple
        Sizes of the zoo, and conditional τ of every measure.
    studies, resamples : int
        Simulated zoos of each kind, and resamples of the bootstrap in each.
    seed : int
    progress : bool
        Show a progress bar.

    Returns
    -------
    list of dict
        For every size and effect the share of zoos in which ``one`` measure (the first) is resolved at both radii with
        one sign, in which ``any`` coefficient is resolved, and mean and standard deviation of the first coefficient and
        of Kendall's coefficient of 1942 instead (``classical``).

    Examples
    --------
    >>> power((48,), (0.7,), studies=3, resamples=200, progress=False)[0]["one"]
    1.0
    """
    rows = []
    with progress_bar(len(models) * len(effects) * studies, "zoos", "zoo", progress=progress) as shown:
        for count in models:
            for effect in effects:
                rng = np.random.default_rng([seed, count, round(100 * effect)])
                one = some = 0
                values = []
                for _ in range(studies):
                    controls, measures, target = draw(rng, count, effect)
                    signs = resolved(controls, measures, target, resamples)
                    one += bool(abs(signs[0].sum()) == _RADII)
                    some += bool(signs.any())
                    tau = kendall(measures[0], target, given=list(controls), resamples=1).value
                    values.append((tau, classical(controls, measures[0], target)))
                    shown.update()
                (mean, old), (spread, old_spread) = np.mean(values, axis=0), np.std(values, axis=0, ddof=1)
                row = {"models": count, "effect": effect, "studies": studies, "one": one / studies}
                row |= {"any": some / studies, "tau": float(mean), "tau_std": float(spread)}
                rows.append({**row, "classical": float(old), "classical_std": float(old_spread)})
    return rows
