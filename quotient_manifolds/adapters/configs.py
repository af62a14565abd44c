"""What configs of adapters say: checked, read by layers, and written for a merged adapter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import NoneType
from typing import Any

#: How a pattern of layers matches a path.
PATTERN = r"(.*\.)?({})$"
#: Options under which a layer adds something else than the product s B A, or to other weights than those of the model.
_NO_PRODUCTS = ("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config")
#: Initialisations that replace the weights of the model, beginnings of their names.
_REPLACING = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: What options are that name layers or tokens, if they are given.
_KINDS = {"rank_pattern": dict, "alpha_pattern": dict, "target_modules": (list, tuple, str), "target_parameters": list,
          "modules_to_save": (list, tuple), "trainable_token_indices": (list, dict)}  # fmt: skip
#: Those of them that are names, of layers or parameters.
_NAMES = ("rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "modules_to_save")
#: Options that say which layers are adapted.
_SELECTION = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")


def check_options(place: Path, config: dict[str, Any]) -> None:
    """Raise if options are of another kind than peft's, or layers add something else than products."""
    if arrays := [option for option, given in config.items() if hasattr(given, "__array__")]:
        raise ValueError(f"{place}: {arrays[0]} is an array, which no config of peft holds")
    for option, kinds in _KINDS.items():
        if not isinstance(config.get(option), (*(kinds if isinstance(kinds, tuple) else [kinds]), NoneType)):
            raise ValueError(f"{place}: {option} is not what peft writes there: {config[option]!r}")
    for option in _NAMES:
        given = config.get(option)
        if not isinstance(given, str) and not all(isinstance(name, str) for name in given or ()):
            raise ValueError(f"{place}: {option} is not what peft writes there: {given!r}")
    kind = next((name for name in _NO_PRODUCTS if config.get(name)), config.get("peft_type") or "LORA")
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
        patterns = [given] if isinstance(given, str) else map(PATTERN.format, given if isinstance(given, dict) else ())
        try:
            list(map(re.compile, patterns))
        except re.error as error:
            raise ValueError(f"{place}: {option} is no regular expression: {error}") from error


def merged_config(configs: list[dict[str, Any]], ranks: dict[str, int]) -> dict[str, Any]:
    """Return the config of a merged adapter: that of the first, with what follows from all."""
    most = max(ranks.values())
    less = {layer: r for layer, r in ranks.items() if r < most}
    names = {name: r for at, r in less.items() for name in parameters(at, configs[0]) or [module_of(at)]}
    pattern = {f"^{re.escape(name)}": r for name, r in names.items()}
    new = {"r": most, "lora_alpha": most, "rank_pattern": pattern, "alpha_pattern": pattern, "use_rslora": False}
    new |= {"init_lora_weights": True, "eva_config": None, "lora_bias": any(c.get("lora_bias") for c in configs)}
    new |= next(({"bias": c["bias"]} for c in configs if c.get("bias", "none") != "none"), {})
    new |= {option: c[option] for c in configs for option in ("trainable_token_indices",) if c.get(option)}
    new["modules_to_save"] = sorted({name for c in configs for name in c.get("modules_to_save") or ()}) or None
    if any(c.get(name) != configs[0].get(name) for c in configs for name in _SELECTION) or not configs[0]:
        paths = sorted(module_of(layer) for layer in ranks if not parameters(layer, configs[0]))
        new |= {**dict.fromkeys(_SELECTION), "target_modules": paths}
    # Older versions of peft know fewer options.
    return configs[0] | {k: v for k, v in new.items() if v or k in configs[0]}


def prefix_of(layer: str, config: dict[str, Any]) -> str:
    """Return what the names of a model begin with in a file of diffusers: nothing in that of one model alone."""
    return "" if "r" in config else f"{layer.partition('.')[0]}."


def of_model(config: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the options of one model from the config that diffusers keeps, by their names in peft."""
    return {k.removeprefix(prefix): v for k, v in config.items() if k.startswith(prefix)}


def as_config(text: bytes, name: str) -> dict[str, Any]:
    """Read the JSON of a config; raise an error with its name if it is none."""
    try:
        config = json.loads(text.decode("utf-8-sig"), object_hook=ordered, parse_constant=_no_constant)
        if isinstance(config, dict):
            return config
        said = f"it is {text.decode()[:20]}"
    except (ValueError, RecursionError) as error:
        said = str(error)
    raise ValueError(f"{name} is no JSON object in UTF-8 ({said}): write or download it again")


def _no_constant(text: str) -> None:
    """Refuse NaN and infinities, which Python reads in JSON and writes again."""
    raise ValueError(f"{text} is no number of JSON")


def ordered(config: dict[str, Any]) -> dict[str, Any]:
    """Sort lists of names, which are sets that peft saves in any order."""
    several = {k: v for k, v in config.items() if isinstance(v, (list, set))}
    named = {k: v for k, v in several.items() if all(isinstance(name, str) for name in v)}
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
