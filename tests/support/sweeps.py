"""A network in a module of its own, and the rows of its sweep."""

from sharpness.study import read_config, read_rows

MODULE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).float()
"""


TIMES = ("seconds",)


def rows_of(folder, config="sweep.json"):
    rows = read_rows(folder, read_config(config))
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def repeated(rows, times):
    """The rows of a sweep as if of more models, each a little different: fewer than ten are not ranked."""
    return [
        {k: v * (1 + 0.01 * i) if isinstance(v, float) and k != "rho" else v for k, v in row.items()}
        | {"checkpoint": f"{row['checkpoint']} {i}"}
        for i in range(times)
        for row in rows
    ]
