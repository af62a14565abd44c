"""Weights in files: state dicts of torch and safetensors, and in what training libraries wrap them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quotient_manifolds.files import naming_pointers

from .errors import PICKLED, naming, require_extra

#: What checkpoints of trainers call the weights; what DDP, averaged models and Lightning put before every name.
_ENTRIES, _WRAPPERS = ("state_dict", "model_state_dict", "model"), ("module.", "model.")


class Weights(dict[str, Tensor]):
    """Weights by name, with remarks about what else their file holds."""

    remarks: tuple[str, ...] = ()


def load_state_dict(path: str | os.PathLike[str], names: Collection[str] = ()) -> Weights:
    """Read weights from ``.safetensors``, or from torch's format without executing any code.

    Parameters
    ----------
    path : str or path
        File.
    names : collection of str
        The model's own names. The prefixes ``module.`` and ``model.``, if all names of the file have one, are stripped
        until it has one of these; without them, until none is left.

    Returns
    -------
    dict of str to Tensor
        On the CPU: a ``state_dict``, ``model_state_dict`` or ``model`` inside a checkpoint is taken out, and what
        ``torch.compile`` adds to names is left out. Its ``remarks`` say what else the file holds.

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
    return unwrapped(read_tensors(path), names)


def read_tensors(path: str | os.PathLike[str]) -> Weights:
    """Read the weights of a file, with the names that they have there."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint file {path}")
    with naming_pointers([path]):
        if path.suffix == ".safetensors":
            with require_extra("reading .safetensors needs safetensors", "transformers"):
                from safetensors.torch import load_file
            with naming(f"{path} is not a readable safetensors file"):
                state: Any = load_file(path)
        else:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:
                raise ValueError(f"{path} {PICKLED}") from error
    left = list[str]()
    if isinstance(state, dict):
        taken = next((k for k in _ENTRIES if isinstance(state.get(k), dict)), None)
        counter = "n_averaged" in state and all(str(k).startswith("module.") for k in state if k != "n_averaged")
        left = [str(k) for k in state if (k != taken if taken else counter and k == "n_averaged")]
        state = state[taken] if taken else {k: v for k, v in state.items() if k not in left}
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} holds no state dict (a mapping of names to tensors)")
    found = Weights((str(k), v) for k, v in state.items())
    found.remarks = (f"of the checkpoint these entries were not read: {', '.join(left)}",) if left else ()
    return found


def unwrapped(state: Weights, names: Collection[str] = ()) -> Weights:
    """Strip what wrappers put into names, see :func:`load_state_dict`."""
    found = {k if k in names else k.replace("_orig_mod.", ""): v for k, v in state.items()}
    while not found.keys() & set(names):
        prefix = next((p for p in _WRAPPERS if found and all(k.startswith(p) for k in found)), None)
        if prefix is None:
            break
        found = {k.removeprefix(prefix): v for k, v in found.items()}
    stripped = Weights(found)
    stripped.remarks = state.remarks
    return stripped
