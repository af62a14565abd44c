"""How much the tests do: what every run needs, or everything (``make exhaustive``)."""

import itertools
import os

EXHAUSTIVE = "EXHAUSTIVE" in os.environ


def share(items, of, first=0):
    """One of so many shares of a list, of which other tests do the others; if exhaustive, the whole list."""
    return list(items) if EXHAUSTIVE else list(items)[first::of]


def checkered(*axes):
    """Every other cell of a table, so that each value meets half of those of every other axis; if exhaustive, all."""
    cells = itertools.product(*map(enumerate, axes))
    return [tuple(v for _, v in cell) for cell in cells if EXHAUSTIVE or sum(i for i, _ in cell) % 2 == 0]
