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


def _symmetries(options: argparse.Namespace) -> int:
    from quotient_manifolds import symmetries

    from .models import load

    loaded = load(options.model, options.checkpoint)
    print(symmetries.find(loaded.model, key_bias=options.key_bias))
    if not options.verify:
        return 0
    symmetries.check_coverage(loaded.model, lambda: symmetries.default_forward(loaded.model, loaded.example))
    report = symmetries.verify(loaded.model, loaded.example, options.seed)
    print(f"\n{report}")
    return 0 if report.ok else 1


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
    found = commands.add_parser(
        "symmetries",
        help="list the symmetries of a model's attention and LoRA weights",
        description="List, layer by layer, which weights of a model can be changed without changing its function.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    found.add_argument(
        "model", metavar="MODEL", help="a transformers folder, or the name of an open_clip or timm model"
    )
    found.add_argument("--checkpoint", help="local weights for a name (.safetensors, or a state dict saved by torch)")
    found.add_argument(
        "--key-bias",
        choices=["keep", "drop"],
        default="keep",
        help="leave the null direction of the key bias in H or not",
    )
    found.add_argument(
        "--verify", action="store_true", help="act on every pair and compare the outputs; exit code 1 if they move"
    )
    found.add_argument("--seed", type=int, default=0, help="seed of the group elements")
    found.set_defaults(run=_symmetries)
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
