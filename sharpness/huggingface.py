"""A model with what is known of its inputs, and models of transformers folders."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .errors import naming, require_extra

__all__ = ["INPUTS", "LoadedModel", "files_of", "from_folder", "image_transform", "quiet", "random_images"]

#: Files with a tokenizer's vocabulary; all files that say how texts and images become tensors.
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.spm")
INPUTS = (*_VOCABULARIES, "*processor_config.json", "tokenizer_config.json", "merges.txt", "*tokens*.json")
#: Nothing is downloaded, and no code of a folder is run.
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
#: Largest number of layers: building more takes minutes, whatever the weights are.
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class LoadedModel:
    """A model with what is known of its inputs.

    Attributes
    ----------
    model : nn.Module
        The model, on the CPU and in evaluation mode.
    example : dict or Tensor or None
        Random inputs for ``model(**example)`` or ``model(example)``; None for a function's model.
    transform : callable or None
        From an RGB image of Pillow to a float32 tensor (channels, height, width), as the model's library prepares
        images; for a function's model its attribute ``image_transform``.
    folder : Path or None
        Folder of a transformers model; its tokenizer is read on demand.
    labels : dict of str to int
        The model's own class names, if it has any.
    name : str
        What it was loaded by.

    Examples
    --------
    :func:`sharpness.models.load` gives one; a model of one's own can be put in one by hand, to read data for it:

    >>> from torch import nn
    >>> from torchvision.transforms.v2.functional import to_dtype, to_image
    >>> mine = LoadedModel(nn.Identity(), transform=lambda image: to_dtype(to_image(image), scale=True))
    >>> mine.tokenizer is None
    True
    """

    model: nn.Module
    example: Any = None
    transform: Callable[[Any], Tensor] | None = None
    folder: Path | None = None
    labels: Mapping[str, int] = field(default_factory=dict)
    name: str = ""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in a transformers folder; None if there is none, a ValueError if it cannot be read."""
        # Without files transformers makes up a tokenizer with an empty vocabulary.
        if self.folder is None or not files_of(self.folder, _VOCABULARIES):
            return None
        from transformers import AutoTokenizer

        config: Any = self.model.config
        with quiet(), naming(f"the tokenizer in {self.folder} cannot be read"):
            tokenizer = AutoTokenizer.from_pretrained(self.folder, **_LOCAL)
            longest = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
            tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
            padding = getattr(config, "pad_token_id", None)
            if tokenizer.pad_token is None:  # any token will do, for a mask hides it
                unset = tokenizer.eos_token_id or 0
                tokenizer.pad_token = tokenizer.convert_ids_to_tokens(unset if padding is None else padding)
            if padding is None:
                config.pad_token_id = tokenizer.pad_token_id  # by which classifiers find the last token of a text
        return tokenizer

    @property
    def predicts(self) -> str | None:
        """What a language model predicts: ``"next"`` or ``"masked"`` tokens, or a ``"text"``; None for others."""
        name = type(self.model).__name__
        if self.folder is None or name == "XLNetLMHeadModel":  # which does not predict the next token
            return None
        from transformers.models.auto import modeling_auto as auto

        kinds = {  # some stand in several lists
            "text": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            "next": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        }
        return next((kind for kind, names in kinds.items() if name in names.values()), None)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a report says of the model: that some of its weights are frozen, as it was loaded."""
        every, moved = (sum(p.numel() for p in self.model.parameters() if p.requires_grad >= least) for least in (0, 1))
        said = f"{moved:,} of {every:,} weights of the model are measured; the others are frozen"
        return () if moved == every else (said,)

    def input_key(self) -> str:
        """Hash everything that determines how texts and images become tensors: equal keys mean equal batches."""
        files = [] if self.folder is None else files_of(self.folder, INPUTS)
        config = getattr(self.model, "config", None)
        about = [getattr(config, name, None) for name in ("max_position_embeddings", "pad_token_id", "num_channels")]
        own = "" if self.folder else self.name or repr(self.transform)
        known = self.labels, self.predicts, about, own, [(p.name, p.read_bytes()) for p in files]
        return hashlib.sha256(repr(known).encode()).hexdigest()


def from_folder(folder: Path) -> LoadedModel:
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
    with quiet(), naming(f"{path} is not a configuration"):
        settings, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    for key, value in settings.items():
        if "layers" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise ValueError(f"{path} asks for {key} = {value}, which is too large to build")
    names = settings.get("architectures") or ["AutoModel"]
    cls: Any = getattr(transformers, str(names[0]), None)
    known = isinstance(cls, type) and issubclass(cls, (transformers.PreTrainedModel, transformers.AutoModel))
    if not known:
        raise ValueError(f"{path} names the architecture {names[0]!r}, which transformers does not have")
    with quiet(), naming(f"{folder} cannot be loaded as {cls.__name__}"):
        try:
            model, report = cls.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **_LOCAL
            )
        except pickle.UnpicklingError as error:
            raise ValueError(
                "it holds pickled objects other than tensors, and pickled code is never executed; save the model "
                "again with save_pretrained, which writes safetensors"
            ) from error
    _check_all_loaded(folder, report)
    with naming(f"{path} cannot be used"):
        labels = {str(k): int(v) for k, v in (getattr(model.config, "label2id", None) or {}).items()}
        example = _transformers_example(model.config)
    transform = image_transform(folder, model.config) if files_of(folder, ("*processor_config.json",)) else None
    return LoadedModel(model.eval(), example, transform, folder, labels, str(folder))


def _check_all_loaded(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse files without some of the model's weights, which would be random, or with weights that it does not use."""
    kinds = {"mismatched_keys": "have another shape of", "missing_keys": "lack", "unexpected_keys": "have besides"}
    for kind, words in kinds.items():
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in report.get(kind) or ())
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            raise ValueError(
                f"the weights in {folder} are not those of config.json: they {words} {', '.join(names[:2])}{more}; a "
                "model with random or missing weights would not be the one that was saved: use the configuration that "
                "they were saved with, or load and save the model again by from_pretrained and save_pretrained of the "
                "right class"
            )


