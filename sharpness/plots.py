"""Figures. Needs the extra ``plot``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .results import SharpnessResult

__all__ = ["plot_symmetry_demo"]

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
