"""The commands: each is a function, whose parameters are its options and whose docstring is its help.

What imports torch is imported by a command, so that the parser does not wait for it.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from .errors import about, aligned, require_extra, say
from .files import check_apart, check_file, write_json
from .measures import Search
from .options import DataChoice, RunOptions

if TYPE_CHECKING:
    from .models import LoadedModel
    from .results import SharpnessResult

#: A model guesses if its loss is no less than this part of the loss of guessing.
_GUESSES = 0.95


def demo(*, seed: int = 0, out: Path = Path("sharpness-demo.png"), quiet: bool = False) -> int:
    """Train a small vision transformer on scanned digits and measure its sharpness.

    Train a small vision transformer on scikit-learn's scanned digits. Measure it, and ten
    networks with the same outputs, by four measures. Print a table, and save a picture
    with the numbers beside it. This takes less than two minutes.

    in a shell:
      sharpness demo --out sharpness-demo.png

    Parameters
    ----------
    seed
        Seed of the split of the data, the training and the moves.
    out
        Picture; the numbers go beside it.
    quiet
        Show no progress.
    """
    from .demo import run

    run(seed=seed, out=out, progress=not quiet)
    return 0


def run(model: str, data: str, *, command: str = "", **chosen: Any) -> int:
    """Measure the sharpness of a model on data.

    Measure by how much the loss of a model on data can rise within a ball around its
    weights. To spread the work over N processes, with the same result, type
    `torchrun --nproc-per-node N -m sharpness run ...`.

    in a shell:
      sharpness run path/to/bert dev.tsv --text sentence --label label --num-examples 512 --out result.json
      sharpness run path/to/vit images/train --num-examples 512 --measure geodesic-inv adaptive --report report.html
      sharpness run mine:model mine:batches --measure adaptive --rho 0.2 0.5

    Parameters
    ----------
    model
        A folder of transformers, timm or open_clip; owner/name or owner/name@revision on the Hugging Face Hub; the name
        of an open_clip or timm model; or module:function, a function of yours.
    data
        One of: a folder of class folders of images; a .tsv, .csv, .jsonl or .parquet table of texts; a folder saved by
        datasets (FOLDER/SPLIT); a data set on the Hub (owner/name/SPLIT or owner/name/CONFIGURATION/SPLIT, with a
        revision behind an @); a .safetensors or .pt file with tensors x and y, or with inputs and labels of
        transformers; module:function, a function of yours that returns batches.
    """
    from .hub_data import look_up_both, pinned_data

    look_up_both(model, data)
    from . import devices, models, plots
    from .criteria import loss_of_guessing
    from .distributed import World, torchrun
    from .results import summary
    from .study.plan import as_data, of_model
    from .study.run import quantity, versions

    search, own = Search(**_of(Search, chosen)), RunOptions(**_of(RunOptions, chosen))
    choice, passes = DataChoice(data, **chosen), {"micro_batch": own.micro_batch}
    _check(model, data, own)
    choice, model = replace(choice, source=pinned_data(data)), models.pinned(model, own.checkpoint)
    with torchrun(where := devices.checked_device(own.device)) as group:
        leader = World(group).rank == 0
        loaded = models.load(model, own.checkpoint)
        network, batches = devices.move(loaded.model, where), choice.load(loaded, where)
        remarks, how = [*loaded.remarks, *batches.remarks], {**asdict(search), **passes}
        written: dict[str, Any] = {"command": command, "versions": versions(), "settings": how, "remarks": remarks}
        say((f"- {remark}" for remark in remarks if leader), "33")
        results, guessing = list[Any](), 0.0
        if leader and (own.out or own.report):
            written["data"] = as_data(choice)
            digest = of_model(model, own.checkpoint)
            written["model"] = {"name": model, "checkpoint": own.checkpoint, "digest": digest}
        try:
            for name in own.measure:
                with about(f"{model} on {data}"):
                    shown: dict[str, Any] = {"group": group, "progress": leader and not own.quiet}
                    results.append(result := quantity(name, network, batches, search, own.rho, **passes, **shown))
                if leader:
                    guessing = guessing or loss_of_guessing(network, batches[0], own.micro_batch)
                    if own.out is not None:  # before it is printed, which may fail
                        found = [{"quantity": n, **r.to_dict()} for n, r in zip(own.measure, results, strict=False)]
                        write_json(own.out, {**written, "results": found})
                    _print(result, guessing, verbose=own.verbose)
        finally:
            if leader and results and own.report is not None:
                plots.write_report(own.report, network, batches[0], results, written, **passes)
        if leader:
            if table := summary(results):
                print(table)
            if own.report is not None:
                print(f"report: {own.report}")
    return 0


def _check(model: str, data: str, own: RunOptions) -> None:
    """Raise for what cannot be measured or written, before gigabytes are fetched or loaded."""
    from .hub_data import check_source
    from .measures import checked_radii
    from .other_statistics import measure_of
    from .study.plan import places

    for name in own.measure:
        checked_radii(measure_of(name), own.rho)
    for path in filter(None, (own.out, own.report)):
        check_file(path)
        check_apart(path, [*places(model), own.checkpoint], places(data))
    if own.report is not None:
        with require_extra("a report needs matplotlib and pandas", "plot"):
            import matplotlib  # noqa: F401
            import pandas  # noqa: F401
    check_source(data)


def at_commits(*names: str) -> tuple[list[str], list[str]]:
    """Return names of the Hub with the commits that they have now, whose files are fetched, and remarks that say so."""
    from quotient_manifolds.hub import fetch_model, is_name, look_up

    look_up("model", "transformers", *names)
    found = [fetch_model(name).pinned if is_name(name) else name for name in names]
    return found, [f"- {name} is {at}" for name, at in zip(names, found, strict=True) if name != at]


def load_each(names: Sequence[str], model: str | None) -> list[LoadedModel]:
    """Load models, or files of weights of one."""
    from .models import load

    return [load(name) if model is None else load(model, name) for name in names]


def _of(kind: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a class from the options."""
    return {f.name: chosen.pop(f.name) for f in fields(kind) if f.name in chosen}


