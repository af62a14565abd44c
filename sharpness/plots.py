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
        one = [sum(b.sharpness for b in result.at(r)) / len(result.at(r)) for r in rhos]
        two = [sum(b.sharpness for b in after[name].at(r)) / len(after[name].at(r)) for r in rhos]
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
