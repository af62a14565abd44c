"""Folders that Hugging Face's ``datasets`` saved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models import ImageFormat
from .examples import Examples
from .images import pixels
from .text import TextColumns, table_of_text

__all__ = ["datasets_folder", "is_datasets_folder"]


def is_datasets_folder(path: Path) -> bool:
    """Tell whether ``datasets.save_to_disk`` wrote a folder."""
    return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _class_name(number: str, named: Sequence[str], source: str) -> str:
    if not 0 <= int(number) < len(named):
        raise ValueError(f"{source} has the label {number}, which is none of its classes; use a part with labels")
    return named[int(number)]


def datasets_folder(
    folder: Path, split: str, images: ImageFormat | None, columns: TextColumns, tokenizer: Any, known: Mapping[str, int]
) -> Examples:
    """Open what ``datasets.save_to_disk`` wrote: texts, or images with their class."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{folder} is a folder of Hugging Face datasets: pip install datasets") from error
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"{folder} is no readable folder of datasets ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"{folder} has the parts {', '.join(found)}; name one as {folder}:{next(iter(found))}")
        found = found[split]
    source = f"{folder}:{split}" if split else str(folder)
    pictures = [name for name, kind in found.features.items() if isinstance(kind, datasets.Image)]
    if columns.label not in found.features:
        raise ValueError(f"{source} has no column {columns.label!r}; it has {', '.join(found.features)}")
    named = getattr(found.features[columns.label], "names", None)
    if not pictures:
        table = found.select_columns([c for c in (columns.text, columns.pair, columns.label) if c in found.features])
        rows = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in table]
        if named:
            rows = [{**row, columns.label: _class_name(row[columns.label], named, source)} for row in rows]
        own: dict[str, int] = {}
        if named and not columns.names and not {n.lower() for n in named} <= {n.lower() for n in known}:
            unnamed = all(n.isdigit() or n.upper().startswith("LABEL_") for n in known)
            if not unnamed:
                raise ValueError(
                    f"the classes of {source} ({', '.join(named)}) are not the model's ({', '.join(known)}); say what "
                    "labels mean with --map NAME=NUMBER,…"
                )
            own = {name: i for i, name in enumerate(named)}
        examples = table_of_text(source, rows, columns, tokenizer, own or known)
        return dataclasses.replace(examples, classes=tuple(own) or None)
    if images is None:
        raise ValueError(f"{source} holds images, but the model does not say what it expects; give size, mean, std")
    how = images

    def batch(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = found.select(list(chosen))
        shown = [pixels(row[pictures[0]], how) for row in rows]
        return torch.stack(shown), torch.tensor([int(row[columns.label]) for row in rows])

    return Examples(source, len(found), batch, None if named is None else tuple(named))
