"""Errors that users can cause, in one sentence."""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quotient_manifolds.symmetries.modules import plain_class


class RemoteError(RuntimeError):
    """Another process of the group failed."""


#: Errors whose messages say what to do.
EXPECTED = (ValueError, OSError, ImportError, RemoteError)


def words_of(error: BaseException) -> str:
    """Describe an error in one line, with its type where the message alone may not be clear."""
    said = " ".join(str(error).split())[:500]
    return said if isinstance(error, EXPECTED) and said else f"{type(error).__name__}: {said}".rstrip(": ")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn an exception from a user's file, model or function into a one-sentence error that begins with ``what``.

    A missing library or a lack of memory is raised unchanged.

    >>> with naming("the settings cannot be read"):
    ...     {}["steps"]
    Traceback (most recent call last):
    ValueError: the settings cannot be read: KeyError: 'steps'
    """
    try:
        yield
    except (ImportError, MemoryError, RemoteError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{what}: {words_of(error)}") from error


def lacking_rows(error: IndexError, model: nn.Module) -> str | None:
    """Say which rows an embedding lacks, if it was asked for rows that it lacks; None for other errors."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is F.embedding.__code__:
            ids, table = frame.f_locals["input"], frame.f_locals["weight"]
            path = next((name for name, p in model.named_parameters() if p is table), "an embedding")
            return (
                f"rows {int(ids.min())} to {int(ids.max())} of {path} are asked for, but {plain_class(model).__name__} "
                f"has {len(table)} of them; use its own tokenizer, and inputs that are no longer than it has positions"
            )
    return None


def called(name: str, *arguments: Any) -> Any:
    """Call the function named ``module:function``, also from the current folder; turn its errors into ValueErrors."""
    what = f"{name!r} is not an importable module:function"
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        with naming(what):
            function = pkgutil.resolve_name(name)
    except ImportError as error:
        raise ValueError(f"{what}: {error}") from error
    with naming(f"{name} failed"):
        return function(*arguments)


@contextmanager
def require_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a failing import in the block into one line: the feature, the extra that installs its library, and why.

    For example ``figures need matplotlib: pip install 'quotient-manifolds[plot]' (No module named 'matplotlib')``.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what}: pip install 'quotient-manifolds[{extra}]' ({error})") from error
