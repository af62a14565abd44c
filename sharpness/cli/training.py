"""finetune, pretrain, convert: where checkpoints come from."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from .options import Formatter, add_data_options, checked_device, count, data_choice, place, seed, shard

__all__ = ["add_convert", "add_finetune", "add_pretrain"]


def add_finetune(commands: Any) -> None:
    """Add ``sharpness finetune``."""
    zoo = commands.add_parser(
        "finetune",
        help="fine-tune a model many times, for a study of sharpness and generalisation",
        description="Fine-tune a model many times on one data set, with random recipes (learning rate, weight decay, "
        "epochs, label smoothing, label noise, and for images augmentation and mix-up) or with seeds alone, and write "
        "the checkpoints and a configuration for `sharpness sweep`. Models that are there are not trained again.",
        formatter_class=Formatter,
    )
    zoo.add_argument("model", metavar="MODEL", help="as for run; a transformers folder gets a new head for texts")
    zoo.add_argument("data", metavar="DATA", help="training data: images or a table of text, as for run")
    zoo.add_argument("--checkpoint", help="local weights (.safetensors, or a state dict saved by torch)")
    zoo.add_argument("--test", help="test data, for the configuration")
    add_data_options(zoo)
    zoo.add_argument("--models", type=count, default=24, help="how many")
    zoo.add_argument("--vary", choices=["recipe", "seed"], default="recipe", help="what differs between the models")
    zoo.add_argument(
        "--lr",
        type=float,
        nargs="+",
        help="learning rate: a range (default: 3e-5 to 1e-3), or one for --vary seed (1e-4)",
    )
    zoo.add_argument(
        "--epochs", type=count, nargs="+", help="epochs: a range (default: 2 to 6), or one for --vary seed (3)"
    )
    zoo.add_argument("--batch", type=count, help="examples a step (default: 64)")
    zoo.add_argument("--points", type=count, default=256, help="training examples to measure on")
    zoo.add_argument("--shard", default="1/1", help="train the i-th of n parts of the models")
    zoo.add_argument("--device", default="cpu", help="cpu or cuda")
    zoo.add_argument("--out", type=place, required=True, help="folder for the models")
    zoo.add_argument("--quiet", action="store_true", help="no progress bar")
    # Class folders are in the order of their classes: a part of them is chosen at random.
    zoo.set_defaults(run=_finetune, batch_size=256, batches=None, choose_seed=0)


def _finetune(options: argparse.Namespace) -> int:
    from ..data import source_files_or_raise
    from ..studies.finetune import Recipe, random_recipe
    from ..studies.zoo import train_zoo

    checked_device(options.device)
    data = data_choice(options)
    if options.test is not None:
        source_files_or_raise(options.test)
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
        points=options.points, shard=shard(options.shard), device=options.device, progress=not options.quiet,
    )  # fmt: skip
    if not options.quiet:
        print(f"measure them with: sharpness sweep {config} --out RESULTS")
    return 0


def add_pretrain(commands: Any) -> None:
    """Add ``sharpness pretrain``."""
    pretraining = commands.add_parser(
        "pretrain",
        help="pre-train a small BERT on texts of your own",
        description="Train a WordPiece vocabulary and a small BERT by masked-language modelling on the texts of "
        "tables, and write a transformers folder, which `sharpness finetune` takes.",
        formatter_class=Formatter,
    )
    pretraining.add_argument("texts", type=place, nargs="+", metavar="TABLE", help=".tsv, .csv or .jsonl files")
    pretraining.add_argument("--text", default="text", help="columns of the texts, as premise,hypothesis")
    pretraining.add_argument("--no-header", action="store_true", help="the tables' first line is no header")
    pretraining.add_argument("--width", type=count, default=128, help="hidden width")
    pretraining.add_argument("--depth", type=count, default=4, help="layers")
    pretraining.add_argument("--heads", type=count, default=4, help="attention heads")
    pretraining.add_argument("--vocabulary", type=count, default=8000, help="entries of the vocabulary")
    pretraining.add_argument("--length", type=count, default=64, help="longest input in tokens")
    pretraining.add_argument("--steps", type=count, default=9000, help="steps of training")
    pretraining.add_argument("--batch", type=count, default=64, help="texts a step")
    pretraining.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    pretraining.add_argument("--seed", type=seed, default=0, help="seed of weights, order and masks")
    pretraining.add_argument("--out", type=place, required=True, help="folder for model and tokenizer")
    pretraining.add_argument("--quiet", action="store_true", help="no progress bar")
    pretraining.set_defaults(run=_pretrain)


def _pretrain(options: argparse.Namespace) -> int:
    from ..data import read_texts
    from ..files import check_replaceable
    from ..studies.text import pretrain

    check_replaceable(options.out)

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


def add_convert(commands: Any) -> None:
    """Add ``sharpness convert``."""
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
        formatter_class=Formatter,
    )
    google.add_argument("checkpoint", type=place, metavar="CHECKPOINT", help="folder, or prefix .../model.ckpt-N")
    google.add_argument("out", type=place, metavar="OUT", help="the new transformers folder")
    google.add_argument("--config", type=place, help="bert_config.json (default: beside the checkpoint)")
    google.add_argument("--vocab", type=place, help="vocab.txt (default: beside the checkpoint)")
    google.add_argument("--labels", default="contradiction,entailment,neutral", help="names of the classes, in order")
    google.add_argument("--cased", action="store_true", help="the vocabulary tells upper from lower case")
    google.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    from ..convert import bert_from_tensorflow

    folder = bert_from_tensorflow(
        options.checkpoint, options.out, config=options.config, vocab=options.vocab, labels=options.labels.split(","),
        cased=options.cased,
    )  # fmt: skip
    print(f"the transformers folder is {folder}")
    return 0
