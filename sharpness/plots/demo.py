"""The figure of the demo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .look import COLOURS, MARKERS, figure

if TYPE_CHECKING:
    from ..profiles import Profile
    from ..results import SharpnessResult

__all__ = ["plot_symmetry_demo"]


def plot_symmetry_demo(
    before: Mapping[str, SharpnessResult],
    after: Mapping[str, SharpnessResult],
    profiles: Mapping[str, Profile],
    path: str | os.PathLike[str],
) -> None:
    """Draw the loss along the worst direction of each measure, and what a symmetry does to the sharpness.

    Parameters
    ----------
    before, after : mapping of str to SharpnessResult
        By measure, over several radii: of the network, and of the equivalent one.
    profiles : mapping of str to Profile
        Loss along the worst direction, by measure.
    path : str or path
        Where the figure goes.

    Examples
    --------
    >>> import tempfile
    >>> import sharpness, torch
    >>> model, batch = torch.nn.Linear(2, 2), (torch.eye(2), torch.arange(2))
    >>> result = sharpness.evaluate(model, [batch], measure="adaptive", rho=[0.1, 0.2])
    >>> line = sharpness.profile(model, batch, result.direction(0, 0.2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_symmetry_demo({"adaptive": result}, {"adaptive": result}, {"adaptive": line}, f"{folder}/demo.png")
    """
    with figure(path, (12.5, 4.4), 1, 3) as (_, ((left, middle, right),)):
        for name, found in profiles.items():
            (losses,) = found.losses.values()
            left.plot(found.lengths, losses, color=COLOURS.get(name), label=name, marker=MARKERS.get(name), markevery=8)
        left.set(xlabel="distance from the weights", ylabel="loss", title="Loss along the worst direction")
        left.legend()
        for name, result in before.items():
            rhos, colour, marker = result.rhos, COLOURS.get(name), MARKERS.get(name)
            one, two = ([r.mean(rho) for rho in rhos] for r in (result, after[name]))
            middle.loglog(rhos, one, marker=marker, color=colour, label=name)
            middle.loglog(rhos, two, "x--", color=colour, markersize=8)
            change = [max(abs(b / a - 1), 1e-8) if a > 0 else float("nan") for a, b in zip(one, two, strict=True)]
            right.loglog(rhos, change, marker=marker, color=colour, label=name)
        middle.set(xlabel="radius ρ", ylabel="sharpness", title="The network, and an equivalent one (×)")
        right.set(xlabel="radius ρ", ylabel="relative change", title="What the symmetry changes")
        right.axhline(1e-3, color="0.7", linewidth=1)
