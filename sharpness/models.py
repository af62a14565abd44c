"""Checkpoints to modules: a transformers folder, an open_clip or a timm name. Nothing is downloaded or unpickled."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import naming
from .extras import require_extra

__all__ = ["ClipClassifier", "ImageFormat", "LoadedModel", "call", "load", "load_state_dict", "resolve"]


@dataclass(frozen=True)
class ImageFormat:
    """What a model expects of images.

    Attributes
    ----------
    size : tuple of int
        Height and width.
    mean, std : tuple of float
        Of every channel, for pixels in [0, 1].
    channels : int
        3, or 1 for grey values.
    crop : bool
        Resize the shorter side to ``size`` and cut out the middle (what timm calls a crop_pct of 1); otherwise both
        sides are resized.
    resample : {"bicubic", "bilinear", "nearest", "lanczos"}
        How images are resized, as in Pillow.

    Raises
    ------
    ValueError
        Means and stds of another number than the channels, a size or std that is not positive, an unknown resampling.

    Examples
    --------
    Of MNIST's digits, for :func:`sharpness.data.load_batches`:

    >>> ImageFormat(size=(28, 28), mean=(0.1307,), std=(0.3081,), channels=1).resample
    'bicubic'
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int = 3
    crop: bool = False
    resample: str = "bicubic"

    def __post_init__(self) -> None:
        if len(self.mean) not in (1, self.channels) or len(self.std) not in (1, self.channels):
            raise ValueError(
                f"images of {self.channels} channels need as many means and stds, got {self.mean}, {self.std}"
            )
        numbers = (*self.mean, *self.std)
        if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in numbers) or min(self.std) <= 0:
            raise ValueError(f"means and stds of images are numbers, stds positive, got {self.mean}, {self.std}")
        if len(self.size) != 2 or not 1 <= min(self.size) <= max(self.size) <= 2**14 or self.channels not in (1, 3):
            raise ValueError(f"no such images: size {self.size}, {self.channels} channels")
        if self.resample not in ("bicubic", "bilinear", "nearest", "lanczos"):
            raise ValueError(f"no such resampling: {self.resample!r}")


@dataclass(frozen=True)
class LoadedModel:
    """A module, a random batch that fits its forward pass, and what it says of its inputs.

    Attributes
    ----------
    model : nn.Module
        In evaluation mode.
    source : str
        ``"transformers"``, ``"open_clip"``, ``"timm"`` or ``"function"``.
    example : dict, Tensor or None
        Random inputs: ``model(**example)`` or ``model(example)``; None for a function's model.
    images : ImageFormat or None
        Where the model comes with it.
    folder : Path or None
        Of a transformers model; its tokenizer is read when asked for.
    labels : dict of str to int
        The model's own names of its classes, if it has any.

    Examples
    --------
    :func:`load` gives one; a model of one's own can be put in one by hand, to read data for it:

    >>> from torch import nn
    >>> mine = LoadedModel(nn.Identity(), "function", None, ImageFormat((28, 28), (0.5,), (0.5,), channels=1))
    >>> mine.images.size, mine.tokenizer is None
    ((28, 28), True)
    """

    model: nn.Module
    source: str
    example: Any
    images: ImageFormat | None = None
    folder: Path | None = None
    labels: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in a transformers folder; None if there is none, a ValueError if it cannot be read."""
        # Without files transformers makes up a tokenizer with an empty vocabulary.
        files = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.spm")
        if self.folder is None or not any(any(self.folder.glob(name)) for name in files):
            return None
        from transformers import AutoTokenizer

        with _quiet(), naming(f"the tokenizer in {self.folder} cannot be read"):
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    def text_key(self) -> str:
        """Hash what decides how texts become tokens: equal keys, equal tokens."""
        names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt", "*.model", "*.spm")
        files = [] if self.folder is None else sorted(p for name in names for p in self.folder.glob(name))
        digest = hashlib.sha256(json.dumps([self.labels, [p.name for p in files]], sort_keys=True).encode())
        for p in files:
            digest.update(p.read_bytes())
        return digest.hexdigest()


class ClipClassifier(nn.Module):
    r"""CLIP's image tower with a linear head on the normalised features.

    .. math:: \text{logits} = W f / \|f\| + b

    Parameters
    ----------
    visual : nn.Module
        Image tower of open_clip, images (…, channels, height, width) → features f, (…, features).
    head : nn.Linear
        features → classes; for zero-shot classification its rows are the texts' features times the logit scale.

    Notes
    -----
    Radford et al. 2021; the state dicts are those of Wortsman et al. 2022 (model soups).

    Examples
    --------
    The size of the features does not matter:

    >>> import torch
    >>> from torch import nn
    >>> model = ClipClassifier(nn.Identity(), nn.Linear(4, 3))
    >>> features = torch.randn(2, 4)
    >>> torch.allclose(model(features), model(7 * features), atol=1e-6)
    True
    """

    def __init__(self, visual: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.visual, self.classification_head = visual, head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the logits, (examples, classes), of images, (examples, channels, height, width)."""
        features = self.visual(images)
        scores: torch.Tensor = self.classification_head(features / features.norm(dim=-1, keepdim=True))
        return scores


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read weights from ``.safetensors``, or from torch's format without executing any code.

    Parameters
    ----------
    path : str or path
        File.

    Returns
    -------
    dict of str to Tensor
        On the CPU; a ``state_dict`` inside a checkpoint is taken out, and ``module.`` prefixes are stripped.

    Raises
    ------
    FileNotFoundError, ValueError
        No such file; not a state dict; a file that holds pickled objects other than tensors.
    ImportError
        A ``.safetensors`` file without the package.

    Examples
    --------
    >>> from pathlib import Path
    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "checkpoint.pt"
    ...     torch.save({"epoch": 3, "state_dict": {"module.weight": torch.ones(1, 2)}}, path)
    ...     load_state_dict(path)
    {'weight': tensor([[1., 1.]])}
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}")
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise ImportError("reading .safetensors needs the safetensors package: pip install safetensors") from error
        with naming(f"{path} is not a readable safetensors file"):
            found: Any = load_file(path)
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


