"""Files of tensors and new folders: read tensor by tensor, without running code; written whole or not at all."""

from __future__ import annotations

import glob
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save
except ImportError as error:
    raise ImportError(
        "adapters are read by safetensors: install the extra lora, pip install '.[lora]' in the checkout"
    ) from error

#: Endings of pickles.
PICKLES = (".bin", ".pt")


def read_tensor(file: Path, key: str) -> Tensor:
    """Read one tensor. The file is closed again, so that what was read does not stay in memory."""
    if file.suffix in PICKLES:
        return _pickled(file)[key]
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(key)


def header(weights: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes of the tensors of a file, by their keys, and its metadata."""
    if weights.suffix in PICKLES:
        return {key: tuple(t.shape) for key, t in _pickled(weights).items()}, {}
    try:
        with safe_open(weights, framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            return shapes, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{weights.name} is no whole safetensors file ({error}): save or download it again") from error


def _pickled(weights: Path) -> dict[str, Tensor]:
    """Open a pickle of tensors, which stay on the disk until they are used; code in it is refused, not run."""
    try:
        found = torch.load(weights, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except pickle.UnpicklingError:
        found = None  # as for other contents
    except Exception as error:  # whatever torch raises
        raise ValueError(f"{weights.name} is no whole file of torch.save: save or download it again") from error
    if isinstance(found, dict) and all(isinstance(t, Tensor) for t in found.values()):
        return found
    raise ValueError(f"{weights.name} is a pickle of more than tensors, which may run code; save it as safetensors")


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Let the block fill a folder that has another name until it is complete."""
    if "\0" in os.fspath(out):
        raise ValueError(f"out is no path: {out!r} has a NUL character")
    out = Path(out).resolve()  # a link stays, and its folder is filled
    check_free(out)
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent} for {out.name!r}; create it first")
    begun = f".{out.name}.quotient-lora-"
    for stale in out.parent.glob(f"{glob.escape(begun)}*/new"):
        if {"new"} <= {*os.listdir(stale.parent)} <= {"new", "lock"}:
            with _lock(stale.parent) as free:
                if not free:
                    raise FileExistsError(f"another command is writing {out}; wait for it, or name another folder")
                shutil.rmtree(stale.parent, ignore_errors=True)  # of a command that was killed
    with tempfile.TemporaryDirectory(prefix=begun, dir=out.parent) as place, _lock(Path(place)):
        folder = Path(place) / "new"
        folder.mkdir()
        yield folder
        check_free(out)
        if out.is_dir():
            out.rmdir()
        folder.rename(out)


def check_free(out: Path) -> None:
    """Raise unless a new folder may be written there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists already; name a new folder")


@contextmanager
def _lock(place: Path) -> Iterator[bool]:
    """Hold the lock of a folder, which ends with the process, or tell that another process holds it."""
    with (place / "lock").open("wb") as file:
        try:
            from fcntl import LOCK_EX, LOCK_NB, flock  # not on Windows, which does not remove files that are open

            flock(file, LOCK_EX | LOCK_NB)
            free = True
        except (ImportError, OSError) as error:
            free = not isinstance(error, BlockingIOError)
        yield free


def checked(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors that are to be handed out; raise if one has NaN or infinite entries."""
    for key, t in tensors.items():
        if not bool(t.isfinite().all()):
            raise ValueError(f"{key} would have NaN or infinite entries in {t.dtype}")
    return tensors


class TensorFile(AbstractContextManager["TensorFile"]):
    """A safetensors file that is written tensor by tensor, so that no more of it is in memory.

    The header stands first but is known last, so tensors go to a temporary file until :meth:`finish`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._spool = path, tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
        self._parts = list[tuple[int, str, dict[str, Any], int]]()

    def __exit__(self, *_: object) -> None:
        """Remove the temporary file."""
        self._spool.close()

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors by their keys."""
        for key, t in checked(tensors).items():
            raw = memoryview(save({key: t.contiguous()}))
            start = 8 + int.from_bytes(raw[:8], "little")
            self._parts.append((-t.element_size(), key, json.loads(bytes(raw[8:start]))[key], self._spool.tell()))
            self._spool.write(raw[start:])

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the file. Tensors with the largest numbers come first, so that each is aligned."""
        parts, entries, end = sorted(self._parts, key=lambda part: part[:2]), dict[str, Any](), 0
        for _, key, entry, _ in parts:
            begin, end = end, end + entry["data_offsets"][1]
            entries[key] = {**entry, "data_offsets": [begin, end]}
        text = json.dumps({"__metadata__": {"format": "pt", **metadata}, **entries}).encode()
        text += b" " * (-len(text) % 8)
        with self._path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, _, entry, start in parts:
                self._spool.seek(start)
                file.write(self._spool.read(entry["data_offsets"][1]))
