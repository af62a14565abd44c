"""Rows of a sweep whose comparison is known beforehand."""

import numpy as np


def study(models=12, seed=0):
    """Gaps g; "adaptive" rises like (c ρ)², and "geodesic-inv" is the same quantity at a tenth of the radius."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(models):
        gap, power = rng.uniform(0.1, 0.4), rng.uniform(1.2, 2.8)
        name = f"m{i:02d}"
        rows.append(
            {
                "checkpoint": name, "kind": "fit", "train_loss": 0.3 + rng.normal() / 50, "train_error": 0.1,
                "test_loss": 1.0, "test_error": 0.1 + gap, "seconds": 1.0,
            }
        )  # fmt: skip
        rows.append({"checkpoint": name, "kind": "baselines", "weight_norm": rng.uniform(), "relative_flatness": None})
        for measure, unit, radii in (("adaptive", 1.0, (0.05, 0.5, 5.0)), ("geodesic-inv", 10.0, (0.01, 0.1, 1.0))):
            rows += [
                {
                    "checkpoint": name, "kind": "sharpness", "measure": f"{measure}{what}", "rho": rho,
                    "sharpness": gap * (unit * rho) ** power * factor, "passes": 7, "unconverged": 0,
                }
                for what, factor in (("", 1.0), (", statistic = average", 0.5))
                for rho in radii
            ]  # fmt: skip
    return rows
