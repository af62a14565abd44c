"""Figures of the paper's studies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from quotient_manifolds.symmetries import ModelDistance
from sharpness.plots import COLOURS, MARKERS, figure
from sharpness.study import TARGETS

from .comparison import CONTROLS
from .tables import controls_in_words

__all__ = ["plain_ticks", "plot_diagonal", "plot_distances", "plot_orbit", "plot_partial", "plot_toy"]

#: The collections in words.
WORDS = {"vit": "fine-tuned ViTs", "minilm": "fine-tuned MiniLMs", "scratch": "ViTs from scratch"}


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
    with figure(path, (8.4, 5.6)) as (drawn, ((plane,),)):
        levels = [0, 0.02, 0.1, 0.3, 0.7, 1.4, 2.5, 4, 8]
        loss = plane.contourf(
            first, second, (first * second - 1) ** 2, levels=levels, cmap="Greys", extend="max", alpha=0.55
        )
        drawn.colorbar(loss, ax=plane, label="loss", shrink=0.7, ticks=levels[1:])
        band = plane.fill_between(axis, low / axis, high / axis, color=COLOURS["geodesic-inv"], alpha=0.3, linewidth=0)
        plane.plot(axis, 1 / axis, color=COLOURS["geodesic-inv"], linewidth=2.2)
        worst = {}
        for name, (a, b) in points.items():
            ball = np.array([[a], [b]]) + circle
            worst[name] = float(((ball[0] * ball[1] - 1) ** 2).max())
            (ring,) = plane.plot(*ball, color=COLOURS["euclidean"], linewidth=2.2)
            plane.plot(a, b, "o", color="black", markersize=7)
            plane.annotate(name, (a, b), (-11, 5), textcoords="offset points", weight="bold", ha="right")
        labels = [
            f"Euclidean balls: worst loss {worst['A']:.2f} at A, {worst['B']:.2f} at B",
            f"geodesic balls, equal: worst loss {(high - 1) ** 2:.2f}",
        ]
        plane.legend([ring, band], labels, loc="upper right", frameon=True)
        plane.set(xlim=(0, 3.6), ylim=(0, 2.4), xlabel="θ₁", ylabel="θ₂", title="A and B are the same network")
        plane.set_aspect("equal")
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
    maps = [pd.DataFrame([p for p in found.pairs if p.kind == kind]).fillna({"head": 0}) for kind in kinds]
    maps = [frame.pivot_table("distance", "module", "head", sort=False, dropna=False) for frame in maps]
    height = 1.6 + 0.35 * max(map(len, maps), default=1)
    with figure(path, (4.6 * max(len(kinds), 1), height), columns=max(len(kinds), 1)) as (drawn, (row,)):
        for axes, kind, table in zip(row, kinds, maps, strict=True):
            image = axes.imshow(table, cmap="viridis", aspect="auto", vmin=0)
            axes.set_yticks(range(len(table)), table.index)
            axes.set_xticks(range(table.shape[1]))
            axes.set(xlabel="head", title=f"{kind}: distance ({found.metric})")
            drawn.colorbar(image, ax=axes)
    return drawn


def plot_partial(
    tables: Mapping[str, pd.DataFrame],
    path: str | os.PathLike[str],
    given: Sequence[str] = CONTROLS,
    names: Sequence[str] | None = None,
) -> None:
    """Draw partial τ with its corrected interval for every measure, with a column per zoo and a row per target.

    What is correlated has the colour of its sign; what is negligible or unresolved is grey.

    Parameters
    ----------
    tables : mapping of str to pandas.DataFrame
        By target: :func:`reproduction.study.table`.
    path : str or path
        File for the figure.
    given : sequence of str
        What was controlled for.
    names : sequence of str, optional
        The quantities that are shown; by default all.
    """
    known = {target: found.dropna(subset="τ") for target, found in tables.items()}
    every = pd.concat(known.values())
    zoos = list(every["collection"].unique())
    names = names or list(every["quantity"].unique())
    size = (3.6 * len(zoos) + 1.8, len(known) * (0.34 * len(names) + 0.9) + 0.5)
    with figure(path, size, len(known), len(zoos), sharex=True, sharey=True) as (drawn, grid):
        for (target, found), row in zip(known.items(), grid, strict=True):
            for zoo, axes in zip(zoos, row, strict=True):
                own = found[found["collection"] == zoo]
                axes.axvline(0, color="0.6", linewidth=1)
                for place, name in enumerate(names):
                    _intervals(axes, own[own["quantity"] == name], place)
                axes.set(yticks=range(len(names)), xlim=(-0.8, 0.8), ylim=(len(names) - 0.5, -0.5))
                axes.set_yticklabels([name.replace("_", " ") for name in names])
                if target == next(iter(known)):
                    axes.set_title(f"{own['models'].max():.0f} {WORDS.get(zoo, zoo)}")
            row[0].set_ylabel(TARGETS[target] if len(known) > 1 else "")
        drawn.supxlabel(
            f"Kendall τ with the {' or the '.join(known).replace('-', ' ')}, given {controls_in_words(given)}\n"
            "blue: correlated, −; orange: correlated, +; grey: negligible or unresolved; "
            "circles: τ < 0, squares: τ > 0",
            fontsize="medium",
        )


def _intervals(axes: Any, found: pd.DataFrame, place: int) -> None:
    """Draw the intervals of a quantity, one below the other."""
    for k, (_, r) in enumerate(found.iterrows()):
        y = place + 0.2 * (k - (len(found) - 1) / 2)
        sign = r["verdict"].removeprefix("correlated, ")
        colour = {"−": COLOURS["geodesic-inv"], "+": COLOURS["euclidean"]}.get(sign, "0.6")
        axes.plot([r["low"], r["high"]], [y, y], color=colour, linewidth=2)
        axes.plot(r["τ"], y, "o" if r["τ"] < 0 else "s", color=colour, markersize=5)
