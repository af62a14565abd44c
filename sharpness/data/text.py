"""Tables of text."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import naming
from .examples import Examples

__all__ = ["TABLES", "TextColumns", "named_labels", "read_table", "read_texts", "table_of_text"]


TABLES = {".tsv", ".csv", ".jsonl"}


@dataclass(frozen=True)
class TextColumns:
    """Which columns of a table hold what.

    Attributes
    ----------
    text, pair, label : str
        Names from the header, or numbers from 0 where there is none; ``pair`` is the second text of a pair, if any.
    names : mapping of str to int
        What a label means to the model; empty: numbers, or the names in the model's own configuration.
    header : bool
        The first line of a .tsv or .csv file names the columns.
    length : int
        Longest input in tokens, if the tokenizer does not say less.

    Examples
    --------
    Of MNLI's tables, whose labels are words:

    >>> labels = named_labels("entailment=0,neutral=1,contradiction=2")
    >>> columns = TextColumns(text="sentence1", pair="sentence2", label="gold_label", names=labels)
    >>> columns.names["neutral"]
    1
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    names: Mapping[str, int] = field(default_factory=dict)
    header: bool = True
    length: int = 128


def read_table(path: str | os.PathLike[str], header: bool = True) -> Sequence[Mapping[str, str]]:
    r"""Read a ``.tsv`` (quotation marks are text), ``.csv`` or ``.jsonl`` table.

    Parameters
    ----------
    path : str or path
        File, UTF-8.
    header : bool
        The first line names the columns; otherwise they are numbered from ``"0"``.

    Returns
    -------
    sequence of mapping of str to str
        The rows, by column. What is no string in a ``.jsonl`` file comes as JSON.

    Raises
    ------
    ValueError, OSError
        A file that is no such table, or not UTF-8.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "films.tsv"
    ...     _ = path.write_text('text\tlabel\nA "great" film\t1\n')
    ...     read_table(path)
    [{'text': 'A "great" film', 'label': '1'}]
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line} of {path} is not UTF-8; convert the file") from error
    if path.suffix.lower() == ".jsonl":
        rows = []
        for number, line_text in enumerate(text.split("\n"), 1):  # splitlines() breaks at characters inside strings
            if line_text.strip():
                try:
                    row = json.loads(line_text)
                except ValueError as error:
                    raise ValueError(f"line {number} of {path} is no JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} of {path} is no JSON object")
                rows.append({str(k): v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
        return rows
    stream = io.StringIO(text, newline="")
    # Quotation marks are text in a .tsv.
    tabs = path.suffix.lower() == ".tsv"
    lines = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(stream)
    try:
        table = [line for line in lines if line]
    except csv.Error as error:
        raise ValueError(f"{path} is no readable table ({error})") from error
    names = table.pop(0) if header and table else [str(i) for i in range(max(map(len, table), default=0))]
    short = next((i for i, line in enumerate(table) if len(line) < len(names)), None)
    if short is not None:
        raise ValueError(f"row {short + 1} of {path} has {len(table[short])} columns, not {len(names)}")
    return [dict(zip(names, line, strict=False)) for line in table]


def _label(value: str, columns: TextColumns, known: Mapping[str, int], path: Path | str) -> int:
    names = {k.lower(): v for k, v in (columns.names or known).items()}
    if value.lower() in names:
        return names[value.lower()]
    if not columns.names and value.lstrip("-").isdigit():
        return int(value)
    raise ValueError(
        f"{path} has the label {value!r}, which stands for no class ({', '.join(names) or 'none are named'}); say what "
        "labels mean with --map NAME=NUMBER,…"
    )


def table_of_text(
    path: Path | str, rows: Sequence[Mapping[str, str]], columns: TextColumns, tokenizer: Any, known: Mapping[str, int]
) -> Examples:
    """Open the rows of a table for a model's tokenizer; known are the model's own names of its classes."""
    if tokenizer is None:
        raise ValueError(f"{path} is text, but the model has no tokenizer: put one into its folder (tokenizer.json)")
    if not rows:
        raise ValueError(f"{path} has no rows")
    wanted = [columns.text, columns.label, *([columns.pair] if columns.pair is not None else [])]
    for number, row in enumerate(rows, 1):
        missing = [c for c in wanted if c not in row]
        if missing:
            raise ValueError(f"row {number} of {path} has no column {missing[0]!r}; it has {', '.join(row)}")
    labels = [_label(row[columns.label].strip(), columns, known, path) for row in rows]
    with naming(f"the tokenizer for {path} does not work"):
        length = min(columns.length, int(getattr(tokenizer, "model_max_length", columns.length)))

    def batch(chosen: Sequence[int]) -> dict[str, Tensor]:
        texts = [[rows[i][columns.text] for i in chosen]]
        if columns.pair is not None:
            texts.append([rows[i][columns.pair] for i in chosen])
        with naming(f"the tokenizer for {path} does not work"):
            coded = tokenizer(*texts, truncation=True, max_length=length, padding=True, return_tensors="pt")
        return {**coded, "labels": torch.tensor([labels[i] for i in chosen])}

    return Examples(str(path), len(rows), batch)


def read_texts(path: str | os.PathLike[str], columns: Sequence[str], header: bool = True) -> list[str]:
    r"""Read all texts in some columns of a ``.tsv``, ``.csv`` or ``.jsonl`` table, row by row.

    Parameters
    ----------
    path, header
        As for :func:`read_table`.
    columns : sequence of str
        Names from the header, or numbers from ``"0"`` where there is none.

    Returns
    -------
    list of str
        One text a row and column; labels are not needed.

    Raises
    ------
    ValueError, OSError
        No such column; a file that cannot be read.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "pairs.csv"
    ...     _ = path.write_text("1,He sleeps.,He is awake.\n0,It rains.,It is wet.\n")
    ...     read_texts(path, ["1", "2"], header=False)
    ['He sleeps.', 'He is awake.', 'It rains.', 'It is wet.']
    """
    path = Path(path)
    found = []
    for number, row in enumerate(read_table(path, header), 1):
        missing = [c for c in columns if c not in row]
        if missing:
            raise ValueError(f"row {number} of {path} has no column {missing[0]!r}; it has {', '.join(row)}")
        found += [row[c] for c in columns]
    return found


def named_labels(text: str | None) -> dict[str, int]:
    """Read ``NAME=NUMBER,…``.

    Parameters
    ----------
    text : str or None
        None or empty names nothing.

    Returns
    -------
    dict of str to int
        For :class:`TextColumns`.

    Raises
    ------
    ValueError
        Anything else.

    Examples
    --------
    >>> named_labels("entailment=0,neutral=1,contradiction=2")
    {'entailment': 0, 'neutral': 1, 'contradiction': 2}
    """
    names = {}
    for entry in (text or "").split(","):
        if entry:
            name, _, number = entry.rpartition("=")
            if not name or not number.isdigit():
                raise ValueError(f"labels are mapped by NAME=NUMBER,…, and {entry!r} is none")
            names[name] = int(number)
    return names
