"""Adapters as files, read and written tensor by tensor, and in memory: of PEFT, of kohya's scripts and of diffusers."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import is_mendable
from ..files import naming_pointers
from ..hub import fetch_adapter, is_name
from ..linalg import in_double
from .configs import PATTERN, as_config, check_options, module_of, of_model, ordered, parameters, prefix_of
from .storage import PICKLES, header, read_tensor

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
#: Where diffusers keeps the config of each model, in the metadata of a file.
HEADER = "lora_adapter_metadata"
#: The parts of a layer by the ends of their keys: its factors A (r, in, …) and B (out, r, …), kohya's alpha, the
#: magnitude of DoRA, and a bias of B; with the adapter's name in a state that was saved as it is.
_PARTS = {
    "A": r"[._]lora[._](?:embedding_|linear_layer\.)?(?:A|down)(?:\.default)?(?:\.weight)?",
    "B": r"[._]lora[._](?:embedding_|linear_layer\.)?(?:B|up)(?:\.default)?(?:\.weight)?",
    "alpha": r"\.alpha",
    "magnitude": r"\.(?:lora_magnitude_vector(?:\.default)?(?:\.weight)?|dora_scale)",
    "bias": r"\.lora_B(?:\.default)?\.bias",
}
_KEY = re.compile(f"(.+)(?:{'|'.join(f'(?P<{part}>{end})' for part, end in _PARTS.items())})")
#: What single files hold besides factors, by the end of its key.
_OTHERS = {"diff": "the change of a whole weight", "diff_b": "the change of a bias"}
#: Options in which adapters that are merged have to agree.
_COMMON = ("target_parameters", "alora_invocation_tokens", "layer_replication")


@dataclass(frozen=True)
class Adapter:
    r"""An adapter in files, whose tensors are read when they are asked for, or in memory.

    Attributes
    ----------
    place, weights : Path
        Its folder, or its only file; and the file with the tensors. In memory they are what errors call it.
    config : dict
        What ``adapter_config.json`` says; for a single file what diffusers keeps in its metadata, or nothing.
    layers : dict of str to dict of str to str
        Keys of each layer's factors "A" and "B" and, if it has them, of its "alpha", "magnitude" and "bias" of B.
    others : tuple of str
        Keys of what is saved as a whole: modules, tokens, biases of the model.
    metadata : dict of str to str
        The metadata in the header of the file.
    state : mapping of str to Tensor
        The tensors of an adapter in memory.
    origin : str
        The name on the Hub, with the commit, of what was fetched from there.
    lost : mapping of str to float
        What a smaller rank has cut off, \|X - BA\| / \|X\| by layers, of an adapter that was just made.

    Examples
    --------
    Merge two adapters of a model, and give it a third one:

    >>> import peft, torch
    >>> from quotient_manifolds.adapters import Adapter, merge
    >>> config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    >>> model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), config, "one")
    >>> model.add_adapter("two", config)
    >>> both = merge([Adapter.from_model(model, name) for name in ("one", "two")], weights=[0.5, 0.5])
    >>> both.add_to(model, "both")
    >>> layer = model.base_model.model[0]
    >>> mean = (layer.get_delta_weight("one") + layer.get_delta_weight("two")) / 2
    >>> torch.allclose(layer.get_delta_weight("both"), mean, atol=1e-6)
    True
    """

    place: Path
    weights: Path
    config: dict[str, Any] = field(repr=False)
    layers: dict[str, dict[str, str]] = field(repr=False)
    others: tuple[str, ...] = field(repr=False)
    metadata: dict[str, str] = field(repr=False)
    state: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    origin: str = ""
    lost: Mapping[str, float] = field(default_factory=dict, repr=False)

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, *, name: str = "adapter"
    ) -> Adapter:
        """Describe an adapter in memory.

        Parameters
        ----------
        state : mapping of str to Tensor
            Its tensors, as ``peft.get_peft_model_state_dict`` returns them, or with kohya's or diffusers' names.
        config : mapping, optional
            What peft writes to ``adapter_config.json``; without it the scale is that of the keys ``alpha``, or 1.
        name : str
            What errors call it.

        Raises
        ------
        ValueError
            It is no LoRA of plain products, or says no scale.
        """
        pairs = [*state.items()] if isinstance(state, Mapping) else [(None, state)]
        if odd := [type(t).__name__ for key, t in pairs if not (isinstance(key, str) and isinstance(t, Tensor))]:
            raise TypeError(f"{name}: the state must be a mapping of names to tensors, and has a {odd[0]}")
        if not isinstance(config, Mapping | None):
            raise TypeError(f"{name}: the config must be a mapping of options, got a {type(config).__name__}")
        tensors = {key: t.detach() for key, t in state.items()}
        shapes, options = {key: tuple(t.shape) for key, t in tensors.items()}, ordered(dict(config or {}))
        weights = Path(name) / WEIGHTS if options else Path(name)
        return _described(Path(name), weights, shapes, {}, options, tensors)

    @classmethod
    def from_model(cls, model: nn.Module, name: str = "default") -> Adapter:
        """Describe an adapter of a peft model, whose tensors are those of the model, not copies.

        Raises
        ------
        ValueError
            The model has no such adapter, or it is no LoRA of plain products.
        """
        import peft

        known: dict[str, Any] = getattr(model, "peft_config", {})
        if name not in known:
            raise ValueError(f"{type(model).__name__} has no adapter {name!r}; it has {', '.join(known) or 'none'}")
        state = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        config = {"peft_version": peft.__version__, **known[name].to_dict()}
        return cls.from_state(state, config, name=name)

    def add_to(self, model: nn.Module, name: str) -> None:
        """Give a peft model this adapter under a new name; the active one stays.

        Raises
        ------
        ValueError
            The model has an adapter of that name, or other layers than this one, or this one has not the names of peft;
            the model does not get it.
        """
        import peft

        known: Any = model
        if not hasattr(model, "peft_config"):
            raise TypeError(f"{type(model).__name__} is no model of peft; make it one by get_peft_model")
        if not (isinstance(name, str) and name and "." not in name):
            raise ValueError(f"the name of an adapter must be text without a dot, got {name!r}")
        if name in getattr(model, "peft_config", {}):
            raise ValueError(f"{type(model).__name__} has an adapter {name!r} already; give another name")
        if self.single:
            raise ValueError(f"{self.place} has not the names of PEFT: convert it to peft first")
        keys = {*self.others, *(key for parts in self.layers.values() for key in parts.values())}
        known.add_adapter(name, peft.PeftConfig.from_peft_type(**self.config))
        state = {key: self.tensor(key) for key in keys}
        found = peft.set_peft_model_state_dict(model, state, adapter_name=name)
        weights = {key: id(p) for key, p in model.named_parameters(remove_duplicate=False)}
        loaded = {p for key, p in weights.items() if key not in found.missing_keys}  # tied weights by one name
        own = {key for key in found.missing_keys if f".{name}." in f"{key}." and weights.get(key) not in loaded}
        if lost := sorted({*found.unexpected_keys, *own}):
            known.delete_adapter(name)
            raise ValueError(f"the adapter does not fit {type(model).__name__}, which has not the same {lost[0]}")

    @property
    def single(self) -> bool:
        """Whether it is one file, which no config of PEFT describes."""
        return self.place == self.weights

    @property
    def saved_as(self) -> str:
        """The name of a file like this one; what was a pickle is one no more."""
        pickled = self.weights.suffix in PICKLES
        return f"{self.weights.stem}.safetensors" if pickled else self.weights.name

    @property
    def averaged(self) -> tuple[str, ...]:
        """Keys of what has a mean, but no sum with any weights: what is saved as a whole, and magnitudes."""
        return (*self.others, *(parts["magnitude"] for parts in self.layers.values() if "magnitude" in parts))

    @property
    def has_alphas(self) -> bool:
        """Whether the file has an alpha for each layer."""
        return any("alpha" in of for of in self.layers.values())

    @property
    def layout(self) -> int:
        """How PEFT took inputs and outputs of experts: before 0.19.0, in 0.19.0, and since 0.19.1."""
        version = tuple(map(int, re.findall(r"\d{1,9}", str(self.config.get("peft_version")))[:3]))
        return (version >= (0, 19, 0)) + (version >= (0, 19, 1))

    @property
    def common(self) -> dict[str, Any]:
        """What has to be the same in adapters that are merged: options, and how factors are called."""
        names = next(iter(self.layers.values()))["A"].rpartition("lora")[2] if self.single else CONFIG
        return {**{option: self.config.get(option) or None for option in _COMMON}, "the format of their names": names}

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """The config of each model, by what its layers begin with; a file without metadata has none."""
        if not self.single:
            return {"": self.config}
        prefixes = sorted({prefix_of(layer, self.config) for layer in self.layers}) if HEADER in self.metadata else []
        return {prefix: of_model(self.config, prefix) for prefix in prefixes}

    def options(self, layer: str) -> tuple[str, dict[str, Any]]:
        """Return the path of a layer in its model, and the config of that model, empty if none is known."""
        if not (self.single and self.config):
            return module_of(layer), self.config
        prefix = prefix_of(layer, self.config)
        return layer.removeprefix(prefix), of_model(self.config, prefix)

    def tensor(self, key: str) -> Tensor:
        """Read one tensor."""
        return self.state[key] if self.state else read_tensor(self.weights, key)

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
            return next((v for p, v in patterns if re.match(PATTERN.format(p), name)), config[option])

        names = parameters(layer, config) or [path]
        found = [(look_up(name, "rank", "r"), look_up(name, "alpha", "lora_alpha")) for name in names]
        r, alpha = found[0]
        numbers = isinstance(r, int) and r > 0 and isinstance(alpha, int | float) and abs(alpha) <= sys.float_info.max
        if not numbers or any(other != found[0] for other in found):
            raise ValueError(f"{self.place}: {layer} needs one rank above 0 and one finite alpha, got {found}")
        return r, alpha / (r**0.5 if config.get("use_rslora") else r)

    def bias(self, layer: str, outputs: int) -> Tensor:
        """Read the bias of B times the scale, by which peft multiplies it, too; 0 where there is none."""
        key = self.layers.get(layer, {}).get("bias")
        return self.rank_and_scale(layer)[1] * in_double(self.tensor(key)) if key else torch.zeros(outputs).double()

    def groups(self, layer: str) -> int:
        """Count the groups of a convolution, whose products have outputs and parts of the rank of their own."""
        rows, part = (self.tensor(self.layers[layer][f]) for f in "AB")
        return max(1, len(rows) // part.shape[1]) if rows.dim() > 2 and part.dim() > 2 else 1

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """Read s B and Aᵀ in float64, (experts, out, r) and (experts, in, r); most layers have one expert.

        Groups of a convolution are experts of an equal part of its rank and outputs.
        """
        A, B = (self.tensor(self.layers[layer][f]) for f in "AB")
        (r, scale), rows = self.rank_and_scale(layer), len(A)
        groups = self.groups(layer)
        part = r // groups
        fits = (rows == r and len(B) % groups == 0) or (rows % r == 0 and parameters(layer, self.config))
        if A.dim() < 2 or B.dim() < 2 or rows != groups * B[0].numel() or not fits:
            raise ValueError(f"{self.place}: {layer} has factors {[*A.shape]} and {[*B.shape]}, not of rank {r}")
        if not (A.is_floating_point() and B.is_floating_point()):
            raise ValueError(f"{self.place}: {layer} has factors of {A.dtype} and {B.dtype}, whose units are unknown")
        G, H = scale * in_double(B).reshape(len(B), part, -1), in_double(A).reshape(-1, part, A[0].numel())
        if not bool(G.isfinite().all() and H.isfinite().all()):
            raise ValueError(f"{self.place}: the factors of {layer} have NaN or infinite entries")
        return (G.reshape(groups, -1, part) if groups > 1 else G.permute(2, 0, 1)), H.mT

    def packed(self, layer: str, G: Tensor, H: Tensor, dtype: torch.dtype, alphas: bool) -> dict[str, Tensor]:
        """Return the tensors of a layer whose factors are B = G and A = Hᵀ, of scale 1, by their keys."""
        columns = G.shape[0] * G.shape[2]
        a, b = (self.tensor(self.layers[layer][f]).shape for f in "AB")
        B = G.flatten(0, 1) if self.groups(layer) > 1 else G.permute(1, 2, 0).flatten(1)
        A, B = H.mT.reshape(columns, *a[1:]), B.reshape(*B.shape, *b[2:])
        new = {self.layers[layer]["A"]: A.to(dtype), self.layers[layer]["B"]: B.to(dtype)}
        return new | ({f"{layer}.alpha": torch.tensor(float(columns))} if alphas else {})


def read_each(*adapters: str | os.PathLike[str] | Adapter) -> list[Adapter]:
    """Return adapters, of which folders and files are read; what is absent is named together."""
    found, absent = list[Adapter](), list[FileNotFoundError]()
    for adapter in adapters:
        try:
            found.append(adapter if isinstance(adapter, Adapter) else read(adapter))
        except FileNotFoundError as error:
            absent.append(error)
    if absent:
        raise FileNotFoundError("; ".join(dict.fromkeys(map(str, absent)))) from absent[0]
    return found


def read(place: str | os.PathLike[str]) -> Adapter:
    """Read the config of an adapter and the names of its tensors; refuse what holds no plain products."""
    place, origin = _located(os.fspath(place))
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
            shapes, metadata = header(weights)
            text = metadata.get(HEADER, "{}").encode() if single else (place / CONFIG).read_bytes()
            config = as_config(text, "the metadata " + HEADER if single else CONFIG)
        except Exception as error:
            if not is_mendable(error):
                raise
            raise ValueError(f"{place} cannot be read: {error}") from error
    return replace(_described(place, weights, shapes, metadata, config), origin=origin)


def _described(
    place: Path, weights: Path, shapes: Mapping[str, tuple[int, ...]], metadata: dict[str, str],
    config: dict[str, Any], state: Mapping[str, Tensor] | None = None,
) -> Adapter:  # fmt: skip
    """Sort the tensors of an adapter; refuse what holds no plain products."""
    layers, others = dict[str, dict[str, str]](), list[str]()
    for key in sorted(shapes):
        if not ((found := _KEY.fullmatch(key)) and found.lastgroup):
            others.append(key)
        elif (twin := layers.setdefault(found[1], {}).setdefault(found.lastgroup, key)) != key:
            raise ValueError(f"{place} holds {twin} and {key}, which are the same part of a layer: leave out one")
    for layer in [layer for layer, parts in layers.items() if not {"A", "B"} & parts.keys()]:
        others += layers.pop(layer).values()
    adapter = Adapter(place, weights, config, layers, tuple(sorted(others)), metadata, state or {})
    for options in adapter.configs.values():
        check_options(place, options)
    _check_parts(adapter, shapes)
    _check_scale(adapter)
    return adapter


def _check_parts(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if there are no products, or a tensor is empty or unknown."""
    place, layers = adapter.place, adapter.layers.values()
    if not layers or any(len({"A", "B"} & parts.keys()) < 2 for parts in layers):
        raise ValueError(f"{place} has no pairs of factors in the names of peft, diffusers or kohya's scripts")
    if empty := [key for key, shape in shapes.items() if 0 in shape]:
        raise ValueError(
            f"{place}: {empty[0]} is empty, as when DeepSpeed's ZeRO-3 or FSDP saves a weight that was not gathered; "
            "save the adapter again"
        )
    if flat := [key for parts in layers for key in (parts["A"], parts["B"]) if len(shapes[key]) < 2]:
        raise ValueError(f"{place}: {flat[0]} has the shape {shapes[flat[0]]}, which is none of a matrix")
    if adapter.config.get("bias") == "lora_only" and not any(key.endswith(".bias") for key in adapter.others):
        said = "has no biases, though bias='lora_only' trains those of its layers: PEFT before 0.21 did not save them"
        warnings.warn(f"{place} {said}", stacklevel=4)
    if adapter.single and adapter.others:
        odd = adapter.others[0]
        what = _OTHERS.get(odd.rpartition(".")[2])
        raise ValueError(f"{place} holds {odd}{f', {what},' if what else ','} which is no factor of LoRA")


