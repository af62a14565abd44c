"""The granulated Kendall coefficient, which is small for a measure that follows one hyperparameter alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sharpness.statistics import kendall

__all__ = ["granulated_kendall"]


def granulated_kendall(
    x: Sequence[float], y: Sequence[float], hyperparameters: Mapping[str, Sequence[Any]]
) -> tuple[float, dict[str, float]]:
    r"""Compute the granulated Kendall coefficient of models with several hyperparameters.

    .. math:: Ψ = \operatorname{mean}_i ψ_i, \qquad ψ_i = \operatorname{mean}_{θ_{-i}}\;
              τ\bigl(\{\text{models of settings } θ_{-i} \text{ of all hyperparameters but } i\}\bigr)

    For every hyperparameter i, τ is computed among the models that differ in it alone, and averaged over all
    settings of the others: ψ_i. The coefficient Ψ is the mean of the ψ_i. A measure that merely tracks one
    hyperparameter scores badly on the others.

    Parameters
    ----------
    x, y : sequence of float, (models,)
        One number per model.
    hyperparameters : mapping of str to sequence
        Values by name, one per model.

    Returns
    -------
    (float, dict of str to float)
        Ψ, and ψ by hyperparameter; NaN for a hyperparameter that never varies alone, which Ψ ignores.

    Raises
    ------
    ValueError
        As for :func:`sharpness.statistics.kendall`; or there is no hyperparameter, or one has the wrong number of
        values.

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
    count = kendall(x, y, resamples=0).models
    for name, values in hyperparameters.items():
        if len(values) != count:
            raise ValueError(f"hyperparameter {name!r} has {len(values)} values for {count} models")
    if not hyperparameters:
        raise ValueError("granulated_kendall needs at least one hyperparameter")
    psi = {}
    for name, values in hyperparameters.items():
        others = [v for k, v in hyperparameters.items() if k != name]
        cells: dict[tuple[Any, ...], list[int]] = {}
        for i in range(count):
            cells.setdefault(tuple(v[i] for v in others), []).append(i)
        taus = []
        for members in cells.values():
            pairs = [(i, j) for i, j in itertools.combinations(members, 2) if values[i] != values[j]]
            if pairs:
                taus.append(float(np.mean([np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs])))
        psi[name] = float(np.mean(taus)) if taus else float("nan")
    known = [v for v in psi.values() if np.isfinite(v)]
    return (float(np.mean(known)) if known else float("nan")), psi
