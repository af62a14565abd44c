"""One adapter in the names of another tool: keys and scales change, products do not."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..linalg import in_double
from .checkpoints import read_checkpoint
from .configs import merged_config, module_of, parameters
from .folders import HEADER, WEIGHTS, Adapter, read, read_each, write_config
from .storage import TensorFile, new_folder

#: How the keys of a layer's parts end; where there is none the format has no name for it.
_DIFFUSERS_ENDS = {
    "A": "lora_A.weight",
    "B": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
    "bias": "lora_B.bias",
}
_ENDS = {
    "peft": _DIFFUSERS_ENDS,
    "diffusers": _DIFFUSERS_ENDS,
    "diffsynth": {"A": "lora_A.default.weight", "B": "lora_B.default.weight"},
    "kohya": {"A": "lora_down.weight", "B": "lora_up.weight", "magnitude": "dora_scale"},
}
#: The models of a pipeline as diffusers calls them, and as kohya's scripts do.
_MODELS = {"unet": "unet", "transformer": "unet", "text_encoder": "te1", "text_encoder_2": "te2"}
_DIFFUSERS = {"unet": "unet", "te": "text_encoder", "te1": "text_encoder", "te2": "text_encoder_2"}
_KOHYA = re.compile(r"lora_([a-z]+\d?)_(.+)")
#: The name of diffusers for a file of an adapter.
_SINGLE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class _Named:
    """A layer of an adapter: of which model of a pipeline, its path there, and where it is in the file."""

    model: str
    path: str
    key: str
    rank: int
    scale: float

    def __str__(self) -> str:
        return f"{self.model}.{self.path}" if self.model else self.path


def convert(
    adapter: str | os.PathLike[str] | Adapter,
    out: str | os.PathLike[str],
    *,
    to: str,
    base: str | os.PathLike[str] | None = None,
    model: str | None = None,
    one_rank: bool = False,
) -> Adapter:
    r"""Write an adapter in the names of another tool, with the same factors, :math:`s\,BA = s'B'A'` in every layer.

    Parameters
    ----------
    adapter, out : path or Adapter, path
        As for :func:`merge`. The result is a folder of PEFT, or a folder with one file.
    to : {"peft", "diffusers", "kohya", "diffsynth"}
        The names. The scale is stated in PEFT's config, in diffusers' metadata, or in kohya's keys ``alpha``; DiffSynth
        takes 1, so that B is multiplied by it.
    base : path, optional
        The model, as for :func:`extract`: its layers tell which underscores in the names of kohya stand for dots.
    model : str, optional
        The model of a pipeline as diffusers calls it, such as ``"transformer"``, where the file does not say it or
        another name is wanted. Files of kohya need one.
    one_rank : bool
        Give all layers the largest rank, for tools that read one only: the factors get rows and columns of zeros.

    Returns
    -------
    Adapter
        The new one.

    Raises
    ------
    ValueError, OSError
        The format has no name for a part, or no name follows; or as for :func:`merge`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import load_file
    >>> from quotient_manifolds.adapters import Adapter, convert
    >>> names = {"l.to_q.lora_A.weight": torch.ones(1, 3), "l.to_q.lora_B.weight": torch.ones(2, 1)}
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = convert(Adapter.from_state(names), f"{folder.name}/new", to="kohya", model="unet")
    >>> [*load_file(f"{folder.name}/new/pytorch_lora_weights.safetensors")]
    ['lora_unet_l_to_q.alpha', 'lora_unet_l_to_q.lora_down.weight', 'lora_unet_l_to_q.lora_up.weight']
    >>> folder.cleanup()
    """
    if to not in _ENDS:
        raise ValueError(f"to must be one of {', '.join(_ENDS)}, got {to!r}")
    if not isinstance(model, str | None):
        raise TypeError(f"model must be the name of a model of a pipeline, got a {type(model).__name__}")
    if not isinstance(one_rank, bool):
        raise ValueError(f"one_rank must be True or False, got {one_rank!r}")
    (source,) = read_each(adapter)
    layers = _layers(source, base, model)
    _check(source, layers, to)
    named = [_name(layer, layers, to) for layer in layers]
    if twice := [name for name, count in Counter(named).items() if count > 1]:
        raise ValueError(f"{source.place}: several layers would be called {twice[0]}")
    most = max(layer.rank for layer in layers) if one_rank else 0
    configs = {} if to in ("kohya", "diffsynth") else _configs(source, layers, most, os.fspath(base or ""))
    metadata = {k: v for k, v in source.metadata.items() if k not in (HEADER, "format")}
    if one_rank:  # as kohya's scripts say it
        alphas = {(1.0 if to == "diffsynth" else layer.scale) * most for layer in layers}
        new = {"ss_network_dim": f"{most}", "ss_network_alpha": f"{max(alphas):g}" if len(alphas) == 1 else "Dynamic"}
        metadata |= {k: v for k, v in new.items() if k in metadata}
    if to == "diffusers":
        said = {f"{m}.{k}" if m else k: v for m, config in configs.items() for k, v in config.items()}
        metadata[HEADER] = json.dumps(said, indent=2, sort_keys=True)
    file = WEIGHTS if to == "peft" else _SINGLE
    with new_folder(out) as folder, TensorFile(folder / file) as tensors:
        for layer, name in zip(layers, named, strict=True):
            tensors.update(_tensors(source, layer, name, to, most))
        tensors.finish(metadata)
        if to == "peft":
            write_config(folder, {**configs[layers[0].model], "peft_type": "LORA"})
    return read(os.path.join(out, "" if to == "peft" else file))


def _layers(source: Adapter, base: str | os.PathLike[str] | None, model: str | None) -> list[_Named]:
    """List the layers with the names that they have in their models."""
    dotted = dict[str, list[str]]()
    for path in {name.rpartition(".")[0] for name in (read_checkpoint(base).shapes if base else ())}:
        dotted.setdefault(path.replace(".", "_"), []).append(path)
    places = {key: _place(key, source, dotted, base) for key in source.layers}
    if model and len({of for of, _ in places.values()}) > 1:
        raise ValueError(f"{source.place} has layers of several models, which are not all called {model!r}")
    return [_Named(model or of, path, key, *source.rank_and_scale(key)) for key, (of, path) in places.items()]


def _place(key: str, source: Adapter, dotted: dict[str, list[str]], base: Any) -> tuple[str, str]:
    """Return the model of a pipeline, if the key says it, and the path of the layer in it."""
    if not (source.single and (found := _KOHYA.fullmatch(key)) and "." not in key):
        first, _, rest = module_of(key).partition(".")
        return (first, rest) if source.single and first in _MODELS else ("", module_of(key))
    paths = dotted.get(found[2], []) if base else [found[2]] * ("_" not in found[2])
    if len(paths) != 1:
        why = (
            f"{base} has {len(paths)} layers that may be called so"
            if base
            else "give the model, --base, whose names do"
        )
        raise ValueError(f"nothing tells which underscores of {key} stand for dots: {why}")
    return _DIFFUSERS.get(found[1], found[1]), paths[0]


def _name(layer: _Named, layers: list[_Named], to: str) -> str:
    if to == "peft":
        return f"base_model.model.{layer.path}"
    if to != "kohya":
        return str(layer)
    several = any(other.model == "text_encoder_2" for other in layers)
    model = _MODELS.get(layer.model, layer.model)
    return f"lora_{model if several or model != 'te1' else 'te'}_{layer.path}".replace(".", "_")


def _check(source: Adapter, layers: list[_Named], to: str) -> None:
    """Raise for what the format cannot express."""
    of = {layer.model for layer in layers}
    if to == "kohya" and "" in of:
        raise ValueError(
            f"{source.place} does not say of which model it is, as kohya's names do: give it, --model unet"
        )
    if len(of) > 1 and (to == "peft" or "" in of):
        raise ValueError(f"{source.place} has layers of {len(of)} models, {sorted(of)}, which {to} cannot tell")
    normed = [layer for layer, parts in source.layers.items() if "magnitude" in parts]
    if normed and len(normed) < len(layers) and to in ("peft", "diffusers"):
        raise ValueError(f"{source.place} has magnitudes of DoRA in some layers, where {to} has them in all or in none")
    odd = [*source.others]
    for layer in layers:
        source.factors(layer.key)  # or raise
        parts, config = source.layers[layer.key], source.options(layer.key)[1]
        odd += [key for part, key in parts.items() if part not in (*_ENDS[to], "alpha")]
        special = "embedding_A" in parts["A"] or parameters(layer.key, config) or ".processor." in layer.key
        # Other readers would add the product to the transposed weight.
        transposed = config.get("fan_in_fan_out") and to != "peft"
        convolution = "magnitude" in parts and source.tensor(parts["A"]).dim() > 2
        odd += [layer.key] * bool(special or transposed or convolution or source.groups(layer.key) > 1)
    if odd:
        raise ValueError(f"{source.place} holds {odd[0]}, which {to} has no name for")


def _configs(source: Adapter, layers: list[_Named], most: int, base: str) -> dict[str, dict[str, Any]]:
    """Return PEFT's config for each model: that of the source, or one that states its ranks and scales."""
    found = dict[str, dict[str, Any]]()
    for model in dict.fromkeys(layer.model for layer in layers):
        own = [layer for layer in layers if layer.model == model]
        config = source.options(own[0].key)[1]
        if not config or most:
            ranks = {layer.path: most or layer.rank for layer in own}
            alphas = {layer.path: _alpha(layer.scale, ranks[layer.path]) for layer in own}
            usual = Counter(alphas.values()).most_common(1)[0][0]
            pattern = {f"^{re.escape(path)}": a for path, a in alphas.items() if a != usual}
            new: dict[str, Any] = {"alpha_pattern": pattern}
            parts = {part for layer in own for part in source.layers[layer.key]}
            new |= {"use_dora": "magnitude" in parts, "lora_bias": "bias" in parts}
            config = {"base_model_name_or_path": base, **merged_config([config], ranks), "lora_alpha": usual, **new}
            config = {k: v for k, v in config.items() if v}
        found[model] = config
    return found


