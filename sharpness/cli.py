"""The command line: parses, calls the functions of the package, prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .distributed import RemoteError

if TYPE_CHECKING:
    from .data import DataChoice

__all__ = ["main"]


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def _demo(options: argparse.Namespace) -> int:
    from .studies import demo

    demo.run(seed=options.seed, out=options.out, condition=options.condition, progress=not options.quiet)
    return 0


def _toy(options: argparse.Namespace) -> int:
    from .studies import toy

    toy.run(out=options.out, x=options.x, y=options.y, progress=not options.quiet)
    return 0


def _diagonal(options: argparse.Namespace) -> int:
    from .studies import diagonal

    diagonal.run(
        n=options.n, d=options.d, models=options.models, seeds=options.seeds, seed=options.seed,
        alpha_min=options.alpha_min, alpha_max=options.alpha_max, rhos=options.rho, out=options.out,
        workers=options.workers, progress=not options.quiet,
    )  # fmt: skip
    return 0


def _symmetries(options: argparse.Namespace) -> int:
    from quotient_manifolds import symmetries

    from .models import load

    loaded = load(options.model, options.checkpoint)
    print(symmetries.find(loaded.model, key_bias=options.key_bias))
    if not options.verify:
        return 0
    if loaded.example is None:
        raise ValueError(
            "--verify needs inputs, which are known for the models of libraries only; use verify in Python"
        )
    symmetries.check_coverage(loaded.model, lambda: symmetries.default_forward(loaded.model, loaded.example))
    report = symmetries.verify(loaded.model, loaded.example, options.seed)
    print(f"\n{report}")
    return 0 if report.ok else 1


def _data(options: argparse.Namespace) -> DataChoice:
    from .data import DataChoice, TextColumns, named_labels

    columns = TextColumns(
        options.text, options.pair, options.label, named_labels(options.map), not options.no_header, options.length
    )
    mean, std = (None if v is None else tuple(v) for v in (options.mean, options.std))
    return DataChoice(
        options.data, options.batch_size, options.batches, options.examples, options.choose_seed, columns,
        options.image_size, mean, std,
    )  # fmt: skip


def _run(options: argparse.Namespace) -> int:
    import torch

    from .distributed import torchrun
    from .evaluation import evaluate
    from .models import load
    from .results import write_json

    device = torch.device(options.device)
    with torchrun(device) as group:
        if device.type == "cuda" and group is not None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        loaded = load(options.model, options.checkpoint, head=options.head)
        model = loaded.model.to(device)
        batches = _data(options).load(loaded, device)
        leader = group is None or int(os.environ["RANK"]) == 0
        found = []
        for measure in options.measure:
            result = evaluate(
                model, batches, measure=measure, rho=options.rho, steps=options.steps, tol=options.tol,
                ascent=options.ascent, restarts=options.restarts, seed=options.seed, micro_batch=options.micro_batch,
                keep_directions=False, progress=not options.quiet and leader, group=group,
            )  # fmt: skip
            found.append(result.to_dict())
            if leader:
                print(result, "\n", sep="", flush=True)
        if leader and options.out is not None:
            write_json(options.out, found)
    return 0


def _shard(text: str) -> tuple[int, int]:
    first, _, last = text.partition("/")
    if not (first.isdigit() and last.isdigit()):
        raise ValueError(f"--shard takes i/n, as 1/4, and {text!r} is none")
    return int(first), int(last)


def _finetune(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from .studies.finetune import Recipe, random_recipe
    from .studies.zoo import train_zoo

    data = _data(options)
    given: dict[str, Any] = {"lr": options.lr, "epochs": options.epochs, "batch": options.batch}
    if options.vary == "seed":
        one = {k: v[0] if isinstance(v, list) else v for k, v in given.items() if v is not None}
        recipes = [Recipe(seed=seed, **one) for seed in range(options.models)]
    else:
        ranges: dict[str, Any] = {
            k: (v[0], v[-1]) if isinstance(v, list) else v for k, v in given.items() if v is not None
        }
        recipes = [random_recipe(seed, images=not data.is_text, **ranges) for seed in range(options.models)]
    test = None if options.test is None else replace(data, source=options.test, examples=None, seed=None)
    config = train_zoo(
        options.model, data, options.out, checkpoint=options.checkpoint, recipes=recipes, test=test,
        points=options.points, shard=_shard(options.shard), device=options.device, progress=not options.quiet,
    )  # fmt: skip
    if not options.quiet:
        print(f"measure them with: sharpness sweep {config} --out RESULTS")
    return 0


def _pretrain(options: argparse.Namespace) -> int:
    from .data import read_texts
    from .studies.text import pretrain

    texts = [t for path in options.texts for t in read_texts(path, options.text.split(","), not options.no_header)]
    losses = pretrain(
        texts, options.out, width=options.width, depth=options.depth, heads=options.heads,
        vocabulary=options.vocabulary, length=options.length, steps=options.steps, batch=options.batch, lr=options.lr,
        seed=options.seed, progress=not options.quiet,
    )  # fmt: skip
    if not options.quiet:
        tail = losses[-max(1, len(losses) // 20) :]
        print(f"{len(texts)} texts, loss of masked words {sum(tail) / len(tail):.3f}; the model is in {options.out}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from .convert import bert_from_tensorflow

    folder = bert_from_tensorflow(
        options.checkpoint, options.out, config=options.config, vocab=options.vocab, labels=options.labels.split(","),
        cased=options.cased,
    )  # fmt: skip
    print(f"the transformers folder is {folder}")
    return 0


def _sweep(options: argparse.Namespace) -> int:
    import torch

    from .distributed import torchrun
    from .rows import write_csv, write_rows
    from .sweep import read_config, read_rows, run_sweep

    shard = _shard(options.shard)
    sweep = read_config(options.config)
    with torchrun(torch.device("cpu")) as group:
        leader = group is None or int(os.environ["RANK"]) == 0
        failed = run_sweep(sweep, options.out, shard=shard, progress=not options.quiet and leader)
    rows: list[dict[str, Any]] | None = None
    while rows != (now := read_rows(options.out, sweep)):  # others may finish meanwhile, and write too
        rows = now
        write_rows(options.out / "results.jsonl", rows)
        write_csv(options.out / "results.csv", rows)
    for unit in failed:
        what = unit.get("measure", unit["kind"])
        print(f"sharpness: {unit['checkpoint']}, {what}: {unit['error']}", file=sys.stderr)
    if not options.quiet and leader:
        print(f"{len(rows or ())} rows in {options.out / 'results.jsonl'}")
    return 1 if failed else 0


def _table(options: argparse.Namespace) -> int:
    from .comparison import compare, formatted
    from .rows import read_results

    found = compare(read_results(options.results), options.target, every_radius=not options.short)
    text = formatted(found, options.format)
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text, encoding="utf-8")
    return 0


def _plot(options: argparse.Namespace) -> int:
    from .plots import plot_study
    from .rows import read_results

    options.out.mkdir(parents=True, exist_ok=True)
    for path in plot_study(read_results(options.results), options.target, options.out, suffix=options.format):
        print(path)
    return 0


def _add_data_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("data")
    group.add_argument("--examples", type=int, help="use the first so many examples of a file (default: all)")
    group.add_argument("--choose-seed", type=int, help="choose them at random with this seed instead")
    group.add_argument("--text", default="text", help="column of the text, by name, or by number without a header")
    group.add_argument("--pair", help="column of the second text of a pair")
    group.add_argument("--label", default="label", help="column of the label")
    group.add_argument("--map", help="what labels mean, as entailment=0,neutral=1 (default: the model's own names)")
    group.add_argument("--no-header", action="store_true", help="the table's first line is no header")
    group.add_argument("--length", type=int, default=128, help="longest input in tokens")
    group.add_argument("--image-size", type=int, help="side of the images (default: what the model says)")
    group.add_argument("--mean", type=float, nargs="+", help="mean of each channel (default: what the model says)")
    group.add_argument("--std", type=float, nargs="+", help="standard deviation of each channel")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = argparse.ArgumentParser(
        prog="sharpness",
        description="Geodesic sharpness of transformers: the worst rise of the loss around the weights.",
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small vision transformer on scanned digits and measure its sharpness",
        description="Train a small vision transformer on scikit-learn's digits (under a minute), measure its sharpness "
        "by all measures, move every attention head along its symmetry, measure again. Prints a table and saves a "
        "picture.",
        formatter_class=_Formatter,
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of the split, the training and the symmetry")
    demo.add_argument("--out", type=Path, default=Path("sharpness-demo.png"), help="where the picture goes")
    demo.add_argument(
        "--condition", type=float, default=30.0, help="condition number of the random group elements (1: orthogonal)"
    )
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    demo.set_defaults(run=_demo)
    found = commands.add_parser(
        "symmetries",
        help="list the symmetries of a model's attention and LoRA weights",
        description="List, layer by layer, which weights of a model can be changed without changing its function.",
        formatter_class=_Formatter,
    )
    found.add_argument(
        "model", metavar="MODEL", help="a transformers folder, or the name of an open_clip or timm model"
    )
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
    found.add_argument("--seed", type=int, default=0, help="seed of the group elements")
    found.set_defaults(run=_symmetries)
    run = commands.add_parser(
        "run",
        help="measure the sharpness of a model on data",
        description="Measure the sharpness of a model on data. Under torchrun (torchrun --nproc-per-node N -m "
        "sharpness run ...) the work is spread over the processes, with the same result.",
        formatter_class=_Formatter,
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
    _add_data_options(run)
    run.add_argument("--measure", nargs="+", default=["geodesic-inv"], help="one or several measures")
    run.add_argument("--rho", type=float, nargs="+", help="radii (default: each measure's own)")
    run.add_argument("--steps", type=int, default=20, help="most steps of an ascent")
    run.add_argument("--tol", type=float, default=3e-4, help="stop when a step offers less than this share of the rise")
    run.add_argument("--ascent", choices=["power", "apgd"], default="power", help="how the maximum is sought")
    run.add_argument("--restarts", type=int, default=0, help="further ascents from random directions")
    run.add_argument("--seed", type=int, default=0, help="seed of the random directions")
    run.add_argument("--batch-size", type=int, default=256, help="examples a batch, for data from a file")
    run.add_argument("--batches", type=int, help="use the first so many batches (default: all)")
    run.add_argument("--micro-batch", type=int, help="examples that pass through the model at a time")
    run.add_argument("--device", default="cpu", help="cpu or cuda")
    run.add_argument("--out", type=Path, help="JSON file for the results")
    run.add_argument("--quiet", action="store_true", help="no progress bar")
    run.set_defaults(run=_run)
    sweep = commands.add_parser(
        "sweep",
        help="measure many checkpoints; resumes where it was stopped",
        description="Measure many checkpoints under many measures, radii and ablations, as a YAML or JSON file says: "
        "checkpoints (a pattern, or a list of {path, model, head}), data, train and test (a source, or a mapping with "
        "source, examples, seed, batch_size, text, label, ...) or, in place of test, accuracies ({file, name, test}), "
        "measures, rho (a list, or lists by measure), ablations (a list of switches such as {geodesic: first-order}, "
        "which may have a rho and measures of their own), baselines (norms and the like: true), initial (the weights "
        "all were fine-tuned from), steps, tol, device. Finished units are kept in the folder OUT; "
        "call it again to go on. Under torchrun processes draw checkpoints from a common counter; --shard splits them "
        "among independent jobs that share OUT. Exit code 1 if a checkpoint failed.",
        formatter_class=_Formatter,
    )
    sweep.add_argument("config", type=Path, metavar="CONFIG", help="YAML or JSON file")
    sweep.add_argument("--out", type=Path, required=True, help="folder for the results")
    sweep.add_argument("--shard", default="1/1", help="take the i-th of n parts of the checkpoints")
    sweep.add_argument("--quiet", action="store_true", help="no progress bar")
    sweep.set_defaults(run=_sweep)
    for name, run_it, words in (
        ("table", _table, "print how every measure ranks the models of a sweep"),
        ("plot", _plot, "draw the figures of a sweep"),
    ):
        shown = commands.add_parser(
            name,
            help=words,
            description="Kendall's tau of the generalisation gap with every measure: at every radius, at the paper's, "
            "at its best and at equal rise of the loss; with bootstrap intervals, controlled for the training loss, "
            "beside norms and other baselines."
            if name == "table"
            else "Scatter of the gap against every measure (at its best radius, and at equal rise of the loss), the "
            "ablations, the relaxation, and sharpness and tau along the radius.",
            formatter_class=_Formatter,
        )
        shown.add_argument("results", type=Path, metavar="RESULTS", help="a sweep's folder, results.jsonl or .csv")
        shown.add_argument(
            "--target", choices=["gap", "loss-gap", "test-error", "test-loss"], default="gap", help="what is predicted"
        )
        shown.set_defaults(run=run_it)
        if name == "table":
            shown.add_argument(
                "--format", choices=["markdown", "latex", "csv"], default="markdown", help="of the table"
            )
            shown.add_argument("--short", action="store_true", help="chosen radii only, not every radius of the sweep")
            shown.add_argument("--out", type=Path, help="file (default: print)")
        else:
            shown.add_argument("--format", choices=["png", "pdf", "svg"], default="png", help="of the figures")
            shown.add_argument("--out", type=Path, required=True, help="folder for the figures")
    zoo = commands.add_parser(
        "finetune",
        help="fine-tune a model many times, for a study of sharpness and generalisation",
        description="Fine-tune a model many times on one data set, with random recipes (learning rate, weight decay, "
        "epochs, label smoothing, label noise, and for images augmentation and mix-up) or with seeds alone, and write "
        "the checkpoints and a configuration for `sharpness sweep`. Models that are there are not trained again.",
        formatter_class=_Formatter,
    )
    zoo.add_argument("model", metavar="MODEL", help="as for run; a transformers folder gets a new head for texts")
    zoo.add_argument("data", metavar="DATA", help="training data: images or a table of text, as for run")
    zoo.add_argument("--checkpoint", help="local weights (.safetensors, or a state dict saved by torch)")
    zoo.add_argument("--test", help="test data, for the configuration")
    _add_data_options(zoo)
    zoo.add_argument("--models", type=int, default=24, help="how many")
    zoo.add_argument("--vary", choices=["recipe", "seed"], default="recipe", help="what differs between the models")
    zoo.add_argument(
        "--lr",
        type=float,
        nargs="+",
        help="learning rate: a range (default: 3e-5 to 1e-3), or one for --vary seed (1e-4)",
    )
    zoo.add_argument(
        "--epochs", type=int, nargs="+", help="epochs: a range (default: 2 to 6), or one for --vary seed (3)"
    )
    zoo.add_argument("--batch", type=int, help="examples a step (default: 64)")
    zoo.add_argument("--points", type=int, default=256, help="training examples to measure on")
    zoo.add_argument("--shard", default="1/1", help="train the i-th of n parts of the models")
    zoo.add_argument("--device", default="cpu", help="cpu or cuda")
    zoo.add_argument("--out", type=Path, required=True, help="folder for the models")
    zoo.add_argument("--quiet", action="store_true", help="no progress bar")
    # Class folders are in the order of their classes: a part of them is chosen at random.
    zoo.set_defaults(run=_finetune, batch_size=256, batches=None, choose_seed=0)
    pretraining = commands.add_parser(
        "pretrain",
        help="pre-train a small BERT on texts of your own",
        description="Train a WordPiece vocabulary and a small BERT by masked-language modelling on the texts of "
        "tables, and write a transformers folder, which `sharpness finetune` takes.",
        formatter_class=_Formatter,
    )
    pretraining.add_argument("texts", type=Path, nargs="+", metavar="TABLE", help=".tsv, .csv or .jsonl files")
    pretraining.add_argument("--text", default="text", help="columns of the texts, as premise,hypothesis")
    pretraining.add_argument("--no-header", action="store_true", help="the tables' first line is no header")
    pretraining.add_argument("--width", type=int, default=128, help="hidden width")
    pretraining.add_argument("--depth", type=int, default=4, help="layers")
    pretraining.add_argument("--heads", type=int, default=4, help="attention heads")
    pretraining.add_argument("--vocabulary", type=int, default=8000, help="entries of the vocabulary")
    pretraining.add_argument("--length", type=int, default=64, help="longest input in tokens")
    pretraining.add_argument("--steps", type=int, default=9000, help="steps of training")
    pretraining.add_argument("--batch", type=int, default=64, help="texts a step")
    pretraining.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    pretraining.add_argument("--seed", type=int, default=0, help="seed of weights, order and masks")
    pretraining.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    pretraining.add_argument("--quiet", action="store_true", help="no progress bar")
    pretraining.set_defaults(run=_pretrain)
    convert = commands.add_parser(
        "convert",
        help="turn a checkpoint of another library into one that can be measured",
        description="Turn a checkpoint of another library into one that can be measured.",
    )
    kinds = convert.add_subparsers(title="kinds", required=True, metavar="KIND")
    google = kinds.add_parser(
        "bert-tf",
        help="a BERT classifier of Google's run_classifier.py (TensorFlow 1) to a transformers folder",
        description="Turn a BERT classifier of Google's run_classifier.py (TensorFlow 1) into a transformers folder, "
        "through tensorflow's own reader.",
        formatter_class=_Formatter,
    )
    google.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder, or prefix .../model.ckpt-N")
    google.add_argument("out", type=Path, metavar="OUT", help="the new transformers folder")
    google.add_argument("--config", type=Path, help="bert_config.json (default: beside the checkpoint)")
    google.add_argument("--vocab", type=Path, help="vocab.txt (default: beside the checkpoint)")
    google.add_argument("--labels", default="contradiction,entailment,neutral", help="names of the classes, in order")
    google.add_argument("--cased", action="store_true", help="the vocabulary tells upper from lower case")
    google.set_defaults(run=_convert)
    toy = commands.add_parser(
        "toy",
        help="the two-parameter network: level sets of Euclidean and Riemannian quantities",
        description="Draw the loss, the gradient norms and the Hessian traces of the network x ↦ θ₂θ₁x, Euclidean and "
        "on the quotient, how much each varies along an orbit, and the geodesic sharpness against its closed form.",
        formatter_class=_Formatter,
    )
    toy.add_argument("--out", type=Path, default=Path("toy"), help="folder for the figure and the numbers")
    toy.add_argument("--x", type=float, default=1.0, help="the input")
    toy.add_argument("--y", type=float, default=1.0, help="the target")
    toy.add_argument("--quiet", action="store_true", help="no progress bar")
    toy.set_defaults(run=_toy)
    diagonal = commands.add_parser(
        "diagonal",
        help="diagonal networks: closed forms and true maxima against the test loss",
        description="Train diagonal networks side by side, measure their sharpness in closed form and by true "
        "maximisation, and correlate it with their test loss.",
        formatter_class=_Formatter,
    )
    diagonal.add_argument("--n", type=int, default=100, help="data points")
    diagonal.add_argument("--d", type=int, default=200, help="dimensions")
    diagonal.add_argument("--models", type=int, default=50, help="networks a data seed")
    diagonal.add_argument("--seeds", type=int, default=10, help="number of data seeds")
    diagonal.add_argument("--seed", type=int, default=0, help="the first data seed")
    diagonal.add_argument("--alpha-min", type=float, default=0.01, help="smallest scale of the start")
    diagonal.add_argument("--alpha-max", type=float, default=0.3, help="largest scale of the start")
    diagonal.add_argument("--rho", type=float, nargs="+", default=[0.001, 0.1], help="radii of the true maximisation")
    diagonal.add_argument("--workers", type=int, help="processes that share the seeds (default: one a core)")
    diagonal.add_argument("--out", type=Path, default=Path("diagonal"), help="folder for CSV, JSON and figure")
    diagonal.add_argument("--quiet", action="store_true", help="no progress bar")
    diagonal.set_defaults(run=_diagonal)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a mistake of the user's ends in one line and exit code 2."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except (ValueError, OSError, ImportError, RemoteError) as error:
        print(f"sharpness: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sharpness: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