def _print(result: SharpnessResult, guessing: float, *, verbose: bool) -> None:
    """Print what was found, what to compare it with, and what limits it."""
    from .evaluation import Worst
    from .results import REFERENCE, doubts, headline, settings

    low, high = REFERENCE.get(result.measure.name, (0.0, 0.0))
    remarks = [*doubts(result), *result.remarks]
    for part in (result[rho] for rho in result.rhos):
        say([headline(part)], "1")
        base, worst = (fmean(getattr(b, name) for b in part.batches) for name in ("base_loss", "worst_loss"))
        known = isinstance(part.statistic, Worst) and high and part.rhos[0] == result.measure.rho
        if known and math.isfinite(guessing):
            say([f"  for comparison: {low:.2f} to {high:.2f} nats at this radius in five small models"], "2")
        if not part.rhos[0] or not guessing < worst:
            continue
        if base >= _GUESSES * guessing:
            remarks.append(
                f"the loss at the weights is {base:.2f}, and that of guessing among {math.exp(guessing):.0f} classes "
                f"{guessing:.2f}: this model knows little of these data; check that it is trained, and what labels mean"
            )
        else:
            remarks.append(
                f"at ρ = {part.rhos[0]:g} the ball reaches models that guess: the largest loss is {worst:.2f}, that of "
                f"guessing among {math.exp(guessing):.0f} classes {guessing:.2f}; try a smaller radius"
            )
    if verbose:
        say([f"  {settings(result)}"], "2")
    say((f"- {remark}" for remark in dict.fromkeys(remarks)), "33")


def compare(
    one: str,
    other: str,
    *,
    model: str | None = None,
    metric: Literal["inv", "mix"] = "inv",
    modulo: Literal["heads", "all"] = "heads",
) -> int:
    """Print the distance of two models, modulo symmetries.

    Print the distance of two models of one architecture, in all and for every layer. It
    does not depend on the factors of attention heads and adapters, or with --modulo all
    on any known symmetry.

    in a shell:
      sharpness compare berts/one berts/two
      sharpness compare before.pt after.pt --model mine:model --modulo all

    Parameters
    ----------
    one, other
        A folder of a model, a name of the Hub, or a file of weights of --model.
    model
        The model of the weights: the name of an open_clip or timm model, or module:function.
    metric
        The metric of heads and adapters: inv or mix.
    modulo
        heads: the factors of every head; all: every known symmetry, and the order of heads and neurons.
    """
    names, remarks = at_commits(one, other)
    from quotient_manifolds.symmetries import model_distance

    two = [loaded.model for loaded in load_each(names, model)]
    with about(f"{one} and {other} cannot be compared"):
        found = model_distance(*two, metric=metric, modulo=modulo)
    known = [p for p in found.pairs if not math.isnan(p.distance)]
    say([f"distance {found.total:.4g} ({metric}) on {len(known)} pairs"], "1")
    layers: dict[str, dict[str, float]] = {}
    for p in known:
        of_layer = layers.setdefault(p.module, {})
        of_layer[p.kind] = math.hypot(of_layer.get(p.kind, 0.0), p.distance)
    kinds = list(dict.fromkeys(p.kind for p in found.pairs))
    rows = [[layer, *(f"{d[kind]:.4g}" if kind in d else "" for kind in kinds)] for layer, d in layers.items()]
    print(aligned([["layer", *kinds], *rows]))
    say([f"- not compared: {name}: {reason}" for name, reason in found.skipped.items()] + remarks, "33")
    return 0


def env() -> int:
    """Print the versions of Python and of the libraries.

    Print the versions of Python and of the libraries, and the device. Add this to the
    report of a defect.

    in a shell:
      sharpness env
    """
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"Python {platform.python_version()}, {platform.platform()}, {device}")
    libraries = "quotient-manifolds torch geoopt scipy numpy transformers timm open_clip_torch peft datasets matplotlib"
    installed = {found.name: found.version for found in distributions()}
    for name in libraries.split():
        print(name, installed.get(name, "is not installed"))
    return 0
