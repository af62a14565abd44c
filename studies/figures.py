"""Draw the figures of the documentation again, from the recorded results.

``python -m studies.figures`` draws those of the benchmarks; ``python -m studies.generalization report`` those of
the study of generalisation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import logarithm
from benchmarks._common import RESULTS, interval
from reproduction.plots import plain_ticks, plot_orbit
from sharpness.demo import MOVES
from sharpness.plots import COLOURS, MARKERS, figure

from . import adapters, barriers, convergence, geodesic_ablation, lora_text_report, pretraining, sam, training_curve

IMAGES = RESULTS.parent / "docs" / "images"
#: What a measurement does, from left to right.
STEPS = {
    "model": "and batches", "pairs": "$GH^T$: heads, adapters;\nverified by the gradient",
    "quotient": "all $(GA^{-1}, HA^T)$\nare one point", "search": "worst loss\nwithin distance ρ",
    "result": "sharpness ± error;\nlayers, heads",
}  # fmt: skip


def rows(name: str) -> list[dict[str, Any]]:
    """Read what a benchmark recorded."""
    path = RESULTS / name
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return found


def invariance(found: list[dict[str, Any]], path: Path) -> None:
    """Which measure stays the same under which symmetry: the demo's factors as a map."""
    table = pd.DataFrame(found).set_index("move")
    factors = (table / table.iloc[0])[1:]
    with figure(path, (8.4, 5.2)) as (_, ((axes,),)):
        axes.imshow(np.abs(np.log(factors)), cmap="Oranges", aspect="auto", vmax=4)
        for (y, x), factor in np.ndenumerate(factors.to_numpy()):
            same = abs(factor - 1) < 1e-3
            axes.text(x, y, "1" if same else f"{factor:.2f}", ha="center", va="center", weight="bold" if same else None)
        axes.set_xticks(range(len(factors.columns)), factors.columns, fontsize="small")
        axes.set_yticks(range(len(factors)), [MOVES[kind][1] for kind in factors.index], fontsize="small")
        axes.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
        axes.spines[:].set_visible(False)


def reference(found: list[dict[str, Any]], path: Path) -> None:
    """The sharpness of five models at default radii."""
    models = list(dict.fromkeys(r["model"] for r in found))
    with figure(path, (7.6, 3.4)) as (_, ((axes,),)):
        for place, name in enumerate(dict.fromkeys(r["measure"] for r in found)):
            own = [r for r in found if r["measure"] == name]
            x, y = [r["sharpness"] for r in own], [models.index(r["model"]) + 0.14 * (place - 1.5) for r in own]
            style = {"color": COLOURS[name], "marker": MARKERS[name], "linestyle": ""}
            axes.errorbar(x, y, xerr=[r["std_error"] for r in own], label=name, **style)
        axes.set(xscale="log", xlabel="sharpness at the default radius, nats")
        axes.set_yticks(range(len(models)), models)
        axes.invert_yaxis()
        plain_ticks(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def training(found: list[dict[str, Any]], path: Path) -> None:
    """Held-out losses minus those of Muon, at equal seeds."""
    final = pretraining.finals(found, 300, 0.0)
    with figure(path, (11.5, 4), 1, 2, sharex=True) as (drawn, (panels,)):
        for axes, where in zip(panels, pretraining.POSITIONS, strict=True):
            muon = final[where, "Muon"]
            apart = {
                name: [own[s] - muon[s] for s in own if s in muon] for (at, name), own in final.items() if at == where
            }
            shown = {name: interval(found) for name, found in apart.items() if name != "Muon" and len(found) > 1}
            for place, (name, (mean, half)) in enumerate(shown.items()):
                ours = name.startswith("Quotient")
                style = {"color": COLOURS["geodesic-inv" if ours else "euclidean"], "marker": "o" if ours else "s"}
                axes.errorbar(mean, place, xerr=half, capsize=3, linewidth=2, **style)
            axes.set_yticks(range(len(shown)), [f"{name} ({len(apart[name])})" for name in shown], fontsize="small")
            axes.axvline(0, color="0.6", linewidth=1)
            axes.set_title(f"{where} positions")
            axes.invert_yaxis()
        drawn.supxlabel("held-out loss minus Muon's, nats a byte", fontsize="medium")


def pipeline(path: Path) -> None:
    """From a model to a number."""
    with figure(path, (13, 1.9)) as (_, ((axes,),)):
        for place, (name, text) in enumerate(STEPS.items()):
            box = {"boxstyle": "round,pad=0.5", "facecolor": "#E3EEF7", "edgecolor": COLOURS["geodesic-inv"]}
            axes.text(place, 0.35, name, ha="center", va="center", bbox=box, weight="bold")
            axes.text(place, -0.35, text, ha="center", va="center", fontsize="small")
            if place:
                arrow = {"arrowstyle": "-|>", "color": "0.4", "linewidth": 1.5}
                axes.annotate("", (place - 0.3, 0.35), (place - 0.7, 0.35), arrowprops=arrow)
        axes.set(xlim=(-0.5, len(STEPS) - 0.5), ylim=(-0.7, 0.75))
        axes.axis("off")


def main(folder: Path = IMAGES) -> None:
    """Draw all of them into a folder."""
    convergence.draw(rows("convergence.json"), folder / "convergence.png")
    adapters.draw(rows("adapters.json"), folder / "adapters.png")
    geodesic_ablation.draw(rows("geodesic_ablation.json"), folder / "geodesic_ablation.png")
    logarithm.draw(rows("logarithm.json"), folder)
    barriers.draw(rows("barriers.jsonl"), folder / "barriers.png")
    texts = rows("lora_text.jsonl")
    lora_text_report.draw(pd.DataFrame(texts).drop(columns="losses"), folder / "lora_text.png")
    sam.report(rows("sam.jsonl"), folder / "sam.png")
    invariance(rows("demo.json"), folder / "invariance.png")
    reference(rows("reference_values.json"), folder / "reference.png")
    training(rows("pretraining.jsonl"), folder / "pretraining.png")
    training_curve.draw(rows("training_curve.json"), folder / "training_curve.png")
    pipeline(folder / "pipeline.png")
    plot_orbit(folder / "orbit.png")


if __name__ == "__main__":
    main()
