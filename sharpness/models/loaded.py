"""A model with a description of its inputs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import naming

__all__ = ["TOKENIZER", "ImageFormat", "LoadedModel", "files_of", "quiet", "sides"]

#: Files with a tokenizer's vocabulary, and all files of a tokenizer.
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.spm")
TOKENIZER = (*_VOCABULARIES, "tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True)
class ImageFormat:
    """The image format that a model expects.

    Attributes
    ----------
    size : tuple of int
        Height and width.
    mean, std : tuple of float
        One value per channel, for pixels in [0, 1].
    channels : int
        3, or 1 for grey values.
    crop : bool
        Crop the centre to ``size`` after resizing; or else resize both sides to ``size``.
    resize : int, (int, int) or None
        What the shorter side, or height and width, are resized to before the crop; by default as little as covers
        ``size``.
    resample : {"bicubic", "bilinear", "nearest", "lanczos"}
        Interpolation for resizing, as in Pillow.

    Examples
    --------
    Of MNIST's digits:

    >>> ImageFormat(size=(28, 28), mean=(0.1307,), std=(0.3081,), channels=1).resample
    'bicubic'
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int = 3
    crop: bool = False
    resample: str = "bicubic"
    resize: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if len(self.mean) not in (1, self.channels) or len(self.std) not in (1, self.channels):
            raise ValueError(
                f"images of {self.channels} channels need as many means and stds, got {self.mean}, {self.std}"
            )
        numbers = (*self.mean, *self.std)
        if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in numbers) or min(self.std) <= 0:
            raise ValueError(f"means and stds of images are numbers, stds positive, got {self.mean}, {self.std}")
        if len(self.size) != 2 or not 1 <= min(self.size) <= max(self.size) <= 2**14 or self.channels not in (1, 3):
            raise ValueError(f"there are no images of size {self.size} with {self.channels} channels")
        if self.resample not in ("bicubic", "bilinear", "nearest", "lanczos"):
            raise ValueError(f"no such resampling: {self.resample!r}")


@dataclass(frozen=True)
class LoadedModel:
    """A module, a random batch that fits its forward pass, and a description of its inputs.

    Attributes
    ----------
    model : nn.Module
        In evaluation mode.
    example : dict, Tensor or None
        Random inputs: ``model(**example)`` or ``model(example)``; None for a function's model.
    images : ImageFormat or None
        The image format, if the model comes with one.
    folder : Path or None
        Folder of a transformers model; its tokenizer is read on demand.
    labels : dict of str to int
        The model's own class names, if it has any.

    Examples
    --------
    :func:`load` gives one; a model of one's own can be put in one by hand, to read data for it:

    >>> from torch import nn
    >>> mine = LoadedModel(nn.Identity(), images=ImageFormat((28, 28), (0.5,), (0.5,), channels=1))
    >>> mine.images.size, mine.tokenizer is None
    ((28, 28), True)
    """

    model: nn.Module
    example: Any = None
    images: ImageFormat | None = None
    folder: Path | None = None
    labels: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in a transformers folder; None if there is none, a ValueError if it cannot be read."""
        # Without files transformers makes up a tokenizer with an empty vocabulary.
        if self.folder is None or not files_of(self.folder, _VOCABULARIES):
            return None
        from transformers import AutoTokenizer

        config: Any = getattr(self.model, "config", None)
        with quiet(), naming(f"the tokenizer in {self.folder} cannot be read"):
            found = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
            longest = getattr(config, "max_position_embeddings", None) or found.model_max_length
            found.model_max_length = min(found.model_max_length, longest)
            if found.pad_token is None:  # any token will do, for a mask hides it
                padding = getattr(config, "pad_token_id", None)
                padding = padding if padding is not None else found.eos_token_id or 0
                found.pad_token = found.convert_ids_to_tokens(padding)
            if config is not None and getattr(config, "pad_token_id", None) is None:
                config.pad_token_id = found.pad_token_id  # by which classifiers find the last token of a text
        return found

    @property
    def predicts(self) -> str | None:
        """What a language model predicts: ``"next"`` or ``"masked"`` tokens, or a ``"text"``; None for others."""
        if self.folder is None:
            return None
        from transformers.models.auto import modeling_auto as auto

        kinds = {  # some stand in several lists; XLNet does not predict the next token
            "text": set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()),
            "masked": set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()),
            "next": set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - {"XLNetLMHeadModel"},
        }
        return next((kind for kind, names in kinds.items() if type(self.model).__name__ in names), None)

    @property
    def weights(self) -> str:
        """How many weights are measured, of how many: those that are not frozen."""
        every, moved = (sum(p.numel() for p in self.model.parameters() if p.requires_grad >= least) for least in (0, 1))
        return f"{moved:,} of {every:,} weights"

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a report says of the model: that some of its weights are frozen, as it was loaded."""
        frozen = not all(p.requires_grad for p in self.model.parameters())
        return (f"{self.weights} of the model are measured; the others are frozen",) if frozen else ()

    def text_key(self) -> str:
        """Hash everything that determines how texts are tokenised: equal keys mean equal tokens."""
        files = [] if self.folder is None else files_of(self.folder, TOKENIZER)
        config = getattr(self.model, "config", None)
        about = [getattr(config, name, None) for name in ("max_position_embeddings", "pad_token_id")]
        known = [self.labels, self.predicts, about, [p.name for p in files]]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
        for p in files:
            digest.update(p.read_bytes())
        return digest.hexdigest()


def files_of(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """List the files directly in a folder whose names match a pattern."""
    return sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file()})


def sides(size: Any) -> tuple[int, int]:
    """Return height and width from any of the forms in configurations."""
    if isinstance(size, dict):
        side = size.get("shortest_edge")
        size = (size.get("height", side), size.get("width", side))
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing bars and tables: errors are reported in one sentence."""
    import transformers

    said = transformers.utils.logging
    bars, level = said.is_progress_bar_enabled(), said.get_verbosity()
    said.disable_progress_bar()
    said.set_verbosity(said.CRITICAL)
    try:
        yield
    finally:
        said.set_verbosity(level)
        if bars:
            said.enable_progress_bar()
