"""The style of all figures: colours that colour-blind readers can tell apart, and type that is legible at half size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..errors import require_extra
from ..files import atomic_write, check_file

__all__ = ["COLOURS", "MARKERS", "check_figure", "dark_map", "figure", "plain_ticks", "style"]

#: Okabe and Ito's colours, without their yellow, which is faint on white.
_CYCLE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")

#: Colours of the measures; each has a marker too, so that nothing depends on colour alone.
COLOURS = {
    "geodesic-inv": "#0072B2", "geodesic-mix": "#009E73", "adaptive": "#E69F00", "euclidean": "#D55E00",
    "complete-inv": "#CC79A7", "complete-mix": "#000000",
}  # fmt: skip
MARKERS = {
    "geodesic-inv": "o", "geodesic-mix": "s", "adaptive": "^", "euclidean": "D",
    "complete-inv": "*", "complete-mix": "P",
}  # fmt: skip


def dark_map() -> Any:
    """Return a colour map for lines and dots on white: viridis without its yellow end."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"]([i / 255 * 0.75 for i in range(256)]))


def style() -> AbstractContextManager[None]:
    """Return a context in which matplotlib uses the style of all figures here."""
    with require_extra("figures need matplotlib", "plot"):
        import matplotlib
        from cycler import cycler
    context: AbstractContextManager[None] = matplotlib.rc_context(
        {
            "axes.prop_cycle": cycler(color=_CYCLE),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": "medium",
            "figure.dpi": 120,
            "font.size": 13,
            "image.cmap": "viridis",
            "legend.fontsize": "small",
            "legend.frameon": False,
            "savefig.dpi": 120,
        }
    )
    return context


def check_figure(path: str | os.PathLike[str]) -> None:
    """Raise unless a figure of a supported format may be written there; call it before the work."""
    with require_extra("figures need matplotlib", "plot"):
        from matplotlib.backend_bases import FigureCanvasBase
    kinds = FigureCanvasBase.get_supported_filetypes()
    suffix = check_file(path).suffix.removeprefix(".")
    if suffix not in kinds:
        raise ValueError(f"{str(path)!r} is not a figure: its name must end in .{', .'.join(sorted(kinds))}")


@contextmanager
def figure(
    path: str | os.PathLike[str] | None, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its grid of axes, (rows, columns), and save it when the block ends, unless the path is None.

    The figure belongs to no window, so a notebook's or script's backend is not changed. The size is in inches; the
    options are those of ``Figure.subplots``.
    """
    with style():
        from matplotlib.figure import Figure

        drawn = Figure(figsize=size, layout="constrained")
        yield drawn, drawn.subplots(rows, columns, squeeze=False, **options)
        if path is not None:
            with atomic_write(path) as own:
                drawn.savefig(own)


def plain_ticks(axes: Any, places: Sequence[float] | None = None) -> None:
    """Set ticks of a logarithmic x-axis as plain numbers: at these places, or at every 10ⁿ and 3·10ⁿ in view."""
    if places is None:
        low, high = axes.get_xlim()
        places = [x for n in range(-6, 3) for x in (10.0**n, 3 * 10.0**n) if low <= x <= high]
    axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.set_xticks([], minor=True)
