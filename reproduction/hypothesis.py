"""The hypothesis for ``minilm``, fixed before it was measured: the test that decides it, and what stands beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from sharpness.study import targets
from sharpness.study.rows import Row

from .comparison import CONTROLS, curves
from .statistics import Correlation, kendall

__all__ = ["GIVEN", "answer", "hypothesis"]

#: What is controlled for: sharpness follows the distance from the initial weights, too.
GIVEN = (*CONTROLS, "distance")
_MEASURE, _TARGET = "complete-inv", "test-loss"
#: An interval below it refutes.
_SLIGHT = 0.1


def answer(tau: Correlation) -> str:
    """Tell whether an interval confirms a positive coefficient, refutes one of any size, or leaves it unresolved.

    Examples
    --------
    >>> [answer(Correlation("τ", 0.0, 0.0, *ends, 48, 0)) for ends in ((0.01, 0.4), (-0.3, 0.09), (-0.1, 0.3))]
    ['confirmed', 'refuted', 'unresolved']
    """
    return "confirmed" if tau.low > 0 else "refuted" if tau.high < _SLIGHT else "unresolved"


def hypothesis(rows: Sequence[Row], seen: Collection[str] = ()) -> pd.DataFrame:
    """Test whether models that are sharper by complete-inv have the larger test loss, given loss, error and distance.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of a zoo at radii chosen by the rule; the largest radius counts.
    seen : collection of str
        Models that had been measured before the hypothesis was written down.

    Returns
    -------
    pandas.DataFrame
        The first row decides: partial τ with its 95 % interval of 10,000 resamples, and the answer. The others,
        without the models seen and with squared controls, decide nothing.

    Raises
    ------
    ValueError
        No model has been measured by complete-inv.
    """
    curve = next((c for c in curves(rows) if c.name == _MEASURE), None)
    if curve is None:
        raise ValueError(f"no model has been measured by {_MEASURE}")
    values, goal = dict(zip(curve.models, curve.values[:, -1], strict=True)), targets(rows, _TARGET)
    known = {r["checkpoint"]: {**r} for r in rows if r["kind"] == "fit"}
    for r in rows:
        if r["kind"] == "baselines":
            known.setdefault(r["checkpoint"], {})["distance"] = r["distance"]
    every = [m for m in goal if m in values]
    lines: list[dict[str, Any]] = []
    for models in (every, [m for m in every if m not in seen]):
        for quadratic in (False, True):
            columns = ([of[m] for m in models] for of in (values, goal))
            given = [[known[m][control] for m in models] for control in GIVEN]
            tau = kendall(*columns, given=given, quadratic=quadratic, resamples=10_000)
            said = "–" if lines else answer(tau)
            form = "with squares" if quadratic else "training loss, training error, distance"
            of = {"models": len(models), "controls": form}
            lines.append({**of, "τ": tau.value, "low": tau.low, "high": tau.high, "answer": said})
        if not seen:
            break
    return pd.DataFrame(lines)
