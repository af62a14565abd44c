"""What forked processes call, imported once and exempt from garbage collection, which each would do by itself."""

import atexit
import gc

import sharpness.cli
from tests import sharded, sharded_training, test_second_device

__all__ = ["sharded", "sharded_training", "sharpness", "test_second_device"]

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
