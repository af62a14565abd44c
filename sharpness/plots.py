"""Figures of one model, in colours that colour-blind readers can tell apart. Needs the extra ``plot``."""

from __future__ import annotations

import json
import os
import threading
import traceback
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quotient_manifolds.errors import is_mendable
from quotient_manifolds.linalg import as_count
from quotient_manifolds.passes import to_device
from quotient_manifolds.weights import is_narrow, pointing_to, preserve_model_state, weights_of

from .batches import to_float32
from .direction import Direction, LayerShare, LayerShares, along
from .errors import require_extra
from .files import atomic_write, write_text
from .losses import Objective
from .measures import divides
from .results import NoDirectionError, SharpnessResult, settings, summary
from .spectra import MATRICES, Spectrum

__all__ = ["plot_layers", "plot_profile", "plot_spectrum", "write_report"]

#: Colours of the measures, by Okabe and Ito without their yellow, which is faint on white; each has a marker too, so
#: that nothing depends on colour alone.
COLOURS = {
    "geodesic-inv": "#0072B2", "geodesic-mix": "#009E73", "adaptive": "#E69F00", "euclidean": "#D55E00",
    "complete-inv": "#CC79A7", "complete-mix": "#000000",
}  # fmt: skip
MARKERS = dict(zip(COLOURS, "os^D*P", strict=True))
_STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.size": 13,
    "legend.fontsize": "small",
    "legend.frameon": False,
}
#: One thread draws at a time: matplotlib keeps a style for all of them.
_DRAWING = threading.RLock()
_WAYS = {"second-order": "geodesic (second order)", "exact": "geodesic (exact)", "first-order": "straight line"}


