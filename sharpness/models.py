"""Load models from a transformers folder, by open_clip and timm names, or from a function; nothing is unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import called, naming, require_extra
from .huggingface import LoadedModel, from_folder, random_images

__all__ = ["LoadedModel", "load", "load_state_dict"]

#: What a loaded model is made of: the model, random inputs, its transform of images, and the weights to fill it with.
_Parts = tuple[nn.Module, Any, Any, Mapping[str, Tensor]]


def load(name: str, checkpoint: str | None = None) -> LoadedModel:
    """Build a model from a local folder or a library's name, with local weights.

    Parameters
    ----------
    name : str
        A folder with ``config.json`` (transformers; only local files are read), an open_clip model name such as
        ``"ViT-B-32"``, a timm model name such as ``"vit_tiny_patch16_224"``, or ``module:function``, a function without
        arguments that returns a model; if the model has an ``image_transform``, images are read by it.
    checkpoint : str, optional
        Local weights for a named model; without them the weights are random. For an open_clip model they are those of
        the whole model or, as in the public "model soups", ``model.visual.…`` with ``classification_head.weight`` and
        ``.bias``: then the model is the image tower with this head. Half-precision weights of the latter become
        float32.

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
        return from_folder(folder)
    if ":" in name:
        parts = _from_function
    elif find_spec("open_clip") and name in import_module("open_clip").list_models():
        parts = _from_open_clip
    elif find_spec("timm") and import_module("timm").is_model(name):
        parts = _from_timm
    elif "/" in name or os.sep in name:
        raise FileNotFoundError(f"there is no folder {name!r}")
    else:
        raise ValueError(
            f"{name!r} is not the name of an open_clip or timm model, nor module:function, and there is no folder of "
            "this name; the names need pip install 'quotient-manifolds[clip,timm]'"
        )
    model, example, transform, state = parts(name, {} if checkpoint is None else load_state_dict(checkpoint))
    if checkpoint is not None:
        with naming(f"the weights in {checkpoint} are not those of {type(model).__name__}"):
            model.load_state_dict(state)
    return LoadedModel(model.eval(), example, transform, name=name)


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
    return {str(k).removeprefix("module."): v for k, v in state.items()}


# -- functions, open_clip and timm -------------------------------------------------------------------------------------


def _from_function(name: str, state: Mapping[str, Tensor]) -> _Parts:
    model = called(name)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch module")
    return model, None, getattr(model, "image_transform", None), state


class ClipClassifier(nn.Module):
    """CLIP's image tower (images → features f) with a linear head on the normalised features, W f / ‖f‖ + b.

    Radford et al. 2021; the state dicts are those of Wortsman et al. 2022 (model soups).
    """

    def __init__(self, visual: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.visual, self.classification_head = visual, head

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits, (examples, classes), of images, (examples, channels, height, width)."""
        features = self.visual(images)
        scores: Tensor = self.classification_head(features / features.norm(dim=-1, keepdim=True))
        return scores


def _from_open_clip(name: str, state: Mapping[str, Tensor]) -> _Parts:
    import open_clip

    clip, _, transform = open_clip.create_model_and_transforms(name, pretrained=None)
    images, head = random_images(clip.visual.image_size), state.get("classification_head.weight")
    if head is None:
        length, words = getattr(clip, "context_length", 77), getattr(clip, "vocab_size", 49408)
        return clip, {"image": images, "text": torch.randint(1, words - 1, (2, length))}, transform, state
    if f"{name}-quickgelu" in open_clip.list_models():
        raise ValueError(
            f"the checkpoint is a fine-tuned CLIP of OpenAI's, which uses QuickGELU: name the model {name}-quickgelu "
            f"({name} would give other outputs)"
        )
    if head.dim() != 2:
        raise ValueError("the checkpoint has no matrix classification_head.weight (classes × features) for the head")
    state = {k.removeprefix("model."): v.float() for k, v in state.items() if v.is_floating_point()}
    state = {k: v for k, v in state.items() if k.startswith(("visual.", "classification_head."))}
    linear = nn.Linear(head.shape[1], head.shape[0], bias="classification_head.bias" in state)
    return ClipClassifier(clip.visual, linear), images, transform, state


def _from_timm(name: str, state: Mapping[str, Tensor]) -> _Parts:
    import timm

    model = timm.create_model(name, pretrained=False)
    top = model.default_cfg.get("classifier")
    head = state.get(f"{top[0] if isinstance(top, (list, tuple)) else top}.weight")
    if head is not None and head.dim() and head.shape[0] != model.num_classes:
        model = timm.create_model(name, pretrained=False, num_classes=head.shape[0])
    settings = timm.data.resolve_model_data_config(model)
    return model, torch.randn(2, *settings["input_size"]), timm.data.create_transform(**settings), state
