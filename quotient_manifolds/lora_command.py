"""The command quotient-lora: merge, resize, balance and compare LoRA adapters that peft saved.

in a shell:
  quotient-lora merge one two --weights 0.7 0.3 --rank 16 --out merged
  quotient-lora resize big --energy 0.99 --out small
  quotient-lora compare one merged
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from . import balance, compare, merge, resize


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process; an error is one line, with exit code 2."""
    options = vars(_parser().parse_args(arguments))
    command, as_json = options.pop("command"), options.pop("json", False)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            found = command(**options)
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        print(f"quotient-lora: {error}", file=sys.stderr)
        return 2
    for warning in told:
        print(f"quotient-lora: {warning.message}", file=sys.stderr)
    if found is not None:
        print(json.dumps(found, indent=1) if as_json else _table(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        "quotient-lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for function, names in ((merge, "adapters"), (resize, "adapter"), (balance, "adapter"), (compare, "one other")):
        command = commands.add_parser(function.__name__, help=(function.__doc__ or "").partition("\n")[0])
        command.set_defaults(command=function)
        for name in names.split():
            command.add_argument(name, help="folder that peft saved", nargs="+" if name == "adapters" else None)
        if function is compare:
            command.add_argument("--json", action="store_true", help="print all, with the singular values, as JSON")
        else:
            command.add_argument("--out", required=True, help="folder to create")
        if function in (merge, resize):
            command.add_argument("--rank", type=int, help="largest rank of a layer")
            command.add_argument("--energy", type=float, help="share of the squared singular values to keep")
        if function is merge:
            command.add_argument("--weights", nargs="+", type=float, help="one for each adapter (default: a mean)")
            for name, choices in (("method", "sum ties dare inv mix"), ("space", "core knots full")):
                command.add_argument(f"--{name}", choices=choices.split(), default=argparse.SUPPRESS)
            command.add_argument("--density", type=float, default=argparse.SUPPRESS, help="share that TIES, DARE keep")
            command.add_argument("--seed", type=int, default=argparse.SUPPRESS, help="of DARE")
    return top


def _table(found: dict[str, Any]) -> str:
    width = max(len(name) for name in found["layers"])
    lines = [f"{'layer':<{width}}  ranks      norms                 distance"]
    for name, layer in found["layers"].items():
        ranks, norms = " ".join(f"{r:>4}" for r in layer["rank"]), " ".join(f"{v:>10.4g}" for v in layer["norm"])
        lines.append(f"{name:<{width}}  {ranks} {norms} {layer['distance']:>10.2e}")
    lines += [f"config, {key}: {one} and {other}" for key, (one, other) in found["config"].items()]
    return "\n".join(lines + [f"differs: {key}" for key in found["tensors"]])


if __name__ == "__main__":
    sys.exit(main())
