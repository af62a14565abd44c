"""Files that are written as a whole or not at all, also when several machines write into one folder."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let a function write a file or a folder under a name of its own, then put it in its place.

    Parameters
    ----------
    path : str or path
        Replaced if it is there.
    write : callable
        Gets the path to write to.
    """
    path = Path(path)
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        write(own)
        if path.is_dir():
            shutil.rmtree(path)
        own.replace(path)
    finally:
        if own.is_dir():
            shutil.rmtree(own)
        else:
            own.unlink(missing_ok=True)
