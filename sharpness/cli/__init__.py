"""The command line: parses, calls the functions of the package, prints."""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import RemoteError, words_of
from .demo import add_demo
from .many_models import add_plot, add_sweep, add_table
from .one_model import add_canonicalize, add_run, add_symmetries

__all__ = ["Parser", "main", "parser", "run_parser"]


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line; every command has ``--debug``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_argument(  # before a command or after it
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error comes from"
        )

    def error(self, message: str) -> NoReturn:
        """Leave with one line and exit code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; --help lists what there is\n")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = Parser(
        prog="sharpness",
        description="Geodesic sharpness of transformers: the worst rise of the loss around the weights.",
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_demo, add_symmetries, add_canonicalize, add_run, add_sweep, add_table, add_plot):
        add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process; whatever goes wrong is one line and exit code 2."""
    return run_parser(parser(), arguments)


def run_parser(top: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Run the command that a parser finds in the arguments; see :func:`main`."""
    options = top.parse_args(arguments)
    debug = getattr(options, "debug", False)
    try:
        with warnings.catch_warnings():
            if not debug:  # of libraries; what matters to users is said by the commands
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
        hint = "" if expected else " (not foreseen: --debug shows where it comes from)"
        said = str(error) if isinstance(error, (ImportError, RemoteError)) else words_of(error)
        print(f"{top.prog}: {' '.join(said.split())}{hint}", file=sys.stderr)
        return 2
