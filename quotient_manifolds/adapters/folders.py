"""PEFT's folders of adapters, read and written tensor by tensor, without peft."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..linalg import in_double

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: What peft calls the factors of a layer: A (r, in, …) and B (out, r, …).
_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?:embedding_)?(?P<factor>[AB])(?:\.weight)?")
#: Options under which a layer adds something else than the product s B A, or to other weights than those of the model.
_NO_PRODUCTS = ("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config")
#: Initialisations that replace the weights of the model, beginnings of their names.
_REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Names of dtypes in the file format.
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
           torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """A folder with an adapter; tensors are read when they are asked for.

    Attributes
    ----------
    folder : Path
    config : dict
        What ``adapter_config.json`` says.
    layers : dict of str to dict of str to str
        Keys of the factors "A" and "B" of each layer.
    others : tuple of str
        Keys of all else: biases, magnitudes, saved modules.
    forms : dict of str to tuple
        Shape and dtype of each tensor.
    """

    folder: Path
    config: dict[str, Any]
    layers: dict[str, dict[str, str]]
    others: tuple[str, ...]
    forms: dict[str, tuple[list[int], torch.dtype]]

    def tensor(self, key: str) -> Tensor:
        """Read one tensor. The file is closed again, so that what was read does not stay in memory."""
        from safetensors import safe_open

        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            return file.get_tensor(key)

    def rank_and_scale(self, layer: str) -> tuple[int, float]:
        """Look up the rank r of a layer and its scale, α/r or α/√r, in the config by peft's rules."""
        found = set()
        for name in parameters(layer, self.config) or [module_of(layer)]:
            r, alpha = (
                next((v for p, v in (self.config.get(of) or {}).items() if re.match(rf"(.*\.)?({p})$", name)), default)
                for of, default in (
                    ("rank_pattern", self.config.get("r", 8)),
                    ("alpha_pattern", self.config.get("lora_alpha", 8)),
                )
            )
            found.add((r, alpha / (r**0.5 if self.config.get("use_rslora") else r)))
        if len(found) > 1:
            raise ValueError(
                f"{self.folder}: parameters of {layer} differ in rank or alpha, which cannot be told apart"
            )
        return found.pop()

    def factors(self, layer: str, scaled: bool = True) -> tuple[Tensor, Tensor]:
        """Read G = s B and H = Aᵀ in float64, (experts, out, r) and (experts, in, r); most layers have one expert."""
        A, B = (self.tensor(self.layers[layer][f]) for f in "AB")
        (r, scale), rows = self.rank_and_scale(layer), A.shape[0]
        if A.dim() < 2 or B.dim() < 2 or rows != B.shape[1]:
            raise ValueError(
                f"{self.folder}: the factors of {layer}, {tuple(A.shape)} and {tuple(B.shape)}, share no rank"
            )
        if rows != r and (rows % r or not parameters(layer, self.config)):
            raise ValueError(f"{self.folder}: {layer} has rank {rows}, but {CONFIG} says {r}")
        if not bool(A.isfinite().all() and B.isfinite().all()):
            raise ValueError(f"{self.folder}: the factors of {layer} have NaN or infinite entries")
        G = in_double(B).reshape(B.shape[0], r, -1).permute(2, 0, 1)
        H = in_double(A).reshape(-1, r, A[0].numel()).mT
        return (scale * G if scaled else G), H

    def packed(self, layer: str, G: Tensor, H: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a layer whose factors are B = G and A = Hᵀ, in float64, by their keys."""
        (a, b), columns = (self.layers[layer][f] for f in "AB"), G.shape[0] * G.shape[2]
        A = H.mT.reshape(columns, *self.forms[a][0][1:])
        return {a: A, b: G.permute(1, 2, 0).reshape(-1, columns, *self.forms[b][0][2:])}


def read(folder: str | os.PathLike[str]) -> Adapter:
    """Read the config of an adapter and the names of its tensors; refuse what holds no plain products."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickle = (folder / "adapter_model.bin").is_file() and name == WEIGHTS
            why = (
                "only a pickle, which may run code when it is read; save it as safetensors" if pickle else "no adapter"
            )
            raise FileNotFoundError(f"{folder} has no {name}: it is {why}")
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "adapters are read by safetensors: install the extra lora, pip install '.[lora]' in the checkout"
        ) from error
    try:
        config = json.loads((folder / CONFIG).read_text(), object_hook=_ordered)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            slices, names = (
                {key: file.get_slice(key) for key in sorted(file.keys())},
                {v: k for k, v in _DTYPES.items()},
            )
            forms = {key: (part.get_shape(), names[part.get_dtype()]) for key, part in slices.items()}
        kind, start = config.get("peft_type"), str(config.get("init_lora_weights")).lower()
    except Exception as error:
        raise ValueError(f"{folder} cannot be read: {error}") from error
    if kind != "LORA":
        raise ValueError(f"{folder} is an adapter of the method {kind}, not LORA")
    if odd := [name for name in _NO_PRODUCTS if config.get(name)]:
        raise ValueError(f"{folder} was made with {odd[0]}, so its layers add something else than products B A")
    if start.startswith(_REPLACING):
        raise ValueError(
            f"{folder} was initialised by {start}, which replaces the weights of the model; save it by save_pretrained "
            "with path_initial_model_for_weight_conversion first"
        )
    layers = dict[str, dict[str, str]]()
    for key in forms:
        if found := _FACTOR.fullmatch(key):
            layers.setdefault(found["layer"], {})[found["factor"]] = key
    if not layers or any(len(of) < 2 for of in layers.values()):
        raise ValueError(f"{folder} has no pairs lora_A, lora_B in the names of peft")
    factors = {key for of in layers.values() for key in of.values()}
    return Adapter(folder, config, layers, tuple(key for key in forms if key not in factors), forms)


