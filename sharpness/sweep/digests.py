"""Digests of the inputs of a result by content, not by path: equal contents have equal digests."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from ..data import divided, is_function, source_files
from ..huggingface import INPUTS, files_of

__all__ = ["of_data", "of_model", "places", "versions"]

#: What transformers reads of a model in a folder, besides its tokenizer and image processor.
_MODEL = ("config.json", "*.safetensors", "*.bin", "*.index.json")


def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    return {name: version(name) for name in ("torch", "geoopt", "quotient-manifolds")}


def places(name: str) -> list[Path]:
    """List what is read of a model or a source of data: a folder, files, or the code of ``module:function``."""
    return _code(name) if is_function(name) else [divided(name)[0]]


def of_data(source: str) -> str:
    """Digest the contents of a source of data; for ``module:function`` the module's code."""
    if is_function(source):
        return _of_files([("", path) for path in _code(source)])
    return _of_files(source_files(source))


def of_model(model: str, weights: str | None) -> str:
    """Digest a model: weights with the code or name, or a folder's configuration, weights, tokenizer, preprocessor."""
    files: list[tuple[str, Path]] = []
    if Path(model).is_dir():
        files += [(p.name, p) for p in files_of(Path(model), (*_MODEL, *INPUTS))]
    elif Path(model).is_file():  # weights without a folder
        files.append(("weights", Path(model)))
    elif ":" in model:
        files += [("code", path) for path in _code(model)]
    files += [] if weights is None else [("weights", Path(weights))]
    return _of_files([(name, p) for name, p in files if p.is_file()])


def _code(name: str) -> list[Path]:
    """Find the file of the module in ``module:function``; None if there is no such module."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError, AttributeError):
        return []
    return [Path(found.origin)] if found is not None and found.origin and Path(found.origin).is_file() else []


def _of_files(files: Iterable[tuple[str, Path]]) -> str:
    stats = ((name, str(p), p.stat()) for name, p in files)
    return _of_contents(tuple((name, path, s.st_size, s.st_mtime_ns) for name, path, s in stats))


@functools.cache
def _of_contents(files: tuple[tuple[str, str, int, int], ...]) -> str:
    """Digest names and contents, cached by size and time of change, so a file that is written again is read again."""
    digest = hashlib.sha256()
    for name, path, size, _ in files:
        digest.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest()[:20]
