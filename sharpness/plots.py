"""Figures. Needs the extra ``plot``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .comparison import Ranking, compare, curves
from .rows import TARGETS, Row, targets

if TYPE_CHECKING:
    from .results import SharpnessResult

__all__ = ["plot_ablations", "plot_diagonal", "plot_study", "plot_symmetry_demo", "plot_toy"]

COLOURS = {"geodesic-inv": "C0", "geodesic-mix": "C2", "adaptive": "C1", "euclidean": "C3"}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'quotient-manifolds[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_symmetry_demo(
    before: Mapping[str, SharpnessResult],
    after: Mapping[str, SharpnessResult],
    profiles: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: str | os.PathLike[str],
) -> None:
    """Draw the loss along the worst direction of each measure, and what a symmetry does to the sharpness.

    Parameters
    ----------
    before, after : mapping of str to SharpnessResult
        By measure, over several radii: of the network, and of the equivalent one.
    profiles : mapping of str to (radii, losses)
        Loss along the worst direction, by measure.
    path
        Where the figure goes.
    """
    plt = _pyplot()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    for name, (radii, losses) in profiles.items():
        left.plot(radii, losses, color=COLOURS.get(name), label=name)
    left.set(xlabel="distance from the weights, in the measure's metric", ylabel="loss")
    left.set_title("Loss along the worst direction")
    left.legend(frameon=False)
    for name, result in before.items():
        rhos = result.rhos
        one, two = ([found.mean(r) for r in rhos] for found in (result, after[name]))
        middle.loglog(rhos, one, "o-", color=COLOURS.get(name), label=name)
        middle.loglog(rhos, two, "x--", color=COLOURS.get(name))
        change = [max(abs(b / a - 1), 1e-8) if a > 0 else float("nan") for a, b in zip(one, two, strict=True)]
        right.loglog(rhos, change, "o-", color=COLOURS.get(name), label=name)
    middle.set(xlabel="radius ρ", ylabel="sharpness")
    middle.set_title("The network (o) and an equivalent one (x)")
    right.set(xlabel="radius ρ", ylabel="relative change of the sharpness")
    right.axhline(1e-3, color="0.7", linewidth=1)
    right.set_title("What the symmetry changes")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_diagonal(
    rows: Sequence[Mapping[str, float]], table: Mapping[str, Any], rho: float, path: str | os.PathLike[str]
) -> None:
    """Draw the test loss of diagonal networks against closed forms (above) and maxima (below), with τ.

    Parameters
    ----------
    rows : sequence of mapping
        The networks of one seed, as in ``diagonal.csv``.
    table : mapping
        Correlations by column.
    rho : float
        Radius of the row below.
    path
        Where the figure goes.
    """
    plt = _pyplot()
    figure, grid = plt.subplots(2, 3, figsize=(11, 6.5), layout="constrained", sharey=True)
    names = ("adaptive", "inv", "mix")
    columns = [[f"closed {n}" for n in names], [f"max {n} rho={rho:g}" for n in names]]
    colours = [COLOURS["adaptive"], COLOURS["geodesic-inv"], COLOURS["geodesic-mix"]]
    for axes_row, row, kind in zip(grid, columns, ("closed form", "maximum"), strict=True):
        for axes, column, name, colour in zip(axes_row, row, names, colours, strict=True):
            axes.plot([r[column] for r in rows], [r["test_loss"] for r in rows], "o", color=colour, markersize=4)
            first = table[column]["first seed"]
            axes.set_title(
                f"{name}, {kind}: τ = {first['value']:+.2f} [{first['low']:+.2f}, {first['high']:+.2f}]", fontsize=9
            )
            axes.set_xlabel("sharpness")
            axes.set_yscale("log")
            axes.locator_params(axis="x", nbins=4)
            axes.spines[["top", "right"]].set_visible(False)
        axes_row[0].set_ylabel("test loss")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_toy(
    grid: Mapping[str, Any],
    quantities: Mapping[str, Any],
    points: Sequence[tuple[float, float]],
    marks: Mapping[str, Sequence[float]],
    sharpness: Mapping[str, Sequence[float]],
    path: str | os.PathLike[str],
) -> None:
    """Draw the level sets of the toy network's quantities, marked points, and its sharpness over ρ.

    Parameters
    ----------
    grid : mapping
        ``"theta1"`` and ``"theta2"``, two-dimensional arrays.
    quantities : mapping of str to array
        On the grid, by title.
    points : sequence of (θ₁, θ₂)
        Marked in every panel, each with its level set.
    marks : mapping of str to sequence
        The quantities at the points, by title.
    sharpness : mapping of str to sequence
        ``"rho"``, and values by label.
    path
        Where the figure goes.
    """
    plt = _pyplot()
    figure, axes_grid = plt.subplots(2, 3, figsize=(13, 8), layout="constrained")
    panels = axes_grid.ravel()
    for axes, (title, values) in zip(panels, quantities.items(), strict=False):
        drawn = axes.contourf(grid["theta1"], grid["theta2"], values, levels=30, cmap="viridis")
        figure.colorbar(drawn, ax=axes, shrink=0.8)
        for i, (a, b) in enumerate(points):
            level = [marks[title][i]]
            axes.contour(grid["theta1"], grid["theta2"], values, levels=level, colors=f"C{i}", linewidths=1.2)
            axes.plot(a, b, "o", color=f"C{i}", markeredgecolor="white", markersize=7)
        axes.set(title=title, xlabel="θ₁", ylabel="θ₂")
    last = panels[-1]
    for label, values in sharpness.items():
        if label != "rho":
            last.loglog(sharpness["rho"], values, "--" if "closed" in label else "-", label=label)
    last.set(title="geodesic sharpness at the first point", xlabel="ρ")
    last.legend(frameon=False)
    last.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# -- studies of many models --------------------------------------------------------------------------------------------


def plot_study(
    rows: Sequence[Row], target: str, folder: str | os.PathLike[str], *, prefix: str = "", suffix: str = "png"
) -> list[Path]:
    """Draw a sweep: ``scatter``, ``radius``, and, where it has them, ``ablations`` and ``relaxation``.

    Parameters
    ----------
    rows : sequence of mapping
        See :func:`sharpness.rows.read_results`.
    target : str
        What is to be predicted, see :func:`sharpness.rows.targets`.
    folder
        Where the figures go.
    prefix, suffix : str
        Of their names.

    Returns
    -------
    list of Path
    """
    found = compare(rows, target)
    goal = targets(rows, target)

    def path(name: str) -> Path:
        return Path(folder) / f"{prefix}{name}.{suffix}"

    drawn = [_plot_scatter(found, goal, target, path("scatter")), _plot_radius(rows, found, goal, path("radius"))]
    return drawn + plot_ablations(rows, target, folder, prefix=prefix, suffix=suffix, found=found)


def plot_ablations(
    rows: Sequence[Row],
    target: str,
    folder: str | os.PathLike[str],
    *,
    prefix: str = "",
    suffix: str = "png",
    found: Sequence[Ranking] | None = None,
) -> list[Path]:
    """Draw what switches change: ``ablations`` and ``relaxation``, each variant beside the measure itself.

    Parameters
    ----------
    rows, target, folder, prefix, suffix
        As of :func:`plot_study`.
    found : sequence of Ranking, optional
        If :func:`sharpness.comparison.compare` was called already.

    Returns
    -------
    list of Path
        Empty for a sweep without ablations.
    """
    found, goal = compare(rows, target) if found is None else found, targets(rows, target)
    changed = [r for r in found if r.choice == "ρ" and "," in r.quantity]
    relaxed = [r for r in changed if "relaxation" in r.quantity]
    drawn = []
    for name, members in (("ablations", [r for r in changed if r not in relaxed]), ("relaxation", relaxed)):
        if members:
            bases = {(r.quantity.split(",")[0], r.rho) for r in members}
            base = [r for r in found if r.choice == "ρ" and (r.quantity, r.rho) in bases]
            both = sorted([*base, *members], key=lambda r: r.quantity)
            path = Path(folder) / f"{prefix}{name}.{suffix}"
            drawn.append(_plot_grid(both, goal, target, path))
    return drawn


def _scatter(axes: Any, row: Ranking, goal: Mapping[str, float], title: str) -> None:
    colour = COLOURS.get(row.quantity.split(",")[0], "0.4")
    axes.plot(row.values, [goal[m] for m in row.models], "o", color=colour, markersize=4)
    tau = row.tau
    axes.set_title(f"{title}\nτ = {tau.value:+.2f} [{tau.low:+.2f}, {tau.high:+.2f}], p = {tau.p:.1g}", fontsize=8.5)
    axes.locator_params(nbins=4)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_scatter(found: Sequence[Ranking], goal: Mapping[str, float], target: str, path: Path) -> Path:
    """The target against every measure: at its best radius above, at equal rise of the loss below."""
    plt = _pyplot()
    best = [r for r in found if r.choice == "best"] or [r for r in found if r.choice == "–"]
    rises = sorted({r.rise for r in found if r.choice == "equal rise" and r.rise is not None})
    equal = {r.quantity: r for r in found if rises and r.choice == "equal rise" and r.rise == rises[len(rises) // 2]}
    height = 2 if equal else 1
    figure, grid = plt.subplots(
        height, len(best), figsize=(3.2 * len(best), 3.0 * height), layout="constrained", sharey=True, squeeze=False
    )
    for j, row in enumerate(best):
        _scatter(grid[0, j], row, goal, row.quantity if row.rho is None else f"{row.quantity}, best ρ = {row.rho:g}")
        if row.quantity in equal:
            same = equal[row.quantity]
            _scatter(grid[1, j], same, goal, f"median rise {same.rise:.2g} (ρ = {same.rho:.2g})")
    for axes in grid[-1]:
        axes.set_xlabel("sharpness")
    for axes in grid[:, 0]:
        axes.set_ylabel(TARGETS[target])
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _plot_grid(found: Sequence[Ranking], goal: Mapping[str, float], target: str, path: Path) -> Path:
    plt = _pyplot()
    width = min(4, len(found))
    height = -(-len(found) // width)
    figure, grid = plt.subplots(
        height, width, figsize=(3.1 * width, 2.7 * height), layout="constrained", sharey=True, squeeze=False
    )
    for axes, row in zip(grid.ravel(), found, strict=False):
        _scatter(axes, row, goal, f"{row.quantity}, ρ = {row.rho:g}")
    for axes in grid.ravel()[len(found) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(TARGETS[target], fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _plain_ticks(axes: Any, places: Sequence[float], *, clip: bool = False) -> None:
    """Ticks of a logarithmic axis at these places, written as plain numbers; only those in view if asked for."""
    low, high = axes.get_xlim()
    shown = [p for p in places if low <= p <= high] if clip else list(places)
    axes.set_xticks(shown, [f"{p:g}" for p in shown])
    axes.set_xticks([], minor=True)


def _plot_radius(rows: Sequence[Row], found: Sequence[Ranking], goal: Mapping[str, float], path: Path) -> Path:
    """Sharpness of every model along the radius, coloured by the target; and τ along the median rise."""
    plt = _pyplot()
    own = [c for c in curves(rows, ablations=False) if len(c.rho) > 1]
    figure, grid = plt.subplots(
        1, len(own) + 1, figsize=(3.2 * (len(own) + 1), 3.2), layout="constrained", squeeze=False
    )
    low, high = min(goal.values()), max(goal.values())
    for axes, c in zip(grid[0], own, strict=False):
        for model, values in zip(c.models, c.values, strict=True):
            if model in goal:
                colour = plt.get_cmap("viridis")((goal[model] - low) / ((high - low) or 1))
                axes.loglog(c.rho, np.maximum(values, 1e-12), color=colour, linewidth=0.9)
        axes.set(xlabel="radius ρ", title=c.name)
        _plain_ticks(axes, c.rho.tolist())
    if own:
        grid[0, 0].set_ylabel("sharpness (yellow: large target)")
    last = grid[0, -1]
    for c in own:
        points = [(r.rise, r.tau) for r in found if r.choice == "ρ" and r.quantity == c.name and r.rise]
        line = sorted(points, key=lambda p: p[0])
        x, taus = [v for v, _ in line], [t for _, t in line]
        last.semilogx(x, [t.value for t in taus], "o-", color=COLOURS.get(c.measure), label=c.name)
        last.fill_between(x, [t.low for t in taus], [t.high for t in taus], color=COLOURS.get(c.measure), alpha=0.12)
    control = next((r for r in found if r.quantity == "train_loss"), None)
    if control is not None:
        last.axhline(control.tau.value, color="0.5", linestyle="--", label="training loss")
    _plain_ticks(last, [m * 10.0**e for e in range(-6, 2) for m in (1, 3)], clip=True)
    last.set(xlabel="median rise of the loss", ylabel="Kendall τ", title="τ along the radius")
    last.legend(frameon=False, fontsize=8)
    for axes in grid[0]:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
