"""demo, toy, diagonal: studies that need no data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .options import Formatter, count, place, seed

__all__ = ["add_demo", "add_diagonal", "add_toy"]


def add_demo(commands: Any) -> None:
    """Add ``sharpness demo``."""
    demo = commands.add_parser(
        "demo",
        help="train a small vision transformer on scanned digits and measure its sharpness",
        description="Train a small vision transformer on scikit-learn's digits (under a minute), measure its sharpness "
        "by all measures, move every attention head along its symmetry, measure again. Prints a table and saves a "
        "picture.",
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
    from ..studies import demo

    demo.run(seed=options.seed, out=options.out, condition=options.condition, progress=not options.quiet)
    return 0


def add_toy(commands: Any) -> None:
    """Add ``sharpness toy``."""
    toy = commands.add_parser(
        "toy",
        help="the two-parameter network: level sets of Euclidean and Riemannian quantities",
        description="Draw the loss, the gradient norms and the Hessian traces of the network x ↦ θ₂θ₁x, Euclidean and "
        "on the quotient, how much each varies along an orbit, and the geodesic sharpness against its closed form.",
        formatter_class=Formatter,
    )
    toy.add_argument("--out", type=place, default=Path("toy"), help="folder for the figure and the numbers")
    toy.add_argument("--x", type=float, default=1.0, help="the input")
    toy.add_argument("--y", type=float, default=1.0, help="the target")
    toy.add_argument("--quiet", action="store_true", help="no progress bar")
    toy.set_defaults(run=_toy)


def _toy(options: argparse.Namespace) -> int:
    from ..studies import toy

    toy.run(out=options.out, x=options.x, y=options.y, progress=not options.quiet)
    return 0


def add_diagonal(commands: Any) -> None:
    """Add ``sharpness diagonal``."""
    diagonal = commands.add_parser(
        "diagonal",
        help="diagonal networks: closed forms and true maxima against the test loss",
        description="Train diagonal networks side by side, measure their sharpness in closed form and by true "
        "maximisation, and correlate it with their test loss.",
        formatter_class=Formatter,
    )
    diagonal.add_argument("--n", type=count, default=100, help="data points")
    diagonal.add_argument("--d", type=count, default=200, help="dimensions")
    diagonal.add_argument("--models", type=count, default=50, help="networks a data seed")
    diagonal.add_argument("--seeds", type=count, default=10, help="number of data seeds")
    diagonal.add_argument("--seed", type=seed, default=0, help="the first data seed")
    diagonal.add_argument("--alpha-min", type=float, default=0.01, help="smallest scale of the start")
    diagonal.add_argument("--alpha-max", type=float, default=0.3, help="largest scale of the start")
    diagonal.add_argument("--rho", type=float, nargs="+", default=[0.001, 0.1], help="radii of the true maximisation")
    diagonal.add_argument("--workers", type=count, help="processes that share the seeds (default: one a core)")
    diagonal.add_argument("--out", type=place, default=Path("diagonal"), help="folder for CSV, JSON and figure")
    diagonal.add_argument("--quiet", action="store_true", help="no progress bar")
    diagonal.set_defaults(run=_diagonal)


def _diagonal(options: argparse.Namespace) -> int:
    from ..studies import diagonal

    diagonal.run(
        n=options.n, d=options.d, models=options.models, seeds=options.seeds, seed=options.seed,
        alpha_min=options.alpha_min, alpha_max=options.alpha_max, rhos=options.rho, out=options.out,
        workers=options.workers, progress=not options.quiet,
    )  # fmt: skip
    return 0
