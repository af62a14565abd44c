"""Data sets: images, text and tensors, from files and folders, in batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.batches import tree_map
from quotient_manifolds.checks import as_count

from .errors import naming, require_extra
from .models import LoadedModel, call, load_state_dict
from .texts import TextColumns, class_number, read_table, strings, tokenized

__all__ = ["DataChoice", "TextColumns"]

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_TABLES = {".csv", ".jsonl", ".parquet", ".tsv"}
_TENSORS = {"", ".safetensors", ".pt", ".pth", ".bin", ".ckpt"}


@dataclass(frozen=True)
class Examples:
    """A source of examples: its size, and ``batch``, from positions to a batch on the CPU.

    ``classes`` are the names of the classes, in the order of their numbers, where the files give them; ``sorted`` says
    that the examples stand class by class, see :func:`is_sorted`; ``remarks`` say what a listing left out.
    """

    size: int
    batch: Callable[[Sequence[int]], Any] = field(repr=False)
    classes: tuple[str, ...] | None = None
    sorted: bool = False
    remarks: tuple[str, ...] = ()

    def choose(self, count: int | None = None, seed: int | None = None) -> list[int]:
        """Choose the first ``count`` examples or, with a seed, as many at random, in random order.

        Sorted ones are always chosen at random, because the first ones are of one class. With the same seed, a smaller
        choice is the beginning of a larger one.
        """
        count, seed = self.size if count is None else count, 0 if seed is None and self.sorted else seed
        if not 1 <= count <= self.size:
            raise ValueError(
                f"{count} examples were asked for, but there are {self.size}; choose from 1 to {self.size}"
            )
        order = range(self.size) if seed is None else np.random.default_rng(seed).permutation(self.size).tolist()
        return list(order[:count])


class Batches(list[Any]):
    """The batches of a source, with remarks about it, such as on files that were left out."""

    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataChoice:
    """A data set, with the choice of examples.

    Attributes
    ----------
    source : str
        - a folder of class folders of images;
        - a ``.tsv``, ``.csv``, ``.jsonl`` or ``.parquet`` table of text (a ``.parquet`` may hold images);
        - a folder that Hugging Face's ``datasets`` saved (``folder:split`` where it has several), of texts or images;
        - a ``.safetensors`` file, or one that torch saved, of named tensors whose first dimension runs over the
          examples: with the names x and y batches are pairs, else dicts for a transformers model;
        - ``module:function``, a function without arguments that returns an iterable of batches.
    batch_size : int
        Examples per batch at most. Batches are as equal as possible, since each counts as much as the others.
    batches : int or None
        Number of batches at most.
    num_examples : int or None
        Number of examples: the first ones, but at random if they stand class by class, as in folders of classes.
    subset_seed : int or None
        Choose the examples at random, with this seed; examples that stand class by class always are, by default with
        the seed 0.
    columns : TextColumns
        Columns of a table of text.

    Examples
    --------
    The same choice for many models, each with its own tokenizer or image transform:

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

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.batches is not None and self.batches < 1):
            raise ValueError(
                f"the batch size and the number of batches must be at least 1, got {self.batch_size} and {self.batches}"
            )
        for name, least in {"batch_size": 1, "batches": 1, "num_examples": 1, "subset_seed": 0}.items():
            if getattr(self, name) is not None:
                as_count(name, getattr(self, name), least=least)

    def load(self, loaded: LoadedModel, device: torch.device | str = "cpu") -> Batches:
        """Read the batches for a model.

        Parameters
        ----------
        loaded : LoadedModel
            Provides its tokenizer, image transform and class names.
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
            The data cannot be read, or there is too little of it.
        """
        with naming(f"the device {device!r} cannot be used"):
            device = torch.device(device)
        remarks: tuple[str, ...] = ()
        if is_function(self.source):
            if self.num_examples is not None or self.subset_seed is not None:
                raise ValueError(f"{self.source} is a function, which chooses its examples itself")
            batches = call(self.source)
        else:
            examples = load_examples(self.source, loaded, self.columns)
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


# -- sources -----------------------------------------------------------------------------------------------------------


def divided(source: str) -> tuple[Path, str]:
    """Split a source into a path and the split inside it: ``folder:split`` of a folder that ``datasets`` saved."""
    if not isinstance(source, str):
        raise TypeError(f"a source of data is a string, got {type(source).__name__}")
    before, _, split = source.rpartition(":")
    is_split = before and not Path(source).exists() and _is_saved(Path(before))
    return (Path(before), split) if is_split else (Path(source), "")


