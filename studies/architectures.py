"""Examine architectures as if nobody knew their classes, and write what is found into docs/tables/architectures.csv.

Every row is held against the null space of the heads' generators and against finite moves before it is written
(tests/quotient_manifolds/symmetries/test_examination.py); rows that are there already are kept.
"""

from __future__ import annotations

import argparse
import csv
import sys

import torch

from quotient_manifolds.symmetries import attention
from tests.quotient_manifolds.symmetries.test_examination import TABLE, check, rows
from tests.support import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=sorted(zoo.MODELS))
    parser.add_argument("models", nargs="+", help="types of transformers, names of timm, forms of open_clip")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    attention.HANDLERS.clear()
    found = rows()
    for name in options.models:
        try:
            found[options.library, name] = check(*zoo.MODELS[options.library](name))
        except Exception as error:  # one that cannot be built, or does not stand the checks, is no row
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        print(name, *found[options.library, name], sep=" | ", flush=True)
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["library", "model", "queries and keys", "values and outputs"])
            writer.writerows([*key, *found[key]] for key in sorted(found))


if __name__ == "__main__":
    main()
