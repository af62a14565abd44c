"""The commands ``demo``, ``symmetries``, ``canonicalize`` and ``run``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import stdev
from typing import Any, TypeVar

import torch

from quotient_manifolds.symmetries import check_coverage, default_forward, find_symmetric_pairs
from quotient_manifolds.symmetries import verify as verify_pairs
from quotient_manifolds.symmetries.whole import canonical_form, canonicalize_, verify_whole

from .. import models, plots
from ..ascent import Search
from ..distributed import World, torchrun
from ..errors import naming, require_extra
from ..files import check_apart, check_file, check_folder, write_json
from ..measures import LOCAL, checked_radii, measure_of
from ..results import SharpnessResult
from ..study.plan import as_data, of_model, places, read_choice
from ..study.run import measured, versions
from . import as_json, checked_device

T = TypeVar("T")


def demo(*, seed: int = 0, out: Path = Path("sharpness-demo.png"), quiet: bool = False) -> int:
    """Train a small vision transformer on scanned digits and measure its sharpness.

    Train a small vision transformer on scikit-learn's scanned digits, measure its
    sharpness by four measures, and measure ten other networks that compute the same
    function, each moved along one kind of symmetry. Prints a table, and saves a
    picture with the numbers beside it. Takes less than two minutes.

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
    from ..demo import run

    run(seed=seed, out=out, progress=not quiet)
    return 0


def symmetries(
    model: str,
    *,
    data: str | None = None,
    batch_size: int = 8,
    checkpoint: str | None = None,
    verify: bool = False,
    complete: bool = False,
    **chosen: Any,
) -> int:
    """List the symmetries of a model's attention and LoRA weights.

    List, layer by layer, which weights of a model can be changed without changing its
    function. An attention class that the package does not know is examined: on
    examples of --data, or else on inputs that its library has for a trial.

    in a shell:
      sharpness symmetries path/to/bert --verify
      sharpness symmetries path/to/vit --complete

    Parameters
    ----------
    model
        A folder of transformers, the name of an open_clip or timm model, or module:function, a function of yours.
    data
        Examples to run the model on, given as for `sharpness run`.
    batch_size
        Number of these examples.
    checkpoint
        Local weights for a named model (.safetensors, or a state dict saved by torch).
    verify
        Act on every pair; exit code 1 if outputs change.
    complete
        Count every continuous symmetry, by kind.
    """
    loaded = models.load(model, checkpoint)
    network, batch = loaded.model, loaded.example
    if data is not None:
        batch = read_choice({"source": data, "batch_size": batch_size, "batches": 1, **chosen}).load(loaded)[0]
    with naming(f"{model} cannot be examined; --data gives it other inputs"):
        found: Any = canonical_form(network) if complete else find_symmetric_pairs(network, batch=batch)
    print(found)
    if not verify:
        return 0
    if batch is None:
        raise ValueError("--verify needs inputs, which are known for images and texts only; give --data")
    with naming(f"{model} cannot be verified; --data gives it other inputs"):
        if not complete:
            check_coverage(network, lambda: default_forward(network, batch), found)
        report: Any = (verify_whole if complete else verify_pairs)(network, batch)
    print(f"\n{report}")
    return 0 if report.ok else 1


def canonicalize(model: str, *, out: Path) -> int:
    """Save a model in canonical form: norms folded, layers centred.

    Save a model of transformers in canonical form. Its function stays the same, and
    all weights that differ only by a continuous symmetry outside the heads have the
    same canonical form. transformers loads the new folder like the old one.

    in a shell:
      sharpness canonicalize path/to/vit --out canonical

    Parameters
    ----------
    model
        A folder of transformers.
    out
        New folder to write.
    """
    loaded = models.load(model)
    network: Any = loaded.model
    if loaded.folder is None:
        raise ValueError(f"{model}: only models of transformers can be saved in canonical form")
    if out.exists():
        raise ValueError(f"--out {out} exists already; give a new folder")
    with torch.no_grad():
        before = network(**loaded.example)[0].float()
        form = canonicalize_(network)
        change = network(**loaded.example)[0].float() - before
    if not form.wired:
        raise ValueError(
            f"the wiring of {type(network).__name__} is not known; describe it in Python with register_wiring"
        )
    largest = float(change.abs().max() / before.abs().max().clamp_min(1e-30))
    # In half precision 10⁴ roundings would be any change at all.
    if not largest <= min(0.1, 1e4 * max(torch.finfo(p.dtype).eps for p in network.parameters())):
        raise ValueError(f"the canonical form of {model} changes the outputs by {largest:.1e}; it is not saved")
    print(f"{form}\nlargest relative change of an output {largest:.0e}")
    with models.quiet():
        network.save_pretrained(out)
    for path in models.files_of(loaded.folder, (*models.INPUTS, "*.jinja")):
        if not (out / path.name).exists():
            shutil.copy(path, out)
    return 0


@dataclass(frozen=True)
class Output:
    """What a measurement leaves behind.

    Attributes
    ----------
    out
        JSON file for results, command, versions and digests.
    figures
        Folder for figures of the worst direction and of the pairs.
    json
        Print JSON instead of the table.
    quiet
        Show no progress.
    """

    out: Path | None = None
    figures: Path | None = None
    json: bool = False
    quiet: bool = False

    def check(self, measures: Iterable[str], rho: Sequence[float] | None, model: list[Any], data: list[Path]) -> None:
        """Raise for what can be known to be wrong before anything is measured."""
        for name in measures:
            if name not in LOCAL:
                checked_radii(measure_of(name), rho)
            elif rho is not None:
                raise ValueError(f"{name} has no radius; leave --rho out")
        folders = [path for path in data if path.is_dir()]
        if self.figures is not None:
            check_apart(self.figures, (), folders)
            if "WORLD_SIZE" in os.environ:
                raise ValueError(
                    "--figures needs the worst directions, which are not shared between processes; use one process"
                )
            with require_extra("figures need matplotlib", "plot"):
                import matplotlib  # noqa: F401
            check_folder(self.figures)
        if self.out is not None:
            check_file(self.out)
            check_apart(self.out, [*model, *data], folders)