def _alpha(scale: float, rank: int) -> float:
    """Return α of a scale α / r, as a whole number if it is one."""
    alpha = round(scale * rank, 12)
    return int(alpha) if alpha.is_integer() else alpha


def _tensors(source: Adapter, layer: _Named, name: str, to: str, most: int) -> dict[str, Tensor]:
    """Return the tensors of a layer by their new keys."""
    parts = {part: source.tensor(key) for part, key in source.layers[layer.key].items() if part != "alpha"}
    rank = max(most, layer.rank)
    parts["A"] = pad(parts["A"], [0, 0] * (parts["A"].dim() - 1) + [0, rank - layer.rank])
    parts["B"] = B = pad(parts["B"], [0, 0] * (parts["B"].dim() - 2) + [0, rank - layer.rank])
    if to == "diffsynth" and layer.scale != 1:
        parts["B"] = (layer.scale * in_double(B)).to(torch.promote_types(B.dtype, torch.float32))
    if (m := parts.get("magnitude")) is not None:
        if m.shape[0] != len(B) or m.numel() != len(B):
            key = source.layers[layer.key]["magnitude"]
            raise ValueError(f"{key} has the shape {tuple(m.shape)}, not one norm for each of {len(B)} outputs")
        parts["magnitude"] = m.reshape(-1, 1) if to == "kohya" else m.flatten()
    new = {f"{name}.{_ENDS[to][part]}": t for part, t in parts.items()}
    return new | ({f"{name}.alpha": torch.tensor(float(layer.scale * rank))} if to == "kohya" else {})
