"""What forked processes call, imported once and exempt from garbage collection, which each would do by itself."""

import atexit
import gc

import matplotlib.figure
import scipy.stats

from sharpness import cli, sam, study
from tests import test_second_device
from tests.support import architectures, networks, sharded, sharded_training, spread

__all__ = [
    "cli", "matplotlib", "sam", "scipy", "sharded", "sharded_training", "spread", "study", "test_second_device",
]  # fmt: skip

architectures.adapted(networks.bert(), ["query"]), networks.vit()  # libraries import much when a model is made
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
