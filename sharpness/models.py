"""Load models from a transformers folder, by open_clip and timm names, or from a function; nothing is unpickled."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.symmetries.modules import Shared, to_device

from .errors import called, how_to_install, naming, require_extra
from .losses import IGNORED

__all__ = ["LoadedModel", "load", "load_state_dict"]

#: Files with a tokenizer's vocabulary; all files that say how texts and images become tensors.
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.spm")
INPUTS = (*_VOCABULARIES, "*processor_config.json", "tokenizer_config.json", "merges.txt", "*tokens*.json")
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # no download, no code of a folder


@dataclass(frozen=True)
class LoadedModel:
    """A model with what is known of its inputs.

    Attributes
    ----------
    model : nn.Module
        The model, on the CPU and in evaluation mode.
    example : dict or Tensor or None
        Inputs for a trial, ``model(**example)`` or ``model(example)``, of models of transformers and timm.
    transform : callable or None
        From an RGB image of Pillow to a float32 tensor (channels, height, width), as the model's library prepares
        images; for a function's model its attribute ``image_transform``.
    folder : Path or None
        Folder of a transformers model; its tokenizer is read on demand.
    labels : dict of str to int
        The model's own class names, if it has any.
    num_classes : int or None
        Number of its classes, as far as its library, or its own attribute ``num_classes``, says so; 1 is a regression.

    Examples
    --------
    :func:`load` gives one; a model of one's own can be put in one by hand, to read data for it:

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
    num_classes: int | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in a transformers folder; None if there is none, a ValueError if it cannot be read.

        It pads by the token that the model takes for padding, and after the texts, where padding moves no position and
        nothing is predicted from it; before them only for a model that reads a text's class at its last position.
        """
        # Without files transformers makes up a tokenizer with an empty vocabulary.
        if self.folder is None or not files_of(self.folder, _VOCABULARIES):
            return None
        from transformers import AutoTokenizer

        config: Any = self.model.config
        with quiet(), naming(f"the tokenizer in {self.folder} cannot be read"):
            tokenizer = AutoTokenizer.from_pretrained(self.folder, **_LOCAL)
            if (longest := getattr(config, "max_position_embeddings", None) or -1) > 0:  # -1 stands for no limit
                tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
            known = (getattr(config, "pad_token_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
            # By the model's number classifiers find the last token of a text; any token pads, for a mask hides it.
            config.pad_token_id = next(n for n in known if n is not None and 0 <= n < len(tokenizer))
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
            tokenizer.padding_side = "left" if getattr(config, "summary_type", "") == "last" else "right"  # left: XLNet
        return tokenizer

    @property
    def predicts_tokens(self) -> bool:
        """Whether the labels of a text are its own tokens: a transformers model that predicts each from those before.

        Those that predict masked tokens, one text from another, or each token from itself raise a ValueError.
        """
        if self.folder is None:
            return False
        from transformers.models.auto import modeling_auto as auto

        name = type(self.model).__name__
        masked, texts = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        others, predicts = {*masked.values(), *texts.values()}, name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if name in others or (predicts and _predicts_first(self.model)):
            raise ValueError(
                f"{name} predicts other tokens of a text than the next ones, so a table does not say its labels; "
                "return batches with labels from a function of yours (module:function)"
            )
        return predicts

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a report says of the model: that some of its weights are frozen, as it was loaded."""
        every, moved = (sum(p.numel() for p in self.model.parameters() if p.requires_grad >= least) for least in (0, 1))
        said = f"{moved:,} of {every:,} weights of the model are measured; the others are frozen"
        return () if moved == every else (said,)


def load(name: str, checkpoint: str | None = None) -> LoadedModel:
    """Build a model from a local folder or a library's name, with local weights.

    Parameters
    ----------
    name : str
        A folder with ``config.json`` (transformers; only local files are read), an open_clip model name such as
        ``"ViT-B-32"``, a timm model name such as ``"vit_tiny_patch16_224"``, or ``module:function``, a function without
        arguments that returns a model; if the model has an ``image_transform``, images are read by it.
    checkpoint : str, optional
        Local weights for a named model; without them the weights are random.

    Returns
    -------
    LoadedModel
        On the CPU, in evaluation mode.

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        The name is unknown, or the weights cannot be read or do not fit.

    Examples
    --------
    Weights of one's own in a network that a function builds; ``torch.nn:PReLU`` stands for ``my_project:network``:

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"weight": torch.tensor([0.5])}, f"{folder}/checkpoint.pt")
    ...     loaded = load("torch.nn:PReLU", f"{folder}/checkpoint.pt")
    >>> loaded.model.weight.item()
    0.5
    """
    folder = Path(name)
    if folder.is_file():
        raise ValueError(
            f"{name!r} is a file; pass the name of the model that its weights belong to, and the file as checkpoint"
        )
    if folder.is_dir():
        if checkpoint is not None:
            raise ValueError("a transformers folder contains its own weights; leave out the checkpoint")
        return _from_folder(folder)
    state = {} if checkpoint is None else load_state_dict(checkpoint)
    if ":" in name:
        model = called(name)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch module")
        count = getattr(model, "num_classes", None)
        count = count if isinstance(count, int) else None
        loaded = LoadedModel(model, transform=getattr(model, "image_transform", None), num_classes=count)
    elif importlib.util.find_spec("open_clip") and name in importlib.import_module("open_clip").list_models():
        model, _, transform = importlib.import_module("open_clip").create_model_and_transforms(name, pretrained=None)
        loaded = LoadedModel(model, transform=transform)
    elif importlib.util.find_spec("timm") and importlib.import_module("timm").is_model(name):
        loaded = _from_timm(name, state)
    else:
        raise ValueError(
            f"there is no folder {name!r}. If that is a name on the Hugging Face Hub: nothing is downloaded; save the "
            f"model and its tokenizer first, by from_pretrained({name!r}) and save_pretrained(folder), and pass the "
            f"folder. It is not the name of an open_clip or timm model either ({how_to_install('clip,timm')}), nor "
            "module:function"
        )
    if checkpoint is not None:
        with naming(f"the weights in {checkpoint} are not those of {type(loaded.model).__name__}"):
            loaded.model.load_state_dict(state)
    loaded.model.eval()
    return loaded


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
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
    FileNotFoundError, ValueError, ImportError
        The file does not exist, is not a state dict, or holds pickled objects other than tensors; or safetensors is
        missing.

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
        with require_extra("reading .safetensors needs safetensors", "transformers"):
            from safetensors.torch import load_file
        with naming(f"{path} is not a readable safetensors file"):
            state: Any = load_file(path)
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path} is not a plain state dict of tensors, and pickled code is never executed; save it again with "
                "torch.save(model.state_dict(), path) or as .safetensors"
            ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} holds no state dict (a mapping of names to tensors)")
    prefix = "module." if all(str(k).startswith("module.") for k in state) else ""  # of a wrapper such as DDP
    return {str(k).removeprefix(prefix): v for k, v in state.items()}


