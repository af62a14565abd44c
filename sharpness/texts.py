"""Tables of text: their rows, and the classes that their labels name."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import naming


def read_table(path: str | os.PathLike[str], header: bool = True) -> list[dict[str, str]]:
    """Read a ``.tsv`` (quotation marks are text), ``.csv`` or ``.jsonl`` table: its rows, by column.

    Without a header columns are numbered from ``"0"``. Values of a ``.jsonl`` file that are not strings are written as
    JSON.
    """
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
    limit = csv.field_size_limit(2**31 - 1)  # by default texts of 131,072 characters are refused
    try:
        with naming(f"{path} is not a readable table"):
            lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
            table = [line for line in lines if line]
    finally:
        csv.field_size_limit(limit)
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


def class_number(name: str, known: Mapping[str, int]) -> int | None:
    """Return the number of a class by its name: as it is or, if that is unique, whatever the case; None if unknown."""
    if name in known:
        return known[name]
    alike = [number for other, number in known.items() if other.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None
