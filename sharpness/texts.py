"""Tables of text: their columns, and the batches that a model's tokenizer makes of them."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import naming
from .losses import IGNORED
from .models import LoadedModel

__all__ = ["TextColumns", "class_number", "read_table", "strings", "tokenized"]


@dataclass(frozen=True)
class TextColumns:
    """The roles of the columns of a table.

    Attributes
    ----------
    text : str
        Column of the text: its name in the header, or its number from 0 where there is none.
    pair : str or None
        Column of the second text, for pairs of texts.
    label : str
        Column of the label. Models that predict the next or masked tokens need none; of those from text to text it is
        the text.
    label_map : mapping of str to int
        The class number of each label; if empty, labels are numbers or names in the model's configuration.
    header : bool
        Whether the first line of a .tsv or .csv file names the columns; else it is already data.
    max_length : int
        Longest input in tokens, unless the tokenizer's limit is lower.

    Examples
    --------
    Of MNLI's tables, whose labels are words:

    >>> numbers = {"entailment": 0, "neutral": 1, "contradiction": 2}
    >>> columns = TextColumns(text="sentence1", pair="sentence2", label="gold_label", label_map=numbers)
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    label_map: Mapping[str, int] = field(default_factory=dict)
    header: bool = True
    max_length: int = 128


def read_table(path: str | os.PathLike[str], header: bool = True) -> list[dict[str, str]]:
    """Read a ``.tsv`` (quotation marks are text), ``.csv`` or ``.jsonl`` table: its rows, by column.

    Without a header columns are numbered from ``"0"``. Values of a ``.jsonl`` file that are not strings are written as
    JSON.
    """
    path = Path(path)
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line} of {path} is not UTF-8; convert the file") from error
    if path.suffix.lower() == ".jsonl":
        rows = []
        for number, content in enumerate(text.split("\n"), 1):  # splitlines() breaks at characters inside strings
            if content.strip():
                with naming(f"line {number} of {path} is not JSON"):
                    value = json.loads(content)
                if not isinstance(value, dict):
                    raise ValueError(f"line {number} of {path} is not a JSON object")
                rows.append(strings(value))
        return rows
    # Quotation marks are text in a .tsv.
    tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    first = text.partition("\n")[0]
    commas = {"delimiter": ";" if ";" in first and "," not in first else ",", "strict": True}
    form = tabs if path.suffix.lower() == ".tsv" else commas
    limit = csv.field_size_limit(2**31 - 1)  # by default texts of 131,072 characters are refused
    try:
        with naming(f"{path} is not a readable table"):
            table = [line for line in csv.reader(io.StringIO(text, newline=""), **form) if line]
    finally:
        csv.field_size_limit(limit)
    names = table.pop(0) if header and table else [str(i) for i in range(max(map(len, table), default=0))]
    double = [name for name in names if names.count(name) > 1]
    if double:
        raise ValueError(f"{path} has two columns {double[0]!r}; rename one of them")
    for number, row in enumerate(table, 1):
        if len(row) != len(names):
            fix = "" if form is tabs or len(row) < len(names) else f"; quote values that contain {form['delimiter']!r}"
            raise ValueError(f"row {number} of {path} has {len(row)} columns, not {len(names)}{fix}")
    return [dict(zip(names, line, strict=True)) for line in table]


def strings(row: Mapping[str, Any]) -> dict[str, str]:
    """Write values that are not strings as JSON; leave out those that are missing."""
    return {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in row.items() if v is not None}


def tokenized(
    source: Path | str, rows: Sequence[Mapping[str, str]], loaded: LoadedModel, columns: TextColumns
) -> tuple[Callable[[Sequence[int]], dict[str, Tensor]], list[int]]:
    """Return a function from positions of rows to a batch for the model, and the labels of all rows.

    For a model that predicts tokens (``loaded.predicts``: ``"next"``, ``"masked"`` or ``"text"``) the labels are
    tokens, all of the text, 15 % of it, or all of the label's text, and the list is empty.
    """
    tokenizer, predicts = loaded.tokenizer, loaded.predicts
    if tokenizer is None:
        raise ValueError(f"{source} is text, but the model has no tokenizer: put one into its folder (tokenizer.json)")
    if not rows:
        raise ValueError(f"{source} has no rows")
    texts = [columns.text] if columns.pair is None else [columns.text, columns.pair]
    for number, row in enumerate(rows, 1):
        for column in texts if predicts in ("next", "masked") else [*texts, columns.label]:
            if column not in row:
                raise ValueError(f"row {number} of {source} has no column {column!r}; it has {', '.join(row)}")
    known = columns.label_map or loaded.labels
    labels = [] if predicts else [_label(row[columns.label].strip(), known, columns, source) for row in rows]
    broken = f"the tokenizer for {source} does not work"
    with naming(broken):
        length = min(columns.max_length, int(getattr(tokenizer, "model_max_length", columns.max_length)))
    how: dict[str, Any] = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "pt"}

    def batch(chosen: Sequence[int]) -> dict[str, Tensor]:
        given = [[rows[i][c] for i in chosen] for c in texts]
        with naming(broken):
            coded = tokenizer(*given, **how)
            if predicts is None:
                return {**coded, "labels": torch.tensor([labels[i] for i in chosen])}
            if predicts == "masked":
                return _masked(coded, chosen, tokenizer)
            wanted = coded
            if predicts == "text":
                wanted = tokenizer(text_target=[rows[i][columns.label] for i in chosen], **how)
            return {**coded, "labels": wanted["input_ids"].masked_fill(wanted["attention_mask"] == 0, IGNORED)}

    return batch, labels


def _label(label: str, known: Mapping[str, int], columns: TextColumns, source: Path | str) -> int:
    number = class_number(label, known)
    if number is None and not columns.label_map and label.removeprefix("-").isdecimal():
        number = int(label)
    if number is None:
        raise ValueError(
            f"{source} has the label {label!r}, which is not the name of a class "
            f"({', '.join(known) or 'none are named'}); say what labels mean with --label-map NAME=NUMBER,…"
        )
    return number


def _masked(coded: Mapping[str, Tensor], chosen: Sequence[int], tokenizer: Any) -> dict[str, Tensor]:
    """Replace 15 % of each text's tokens, at least one, by the mask token; they are the labels.

    Which ones is drawn with the number of the row as seed, so it does not depend on the batch.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError("it has no mask token, which a masked language model needs")
    ids, picked = coded["input_ids"], torch.zeros_like(coded["input_ids"], dtype=torch.bool)
    for row, number, tokens in zip(picked, chosen, ids.tolist(), strict=True):
        special = tokenizer.get_special_tokens_mask(tokens, already_has_special_tokens=True)
        places = torch.tensor([i for i, s in enumerate(special) if not s], dtype=torch.long)
        order = torch.rand(len(places), generator=torch.Generator().manual_seed(int(number))).argsort()
        row[places[order[: max(1, round(0.15 * len(places)))]]] = True
    hidden = ids.masked_fill(picked, tokenizer.mask_token_id)
    return {**coded, "input_ids": hidden, "labels": ids.masked_fill(~picked, IGNORED)}


def class_number(name: str, known: Mapping[str, int]) -> int | None:
    """Return the number of a class by its name: as it is or, if that is unique, whatever the case; None if unknown."""
    if name in known:
        return known[name]
    alike = [number for other, number in known.items() if other.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None
