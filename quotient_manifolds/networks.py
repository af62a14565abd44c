"""Networks of transformers from folders, or by their names on the Hub."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from .files import naming_pointers
from .hub import fetch_model, is_name
from .passes import Shared


def network_of(place: str | os.PathLike[str]) -> nn.Module:
    """Load a network from a folder of transformers, or by its name on the Hub, without code of the folder."""
    folder = fetch_model(name).place if is_name(name := os.fspath(place)) else Path(name)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the folder {folder} has no config.json, so it is no model of transformers")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"reading {folder} needs transformers: install the extra transformers, pip install '.[transformers]' in "
            "the checkout"
        ) from error
    with quiet(), naming_pointers(folder.glob("*.safetensors")):
        try:
            settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            kind: Any = getattr(transformers, (settings.get("architectures") or ["AutoModel"])[0])
            network: nn.Module = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever the library raises
            raise ValueError(f"{folder} cannot be loaded: {error}") from error
    return network


def _silence(undo: list[Callable[[], object]]) -> None:
    from transformers.utils import logging

    if logging.is_progress_bar_enabled():
        undo.append(logging.enable_progress_bar)
    undo.append(functools.partial(logging.set_verbosity, logging.get_verbosity()))
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)


#: Keep transformers from printing bars and tables: errors are reported in one sentence.
quiet = Shared(_silence)