@contextmanager
def figure(
    path: str | os.PathLike[str] | None, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its grid of axes, (rows, columns), and save it when the block ends, unless the path is None.

    The figure belongs to no window, so a notebook's or script's backend and settings are not changed.

    Parameters
    ----------
    path : str, path or None
        File for the figure.
    size : (float, float)
        In inches.
    rows, columns : int
        Of the grid.
    **options
        Of ``Figure.subplots``.

    Yields
    ------
    matplotlib.figure.Figure, array of matplotlib.axes.Axes

    Raises
    ------
    ValueError
        The file has the name of no kind of figure.

    Examples
    --------
    >>> with figure(None, (4, 3)) as (drawn, ((axes,),)):
    ...     lines = axes.plot([0, 1], [0, 1])
    """
    with require_extra("figures need matplotlib", "plot"):
        from cycler import cycler
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    with _DRAWING, rc_context(_STYLE | {"axes.prop_cycle": cycler(color=COLOURS.values())}):
        drawn = Figure(figsize=size, dpi=120, layout="constrained")
        if path is not None and Path(path).suffix[1:].lower() not in drawn.canvas.get_supported_filetypes():
            raise ValueError(f"{path} is no figure by its name; choose one that ends in .png, .pdf or .svg")
        yield drawn, drawn.subplots(rows, columns, squeeze=False, **options)
        if path is not None:
            with atomic_write(path) as own:
                drawn.savefig(own)


def plot_profile(
    model: nn.Module,
    batch: Any,
    direction: Direction,
    path: str | os.PathLike[str] | None = None,
    *,
    points: int = 33,
    **options: Any,
) -> Any:
    r"""Draw the loss along a direction, :math:`L(R_θ(tξ))` for t in [−2, 2], as its measure moves; the ball is shaded.

    Parameters
    ----------
    model : nn.Module
        Its weights are restored, even after an error.
    batch : tuple, dict or other
        A batch as for :func:`sharpness.evaluate`.
    direction : Direction
        ξ, for example ``result.direction(0)``.
    path : str or path, optional
        Where the figure goes; by default it is returned only.
    points : int
        Number of values of t, at least 2.
    **options
        ``loss_fn`` and ``micro_batch``, as passed to ``evaluate``.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 2), (torch.eye(2), torch.arange(2))
    >>> result = sharpness.evaluate(model, [batch], measure="adaptive", rho=0.1)
    >>> drawn = plot_profile(model, batch, result.direction(0))
    """
    objective, named = Objective(**options), weights_of(model)
    times, losses = np.linspace(-2, 2, as_count("points", points, least=2)), list[float]()
    state = preserve_model_state(model)
    with state, state, torch.inference_mode(False), torch.enable_grad():
        base, moved = along(model, direction)
        batch = to_device(batch, next(iter(named.values())).device)
        if any(is_narrow(named[name]) for name in direction.tensors):
            batch = to_float32(batch)
        for t in times:
            with pointing_to(model, {**base, **moved(t)}):
                losses.append(objective.value(model, batch))
    with figure(path, (6.4, 4.4)) as (drawn, ((axes,),)):
        axes.axvspan(-direction.norm, direction.norm, color="0.93", label=f"ball, ρ = {direction.norm:.3g}")
        axes.axvline(0, color="0.6", linewidth=1)
        way = direction.measure.geodesic if divides(direction.measure) else "first-order"
        axes.plot(times * direction.norm, losses, color="#0072B2", label=_WAYS[way], linewidth=2.2)
        axes.set(xlabel="distance from the weights, in the metric", ylabel="loss")
        axes.set_title(f"{direction.measure.name}: loss along the worst direction")
        axes.legend()
    return drawn


def plot_layers(found: LayerShares, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the shares of the worst direction, layer by layer: a column per pair of a head, and one for other weights.

    Parameters
    ----------
    found : LayerShares
        Result of ``result.by_layer()``.
    path : str or path, optional
        Where the figure goes; by default it is returned only.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> from sharpness import LayerShare, LayerShares
    >>> found = LayerShares([LayerShare("layers.0", "Q–K", 0, 0.7), LayerShare("layers.0", "MLP", None, 0.3)])
    >>> drawn = plot_layers(found)
    """
    if not found:
        raise ValueError("there are no shares to draw")
    with require_extra("figures need pandas", "plot"):
        import pandas as pd
    frame = pd.DataFrame([(s.layer, _column(s), s.share) for s in found], columns=["layer", "column", "share"])
    table = frame.pivot_table(index="layer", columns="column", values="share", aggfunc="sum", sort=False)
    layers, columns = list(table.index), sorted(table.columns, key=lambda name: name == "weights")  # which come last
    size = (min(14.0, 4.2 + 0.42 * len(columns)), min(24.0, 1.8 + 0.42 * len(layers)))
    with figure(path, size) as (drawn, ((axes,),)):
        shown = axes.imshow(100 * table[columns], aspect="auto", vmin=0, interpolation="none")
        axes.set_xticks(range(len(columns)), columns, fontsize="x-small", rotation=90)
        step = 1 + len(layers) // 54
        axes.set_yticks(range(0, len(layers), step), layers[::step], fontsize="small")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title("Share of the worst direction, in the metric")
        drawn.colorbar(shown, ax=axes, label="% of the squared length", pad=0.02)
    return drawn


def _column(share: LayerShare) -> str:
    """Name the column of the map: a pair with its head, or the other weights."""
    of_pair = share.head is not None or share.part in ("LoRA", "other pairs")
    return f"{share.part} {share.head or 0}" if of_pair else "weights"


