"""Load models from folders, by names of the Hub, open_clip and timm, or from a function; nothing is unpickled."""

from __future__ import annotations

import functools
import glob
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quotient_manifolds.files import naming_pointers
from quotient_manifolds.hub import CLIP, PREFIXES, fetch_model, is_name
from quotient_manifolds.networks import quiet
from quotient_manifolds.weights import trained, weights_of

from .batches import IGNORED
from .checkpoints import Weights, read_tensors, unwrapped
from .errors import called, how_to_install, naming, require_extra
from .files import files_of

__all__ = ["LoadedModel", "load"]

#: Files with a tokenizer's vocabulary; all files that say how texts and images become tensors.
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.spm")
INPUTS = (*_VOCABULARIES, "*processor_config.json", "tokenizer_config.json", "merges.txt", "*tokens*.json")
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # no download, no code of a folder
_LIBRARIES = {"clip": "open_clip", "timm": "timm"}  # by the extra that installs it


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
    left_out : tuple of str
        What the file of the weights holds besides them, in sentences.

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
    left_out: tuple[str, ...] = ()

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
        files = files_of(self.folder, _VOCABULARIES)
        with quiet(), naming(f"the tokenizer in {self.folder} cannot be read"), naming_pointers(files):
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
        """What a report says of the model: what was left out of its file, and that some of its weights are frozen."""
        weights = weights_of(self.model)
        every, moved = (sum(p.numel() for p in some.values()) for some in (weights, trained(weights)))
        said = f"{moved:,} of {every:,} weights of the model are measured; the others are frozen"
        return self.left_out if moved == every else (*self.left_out, said)


def load(name: str, checkpoint: str | None = None, *, untrained: bool = False) -> LoadedModel:
    """Build a model from a folder, a name of the Hugging Face Hub, or a library's name with local weights.

    Parameters
    ----------
    name : str
        A folder of transformers, timm or open_clip; ``owner/name`` or ``owner/name@revision``, a model of theirs on the
        Hub, of which safetensors weights and settings are fetched into the Hub's cache (behind ``hf-hub:`` one of
        open_clip, where it has another library's model too, or has the name of a folder here); an open_clip model name
        such as ``"ViT-B-32"``; a timm model name such as ``"vit_tiny_patch16_224"``, or with a tag for weights on the
        Hub; or ``module:function``, a function without arguments that returns a model; if the model has an
        ``image_transform``, images are read by it.
    checkpoint : str, optional
        Local weights for a named model, see :func:`load_state_dict`; a function's model may have its own.
    untrained : bool
        Accept the name of an architecture without a checkpoint; the weights are then random.

    Returns
    -------
    LoadedModel
        On the CPU, in evaluation mode.

    Raises
    ------
    ValueError, FileNotFoundError, ImportError
        The name is unknown, or the weights are missing, cannot be read or do not fit.

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
            raise ValueError("a folder of a model contains its own weights; leave out the checkpoint")
        return _from_folder(folder)
    if is_name(name):
        if checkpoint is not None:
            raise ValueError("a model on the Hub has its own weights; leave out the checkpoint")
        return _from_folder(fetch_model(name).place, for_clip=name.startswith(PREFIXES))
    if glob.has_magic(name):
        raise ValueError(f"{name!r} is a pattern; name one model (sharpness sweep measures many)")
    state = Weights() if checkpoint is None else read_tensors(checkpoint)
    if ":" in name:
        model = called(name)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch module")
        count = getattr(model, "num_classes", None)
        count = count if isinstance(count, int) else None
        loaded = LoadedModel(model, transform=getattr(model, "image_transform", None), num_classes=count)
    elif builder := _builder_of(name):
        if checkpoint is None and not untrained:
            if (of_hub := pinned(name)) != name:
                return load(of_hub)
            raise ValueError(
                f"{name} names an architecture without weights; give them as checkpoint (to compare two: both files, "
                f"with --model {name}), or name some of timm's by their tag"
            )
        loaded = builder(name, state)
    else:
        missing = [extra for extra, module in _LIBRARIES.items() if importlib.util.find_spec(module) is None]
        more = f" ({how_to_install(','.join(missing))})" if missing else ""
        raise ValueError(
            f"there is no folder {name!r}. A name on the Hugging Face Hub has an owner: owner/name. It is not the name "
            f"of an open_clip or timm model either{more}, nor module:function"
        )
    if checkpoint is not None:
        state = unwrapped(state, loaded.model.state_dict())
        with naming(f"the weights in {checkpoint} are not those of {type(loaded.model).__name__}"):
            loaded.model.load_state_dict(state)
    loaded.model.eval()
    return replace(loaded, left_out=state.remarks)


def pinned(name: str, checkpoint: str | None = None) -> str:
    """Return a name of the Hub with the commit that it has now, whose files are fetched; other names as they are."""
    if checkpoint is None and "." in name and not set(":/") & set(name) and _builder_of(name) is _from_timm:
        found = importlib.import_module("timm").get_pretrained_cfg(name)  # a tag names weights
        name = (found.hf_hub_id if found is not None else None) or name
    return fetch_model(name).pinned if is_name(name) else name


def _builder_of(name: str) -> Callable[[str, Weights], LoadedModel] | None:
    """Return what builds a library's model; a library is imported, for ten seconds, only if it may have that name."""
    clip = importlib.util.find_spec("open_clip")
    if clip is not None and "/" not in name:
        configuration = Path(str(clip.origin)).parent / "model_configs" / f"{name}.json"
        added = "open_clip" in sys.modules and name in importlib.import_module("open_clip").list_models()
        if added or configuration.is_file():
            return _from_open_clip
    # timm's names are those of functions, with a tag behind a dot.
    may_be = name.partition(".")[0].isidentifier() and importlib.util.find_spec("timm") is not None
    return _from_timm if may_be and importlib.import_module("timm").is_model(name) else None


