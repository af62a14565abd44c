"""A data set, whatever it is kept in, in batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quotient_manifolds.batches import tree_map

from ..errors import naming
from ..models import ImageFormat, LoadedModel, call, load_state_dict
from .examples import Examples, choose
from .images import idx_images, image_archive, image_folder, labels_beside
from .saved_datasets import datasets_folder, is_datasets_folder
from .text import TABLES, TextColumns, read_table, table_of_text

__all__ = ["DataChoice", "is_function", "load_batches", "load_examples", "source_files", "source_files_or_raise"]


def _divided(source: str) -> tuple[Path, str]:
    """Split a source into a path and what is named inside it: ``archive.zip:inside``, ``folder:split``."""
    if not isinstance(source, str):
        raise TypeError(f"a source of data is a string, got {type(source).__name__}")
    before, _, inside = source.rpartition(":")
    if before and not Path(source).exists() and (before.endswith(".zip") or is_datasets_folder(Path(before))):
        return Path(before), inside
    return Path(source), ""


def is_function(source: str, base: Path = Path()) -> bool:
    """Tell whether a source is ``module:function`` rather than a file or something in one.

    Parameters
    ----------
    source : str
        See :func:`load_batches`.
    base : Path
        Folder from which relative paths start.

    Returns
    -------
    bool

    Examples
    --------
    >>> is_function("my_project:batches"), is_function("digits.zip:test"), is_function("digits.safetensors")
    (True, False, False)
    """
    return ":" in source and not _divided(str(base / source))[1] and not (base / source).exists()


def source_files(source: str) -> list[tuple[str, Path]]:
    """List the files that a source consists of, by the part of their names that matters.

    Parameters
    ----------
    source : str
        See :func:`load_examples`.

    Returns
    -------
    list of (str, Path)
        In a folder the relative names, which hold the classes; else the suffix. Empty where nothing is.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (pathlib.Path(folder) / "films.tsv").touch()
    ...     [name for name, _ in source_files(f"{folder}/films.tsv")]
    ['.tsv']
    """
    path, inside = _divided(source)
    if path.is_dir():
        return [(f"{inside}:{p.relative_to(path).as_posix()}", p) for p in sorted(path.rglob("*")) if p.is_file()]
    files = [(f"{inside}{path.suffix}", path)] if path.is_file() else []
    labels = labels_beside(path)
    return files + ([("labels", labels)] if files and labels != path and labels.is_file() else [])


def source_files_or_raise(source: str) -> None:
    """Raise unless there is something to read at a source, before the work that needs it.

    Parameters
    ----------
    source : str
        See :func:`load_batches`.

    Raises
    ------
    FileNotFoundError
        There is nothing.

    Examples
    --------
    >>> try:
    ...     source_files_or_raise("nowhere.tsv")
    ... except FileNotFoundError as error:
    ...     print(error)
    there is no data at nowhere.tsv
    """
    if not is_function(source) and not source_files(source):
        raise FileNotFoundError(f"there is no data at {source}")


def _tensors(path: Path) -> Examples:
    named = load_state_dict(path)
    lengths = {name: len(t) if t.dim() else 0 for name, t in named.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path}: the tensors have unequal numbers of examples, {lengths}")

    def batch(chosen: Sequence[int]) -> Any:
        part = {name: t[list(chosen)] for name, t in named.items()}
        return (part["x"], part["y"]) if set(part) == {"x", "y"} else part

    return Examples(str(path), min(lengths.values()), batch)


def load_examples(
    source: str,
    *,
    images: ImageFormat | None = None,
    text: TextColumns | None = None,
    tokenizer: Any = None,
    labels: Mapping[str, int] | None = None,
) -> Examples:
    """Open a data set.

    Parameters
    ----------
    source : str
        - a folder of class folders of images, or a zip of them (``archive.zip:folder/inside``);
        - an idx file of images with its labels beside it, plain or gzipped, as MNIST's;
        - a ``.tsv``, ``.csv`` or ``.jsonl`` table of text;
        - a folder that Hugging Face's ``datasets`` saved (``folder:split`` where it has several), of texts or images;
        - a ``.safetensors`` file, or one that torch saved, of named tensors whose first dimension is the examples:
          with the names x and y batches are pairs, else dicts for a transformers model.
    images : ImageFormat, optional
        What the model expects of images; needed for them.
    text : TextColumns, optional
        Which columns of a table hold what; by default ``text`` and ``label``.
    tokenizer : optional
        A tokenizer of transformers, for tables.
    labels : mapping of str to int, optional
        The model's own names of its classes, for tables that name labels.

    Returns
    -------
    sharpness.data.Examples
        Read when asked for, where the form of the data allows it.

    Raises
    ------
    ValueError, OSError, ImportError
        One sentence that names the file and the fix.

    Examples
    --------
    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"x": torch.randn(10, 4), "y": torch.arange(10) % 2}, f"{folder}/data.pt")
    ...     found = load_examples(f"{folder}/data.pt")
    >>> x, y = found.batch([1, 2, 3])
    >>> len(found), x.shape, y
    (10, torch.Size([3, 4]), tensor([1, 0, 1]))
    """
    path, inside = _divided(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no data at {path}")
    if is_datasets_folder(path):
        return datasets_folder(path, inside, images, text or TextColumns(), tokenizer, labels or {})
    name = path.name.removesuffix(".gz").lower()
    if path.is_dir() or path.suffix == ".zip" or name.endswith(("idx3-ubyte", ".idx3")):
        if images is None:
            raise ValueError(f"{source} holds images, but the model does not say what it expects; give size, mean, std")
        if path.is_dir():
            return image_folder(path, images)
        return image_archive(path, inside, images) if path.suffix == ".zip" else idx_images(path, images)
    if path.suffix.lower() in TABLES:
        columns = text or TextColumns()
        return table_of_text(path, read_table(path, columns.header), columns, tokenizer, labels or {})
    return _tensors(path)


def load_batches(
    source: str,
    *,
    batch_size: int = 256,
    count: int | None = None,
    examples: int | None = None,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> list[Any]:
    """Read batches.

    Parameters
    ----------
    source : str
        What :func:`load_examples` opens; or ``module:function`` for what a function without arguments returns, an
        iterable of batches.
    batch_size : int
        Examples a batch; the last may have fewer.
    count : int, optional
        The first so many batches; by default all.
    examples, seed : int, optional
        See :func:`choose`: the first so many examples, or as many at random.
    device : torch.device or str
        Where the batches go.
    **options
        Of :func:`load_examples`.

    Returns
    -------
    list
        Batches as :func:`sharpness.evaluate` takes them: dicts of text with labels, or pairs (x, y), where images x
        are float32 (examples, channels, height, width) and y are int64 (examples,).

    Raises
    ------
    ValueError, OSError, ImportError
        A file or function that cannot be read, tensors of unequal length; and as :func:`load_examples`.

    Examples
    --------
    >>> import sharpness, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"x": torch.randn(10, 4), "y": torch.arange(10) % 2}, f"{folder}/data.pt")
    ...     batches = load_batches(f"{folder}/data.pt", batch_size=4, count=2)
    >>> result = sharpness.evaluate(torch.nn.Linear(4, 2), batches, measure="adaptive", rho=0.1)
    >>> len(result.batches)
    2
    """
    given = {"batch_size": batch_size, "count": count, "examples": examples, "seed": seed}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
    with naming(f"the device {device!r} cannot be used"):
        device = torch.device(device)
    if batch_size < 1 or (count is not None and count < 1):
        raise ValueError(f"the batch size and the number of batches must be at least 1, got {batch_size} and {count}")
    batches: Iterable[Any]
    if is_function(source):
        if examples is not None or seed is not None:
            raise ValueError(f"{source} is a function, which chooses its examples itself")
        batches = call(source)
    else:
        found = load_examples(source, **options)
        chosen = choose(len(found), examples, seed)
        batches = (found.batch(chosen[i : i + batch_size]) for i in range(0, len(chosen), batch_size))
    result = [tree_map(lambda t: t.to(device), b) for b in itertools.islice(batches, count)]
    if not result:
        raise ValueError(f"{source} gave no batch")
    return result


@dataclass(frozen=True)
class DataChoice:
    """A data set, and which of its examples are taken how.

    Attributes
    ----------
    source : str
        See :func:`load_batches`.
    batch_size : int
        Examples a batch; the last may have fewer.
    batches, examples, seed : int or None
        The first so many batches; the first so many examples, or as many at random.
    columns : TextColumns
        Of text.
    image_size : int or None
        Side of the images; by default, like mean and std, what the model says.
    mean, std : tuple of float or None
        Of every channel, or one for all.

    Examples
    --------
    The same choice for many models, each with its own tokenizer or image format:

    >>> import tempfile, torch
    >>> from sharpness.models import LoadedModel
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"x": torch.randn(10, 4), "y": torch.arange(10) % 2}, f"{folder}/data.pt")
    ...     choice = DataChoice(f"{folder}/data.pt", batch_size=4, examples=6, seed=0)
    ...     [len(y) for _, y in choice.load(LoadedModel(torch.nn.Linear(4, 2), "function", None))]
    [4, 2]
    """

    source: str
    batch_size: int = 256
    batches: int | None = None
    examples: int | None = None
    seed: int | None = None
    columns: TextColumns = field(default_factory=TextColumns)
    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def load(self, loaded: LoadedModel, device: torch.device | str = "cpu") -> list[Any]:
        """Read the batches for a model.

        Parameters
        ----------
        loaded : LoadedModel
            Gives its tokenizer, image format and names of classes.
        device : torch.device or str
            Where the batches go.

        Returns
        -------
        list
            See :func:`load_batches`.

        Raises
        ------
        ValueError, OSError, ImportError
            See :func:`load_batches`.
        """
        return load_batches(
            self.source, batch_size=self.batch_size, count=self.batches, examples=self.examples, seed=self.seed,
            device=device, images=self.image_format(loaded.images), text=self.columns,
            tokenizer=loaded.tokenizer if self.is_text else None, labels=loaded.labels,
        )  # fmt: skip

    @property
    def is_text(self) -> bool:
        """Whether it holds text."""
        path, inside = _divided(self.source)
        if is_datasets_folder(path):
            about = list((path / inside).glob("**/dataset_info.json"))
            return not any('"Image"' in p.read_text(encoding="utf-8") for p in about)
        return path.suffix.lower() in TABLES

    def image_format(self, known: ImageFormat | None) -> ImageFormat | None:
        """Say what is expected of images: what this choice says, else what the model says.

        Parameters
        ----------
        known : ImageFormat or None
            Of the model.

        Returns
        -------
        ImageFormat or None
            None where neither says anything.
        """
        if self.image_size is None and self.mean is None and self.std is None:
            return known
        base = known or ImageFormat((224, 224), (0.5,), (0.5,))
        size = base.size if self.image_size is None else (self.image_size, self.image_size)
        mean, std = self.mean or base.mean, self.std or base.std
        channels = max(len(mean), len(std), 1 if known is None else known.channels)
        return ImageFormat(size, mean, std, channels, base.crop, base.resample)
