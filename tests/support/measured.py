"""The value of a model and of its twin."""

import functools

import sharpness
from sharpness import get_measure


def values(trained, measure="geodesic-inv", **options):
    """Value of the model and of its twin on the same orbit, with changes of the measure among the options."""
    model, twin, batch = trained
    changes = {k: options.pop(k) for k in list(options) if k in ("geodesic", "symmetry")}
    worst = {} if "statistic" in options else {"statistic": sharpness.evaluate, "steps": 3, "relative_tol": 0}
    options = {"rho": 0.1, **worst, **options}
    return tuple(_value(m, batch, get_measure(measure, **changes), **options) for m in (model, twin))


@functools.cache
def _value(model, batch, measure, statistic, **options):
    """What several tests of one model ask for, which no test changes."""
    return float(statistic(model, [batch], measure=measure, **options))
