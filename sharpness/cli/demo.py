"""demo: what there is to see, without data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .options import Formatter, place, seed

__all__ = ["add_demo"]


def add_demo(commands: Any) -> None:
    """Add ``sharpness demo``."""
    demo = commands.add_parser(
        "demo",
        help="train a small vision transformer on scanned digits and measure its sharpness",
        description="Train a small vision transformer on scikit-learn's digits (under a minute), measure its sharpness "
        "by four measures, and again after every kind of move that leaves its function as it is. Prints a table and "
        "saves a picture.",
        formatter_class=Formatter,
    )
    demo.add_argument("--seed", type=seed, default=0, help="seed of the split, the training and the symmetry")
    demo.add_argument(
        "--out", type=place, default=Path("sharpness-demo.png"), help="where the picture goes, and the numbers as .json"
    )
    demo.add_argument(
        "--condition", type=float, default=30.0, help="condition number of the random group elements (1: orthogonal)"
    )
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from .. import demo

    demo.run(seed=options.seed, out=options.out, condition=options.condition, progress=not options.quiet)
    return 0
