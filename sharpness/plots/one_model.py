"""Figures of one model: the loss along its worst direction, the shares of layers in it, and its pairs' spectra."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quotient_manifolds.symmetries import find_symmetric_pairs, spectra

from ..direction import profile
from ..shares import PARTS
from .look import COLOURS, dark_map, figure

if TYPE_CHECKING:
    from torch import nn

    from quotient_manifolds.symmetries.stacks import PairSpectrum

    from ..direction import Profile
    from ..losses import LossFunction
    from ..results import SharpnessResult
    from ..shares import LayerShares

__all__ = ["plot_layers", "plot_model", "plot_profile", "plot_spectra"]

_WAYS = {"second-order": "geodesic (second order)", "exact": "geodesic (exact)", "first-order": "straight line"}


def plot_profile(found: Profile, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the loss along the worst direction, on the geodesic and on the straight line; the ball is shaded.

    Parameters
    ----------
    found : Profile
        Result of :func:`sharpness.profile`.
    path : str or path, optional
        Where the figure goes; by default it is returned only.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> from sharpness import Profile
    >>> found = Profile("adaptive", (-1.0, 0.0, 1.0), {"first-order": (0.9, 1.0, 1.3)}, 0.5)
    >>> drawn = plot_profile(found)
    """
    with figure(path, (6.4, 4.4)) as (drawn, ((axes,),)):
        axes.axvspan(-found.radius, found.radius, color="0.93", label=f"length of the direction, {found.radius:.3g}")
        axes.axvline(0, color="0.6", linewidth=1)
        for way, losses in found.losses.items():
            style, colour = ("--", "#D55E00") if way == "first-order" else ("-", "#0072B2")
            axes.plot(found.lengths, losses, style, color=colour, label=_WAYS.get(way, way), linewidth=2.2)
        axes.set(xlabel="distance from the weights, in the metric", ylabel="loss")
        axes.set_title(f"{found.measure}: loss along the worst direction")
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
    layers = list(dict.fromkeys(s.layer for s in found))
    alone = ("LoRA", "other pairs")
    kinds_of = {s: s.part if s.head is not None or s.part in alone else "weights" for s in found}
    columns = sorted({(kinds_of[s], s.head or 0) for s in found}, key=lambda c: ([*PARTS, "weights"].index(c[0]), c[1]))
    table = np.full((len(layers), len(columns)), np.nan)
    for s in found:
        cell = layers.index(s.layer), columns.index((kinds_of[s], s.head or 0))
        table[cell] = s.share + np.nan_to_num(table[cell])
    size = (min(14.0, 4.2 + 0.42 * len(columns)), min(24.0, 1.8 + 0.42 * len(layers)))
    places: dict[str, list[int]] = {}
    for i, (kind, _) in enumerate(columns):
        places.setdefault(kind, []).append(i)
    apart = "\n" if max(map(len, places.values())) < 5 else ", "  # narrow columns
    names = {s.part: f"{s.part}{apart}by head" for s in found if s.head is not None}
    with figure(path, size) as (drawn, ((axes,),)):
        shown = axes.imshow(100 * table, aspect="auto", vmin=0, interpolation="none")
        heads = [(i, head) for i, (kind, head) in enumerate(columns) if kind != "weights"]
        axes.set_xticks([i for i, _ in heads], [str(head) for _, head in heads], fontsize="x-small")
        kinds = axes.secondary_xaxis("bottom")
        kinds.set_xticks([float(np.mean(p)) for p in places.values()], [names.get(k, k) for k in places])
        kinds.tick_params(length=0, pad=16)
        kinds.spines[:].set_visible(False)
        for p in list(places.values())[1:]:
            axes.axvline(p[0] - 0.5, color="white", linewidth=3)
        step = 1 + len(layers) // 54
        axes.set_yticks(range(0, len(layers), step), layers[::step], fontsize="small")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title("Share of the worst direction, in the metric")
        drawn.colorbar(shown, ax=axes, label="% of the squared length", pad=0.02)
    return drawn