def image_transform(folder: Path, config: Any) -> Callable[[Any], Tensor]:
    """Prepare images by the image processor in a folder, which is read with the first image."""
    mode = "L" if getattr(getattr(config, "vision_config", config), "num_channels", 3) == 1 else "RGB"

    @functools.cache
    def processor() -> Any:
        from transformers import AutoImageProcessor

        with quiet(), naming(f"the image processor in {folder} cannot be read"):
            return AutoImageProcessor.from_pretrained(folder, **_LOCAL)

    def transform(image: Any) -> Tensor:
        prepared = dict(processor()(image.convert(mode), return_tensors="pt"))
        pixels = prepared.pop("pixel_values", None)
        if prepared or not isinstance(pixels, Tensor) or pixels.dim() != 4 or len(pixels) != 1:
            raise ValueError(
                f"{type(processor()).__name__} makes of an image more than one tensor (channels, height, width); "
                "return batches from a function of yours (module:function)"
            )
        return pixels[0].float()

    return transform


def _transformers_example(config: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    example: dict[str, Tensor] = {}
    text, vision = (getattr(config, f"{kind}_config", config) for kind in ("text", "vision"))
    size = getattr(vision, "image_size", None)
    if size is not None:
        example["pixel_values"] = random_images(size, getattr(vision, "num_channels", 3), generator)
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


def random_images(size: Any, channels: int = 3, generator: torch.Generator | None = None) -> Tensor:
    """Draw two images of a size in any of the forms of configurations: a number, height and width, or a dict."""
    shape = np.broadcast_to(list(size.values()) if isinstance(size, dict) else size, 2)
    return torch.randn(2, channels, *shape.tolist(), device="cpu", generator=generator)


def files_of(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """List the files directly in a folder whose names match a pattern."""
    return sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file()})


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing bars and tables: errors are reported in one sentence."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
