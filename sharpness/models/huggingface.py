"""Models from transformers folders."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import naming
from ..extras import require_extra
from .loaded import ImageFormat, LoadedModel, quiet, sides

__all__ = ["load_folder"]

#: Largest number of layers: building more takes minutes, whatever the weights are.
_MOST_LAYERS = 1000
#: Image processors whose steps are followed, and the settings that say them; any other step is refused.
_PROCESSORS = {"Beit", "Bit", "Blip", "CLIP", "ChineseCLIP", "ConvNext", "DINOv3ViT", "DeiT", "Gemma3", "Llava",
               "MobileNetV1", "MobileNetV2", "OwlViT", "Pvt", "Segformer", "Siglip", "ViT"}  # fmt: skip
_FOLLOWED = {"crop_size", "do_center_crop", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std",
             "resample", "rescale_factor", "size", "image_processor_type", "feature_extractor_type"}  # fmt: skip
_FOLLOWED |= {"do_convert_rgb", "do_reduce_labels", "processor_class", "data_format", "device", "return_tensors",
              "default_to_square", "_valid_processor_keys"}  # of no effect on an image and its class  # fmt: skip
#: Pillow's numbers.
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
#: Why weights that do not match are refused, and how to fix it.
_MATCH = (
    "a model with random or missing weights would not be the one that was saved: use the configuration that they were "
    "saved with, or load and save the model again by from_pretrained and save_pretrained of the right class"
)


def load_folder(folder: Path) -> LoadedModel:
    """Load a transformers folder, whose weights must all be there and all be used."""
    with require_extra(f"reading {folder} needs transformers", "transformers"):
        import transformers
    path = folder / "config.json"
    if (folder / "adapter_config.json").is_file():  # transformers would attach it, and freeze everything else
        how = "beside the weights of a model" if path.is_file() else "without the model that it adapts"
        raise ValueError(
            f"{folder} holds a PEFT adapter {how}; save the whole model after merge_and_unload(), move "
            "adapter_config.json away, or return what is to be measured from a function of yours (module:function)"
        )
    if not path.is_file():
        raise ValueError(f"the folder {folder} has no config.json, so it is not a transformers model")
    settings = _read_json(path)
    for key, value in settings.items():
        if "layers" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise ValueError(f"{path} asks for {key} = {value}, which is too large to build")
    names = settings.get("architectures") or ["AutoModel"]
    name = names[0] if isinstance(names, list) else names
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None or not hasattr(cls, "from_pretrained"):
        raise ValueError(f"{path} names the architecture {name!r}, which transformers does not have")
    try:
        with quiet(), naming(f"{folder} cannot be loaded as {cls.__name__}"):
            model, report = cls.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
            if not isinstance(model, nn.Module):
                raise ValueError(f"it is not a model but {type(model).__name__}")
    except ValueError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise ValueError(
                f"{folder} holds pickled objects other than tensors, and pickled code is never executed; save the "
                "model again with save_pretrained, which writes safetensors"
            ) from error
        if "ignore_mismatched_sizes" in str(error):
            raise ValueError(f"the weights in {folder} do not have the shapes of config.json; {_MATCH}") from error
        raise
    _check_all_loaded(folder, report)
    with naming(f"{path} cannot be used"):
        labels = {str(k): int(v) for k, v in (getattr(model.config, "label2id", None) or {}).items()}
        example = _transformers_example(model.config)
    return LoadedModel(model.eval(), example, _preprocessor(folder, model.config), folder, labels)


def _read_json(path: Path) -> dict[str, Any]:
    with naming(f"{path} is not valid JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not contain a JSON object")
    return found


def _check_all_loaded(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse files without some of the model's weights, which would be random, or with weights that it does not use."""
    kinds = {"missing_keys": "lack", "mismatched_keys": "have another shape of", "unexpected_keys": "have besides"}
    wrong = []
    for kind, words in kinds.items():
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in report.get(kind) or ())
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            wrong.append(f"{words} {', '.join(names[:2])}{more}")
    if wrong:
        raise ValueError(
            f"the weights in {folder} are not those of config.json: they {'; they '.join(wrong)}; {_MATCH}"
        )


def _preprocessor(folder: Path, config: Any) -> ImageFormat | None:
    """Read ``preprocessor_config.json``; None if it says nothing about images."""
    path = folder / "preprocessor_config.json"
    found = _read_json(path) if path.is_file() else {}
    normalized = found.get("do_normalize", True)
    if not {"size", "crop_size"} & set(found) or (normalized and "image_mean" not in found):
        return None  # for sound, for example
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as BY_MODEL

    kind = found.get("image_processor_type", found.get("feature_extractor_type", ""))
    named = re.search(r"(\w+?)(ImageProcessor|FeatureExtractor)", str(kind or BY_MODEL.get(config.model_type)))
    kind = named[1] if named else "no image_processor_type"
    crop, given, convnext = bool(found.get("do_center_crop")), found.get("size"), kind == "ConvNext"
    other = [k for k, v in found.items() if v and k not in _FOLLOWED and not (convnext and k == "crop_pct")]
    other += [k for k in ("do_rescale", "do_resize") if found.get(k) is False]
    if abs(255 * found.get("rescale_factor", 1 / 255) - 1) > 1e-6:
        other.append("rescale_factor")
    resample: Any = found.get("resample", 2 if kind == "ViT" else None)
    if resample not in _RESAMPLE:
        other.append("resample")
    if "crop_size" in found and "do_center_crop" not in found:  # classes differ in what that means
        other.append("crop_size")
    if isinstance(given, dict) and ("longest_edge" in given or not ("height" in given or crop or convnext)):
        other.append("size")
    if other or kind not in _PROCESSORS:
        raise ValueError(
            f"{path} prepares images in a way that is not known here ({', '.join(other) or kind}); prepare them "
            "yourself, and pass a file of tensors"
        )
    with naming(f"{path} does not say how images are preprocessed"):
        size = sides(found.get("crop_size" if crop else "size", found.get("size")))
        channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
        mean, std = (found["image_mean"], found["image_std"]) if normalized else ((0.0,), (1.0,))
        resize: int | tuple[int, int] | None = None
        if crop and given is not None:
            both = "height" in given if isinstance(given, dict) else kind == "DeiT"
            resize = sides(given) if both else min(sides(given))
        elif convnext and min(size) < 384:  # its own rule
            crop, resize = True, int(min(size) / found.get("crop_pct", 224 / 256))
        return ImageFormat(size, tuple(mean), tuple(std), channels, crop, _RESAMPLE[resample], resize)


def _transformers_example(config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    example: dict[str, torch.Tensor] = {}
    text, vision = (getattr(config, f"{kind}_config", config) for kind in ("text", "vision"))
    size = getattr(vision, "image_size", None)
    if size is not None:
        shape = (2, getattr(vision, "num_channels", 3), *sides(size))
        example["pixel_values"] = torch.randn(*shape, device="cpu", generator=generator)
    if getattr(text, "vocab_size", None) and (size is None or vision is not config):
        length = min(16, getattr(text, "max_position_embeddings", 16) or 16)
        ids = torch.randint(3, max(4, text.vocab_size - 1), (2, length), device="cpu", generator=generator)
        if getattr(config, "is_encoder_decoder", False):
            example["decoder_input_ids"] = ids[:, : max(1, length // 2)]
        example["input_ids"] = ids
    if getattr(config, "num_mel_bins", None) and config.model_type == "whisper":
        example["input_features"] = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
        del example["input_ids"]
    return example