def _fill(
    model: nn.Module, checkpoint: str | os.PathLike[str], state: Mapping[str, torch.Tensor] | None = None
) -> None:
    given = load_state_dict(checkpoint) if state is None else state
    with naming(f"the weights in {checkpoint} are not those of {type(model).__name__}"):
        model.load_state_dict(given)


def _read_json(path: Path) -> dict[str, Any]:
    with naming(f"{path} is not valid JSON"):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing bars and tables: what is wrong is said in one sentence."""
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


def _transformers(folder: Path) -> LoadedModel:
    with require_extra(f"reading {folder} needs transformers", "transformers"):
        import transformers
    settings = _read_json(folder / "config.json")
    for key, value in settings.items():
        if "layers" in key and isinstance(value, int) and value > _MOST_LAYERS:
            raise ValueError(f"{folder / 'config.json'} asks for {key} = {value}, more than can be built")
    names = settings.get("architectures") or ["AutoModel"]
    name = names[0] if isinstance(names, list) else names
    cls = getattr(transformers, name, None) if isinstance(name, str) else None
    if cls is None or not hasattr(cls, "from_pretrained"):
        raise ValueError(f"{folder / 'config.json'} names the architecture {name!r}, which transformers does not have")
    try:
        with _quiet(), naming(f"{folder} cannot be loaded as {cls.__name__}"):
            model, found = cls.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
            if not isinstance(model, nn.Module):
                raise ValueError(f"it is no model but {type(model).__name__}")
    except ValueError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise ValueError(
                f"{folder} holds pickled objects other than tensors, and pickled code is never executed; save the "
                "model anew with save_pretrained, which writes safetensors"
            ) from error
        if "ignore_mismatched_sizes" in str(error):
            raise ValueError(f"the weights in {folder} have other shapes than config.json says; {_MATCH}") from error
        raise
    _check_all_loaded(folder, found)
    with naming(f"{folder / 'config.json'} cannot be used"):
        labels = {str(k): int(v) for k, v in (getattr(model.config, "label2id", None) or {}).items()}
        example = _transformers_example(model)
    images = _transformers_images(folder, model.config)
    return LoadedModel(model.eval(), "transformers", example, images, folder, labels)


#: Building so many takes minutes, whatever the weights say.
_MOST_LAYERS = 1000
#: Why weights that do not match are refused, and what to do.
_MATCH = (
    "a model with random weights, or without some of its own, would not be yours: use the configuration that they were "
    "saved with, or save the model anew by the from_pretrained and save_pretrained of the class that you mean"
)


def _check_all_loaded(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse files that lack weights of the model, which it would draw at random, or have some that it leaves out."""
    kinds = {"missing_keys": "lack", "mismatched_keys": "have another shape of", "unexpected_keys": "have besides"}
    wrong = []
    for kind, words in kinds.items():
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in found.get(kind) or ())
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            wrong.append(f"{words} {', '.join(names[:2])}{more}")
    if wrong:
        raise ValueError(
            f"the weights in {folder} are not those of config.json: they {'; they '.join(wrong)}; {_MATCH}"
        )


