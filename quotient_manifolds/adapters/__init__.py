"""Adapters as files and in memory: merge, resize, balance, carry and compare LoRA, and average it while it trains."""

from .average import QuotientEMA
from .carrying import carry
from .folders import Adapter
from .merging import balance, compare, merge, resize

__all__ = ["Adapter", "QuotientEMA", "balance", "carry", "compare", "merge", "resize"]
