"""Figures of a sweep: measures against the generalisation gap of many models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from ..comparison import Curves, Ranking, compare, curves
from ..rows import TARGETS, Row, targets
from ..tables import FEWEST_MODELS
from .look import COLOURS, MARKERS, dark_map, figure, plain_ticks

__all__ = ["plot_sweep"]

#: Up to this number of models, the dots are labelled with their names.
_NAMED = 12


def plot_sweep(
    rows: Sequence[Row], target: str, folder: str | os.PathLike[str], *, prefix: str = "", suffix: str = "png"
) -> list[Path]:
    """Draw a sweep: ``scatter``, the target against every measure, and ``radius``, the influence of the radius.

    Parameters
    ----------
    rows : sequence of mapping
        See :func:`sharpness.rows.read_results`.
    target : str
        The quantity to be predicted, see :func:`sharpness.rows.targets`.
    folder : str or path
        Folder for the figures.
    prefix, suffix : str
        Prefix and suffix of their names; the suffix is png, pdf or svg.

    Returns
    -------
    list of Path
        Paths of the figures.

    Raises
    ------
    ValueError
        Fewer than three models have the target.

    Examples
    --------
    Three models, one measure:

    >>> import tempfile
    >>> rows = [{"checkpoint": m, "kind": "fit", "train_error": 0.0, "test_error": 0.1 * m} for m in (1, 2, 3)]
    >>> of = {"kind": "sharpness", "measure": "adaptive", "ablation": {}}
    >>> rows += [{**of, "checkpoint": m, "rho": rho, "sharpness": m * rho} for m in (1, 2, 3) for rho in (0.1, 0.5)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in plot_sweep(rows, "gap", folder)]
    ['scatter.png', 'radius.png']
    """
    found, goal = compare(rows, target), targets(rows, target)
    places = [Path(folder) / f"{prefix}{name}.{suffix}" for name in ("scatter", "radius")]
    _plot_scatter(found, goal, target, places[0])
    _plot_radius([c for c in curves(rows) if not c.ablation and len(c.rho) > 1], found, goal, target, places[1])
    return places


def scatter(axes: Any, row: Ranking, goal: Mapping[str, float], title: str) -> None:
    """Draw the target against a quantity, with τ and, for few models, their names."""
    colour = COLOURS.get(row.quantity.split(",")[0], "0.4")
    marker = MARKERS.get(row.quantity.split(",")[0], "o")
    axes.plot(row.values, [goal[m] for m in row.models], marker, color=colour, markersize=5)
    if len(row.models) <= _NAMED:
        for model, value in zip(row.models, row.values, strict=True):
            axes.annotate(
                Path(str(model)).name,
                (value, goal[model]),
                (4, 3),
                textcoords="offset points",
                fontsize="x-small",
                parse_math=False,
            )
    tau, said = row.tau, "too few to correlate"
    if len(row.models) >= FEWEST_MODELS:
        said = f"τ = {tau.value:+.2f} [{tau.low:+.2f}, {tau.high:+.2f}]"
    axes.set_title(f"{fill(title, 34)}\n{said}", fontsize="small")
    axes.locator_params(nbins=4)


def _plot_scatter(found: Sequence[Ranking], goal: Mapping[str, float], target: str, path: Path) -> None:
    """Draw the target against every measure: at its best radius above, at a matched increase of the loss below."""
    best = [r for r in found if r.choice == "best"] or [r for r in found if r.choice == "–"]
    matched = [r for r in found if r.choice == "matched_increase"]
    increases = sorted({r.loss_increase for r in matched if r.loss_increase is not None})
    middle = {r.quantity: r for r in matched if r.loss_increase == increases[len(increases) // 2]}
    height = 2 if middle else 1
    with figure(path, (3.6 * len(best), 3.6 * height), height, len(best), sharey=True) as (_, grid):
        for j, row in enumerate(best):
            title = row.quantity if row.rho is None else f"{row.quantity}, best ρ = {row.rho:g}"
            scatter(grid[0, j], row, goal, title)
            if row.quantity in middle:
                same = middle[row.quantity]
                title = f"median loss increase {same.loss_increase:.2g} (ρ = {same.rho:.2g})"
                scatter(grid[1, j], same, goal, title)
        for axes, row in zip(grid[-1], best, strict=True):
            axes.set_xlabel("" if row.rho is None else "sharpness")
        for axes in grid[:, 0]:
            axes.set_ylabel(TARGETS[target])


def _plot_radius(
    own: Sequence[Curves], found: Sequence[Ranking], goal: Mapping[str, float], target: str, path: Path
) -> None:
    """Draw every model's sharpness against the radius, coloured by the target; and τ against the median increase."""
    few = len(goal) < FEWEST_MODELS
    panels = len(own) + (not few or not own)
    with figure(path, (3.7 * panels + 0.8, 3.8), 1, panels) as (drawn, grid):
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        colours = ScalarMappable(Normalize(min(goal.values()), max(goal.values())), dark_map())
        for axes, c in zip(grid[0], own, strict=False):
            for model, values in zip(c.models, c.values, strict=True):
                if model in goal:
                    axes.loglog(
                        c.rho, np.maximum(values, 1e-12), color=colours.to_rgba(np.asarray(goal[model])), linewidth=1.2
                    )
            axes.set(xlabel="radius ρ", title=c.name)
            plain_ticks(axes, c.rho.tolist())
        if own:
            grid[0, 0].set_ylabel("sharpness")
            drawn.colorbar(colours, ax=grid[0, len(own) - 1], label=TARGETS[target])
        last = grid[0, -1]
        if few:  # no meaningful correlation
            return
        for c in own:
            at_radii = [r for r in found if r.choice == "ρ" and r.quantity == c.name and r.loss_increase]
            at_radii.sort(key=lambda r: r.loss_increase or 0.0)
            x, taus = [r.loss_increase for r in at_radii], [r.tau for r in at_radii]
            own_colour, marker = COLOURS.get(c.measure), MARKERS.get(c.measure)
            last.semilogx(x, [t.value for t in taus], marker=marker, color=own_colour, label=c.name)
            last.fill_between(x, [t.low for t in taus], [t.high for t in taus], color=own_colour, alpha=0.12)
        control = next((r for r in found if r.quantity == "train_loss"), None)
        if control is not None:
            last.axhline(control.tau.value, color="0.5", linestyle="--", label="training loss")
        plain_ticks(last)
        last.set(xlabel="median loss increase", ylabel="Kendall τ", title="τ along the radius")
        last.legend()