def _transformers_images(folder: Path, config: Any) -> ImageFormat | None:
    """Read ``preprocessor_config.json``; None where it says nothing of images."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    found = _read_json(path)
    if not {"size", "crop_size"} & set(found) or (found.get("do_normalize", True) and "image_mean" not in found):
        return None  # of sound, say
    with naming(f"{path} does not say how images are made ready"):
        return _image_format(found, config)


def _image_format(found: Mapping[str, Any], config: Any) -> ImageFormat:
    crop = bool(found.get("do_center_crop"))
    size = found.get("crop_size" if crop else "size", found.get("size"))
    if isinstance(size, dict):
        side = size.get("shortest_edge")
        size = (size.get("height", side), size.get("width", side))
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    resample = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}.get(found.get("resample", 2), "bilinear")
    channels = getattr(getattr(config, "vision_config", config), "num_channels", 3)
    mean, std = ((0.0,), (1.0,)) if not found.get("do_normalize", True) else (found["image_mean"], found["image_std"])
    return ImageFormat((int(height), int(width)), tuple(mean), tuple(std), channels, crop, resample)


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


def _open_clip(name: str, checkpoint: str | None, head: str | None) -> LoadedModel:
    import open_clip

    state = None if checkpoint is None else load_state_dict(checkpoint)
    model = open_clip.create_model(name, pretrained=None)
    visual = model.visual
    size = visual.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    images = ImageFormat((height, width), tuple(visual.image_mean), tuple(visual.image_std), crop=True)
    example: Any = {"image": torch.randn(2, 3, height, width)}
    if (state is None or "classification_head.weight" not in state) and head is None:
        if state is not None:
            _fill(model, str(checkpoint), state)
        length, words = getattr(model, "context_length", 77), getattr(model, "vocab_size", 49408)
        example["text"] = torch.randint(1, words - 1, (2, length))
        return LoadedModel(model.eval(), "open_clip", example, images)
    given = {} if state is None else {k: v.float() for k, v in state.items() if v.is_floating_point()}
    if "classification_head.weight" in given and f"{name}-quickgelu" in open_clip.list_models():
        raise ValueError(
            f"{checkpoint} is a fine-tuned CLIP of OpenAI's, which uses QuickGELU: name the model {name}-quickgelu "
            f"({name} would give other outputs)"
        )
    tower = {k.removeprefix("model."): v for k, v in given.items()}
    tower = {k.removeprefix("visual."): v for k, v in tower.items() if k.startswith("visual.")}
    if state is not None:
        _fill(visual, str(checkpoint), tower)
    prefix = "" if head is not None else "classification_head."
    linear = {k: v.float() for k, v in load_state_dict(head).items()} if head is not None else given
    weight, bias = linear.get(f"{prefix}weight"), linear.get(f"{prefix}bias")
    if weight is None or weight.dim() != 2:
        raise ValueError(f"{head or checkpoint} has no matrix {prefix}weight (classes × features) for the head")
    top = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    _fill(top, str(head or checkpoint), {"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return LoadedModel(ClipClassifier(visual, top).eval(), "open_clip", example["image"], images)


def _timm(name: str, checkpoint: str | None, head: str | None) -> LoadedModel:
    import timm

    if head is not None:
        raise ValueError("a head of its own is for open_clip's image towers; timm models bring theirs")
    state = None if checkpoint is None else load_state_dict(checkpoint)
    model = timm.create_model(name, pretrained=False)
    settings = model.default_cfg
    classifier = settings.get("classifier")
    if state is not None:
        own = state.get(f"{classifier}.weight")
        if own is not None and own.shape[0] != model.num_classes:
            model = timm.create_model(name, pretrained=False, num_classes=own.shape[0])
        _fill(model, str(checkpoint), state)
    channels, height, width = settings["input_size"]
    images = ImageFormat(
        (height, width), tuple(settings["mean"]), tuple(settings["std"]), channels, crop=True,
        resample=settings.get("interpolation", "bicubic"),
    )  # fmt: skip
    return LoadedModel(model.eval(), "timm", torch.randn(2, channels, height, width), images)


def resolve(name: str) -> Callable[..., Any]:
    """Import ``module:function``, from the current folder too.

    Parameters
    ----------
    name : str
        As ``"package.module:function"``.

    Returns
    -------
    callable

    Raises
    ------
    ValueError
        No such module or function.

    Examples
    --------
    >>> import torch
    >>> resolve("torch.nn.functional:relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    module, _, function = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    what = f"{name!r} is not an importable module:function"
    try:
        with naming(what):
            found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ValueError(f"{what}: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function")
    result: Callable[..., Any] = found
    return result


def call(name: str) -> Any:
    """Import ``module:function`` and call it.

    Parameters
    ----------
    name : str
        See :func:`resolve`.

    Returns
    -------
    object
        What the function returns.

    Raises
    ------
    ValueError
        No such function, or what it raised, in one sentence.

    Examples
    --------
    >>> call("torch.nn:PReLU")
    PReLU(num_parameters=1)
    """
    function = resolve(name)
    with naming(f"{name} failed"):
        return function()


def _from_function(name: str, checkpoint: str | None) -> LoadedModel:
    model = call(name)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch module")
    if checkpoint is not None:
        _fill(model, checkpoint)
    images = getattr(model, "image_format", None)
    return LoadedModel(model.eval(), "function", None, images if isinstance(images, ImageFormat) else None)


def load(name: str, checkpoint: str | None = None, *, head: str | None = None) -> LoadedModel:
    """Build a model from a local folder or a library's name, with local weights.

    Parameters
    ----------
    name : str
        A folder with ``config.json`` (transformers; only local files are read), an open_clip model name such as
        ``"ViT-B-32"``, a timm model name such as ``"vit_tiny_patch16_224"``, or ``module:function`` for what a
        function without arguments returns; if that has an ``image_format``, images are read so.
    checkpoint : str, optional
        Local weights for a name; without them the weights are random. Of an open_clip model either all of it, or, as in
        the public "model soups", ``model.visual.…`` with ``classification_head.weight`` and ``.bias``: then the model
        is a :class:`ClipClassifier`. Half-precision weights of these become float32.
    head : str, optional
        File with the ``weight`` (classes × features), and maybe ``bias``, of a head on open_clip's image tower.

    Returns
    -------
    LoadedModel
        On the CPU, in evaluation mode.

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        An unknown name, or weights that cannot be read or do not fit: one sentence.

    Examples
    --------
    Weights of one's own in a network that a function builds; ``torch.nn:PReLU`` stands for ``my_project:network``:

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"weight": torch.tensor([0.5])}, f"{folder}/checkpoint.pt")
    ...     loaded = load("torch.nn:PReLU", f"{folder}/checkpoint.pt")
    >>> loaded.source, loaded.model.weight.item()
    ('function', 0.5)
    """
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"{name!r} is a file; name the model that its weights belong to, and the file as checkpoint")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"the folder {folder} has no config.json, so it is no transformers model")
        if checkpoint is not None or head is not None:
            raise ValueError("a transformers folder holds its own weights; leave out the checkpoint")
        return _transformers(folder)
    if ":" in name:
        return _from_function(name, checkpoint)
    missing = []
    for library, extra, build in (("open_clip", "clip", _open_clip), ("timm", "timm", _timm)):
        try:
            module = __import__(library)
        except ImportError:
            missing.append(f"{library} is not installed: pip install 'quotient-manifolds[{extra}]'")
            continue
        if name in module.list_models():
            return build(name, checkpoint, head)
    if "/" in name or os.sep in name:
        raise FileNotFoundError(f"there is no folder {name!r}")
    raise ValueError(
        f"{name!r} is neither a folder (there is none of this name) with a transformers model nor the name of an "
        "open_clip or timm model, nor "
        "module:function" + "".join(f"; {one}" for one in missing)
    )