def is_function(source: str, base: Path = Path()) -> bool:
    """Return whether a source is ``module:function`` rather than a file below ``base``, or a split of one."""
    path = base / source
    return ":" in source and divided(str(path))[0] == path and not path.exists()


def source_files(source: str) -> list[tuple[str, Path]]:
    """List the files of a source, by the relevant part of their names."""
    path, split = divided(source)
    if path.is_dir():
        return [(f"{split}:{p.relative_to(path).as_posix()}", p) for p in sorted(path.rglob("*")) if p.is_file()]
    return [(path.suffix, path)] if path.is_file() else []


def check_source(source: str) -> None:
    """Raise unless there is something to read at a source; call it before the work that needs it."""
    if not is_function(source) and not divided(source)[0].exists():
        raise FileNotFoundError(f"there is no data at {source}")


def load_examples(source: str, loaded: LoadedModel, columns: TextColumns) -> Examples:
    """Open the source of a :class:`DataChoice` that is not a function, for a model; examples are read on demand."""
    path, split = divided(source)
    kind = path.suffix.lower()
    if not path.exists():
        raise FileNotFoundError(f"there is no data at {path}")
    if _is_saved(path) or kind == ".parquet":
        return _dataset(path, split, loaded, columns)
    if path.is_dir():
        return _image_folder(path, loaded)
    if kind in _TABLES:
        return _texts(path, read_table(path, columns.header), loaded, columns)
    if kind not in _TENSORS:
        raise ValueError(
            f"{path} is not data by its name: tables end in {', '.join(sorted(_TABLES))}, images are in folders of "
            f"classes, and files of tensors end in {', '.join(sorted(filter(None, _TENSORS)))}"
        )
    return _tensors(path)


def is_sorted(labels: Sequence[int]) -> bool:
    """Return whether examples stand class by class, as in a folder of classes: the first ones are of one class."""
    runs = [label for label, _ in itertools.groupby(labels)]
    return 1 < len(set(runs)) == len(runs) < len(labels)


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


def _is_saved(path: Path) -> bool:
    """Return whether ``datasets.save_to_disk`` wrote a folder."""
    return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _texts(
    source: Path | str, rows: Sequence[Mapping[str, str]], loaded: LoadedModel, columns: TextColumns
) -> Examples:
    batch, labels = tokenized(source, rows, loaded, columns)
    return Examples(len(rows), batch, sorted=is_sorted(labels))


def _dataset(path: Path, split: str, loaded: LoadedModel, columns: TextColumns) -> Examples:
    """Open texts, or images with their class, that ``datasets`` reads: a folder that it saved, or a parquet file."""
    with require_extra(f"reading {path} needs datasets", "datasets"):
        import datasets
        from pyarrow import parquet
    with naming(f"{path} is not readable by datasets"):
        saved = path.is_dir()
        data = datasets.load_from_disk(str(path)) if saved else datasets.Dataset(parquet.read_table(path))
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise ValueError(f"{path} has the splits {', '.join(data)}; name one as {path}:{next(iter(data))}")
        data = data[split]
    source = f"{path}:{split}" if split else str(path)
    names = None
    if loaded.predicts is None:
        if columns.label not in data.features:
            raise ValueError(f"{source} has no column {columns.label!r}; it has {', '.join(data.features)}")
        names = getattr(data.features[columns.label], "names", None)
        pictures = [name for name, kind in data.features.items() if isinstance(kind, datasets.Image)]
        if pictures:

            def read(row: int) -> Any:
                with naming(f"the image in row {row} of {source} cannot be read"):
                    return data[row][pictures[0]]

            return _images(source, read, data[columns.label], names, loaded)
    wanted = [c for c in (columns.text, columns.pair, columns.label) if c in data.features]
    rows = [strings(row) for row in data.select_columns(wanted)]
    own: dict[str, int] = {}
    if names:
        for row in rows:
            number = int(row.get(columns.label, -1))
            if not 0 <= number < len(names):
                raise ValueError(
                    f"{source} has the label {number}, which is not among its classes; use a split with labels"
                )
            row[columns.label] = names[number]
        unnamed = all(n.isdigit() or n.upper().startswith("LABEL_") for n in loaded.labels)
        known = {n.lower() for n in names} <= {n.lower() for n in loaded.labels}
        if not (unnamed or known or columns.label_map) and any(n.isdecimal() for n in names):
            raise ValueError(
                f"the classes of {source} ({', '.join(names)}) are not the model's ({', '.join(loaded.labels)}); say "
                "what labels mean with --label-map NAME=NUMBER,…"
            )
        if unnamed and not known and not columns.label_map:
            own = {name: i for i, name in enumerate(names)}
            columns = dataclasses.replace(columns, label_map=own)
    return dataclasses.replace(_texts(source, rows, loaded, columns), classes=tuple(own) or None)


