"""Tables of text: their rows, the classes that their labels name, and the tokens that a masked model predicts."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import naming
from .losses import IGNORED


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
                with naming(f"line {number} of {path} is not a JSON object"):
                    rows.append(strings(json.loads(content)))
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


def masked(coded: Mapping[str, Tensor], chosen: Sequence[int], tokenizer: Any) -> dict[str, Tensor]:
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
