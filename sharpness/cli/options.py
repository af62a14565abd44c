"""What several commands share: the form of the help, and the options that choose data."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["Formatter", "add_data_options", "checked_device", "count", "data_choice", "place", "seed", "shard"]

if TYPE_CHECKING:
    from ..data import DataChoice


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """A help text with the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def add_data_options(command: argparse.ArgumentParser) -> None:
    """Let a command choose data."""
    group = command.add_argument_group("data")
    group.add_argument("--num-examples", type=count, help="use the first so many examples of a file (default: all)")
    group.add_argument("--subset-seed", type=seed, help="choose them at random with this seed instead")
    group.add_argument("--text", default="text", help="column of the text, by name, or by number without a header")
    group.add_argument("--pair", help="column of the second text of a pair")
    group.add_argument("--label", default="label", help="column of the label")
    group.add_argument(
        "--label-map",
        type=_label_map,
        default={},
        metavar="NAME=NUMBER,…",
        help="what labels mean, as entailment=0,neutral=1 (default: the model's own names)",
    )
    group.add_argument("--no-header", action="store_true", help="the table's first line is no header")
    group.add_argument("--max-length", type=count, default=128, help="longest input in tokens")
    group.add_argument("--image-size", type=count, help="side of the images (default: what the model says)")
    group.add_argument("--mean", type=float, nargs="+", help="mean of each channel (default: what the model says)")
    group.add_argument("--std", type=float, nargs="+", help="standard deviation of each channel")


def data_choice(options: argparse.Namespace) -> DataChoice:
    """Read the options of :func:`add_data_options`."""
    from ..data import DataChoice, TextColumns

    columns = TextColumns(
        options.text, options.pair, options.label, options.label_map, not options.no_header, options.max_length
    )
    mean, std = (None if v is None else tuple(v) for v in (options.mean, options.std))
    return DataChoice(
        options.data, options.batch_size, options.batches, options.num_examples, options.subset_seed, columns,
        options.image_size, mean, std,
    )  # fmt: skip


def _label_map(text: str) -> dict[str, int]:
    names = {}
    for entry in filter(None, text.split(",")):
        name, _, number = entry.rpartition("=")
        if not name or not number.isdigit():
            raise argparse.ArgumentTypeError(f"labels are mapped by NAME=NUMBER,…, and {entry!r} is none")
        names[name] = int(number)
    return names


def place(text: str) -> Path:
    """Read a path: an empty one is a variable that was not set, not the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


def seed(text: str) -> int:
    """Read the seed of a random generator."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"a seed is a whole number from 0 to 2**63 - 1, not {text}")
    return number


def count(text: str) -> int:
    """Read how many of something there are to be, at least one."""
    number = int(text)
    if not 1 <= number < 2**53:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, not {text}")
    return number


def checked_device(name: str) -> Any:
    """Give a device of torch that is there."""
    import torch

    from ..errors import naming

    with naming(f"the device {name!r} cannot be used"):
        device = torch.device(name)
        if device.type == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun gives every process a GPU of its own
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        if device.type == "meta":
            raise ValueError("it holds no numbers")
        torch.zeros((), device=device)
    return device


def shard(text: str) -> tuple[int, int]:
    """Read i/n."""
    first, _, last = text.partition("/")
    if not (first.isdigit() and last.isdigit()):
        raise ValueError(f"--shard takes i/n, as 1/4, and {text!r} is none")
    return int(first), int(last)
