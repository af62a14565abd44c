"""Files and folders that are written as a whole or not at all, and never in the place of something of the user's."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "atomic_write",
    "atomic_write_folder",
    "check_file",
    "check_folder",
    "check_replaceable",
    "write_json",
    "write_text",
]

#: In every folder that is written as a whole: the names of all that was written there.
_MARKER = ".written-by-sharpness.json"


def check_file(path: str | os.PathLike[str]) -> Path:
    """Raise unless a file may be written there; to be called before the work whose result it holds.

    Parameters
    ----------
    path : str or path
        A regular file, which is replaced, or nothing yet, in a folder that exists.

    Returns
    -------
    Path

    Raises
    ------
    ValueError, OSError
        A folder, a symbolic link, a device, a pipe; no folder to write to, or none that may be written to.

    Examples
    --------
    >>> try:
    ...     check_file(".")
    ... except ValueError as error:
    ...     print(error)
    '.' is a folder; name a file
    """
    path = Path(path)
    kind = _kind(path)
    if kind not in ("", "a file"):
        raise ValueError(f"{str(path)!r} is {kind}; name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r} for {path.name!r}; create it first")
    with _naming(path), tempfile.TemporaryFile(dir=path.parent):
        return path


def check_folder(path: str | os.PathLike[str], *, create: bool = True) -> Path:
    """Raise unless files may be written into a folder, which is created if need be.

    Parameters
    ----------
    path : str or path
        A folder, a link to one, or nothing yet.
    create : bool
        Create it, and those above it.

    Returns
    -------
    Path

    Raises
    ------
    ValueError, OSError
        Something else is there, or it may not be written to.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is {_kind(path)}; name a folder")
    with _naming(path):
        if create:
            path.mkdir(parents=True, exist_ok=True)
        place = next(p for p in (path, *path.absolute().parents) if p.is_dir())
        with tempfile.TemporaryFile(dir=place):
            return path


def atomic_write(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let a function write a file under another name, then put it in its place.

    Parameters
    ----------
    path : str or path
        See :func:`check_file`.
    write : callable
        Gets the path to write to, which has the suffix of ``path``.

    Raises
    ------
    ValueError, OSError
        As :func:`check_file`; a full disk, with the name of the file.
    """
    path = check_file(path)
    with _naming(path), tempfile.TemporaryDirectory(prefix=".sharpness-", dir=path.parent) as place:
        own = Path(place) / path.name
        write(own)
        _flush(own)
        own.replace(path)
        _flush(path.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text, UTF-8, by :func:`atomic_write`."""
    atomic_write(path, lambda own: own.write_text(text, encoding="utf-8", newline=""))


def write_json(path: str | os.PathLike[str], found: Any) -> None:
    """Write numbers, strings, lists and dicts, by :func:`atomic_write`.

    Parameters
    ----------
    path : str or path
    found : dict, list, str, float, int, bool or None
    """
    write_text(path, json.dumps(found, indent=2) + "\n")


def atomic_write_folder(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let a function write a folder under another name, then put it in its place.

    Parameters
    ----------
    path : str or path
        Nothing yet, an empty folder, or a folder that this function wrote and nobody has added to since, which is
        replaced: what was there stands aside until the new folder is in place.
    write : callable
        Gets the path to write to.

    Raises
    ------
    ValueError, OSError
        Something of the user's is there; a full disk, with the name of the folder.
    """
    path = Path(os.path.abspath(check_replaceable(path)))
    with _naming(path), tempfile.TemporaryDirectory(prefix=".sharpness-", dir=path.parent) as place:
        new, old = Path(place) / "new", Path(place) / "old"
        write(new)
        new.mkdir(exist_ok=True)
        for own in new.rglob("*"):
            _flush(own)
        (new / _MARKER).write_text(json.dumps(_contents(new)), encoding="utf-8")
        _flush(new / _MARKER)
        _flush(new)
        check_replaceable(path)  # writing may have taken hours
        try:
            if path.exists():
                path.rename(old)
            new.rename(path)
        except BaseException:
            if old.exists():
                _put_back(old, path)
            raise
        _flush(path.parent)


def _put_back(old: Path, path: Path) -> None:
    """Put a folder back in its place, or beside it where somebody else has taken the place."""
    try:
        old.rename(path)
    except OSError:
        old.rename(path.with_name(f"{path.name}.before-{uuid.uuid4().hex[:8]}"))


def _contents(folder: Path) -> dict[str, list[int]]:
    """List a folder's files by name, with size and time of change: one that was changed is not ours any more."""
    stats = ((p.relative_to(folder).as_posix(), p.lstat()) for p in folder.rglob("*") if p.name != _MARKER)
    return {name: [] if stat.S_ISDIR(s.st_mode) else [s.st_size, s.st_mtime_ns] for name, s in stats}


def check_replaceable(path: str | os.PathLike[str]) -> Path:
    """Raise unless :func:`atomic_write_folder` may write there; to be called before the work whose result it holds.

    Parameters
    ----------
    path : str or path
        Nothing yet, an empty folder, or one that was written so and left alone.

    Returns
    -------
    Path

    Raises
    ------
    ValueError, OSError
        Something of the user's is there, or no folder to write to.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r} for {path.name!r}; create it first")
    if _kind(path) == "":
        return path
    if _kind(path) != "a folder":
        raise ValueError(f"{str(path)!r} is {_kind(path)}; name a folder that does not exist yet")
    there = _contents(path)
    try:
        own = json.loads((path / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        own = {}
    if not isinstance(own, dict) or any(own.get(name) != what for name, what in there.items()):
        raise ValueError(f"the folder {str(path)!r} holds what is not this program's; name one that does not exist yet")
    return path


def _kind(path: Path) -> str:
    """Say what is there; empty for nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISREG(mode):
        return "a file"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a symbolic link" if stat.S_ISLNK(mode) else "a device, pipe or socket"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error of the operating system name the file that was to be written, not a temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.strerror is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def _flush(path: Path) -> None:
    """Have the disk hold what was written, before anything relies on it."""
    folder = path.is_dir()
    try:
        handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    except OSError:
        if folder:  # Windows opens no folders
            return
        raise
    try:
        os.fsync(handle)
    except OSError:
        if not folder:  # some file systems flush no folders
            raise
    finally:
        os.close(handle)
