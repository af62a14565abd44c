"""Radii by a rule: the median model's loss increases by a given amount there, as found on three models of a zoo."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import sharpness
from sharpness.data import load_examples
from sharpness.evaluation import progress_bar
from sharpness.files import write_json
from sharpness.losses import RadiusError
from sharpness.models import load
from sharpness.results import LEAVES
from sharpness.study import Checkpoint, Sweep, read_config, read_rows
from sharpness.study.rows import Row

__all__ = ["LEVELS", "PRIMARY", "choose_radii", "median_models", "radius_at", "radius_of_levels", "tested"]

#: Increases of the loss, in nats.
LEVELS = (0.1, 0.5)
HESSIANS = ["riemannian-hessian", "euclidean-hessian"]
#: Of the searches, for radii as for the measurements.
TOLERANCE = 1e-3
PRIMARY = ("euclidean", "adaptive", "geodesic-inv", "geodesic-mix", "complete-inv", "complete-mix")


def median_models(rows: Sequence[Row]) -> list[str]:
    """Find the models at the quartiles of the training loss.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of the kind ``"fit"``, of which only the training losses are read.

    Returns
    -------
    list of str
        Three checkpoints.

    Examples
    --------
    >>> rows = [{"checkpoint": f"m{i}", "kind": "fit", "train_loss": 0.1 * i} for i in range(9)]
    >>> median_models(rows)
    ['m2', 'm4', 'm6']
    """
    losses = {r["checkpoint"]: r["train_loss"] for r in rows if r["kind"] == "fit"}
    if len(losses) < 3:
        raise ValueError(f"only {len(losses)} models have a training loss, but radii are found on three")
    names = sorted(losses, key=lambda m: (losses[m], m))
    return [names[(len(names) - 1) * k // 4] for k in (1, 2, 3)]


def tested(zoo: Path) -> tuple[list[Row], dict[str, str]]:
    """Read the fits of a zoo's models that count, and why others do not, by checkpoint.

    The plan leaves out models whose losses are not finite, and those whose training error is no better than that of
    always naming the most frequent class.

    Parameters
    ----------
    zoo : Path
        A zoo from :func:`reproduction.zoo.build`.

    Returns
    -------
    tuple of list of dict and dict of str to str
        Models that were not tested are in neither.
    """
    sweep = read_config(zoo / "models" / "results.json")
    failed = [f for f in read_rows(zoo / "results", sweep, failed=True) if f["kind"] == "fit"]
    out = {f["checkpoint"]: "its losses are not finite" for f in failed if "the model has diverged" in f["error"]}
    fits = [r for r in read_rows(zoo / "results", sweep) if r["kind"] == "fit"]
    guess = guess_error(sweep)
    out |= {r["checkpoint"]: "it has learned nothing" for r in fits if not r["train_error"] < guess}
    return [r for r in fits if r["checkpoint"] not in out], out


def guess_error(sweep: Sweep) -> float:
    """Compute the training error of always naming the most frequent class of a sweep's training data."""
    first, data = sweep.checkpoints[0], sweep.train or sweep.data
    examples = load_examples(data, load(first.model, first.weights))
    batch = examples.batch(examples.choose(data.num_examples, data.subset_seed))
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    return 1 - float(labels.bincount().max()) / len(labels)


def radius_at(level: float, increase: Callable[[float], float], start: float, *, most: int = 10) -> float | None:
    """Find the radius of a given increase of the loss, by log–log interpolation between two neighbouring radii.

    Parameters
    ----------
    level : float
        The increase.
    increase : callable
        Function from a radius to the increase of the loss; raises ``RadiusError`` if the radius is too large.
    start : float
        First radius; the next are halved or doubled until two of them bracket the level.
    most : int
        Largest number of radii to try.

    Returns
    -------
    float or None
        The radius to three digits; None if the level is not reached.

    Examples
    --------
    >>> radius_at(0.5, lambda rho: rho**2, start=0.05)
    0.707
    >>> radius_at(0.5, lambda rho: min(rho, 0.3), start=0.05) is None
    True
    """
    tried: dict[float, float] = {}
    rho, too_large = start, math.inf
    for _ in range(most):
        try:
            tried[rho] = max(increase(rho), 1e-300)
        except RadiusError:
            too_large = rho
        below, above = ([r for r in tried if (tried[r] < level) == small] for small in (True, False))
        if below and above:
            low, high = max(below), min(above)
            share = math.log(level / tried[low]) / math.log(tried[high] / tried[low])
            return float(f"{low * (high / low) ** share:.3g}")
        rho = 2 * max(below) if below else min([*above, too_large]) / 2
        if rho >= too_large:  # the level may still lie between the largest valid radius and an invalid one
            rho = (max(below) + too_large) / 2
    return None


