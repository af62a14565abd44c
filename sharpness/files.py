"""Files: tables are read strictly; what is written is written completely or not at all, and never replaces data."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .errors import check_flags, naming

#: One thread reads at a time, for the limit of the length of a field is that of all threads.
_LIMIT = threading.Lock()


def check_file(path: str | os.PathLike[str]) -> Path:
    """Raise unless a file may be written there; call it before the work whose result the file will hold.

    The path must be a regular file, which is replaced, or free, in a folder that exists.
    """
    path = _as_path(path)
    kind = kind_of(path)
    if kind not in ("", "a file"):
        raise ValueError(f"{str(path)!r} is {kind}; name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r} for {path.name!r}; create it first")
    with naming_file(path), tempfile.TemporaryFile(dir=path.parent):
        return path


def check_folder(path: str | os.PathLike[str]) -> Path:
    """Raise unless files may be written into a folder or a link to one; it and its parents are created."""
    path = _as_path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is {kind_of(path)}; name a folder")
    with naming_file(path):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path


def _as_path(path: str | os.PathLike[str]) -> Path:
    """Return a path; raise for one that no system takes."""
    if "\0" in os.fspath(path):
        raise ValueError(
            f"{os.fspath(path)!r} holds a NUL character, which no name of a file does; choose another name"
        )
    return Path(path)


def check_apart(out: Path, read: Iterable[str | os.PathLike[str] | None], data: Iterable[Path] = ()) -> None:
    """Raise if writing at ``out`` would change what is read; call it before the work whose result it will hold.

    Refused are what is read, what there is already in folders that are read, and any place in folders of data, all of
    whose files are data.
    """
    place, data = out.resolve(), list(data)
    for source in map(_as_path, (*(path for path in read if path is not None), *data)):
        one = source.resolve()
        if place == one or (one.is_dir() and place.is_relative_to(one) and (source in data or place.exists())):
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


def read_table(path: str | os.PathLike[str], header: bool = True) -> list[dict[str, str]]:
    """Read a ``.tsv`` (quotation marks are text), ``.csv`` or ``.jsonl`` table: its rows, by column.

    Without a header columns are numbered from ``"0"``. Values of a ``.jsonl`` file that are not strings are written as
    JSON.
    """
    check_flags(header=header)
    path = Path(path)
    kind, raw = path.suffix.lower(), path.read_bytes()
    with naming(f"{path} is not UTF-8; convert the file"):
        text = raw.decode("utf-8-sig")
    if kind == ".jsonl":
        rows = []
        for number, content in enumerate(text.split("\n"), 1):  # splitlines() breaks at characters inside strings
            if content.strip():
                with naming(f"line {number} of {path} is not a JSON object"):
                    rows.append(strings(json.loads(content)))
        return rows
    first = text.partition("\n")[0]
    delimiter = "\t" if kind == ".tsv" else ";" if ";" in first and "," not in first else ","
    quoting: Any = csv.QUOTE_NONE if kind == ".tsv" else csv.QUOTE_MINIMAL
    with naming(f"{path} is not a readable table"), _LIMIT, ExitStack() as stack:
        stack.callback(csv.field_size_limit, csv.field_size_limit(2**31 - 1))  # texts of 131,072 characters are refused
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
        table = [line for line in lines if line]
    names = table.pop(0) if header and table else [str(i) for i in range(max(map(len, table), default=0))]
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has two columns of one name ({', '.join(names)}); rename one of them")
    for number, row in enumerate(table, 1):
        if len(row) != len(names):
            raise ValueError(
                f"row {number} of {path} has {len(row)} columns, not {len(names)}: they are separated by {delimiter!r}"
            )
    return [dict(zip(names, line, strict=True)) for line in table]


def strings(row: Mapping[str, Any]) -> dict[str, str]:
    """Write values that are not strings as JSON; leave out those that are missing."""
    return {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in row.items() if v is not None}


def files_of(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """List the files directly in a folder whose names match a pattern."""
    return sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file()})
