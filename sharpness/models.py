"""Load models from a transformers folder, by open_clip and timm names, or from a function; nothing is unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import imported, naming, require_extra
from .huggingface import LoadedModel, from_folder, sides

__all__ = ["LoadedModel", "load", "load_state_dict"]


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
        model = call(name)
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name!r} returned {type(model).__name__}, not a torch module")
        _fill(model, checkpoint, {} if checkpoint is None else load_state_dict(checkpoint))
        return LoadedModel(model.eval(), transform=getattr(model, "image_transform", None), name=name)
    missing = []
    for library, extra, build in (("open_clip", "clip", _from_open_clip), ("timm", "timm", _from_timm)):
        try:
            module = __import__(library)
        except ImportError:
            missing.append(f"; {library} is not installed: pip install 'quotient-manifolds[{extra}]'")
            continue
        if (name.split(".")[0] if library == "timm" else name) in module.list_models():
            return build(name, checkpoint)
    if "/" in name or os.sep in name:
        raise FileNotFoundError(f"there is no folder {name!r}")
    raise ValueError(
        f"{name!r} is not the name of an open_clip or timm model, nor module:function, and there is no folder of this "
        f"name{''.join(missing)}"
    )


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


def call(name: str) -> Any:
    """Call the function named ``module:function``, also from the current folder; turn its errors into ValueErrors."""
    function = imported(name, f"{name!r} is not an importable module:function")
    if not callable(function):
        raise ValueError(f"{name!r} is not a function")
    with naming(f"{name} failed"):
        return function()


# -- open_clip and timm ------------------------------------------------------------------------------------------------


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


def _from_open_clip(name: str, checkpoint: str | None) -> LoadedModel:
    import open_clip

    state = {} if checkpoint is None else load_state_dict(checkpoint)
    clip, _, transform = open_clip.create_model_and_transforms(name, pretrained=None)
    images = torch.randn(2, 3, *sides(clip.visual.image_size))
    if "classification_head.weight" not in state:
        _fill(clip, checkpoint, state)
        length, words = getattr(clip, "context_length", 77), getattr(clip, "vocab_size", 49408)
        example = {"image": images, "text": torch.randint(1, words - 1, (2, length))}
        return LoadedModel(clip.eval(), example, transform, name=name)
    if f"{name}-quickgelu" in open_clip.list_models():
        raise ValueError(
            f"{checkpoint} is a fine-tuned CLIP of OpenAI's, which uses QuickGELU: name the model {name}-quickgelu "
            f"({name} would give other outputs)"
        )
    state = {k.removeprefix("model."): v.float() for k, v in state.items() if v.is_floating_point()}
    state = {k: v for k, v in state.items() if k.startswith(("visual.", "classification_head."))}
    head = state["classification_head.weight"]
    if head.dim() != 2:
        raise ValueError(f"{checkpoint} has no matrix classification_head.weight (classes × features) for the head")
    linear = nn.Linear(head.shape[1], head.shape[0], bias="classification_head.bias" in state)
    model = ClipClassifier(clip.visual, linear)
    _fill(model, checkpoint, state)
    return LoadedModel(model.eval(), images, transform, name=name)


def _from_timm(name: str, checkpoint: str | None) -> LoadedModel:
    import timm

    state = {} if checkpoint is None else load_state_dict(checkpoint)
    model = timm.create_model(name, pretrained=False)
    top = model.default_cfg.get("classifier")
    head = state.get(f"{top[0] if isinstance(top, (list, tuple)) else top}.weight")
    if head is not None and head.dim() and head.shape[0] != model.num_classes:
        model = timm.create_model(name, pretrained=False, num_classes=head.shape[0])
    _fill(model, checkpoint, state)
    settings = timm.data.resolve_model_data_config(model)
    images, transform = torch.randn(2, *settings["input_size"]), timm.data.create_transform(**settings)
    return LoadedModel(model.eval(), images, transform, name=name)


def _fill(model: nn.Module, path: str | None, state: Mapping[str, Tensor]) -> None:
    if path is not None:
        with naming(f"the weights in {path} are not those of {type(model).__name__}"):
            model.load_state_dict(state)
