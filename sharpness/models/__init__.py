"""Load models from a transformers folder or by open_clip and timm names. Nothing is downloaded or unpickled."""

from .factory import load, load_state_dict
from .loaded import ImageFormat, LoadedModel

__all__ = ["ImageFormat", "LoadedModel", "load", "load_state_dict"]
