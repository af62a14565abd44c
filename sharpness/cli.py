"""The command line: parses, calls the functions of the package, prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def _demo(options: argparse.Namespace) -> int:
    from .studies import demo

    demo.run(seed=options.seed, out=options.out, condition=options.condition, progress=not options.quiet)
    return 0


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = argparse.ArgumentParser(
        prog="sharpness",
        description="Geodesic sharpness of transformers: the worst rise of the loss around the weights.",
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small vision transformer on scanned digits and measure its sharpness",
        description="Train a small vision transformer on scikit-learn's digits (under a minute), measure its sharpness "
        "by all measures, move every attention head along its symmetry, measure again. Prints a table and saves a "
        "picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of the split, the training and the symmetry")
    demo.add_argument("--out", type=Path, default=Path("sharpness-demo.png"), help="where the picture goes")
    demo.add_argument(
        "--condition", type=float, default=30.0, help="condition number of the random group elements (1: orthogonal)"
    )
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    demo.set_defaults(run=_demo)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a mistake of the user's ends in one line and exit code 2."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except (ValueError, OSError, ImportError) as error:
        print(f"sharpness: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sharpness: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
