"""The command line of the studies: ``python -m reproduction``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sharpness import cli
from sharpness.cli import Parser, add_arguments, place
from sharpness.data import DataChoice
from sharpness.devices import checked_device
from sharpness.study.plan import read_choice

__all__ = ["main", "parser"]


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """A help text with the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.default or action.default == argparse.SUPPRESS or "(default" in (action.help or ""):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


class _Parser(Parser):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": _Formatter, **options})


def seed(text: str) -> int:
    """Read the seed of a random generator."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"a seed is a whole number from 0 to 2**63 - 1, not {text}")
    return number


def count(text: str) -> int:
    """Read a whole number of at least one."""
    number = int(text)
    if not 1 <= number < 2**53:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {text}")
    return number


def add_finetune(commands: Any) -> None:
    """Add ``python -m reproduction finetune``."""
    finetune = commands.add_parser(
        "finetune",
        help="fine-tune a model many times, for a study of sharpness and generalisation",
        description="Fine-tune a model many times on one data set, with random recipes (learning rate, weight decay, "
        "epochs, label smoothing, label noise, and for images augmentation and mix-up) or with seeds alone, and "
        "write the checkpoints and a configuration for `sharpness sweep`. Existing models are not trained again.",
    )
    finetune.add_argument("model", metavar="MODEL", help="as for run; a transformers folder gets a new head for texts")
    finetune.add_argument("data", metavar="DATA", help="training data: images or a table of text, as for run")
    finetune.add_argument("--checkpoint", help="local weights (.safetensors, or a state dict saved by torch)")
    finetune.add_argument("--test", help="test data, for the configuration")
    add_arguments(finetune, DataChoice, "data", skip=("source", "batch_size", "batches"))
    finetune.add_argument("--models", type=count, default=24, help="how many")
    finetune.add_argument(
        "--vary", choices=["recipe", "seed"], default="recipe", help="what differs between the models"
    )
    finetune.add_argument(
        "--lr",
        type=float,
        nargs="+",
        help="learning rate: a range (default: 3e-5 to 1e-3), or one for --vary seed (1e-4)",
    )
    finetune.add_argument(
        "--epochs", type=count, nargs="+", help="epochs: a range (default: 2 to 6), or one for --vary seed (3)"
    )
    finetune.add_argument("--batch", type=count, help="examples per step (default: 64)")
    finetune.add_argument("--points", type=count, default=256, help="training examples to measure on")
    finetune.add_argument("--shard", default="1/1", help="train the i-th of n parts of the models")
    finetune.add_argument("--device", default="cpu", help="cpu or cuda")
    finetune.add_argument("--out", type=place, required=True, help="folder for the models")
    finetune.add_argument("--quiet", action="store_true", help="no progress bar")
    # Images are ordered by class, so a part of them is chosen at random.
    finetune.set_defaults(run=_finetune, subset_seed=0)


def _finetune(options: argparse.Namespace) -> int:
    from reproduction.collection import holds_texts, train_collection
    from reproduction.recipes import Recipe, random_recipe
    from sharpness.files import check_apart
    from sharpness.hub_data import check_source
    from sharpness.study.plan import places

    checked_device(options.device)
    names = {f.name for f in fields(DataChoice)}
    data = read_choice({"source": options.data, **{k: v for k, v in vars(options).items() if k in names}})
    for source in filter(None, (options.data, options.test)):
        check_source(source)
        check_apart(options.out, (), places(source))
    given: dict[str, Any] = {"lr": options.lr, "epochs": options.epochs, "batch": options.batch}
    most = 1 if options.vary == "seed" else 2
    for name in ("lr", "epochs"):
        if len(given[name] or ()) > most:
            raise ValueError(
                f"--{name} takes {'one value' if most == 1 else 'a range of two values'}, got {given[name]}"
            )
    if options.vary == "seed":
        one = {k: v[0] if isinstance(v, list) else v for k, v in given.items() if v is not None}
        recipes = [Recipe(seed=seed, **one) for seed in range(options.models)]
    else:
        ranges: dict[str, Any] = {
            k: (v[0], v[-1]) if isinstance(v, list) else v for k, v in given.items() if v is not None
        }
        recipes = [random_recipe(seed, images=not holds_texts(data.source), **ranges) for seed in range(options.models)]
    test = None if options.test is None else replace(data, source=options.test, num_examples=None, subset_seed=None)
    config = train_collection(
        options.model, data, options.out, checkpoint=options.checkpoint, recipes=recipes, test=test,
        points=options.points, shard=options.shard, device=options.device, progress=not options.quiet,
    )  # fmt: skip
    if not options.quiet:
        print(f"measure them with: sharpness sweep {config} --out RESULTS")
    return 0


def add_toy(commands: Any) -> None:
    """Add ``python -m reproduction toy``."""
    toy = commands.add_parser(
        "toy",
        help="the two-parameter network: level sets of Euclidean and Riemannian quantities",
        description="Draw the loss, the gradient norms and the Hessian traces of the network x ↦ θ₂θ₁x, Euclidean and "
        "on the quotient, how much each varies along an orbit, and the geodesic sharpness against its closed form.",
    )
    toy.add_argument("--out", type=place, default=Path("toy"), help="folder for the figure and the numbers")
    toy.add_argument("--x", type=float, default=1.0, help="the input")
    toy.add_argument("--y", type=float, default=1.0, help="the target")
    toy.add_argument("--quiet", action="store_true", help="no progress bar")
    toy.set_defaults(run=_toy)


def _toy(options: argparse.Namespace) -> int:
    from . import toy

    toy.run(out=options.out, x=options.x, y=options.y, progress=not options.quiet)
    return 0


def add_diagonal(commands: Any) -> None:
    """Add ``python -m reproduction diagonal``."""
    diagonal = commands.add_parser(
        "diagonal",
        help="diagonal networks: closed forms and true maxima against the test loss",
        description="Train diagonal networks side by side, measure their sharpness in closed form and by true "
        "maximisation, and correlate it with their test loss.",
    )
    diagonal.add_argument("--n", type=count, default=100, help="data points")
    diagonal.add_argument("--d", type=count, default=200, help="dimensions")
    diagonal.add_argument("--models", type=count, default=50, help="networks per data seed")
    diagonal.add_argument("--seeds", type=count, default=10, help="number of data seeds")
    diagonal.add_argument("--seed", type=seed, default=0, help="the first data seed")
    diagonal.add_argument("--alpha-min", type=float, default=0.01, help="smallest scale of the start")
    diagonal.add_argument("--alpha-max", type=float, default=0.3, help="largest scale of the start")
    diagonal.add_argument("--rho", type=float, nargs="+", default=[0.001, 0.1], help="radii of the true maximisation")
    diagonal.add_argument("--workers", type=count, help="processes that share the seeds (default: one per core)")
    diagonal.add_argument("--out", type=place, default=Path("diagonal"), help="folder for CSV, JSON and figure")
    diagonal.add_argument("--quiet", action="store_true", help="no progress bar")
    diagonal.set_defaults(run=_diagonal)


def _diagonal(options: argparse.Namespace) -> int:
    from . import diagonal

    diagonal.run(
        n=options.n, d=options.d, models=options.models, seeds=options.seeds, seed=options.seed,
        alpha_min=options.alpha_min, alpha_max=options.alpha_max, rhos=options.rho, out=options.out,
        workers=options.workers, progress=not options.quiet,
    )  # fmt: skip
    return 0


def add_zoo(commands: Any) -> None:
    """Add ``python -m reproduction zoo``."""
    zoo = commands.add_parser(
        "zoo",
        help="train and test one of the three zoos of the study of generalisation",
        description="Train and test one of the three zoos of the study of generalisation: fine-tunes of vit_cifar10 "
        "(vit) or of all-MiniLM-L6-v2 (minilm), or vision transformers from scratch. If a call was killed, the next "
        "one completes it. Sharpness is measured by `sharpness sweep OUT/models/sweep.json`.",
    )
    zoo.add_argument("kind", choices=["vit", "minilm", "scratch"], help="which zoo")
    zoo.add_argument("--data", type=place, required=True, help="folder with cifar10, weights and mnli")
    zoo.add_argument("--models", type=count, help="how many (default: what the study asks for)")
    zoo.add_argument("--first", type=seed, default=0, help="number of the first model, for a zoo in parts")
    zoo.add_argument("--shard", default="1/1", help="take the i-th of n parts of the models")
    zoo.add_argument("--device", default="cpu", help="cpu or cuda")
    zoo.add_argument("--out", type=place, required=True, help="folder for the zoo")
    zoo.add_argument("--quiet", action="store_true", help="no progress bar")
    zoo.set_defaults(run=_zoo)


def _zoo(options: argparse.Namespace) -> int:
    from .zoo import build

    checked_device(options.device)
    failed = build(
        options.kind, options.data, options.out, models=options.models, first=options.first,
        shard=options.shard, device=options.device, progress=not options.quiet,
    )  # fmt: skip
    for job in failed:
        print(f"reproduction: {job['checkpoint']}: {job['error']}", file=sys.stderr)
    return 1 if failed else 0


def add_radii(commands: Any) -> None:
    """Add ``python -m reproduction radii``."""
    radii = commands.add_parser(
        "radii",
        help="find the radii at which the loss of a zoo's median model increases by a given amount",
        description="Find, for every measure, the radii at which the loss of a zoo's median model increases by 0.1 and "
        "0.5 nats, and write ZOO/models/measure.json and hessian.json for `sharpness sweep --out ZOO/results`.",
    )
    radii.add_argument("zoo", type=place, metavar="ZOO", help="folder of a zoo that was trained and tested")
    radii.add_argument("--measures", nargs="+", help="which (default: the six of the study)")
    radii.add_argument("--device", default="cpu", help="cpu or cuda, for the sweeps too")
    radii.add_argument("--quiet", action="store_true", help="no progress bar")
    radii.set_defaults(run=_radii)


def _radii(options: argparse.Namespace) -> int:
    from .radii import PRIMARY, choose_radii

    checked_device(options.device)
    config = choose_radii(
        options.zoo, measures=options.measures or PRIMARY, device=options.device, progress=not options.quiet
    )
    if not options.quiet:
        print(f"measure them with: sharpness sweep {config} --out {options.zoo / 'results'}")
    return 0


def add_power(commands: Any) -> None:
    """Add ``python -m reproduction power``."""
    power = commands.add_parser(
        "power",
        help="how many models a study of generalisation needs",
        description="Apply the decision rule of the study to zoos drawn at random, of several sizes and effects.",
    )
    power.add_argument("--models", type=count, nargs="+", default=[48, 96], help="sizes of the zoo")
    power.add_argument("--effects", type=float, nargs="+", default=[0.0, 0.3, 0.4], help="conditional τ")
    power.add_argument("--studies", type=count, default=400, help="simulated zoos of each kind")
    power.add_argument("--seed", type=seed, default=0, help="of the simulation")
    power.add_argument("--out", type=place, default=Path("power.json"), help="file for the numbers")
    power.add_argument("--quiet", action="store_true", help="no progress bar")
    power.set_defaults(run=_power)


def _power(options: argparse.Namespace) -> int:
    from sharpness.files import check_file, write_json

    from .power import power

    check_file(options.out)
    rows = power(
        tuple(options.models), tuple(options.effects), studies=options.studies, seed=options.seed,
        progress=not options.quiet,
    )  # fmt: skip
    write_json(options.out, rows)
    return 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = _Parser(
        prog="reproduction",
        description="The paper's studies and ours: analytic networks, fine-tuned models.",
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_finetune, add_toy, add_diagonal, add_zoo, add_radii, add_power):
        add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, see :func:`sharpness.cli.main`."""
    return cli.main(arguments, parser())
