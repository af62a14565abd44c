"""Adapters as files and in memory: merge, resize, balance and compare LoRA, without the model."""

from .folders import Adapter
from .merging import balance, compare, merge, resize

__all__ = ["Adapter", "balance", "compare", "merge", "resize"]
