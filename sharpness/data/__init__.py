"""Data sets: images, text, tensors, from files and folders."""

from .loading import DataChoice
from .text import TextColumns

__all__ = ["DataChoice", "TextColumns"]