def _check_scale(adapter: Adapter) -> None:
    """Raise unless the scale of every product is stated once."""
    place, layers, configs = adapter.place, adapter.layers, adapter.configs
    where = f"the metadata {HEADER}" if adapter.single else CONFIG
    for options in configs.values():
        needed = ("r", "lora_alpha") if adapter.single else ("peft_type", "r", "lora_alpha")
        if missing := [option for option in needed if options.get(option) is None]:
            raise ValueError(f"{place}: {where} lacks {', '.join(missing)}, so the scale of the products is unknown")
    alphas = sum("alpha" in parts for parts in layers.values())
    if not configs and not alphas and any(layer.startswith("base_model.model.") for layer in layers):
        raise ValueError(f"{place} has the names of PEFT, whose scale is in {CONFIG}: name the folder that has both")
    if alphas and (configs or alphas < len(layers)):
        rest = f"{where} has one, too" if configs else "others lack it"
        raise ValueError(f"{place} has an alpha for {alphas} of {len(layers)} layers, but {rest}: the scale is unclear")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write the config of an adapter."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_card(folder: Path, base: str, made: str) -> None:
    """Write what PEFT writes beside an adapter: of which model it is, and how it was made."""
    text = f"---\nbase_model: {json.dumps(base)}\nlibrary_name: peft\n---\n\n{made}"
    (folder / "README.md").write_bytes(text.encode("utf-8", "backslashreplace"))  # a path may be no text


def _located(name: str) -> tuple[Path, str]:
    """Return where an adapter lies, and its name on the Hub with the commit, empty if it is none of there."""
    if not is_name(name):
        return Path(name), ""
    fetched = fetch_adapter(name)
    return fetched.place, fetched.pinned
