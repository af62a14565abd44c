"""The value of a model and of its twin."""

import sharpness
from sharpness import get_measure


def values(trained, measure="geodesic-inv", **options):
    """Value of the model and of its twin on the same orbit, with changes of the measure among the options."""
    model, twin, batch = trained
    changes = {k: options.pop(k) for k in list(options) if k in ("geodesic", "symmetry")}
    options = {"measure": get_measure(measure, **changes), "rho": 0.1, "steps": 4, "relative_tol": 0, **options}
    return tuple(float(sharpness.evaluate(m, [batch], **options)) for m in (model, twin))
