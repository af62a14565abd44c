"""Many models: sweeps over checkpoints, measures and radii; and how every measure ranks the models.

A *job* of a sweep is one checkpoint under one measure with one set of switches, at all radii; or one checkpoint's fit,
its loss and error on training and test data; or further quantities. Every finished job is a separate file in the
results' folder, written completely or not at all, so any number of processes on any number of machines may work on one
folder, and may be killed.
"""

from .correlation import kendall
from .plan import Checkpoint, Sweep, read_config
from .rows import read_failures, read_results, read_rows
from .run import run_sweep
from .tables import TARGETS, compare, measurements, per_model, plot_sweep, remarks, targets

__all__ = [
    "TARGETS",
    "Checkpoint",
    "Sweep",
    "compare",
    "kendall",
    "measurements",
    "per_model",
    "plot_sweep",
    "read_config",
    "read_failures",
    "read_results",
    "read_rows",
    "remarks",
    "run_sweep",
    "targets",
]
