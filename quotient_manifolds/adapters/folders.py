"""Adapters as files, read and written tensor by tensor: PEFT's folders, and single files of kohya's names."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from safetensors import safe_open
    from safetensors.torch import save
except ImportError as error:
    raise ImportError(
        "adapters are read by safetensors: install the extra lora, pip install '.[lora]' in the checkout"
    ) from error

from ..linalg import in_double

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: The factors of a layer, A (r, in, …) and B (out, r, …): lora_A, lora_embedding_A in peft and diffusers, lora_down in
#: kohya's scripts, lora.down in older files of diffusers.
_FACTOR = re.compile(r"(.+)[._]lora[._](?:embedding_)?(A|B|down|up)(?:\.weight)?")
#: How a pattern of layers matches a path.
_PATTERN = r"(.*\.)?({})$"
#: Options under which a layer adds something else than the product s B A, or to other weights than those of the model.
_NO_PRODUCTS = ("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config")
#: Initialisations that replace the weights of the model, beginnings of their names.
_REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Options in which adapters that are merged have to agree.
_COMMON = ("target_parameters", "trainable_token_indices", "alora_invocation_tokens", "layer_replication")


@dataclass(frozen=True)
class Adapter:
    """An adapter in files; tensors are read when they are asked for.

    Attributes
    ----------
    place, weights : Path
        Its folder, or its only file; and the file with the tensors.
    config : dict
        What ``adapter_config.json`` says; empty for a single file.
    layers : dict of str to dict of str to str
        Keys of each layer's factors "A" and "B" and, in a single file, of its "alpha".
    others : tuple of str
        Keys of all else: biases, magnitudes, saved modules.
    """

    place: Path
    weights: Path
    config: dict[str, Any]
    layers: dict[str, dict[str, str]]
    others: tuple[str, ...]

    @property
    def common(self) -> dict[str, Any]:
        """What has to be the same in adapters that are merged: options, and how factors are called."""
        names = CONFIG if self.config else next(iter(self.layers.values()))["A"].rpartition("lora")[2]
        return {**{option: self.config.get(option) or None for option in _COMMON}, "the format of their names": names}

    def tensor(self, key: str) -> Tensor:
        """Read one tensor. The file is closed again, so that what was read does not stay in memory."""
        with safe_open(self.weights, framework="pt") as file:
            return file.get_tensor(key)

    def rank_and_scale(self, layer: str) -> tuple[int, float]:
        """Look up the rank r of a layer and its scale, α/r or α/√r, by peft's rules, or in a single file."""
        if not self.config:
            keys = self.layers[layer]
            r = len(self.tensor(keys["A"]))
            return r, float(self.tensor(keys["alpha"])) / r if "alpha" in keys else 1.0

        def look_up(name: str, kind: str, option: str) -> Any:
            patterns = (self.config.get(f"{kind}_pattern") or {}).items()
            default = self.config.get(option, 8)
            return next((v for p, v in patterns if re.match(_PATTERN.format(p), name)), default)

        names = parameters(layer, self.config) or [module_of(layer)]
        (r, alpha), *more = {(look_up(name, "rank", "r"), look_up(name, "alpha", "lora_alpha")) for name in names}
        if more or not (isinstance(r, int) and r > 0 and isinstance(alpha, int | float)):
            raise ValueError(f"{self.place}: {layer} needs one rank above 0 and one alpha, got {[(r, alpha), *more]}")
        return r, alpha / (r**0.5 if self.config.get("use_rslora") else r)

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """Read s B and Aᵀ in float64, (experts, out, r) and (experts, in, r); most layers have one expert."""
        A, B = (self.tensor(self.layers[layer][f]) for f in "AB")
        (r, scale), rows = self.rank_and_scale(layer), len(A)
        fits = rows == r or (rows % r == 0 and parameters(layer, self.config))
        if A.dim() < 2 or B.dim() < 2 or rows != B.shape[1] or not fits:
            raise ValueError(f"{self.place}: {layer} has factors {[*A.shape]} and {[*B.shape]}, not of rank {r}")
        G, H = scale * in_double(B).reshape(len(B), r, -1), in_double(A).reshape(-1, r, A[0].numel())
        if not bool(G.isfinite().all() and H.isfinite().all()):
            raise ValueError(f"{self.place}: the factors of {layer} have NaN or infinite entries")
        return G.permute(2, 0, 1), H.mT

    def packed(self, layer: str, G: Tensor, H: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a layer whose factors are B = G and A = Hᵀ, of scale 1, by their keys."""
        columns = G.shape[0] * G.shape[2]
        a, b = (self.tensor(self.layers[layer][f]).shape for f in "AB")
        A, B = H.mT.reshape(columns, *a[1:]), G.permute(1, 2, 0).reshape(-1, columns, *b[2:])
        new = {"A": A.to(dtype), "B": B.to(dtype), "alpha": torch.tensor(float(columns))}
        return {key: new[f] for f, key in self.layers[layer].items()}


def read(place: str | os.PathLike[str]) -> Adapter:
    """Read the config of an adapter and the names of its tensors; refuse what holds no plain products."""
    place = Path(place)
    single = place.is_file()
    weights = place if single else place / WEIGHTS
    if not (single or ((place / CONFIG).is_file() and weights.is_file())):
        raise FileNotFoundError(
            f"{place} is no file, and no folder with {CONFIG} and {WEIGHTS}; a pickle (.bin) may run code when it is "
            "read, so save the adapter as safetensors"
        )
    try:
        config = {} if single else json.loads((place / CONFIG).read_text(), object_hook=_ordered)
        with safe_open(weights, framework="pt") as opened:
            keys = sorted(opened.keys())
        kind, start = config.get("peft_type", "LORA"), str(config.get("init_lora_weights")).lower()
    except Exception as error:
        raise ValueError(f"{place} cannot be read: {error}") from error
    kind = next((name for name in _NO_PRODUCTS if config.get(name)), kind)
    if kind != "LORA":
        raise ValueError(f"{place} was made with {kind}, whose layers add something else than products B A")
    if start.startswith(_REPLACING):
        raise ValueError(
            f"{place} was initialised by {start}, which replaces the weights of the model; save it by save_pretrained "
            "with path_initial_model_for_weight_conversion first"
        )
    for option in ("rank_pattern", "alpha_pattern", "target_modules"):
        given = config.get(option)  # a list has names instead of patterns
        patterns = [given] if isinstance(given, str) else map(_PATTERN.format, given if isinstance(given, dict) else ())
        try:
            list(map(re.compile, patterns))
        except re.error as error:
            raise ValueError(f"{place}: {option} is no regular expression: {error}") from error
    layers = dict[str, dict[str, str]]()
    for key in keys:
        if found := _FACTOR.fullmatch(key):
            layers.setdefault(found[1], {})["A" if found[2] in ("A", "down") else "B"] = key
    if not layers or any(len(of) < 2 for of in layers.values()):
        raise ValueError(f"{place} has no pairs of factors in the names of peft, diffusers or kohya's scripts")
    for layer, of in layers.items():
        if single and f"{layer}.alpha" in keys:
            of["alpha"] = f"{layer}.alpha"
    known = {key for of in layers.values() for key in of.values()}
    others = tuple(key for key in keys if key not in known)
    if single and others:
        raise ValueError(f"{place} holds {others[0]}, which is no factor of LoRA")
    return Adapter(place, weights, config, layers, others)


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
    if isinstance(modules, str):
        modules = [path] if re.fullmatch(modules, path) else []
    if any(f".{path}".endswith(f".{m}") for m in modules):
        return []
    places = ((p, f"{path}.{p.rpartition('.')[2]}") for p in config.get("target_parameters") or ())
    return [place for p, place in places if f".{place}".endswith(f".{p}")]


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Let the block fill a folder that has another name until it is complete."""
    out = Path(out).resolve()  # a link stays, and its folder is filled
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists already; name a new folder")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent} for {out.name!r}; create it first")
    begun = f".{out.name}.quotient-lora-"
    for stale in out.parent.glob(f"{glob.escape(begun)}*/new"):  # of a command that was killed
        if os.listdir(stale.parent) == ["new"]:
            shutil.rmtree(stale.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=begun, dir=out.parent) as place:
        folder = Path(place) / "new"
        folder.mkdir()
        yield folder
        if out.is_dir():
            out.rmdir()
        folder.rename(out)


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file, of which no more than one tensor is in memory.

    The header stands first but is known last, so tensors go to a temporary file. Those with the largest numbers come
    first, so that each is aligned.
    """
    parts, header = list[tuple[int, str, dict[str, Any], int]](), dict[str, Any]()
    with tempfile.TemporaryFile(dir=path.parent) as spool, path.open("wb") as file:
        for key, t in tensors:
            if not bool(t.isfinite().all()):
                raise ValueError(f"{key} would have NaN or infinite entries in {t.dtype}")
            raw = memoryview(save({key: t.contiguous()}))
            start = 8 + int.from_bytes(raw[:8], "little")
            parts.append((-t.element_size(), key, json.loads(bytes(raw[8:start]))[key], spool.tell()))
            spool.write(raw[start:])
        end = 0
        for _, key, entry, _ in sorted(parts, key=lambda part: part[:2]):
            begin, end = end, end + entry["data_offsets"][1]
            header[key] = {**entry, "data_offsets": [begin, end]}
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, entry, start in sorted(parts, key=lambda part: part[:2]):
            spool.seek(start)
            file.write(spool.read(entry["data_offsets"][1]))
