"""The commands ``run``, ``symmetries`` and ``canonicalize``, for one model."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from statistics import stdev
from typing import Any

from ..local import LOCAL
from ..measures import MEASURES
from .options import (
    Formatter,
    add_data_options,
    add_json,
    as_json,
    checked_device,
    data_choice,
    examples,
    place,
    seed,
)

__all__ = ["add_canonicalize", "add_run", "add_symmetries"]


def add_symmetries(commands: Any) -> None:
    """Add ``sharpness symmetries``."""
    found = commands.add_parser(
        "symmetries",
        help="list the symmetries of a model's attention and LoRA weights",
        description="List, layer by layer, which weights of a model can be changed without changing its function. "
        "An attention class that the package does not know is examined: on examples of --data, or else on random "
        "inputs.",
        epilog=examples("sharpness symmetries path/to/bert --verify", "sharpness symmetries path/to/vit --complete"),
        formatter_class=Formatter,
    )
    found.add_argument(
        "model", metavar="MODEL", help="a folder of transformers, or the name of an open_clip or timm model"
    )
    found.add_argument("--data", metavar="DATA", help="examples to run the model on, given as for `sharpness run`")
    add_data_options(found)
    found.add_argument(
        "--checkpoint", help="local weights for a named model (.safetensors, or a state dict saved by torch)"
    )
    found.add_argument(
        "--key-bias",
        choices=["keep", "drop"],
        default="keep",
        help="keep the key bias, which softmax ignores, as a row of H, or drop it",
    )
    found.add_argument(
        "--verify", action="store_true", help="act on every pair and compare the outputs; exit code 1 if they change"
    )
    found.add_argument(
        "--complete", action="store_true", help="count every continuous symmetry of the whole network, by kind"
    )
    add_json(found)
    found.add_argument("--seed", type=seed, default=0, help="seed of the random matrices that act on the pairs")
    found.set_defaults(run=_symmetries, batch_size=8, batches=1)


def add_canonicalize(commands: Any) -> None:
    """Add ``sharpness canonicalize``."""
    found = commands.add_parser(
        "canonicalize",
        help="save a model in canonical form: norms folded, layers centred",
        description="Save a model of transformers in canonical form. Its function stays the same, and all weights that "
        "differ only by a continuous symmetry outside the heads have the same canonical form. transformers loads the "
        "new folder like the old one.",
        epilog=examples("sharpness canonicalize path/to/vit --out canonical"),
        formatter_class=Formatter,
    )
    found.add_argument("model", metavar="MODEL", help="a folder of transformers")
    found.add_argument(
        "--out", type=place, required=True, metavar="FOLDER", help="folder to write; it must not exist yet"
    )
    found.add_argument("--classes", action="store_true", help="also centre the logits over the classes")
    found.set_defaults(run=_canonicalize)


def _canonicalize(options: argparse.Namespace) -> int:
    import torch

    from quotient_manifolds.symmetries.whole import canonicalize_

    from ..models import load
    from ..models.loaded import quiet

    loaded = load(options.model, None)
    model: Any = loaded.model.eval()
    if not hasattr(model, "save_pretrained") or loaded.example is None:
        raise ValueError(f"{options.model}: only models of transformers can be saved in canonical form")
    if Path(options.out).exists():
        raise ValueError(f"--out {options.out} exists already; give a new folder")
    with torch.no_grad():
        before = model(**loaded.example)[0].float()
        form = canonicalize_(model, classes=options.classes)
        after = model(**loaded.example)[0].float()
    if not form.wired:
        raise ValueError(
            f"the wiring of {type(model).__name__} is not known; describe it in Python with register_wiring"
        )
    if options.classes:
        before, after = (scores.log_softmax(-1) for scores in (before, after))
    change = float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))
    # In half precision 10⁴ roundings would be any change at all.
    if not change <= min(0.1, 1e4 * max(torch.finfo(p.dtype).eps for p in model.parameters())):
        raise ValueError(f"the canonical form of {options.model} changes the outputs by {change:.1e}; it is not saved")
    print(f"{form}\nlargest relative change of an output {change:.0e}")
    with quiet():
        model.save_pretrained(options.out)
    for path in Path(options.model).iterdir():  # tokenizer, image processor
        index = path.name.endswith(".index.json")  # of weights in several files
        if (
            path.suffix in (".json", ".txt", ".model", ".spm", ".jinja")
            and not index
            and not Path(options.out, path.name).exists()
        ):
            shutil.copy(path, options.out)
    return 0


def _symmetries(options: argparse.Namespace) -> int:
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
        shown: Any = canonical_form(model)
        found = {"dimensions": shown.dimensions, "refused": shown.refused}
    else:
        shown = symmetries.find_symmetric_pairs(model, key_bias=options.key_bias, batch=batch)
        found = _listed(shown)
    if not options.json:
        print(shown)
    if options.verify:
        if batch is None:
            raise ValueError("--verify needs inputs, which are known for the models of libraries only; give --data")
        with naming(f"{options.model} cannot be verified"):
            if options.complete:
                report = verify_whole(model, batch, options.seed)
            else:
                symmetries.check_coverage(model, lambda: symmetries.default_forward(model, batch), shown)
                report = symmetries.verify(model, batch, options.seed)
        found |= {"changes": report.changes, "failures": report.failures}
    if options.json:
        print(as_json(found), end="")
    elif report is not None:
        print(f"\n{report}")
    return 0 if report is None or report.ok else 1


def _listed(pairs: Any) -> dict[str, Any]:
    """Describe pairs by names and sizes."""
    return {
        "pairs": [
            {"module": p.module, "kind": p.kind, "head": p.head, "group": p.group and str(p.group), "reason": p.reason}
            for p in pairs
        ]
    }


def add_run(commands: Any) -> None:
    """Add ``sharpness run``."""
    run = commands.add_parser(
        "run",
        help="measure the sharpness of a model on data",
        description="Measure by how much the loss of a model on data can rise within a ball around its weights. Under "
        "torchrun (torchrun --nproc-per-node N -m sharpness run ...) the work is spread over the processes, with the "
        "same result.",
        epilog=examples(
            "sharpness run path/to/bert dev.tsv --text sentence --label label --num-examples 512 --out result.json",
            "sharpness run path/to/vit images.zip:train --num-examples 512 --measure geodesic-inv adaptive",
            "sharpness run mine:model mine:batches --measure adaptive --rho 0.2 0.5",
        ),
        formatter_class=Formatter,
    )
    run.add_argument(
        "model",
        metavar="MODEL",
        help="a folder of transformers, the name of an open_clip or timm model, or module:function, a function of "
        "yours that returns a model",
    )
    run.add_argument(
        "data",
        metavar="DATA",
        help="images: a folder with a folder for each class, a zip of that (FILE.zip:FOLDER/INSIDE), or an idx file "
        "such as MNIST's with its labels beside it; text: a .tsv, .csv or .jsonl table; a folder saved by datasets "
        "(FOLDER:SPLIT); a .safetensors or .pt file with tensors x and y, or with inputs and labels of a model of "
        "transformers; "
        "or module:function, a function of yours that returns batches",
    )
    run.add_argument("--checkpoint", help="local weights (.safetensors, or a state dict saved by torch)")
    run.add_argument("--head", help="file with the weight (and bias) of a classifier on the image tower of open_clip")
    add_data_options(run)
    run.add_argument("--batch-size", type=int, default=256, help="examples in a batch, for data from a file")
    run.add_argument("--batches", type=int, help="use only the first N batches (default: all)", metavar="N")
    run.add_argument(
        "--micro-batch", type=int, help="pass this many examples through the model at a time, to save memory"
    )
    run.add_argument("--device", default="cpu", help="cpu or cuda")
    _add_search(run)
    run.add_argument(
        "--out",
        type=place,
        help="JSON file for the results, with command, versions and digests of model and data",
    )
    run.add_argument(
        "--figures",
        type=place,
        help="folder for figures: the loss along the worst direction, the layers and heads that it moves, and the "
        "spectra of the attention pairs",
    )
    add_json(run)
    run.add_argument("--quiet", action="store_true", help="show no progress")
    run.set_defaults(run=_run)


def _add_search(command: argparse.ArgumentParser) -> None:
    """Add options for what is measured and how the maximum is sought."""
    run = command.add_argument_group("measure")
    run.add_argument("--measure", nargs="+", choices=[*MEASURES, *LOCAL], default=["geodesic-inv"], metavar="MEASURE",
                     help="one or several of " + ", ".join([*MEASURES, *LOCAL]))  # fmt: skip
    radii = ", ".join(f"{m.rho:g} for {name}" for name, m in MEASURES.items())
    run.add_argument("--rho", type=float, nargs="+", help=f"radii of the ball (default: {radii})")
    run.add_argument("--steps", type=int, default=20, help="largest number of steps of an ascent")
    run.add_argument(
        "--relative-tol",
        type=float,
        default=3e-4,
        help="stop when a further step can gain less than this share of the increase found so far",
    )
    run.add_argument(
        "--ascent",
        choices=["power", "apgd"],
        default="power",
        help="method that seeks the maximum: the generalised power method, or Auto-PGD",
    )
    run.add_argument("--restarts", type=int, default=0, help="number of further ascents, from random directions")
    run.add_argument("--seed", type=seed, default=0, help="seed of the random directions")


def _run(options: argparse.Namespace) -> int:
    from ..distributed import torchrun
    from ..errors import naming
    from ..evaluation import checked_radii, evaluate
    from ..files import check_apart, check_file, write_json
    from ..local import hessian, measure_of
    from ..models import load
    from ..study.plan import places

    for measure in options.measure:  # before any of them is run
        checked = measure_of(measure)
        if measure not in LOCAL:
            checked_radii(checked, options.rho)
        elif options.rho is not None:
            raise ValueError(f"{measure} has no radius; leave --rho out")
    data = places(options.data)
    whole = [path for path in data if path.is_dir()]
    if options.figures is not None:
        check_apart(options.figures, (), whole)
        _check_figures(options.figures)
    if options.out is not None:
        check_file(options.out)
        check_apart(options.out, [*places(options.model), options.checkpoint, options.head, *data], whole)
    device = checked_device(options.device)
    with torchrun(device) as group:
        loaded = load(options.model, options.checkpoint, head=options.head)
        if options.checkpoint is None and loaded.folder is None and ":" not in options.model:
            raise ValueError(f"{options.model} names an architecture without weights; give them with --checkpoint")
        model = loaded.model.to(device)
        batches = data_choice(options).load(loaded, device)
        remarks = [*loaded.remarks, *batches.remarks]
        leader = group is None or int(os.environ["RANK"]) == 0
        source: dict[str, Any] = {}
        if leader and (options.out is not None or options.json):
            source = {**_source(options), "remarks": remarks}
        if leader and not options.quiet:
            print(_about(loaded, batches), file=sys.stderr, flush=True)
        if leader and not options.json:
            print(*remarks, sep="\n", end="\n" * bool(remarks), flush=True)
        found = []
        for measure in options.measure:
            with naming(f"{options.model} on {options.data}"):
                common: Any = {"measure": measure_of(measure), "micro_batch": options.micro_batch, "group": group}
                if measure in LOCAL:
                    function = LOCAL[measure][0]
                    seed = {"seed": options.seed} if function is hessian else {}
                    result: Any = function(model, batches, **common, **seed)
                else:
                    result = evaluate(
                        model, batches, rho=options.rho, steps=options.steps, relative_tol=options.relative_tol,
                        ascent=options.ascent, restarts=options.restarts, seed=options.seed,
                        keep_directions=options.figures is not None, progress=not options.quiet and leader, **common,
                    )  # fmt: skip
            found.append({"quantity": measure, **result.to_dict()})
            if leader:
                if not options.json:
                    print(result, *_spread(result), "\n", sep="\n", end="", flush=True)
                if options.out is not None:
                    write_json(options.out, {**source, "results": found})
                if options.figures is not None and measure not in LOCAL:
                    _draw(options, model, batches, result)
        if options.json and leader:
            print(as_json({**source, "results": found}), end="")
    return 0


def _source(options: argparse.Namespace) -> dict[str, Any]:
    """Describe the inputs and versions behind the numbers, so that they can be cited."""
    from ..study.plan import as_data, of_model, versions

    digest = of_model(options.model, options.checkpoint, options.head)
    model = {"name": options.model, "checkpoint": options.checkpoint, "head": options.head, "digest": digest}
    return {"command": options.command, "versions": versions(), "model": model, "data": as_data(data_choice(options))}


def _spread(result: Any) -> list[str]:
    """Return the standard error over the batches at every radius of a search."""
    count = len(result.batches) // len(getattr(result, "rhos", [0]))
    if not hasattr(result, "rhos") or not count:
        return []
    if count == 1:
        return ["one batch: no spread"]
    values = {rho: [b.value for b in result[rho].batches] for rho in result.rhos}
    errors = ", ".join(f"{stdev(v) / count**0.5:.2g} at rho = {rho:g}" for rho, v in values.items())
    return [f"standard error over the {count} batches: {errors}"]


def _about(loaded: Any, batches: Any) -> str:
    """Describe model and data in one line, which also shows in a log that the files were read."""
    from quotient_manifolds.batches import tensors
    from quotient_manifolds.symmetries import find_symmetric_pairs

    pairs = [p for p in find_symmetric_pairs(loaded.model) if p.group is not None]
    layers = len({p.module for p in pairs})
    examples = sum(next((len(t) for t in tensors(b) if t.dim()), 1) for b in batches)
    return (
        f"measuring {type(loaded.model).__name__}: {loaded.weights}, {len(pairs)} symmetric pairs in {layers} layers; "
        f"{examples} examples in {len(batches)} batch{'es' * (len(batches) > 1)}"
    )


def _check_figures(folder: Path) -> None:
    from ..extras import require_extra
    from ..files import check_folder

    if "WORLD_SIZE" in os.environ:
        raise ValueError(
            "--figures needs the worst directions, which are not shared between processes; use one process"
        )
    with require_extra("figures need matplotlib", "plot"):
        import matplotlib  # noqa: F401
    check_folder(folder)


def _draw(options: argparse.Namespace, model: Any, batches: Any, result: Any) -> None:
    from ..plots import plot_model

    try:
        for path in plot_model(model, batches[0], result, options.figures, micro_batch=options.micro_batch):
            print(f"drawn: {path}", file=sys.stderr if options.json else sys.stdout)
    except ValueError as error:  # the measurement is still valid
        print(f"sharpness: no figures of {result.measure.name}: {error}", file=sys.stderr)
