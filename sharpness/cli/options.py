"""Code shared by several commands: the format of the help, the options that choose data, and output as JSON."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

__all__ = [
    "Formatter",
    "add_command",
    "add_data_options",
    "add_json",
    "as_json",
    "checked_device",
    "count",
    "data_choice",
    "examples",
    "place",
    "seed",
    "shard",
]

if TYPE_CHECKING:
    from ..data import DataChoice


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """A help text with the default of every option that has one; its indented lines are not reformatted."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.default or action.default == argparse.SUPPRESS or "(default" in (action.help or ""):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(v if v.startswith("  ") else fill(v, width, indent) for v in text.splitlines())


def examples(*commands: str) -> str:
    """Write the end of a help text: commands that can be typed as shown."""
    return "\n".join(["examples:" if len(commands) > 1 else "example:", *(f"  {command}" for command in commands)])


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add a command that a function runs, and whose help is its docstring: a line, a paragraph, and how to type it."""
    words, text, shown = (inspect.getdoc(run) or "\n\n\n\n").split("\n\n")
    name, text = run.__name__.strip("_"), text.replace("\n", " ")
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=words[0].lower() + words[1:-1], description=text, epilog=shown, formatter_class=Formatter
    )
    command.set_defaults(run=run)
    return command


def add_json(command: argparse.ArgumentParser) -> None:
    """Let a command print JSON."""
    command.add_argument("--json", action="store_true", help="print JSON instead of the table")


def as_json(found: Any) -> str:
    """Write dicts, lists, dataclasses and numbers as JSON; a number that is not finite becomes null."""
    return msgspec.json.format(msgspec.json.encode(found, enc_hook=float), indent=2).decode() + "\n"


def add_data_options(command: argparse.ArgumentParser) -> None:
    """Add the options that choose data."""
    add = command.add_argument_group("data").add_argument
    add("--num-examples", type=count, metavar="N", help="use the first N examples; at random if sorted by class")
    add("--subset-seed", type=seed, metavar="SEED", help="choose these N examples at random, with this seed")
    add("--text", default="text", help="column of the text, or its number if the table has no header")
    add("--pair", help="column of the second text, for pairs of texts")
    add("--label", default="label", help="column of the label")
    add("--label-map", type=_label_map, default={}, metavar="NAME=NUMBER,…", help="class of each label")
    add("--no-header", action="store_true", help="the first line of the table is already data")
    add("--max-length", type=count, default=128, help="longest input in tokens")


def data_choice(options: argparse.Namespace) -> DataChoice:
    """Read the options of :func:`add_data_options`."""
    from ..data import DataChoice, TextColumns

    columns = TextColumns(
        options.text, options.pair, options.label, options.label_map, not options.no_header, options.max_length
    )
    chosen = options.batch_size, options.batches, options.num_examples, options.subset_seed
    return DataChoice(options.data, *chosen, columns)


def _label_map(text: str) -> dict[str, int]:
    names: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, number = entry.rpartition("=")
        if not name or not number.isdecimal():
            raise argparse.ArgumentTypeError(
                f"labels are mapped by NAME=NUMBER,…, but {entry!r} does not have this form"
            )
        if name in names:
            raise argparse.ArgumentTypeError(f"the label {name!r} is mapped twice")
        names[name] = int(number)
    return names


def place(text: str) -> Path:
    """Read a path. An empty one is refused, because usually a shell variable was not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


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


def checked_device(name: str) -> Any:
    """Return a device of torch, after checking that it exists."""
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
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--shard takes i/n, such as 1/4, but {text!r} does not have this form")
    return int(first), int(last)
