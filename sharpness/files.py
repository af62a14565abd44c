"""Files that are written completely or not at all, and never replace a user's data."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_file(path: str | os.PathLike[str]) -> Path:
    """Raise unless a file may be written there; call it before the work whose result the file will hold.

    The path must be a regular file, which is replaced, or free, in a folder that exists.
    """
    path = Path(path)
    kind = kind_of(path)
    if kind not in ("", "a file"):
        raise ValueError(f"{str(path)!r} is {kind}; name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r} for {path.name!r}; create it first")
    with naming_file(path), tempfile.TemporaryFile(dir=path.parent):
        return path


def check_folder(path: str | os.PathLike[str]) -> Path:
    """Raise unless files may be written into a folder or a link to one; it and its parents are created."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is {kind_of(path)}; name a folder")
    with naming_file(path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path


def check_apart(out: Path, read: Iterable[str | os.PathLike[str] | None], whole: Iterable[Path] = ()) -> None:
    """Raise if writing at ``out`` would change what is read; call it before the work whose result it will hold.

    Refused are what is read, what there is already in folders that are read, and any place in those of ``whole``, all
    of whose files are data.
    """
    place, whole = out.resolve(), list(whole)
    for source in map(Path, (*(path for path in read if path is not None), *whole)):
        one = source.resolve()
        if place == one or (one.is_dir() and place.is_relative_to(one) and (source in whole or place.exists())):
            how = "replace" if place == one else "change"
            raise ValueError(f"writing to {out} would {how} {source}, which is read; choose another place")


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Let the block write a file under a temporary name, with the same suffix, then rename it."""
    path = check_file(path)
    with naming_file(path), tempfile.TemporaryDirectory(prefix=".sharpness-", dir=path.parent) as place:
        own = Path(place) / path.name
        yield own
        flush(own)
        own.replace(path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text, UTF-8, by :func:`atomic_write`."""
    with atomic_write(path) as own:
        own.write_text(text, encoding="utf-8", newline="")


def write_json(path: str | os.PathLike[str], found: Any) -> None:
    """Write numbers, strings, lists and dicts, by :func:`atomic_write`."""
    write_text(path, json.dumps(found, indent=2) + "\n")


def kind_of(path: Path) -> str:
    """Describe what is at a path; empty if nothing is there."""
    kinds = {"a symbolic link": Path.is_symlink, "a file": Path.is_file, "a folder": Path.is_dir}
    named = (kind for kind, holds in kinds.items() if holds(path))
    return next(named, "a device, pipe or socket" if path.exists() else "")


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Let an error of the operating system name the final file instead of the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def flush(path: Path) -> None:
    """Flush a file to disk, before anything relies on it."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
