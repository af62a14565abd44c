"""Errors that users can cause, in one sentence."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["RemoteError", "called", "failed_call", "naming", "require_extra", "words_of", "wrong_cast"]


def words_of(error: BaseException) -> str:
    """Describe an error in one line, with its type where the message alone may not be clear."""
    said = " ".join(str(error).split())[:500]
    return said if isinstance(error, (ValueError, OSError)) and said else f"{type(error).__name__}: {said}".rstrip(": ")


class RemoteError(RuntimeError):
    """Another process of the group failed."""


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


def failed_call(error: BaseException, *functions: Any) -> dict[str, Any]:
    """Return the arguments of the innermost call of one of some functions that an error passed; empty if of none."""
    codes, found, trace = [f.__code__ for f in functions], dict[str, Any](), error.__traceback__
    while trace is not None:
        found = trace.tb_frame.f_locals if trace.tb_frame.f_code in codes else found
        trace = trace.tb_next
    return found


def wrong_cast(error: BaseException, read: Iterable[torch.Tensor]) -> str | None:
    """Say that a model casts to a half precision that nothing which it reads has; None if that is not the error."""
    present = {t.dtype for t in read if t.is_floating_point()}
    for dtype, word in ((torch.bfloat16, "BFloat16"), (torch.float16, "Half")):
        if word in str(error) and present and dtype not in present:
            others = " and ".join(sorted(map(str, present)))
            return f"the model casts to {dtype} by itself, while it is measured in {others}; let it cast to that"
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
    if not callable(function):
        raise ValueError(f"{name!r} is not a function")
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
