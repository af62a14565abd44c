"""A figure of two models: the distances of their heads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .look import figure

if TYPE_CHECKING:
    from quotient_manifolds.symmetries import ModelDistance

__all__ = ["plot_distances"]


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
    tables = [found.table(kind) for kind in kinds]
    height = 1.6 + 0.35 * max((len(modules) for modules, _ in tables), default=1)
    with figure(path, (4.6 * max(len(kinds), 1), height), columns=max(len(kinds), 1)) as (drawn, (row,)):
        for axes, kind, (modules, table) in zip(row, kinds, tables, strict=True):
            image = axes.imshow(table.numpy(), cmap="viridis", aspect="auto", vmin=0)
            axes.set_yticks(range(len(modules)), modules)
            axes.set_xticks(range(table.shape[1]))
            axes.set(xlabel="head", title=f"{kind}: distance ({found.metric})")
            drawn.colorbar(image, ax=axes)
    return drawn
