"""Folders that Hugging Face's ``datasets`` saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import naming
from ..models import ImageFormat
from .examples import Examples
from .images import image_examples, needed_format, pixels
from .text import TextColumns, strings, table_of_text

__all__ = ["datasets_folder", "is_datasets_folder"]


def is_datasets_folder(path: Path) -> bool:
    """Tell whether ``datasets.save_to_disk`` wrote a folder."""
    return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def datasets_folder(
    folder: Path, split: str, images: ImageFormat | None, columns: TextColumns, tokenizer: Any,
    known: Mapping[str, int], predicts: str | None = None,
) -> Examples:  # fmt: skip
    """Open what ``datasets.save_to_disk`` wrote: texts, or images with their class."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{folder} is a folder of Hugging Face datasets: pip install datasets") from error
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"{folder} is not a readable folder of datasets ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"{folder} has the splits {', '.join(found)}; name one as {folder}:{next(iter(found))}")
        found = found[split]
    source = f"{folder}:{split}" if split else str(folder)
    if predicts is not None:
        return _texts(found, None, source, columns, tokenizer, known, predicts)
    if columns.label not in found.features:
        raise ValueError(f"{source} has no column {columns.label!r}; it has {', '.join(found.features)}")
    named = getattr(found.features[columns.label], "names", None)
    pictures = [name for name, kind in found.features.items() if isinstance(kind, datasets.Image)]
    if not pictures:
        return _texts(found, named, source, columns, tokenizer, known)

    how = needed_format(images, source)

    def read(row: int) -> Any:
        with naming(f"the image in row {row} of {source} cannot be read"):
            return pixels(found[row][pictures[0]], how)

    return image_examples(source, read, found[columns.label], named, known)


def _texts(
    found: Any, named: Sequence[str] | None, source: str, columns: TextColumns, tokenizer: Any,
    known: Mapping[str, int], predicts: str | None = None,
) -> Examples:  # fmt: skip
    wanted = [c for c in (columns.text, columns.pair, columns.label) if c in found.features]
    rows = [strings(row) for row in found.select_columns(wanted)]
    if not named:
        return table_of_text(source, rows, columns, tokenizer, known, predicts)
    for row in rows:
        number = int(row.get(columns.label, -1))
        if not 0 <= number < len(named):
            raise ValueError(
                f"{source} has the label {number}, which is not among its classes; use a split with labels"
            )
        row[columns.label] = named[number]
    if columns.label_map or {n.lower() for n in named} <= {n.lower() for n in known}:
        return table_of_text(source, rows, columns, tokenizer, known)
    if not all(n.isdigit() or n.upper().startswith("LABEL_") for n in known):
        raise ValueError(
            f"the classes of {source} ({', '.join(named)}) are not the model's ({', '.join(known)}); say what "
            "labels mean with --label-map NAME=NUMBER,…"
        )
    own = {name: i for i, name in enumerate(named)}
    return dataclasses.replace(table_of_text(source, rows, columns, tokenizer, own), classes=tuple(named))
