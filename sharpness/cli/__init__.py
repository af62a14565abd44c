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
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import RemoteError, words_of
from .demo import add_demo
from .many_models import add_plot, add_sweep, add_table
from .one_model import add_canonicalize, add_run, add_symmetries
from .options import Formatter

__all__ = ["Parser", "main", "parser", "run_parser"]


class Parser(argparse.ArgumentParser):
    """A parser with one-line error messages; every command has ``--debug``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
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
    description, _, epilog = __doc__.partition("\n\nin a shell:")
    top = Parser("sharpness", description=description, epilog=f"in a shell:{epilog}", formatter_class=Formatter)
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
