"""Adapters as files and in memory: merge, carry, convert, extract and compare LoRA, and average it while it trains."""

from .average import QuotientEMA
from .carrying import carry
from .conversion import convert
from .extraction import extract
from .folders import Adapter
from .merging import balance, compare, merge, resize

__all__ = ["Adapter", "QuotientEMA", "balance", "carry", "compare", "convert", "extract", "merge", "resize"]