def run(
    model: str,
    data: str,
    *,
    checkpoint: str | None = None,
    measure: tuple[str, ...] = ("geodesic-inv",),
    rho: tuple[float, ...] | None = None,
    micro_batch: int | None = None,
    normalize_logits: bool = False,
    device: str = "cpu",
    command: str = "",
    **chosen: Any,
) -> int:
    """Measure the sharpness of a model on data.

    Measure by how much the loss of a model on data can rise within a ball around its
    weights. Under torchrun (torchrun --nproc-per-node N -m sharpness run ...) the work
    is spread over the processes, with the same result.

    in a shell:
      sharpness run path/to/bert dev.tsv --text sentence --label label --num-examples 512 --out result.json
      sharpness run path/to/vit images/train --num-examples 512 --measure geodesic-inv adaptive
      sharpness run mine:model mine:batches --measure adaptive --rho 0.2 0.5

    Parameters
    ----------
    model
        A folder of transformers, the name of an open_clip or timm model, or module:function, a function of yours.
    data
        Images: a folder of class folders; text: a .tsv, .csv, .jsonl or .parquet table; a folder saved by datasets
        (FOLDER/SPLIT); a .safetensors or .pt file with tensors x and y, or with inputs and labels of a model of
        transformers; or module:function, a function of yours that returns batches.
    checkpoint
        Local weights for a named model (.safetensors, or a state dict saved by torch).
    measure
        geodesic-inv, geodesic-mix, complete-inv, complete-mix, adaptive, euclidean, gradient-norm, riemannian-hessian,
        euclidean-hessian; one or several.
    rho
        Radii of the ball (default: the measure's, from 0.05 for euclidean to 0.5 for adaptive).
    micro_batch
        Pass so many examples at a time, to save memory.
    normalize_logits
        Divide every example's logits by their standard deviation over the classes.
    device
        cpu or cuda.
    """
    search, output = _taken(Search, chosen), _taken(Output, chosen)
    passes: dict[str, Any] = {"micro_batch": micro_batch, "normalize_logits": normalize_logits}
    settings = {**asdict(search), **passes, "ablation": {}, "rho": rho, "keep_directions": output.figures is not None}
    choice = read_choice({"source": data, **chosen})
    output.check(measure, rho, [*places(model), checkpoint], places(choice.source))
    where = checked_device(device)
    with torchrun(where) as group:
        leader = World(group).rank == 0
        shown, told = leader and not output.json, leader and not output.quiet
        loaded = models.load(model, checkpoint)
        if checkpoint is None and loaded.folder is None and ":" not in model:
            raise ValueError(f"{model} names an architecture without weights; give them with --checkpoint")
        network, batches = loaded.model.to(where), choice.load(loaded, where)
        if told:
            print(f"measuring {type(network).__name__}, batches: {len(batches)}", file=sys.stderr, flush=True)
        written: dict[str, Any] = {"remarks": [*loaded.remarks, *batches.remarks], "results": []}
        if shown:
            print(*(f"{remark}\n" for remark in written["remarks"]), sep="", end="", flush=True)
        if leader and (output.out is not None or output.json):
            source = {"name": model, "checkpoint": checkpoint, "digest": of_model(model, checkpoint)}
            written |= {"command": command, "versions": versions(), "model": source, "data": as_data(choice)}
        for name in measure:
            with naming(f"{model} on {data}"):
                result = measured(name, network, batches, group=group, progress=told, **settings)
            written["results"].append({"quantity": name, **result.to_dict()})
            if shown:
                print(result, _spread(result), "\n", sep="\n", end="", flush=True)
            if leader and output.out is not None:
                write_json(output.out, written)
            if leader and output.figures is not None and name not in LOCAL:
                _draw(output.figures, network, batches, result, passes)
        if leader and output.json:
            print(as_json(written), end="")
    return 0


def _taken(kind: type[T], chosen: dict[str, Any]) -> T:
    """Take the fields of a dataclass out of some options."""
    return kind(**{f.name: chosen.pop(f.name) for f in fields(kind) if f.name in chosen})  # type: ignore[arg-type]


def _spread(result: SharpnessResult) -> str:
    """Say the standard error over the batches at every radius."""
    count = len(result.batches) // len(result.rhos)
    if count == 1:
        return "one batch: no spread"
    errors = [
        f"{stdev(b.value for b in result[rho].batches) / count**0.5:.2g}{f' at rho = {rho:g}' if rho else ''}"
        for rho in result.rhos
    ]
    return f"standard error over the {count} batches: {', '.join(errors)}"


def _draw(figures: Path, model: Any, batches: Any, result: SharpnessResult, passes: dict[str, Any]) -> None:
    try:
        for path in plots.plot_model(model, batches[0], result, figures, **passes):
            print(f"drawn: {path}", file=sys.stderr)
    except ValueError as error:  # the measurement is still valid
        print(f"sharpness: no figures of {result.measure.name}: {error}", file=sys.stderr)
