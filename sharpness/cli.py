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
import re
import shlex
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn

from . import commands
from .ascent import Search
from .data import DataChoice
from .errors import EXPECTED, words_of


class Parser(argparse.ArgumentParser):
    """A parser with one-line error messages, whose texts are shown as they are."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with a one-line message and exit code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    description, _, epilog = __doc__.partition("\n\nin a shell:")
    top = Parser("sharpness", description=description, epilog=f"in a shell:{epilog}")
    added = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    more = {commands.symmetries: (DataChoice,), commands.run: (DataChoice, Search)}
    for name in ("demo", "symmetries", "canonicalize", "same", "run", "sweep", "table", "plot"):
        function = getattr(commands, name)
        add_command(added, function, *more.get(function, ()))
    return top


def main(arguments: Sequence[str] | None = None, top: argparse.ArgumentParser | None = None) -> int:
    """Run the command line, by default that of the process; every error is reported in one line, with exit code 2."""
    top = parser() if top is None else top
    options = top.parse_args(arguments)
    options.command = shlex.join([top.prog, *(sys.argv[1:] if arguments is None else arguments)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries; the commands themselves report what matters to users
            code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        print(f"{top.prog}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not isinstance(error, EXPECTED):
            traceback.print_exc()
        print(f"{top.prog}: {words_of(error)}", file=sys.stderr)
        return 2


# -- arguments ---------------------------------------------------------------------------------------------------------


def add_command(commands: Any, function: Callable[..., int], *more: Callable[..., Any]) -> None:
    """Add a command: a function with the options of classes, which it takes as ``**`` too.

    Its help is the docstring: a line, a paragraph, how to type it, and the parameters.
    """
    words, text, shown = str(inspect.getdoc(function)).partition("\n\nParameters\n")[0].split("\n\n")
    command = commands.add_parser(
        function.__name__, help=words[0].lower() + words[1:-1], description=text, epilog=shown
    )
    taken: set[str] = set()
    for described in (function, *more):
        add_arguments(command, described, skip=("source", "command", *taken))
        taken |= inspect.signature(described).parameters.keys()
    command.set_defaults(run=lambda options: function(**{k: v for k, v in vars(options).items() if k in taken}))


def add_arguments(command: argparse.ArgumentParser, described: Callable[..., Any], skip: Collection[str] = ()) -> None:
    """Add an argument for each parameter of a function or a class, with its type, default, and help by the docstring.

    Parameters without a default are positional, unless the function takes them by keyword only.
    """
    entries = re.findall(r"^(\w[\w, ]*?)(?: : .*)?\n((?: {4}.*\n?)+)", inspect.getdoc(described) or "", re.MULTILINE)
    helps = {name: " ".join(text.split()).replace("%", "%%") for names, text in entries for name in names.split(", ")}
    kinds = typing.get_type_hints(described)
    for name, parameter in inspect.signature(described).parameters.items():
        if name in skip or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        shown = parameter.default
        if isinstance(shown, (int, float, str, Path, tuple)) and not isinstance(shown, bool) and shown != ():
            helps[name] += f" (default: {' '.join(shown) if isinstance(shown, tuple) else shown})"
        options = {"default": argparse.SUPPRESS, "help": helps[name], **_reading(kinds[name], parameter.default)}
        required = parameter.default is inspect.Parameter.empty
        if required and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            command.add_argument(name, metavar=name.upper(), **options)
        else:
            flag = "no-" * (options.get("action") == "store_false") + name.replace("_", "-")
            command.add_argument(f"--{flag}", dest=name, required=required, **options)


def _reading(kind: Any, default: Any) -> dict[str, Any]:
    """Return how argparse reads a parameter of this type and default, which its function fills in by itself."""
    if typing.get_origin(kind) in (UnionType, typing.Union):  # what may be None besides
        kind = typing.get_args(kind)[0]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return {"action": "store_false" if default else "store_true"}
    if origin is Literal:
        return {"choices": inner}
    if origin is tuple:
        return {"nargs": "+", **_reading(inner[0], default)}
    return {"type": _label_map if origin is Mapping else place if kind is Path else kind}


def _label_map(text: str) -> dict[str, int]:
    entries = [entry.rpartition("=") for entry in text.split(",")]
    names = {name: int(number) for name, _, number in entries if name and number.isdecimal()}
    if len(names) < len(entries):
        raise argparse.ArgumentTypeError(f"labels are mapped by NAME=NUMBER,…, each once, but not {text!r}")
    return names


def place(text: str) -> Path:
    """Read a path. An empty one is refused, because usually a shell variable was not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)
