"""Weights of whole models in files, read one at a time, and without the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..files import naming_pointers
from ..hub import fetch_model, is_name
from .configs import as_config
from .storage import header, read_tensor

#: Files of one model in its folder, the first of which is read.
_PATTERNS = ("*.safetensors.index.json", "model.safetensors", "*.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class WeightFiles:
    """Files with the weights of a model; ``origin`` is the name on the Hub, with the commit, of what is from there."""

    place: Path
    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    origin: str = ""

    def tensor(self, name: str) -> Tensor:
        """Read one weight; none has an unknown scale of its own, as quantised ones do."""
        found = read_tensor(self.files[name], name)
        if found.is_floating_point() and found.element_size() == 1:
            raise ValueError(f"{name} in {self.place} is of {found.dtype}, whose units are unknown: dequantise it")
        return found

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of those weights of layers that are matrices, by the paths of the layers."""
        ends = {name.removesuffix(".weight"): shape for name, shape in self.shapes.items() if name.endswith(".weight")}
        return {path: shape for path, shape in ends.items() if len(shape) == 2}


def read_checkpoint(name: str | os.PathLike[str]) -> WeightFiles:
    """Read which weights a model has: that of a folder, of one file, or of a name of the Hub."""
    place, origin = Path(name), ""
    if is_name(os.fspath(name)):
        fetched = fetch_model(os.fspath(name))
        place, origin = fetched.place, fetched.pinned
    listed = [place] if place.is_file() else next(filter(None, (sorted(place.glob(p)) for p in _PATTERNS)), [])
    if len(listed) != 1:
        of = f"{len(listed)} files of weights without an index" if listed else "no weights"
        raise FileNotFoundError(f"{place} has {of}; name a folder that save_pretrained wrote, or one file")
    shapes, files = dict[str, tuple[int, ...]](), dict[str, Path]()
    with naming_pointers(listed):
        if listed[0].name.endswith(".index.json"):
            index = as_config(listed[0].read_bytes(), listed[0].name)
            listed = [place / file for file in sorted({*(index.get("weight_map") or {}).values()})]
    if lost := [file.name for file in listed if not file.is_file()]:
        raise FileNotFoundError(f"{place} lacks {lost[0]}, which its index names; save or download it again")
    with naming_pointers(listed):
        for file in listed:
            own, _ = header(file)
            shapes |= own
            files |= dict.fromkeys(own, file)
    return WeightFiles(place, files, shapes, origin)
