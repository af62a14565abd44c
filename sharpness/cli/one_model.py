"""The commands ``run``, ``symmetries`` and ``canonicalize``, for one model."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from statistics import stdev
from typing import Any

from ..hessian import LOCAL
from ..measures import MEASURES
from . import add_command, add_data_options, add_json, as_json, checked_device, data_choice, place, seed

__all__ = ["add_canonicalize", "add_run", "add_symmetries"]

_MODEL = "a folder of transformers, the name of an open_clip or timm model, or module:function, a function of yours"
_WEIGHTS = "local weights for a named model (.safetensors, or a state dict saved by torch)"


def add_symmetries(commands: Any) -> None:
    """Add ``sharpness symmetries``."""
    command = add_command(commands, _symmetries)
    command.add_argument("model", metavar="MODEL", help=_MODEL)
    command.add_argument("--data", metavar="DATA", help="examples to run the model on, given as for `sharpness run`")
    add_data_options(command)
    command.add_argument("--checkpoint", help=_WEIGHTS)
    command.add_argument("--verify", action="store_true", help="act on every pair; exit code 1 if outputs change")
    command.add_argument("--complete", action="store_true", help="count every continuous symmetry, by kind")
    add_json(command)
    command.set_defaults(batch_size=8, batches=1)


def _symmetries(options: argparse.Namespace) -> int:
    """List the symmetries of a model's attention and LoRA weights.

    List, layer by layer, which weights of a model can be changed without changing its function. An attention class that
    the package does not know is examined: on examples of --data, or else on random inputs.

    in a shell:
      sharpness symmetries path/to/bert --verify
      sharpness symmetries path/to/vit --complete
    """
    import torch

    from quotient_manifolds import symmetries
    from quotient_manifolds.symmetries.whole import canonical_form, verify_whole

    from ..errors import naming
    from ..models import load

    loaded = load(options.model, options.checkpoint)
    model, batch = loaded.model, loaded.example
    report: Any = None
    if options.data is not None:
        batch = data_choice(options).load(loaded, torch.device("cpu"))[0]
    if options.complete:
        form = canonical_form(model)
        text, listed = str(form), {"dimensions": form.dimensions, "refused": form.refused}
    else:
        pairs = symmetries.find_symmetric_pairs(model, batch=batch)
        named = ("module", "kind", "head", "group", "reason")
        rows = [{name: getattr(pair, name) for name in named} for pair in pairs]
        text, listed = str(pairs), {"pairs": [row | {"group": row["group"] and str(row["group"])} for row in rows]}
    if not options.json:
        print(text)
    if options.verify:
        if batch is None:
            raise ValueError("--verify needs inputs, which are known for the models of libraries only; give --data")
        with naming(f"{options.model} cannot be verified"):
            if options.complete:
                report = verify_whole(model, batch)
            else:
                symmetries.check_coverage(model, lambda: symmetries.default_forward(model, batch), pairs)
                report = symmetries.verify(model, batch)
        listed |= {"changes": report.changes, "failures": report.failures}
    if options.json:
        print(as_json(listed), end="")
    elif report is not None:
        print(f"\n{report}")
    return 0 if report is None or report.ok else 1


def add_canonicalize(commands: Any) -> None:
    """Add ``sharpness canonicalize``."""
    command = add_command(commands, _canonicalize)
    command.add_argument("model", metavar="MODEL", help="a folder of transformers")
    command.add_argument("--out", type=place, required=True, metavar="FOLDER", help="new folder to write")


def _canonicalize(options: argparse.Namespace) -> int:
    """Save a model in canonical form: norms folded, layers centred.

    Save a model of transformers in canonical form. Its function stays the same, and all weights that differ only by a
    continuous symmetry outside the heads have the same canonical form. transformers loads the new folder like the old
    one.

    in a shell:
      sharpness canonicalize path/to/vit --out canonical
    """
    import torch

    from quotient_manifolds.symmetries.whole import canonicalize_

    from ..huggingface import quiet
    from ..models import load

    loaded = load(options.model)
    model: Any = loaded.model
    if loaded.folder is None:
        raise ValueError(f"{options.model}: only models of transformers can be saved in canonical form")
    if options.out.exists():
        raise ValueError(f"--out {options.out} exists already; give a new folder")
    with torch.no_grad():
        before = model(**loaded.example)[0].float()
        form = canonicalize_(model)
        after = model(**loaded.example)[0].float()
    if not form.wired:
        raise ValueError(
            f"the wiring of {type(model).__name__} is not known; describe it in Python with register_wiring"
        )
    change = float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))
    # In half precision 10⁴ roundings would be any change at all.
    if not change <= min(0.1, 1e4 * max(torch.finfo(p.dtype).eps for p in model.parameters())):
        raise ValueError(f"the canonical form of {options.model} changes the outputs by {change:.1e}; it is not saved")
    print(f"{form}\nlargest relative change of an output {change:.0e}")
    with quiet():
        model.save_pretrained(options.out)
    for path in loaded.folder.iterdir():  # tokenizer, image processor; no index of weights in several files
        beside = path.suffix in (".json", ".txt", ".model", ".spm", ".jinja") and not path.name.endswith(".index.json")
        if beside and not (options.out / path.name).exists():
            shutil.copy(path, options.out)
    return 0


def add_run(commands: Any) -> None:
    """Add ``sharpness run``."""
    run = add_command(commands, _run)
    run.add_argument("model", metavar="MODEL", help=_MODEL)
    run.add_argument(
        "data",
        metavar="DATA",
        help="images: a folder with a folder for each class; text: a .tsv, .csv, .jsonl or .parquet table; a folder "
        "saved by datasets (FOLDER/SPLIT); a .safetensors or .pt file with tensors x and y, or with inputs and labels "
        "of a model of transformers; or module:function, a function of yours that returns batches",
    )
    run.add_argument("--checkpoint", help=_WEIGHTS)
    add_data_options(run)
    run.add_argument("--batch-size", type=int, default=256, help="examples in a batch, for data from a file")
    run.add_argument("--batches", type=int, metavar="N", help="use only the first N batches (default: all)")
    run.add_argument("--micro-batch", type=int, metavar="N", help="pass N examples at a time, to save memory")
    run.add_argument("--device", default="cpu", help="cpu or cuda")
    add = run.add_argument_group("measure").add_argument
    names, radii = [*MEASURES, *LOCAL], ", ".join(f"{m.rho:g} for {name}" for name, m in MEASURES.items())
    add("--measure", nargs="+", choices=names, default=["geodesic-inv"], metavar="MEASURE", help=", ".join(names))
    add("--rho", type=float, nargs="+", help=f"radii of the ball (default: {radii})")
    add("--steps", type=int, default=20, help="largest number of steps of an ascent")
    add("--relative-tol", type=float, default=3e-4, help="stop when a step can gain less than this share")
    add("--ascent", choices=["power", "apgd"], default="power", help="generalised power method, or Auto-PGD")
    add("--restarts", type=int, default=0, help="number of further ascents, from random directions")
    add("--seed", type=seed, default=0, help="seed of the random directions")
    run.add_argument("--out", type=place, help="JSON file for results, command, versions and digests")
    run.add_argument("--figures", type=place, help="folder for figures of the worst direction and of the pairs")
    add_json(run)
    run.add_argument("--quiet", action="store_true", help="show no progress")


def _run(options: argparse.Namespace) -> int:
    """Measure the sharpness of a model on data.

    Measure by how much the loss of a model on data can rise within a ball around its weights. Under torchrun (torchrun
    --nproc-per-node N -m sharpness run ...) the work is spread over the processes, with the same result.

    in a shell:
      sharpness run path/to/bert dev.tsv --text sentence --label label --num-examples 512 --out result.json
      sharpness run path/to/vit images/train --num-examples 512 --measure geodesic-inv adaptive
      sharpness run mine:model mine:batches --measure adaptive --rho 0.2 0.5
    """
    from ..distributed import torchrun
    from ..errors import naming
    from ..files import write_json
    from ..models import load

    _check_before(options)
    device = checked_device(options.device)
    with torchrun(device) as group:
        leader = group is None or int(os.environ["RANK"]) == 0
        loaded = load(options.model, options.checkpoint)
        if options.checkpoint is None and loaded.folder is None and ":" not in options.model:
            raise ValueError(f"{options.model} names an architecture without weights; give them with --checkpoint")
        model, batches = loaded.model.to(device), data_choice(options).load(loaded, device)
        remarks = [*loaded.remarks, *batches.remarks]
        if leader and not options.quiet:
            print(f"measuring {type(model).__name__}, batches: {len(batches)}", file=sys.stderr, flush=True)
        if leader and not options.json:
            print(*remarks, sep="\n", end="\n" * bool(remarks), flush=True)
        written: dict[str, Any] = {"results": []}
        if leader and (options.out is not None or options.json):
            written = {**_source(options), "remarks": remarks, **written}
        for measure in options.measure:
            with naming(f"{options.model} on {options.data}"):
                result = _measured(measure, options, model, batches, group)
            written["results"].append({"quantity": measure, **result.to_dict()})
            if leader and not options.json:
                print(result, *_spread(result), "\n", sep="\n", end="", flush=True)
            if leader and options.out is not None:
                write_json(options.out, written)
            if leader and options.figures is not None and measure not in LOCAL:
                _draw(options, model, batches, result)
        if leader and options.json:
            print(as_json(written), end="")
    return 0


def _check_before(options: argparse.Namespace) -> None:
    """Raise for what can be known to be wrong before anything is measured."""
    from ..errors import require_extra
    from ..evaluation import checked_radii
    from ..files import check_apart, check_file, check_folder
    from ..hessian import measure_of
    from ..study.plan import places

    for measure in options.measure:
        if measure not in LOCAL:
            checked_radii(measure_of(measure), options.rho)
        elif options.rho is not None:
            raise ValueError(f"{measure} has no radius; leave --rho out")
    data = places(options.data)
    folders = [path for path in data if path.is_dir()]
    if options.figures is not None:
        check_apart(options.figures, (), folders)
        if "WORLD_SIZE" in os.environ:
            raise ValueError(
                "--figures needs the worst directions, which are not shared between processes; use one process"
            )
        with require_extra("figures need matplotlib", "plot"):
            import matplotlib  # noqa: F401
        check_folder(options.figures)
    if options.out is not None:
        check_file(options.out)
        check_apart(options.out, [*places(options.model), options.checkpoint, *data], folders)


def _measured(measure: str, options: argparse.Namespace, model: Any, batches: Any, group: Any) -> Any:
    from ..evaluation import evaluate
    from ..hessian import hessian, measure_of

    common: Any = {"measure": measure_of(measure), "micro_batch": options.micro_batch, "group": group}
    if measure in LOCAL:
        function = LOCAL[measure][0]
        return function(model, batches, **common, **({"seed": options.seed} if function is hessian else {}))
    quiet = options.quiet or (group is not None and int(os.environ["RANK"]) > 0)
    return evaluate(
        model, batches, rho=options.rho, steps=options.steps, relative_tol=options.relative_tol,
        ascent=options.ascent, restarts=options.restarts, seed=options.seed, progress=not quiet,
        keep_directions=options.figures is not None, **common,
    )  # fmt: skip


def _source(options: argparse.Namespace) -> dict[str, Any]:
    """Describe the inputs and versions behind the numbers, so that they can be cited."""
    from ..study.plan import as_data, of_model, versions

    digest = of_model(options.model, options.checkpoint)
    model = {"name": options.model, "checkpoint": options.checkpoint, "digest": digest}
    return {"command": options.command, "versions": versions(), "model": model, "data": as_data(data_choice(options))}


def _spread(result: Any) -> list[str]:
    """Return the standard error over the batches at every radius of a search."""
    if not hasattr(result, "rhos") or not result.batches:
        return []
    values = {rho: [b.value for b in result[rho].batches] for rho in result.rhos}
    count = len(next(iter(values.values())))
    if count == 1:
        return ["one batch: no spread"]
    errors = ", ".join(f"{stdev(v) / count**0.5:.2g} at rho = {rho:g}" for rho, v in values.items())
    return [f"standard error over the {count} batches: {errors}"]


def _draw(options: argparse.Namespace, model: Any, batches: Any, result: Any) -> None:
    from ..plots import plot_model

    try:
        for path in plot_model(model, batches[0], result, options.figures, micro_batch=options.micro_batch):
            print(f"drawn: {path}", file=sys.stderr if options.json else sys.stdout)
    except ValueError as error:  # the measurement is still valid
        print(f"sharpness: no figures of {result.measure.name}: {error}", file=sys.stderr)
