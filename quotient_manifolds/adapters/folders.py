"""Adapters as files, read and written tensor by tensor: PEFT's folders, and single files of kohya and diffusers."""

from __future__ import annotations

import glob
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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

from ..files import naming_pointers
from ..linalg import in_double

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
#: Endings of pickles.
_PICKLES = (".bin", ".pt")
#: Where diffusers keeps the config of each model, in the metadata of a file.
HEADER = "lora_adapter_metadata"
#: The factors of a layer, A (r, in, …) and B (out, r, …): lora_A, lora_embedding_A in peft and diffusers, lora_down in
#: kohya's scripts, lora.down in older files of diffusers; with the adapter's name in a state that was saved as it is.
_FACTOR = re.compile(r"(.+)[._]lora[._](?:embedding_)?(A|B|down|up)(?:\.default)?(?:\.weight)?")
#: What single files hold besides factors, by the end of its key.
_OTHERS = {
    "dora_scale": "a magnitude of DoRA",
    "diff": "the change of a whole weight",
    "diff_b": "the change of a bias",
}
#: How a pattern of layers matches a path.
_PATTERN = r"(.*\.)?({})$"
#: Options under which a layer adds something else than the product s B A, or to other weights than those of the model.
_NO_PRODUCTS = ("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config")
#: Initialisations that replace the weights of the model, beginnings of their names.
_REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Options in which adapters that are merged have to agree.
_COMMON = ("target_parameters", "alora_invocation_tokens", "layer_replication")


@dataclass(frozen=True)
class Adapter:
    """An adapter in files; tensors are read when they are asked for.

    Attributes
    ----------
    place, weights : Path
        Its folder, or its only file; and the file with the tensors.
    config : dict
        What ``adapter_config.json`` says; for a single file what diffusers keeps in its metadata, or nothing.
    layers : dict of str to dict of str to str
        Keys of each layer's factors "A" and "B" and, in a single file, of its "alpha".
    others : tuple of str
        Keys of all else: biases, magnitudes, saved modules.
    metadata : dict of str to str
        The metadata in the header of the file.
    """

    place: Path
    weights: Path
    config: dict[str, Any]
    layers: dict[str, dict[str, str]]
    others: tuple[str, ...]
    metadata: dict[str, str]

    @property
    def single(self) -> bool:
        """Whether it is one file, which no config of PEFT describes."""
        return self.place == self.weights

    @property
    def saved_as(self) -> str:
        """The name of a file like this one; what was a pickle is one no more."""
        pickled = self.weights.suffix in _PICKLES
        return f"{self.weights.stem}.safetensors" if pickled else self.weights.name

    @property
    def has_alphas(self) -> bool:
        """Whether the file has an alpha for each layer."""
        return any("alpha" in of for of in self.layers.values())

    @property
    def layout(self) -> int:
        """How PEFT took inputs and outputs of experts: before 0.19.0, in 0.19.0, and since 0.19.1."""
        version = tuple(map(int, re.findall(r"\d+", str(self.config.get("peft_version")))[:3]))
        return (version >= (0, 19, 0)) + (version >= (0, 19, 1))

    @property
    def common(self) -> dict[str, Any]:
        """What has to be the same in adapters that are merged: options, and how factors are called."""
        names = next(iter(self.layers.values()))["A"].rpartition("lora")[2] if self.single else CONFIG
        return {**{option: self.config.get(option) or None for option in _COMMON}, "the format of their names": names}

    def options(self, layer: str) -> tuple[str, dict[str, Any]]:
        """Return the path of a layer in its model, and the config of that model, empty if none is known."""
        if not (self.single and self.config):
            return module_of(layer), self.config
        model, _, path = layer.partition(".")
        return path, _of_model(self.config, model)

    def tensor(self, key: str) -> Tensor:
        """Read one tensor. The file is closed again, so that what was read does not stay in memory."""
        if self.weights.suffix in _PICKLES:
            return _pickled(self.weights)[key]
        with safe_open(self.weights, framework="pt") as file:
            return file.get_tensor(key)

    def rank_and_scale(self, layer: str) -> tuple[int, float]:
        """Look up the rank r of a layer and its scale, α/r or α/√r, by peft's rules, or in a single file."""
        path, config = self.options(layer)
        if not config:
            r, alphas = len(self.tensor(self.layers[layer]["A"])), [1.0]
            if key := self.layers[layer].get("alpha"):
                alphas = [float(alpha) / r for alpha in self.tensor(key).flatten()]
            if len(alphas) != 1 or alphas[0] == 0:  # 0 means the rank in kohya's scripts, and 0 elsewhere
                raise ValueError(f"{self.place}: {key} must be one number other than 0")
            return r, alphas[0]

        def look_up(name: str, kind: str, option: str) -> Any:
            patterns = (config.get(f"{kind}_pattern") or {}).items()
            return next((v for p, v in patterns if re.match(_PATTERN.format(p), name)), config[option])

        names = parameters(layer, config) or [path]
        (r, alpha), *more = {(look_up(name, "rank", "r"), look_up(name, "alpha", "lora_alpha")) for name in names}
        if more or not (isinstance(r, int) and r > 0 and isinstance(alpha, int | float)):
            raise ValueError(f"{self.place}: {layer} needs one rank above 0 and one alpha, got {[(r, alpha), *more]}")
        return r, alpha / (r**0.5 if config.get("use_rslora") else r)

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """Read s B and Aᵀ in float64, (experts, out, r) and (experts, in, r); most layers have one expert."""
        A, B = (self.tensor(self.layers[layer][f]) for f in "AB")
        (r, scale), rows = self.rank_and_scale(layer), len(A)
        fits = rows == r or (rows % r == 0 and parameters(layer, self.config))
        if A.dim() < 2 or B.dim() < 2 or rows != B.shape[1] or not fits:
            raise ValueError(f"{self.place}: {layer} has factors {[*A.shape]} and {[*B.shape]}, not of rank {r}")
        if not (A.is_floating_point() and B.is_floating_point()):
            raise ValueError(f"{self.place}: {layer} has factors of {A.dtype} and {B.dtype}, whose units are unknown")
        G, H = scale * in_double(B).reshape(len(B), r, -1), in_double(A).reshape(-1, r, A[0].numel())
        if not bool(G.isfinite().all() and H.isfinite().all()):
            raise ValueError(f"{self.place}: the factors of {layer} have NaN or infinite entries")
        return G.permute(2, 0, 1), H.mT

    def packed(self, layer: str, G: Tensor, H: Tensor, dtype: torch.dtype, alphas: bool) -> dict[str, Tensor]:
        """Return the tensors of a layer whose factors are B = G and A = Hᵀ, of scale 1, by their keys."""
        columns = G.shape[0] * G.shape[2]
        a, b = (self.tensor(self.layers[layer][f]).shape for f in "AB")
        A, B = H.mT.reshape(columns, *a[1:]), G.permute(1, 2, 0).reshape(-1, columns, *b[2:])
        new = {self.layers[layer]["A"]: A.to(dtype), self.layers[layer]["B"]: B.to(dtype)}
        return new | ({f"{layer}.alpha": torch.tensor(float(columns))} if alphas else {})