def _from_open_clip(name: str, state: Weights) -> LoadedModel:
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(name, pretrained=None)
    return LoadedModel(model, transform=transform)


def _from_timm(name: str, state: Weights) -> LoadedModel:
    import timm

    model = timm.create_model(name, pretrained=False)
    top = model.default_cfg.get("classifier")
    top = f"{top[0] if isinstance(top, (list, tuple)) else top}.weight"
    head = unwrapped(state, model.state_dict()).get(top)
    if head is not None and head.dim() and head.shape[0] != model.num_classes:
        model = timm.create_model(name, pretrained=False, num_classes=head.shape[0])
    return _of_timm(model)


def _of_timm(model: Any) -> LoadedModel:
    import timm

    settings = timm.data.resolve_model_data_config(model)
    example, transform = _images(*settings["input_size"]), timm.data.create_transform(**settings)
    names = model.pretrained_cfg.get("label_names") or ()
    labels = {str(name): i for i, name in enumerate(names)} if len(names) == model.num_classes else {}
    return LoadedModel(model, example, transform, labels=labels, num_classes=model.num_classes or None)


def _from_folder(folder: Path, *, for_clip: bool = False) -> LoadedModel:
    """Load a folder, by the library that its configuration is for."""
    if (folder / CLIP).is_file() and (for_clip or not (folder / "config.json").is_file()):
        return _from_clip_folder(folder)
    settings = {}
    with suppress(OSError, ValueError):  # which transformers reports
        settings = json.loads((folder / "config.json").read_bytes())
    of_timm = isinstance(settings, dict) and "pretrained_cfg" in settings and "architectures" not in settings
    return _from_timm_folder(folder) if of_timm else _from_transformers(folder)


def _from_clip_folder(folder: Path) -> LoadedModel:
    with require_extra(f"reading {folder} needs open_clip", "clip"):
        import open_clip
    weights = _only_weights(folder, "open_clip_model.safetensors")
    with naming(f"{folder} cannot be loaded"), naming_pointers([weights]):
        if other := json.loads((folder / CLIP).read_bytes())["model_cfg"]["text_cfg"].get("hf_model_name"):
            raise ValueError(f"its texts are read by {other}, another model on the Hub, which is not fetched")
        model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    return LoadedModel(model.eval(), transform=transform)


def _from_timm_folder(folder: Path) -> LoadedModel:
    with require_extra(f"reading {folder} needs timm", "timm"):
        import timm
    weights = _only_weights(folder, "model.safetensors")
    with naming(f"{folder} cannot be loaded"):
        model = timm.create_model(f"local-dir:{folder}", pretrained=False)
        model.load_state_dict(read_tensors(weights))  # timm itself would leave a head that does not fit random
        return _of_timm(model.eval())


def _only_weights(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise ValueError(f"the folder {folder} has no {name}; save the weights of the model in this file")
    return folder / name


def _from_transformers(folder: Path) -> LoadedModel:
    """Load a transformers folder, whose weights must all be there and all be used."""
    if (folder / "adapter_config.json").is_file():  # transformers would attach it, and freeze everything else
        raise ValueError(
            f"{folder} holds a PEFT adapter; save the whole model after merge_and_unload(), move adapter_config.json "
            "away, or return what is to be measured from a function of yours (module:function)"
        )
    if not (folder / "config.json").is_file():
        on_hub = f"; for the model of this name on the Hub write {folder}@main" if len(folder.parts) == 2 else ""
        raise ValueError(f"the folder {folder} has no config.json, so it is not a transformers model{on_hub}")
    with require_extra(f"reading {folder} needs transformers", "transformers"):
        import transformers
    with quiet(), naming(f"{folder} cannot be loaded"):
        settings, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        kind: Any = getattr(transformers, (settings.get("architectures") or ["AutoModel"])[0])
        with naming_pointers(files_of(folder, ("*.safetensors", "*.bin"))):
            options = {"output_loading_info": True, "ignore_mismatched_sizes": True, **_LOCAL}
            model, report = kind.from_pretrained(folder, **options)
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
