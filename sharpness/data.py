"""Batches from files, or from a function of the user's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .losses import mapped
from .models import load_state_dict, resolve

__all__ = ["load_batches"]


def load_batches(
    source: str, *, batch_size: int = 256, count: int | None = None, device: torch.device | str = "cpu"
) -> list[Any]:
    """Read batches.

    Parameters
    ----------
    source : str
        A ``.safetensors`` file, or one that torch saved, of named tensors whose first dimension is the examples: with
        the names x and y batches are pairs, else dicts for a transformers model. Or ``module:function`` for what a
        function without arguments returns, an iterable of batches.
    batch_size : int
        Examples a batch; the last may have fewer.
    count : int, optional
        The first so many batches; by default all.
    device : device

    Raises
    ------
    ValueError, OSError
        A file or function that cannot be read, tensors of unequal length.
    """
    if batch_size < 1 or (count is not None and count < 1):
        raise ValueError(f"the batch size and the number of batches must be at least 1, got {batch_size} and {count}")
    batches: Iterable[Any]
    batches = resolve(source)() if ":" in source and not Path(source).exists() else _from_file(Path(source), batch_size)
    found = [mapped(b, lambda t: t.to(device)) for b in itertools.islice(batches, count)]
    if not found:
        raise ValueError(f"{source} gave no batch")
    return found


def _from_file(path: Path, batch_size: int) -> Iterable[Any]:
    named = load_state_dict(path)
    lengths = {name: len(t) if t.dim() else 0 for name, t in named.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path}: the tensors have unequal numbers of examples, {lengths}")
    rows = min(lengths.values())
    for i in range(0, rows, batch_size):
        part = {name: t[i : i + batch_size] for name, t in named.items()}
        yield (part["x"], part["y"]) if set(part) == {"x", "y"} else part