def read(place: str | os.PathLike[str]) -> Adapter:
    """Read the config of an adapter and the names of its tensors; refuse what holds no plain products."""
    place = Path(place)
    if place.name in (WEIGHTS, PICKLE) and place.with_name(CONFIG).is_file():
        place = place.parent  # the scale is in the config
    single = place.is_file()
    weights = place if single else place / (WEIGHTS if (place / WEIGHTS).is_file() else PICKLE)
    if not (single or ((place / CONFIG).is_file() and weights.is_file())):
        named = ", ".join(sorted(config.parent.name for config in place.glob(f"*/{CONFIG}")))
        raise FileNotFoundError(
            f"{place} is no file, and no folder with {CONFIG} and {WEIGHTS} or {PICKLE}"
            + (f"; it has the adapters {named}: name the folder of one" if named else "")
        )
    with naming_pointers([weights, place / CONFIG]):
        try:
            shapes, metadata = _header(weights)
            text = metadata.get(HEADER, "{}") if single else (place / CONFIG).read_text(encoding="utf-8-sig")
            config = dict(json.loads(text, object_hook=_ordered))
        except Exception as error:
            raise ValueError(f"{place} cannot be read: {error}") from error
    keys, layers = sorted(shapes), dict[str, dict[str, str]]()
    for key in keys:
        if found := _FACTOR.fullmatch(key):
            layers.setdefault(found[1], {})["A" if found[2] in ("A", "down") else "B"] = key
    needed, configs = ["peft_type", "r", "lora_alpha"], [config]
    if single:
        for layer, of in layers.items():
            if f"{layer}.alpha" in keys:
                of["alpha"] = f"{layer}.alpha"
        models = sorted({layer.partition(".")[0] for layer in layers}) if HEADER in metadata else []
        needed, configs = needed[1:], [_of_model(config, model) for model in models]
    for options in configs:
        _check_options(place, options)
        if missing := [option for option in needed if option not in options]:
            where = f"the metadata {HEADER}" if single else CONFIG
            raise ValueError(f"{place}: {where} lacks {', '.join(missing)}, so the scale of the products is unknown")
    if not layers or any(len({"A", "B"} & of.keys()) < 2 for of in layers.values()):
        raise ValueError(f"{place} has no pairs of factors in the names of peft, diffusers or kohya's scripts")
    if empty := [key for key, shape in shapes.items() if 0 in shape]:
        raise ValueError(
            f"{place}: {empty[0]} is empty, as when DeepSpeed's ZeRO-3 or FSDP saves a weight that was not gathered; "
            "save the adapter again"
        )
    known = {key for of in layers.values() for key in of.values()}
    others = tuple(key for key in keys if key not in known)
    if single and others:
        what = _OTHERS.get(others[0].rpartition(".")[2])
        raise ValueError(f"{place} holds {others[0]}{f', {what},' if what else ','} which is no factor of LoRA")
    alphas = sum("alpha" in of for of in layers.values())
    if single and not configs and not alphas and any(layer.startswith("base_model.model.") for layer in layers):
        raise ValueError(f"{place} has the names of PEFT, whose scale is in {CONFIG}: name the folder that has both")
    if alphas and (configs or alphas < len(layers)):
        rest = f"the metadata {HEADER} say one, too" if configs else "others lack it"
        raise ValueError(f"{place} has an alpha for {alphas} of {len(layers)} layers, but {rest}: the scale is unclear")
    return Adapter(place, weights, config, layers, others, metadata)


