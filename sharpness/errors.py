"""What is said to users: errors in one sentence, colours, small drawings."""

from __future__ import annotations

import math
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO


class RemoteError(RuntimeError):
    """Another process of the group failed."""


#: Errors whose messages say what to do.
EXPECTED = (ValueError, OSError, ImportError, RemoteError)

#: Said of a file, instead of torch's advice to run the code in it.
PICKLED = (
    "is not a plain state dict of tensors, and pickled code is never executed; save it again with "
    "torch.save(model.state_dict(), path) or as .safetensors"
)


def words_of(error: BaseException) -> str:
    """Describe an error in one line, with its type where the message alone may not be clear."""
    if type(error).__name__ == "UnpicklingError":
        return f"a file {PICKLED}"
    said = " ".join(str(error).split())[:500]
    return said if isinstance(error, EXPECTED) and said else f"{type(error).__name__}: {said}".rstrip(": ")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn an exception from a user's file, model or function into a one-sentence error that begins with ``what``.

    A missing library or a lack of memory is raised unchanged. In it defects of ours would look like errors of the
    user, so code of ours that may have any stands in :func:`about`.

    >>> with naming("the settings cannot be read"):
    ...     {}["steps"]
    Traceback (most recent call last):
    ValueError: the settings cannot be read: KeyError: 'steps'
    """
    try:
        yield
    except (ImportError, MemoryError, RemoteError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for it
            raise
        raise ValueError(f"{what}: {words_of(error)}") from error


@contextmanager
def about(what: str) -> Iterator[None]:
    """Begin errors that users can mend, in work of ours on their files or model, with ``what``; defects pass.

    >>> from quotient_manifolds.linalg import as_count
    >>> with about("model on data"):
    ...     as_count("steps", 0)
    Traceback (most recent call last):
    ValueError: model on data: steps must be a whole number of at least 1, got 0
    >>> with about("model on data"):
    ...     int("a defect")
    Traceback (most recent call last):
    ValueError: invalid literal for int() with base 10: 'a defect'
    """
    try:
        yield
    except (ImportError, RemoteError):
        raise
    except Exception as error:
        from quotient_manifolds.errors import is_mendable  # which nothing needs that succeeds

        if not is_mendable(error):
            raise
        raise ValueError(f"{what}: {words_of(error)}") from error


def check_flags(**flags: object) -> None:
    """Raise for anything but True and False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


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

    For example ``figures need matplotlib: install the extra plot, pip install '.[plot]' in the checkout of
    quotient-manifolds (No module named 'matplotlib')``.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what}: {how_to_install(extra)} ({error})") from error


def painted(text: str, code: str, stream: TextIO) -> str:
    """Colour text for a terminal by a code of ANSI; for files and pipes, and under NO_COLOR, it stays as it is."""
    return f"\033[{code}m{text}\033[0m" if stream.isatty() and not os.environ.get("NO_COLOR") else text


def blocks(values: Iterable[float], least: float = 0.0) -> str:
    """Draw a block for each number, with heights from ``least`` to the largest of them; what is no number gets none.

    >>> blocks([0.0, 0.5, 1.0, math.nan])
    '▁▅█ '
    """
    heights = [max(v - least, 0.0) for v in values]
    most = max((h for h in heights if math.isfinite(h)), default=0.0) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * h / most)] if math.isfinite(h) else " " for h in heights)


def aligned(rows: Iterable[Sequence[str]], width: float = math.inf) -> str:
    """Align the columns of a table, the first to the left, the others to the right; those that do not fit go below."""
    names, *columns = zip(*rows, strict=True)
    first = [name.ljust(max(map(len, names))) for name in names]
    pieces, used = [[first]], len(first[0])
    for column in columns:
        lengths = [len(re.sub(r"\033\[\d*m", "", cell)) for cell in column]  # colours take no place
        wide = 2 + max(lengths)
        if used + wide > width and len(pieces[-1]) > 1:
            pieces.append([first])
            used = len(first[0])
        used += wide
        pieces[-1].append([" " * (wide - n) + cell for n, cell in zip(lengths, column, strict=True)])
    return "\n\n".join("\n".join(map("".join, zip(*piece, strict=True))) for piece in pieces)


def say(lines: Iterable[str], code: str, stream: TextIO | None = None) -> None:
    """Print lines in a colour, by default on standard output."""
    for line in lines:
        print(painted(line, code, stream or sys.stdout), file=stream, flush=True)


def how_to_install(extra: str) -> str:
    """Say what installs an extra before there is a release."""
    return f"install the extra {extra}, pip install '.[{extra}]' in the checkout of quotient-manifolds"
