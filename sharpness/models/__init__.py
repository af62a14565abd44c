"""Checkpoints to modules: a transformers folder, an open_clip or a timm name. Nothing is downloaded or unpickled."""

from .factory import load, load_state_dict
from .loaded import ImageFormat, LoadedModel

__all__ = ["ImageFormat", "LoadedModel", "load", "load_state_dict"]
