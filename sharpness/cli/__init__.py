"""The command line: parses, calls the functions of the package, prints."""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ..distributed import RemoteError
from ..errors import words_of
from .analytic import add_demo, add_diagonal, add_toy
from .many_models import add_plot, add_sweep, add_table
from .one_model import add_run, add_symmetries
from .training import add_convert, add_finetune, add_pretrain

__all__ = ["main", "parser"]


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; --help lists what there is\n")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = _Parser(
        prog="sharpness",
        description="Geodesic sharpness of transformers: the worst rise of the loss around the weights.",
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        add_demo, add_symmetries, add_run, add_sweep, add_table, add_plot, add_finetune, add_pretrain, add_convert,
        add_toy, add_diagonal,
    ):  # fmt: skip
        add(commands)
    for command in _leaves(commands):
        command.add_argument("--debug", action="store_true", help="show where an error comes from")
    return top


def _leaves(commands: Any) -> Iterator[argparse.ArgumentParser]:
    """Give the parsers that run something: commands, or their own commands."""
    for command in commands.choices.values():
        inner = [a for a in command._actions if isinstance(a, argparse._SubParsersAction)]
        if inner:
            yield from _leaves(inner[0])
        else:
            yield command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; whatever goes wrong ends in one line and exit code 2.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.

    Returns
    -------
    int
        Exit code.
    """
    options = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            if not options.debug:  # of libraries; what matters to users is said by the commands
                warnings.simplefilter("ignore")
            code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        print("sharpness: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        expected = isinstance(error, (ValueError, OSError, ImportError, RemoteError))
        hint = "" if expected else " (not foreseen: --debug shows where it comes from)"
        said = str(error) if isinstance(error, (ImportError, RemoteError)) else words_of(error)
        print(f"sharpness: {' '.join(said.split())}{hint}", file=sys.stderr)
        return 2
