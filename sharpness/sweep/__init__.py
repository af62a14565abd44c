"""Many checkpoints, measures, radii and ablations: resumable, and spread over processes and machines.

A *job* is one checkpoint under one measure with one set of switches, at all radii; or one checkpoint's fit, its loss
and error on training and test data; or its baselines, such as norms. Every finished job is a separate file in the
results' folder, written completely or not at all, so any number of processes on any number of machines may work on one
folder, and may be killed.
"""

from .accuracies import Accuracies
from .config import read_config
from .plan import Checkpoint, Sweep
from .run import read_failures, read_rows, run_sweep

__all__ = ["Accuracies", "Checkpoint", "Sweep", "read_config", "read_failures", "read_rows", "run_sweep"]