def plot_spectrum(found: Spectrum, path: str | os.PathLike[str] | None = None) -> Any:
    r"""Draw a spectral density and the largest eigenvalues, on an axis that is linear near 0 and logarithmic beyond.

    Parameters
    ----------
    found : Spectrum
        Of :func:`sharpness.spectrum` with ``density=True``.
    path : str or path, optional
        Where the figure goes; by default it is returned only.

    Returns
    -------
    matplotlib.figure.Figure

    Notes
    -----
    A bar is the share of all eigenvalues in its interval.

    Examples
    --------
    >>> import sharpness, torch
    >>> batch = torch.eye(2), torch.tensor([0, 1])
    >>> found = sharpness.spectrum(torch.nn.Linear(2, 2), [batch], measure="euclidean", k=2, density=True)
    >>> drawn = plot_spectrum(found)
    """
    if found.density is None:
        raise ValueError("there is no density to draw; compute the spectrum with density=True")
    points, weights = np.array(found.density).T
    most = max(float(np.abs([*points, *found.eigenvalues]).max()), 1e-30)
    linear = most / 1e4  # a width in which eigenvalues count as 0

    def place(x: Any) -> Any:
        return np.arcsinh(np.asarray(x) / linear)

    edges = linear * np.sinh(np.linspace(-place(most), place(most), 82))
    with figure(path, (6.4, 4.4)) as (drawn, ((axes,),)):
        axes.hist(points, bins=edges, weights=weights, color="#56B4E9", label="density")
        name = f"{len(found.eigenvalues)} largest eigenvalues"
        axes.plot(found.eigenvalues, [weights.max()] * len(found.eigenvalues), "v", color="#D55E00", label=name)
        axes.set_xscale("asinh", linear_width=linear)
        axes.set_yscale("log")
        axes.set(xlabel="eigenvalue", ylabel="share of all eigenvalues")
        axes.set_title(f"{MATRICES[found.matrix]} ({found.measure.name})")
        axes.legend()
    return drawn


def write_report(
    path: str | os.PathLike[str], model: nn.Module, batch: Any, results: Sequence[SharpnessResult],
    facts: Mapping[str, Any] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Write results with figures of their worst directions, at the largest radius, in one HTML file.

    Parameters
    ----------
    path : str or path
        File of the page.
    model : nn.Module
    batch : tuple, dict or other
        The first of the batches that were measured.
    results : sequence of SharpnessResult
        Of several measures, with the directions that were kept.
    facts : mapping, optional
        What else is to stand there, as JSON: settings, versions, digests.
    **options
        ``loss_fn`` and ``micro_batch``, as passed to ``evaluate``.

    Examples
    --------
    >>> import pathlib, sharpness, tempfile, torch
    >>> model, batch = torch.nn.Linear(2, 2), (torch.eye(2), torch.arange(2))
    >>> result = sharpness.evaluate(model, [batch], measure="adaptive", rho=[0.1, 0.2])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(f"{folder}/report.html", model, batch, [result])
    ...     pathlib.Path(folder, "report.html").read_text(encoding="utf-8").count("<img")
    2
    """
    shown = list[str]()
    for result in results:
        part = result[max(result.rhos)]
        try:
            line = plot_profile(model, batch, part.direction(0), **options)
            drawn = {"Loss along the worst direction": line, "Shares of layers": plot_layers(part.by_layer())}
        except (NoDirectionError, ValueError) as error:  # the measurement is still valid
            if not (isinstance(error, NoDirectionError) or is_mendable(error)):
                traceback.print_exc()
            shown.append(f"<p>no figures of {part.measure.name}: {escape(str(error))}</p>")
            continue
        for name, one in drawn.items():
            one.savefig(picture := BytesIO(), format="png")
            shown.append(f'<img alt="{name}" src="data:image/png;base64,{b64encode(picture.getvalue()).decode()}">')
    how = "\n".join([*map(settings, results), json.dumps(facts or {}, indent=1)])
    found = "\n".join([*map(str, results), "", summary(results)])
    texts = [f"<pre>{escape(text)}</pre>" for text in (found, how)]
    head = "<style>body { max-width: 60em; margin: auto } pre { white-space: pre-wrap } img { max-width: 100% }</style>"
    title = f"Sharpness of {results[0].model}"
    page = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>{head}\n<h1>{title}</h1>'
    write_text(path, "\n".join([page, *texts[:1], *shown, *texts[1:], "</html>\n"]))
