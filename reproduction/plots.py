"""Figures of the paper's studies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize

from quotient_manifolds.symmetries import ModelDistance
from sharpness.plots import COLOURS, MARKERS, figure
from sharpness.study import TARGETS, measurements, tables, targets
from sharpness.study.rows import Row

from .comparison import Ranking, compare

__all__ = ["plot_ablations", "plot_diagonal", "plot_distances", "plot_orbit", "plot_radii", "plot_toy"]


def plain_ticks(axes: Any, places: Sequence[float] | None = None) -> None:
    """Set ticks of a logarithmic x-axis as plain numbers: at these places, or at every 10ⁿ and 3·10ⁿ in view.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
    places : sequence of float, optional

    Examples
    --------
    >>> with figure(None, (4, 3)) as (drawn, ((axes,),)):
    ...     line = axes.semilogx([0.1, 1], [0, 1])
    ...     plain_ticks(axes, [0.1, 1])
    >>> [label.get_text() for label in axes.get_xticklabels()]
    ['0.1', '1']
    """
    if places is None:
        low, high = axes.get_xlim()
        places = [x for n in range(-6, 3) for x in (10.0**n, 3 * 10.0**n) if low <= x <= high]
    axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.set_xticks([], minor=True)


def plot_diagonal(
    rows: Sequence[Mapping[str, float]], table: Mapping[str, Any], rho: float, path: str | os.PathLike[str]
) -> None:
    """Draw the test loss of diagonal networks against closed forms (above) and maxima (below), with τ.

    Parameters
    ----------
    rows : sequence of mapping
        The networks of one seed, as in ``diagonal.csv``.
    table : mapping
        Correlations by column, as in ``diagonal.json``.
    rho : float
        Radius of the row below.
    path : str or path
        Where the figure goes.

    Notes
    -----
    Paper, Figure 3, with the maxima beside its closed forms.

    Examples
    --------
    >>> import tempfile
    >>> names = ("adaptive", "inv", "mix")
    >>> columns = [f"closed {n}" for n in names] + [f"max {n} rho=0.1" for n in names]
    >>> rows = [{"test_loss": loss, **dict.fromkeys(columns, 3 * loss)} for loss in (0.1, 0.2, 0.4)]
    >>> table = dict.fromkeys(columns, {"first seed": {"value": 1.0, "low": 1.0, "high": 1.0}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_diagonal(rows, table, 0.1, f"{folder}/diagonal.png")
    """
    names = {"adaptive": "adaptive", "inv": "geodesic-inv", "mix": "geodesic-mix"}
    columns = [[f"closed {n}" for n in names], [f"max {n} rho={rho:g}" for n in names]]
    with figure(path, (11, 7), 2, 3, sharey=True) as (_, grid):
        for axes_row, row, kind in zip(grid, columns, ("closed form", "maximum"), strict=True):
            for axes, column, (name, measure) in zip(axes_row, row, names.items(), strict=True):
                axes.plot(
                    [r[column] for r in rows], [r["test_loss"] for r in rows],
                    MARKERS[measure], color=COLOURS[measure], markersize=5,
                )  # fmt: skip
                first = table[column]["first seed"]
                axes.set_title(f"{name}, {kind}\nτ = {first['value']:+.2f} [{first['low']:+.2f}, {first['high']:+.2f}]")
                axes.set(xlabel="sharpness", yscale="log")
                axes.locator_params(axis="x", nbins=4)
            axes_row[0].set_ylabel("test loss")


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
    path : str or path
        Where the figure goes.

    Examples
    --------
    The loss of the network x ↦ θ₂θ₁x, whose level sets are the orbits of its symmetry:

    >>> import numpy as np, tempfile
    >>> a, b = np.meshgrid(np.linspace(0.5, 2, 20), np.linspace(0.5, 2, 20))
    >>> points = [(1.0, 1.5), (1.5, 1.0)]
    >>> losses = [(x * y - 1) ** 2 for x, y in points]
    >>> line = {"rho": [0.1, 0.2], "measured": [0.2, 0.5]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_toy({"theta1": a, "theta2": b}, {"loss": (a * b - 1) ** 2}, points, {"loss": losses}, line,
    ...              f"{folder}/toy.png")
    """
    with figure(path, (13, 8), 2, 3) as (drawn, axes_grid):
        panels = axes_grid.ravel()
        for axes, (title, values) in zip(panels, quantities.items(), strict=False):
            filled = axes.contourf(grid["theta1"], grid["theta2"], values, levels=30, cmap="Greys", alpha=0.8)
            drawn.colorbar(filled, ax=axes, shrink=0.8)
            for i, (a, b) in enumerate(points):
                level = [marks[title][i]]
                axes.contour(grid["theta1"], grid["theta2"], values, levels=level, colors=f"C{i}", linewidths=1.8)
                axes.plot(a, b, "osD^vP"[i % 6], color=f"C{i}", markeredgecolor="white", markersize=9)
            axes.set(title=title, xlabel="θ₁", ylabel="θ₂")
        last = panels[-1]
        for label, values in sharpness.items():
            if label != "rho":
                last.loglog(sharpness["rho"], values, "--" if "closed" in label else "-", label=label)
        last.set(title="sharpness at the first point", xlabel="ρ")
        last.legend(loc="lower right", fontsize="x-small")


def plot_orbit(path: str | os.PathLike[str] | None = None, *, rho: float = 0.25) -> Any:
    r"""Draw why sharpness needs the quotient: the network x ↦ θ₂θ₁x, two equivalent points, and balls around them.

    The loss is :math:`(θ_1 θ_2 - 1)^2`; all points of a hyperbola, which is an orbit, are the same network. Euclidean
    balls around two equivalent points cross different ranges of orbits; geodesic balls around them are the same band of
    orbits, :math:`β e^{\pm\sqrt 2 ρ}` in the inv metric.

    Parameters
    ----------
    path : optional
        File for the figure; by default it is only returned.
    rho : float
        Radius of the balls.

    Returns
    -------
    matplotlib.figure.Figure

    Notes
    -----
    Paper, Figure 1 and §5.1.

    Examples
    --------
    >>> drawn = plot_orbit(rho=0.2)
    """
    axis = np.linspace(0.02, 3.6, 400)
    first, second = np.meshgrid(axis, axis)
    angle = np.linspace(0, 2 * np.pi, 361)
    circle = rho * np.stack([np.cos(angle), np.sin(angle)])
    points = {"A": (1.0, 1.0), "B": (3.0, 1 / 3)}
    low, high = np.exp(-(2**0.5) * rho), np.exp(2**0.5 * rho)
    with figure(path, (11.5, 5.2), 1, 2, gridspec_kw={"width_ratios": [1.15, 1]}) as (drawn, ((plane, line),)):
        levels = [0, 0.02, 0.1, 0.3, 0.7, 1.4, 2.5, 4, 8]
        plane.contourf(first, second, (first * second - 1) ** 2, levels=levels, cmap="Greys", extend="max", alpha=0.55)
        plane.fill_between(axis, low / axis, high / axis, color=COLOURS["geodesic-inv"], alpha=0.3, linewidth=0)
        plane.plot(axis, 1 / axis, color=COLOURS["geodesic-inv"], linewidth=2.2)
        offsets = {"A": (30, 44), "B": (-66, 66)}
        for name, (a, b) in points.items():
            ball = np.array([[a], [b]]) + circle
            worst = float(((ball[0] * ball[1] - 1) ** 2).max())
            plane.plot(*ball, color=COLOURS["euclidean"], linewidth=2.2)
            plane.plot(a, b, "o", color="black", markersize=7)
            plane.annotate(
                f"{name}: worst loss in\nthe circle {worst:.2f}", (a, b), xytext=offsets[name],
                textcoords="offset points", bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "0.7"},
                fontsize="small",
            )  # fmt: skip
        plane.set(xlim=(0, 3.6), ylim=(0, 2.6), xlabel="θ₁", ylabel="θ₂", title="A and B are the same network")
        t = np.linspace(-0.75, 0.55, 200)
        line.axvspan(-rho, rho, color=COLOURS["geodesic-inv"], alpha=0.3, linewidth=0)
        line.plot(t, (np.exp(2**0.5 * t) - 1) ** 2, color="black")
        edge = float((high - 1) ** 2)
        line.plot(rho, edge, "s", color=COLOURS["geodesic-inv"], markersize=9)
        line.annotate(
            f"worst loss in the\ngeodesic ball {edge:.2f},\nfor A and for B", (rho, edge), xytext=(-168, 60),
            textcoords="offset points", arrowprops={"arrowstyle": "-", "color": "0.4"}, fontsize="small",
        )  # fmt: skip
        line.plot(0, 0, "o", color="black", markersize=7)
        line.set(xlabel="distance in the quotient", ylabel="loss", title="The space of networks: one point")
    return drawn


def _scatter(axes: Any, row: Ranking, goal: Mapping[str, float]) -> None:
    """Draw the target against a quantity, with τ."""
    measure = row.quantity.split(",")[0]
    colour, marker = COLOURS.get(measure, "0.4"), MARKERS.get(measure, "o")
    axes.plot(row.values, [goal[m] for m in row.models], marker, color=colour, markersize=5)
    said = f"τ = {row.tau.value:+.2f} [{row.tau.low:+.2f}, {row.tau.high:+.2f}]"
    axes.set_title(f"{fill(f'{row.quantity}, ρ = {row.rho:g}', 34)}\n{said}", fontsize="small")
    axes.locator_params(nbins=4)


def plot_radii(rows: Sequence[Row], target: str, path: str | os.PathLike[str]) -> Any:
    """Draw every model's sharpness against the radius, coloured by the target; and τ against the median increase.

    Parameters
    ----------
    rows, target, path
        As for :func:`sharpness.study.plot_sweep`.

    Returns
    -------
    matplotlib.figure.Figure
    """
    found, goal = tables.compare(rows, target), targets(rows, target)
    frame = measurements([row for row in rows if row["kind"] == "sharpness" and not row["ablation"]])
    frame = frame[frame["checkpoint"].isin(goal) & (frame["rho"] > 0)]
    parts = [(quantity, part) for quantity, part in frame.groupby("quantity") if part["rho"].nunique() > 1]
    few = len(goal) < tables.FEWEST_MODELS
    panels = len(parts) + (not few or not parts)
    with figure(path, (3.7 * panels + 0.8, 3.8), 1, panels) as (drawn, grid):
        dark = ListedColormap(colormaps["viridis"](np.linspace(0, 0.75, 256)))  # without its yellow end
        colours, last = ScalarMappable(Normalize(min(goal.values()), max(goal.values())), dark), grid[0, -1]
        for axes, (quantity, part) in zip(grid[0], parts, strict=False):
            for model, line in part.sort_values("rho").groupby("checkpoint"):
                colour = colours.to_rgba(np.asarray(goal[model]))
                axes.loglog(line["rho"], line["value"].clip(1e-12), color=colour, linewidth=1.2)
            axes.set(xlabel="radius ρ", title=quantity)
            plain_ticks(axes, sorted(part["rho"].unique()))
        if parts:
            grid[0, 0].set_ylabel("sharpness")
            drawn.colorbar(colours, ax=grid[0, len(parts) - 1], label=TARGETS[target])
        if few:  # no meaningful correlation
            return drawn
        for quantity, _ in parts:
            taus = found[(found["quantity"] == quantity) & (found["median"] > 0)].sort_values("median")
            own = {"color": COLOURS.get(quantity), "label": quantity}
            (line,) = last.semilogx(taus["median"], taus["tau"], marker=MARKERS.get(quantity), **own)
            last.fill_between(taus["median"], taus["low"], taus["high"], color=line.get_color(), alpha=0.12)
        for tau in found.loc[found["quantity"] == "train_loss", "tau"]:
            last.axhline(tau, color="0.5", linestyle="--", label="training loss")
        plain_ticks(last)
        last.set(xlabel="median loss increase", ylabel="Kendall τ", title="τ along the radius")
        last.legend()
    return drawn


def plot_ablations(
    rows: Sequence[Row], target: str, folder: str | os.PathLike[str], *, prefix: str = "", suffix: str = "png"
) -> list[Path]:
    """Draw the effect of ablations: ``ablations`` and ``relaxation``, each variant beside the measure itself.

    Parameters
    ----------
    rows, target
        As for :func:`sharpness.study.plot_sweep`.
    folder : str or path
        Folder for the figures.
    prefix, suffix : str
        Prefix and suffix of their names; the suffix is png, pdf or svg.

    Returns
    -------
    list of Path
        Paths of the figures; empty for a sweep without ablations.

    Raises
    ------
    ValueError
        Fewer than three models have the target.

    Notes
    -----
    Paper, App. G, and Figure 9 for the relaxation.

    Examples
    --------
    Straight lines in place of geodesics:

    >>> import tempfile
    >>> rows = [{"checkpoint": m, "kind": "fit", "train_error": 0.0, "test_error": 0.1 * m} for m in (1, 2, 3)]
    >>> of = {"kind": "sharpness", "measure": "geodesic-inv", "rho": 0.1}
    >>> for switch in ({}, {"geodesic": "first-order"}):
    ...     rows += [{**of, "ablation": switch, "checkpoint": m, "sharpness": 0.1 * m} for m in (1, 2, 3)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in plot_ablations(rows, "gap", folder)]
    ['ablations.png']
    """
    found, goal = [r for r in compare(rows, target) if r.choice == "ρ"], targets(rows, target)
    changed = [r for r in found if "," in r.quantity]
    relaxed = [r for r in changed if "relaxation" in r.quantity]
    drawn = []
    for name, members in (("ablations", [r for r in changed if r not in relaxed]), ("relaxation", relaxed)):
        if not members:
            continue
        bases = {(r.quantity.split(",")[0], r.rho) for r in members}
        shown = sorted([*(r for r in found if (r.quantity, r.rho) in bases), *members], key=lambda r: r.quantity)
        width = min(4, len(shown))
        height = -(-len(shown) // width)
        drawn.append(Path(folder) / f"{prefix}{name}.{suffix}")
        with figure(drawn[-1], (3.6 * width, 3.1 * height), height, width, sharey=True) as (_, grid):
            for axes, row in zip(grid.ravel(), shown, strict=False):
                _scatter(axes, row, goal)
            for axes in grid.ravel()[len(shown) :]:
                axes.set_visible(False)
            for axes in grid[:, 0]:
                axes.set_ylabel(TARGETS[target], fontsize="small")
    return drawn


def plot_distances(found: ModelDistance, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the distances of two models' heads: a map per kind of pair, a row per layer, a column per head.

    Parameters
    ----------
    found : ModelDistance
        Result of :func:`quotient_manifolds.symmetries.model_distance`.
    path : str or path, optional
        File for the figure; by default it is only returned.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import model_distance
    >>> one, other = (torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
    >>> drawn = plot_distances(model_distance(one, other))
    """
    kinds = list(dict.fromkeys(p.kind for p in found.pairs))
    maps = [found.table(kind) for kind in kinds]
    height = 1.6 + 0.35 * max((len(modules) for modules, _ in maps), default=1)
    with figure(path, (4.6 * max(len(kinds), 1), height), columns=max(len(kinds), 1)) as (drawn, (row,)):
        for axes, kind, (modules, table) in zip(row, kinds, maps, strict=True):
            image = axes.imshow(table.numpy(), cmap="viridis", aspect="auto", vmin=0)
            axes.set_yticks(range(len(modules)), modules)
            axes.set_xticks(range(table.shape[1]))
            axes.set(xlabel="head", title=f"{kind}: distance ({found.metric})")
            drawn.colorbar(image, ax=axes)
    return drawn
