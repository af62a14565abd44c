"""Checkpoints to modules: a transformers folder, an open_clip or a timm name. Nothing is downloaded or unpickled."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["LoadedModel", "load", "load_state_dict", "resolve"]


@dataclass(frozen=True)
class LoadedModel:
    """A module, and a random batch that fits its forward pass.

    Attributes
    ----------
    model : nn.Module
        In evaluation mode.
    source : str
        ``"transformers"``, ``"open_clip"``, ``"timm"`` or ``"function"``.
    example : dict, Tensor or None
        Random inputs: ``model(**example)`` or ``model(example)``; None for a function's model.
    """

    model: nn.Module
    source: str
    example: Any


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read weights from ``.safetensors``, or from torch's format without executing any code.

    Parameters
    ----------
    path
        File.

    Returns
    -------
    dict of str to Tensor
        On the CPU; a ``state_dict`` inside a checkpoint is taken out, and ``module.`` prefixes are stripped.

    Raises
    ------
    FileNotFoundError, ValueError
        No such file; not a state dict; a file that holds pickled objects other than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}")
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise ImportError("reading .safetensors needs the safetensors package: pip install safetensors") from error
        try:
            found: Any = load_file(path)
        except Exception as error:
            raise ValueError(f"{path} is not a readable safetensors file ({error})") from error
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path} is no plain state dict of tensors, and pickled code is never executed; save it again with "
                "torch.save(model.state_dict(), path) or as .safetensors"
            ) from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not found or not all(isinstance(v, torch.Tensor) for v in found.values()):
        raise ValueError(f"{path} holds no state dict (a mapping of names to tensors)")
    return {str(k).removeprefix("module."): v for k, v in found.items()}


def _fill(model: nn.Module, checkpoint: str | os.PathLike[str]) -> None:
    try:
        model.load_state_dict(load_state_dict(checkpoint))
    except RuntimeError as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(f"the weights in {checkpoint} are not those of {type(model).__name__}: {first}") from error


def _transformers(folder: Path) -> LoadedModel:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"reading {folder} needs transformers: pip install 'quotient-manifolds[transformers]'"
        ) from error
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not valid JSON ({error})") from error
    names = settings.get("architectures") or []
    cls = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if cls is None:
        raise ValueError(
            f"{folder / 'config.json'} names the architecture {names[0]}, which transformers does not have"
        )
    try:
        model = cls.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{folder} cannot be loaded as {cls.__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    return LoadedModel(model.eval(), "transformers", _transformers_example(model))


def _transformers_example(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    config = model.config
    example: dict[str, torch.Tensor] = {}
    text = getattr(config, "text_config", config)
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if size is not None:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        example["pixel_values"] = torch.randn(2, channels, height, width, generator=generator)
    if getattr(text, "vocab_size", None) and (size is None or vision is not config):
        length = min(16, getattr(text, "max_position_embeddings", 16) or 16)
        ids = torch.randint(3, max(4, text.vocab_size - 1), (2, length), generator=generator)
        if getattr(config, "is_encoder_decoder", False):
            example["decoder_input_ids"] = ids[:, : max(1, length // 2)]
        example["input_ids"] = ids
    if getattr(config, "num_mel_bins", None) and config.model_type == "whisper":
        example["input_features"] = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)
        example.pop("input_ids", None)
        example["decoder_input_ids"] = example["decoder_input_ids"][:1]
    return example


def _open_clip(name: str, checkpoint: str | None) -> LoadedModel:
    import open_clip

    model = open_clip.create_model(name, pretrained=None)
    if checkpoint is not None:
        _fill(model, checkpoint)
    size = model.visual.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    length, words = getattr(model, "context_length", 77), getattr(model, "vocab_size", 49408)
    example = {"image": torch.randn(2, 3, height, width), "text": torch.randint(1, words - 1, (2, length))}
    return LoadedModel(model.eval(), "open_clip", example)


def _timm(name: str, checkpoint: str | None) -> LoadedModel:
    import timm

    model = timm.create_model(name, pretrained=False)
    if checkpoint is not None:
        _fill(model, checkpoint)
    return LoadedModel(model.eval(), "timm", torch.randn(2, *model.default_cfg["input_size"]))


def resolve(name: str) -> Callable[..., Any]:
    """Import ``module:function``, from the current folder too.

    Raises
    ------
    ValueError
        No such module or function.
    """
    module, _, function = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} is not an importable module:function ({error})") from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function")
    result: Callable[..., Any] = found
    return result


def _from_function(name: str, checkpoint: str | None) -> LoadedModel:
    model = resolve(name)()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch module")
    if checkpoint is not None:
        _fill(model, checkpoint)
    return LoadedModel(model.eval(), "function", None)


def load(name: str, checkpoint: str | None = None) -> LoadedModel:
    """Build a model from a local folder or a library's name, with local weights.

    Parameters
    ----------
    name : str
        A folder with ``config.json`` (transformers; only local files are read), an open_clip model name such as
        ``"ViT-B-32"``, a timm model name such as ``"vit_tiny_patch16_224"``, or ``module:function`` for what a
        function without arguments returns.
    checkpoint : str, optional
        Local weights for a name; without them the weights are random.

    Returns
    -------
    LoadedModel

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        An unknown name, or weights that cannot be read or do not fit: one sentence.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"the folder {folder} has no config.json, so it is no transformers model")
        if checkpoint is not None:
            raise ValueError("a transformers folder holds its own weights; leave out the checkpoint")
        return _transformers(folder)
    if ":" in name:
        return _from_function(name, checkpoint)
    for library, build in (("open_clip", _open_clip), ("timm", _timm)):
        try:
            module = __import__(library)
        except ImportError:
            continue
        if name in module.list_models():
            return build(name, checkpoint)
    raise ValueError(
        f"{name!r} is neither a folder with a transformers model nor the name of an open_clip or timm model "
        "(is that library installed?), nor module:function"
    )
