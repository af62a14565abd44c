"""Data sets in any supported format, in batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quotient_manifolds.batches import tree_map

from ..errors import naming
from ..models import ImageFormat, LoadedModel, load_state_dict
from ..models.factory import call
from .examples import Examples, is_sorted
from .images import idx_images, image_archive, image_folder, labels_beside, needed_format
from .saved_datasets import datasets_folder, is_datasets_folder
from .text import TABLES, TextColumns, read_table, table_of_text

__all__ = ["DataChoice", "check_source", "divided", "is_function", "load_examples", "source_files"]

#: Suffixes of files of tensors.
_TENSORS = {"", ".safetensors", ".pt", ".pth", ".bin", ".ckpt"}


def divided(source: str) -> tuple[Path, str]:
    """Split a source into a path and a name inside it: ``archive.zip:inside``, ``folder:split``."""
    if not isinstance(source, str):
        raise TypeError(f"a source of data is a string, got {type(source).__name__}")
    before, _, inside = source.rpartition(":")
    if before and not Path(source).exists() and (before.lower().endswith(".zip") or is_datasets_folder(Path(before))):
        return Path(before), inside
    return Path(source), ""


def is_function(source: str, base: Path = Path()) -> bool:
    """Tell whether a source is ``module:function`` rather than a file below ``base``, or a part of one."""
    path = base / source
    return ":" in source and divided(str(path))[0] == path and not path.exists()


def source_files(source: str) -> list[tuple[str, Path]]:
    """List the files of a source, by the relevant part of their names; all files of a folder of classes."""
    path, inside = divided(source)
    if path.is_dir():
        return [(f"{inside}:{p.relative_to(path).as_posix()}", p) for p in sorted(path.rglob("*")) if p.is_file()]
    files = [(f"{inside}{path.suffix}", path)] if path.is_file() else []
    labels = labels_beside(path)
    return files + ([("labels", labels)] if files and labels != path and labels.is_file() else [])


def check_source(source: str) -> None:
    """Raise unless there is something to read at a source; call it before the work that needs it."""
    if not is_function(source) and not divided(source)[0].exists():
        raise FileNotFoundError(f"there is no data at {source}")


def _tensors(path: Path) -> Examples:
    named = load_state_dict(path)
    lengths = {name: len(t) if t.dim() else 0 for name, t in named.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path}: the tensors have unequal numbers of examples, {lengths}")

    def batch(chosen: Any) -> Any:
        part = {name: t[list(chosen)] for name, t in named.items()}
        return (part["x"], part["y"]) if set(part) == {"x", "y"} else part

    labels = named.get("y", named.get("labels"))
    by_class = labels is not None and labels.numel() == len(labels) and is_sorted(labels.flatten().tolist())
    return Examples(min(lengths.values()), batch, sorted=by_class)


def load_examples(
    source: str,
    *,
    images: ImageFormat | None = None,
    text: TextColumns | None = None,
    tokenizer: Any = None,
    labels: Mapping[str, int] | None = None,
    predicts: str | None = None,
) -> Examples:
    """Open the source of a :class:`DataChoice` that is not a function.

    ``images`` is the image format that a model expects; ``tokenizer`` and ``labels`` translate texts and class names;
    ``predicts`` says what a language model predicts, see :attr:`LoadedModel.predicts`.
    """
    text, labels = text or TextColumns(), labels or {}
    path, inside = divided(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no data at {path}")
    if is_datasets_folder(path):
        return datasets_folder(path, inside, images, text, tokenizer, labels, predicts)
    if path.is_dir():
        return image_folder(path, needed_format(images, source), labels)
    if path.suffix.lower() == ".zip":
        return image_archive(path, inside, needed_format(images, source), labels)
    if path.name.removesuffix(".gz").lower().endswith(("idx3-ubyte", ".idx3")):
        return idx_images(path, needed_format(images, source))
    if path.suffix.lower() in TABLES:
        return table_of_text(path, read_table(path, text.header), text, tokenizer, labels, predicts)
    if path.suffix.lower() not in _TENSORS:
        raise ValueError(
            f"{path} is not data by its name: tables end in {', '.join(sorted(TABLES))}, images are in folders of "
            f"classes or a .zip, and files of tensors end in {', '.join(sorted(filter(None, _TENSORS)))}"
        )
    return _tensors(path)


class Batches(list[Any]):
    """The batches of a source, with remarks about it, such as on files that were left out."""

    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataChoice:
    """A data set, with the choice of examples and their format.

    Attributes
    ----------
    source : str
        - a folder of class folders of images, or a zip of them (``archive.zip:folder/inside``);
        - an idx file of images with its labels beside it, plain or gzipped, as MNIST's;
        - a ``.tsv``, ``.csv`` or ``.jsonl`` table of text;
        - a folder that Hugging Face's ``datasets`` saved (``folder:split`` where it has several), of texts or images;
        - a ``.safetensors`` file, or one that torch saved, of named tensors whose first dimension runs over the
          examples: with the names x and y batches are pairs, else dicts for a transformers model;
        - ``module:function``, a function without arguments that returns an iterable of batches.
    batch_size : int
        Examples per batch at most. Batches are as equal as possible, since each counts as much as the others.
    batches, num_examples, subset_seed : int or None
        Number of batches; number of examples, the first ones or, with ``subset_seed``, as many at random. Examples that
        stand class by class, as in folders of classes, are always read in random order, by default with the seed 0.
    columns : TextColumns
        Columns of a table of text.
    image_size : int or None
        Side of the images in pixels; by default, like mean and std, as in the model's files.
    mean, std : tuple of float or None
        One value per channel, or one for all.

    Examples
    --------
    The same choice for many models, each with its own tokenizer or image format:

    >>> import sharpness, tempfile, torch
    >>> from sharpness.models import LoadedModel
    >>> mine = LoadedModel(torch.nn.Linear(4, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"x": torch.randn(10, 4), "y": torch.arange(10) % 2}, f"{folder}/data.pt")
    ...     batches = DataChoice(f"{folder}/data.pt", batch_size=4, num_examples=6, subset_seed=0).load(mine)
    >>> [len(y) for _, y in batches]
    [3, 3]
    >>> result = sharpness.evaluate(mine.model, batches, measure="adaptive", rho=0.1)
    """

    source: str
    batch_size: int = 256
    batches: int | None = None
    num_examples: int | None = None
    subset_seed: int | None = None
    columns: TextColumns = field(default_factory=TextColumns)
    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "batches", "num_examples", "subset_seed"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
        if self.batch_size < 1 or (self.batches is not None and self.batches < 1):
            raise ValueError(
                f"the batch size and the number of batches must be at least 1, got {self.batch_size} and {self.batches}"
            )

    def load(self, loaded: LoadedModel, device: torch.device | str = "cpu") -> Batches:
        """Read the batches for a model.

        Parameters
        ----------
        loaded : LoadedModel
            Provides its tokenizer, image format and class names.
        device : torch.device or str
            Device of the batches.

        Returns
        -------
        list
            Batches as :func:`sharpness.evaluate` takes them: dicts of text with labels, or pairs (x, y), where images x
            are float32 (examples, channels, height, width) and y are int64 (examples,). Its ``remarks`` say what was
            left out.

        Raises
        ------
        ValueError, OSError, ImportError
            The data cannot be read; one sentence names the file and the fix.
        """
        with naming(f"the device {device!r} cannot be used"):
            device = torch.device(device)
        batches: Iterable[Any]
        remarks: tuple[str, ...] = ()
        if is_function(self.source):
            if self.num_examples is not None or self.subset_seed is not None:
                raise ValueError(f"{self.source} is a function, which chooses its examples itself")
            batches = call(self.source)
        else:
            examples = self.open(loaded)
            remarks = examples.remarks
            chosen = examples.choose(self.num_examples, self.subset_seed)
            chosen = chosen[: None if self.batches is None else self.batches * self.batch_size]
            parts = np.array_split(chosen, -(-len(chosen) // self.batch_size))
            batches = (examples.batch(part.tolist()) for part in parts)
        result = Batches(tree_map(lambda t: t.to(device), b) for b in itertools.islice(batches, self.batches))
        if not result:
            raise ValueError(f"{self.source} gave no batch")
        result.remarks = remarks
        return result

    def open(self, loaded: LoadedModel) -> Examples:
        """Open all examples for a model; they are read on demand where the format allows it."""
        return load_examples(
            self.source, images=self.image_format(loaded.images), text=self.columns,
            tokenizer=loaded.tokenizer if self.is_text else None, labels=loaded.labels, predicts=loaded.predicts,
        )  # fmt: skip

    @property
    def is_text(self) -> bool:
        """Whether it holds text."""
        path, inside = divided(self.source)
        if is_datasets_folder(path):
            about = list((path / inside).glob("**/dataset_info.json"))
            return not any('"Image"' in p.read_text(encoding="utf-8") for p in about)
        return path.suffix.lower() in TABLES

    def image_format(self, known: ImageFormat | None) -> ImageFormat | None:
        """Return the image format of this choice, or else of the model, which may be None."""
        if self.image_size is None and self.mean is None and self.std is None:
            return known
        base = known or ImageFormat((224, 224), (0.5,), (0.5,), 1)
        size, resize = base.size, base.resize
        if self.image_size is not None:  # the same part of the image, at another size
            size, factor = (self.image_size, self.image_size), self.image_size / min(base.size)
            both = (resize, resize) if isinstance(resize, int) else resize
            scaled = both and (round(both[0] * factor), round(both[1] * factor))
            resize = scaled[0] if scaled and isinstance(resize, int) else scaled
        mean, std = self.mean or base.mean, self.std or base.std
        channels = max(len(mean), len(std), base.channels)
        return dataclasses.replace(base, size=size, resize=resize, mean=mean, std=std, channels=channels)
