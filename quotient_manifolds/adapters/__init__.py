"""Adapters as files: merge, resize, balance and compare LoRA folders of peft, without the model."""

from .merging import balance, compare, merge, resize

__all__ = ["balance", "compare", "merge", "resize"]
