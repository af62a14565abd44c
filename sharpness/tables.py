"""Results in words: the table of a result, and the remarks below it."""

from __future__ import annotations

from dataclasses import fields
from statistics import fmean
from typing import TYPE_CHECKING

from .measures import Measure

if TYPE_CHECKING:
    from .results import SharpnessResult

__all__ = ["result_table"]

_DEFAULTS = {f.name: f.default for f in fields(Measure)}


def result_table(result: SharpnessResult) -> str:
    """Write a result as a table with a row a radius."""
    count = len(result.batches) // len(result.rhos)
    batches = f"{count} batch{'es' * (count > 1)}"
    lines = [
        f"{result.measure.name} sharpness of {result.model}: {batches}, {_effort(result)}, seed {result.search.seed}"
    ]
    switched = _switches(result.measure)
    if switched:
        lines.append(", ".join(switched))
    worst = "worst loss" if result.statistic == "worst" else "mean loss"
    lines.append(f"{'rho':>10}  {'base loss':>10}  {worst:>10}  {'sharpness':>10}  {'error rate':>16}  {'passes':>7}")
    for rho in result.rhos:
        found = result[rho].batches
        base, value = fmean(b.base_loss for b in found), float(result[rho])
        errors = "-"
        if all(b.worst_error is not None for b in found):
            before, after = fmean(b.base_error or 0.0 for b in found), fmean(b.worst_error or 0.0 for b in found)
            errors = f"{before:.1%} → {after:.1%}"
        passes = fmean(b.passes for b in found)
        lines.append(
            f"{rho:>10.4g}  {base:>10.5f}  {base + value:>10.5f}  {value:>10.5f}  {errors:>16}  {passes:>7.1f}"
        )
    return "\n".join(lines + _remarks(result))


def _effort(result: SharpnessResult) -> str:
    search = result.search
    if result.statistic == "average":
        return f"mean of {search.num_samples} Gaussian directions"
    stop = f" or until {search.relative_tol:g} of the increase" if search.relative_tol else ""
    starts = f", {search.restarts} restart{'s' * (search.restarts > 1)}" * bool(search.restarts)
    return f"{search.ascent} ascent of {search.steps} steps{stop}{starts}"


def _switches(measure: Measure) -> list[str]:
    """Name what of the measure is worth naming beside its name."""
    found = [f"{measure.geodesic} geodesics"] if measure.divides else []
    switches = ("symmetry", "relaxation", "ball_norm", "pair_block")
    return found + [f"{k}={getattr(measure, k)}" for k in switches if getattr(measure, k) != _DEFAULTS[k]]


def _remarks(result: SharpnessResult) -> list[str]:
    lines, batches = [], result.batches
    if result.measure.pair_metric == "mix" and result.min_singular_value:
        top = max(result.rhos) * result.measure.metric_scale**-0.5 / result.min_singular_value
        lines.append(f"largest rho over the smallest singular value of a pair: {top:.3g}")
        if top > 2**-0.5:
            lines.append(
                "beyond 0.71 the ball of the mix metric leaves the manifold: the largest radii measure the "
                "breakdown of its retraction, not the network"
            )
    if result.num_clamped:
        lines.append(f"the metric's floor replaces {result.num_clamped} singular values of pairs")
    if result.num_null:
        lines.append(f"{result.num_null} directions of pairs are at rounding level and count as absent")
    for count, what in (
        (
            sum(b.random_start for b in batches),
            "ascents began in a random direction: the gradient at the weights was at rounding level",
        ),
        (
            sum(b.num_exited_pairs > 0 for b in batches),
            "worst points have pairs whose geodesic would leave the manifold; it was shortened",
        ),
        (
            sum(b.converged is False for b in batches),
            "ascents used all their steps; more may raise their value",
        ),
    ):
        if count:
            lines.append(f"{count} of {len(batches)} {what}")
    return lines