def _ordered(config: dict[str, Any]) -> dict[str, Any]:
    """Sort lists of names, which are sets that peft saves in any order."""
    named = {k: v for k, v in config.items() if isinstance(v, list) and all(isinstance(name, str) for name in v)}
    return {**config, **{k: sorted(v) for k, v in named.items()}}


def module_of(layer: str) -> str:
    """Return the path of a layer in the model, from its key in the file."""
    return layer.removeprefix("base_model.model.").replace(".base_layer", "")


def parameters(layer: str, config: dict[str, Any]) -> list[str]:
    """List the paths of the parameters that ``target_parameters`` names in a layer."""
    path, modules = module_of(layer), config.get("target_modules") or ()
    if (
        re.fullmatch(modules, path)
        if isinstance(modules, str)
        else f".{path}".endswith(tuple(f".{m}" for m in modules))
    ):
        return []
    places = ((p, f"{path}.{p.rpartition('.')[2]}") for p in config.get("target_parameters") or ())
    return [place for p, place in places if f".{place}".endswith(f".{p}")]


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Let the block fill a folder that has another name until it is complete."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists already; name a new folder")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.absolute().parent} for {out.name!r}; create it first")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as place:
        folder = Path(place) / "new"
        folder.mkdir()
        yield folder
        if out.is_dir():
            out.rmdir()
        folder.rename(out)


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file, of which no more than one tensor is in memory.

    The header stands first but is known last, so tensors go to temporary files, one for each size of a number: the
    largest come first, so that each is aligned.
    """
    header, sizes, ends = dict[str, dict[str, Any]](), dict[str, int](), dict.fromkeys((8, 4, 2, 1), 0)
    with ExitStack() as stack, path.open("wb") as file:
        spools = {size: stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for size in ends}
        for key, t in tensors:
            raw, size = t.contiguous().reshape(-1).view(torch.uint8).numpy(), t.element_size()
            spools[size].write(raw.data)
            place = [ends[size], ends[size] + raw.nbytes]
            header[key], sizes[key] = {"dtype": _DTYPES[t.dtype], "shape": [*t.shape], "data_offsets": place}, size
            ends[size] = place[1]
        for key, entry in header.items():
            start = sum(end for size, end in ends.items() if size > sizes[key])
            entry["data_offsets"] = [start + at for at in entry["data_offsets"]]
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for spool in spools.values():
            spool.seek(0)
            shutil.copyfileobj(spool, file, 1 << 22)