# -- images ------------------------------------------------------------------------------------------------------------


def _image_folder(folder: Path, loaded: LoadedModel) -> Examples:
    """Open a folder of class folders; hidden ones are no classes.

    Unless the model says otherwise, classes are numbered by sorted folder names, as in torchvision's ImageFolder; but
    where all names are numbers, 2 comes before 10.
    """
    classes = [p.name for p in folder.iterdir() if p.is_dir() and not _is_hidden(p)]
    classes = sorted(classes, key=int if all(map(str.isdecimal, classes)) else None)
    items: list[tuple[Path, int]] = []
    for number, name in enumerate(classes):
        inside = sorted(p for p in (folder / name).iterdir() if p.suffix.lower() in _IMAGES and not _is_hidden(p))
        if not inside:
            raise ValueError(f"the class folder {name} of {folder} holds no image; fill it or remove it")
        items += [(path, number) for path in inside]
    if not items:
        raise ValueError(f"{folder} has no class folders with images (CLASS/NAME.jpg or .png)")

    def read(i: int) -> Any:
        from PIL import Image

        path = items[i][0]
        with naming(f"the image {path.relative_to(folder).as_posix()} cannot be read; remove it or replace it"):
            with Image.open(path) as image:
                image.load()
            return image

    found = _images(str(folder), read, [number for _, number in items], classes, loaded)
    taken = {path for path, _ in items}
    others = sorted(p for p in folder.rglob("*") if p.is_file() and p not in taken)
    if not others:
        return dataclasses.replace(found, sorted=True)
    remark = (
        f"{len(others)} of the {len(taken) + len(others)} files of {folder} are left out, such as "
        f"{others[0].relative_to(folder).as_posix()}: they are hidden, not directly in the folder of a class, or no "
        "images by their names"
    )
    return dataclasses.replace(found, sorted=True, remarks=(remark,))


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name == "__MACOSX"


def _images(
    source: str, read: Callable[[int], Any], labels: Sequence[int], classes: Any, loaded: LoadedModel
) -> Examples:
    """Return examples of images, from positions to Pillow's images, with the numbers of their classes.

    ``labels`` are positions in ``classes``; where these are classes of the model, they have its numbers.
    """
    with require_extra("reading images needs Pillow", "images"):
        from PIL import Image
    known, transform = loaded.labels, loaded.transform
    if transform is None:
        raise ValueError(
            f"{source} holds images, but the model does not say how to prepare them; give it an image_transform, a "
            "function from an image of Pillow to a tensor (channels, height, width)"
        )
    wrong = next((label for label in labels if label < 0), None)
    if wrong is not None:
        raise ValueError(f"{source} has the label {wrong}, which is no class; use a split with labels")
    numbers = [class_number(name, known) for name in classes or ()]
    if any(n is not None for n in numbers):
        if None in numbers:
            raise ValueError(
                f"{source} has the class {classes[numbers.index(None)]!r}, which is none of the model's "
                f"({', '.join(known)}); rename its folder, or remove it"
            )
        labels, classes = [int(numbers[label] or 0) for label in labels], sorted(known, key=lambda name: known[name])

    def pixels(image: Any) -> Tensor:
        if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
            grey = (np.asarray(image, dtype=np.float64) / 257).round().clip(0, 255)
            image = Image.fromarray(grey.astype(np.uint8))
        return transform(image.convert("RGB"))

    def batch(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        with naming(f"the images of {source} do not make a batch"):
            images = torch.stack([pixels(read(i)) for i in chosen])
        return images, torch.tensor([int(labels[i]) for i in chosen])

    return Examples(len(labels), batch, None if classes is None else tuple(classes), is_sorted(labels))