def _from_timm(name: str, state: Mapping[str, Tensor]) -> LoadedModel:
    import timm

    model = timm.create_model(name, pretrained=False)
    top = model.default_cfg.get("classifier")
    head = state.get(f"{top[0] if isinstance(top, (list, tuple)) else top}.weight")
    if head is not None and head.dim() and head.shape[0] != model.num_classes:
        model = timm.create_model(name, pretrained=False, num_classes=head.shape[0])
    settings = timm.data.resolve_model_data_config(model)
    example, transform = _images(*settings["input_size"]), timm.data.create_transform(**settings)
    return LoadedModel(model, example, transform, num_classes=model.num_classes or None)


def _from_folder(folder: Path) -> LoadedModel:
    """Load a transformers folder, whose weights must all be there and all be used."""
    with require_extra(f"reading {folder} needs transformers", "transformers"):
        import transformers
    if (folder / "adapter_config.json").is_file():  # transformers would attach it, and freeze everything else
        raise ValueError(
            f"{folder} holds a PEFT adapter; save the whole model after merge_and_unload(), move adapter_config.json "
            "away, or return what is to be measured from a function of yours (module:function)"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"the folder {folder} has no config.json, so it is not a transformers model")
    with quiet(), naming(f"{folder} cannot be loaded"):
        settings, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        kind: Any = getattr(transformers, (settings.get("architectures") or ["AutoModel"])[0])
        model, report = kind.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **_LOCAL)
        labels = {str(k): int(v) for k, v in (getattr(model.config, "label2id", None) or {}).items()}
        example = _example(model)
    # Without some of the weights the model would be random, and with others it would be another one.
    for wrong in ("mismatched", "missing", "unexpected"):
        names = sorted(str(n[0] if isinstance(n, tuple) else n) for n in report.get(f"{wrong}_keys") or ())
        if names:
            raise ValueError(
                f"the weights in {folder} are not those of config.json: {wrong} are {len(names)}, such as {names[0]}; "
                "use the configuration that they were saved with, or load and save the model again by from_pretrained "
                "and save_pretrained of the right class"
            )
    transform = image_transform(folder, model.config) if files_of(folder, ("*processor_config.json",)) else None
    return LoadedModel(model.eval(), example, transform, folder, labels, getattr(model.config, "num_labels", None))


def _predicts_first(model: Any) -> bool:
    """Return whether the first label of a text has a weight in the loss, as where each token is to predict itself."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    labels = torch.tensor([[0, IGNORED]], device=ids.device)
    with torch.no_grad(), naming(f"{type(model).__name__} does not run on two tokens"):
        return not model(input_ids=ids, labels=labels).loss.isnan()  # a mean over no labels at all is NaN


def _example(model: Any) -> dict[str, Tensor] | None:
    """Return inputs for a trial: random images, transformers' own tokens, or both; None for other kinds of models."""
    vision = getattr(model.config, "vision_config", model.config)
    size = getattr(vision, "image_size", None)
    images = {} if size is None else {"pixel_values": _images(vision.num_channels, *np.broadcast_to(size, 2).tolist())}
    by_kind = {"pixel_values": images, "input_ids": {**model.dummy_inputs, **images}}
    return by_kind.get(model.main_input_name)


def _images(*shape: int) -> Tensor:
    """Draw two random images."""
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


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


def files_of(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """List the files directly in a folder whose names match a pattern."""
    return sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file()})


def _silence(undo: list[Callable[[], object]]) -> None:
    from transformers.utils import logging

    if logging.is_progress_bar_enabled():
        undo.append(logging.enable_progress_bar)
    undo.append(functools.partial(logging.set_verbosity, logging.get_verbosity()))
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)


#: Keep transformers from printing bars and tables: errors are reported in one sentence.
quiet = Shared(_silence)


def move(what: Any, device: torch.device | str) -> Any:
    """Move a model or a batch to a device; say in a sentence what that cannot hold, such as Apple's float64."""
    with naming(f"not everything can be moved to {device}"):
        return what.to(device) if isinstance(what, nn.Module) else to_device(what, torch.device(device))


def checked_device(name: torch.device | str) -> torch.device:
    """Return a device of torch, after checking that it exists; under torchrun every process has a GPU of its own."""
    with naming(f"the device {str(name)!r} cannot be used"):
        device = torch.device(name)
        if device.type == "cuda" and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.zeros((), device=device).item()
    return device
