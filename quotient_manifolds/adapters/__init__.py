"""Adapters as files and in memory: merge, resize, balance and compare LoRA, and average it while it trains."""

from .average import QuotientEMA
from .folders import Adapter
from .merging import balance, compare, merge, resize

__all__ = ["Adapter", "QuotientEMA", "balance", "compare", "merge", "resize"]