def plot_spectra(found: Sequence[PairSpectrum], path: str | os.PathLike[str] | None = None) -> Any:
    r"""Draw the singular values of all pairs' :math:`G H^H`, and the smallest ones of G, H and :math:`G H^H`.

    Parameters
    ----------
    found : sequence of PairSpectrum
        Result of :func:`quotient_manifolds.symmetries.spectra`.
    path : str or path, optional
        Where the figure goes; by default it is returned only.

    Returns
    -------
    matplotlib.figure.Figure

    Notes
    -----
    Paper, App. H.1.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs, spectra
    >>> drawn = plot_spectra(spectra(find_symmetric_pairs(nn.MultiheadAttention(8, 2))))
    """
    if not found:
        raise ValueError("there are no pairs to draw; find_symmetric_pairs(model) lists why")
    kinds = list(dict.fromkeys(s.kind for s in found))
    titles = {"qk": "Q–K", "vo": "V–O", "lora": "LoRA"}
    with figure(path, (4.6 * (len(kinds) + 1), 4.4), 1, len(kinds) + 1) as (drawn, ((*panels, last),)):
        shades = dark_map()
        for axes, kind in zip(panels, kinds, strict=True):
            mine = [s for s in found if s.kind == kind]
            for i, s in enumerate(mine):
                shade = shades(i / max(1, len(mine) - 1))
                axes.semilogy(range(1, len(s.product) + 1), s.product.clamp_min(1e-300), color=shade, linewidth=1)
            axes.set(xlabel="index", title=f"{titles.get(kind, kind)}: σ of GHᵀ, dark: first layers")
            _set_bottom(axes, [float(v) for s in mine for v in s.product])
        panels[0].set_ylabel("singular value")
        smallest = np.array([(s.min_singular_value_G, s.min_singular_value_H, float(s.product[-1])) for s in found])
        looks = (("G", "o", "adaptive"), ("H", "^", "geodesic-mix"), ("GHᵀ", "s", "geodesic-inv"))
        for (label, marker, name), values in zip(looks, smallest.T.clip(1e-300), strict=True):
            last.semilogy(range(1, len(found) + 1), values, marker, color=COLOURS[name], label=label, markersize=4)
        _set_bottom(last, smallest.ravel().tolist())
        last.set(xlabel="pair, in the order of the layers", title="smallest singular values")
        last.legend()
    return drawn


def _set_bottom(axes: Any, values: Sequence[float]) -> None:
    """Let a logarithmic axis begin just below the smallest of some values."""
    axes.set_ylim(bottom=min((v for v in values if v > 0), default=1e-12) / 2)


def plot_model(
    model: nn.Module,
    batch: Any,
    result: SharpnessResult,
    folder: str | os.PathLike[str],
    loss_fn: LossFunction | None = None,
    *,
    micro_batch: int | None = None,
    normalize_logits: bool = False,
    suffix: str = "png",
) -> list[Path]:
    """Draw all figures of a measurement: ``profile``, ``layers`` and, for a network with pairs, ``spectra``.

    Parameters
    ----------
    model : nn.Module
    batch : tuple, dict or other
        The first of the batches that were measured.
    result : SharpnessResult
        The result with its directions; the largest radius is drawn.
    folder : str or path
        Folder for the figures, whose names begin with the measure's. It is created if necessary.
    loss_fn, micro_batch, normalize_logits
        As passed to ``evaluate``.
    suffix : str
        File format: png, pdf or svg.

    Returns
    -------
    list of Path
        Of the figures.

    Raises
    ------
    KeyError
        The directions were not kept, or the measure has none.

    Examples
    --------
    >>> import sharpness, tempfile, torch
    >>> model, batch = torch.nn.Linear(2, 2), (torch.eye(2), torch.arange(2))
    >>> result = sharpness.evaluate(model, [batch], measure="adaptive", rho=[0.1, 0.2])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in plot_model(model, batch, result, folder)]
    ['adaptive-profile.png', 'adaptive-layers.png']
    """
    rho = max(result.rhos)
    direction, shares = result[rho].direction(0), result[rho].by_layer()
    Path(folder).mkdir(parents=True, exist_ok=True)
    names = (f"{result.measure.name}-profile", f"{result.measure.name}-layers", "spectra")
    drawn = [Path(folder) / f"{name}.{suffix}" for name in names]
    options: Any = {"micro_batch": micro_batch, "normalize_logits": normalize_logits}
    plot_profile(profile(model, batch, direction, loss_fn, **options), drawn[0])
    plot_layers(shares, drawn[1])
    pairs = direction.pairs or tuple(p for p in find_symmetric_pairs(model, include_frozen=True) if p.group is not None)
    if not pairs:
        return drawn[:2]
    plot_spectra(spectra(pairs), drawn[2])
    return drawn
