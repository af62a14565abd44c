"""symmetries, run: what is asked of one model."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from .options import Formatter, add_data_options, checked_device, data_choice, place, seed

__all__ = ["add_canonicalize", "add_run", "add_symmetries"]


def add_symmetries(commands: Any) -> None:
    """Add ``sharpness symmetries``."""
    found = commands.add_parser(
        "symmetries",
        help="list the symmetries of a model's attention and LoRA weights",
        description="List, layer by layer, which weights of a model can be changed without changing its function. "
        "Attention of a class that nobody wrote down is examined, on examples of --data or else on random inputs.",
        formatter_class=Formatter,
    )
    found.add_argument(
        "model", metavar="MODEL", help="a transformers folder, or the name of an open_clip or timm model"
    )
    found.add_argument("--data", metavar="DATA", help="examples to run the model on, given as for sharpness run")
    add_data_options(found)
    found.add_argument("--checkpoint", help="local weights for a name (.safetensors, or a state dict saved by torch)")
    found.add_argument(
        "--key-bias",
        choices=["keep", "drop"],
        default="keep",
        help="leave the null direction of the key bias in H or not",
    )
    found.add_argument(
        "--verify", action="store_true", help="act on every pair and compare the outputs; exit code 1 if they move"
    )
    found.add_argument(
        "--complete", action="store_true", help="count every continuous symmetry of the whole network, by kind"
    )
    found.add_argument("--seed", type=seed, default=0, help="seed of the group elements")
    found.set_defaults(run=_symmetries, batch_size=8, batches=1)


def add_canonicalize(commands: Any) -> None:
    """Add ``sharpness canonicalize``."""
    found = commands.add_parser(
        "canonicalize",
        help="save a model in canonical form: norms folded, layers centred",
        description="Save a transformers model with the same function in canonical form, which all weights that differ "
        "by a continuous symmetry outside the heads share. The folder loads in transformers as before.",
        formatter_class=Formatter,
    )
    found.add_argument("model", metavar="MODEL", help="a transformers folder")
    found.add_argument("--out", type=place, required=True, metavar="FOLDER", help="folder that is written")
    found.add_argument("--classes", action="store_true", help="centre the logits over the classes too")
    found.set_defaults(run=_canonicalize)


def _canonicalize(options: argparse.Namespace) -> int:
    import torch

    from quotient_manifolds.symmetries.whole import canonicalize_

    from ..models import load

    loaded = load(options.model, None)
    model: Any = loaded.model.eval()
    if not hasattr(model, "save_pretrained") or loaded.example is None:
        raise ValueError(f"{options.model}: only transformers models are saved again")
    if Path(options.out).exists():
        raise ValueError(f"--out {options.out} exists already; give a new folder")
    with torch.no_grad():
        before = model(**loaded.example)[0].float()
        form = canonicalize_(model, classes=options.classes)
        after = model(**loaded.example)[0].float()
    if form.wiring is None or not form.wiring.sites:
        raise ValueError(f"nobody has said how a {type(model).__name__} is wired; register_wiring does, in Python")
    if options.classes:
        before, after = (scores.log_softmax(-1) for scores in (before, after))
    change = float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))
    if not change <= 1e4 * max(torch.finfo(p.dtype).eps for p in model.parameters()):
        raise ValueError(f"the canonical form of {options.model} changes the outputs by {change:.1e}; it is not saved")
    print(f"{form}\nlargest relative change of an output {change:.0e}")
    model.save_pretrained(options.out)
    for path in Path(options.model).iterdir():  # tokenizer, image processor
        if path.suffix in (".json", ".txt", ".model") and not Path(options.out, path.name).exists():
            shutil.copy(path, options.out)
    return 0


def _symmetries(options: argparse.Namespace) -> int:
    import torch

    from quotient_manifolds import symmetries

    from ..errors import naming
    from ..models import load

    loaded = load(options.model, options.checkpoint)
    batch = loaded.example
    if options.data is not None:
        batch = data_choice(options).load(loaded, torch.device("cpu"))[0]
    if options.complete:
        return _complete(options, loaded.model, batch)
    found = symmetries.find_symmetric_pairs(loaded.model, key_bias=options.key_bias, batch=batch)
    print(found)
    if not options.verify:
        return 0
    if batch is None:
        raise ValueError("--verify needs inputs, which are known for the models of libraries only; give --data")
    with naming(f"{options.model} cannot be verified"):
        symmetries.check_coverage(loaded.model, lambda: symmetries.default_forward(loaded.model, batch), found)
        report = symmetries.verify(loaded.model, batch, options.seed)
    print(f"\n{report}")
    return 0 if report.ok else 1


def _complete(options: argparse.Namespace, model: Any, batch: Any) -> int:
    from quotient_manifolds.symmetries.whole import canonical_form, verify_whole

    print(canonical_form(model))
    if not options.verify:
        return 0
    if batch is None:
        raise ValueError("--verify needs inputs, which are known for the models of libraries only; give --data")
    report = verify_whole(model, batch, options.seed)
    print(f"\n{report}")
    return 0 if report.ok else 1


def add_run(commands: Any) -> None:
    """Add ``sharpness run``."""
    run = commands.add_parser(
        "run",
        help="measure the sharpness of a model on data",
        description="Measure the sharpness of a model on data. Under torchrun (torchrun --nproc-per-node N -m "
        "sharpness run ...) the work is spread over the processes, with the same result.",
        formatter_class=Formatter,
    )
    run.add_argument(
        "model",
        metavar="MODEL",
        help="a transformers folder, the name of an open_clip or timm model, or module:function that returns a model",
    )
    run.add_argument(
        "data",
        metavar="DATA",
        help="a folder of class folders of images or a zip of them (FILE.zip:FOLDER/INSIDE); an idx file of images "
        "as MNIST's, its labels beside it; a .tsv, .csv or .jsonl table of text; "
        "a folder saved by datasets (FOLDER:SPLIT); a .safetensors file with "
        "tensors x "
        "and y, or with a transformers model's inputs and labels by name; or module:function that returns batches",
    )
    run.add_argument("--checkpoint", help="local weights (.safetensors, or a state dict saved by torch)")
    run.add_argument("--head", help="file with weight (and bias) of a classifier on open_clip's image tower")
    add_data_options(run)
    run.add_argument("--measure", nargs="+", default=["geodesic-inv"], help="one or several measures")
    run.add_argument("--rho", type=float, nargs="+", help="radii (default: each measure's own)")
    run.add_argument("--steps", type=int, default=20, help="most steps of an ascent")
    run.add_argument("--relative-tol", type=float, default=3e-4, help="stop when a step offers less than this share")
    run.add_argument("--ascent", choices=["power", "apgd"], default="power", help="how the maximum is sought")
    run.add_argument("--restarts", type=int, default=0, help="further ascents from random directions")
    run.add_argument("--seed", type=seed, default=0, help="seed of the random directions")
    run.add_argument("--batch-size", type=int, default=256, help="examples a batch, for data from a file")
    run.add_argument("--batches", type=int, help="use the first so many batches (default: all)")
    run.add_argument("--micro-batch", type=int, help="examples that pass through the model at a time")
    run.add_argument("--device", default="cpu", help="cpu or cuda")
    run.add_argument("--out", type=place, help="JSON file for the results")
    run.add_argument(
        "--figures",
        type=place,
        help="folder for figures: the loss along the worst direction, the layers and heads it moves, the spectra of "
        "the attention pairs",
    )
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    from ..distributed import torchrun
    from ..errors import naming
    from ..evaluation import checked_radii, evaluate
    from ..files import check_file, write_json
    from ..local import LOCAL, hessian, measure_of
    from ..models import load

    for measure in options.measure:  # before any of them takes its time
        checked = measure_of(measure)
        if measure not in LOCAL:
            checked_radii(checked, options.rho)
        elif options.rho is not None:
            raise ValueError(f"{measure} has no radius; leave --rho out")
    if options.figures is not None:
        _check_figures(options.figures)
    if options.out is not None:
        check_file(options.out)
    device = checked_device(options.device)
    with torchrun(device) as group:
        loaded = load(options.model, options.checkpoint, head=options.head)
        model = loaded.model.to(device)
        batches = data_choice(options).load(loaded, device)
        leader = group is None or int(os.environ["RANK"]) == 0
        if leader and not options.quiet:
            print(_about(model, batches), file=sys.stderr, flush=True)
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
            found.append(result.to_dict())
            if leader:
                print(result, "\n", sep="", flush=True)
                if options.out is not None:
                    write_json(options.out, found)
                if options.figures is not None and measure not in LOCAL:
                    _draw(options, model, batches, result)
    return 0


def _about(model: Any, batches: Any) -> str:
    """Say what is measured: a line that also tells a log that the files are read."""
    from quotient_manifolds.batches import tensors
    from quotient_manifolds.symmetries import find_symmetric_pairs

    pairs = [p for p in find_symmetric_pairs(model) if p.group is not None]
    layers = len({p.module for p in pairs})
    examples = sum(next((len(t) for t in tensors(b) if t.dim()), 1) for b in batches)
    return (
        f"measuring {type(model).__name__}: {sum(p.numel() for p in model.parameters()):,} weights, {len(pairs)} "
        f"symmetric pairs in {layers} layers; {examples} examples in {len(batches)} batch{'es' * (len(batches) > 1)}"
    )


def _check_figures(folder: Path) -> None:
    from ..files import check_folder
    from ..plots.look import style

    if "WORLD_SIZE" in os.environ:
        raise ValueError("--figures needs the worst directions, which the processes keep to themselves; run it alone")
    with style():
        check_folder(folder)


def _draw(options: argparse.Namespace, model: Any, batches: Any, result: Any) -> None:
    from ..plots import plot_model

    try:
        for path in plot_model(model, batches[0], result, options.figures, micro_batch=options.micro_batch):
            print(f"drawn: {path}")
    except ValueError as error:  # the measurement stands
        print(f"sharpness: no figures of {result.measure.name}: {error}", file=sys.stderr)
