"""The command line: parses, calls the functions of the package, prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..distributed import RemoteError
from .analytic import add_demo, add_diagonal, add_toy
from .many_models import add_plot, add_sweep, add_table
from .one_model import add_run, add_symmetries
from .training import add_convert, add_finetune, add_pretrain

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = argparse.ArgumentParser(
        prog="sharpness",
        description="Geodesic sharpness of transformers: the worst rise of the loss around the weights.",
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        add_demo, add_symmetries, add_run, add_sweep, add_table, add_plot, add_finetune, add_pretrain, add_convert,
        add_toy, add_diagonal,
    ):  # fmt: skip
        add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a mistake of the user's ends in one line and exit code 2.

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
        code: int = options.run(options)
        return code
    except (ValueError, OSError, ImportError, RemoteError) as error:
        print(f"sharpness: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sharpness: interrupted", file=sys.stderr)
        return 130
