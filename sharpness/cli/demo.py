"""The command ``demo``, which needs no data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import examples, place, seed

__all__ = ["add_demo"]


def add_demo(commands: Any) -> None:
    """Add ``sharpness demo``."""
    demo = commands.add_parser(
        "demo",
        help="train a small vision transformer on scanned digits and measure its sharpness",
        description="Train a small vision transformer on scikit-learn's scanned digits, measure its sharpness "
        "by four measures, and measure ten other networks that compute the same function, each moved along one kind of "
        "symmetry. Prints a table, and saves a picture with the numbers beside it. Takes less than two minutes.",
        epilog=examples("sharpness demo --out sharpness-demo.png"),
    )
    demo.add_argument("--seed", type=seed, default=0, help="seed of the split of the data, the training and the moves")
    demo.add_argument("--out", type=place, default=Path("sharpness-demo.png"), help="picture; the numbers go beside it")
    demo.add_argument("--quiet", action="store_true", help="show no progress")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from ..demo import run

    run(seed=options.seed, out=options.out, progress=not options.quiet)
    return 0
