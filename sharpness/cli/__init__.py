"""Measure the sharpness of transformers: by how much the loss can rise within a ball around the weights.

Weights that compute the same function because attention heads were moved get the same value.

in a shell:
  sharpness demo
  sharpness run path/to/bert dev.tsv --text sentence --label label --num-examples 512
  sharpness sweep sweep.json --out results

exit codes:
  0    everything was done
  1    a checkpoint of a sweep failed, or what was verified is not a symmetry
  2    the command was refused; one line on standard error says why
  130  interrupted
"""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ..errors import RemoteError, naming, words_of

if TYPE_CHECKING:
    from ..data import DataChoice

__all__ = ["Parser", "main", "parser", "run_parser"]


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
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


class Parser(argparse.ArgumentParser):
    """A parser with one-line error messages; every command has ``--debug``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": _Formatter, **options})
        self.add_argument(  # before a command or after it
            "--debug", action="store_true", default=argparse.SUPPRESS, help="print the traceback of an error"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is left over here, where it is known which command it was given to."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            hint = "; data is given by --data" if "--data" in self._option_string_actions else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Exit with a one-line message and exit code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    # They import this module.
    from .demo import add_demo
    from .many_models import add_plot, add_sweep, add_table
    from .one_model import add_canonicalize, add_run, add_symmetries

    description, _, epilog = __doc__.partition("\n\nin a shell:")
    top = Parser("sharpness", description=description, epilog=f"in a shell:{epilog}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_demo, add_symmetries, add_canonicalize, add_run, add_sweep, add_table, add_plot):
        add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process; every error is reported in one line, with exit code 2."""
    return run_parser(parser(), arguments)


def run_parser(top: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Run the command that a parser finds in the arguments; see :func:`main`."""
    options = top.parse_args(arguments)
    options.command = shlex.join([top.prog, *(sys.argv[1:] if arguments is None else arguments)])
    debug = getattr(options, "debug", False)
    try:
        with warnings.catch_warnings():
            if not debug:  # warnings of libraries; the commands themselves report what matters to users
                warnings.simplefilter("ignore")
            code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        print(f"{top.prog}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        expected = isinstance(error, (ValueError, OSError, ImportError, RemoteError))
        hint = "" if expected else " (unexpected error: --debug prints the traceback)"
        said = str(error) if isinstance(error, (ImportError, RemoteError)) else words_of(error)
        print(f"{top.prog}: {' '.join(said.split())}{hint}", file=sys.stderr)
        return 2


# -- for several commands ----------------------------------------------------------------------------------------------


def examples(*commands: str) -> str:
    """Write the end of a help text: commands that can be typed as shown."""
    return "\n".join(["examples:" if len(commands) > 1 else "example:", *(f"  {command}" for command in commands)])


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add a command that a function runs, and whose help is its docstring: a line, a paragraph, and how to type it."""
    words, text, shown = (inspect.getdoc(run) or "\n\n\n\n").split("\n\n")
    name, text = run.__name__.strip("_"), text.replace("\n", " ")
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=words[0].lower() + words[1:-1], description=text, epilog=shown
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
    from ..data import DataChoice

    names = ("batch_size", "batches", "num_examples", "subset_seed", "text", "pair", "label", "label_map", "max_length")
    chosen = {name: getattr(options, name) for name in names}
    return DataChoice(options.data, header=not options.no_header, **chosen)


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
