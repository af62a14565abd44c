"""What forked processes call, imported once and exempt from garbage collection, which each would do by itself."""

import atexit
import gc

import sharpness.cli
from tests import networks, sharded, sharded_training, spread, test_second_device

__all__ = ["sharded", "sharded_training", "sharpness", "spread", "test_second_device"]

networks.bert(), networks.vit()  # transformers imports a model's file when it is made
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
