"""Load models by name: folders, functions, and models of open_clip and timm."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import imported, naming
from .huggingface import load_folder
from .loaded import ImageFormat, LoadedModel, sides

__all__ = ["call", "load", "load_state_dict"]


def load(name: str, checkpoint: str | None = None, *, head: str | None = None) -> LoadedModel:
    """Build a model from a local folder or a library's name, with local weights.

    Parameters
    ----------
    name : str
        A folder with ``config.json`` (transformers; only local files are read), an open_clip model name such as
        ``"ViT-B-32"``, a timm model name such as ``"vit_tiny_patch16_224"``, or ``module:function``, a function without
        arguments that returns a model; if the model has an ``image_format``, images are read accordingly.
    checkpoint : str, optional
        Local weights for a named model; without them the weights are random. For an open_clip model they are those of
        the whole model or, as in the public "model soups", ``model.visual.…`` with ``classification_head.weight`` and
        ``.bias``: then the model is the image tower with this head. Half-precision weights of the latter become
        float32.
    head : str, optional
        File with the ``weight`` (classes × features), and optionally ``bias``, of a head on open_clip's image tower.

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
        if checkpoint is not None or head is not None:
            raise ValueError("a transformers folder contains its own weights; leave out the checkpoint")
        return load_folder(folder)
    if ":" in name:
        if head is not None:
            raise ValueError(f"a separate head is only for open_clip's image towers; leave it out with {name}")
        return _from_function(name, checkpoint)
    missing = []
    for library, extra, build in (("open_clip", "clip", _open_clip), ("timm", "timm", _timm)):
        try:
            module = __import__(library)
        except ImportError:
            missing.append(f"; {library} is not installed: pip install 'quotient-manifolds[{extra}]'")
            continue
        if (name.split(".")[0] if library == "timm" else name) in module.list_models():
            return build(name, checkpoint, head)
    if "/" in name or os.sep in name:
        raise FileNotFoundError(f"there is no folder {name!r}")
    raise ValueError(
        f"{name!r} is not the name of an open_clip or timm model, nor module:function, and there is no folder of this "
        f"name{''.join(missing)}"
    )


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
                f"{path} is not a plain state dict of tensors, and pickled code is never executed; save it again with "
                "torch.save(model.state_dict(), path) or as .safetensors"
            ) from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not found or not all(isinstance(v, torch.Tensor) for v in found.values()):
        raise ValueError(f"{path} holds no state dict (a mapping of names to tensors)")
    return {str(k).removeprefix("module."): v for k, v in found.items()}


def call(name: str) -> Any:
    """Call the function named ``module:function``, also from the current folder; turn its errors into ValueErrors."""
    function = imported(name, f"{name!r} is not an importable module:function")
    if not callable(function):
        raise ValueError(f"{name!r} is not a function")
    with naming(f"{name} failed"):
        return function()


class ClipClassifier(nn.Module):
    """CLIP's image tower (images → features f) with a linear head on the normalised features, W f / ‖f‖ + b.

    Radford et al. 2021; the state dicts are those of Wortsman et al. 2022 (model soups).
    """

    def __init__(self, visual: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.visual, self.classification_head = visual, head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the logits, (examples, classes), of images, (examples, channels, height, width)."""
        features = self.visual(images)
        scores: torch.Tensor = self.classification_head(features / features.norm(dim=-1, keepdim=True))
        return scores


def _read(checkpoint: str | None) -> dict[str, torch.Tensor] | None:
    return None if checkpoint is None else load_state_dict(checkpoint)


def _fill(model: nn.Module, path: str | None, state: Mapping[str, torch.Tensor] | None) -> None:
    if state is not None:
        with naming(f"the weights in {path} are not those of {type(model).__name__}"):
            model.load_state_dict(state)


def _from_function(name: str, checkpoint: str | None) -> LoadedModel:
    model = call(name)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch module")
    _fill(model, checkpoint, _read(checkpoint))
    images = getattr(model, "image_format", None)
    return LoadedModel(model.eval(), images=images if isinstance(images, ImageFormat) else None)


def _open_clip(name: str, checkpoint: str | None, head: str | None) -> LoadedModel:
    import open_clip

    state = _read(checkpoint)
    model = open_clip.create_model(name, pretrained=None)
    visual = model.visual
    size = sides(visual.image_size)
    images = ImageFormat(size, tuple(visual.image_mean), tuple(visual.image_std), crop=True)
    example: Any = {"image": torch.randn(2, 3, *size)}
    if head is None and "classification_head.weight" not in (state or {}):
        _fill(model, checkpoint, state)
        length, words = getattr(model, "context_length", 77), getattr(model, "vocab_size", 49408)
        example["text"] = torch.randint(1, words - 1, (2, length))
        return LoadedModel(model.eval(), example, images)
    given = {k: v.float() for k, v in (state or {}).items() if v.is_floating_point()}
    if "classification_head.weight" in given and f"{name}-quickgelu" in open_clip.list_models():
        raise ValueError(
            f"{checkpoint} is a fine-tuned CLIP of OpenAI's, which uses QuickGELU: name the model {name}-quickgelu "
            f"({name} would give other outputs)"
        )
    tower = {k.removeprefix("model."): v for k, v in given.items()}
    tower = {k.removeprefix("visual."): v for k, v in tower.items() if k.startswith("visual.")}
    _fill(visual, checkpoint, None if state is None else tower)
    prefix = "classification_head." if head is None else ""
    linear = given if head is None else {k: v.float() for k, v in load_state_dict(head).items()}
    weight, bias = linear.get(f"{prefix}weight"), linear.get(f"{prefix}bias")
    if weight is None or weight.dim() != 2:
        raise ValueError(f"{head or checkpoint} has no matrix {prefix}weight (classes × features) for the head")
    top = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    _fill(top, head or checkpoint, {"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return LoadedModel(ClipClassifier(visual, top).eval(), example["image"], images)


def _timm(name: str, checkpoint: str | None, head: str | None) -> LoadedModel:
    import timm

    if head is not None:
        raise ValueError("a separate head is only for open_clip's image towers; timm models have their own")
    state = _read(checkpoint)
    model = timm.create_model(name, pretrained=False)
    settings = model.default_cfg
    top = settings.get("classifier")
    own = (state or {}).get(f"{top[0] if isinstance(top, (list, tuple)) else top}.weight")
    if own is not None and own.dim() and own.shape[0] != model.num_classes:
        model = timm.create_model(name, pretrained=False, num_classes=own.shape[0])
    _fill(model, checkpoint, state)
    how = timm.data.resolve_model_data_config(model)
    channels, *size = how["input_size"]
    images = ImageFormat(
        sides(size), tuple(how["mean"]), tuple(how["std"]), channels, how["crop_mode"] != "squash",
        how["interpolation"], math.floor(min(size) / how["crop_pct"]),
    )  # fmt: skip
    return LoadedModel(model.eval(), torch.randn(2, channels, *size), images)