def _check_options(place: Path, config: dict[str, Any]) -> None:
    """Raise if layers add something else than products to the weights of the model."""
    kind = next((name for name in _NO_PRODUCTS if config.get(name)), config.get("peft_type", "LORA"))
    if kind != "LORA":
        raise ValueError(f"{place} was made with {kind}, whose layers add something else than products B A")
    start = str(config.get("init_lora_weights")).lower()
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


def _header(weights: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes of the tensors of a file, by their keys, and its metadata."""
    if weights.suffix in _PICKLES:
        return {key: tuple(t.shape) for key, t in _pickled(weights).items()}, {}
    with safe_open(weights, framework="pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _pickled(weights: Path) -> dict[str, Tensor]:
    """Open a pickle of tensors, which stay on the disk until they are used; code in it is refused, not run."""
    with suppress(pickle.UnpicklingError):
        found = torch.load(weights, map_location="cpu", weights_only=True, mmap=True)
        if isinstance(found, dict) and all(isinstance(t, Tensor) for t in found.values()):
            return found
    raise ValueError(f"{weights.name} is a pickle of more than tensors, which may run code; save it as safetensors")


def _of_model(config: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the options of one model from the config that diffusers keeps, by their names in peft."""
    return {k.removeprefix(f"{model}."): v for k, v in config.items() if k.startswith(f"{model}.")}


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
    _check_free(out)
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
        _check_free(out)
        if out.is_dir():
            out.rmdir()
        folder.rename(out)


def _check_free(out: Path) -> None:
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


def write_tensors(
    path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: Callable[[], dict[str, str]] = dict
) -> None:
    """Write a safetensors file, of which no more than one tensor is in memory.

    The header stands first but is known last, so tensors go to a temporary file, and metadata are asked for after them.
    Tensors with the largest numbers come first, so that each is aligned.
    """
    parts, header = list[tuple[int, str, dict[str, Any], int]](), dict[str, Any]()
    with tempfile.TemporaryFile(dir=path.parent) as spool, path.open("wb") as file:
        for key, t in tensors:
            if not bool((t if t.element_size() > 1 else t.float()).isfinite().all()):  # which not every float8 has
                raise ValueError(f"{key} would have NaN or infinite entries in {t.dtype}")
            raw = memoryview(save({key: t.contiguous()}))
            start = 8 + int.from_bytes(raw[:8], "little")
            parts.append((-t.element_size(), key, json.loads(bytes(raw[8:start]))[key], spool.tell()))
            spool.write(raw[start:])
        end = 0
        for _, key, entry, _ in sorted(parts, key=lambda part: part[:2]):
            begin, end = end, end + entry["data_offsets"][1]
            header[key] = {**entry, "data_offsets": [begin, end]}
        text = json.dumps({"__metadata__": {"format": "pt", **metadata()}, **header}).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, entry, start in sorted(parts, key=lambda part: part[:2]):
            spool.seek(start)
            file.write(spool.read(entry["data_offsets"][1]))
