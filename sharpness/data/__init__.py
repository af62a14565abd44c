"""Data sets: images, text, tensors, from files and folders."""

from .examples import Examples, choose
from .loading import DataChoice, is_function, load_batches, load_examples, source_files, source_files_or_raise
from .text import TextColumns, named_labels, read_table, read_texts

__all__ = [
    "DataChoice",
    "Examples",
    "TextColumns",
    "choose",
    "is_function",
    "load_batches",
    "load_examples",
    "named_labels",
    "read_table",
    "read_texts",
    "source_files",
    "source_files_or_raise",
]
