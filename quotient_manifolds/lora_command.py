"""Merge LoRA adapters, resize, balance, carry, convert, extract or compare them, as files.

in a shell:
  quotient-lora merge one two --weights 0.7 0.3 --rank 16 --out merged
  quotient-lora resize big --energy 0.99 --out small   # the nearest products of smaller rank
  quotient-lora balance one --out even                 # the same products, with factors of equal size
  quotient-lora carry one --from base --to canonical --out new  # for a base that symmetries have rewritten
  quotient-lora convert one --to kohya --model unet --out named
  quotient-lora extract base tuned --rank 16 --out adapter
  quotient-lora compare one merged                     # layer by layer: ranks, norms, distance
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from .errors import is_mendable
from .hub import look_up, one_look

#: The commands, with what they ask for and do.
_COMMANDS = {
    "merge": ("adapters", "Write one adapter: a weighted sum, or a mean, of the products of several."),
    "resize": ("adapter", "Write an adapter of another rank, with the nearest products."),
    "balance": ("adapter", "Write an adapter with the same products, and factors of equal size."),
    "carry": ("adapter", "Write the adapter that does the same to a base that symmetries have rewritten."),
    "convert": ("adapter", "Write an adapter in the names of another tool, with the same factors."),
    "extract": ("base tuned", "Write the adapter that turns one model into another, as nearly as its rank allows."),
    "compare": ("one other", "Print the ranks, norms and distance of two adapters, layer by layer."),
}

#: Letters of a value in a table.
_WIDEST = 32
_METHODS = "A weighted sum (the default), TIES or DARE of the products, or their mean in a metric of the quotient."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process; an error is one line, with exit code 2.

    Above the line of a defect of ours its traceback is printed.
    """
    options = vars(_parser().parse_args(arguments))
    name, as_json = options.pop("command"), options.pop("json", False)
    asked = [options[part] for part in _COMMANDS[name][0].split()]
    try:
        with one_look():
            look_up("model", "lora", *itertools.chain(*([one] if isinstance(one, str) else one for one in asked)))
            from . import adapters  # torch, which --help does not need

            found = getattr(adapters, name)(**options)
        if as_json:
            print(json.dumps(found, indent=1), flush=True)
        elif isinstance(found, dict):
            print(_table(found), flush=True)
        if not as_json and name != "compare":
            print(_written(options["out"], found), flush=True)
    except KeyboardInterrupt:
        print("quotient-lora: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _failed(error)
    return 0


def command() -> int:
    """Run the command line of a process: warnings are a line, and it removes what it began when it is told to end."""
    warnings.formatwarning = lambda message, *_, **__: f"quotient-lora: {message}\n"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a result is not lost because a terminal lacks a letter
    try:
        code = main()
    except SystemExit as end:  # after --help, or told to end
        code = int(end.code or 0)
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail again when it ends
        code = code or _failed(error)
    return code


def _failed(error: Exception) -> int:
    """Report an error in one line; nobody reads it if it is that of a closed pipe."""
    if isinstance(error, BrokenPipeError):
        return 128 + 13  # as programs end that SIGPIPE ends
    said = " ".join(str(error).split())
    if not is_mendable(error):
        traceback.print_exception(error)
        said = f"{type(error).__name__}: {said}".rstrip(": ")
    print(f"quotient-lora: {said}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        "quotient-lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True, dest="command")
    for name, (adapters, purpose) in _COMMANDS.items():
        needed = f"{adapters.upper()}{' ...' * (name == 'merge')}{' --from BASE --to OTHER' * (name == 'carry')}"
        needed += " --out OUT" * (name != "compare")
        own = commands.add_parser(name, help=purpose, description=purpose, usage=f"%(prog)s {needed} [OPTIONS]")
        for adapter in adapters.split():
            own.add_argument(adapter, nargs="+" if name == "merge" else None, help="Folder, file, or name on the Hub.")
        if name in ("compare", "extract"):
            own.add_argument("--json", action="store_true", help="Print all, with the singular values, as JSON.")
        if name == "compare":
            continue
        own.add_argument("--out", required=True, help="Folder to create.")
        if name == "carry":
            of = "Folder of transformers, or name on the Hub: "
            own.add_argument("--from", required=True, dest="base", metavar="BASE", help=f"{of}the adapter's model.")
            own.add_argument("--to", required=True, dest="other", metavar="OTHER", help=f"{of}the rewritten model.")
            continue
        if name == "convert":
            tools = ("peft", "diffusers", "kohya", "diffsynth")
            own.add_argument("--to", choices=tools, required=True, help="The tool.")
            own.add_argument("--base", help="The model, whose names tell which underscores of kohya's are dots.")
            own.add_argument("--model", help="Model of a pipeline: unet, transformer, text_encoder, text_encoder_2.")
            own.add_argument("--one-rank", action="store_true", help="Fill all layers with zeros to the largest rank.")
            continue
        if name != "balance":
            rank = "Largest rank of a layer." if name == "merge" else "Rank of every layer; with --energy the largest."
            own.add_argument("--rank", type=int, help=rank)
            share, energy = 1.0 if name == "merge" else None, "Share of the squared singular values to keep."
            own.add_argument("--energy", type=float, default=share, help=energy)
        if name == "extract":
            of = "Ends of the paths of layers to adapt. (default: all but embeddings and heads)"
            own.add_argument("--target-modules", nargs="+", default=(), metavar="NAME", help=of)
            of = "Layers to write whole, such as a new classifier."
            own.add_argument("--modules-to-save", nargs="+", default=(), metavar="NAME", help=of)
        if name == "merge":
            # As in later versions of Python, which read -1e-3 too.
            own._negative_number_matcher = re.compile(r"-\.?\d")  # noqa: SLF001
            own.add_argument("--weights", nargs="+", type=float, help="One for each adapter. (default: a mean)")
            own.add_argument("--method", choices=("sum", "ties", "dare", "inv", "mix"), default="sum", help=_METHODS)
            own.add_argument("--space", choices=("core", "knots"), default="core", help="Coordinates of TIES and DARE.")
            own.add_argument("--density", type=float, default=0.5, help="Share of entries that TIES and DARE keep.")
            own.add_argument("--seed", type=int, default=0, help="Seed of the entries that DARE drops.")
    return top


def _written(out: str, found: Any) -> str:
    """Say what was written: how many layers, of which ranks, and what these cut off."""
    if isinstance(found, dict):
        layers = found["layers"].values()
        ranks, lost = [at["rank"][1] for at in layers], [at["distance"] for at in layers]
    else:
        ranks, lost = [found.rank_and_scale(layer)[0] for layer in found.layers], [*found.lost.values()]
    of = " to ".join(map(str, sorted({min(ranks), max(ranks)})))
    cut = f", which cut off at most {100 * max(lost):.3g} % of a product" if max(lost, default=0) > 1e-6 else ""
    return f"{out}: {len(ranks)} layer{'s' * (len(ranks) > 1)} of rank {of}{cut}"


def _table(found: dict[str, Any]) -> str:
    rows = [("layer", "ranks", "norms", "difference")]
    for name, at in found["layers"].items():
        (a, b), (x, y) = at["rank"], at["norm"]
        rows.append((name, f"{a:>3} / {b:<3}", f"{x:>7.4g} / {y:<6.4g}", f"{100 * at['distance']:.3g} %"))
    lines = _aligned(rows)
    if differs := found.get("differs"):
        options = [(key, *map(_short, pair)) for key, pair in differs.items()]
        lines += ["", *_aligned([("differs", "ONE", "OTHER"), *options])]
    if left := found.get("left"):
        most = max(left, key=left.__getitem__)
        where = f"{len(left)} weight{'s' * (len(left) > 1)}"
        lines.append(f"left out: differences in {where}, up to {100 * left[most]:.3g} % ({most})")
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _short(value: Any) -> str:
    """Print a value of a config, or a norm; --json has it whole."""
    text = f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
