"""Folders that are written completely or not at all, and never replace a user's data."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from sharpness.files import flush, kind_of, naming_file

__all__ = ["atomic_write_folder"]

#: File in every such folder with the names of everything that was written there.
_MARKER = ".written-by-sharpness.json"


def _check_replaceable(path: str | os.PathLike[str]) -> Path:
    """Raise unless :func:`atomic_write_folder` may write there."""
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r} for {path.name!r}; create it first")
    if kind_of(path) == "":
        return path
    if kind_of(path) != "a folder":
        raise ValueError(f"{str(path)!r} is {kind_of(path)}; name a folder that does not exist yet")
    there = _contents(path)
    try:
        own = json.loads((path / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        own = {}
    if not isinstance(own, dict) or any(own.get(name) != what for name, what in there.items()):
        raise ValueError(
            f"the folder {str(path)!r} contains files that this program did not write; use one that does not exist yet"
        )
    return path


def atomic_write_folder(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let a function write a folder under a temporary name, then rename it.

    There must be nothing yet, an empty folder, or one that this function wrote and nobody has changed since. Such a
    folder is replaced: it is kept under another name until the new one is in place.
    """
    path = Path(os.path.abspath(_check_replaceable(path)))
    with naming_file(path), tempfile.TemporaryDirectory(prefix=".sharpness-", dir=path.parent) as place:
        new, old = Path(place) / "new", Path(place) / "old"
        write(new)
        new.mkdir(exist_ok=True)
        for own in new.rglob("*"):
            if own.is_file():
                flush(own)
        (new / _MARKER).write_text(json.dumps(_contents(new)), encoding="utf-8")
        flush(new / _MARKER)
        _check_replaceable(path)  # the path may have changed, since writing can take hours
        try:
            if path.exists():
                path.rename(old)
            new.rename(path)
        except BaseException:
            if old.exists():
                _put_back(old, path)
            raise


def _put_back(old: Path, path: Path) -> None:
    """Move a folder back to its place, or beside it if the place is taken."""
    try:
        old.rename(path)
    except OSError:
        old.rename(path.with_name(f"{path.name}.before-{uuid.uuid4().hex[:8]}"))


def _contents(folder: Path) -> dict[str, list[int]]:
    """List a folder's files by name, with size and time of change, to detect files that a user has changed."""
    stats = ((p.relative_to(folder).as_posix(), p.lstat()) for p in folder.rglob("*") if p.name != _MARKER)
    return {name: [] if stat.S_ISDIR(s.st_mode) else [s.st_size, s.st_mtime_ns] for name, s in stats}