def radius_of_levels(sweep: Sweep, models: Sequence[Checkpoint], measure: str) -> list[float]:
    """Find the radii at which the median of a measure over models reaches the levels; unreachable levels are left out.

    Parameters
    ----------
    sweep : Sweep
        Its data, device and settings are used.
    models : sequence of Checkpoint
    measure : str

    Returns
    -------
    list of float
        Radii for :data:`LEVELS`, in their order; none at which the ball leaves the manifold of one of the models.
    """
    loaded = [load(c.model, c.weights) for c in models]
    batches = [sweep.data.load(found, sweep.device) for found in loaded]
    for found in loaded:
        found.model.to(sweep.device).eval()
    known: dict[float, float] = {}
    limit = math.inf  # what is beyond it is not searched: the ball leaves the manifold of a model
    settings: dict[str, Any] = {**sweep.settings, "relative_tol": TOLERANCE}

    def value(model: Any, batch: Any, rho: float) -> float:
        nonlocal limit
        if rho <= limit:
            result = sharpness.evaluate(
                model, batch, measure=measure, rho=rho, keep_directions=False, progress=False, **settings
            )
            if result.measure.pair_metric == "mix" and result.min_singular_value:
                limit = min(limit, LEAVES * result.min_singular_value)
            if rho <= limit:
                return float(result)
        raise RadiusError(f"at ρ = {rho:g} the ball leaves the manifold, as it does beyond {limit:.3g}")

    def increase(rho: float) -> float:
        if rho not in known:
            known[rho] = median(value(found.model, b, rho) for found, b in zip(loaded, batches, strict=True))
        return known[rho]

    start = sharpness.get_measure(measure).rho or 0.1
    radii = (radius_at(level, increase, start) for level in LEVELS)
    return [rho for rho in radii if rho is not None]


def choose_radii(zoo: Path, *, measures: Sequence[str] = PRIMARY, device: str = "cpu", progress: bool = True) -> Path:
    """Write the configurations that measure a zoo: with radii by the rule, and of Hessians.

    Parameters
    ----------
    zoo : Path
        A zoo from :func:`reproduction.zoo.build`.
    measures : sequence of str
    device : str
        Device for the searches, and for the sweeps of both configurations.
    progress : bool
        Show a progress bar.

    Returns
    -------
    Path
        Path of the first configuration, ``models/measure.json``. Results belong in ``results``, where losses and errors
        are, of the models that the plan does not leave out. Measures with known radii are kept.
        ``models/hessian.json`` uses a quarter of the examples.

    Raises
    ------
    ValueError
        Fewer than three models were tested.
    """
    path = zoo / "models" / "measure.json"
    sweep = msgspec.structs.replace(read_config(zoo / "models" / "sweep.json"), device=device)
    base = json.loads((zoo / "models" / "sweep.json").read_text(encoding="utf-8")) | {"device": device}
    radii = json.loads(path.read_text(encoding="utf-8"))["rho"] if path.is_file() else {}
    fits, left_out = tested(zoo)
    base["checkpoints"] = [{**base["checkpoints"][0], "path": r["checkpoint"]} for r in fits]
    missing = [c.name for c in sweep.checkpoints if c.name not in {*left_out, *(r["checkpoint"] for r in fits)}]
    if missing and not set(measures) <= set(radii):
        raise ValueError(
            f"{len(missing)} of {len(sweep.checkpoints)} models of {zoo} have no training loss yet ({missing[0]}, …); "
            "finish `python -m reproduction zoo` first, because the radii depend on the whole zoo"
        )
    with progress_bar(len(measures), "radii", "measure", progress=progress) as shown:
        for measure in measures:
            if measure not in radii:
                models = [c for c in sweep.checkpoints if c.name in median_models(fits)]
                radii[measure] = radius_of_levels(sweep, models, measure)
            own = {"measures": [m for m in radii if radii[m]] + ["gradient-norm"], "rho": radii}
            write_json(path, base | own | {"relative_tol": TOLERANCE})
            shown.update()
    part = {k: v for k, v in base.items() if k not in ("rho", "train", "test", "initial", "baselines")}
    few = base["data"]["num_examples"] // 4
    local = {"measures": HESSIANS, "data": base["data"] | {"num_examples": few, "batch_size": few}}
    write_json(path.with_name("hessian.json"), part | local)
    return path
