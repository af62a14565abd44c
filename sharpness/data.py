"""Examples from files: tensors, folders and archives of images, MNIST's idx files, tables of text.

Nothing is downloaded, and no file is trusted to hold code.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .losses import mapped
from .models import ImageFormat, LoadedModel, load_state_dict, resolve

__all__ = [
    "DataChoice", "Examples", "TextColumns", "choose", "is_function", "load_batches", "load_examples", "named_labels",
    "read_table", "read_texts",
]  # fmt: skip

_IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
_TABLES = {".tsv", ".csv", ".jsonl"}


@dataclass(frozen=True)
class TextColumns:
    """Which columns of a table hold what.

    Attributes
    ----------
    text, pair, label : str
        Names from the header, or numbers from 0 where there is none; ``pair`` is the second text of a pair, if any.
    names : mapping of str to int
        What a label means to the model; empty: numbers, or the names in the model's own configuration.
    header : bool
        The first line of a .tsv or .csv file names the columns.
    length : int
        Longest input in tokens, if the tokenizer does not say less.
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    names: Mapping[str, int] = field(default_factory=dict)
    header: bool = True
    length: int = 128


@dataclass(frozen=True)
class Examples:
    """Examples that are read when asked for.

    Attributes
    ----------
    source : str
    size : int
    batch : callable
        From a list of positions to a batch, as :func:`sharpness.evaluate` takes it.
    classes : tuple of str or None
        Names of the classes, in the order of their numbers, where the files give them.
    """

    source: str
    size: int
    batch: Callable[[Sequence[int]], Any] = field(repr=False)
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return self.size


def choose(size: int, count: int | None = None, seed: int | None = None) -> list[int]:
    """Choose examples: the first ``count``, or with a seed as many at random without replacement, in random order.

    Raises
    ------
    ValueError
        There are not so many.
    """
    count = size if count is None else count
    if not 1 <= count <= size:
        raise ValueError(f"{count} examples were asked for, but there are {size}")
    return list(range(count)) if seed is None else np.random.default_rng(seed).permutation(size)[:count].tolist()


# -- images --------------------------------------------------------------------------------------------------------


def _image_module() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading images needs Pillow: pip install 'quotient-manifolds[images]'") from error
    return Image


def _pixels(image: Any, how: ImageFormat) -> Tensor:
    """Resize, crop and normalise: (channels, height, width)."""
    Image = _image_module()
    image = image.convert("L" if how.channels == 1 else "RGB")
    height, width = how.size
    if how.crop and image.size != (width, height):
        scale = max(width / image.size[0], height / image.size[1])
        wide, high = (max(s, round(scale * k)) for s, k in zip((width, height), image.size, strict=True))
        image = image.resize((wide, high), getattr(Image.Resampling, how.resample.upper()))
        left, top = (wide - width) // 2, (high - height) // 2
        image = image.crop((left, top, left + width, top + height))
    elif image.size != (width, height):
        image = image.resize((width, height), getattr(Image.Resampling, how.resample.upper()))
    x = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
    x = x.unsqueeze(-1) if x.dim() == 2 else x
    mean, std = (torch.tensor(v, dtype=torch.float32) for v in (how.mean, how.std))
    return ((x - mean) / std).permute(2, 0, 1)


def _read_image(name: str, data: bytes, how: ImageFormat) -> Tensor:
    Image = _image_module()
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return _pixels(image, how)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"the image {name} cannot be read ({error}); remove it or replace it") from error


def _of_classes(
    source: str, names: Sequence[str], folders: Sequence[str], read: Callable[[str], bytes], how: ImageFormat
) -> Examples:
    """Images named …/CLASS/NAME; folders are all class folders, to notice empty ones."""
    by_class: dict[str, list[str]] = {folder: [] for folder in folders}
    for name in names:
        by_class.setdefault(str(PurePosixPath(name).parent), []).append(name)
    empty = sorted(folder for folder, found in by_class.items() if not found)
    if empty:
        raise ValueError(f"the class folder {empty[0]} of {source} holds no image; fill it or remove it")
    if not by_class:
        raise ValueError(f"{source} has no class folders with images (CLASS/NAME.jpg or .png)")
    # Numbers of classes follow the sorted folder names, as in torchvision's ImageFolder.
    classes = sorted(by_class)
    items = [(name, label) for label, folder in enumerate(classes) for name in sorted(by_class[folder])]

    def batch(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = [_read_image(items[i][0], read(items[i][0]), how) for i in chosen]
        return torch.stack(images), torch.tensor([items[i][1] for i in chosen])

    return Examples(source, len(items), batch, tuple(PurePosixPath(c).name for c in classes))


def _image_folder(folder: Path, how: ImageFormat) -> Examples:
    classes = sorted(p for p in folder.iterdir() if p.is_dir())
    names = [f"{c.name}/{p.name}" for c in classes for p in c.iterdir() if p.suffix.lower() in _IMAGES]
    return _of_classes(str(folder), names, [c.name for c in classes], lambda n: (folder / n).read_bytes(), how)


def _image_archive(path: Path, inside: str, how: ImageFormat) -> Examples:
    """Class folders below ``inside`` of a zip."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} is no readable zip archive ({error})") from error
    root = inside.strip("/") + "/" if inside.strip("/") else ""
    below = [n for n in archive.namelist() if n.startswith(root)]
    names = [n for n in below if PurePosixPath(n).suffix.lower() in _IMAGES and n[len(root) :].count("/") == 1]
    folders = [n.rstrip("/") for n in below if n.endswith("/") and n[len(root) :].count("/") == 1]
    if not names:
        tops = sorted({"/".join(n.split("/")[: root.count("/") + 1]) for n in below if n.count("/") > root.count("/")})
        hint = f"; name a folder in it, as {path}:{tops[0]}" if tops else ""
        raise ValueError(f"{path} has no images CLASS/NAME below {root or 'its top'!r}{hint}")

    def read(name: str) -> bytes:
        try:
            return archive.read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{name} in {path} cannot be read ({error}); write the archive anew") from error

    return _of_classes(f"{path}:{root}" if root else str(path), names, folders, read, how)


def _idx(path: Path) -> np.ndarray[Any, Any]:
    """Read an idx file of bytes, plain or gzipped."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, dimensions = int.from_bytes(data[:2], "big"), data[2], data[3]
        shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
        if zero != 0 or kind != 8:
            raise ValueError("not an idx file of bytes")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is no readable idx file ({error})") from error


def _idx_images(path: Path, how: ImageFormat) -> Examples:
    """``…images-idx3-ubyte`` with its ``…labels-idx1-ubyte`` beside it."""
    labels_at = path.with_name(path.name.replace("images-idx3", "labels-idx1").replace("images.idx3", "labels.idx1"))
    if not labels_at.is_file() or labels_at == path:
        raise FileNotFoundError(f"{path} needs its labels beside it, in {labels_at.name}")
    images, labels = _idx(path), _idx(labels_at)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(
            f"{path} holds {images.shape} numbers and {labels_at.name} {labels.shape}: no images and labels"
        )
    Image = _image_module()

    def batch(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        found = [_pixels(Image.fromarray(images[i]), how) for i in chosen]
        return torch.stack(found), torch.tensor(labels[list(chosen)].astype(np.int64))

    return Examples(str(path), len(images), batch, tuple(str(i) for i in range(int(labels.max()) + 1)))


# -- text ----------------------------------------------------------------------------------------------------------


def read_table(path: str | os.PathLike[str], header: bool = True) -> Sequence[Mapping[str, str]]:
    """Read a ``.tsv`` (quotation marks are text), ``.csv`` or ``.jsonl`` table: its rows by column.

    Raises
    ------
    ValueError, OSError
        A file that is no such table, or not UTF-8.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line} of {path} is not UTF-8; convert the file") from error
    if path.suffix.lower() == ".jsonl":
        rows = []
        for number, line_text in enumerate(text.split("\n"), 1):  # splitlines() breaks at characters inside strings
            if line_text.strip():
                try:
                    row = json.loads(line_text)
                except ValueError as error:
                    raise ValueError(f"line {number} of {path} is no JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} of {path} is no JSON object")
                rows.append({str(k): v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
        return rows
    stream = io.StringIO(text, newline="")
    # Quotation marks are text in a .tsv.
    tabs = path.suffix.lower() == ".tsv"
    lines = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(stream)
    try:
        table = [line for line in lines if line]
    except csv.Error as error:
        raise ValueError(f"{path} is no readable table ({error})") from error
    names = table.pop(0) if header and table else [str(i) for i in range(max(map(len, table), default=0))]
    short = next((i for i, line in enumerate(table) if len(line) < len(names)), None)
    if short is not None:
        raise ValueError(f"row {short + 1} of {path} has {len(table[short])} columns, not {len(names)}")
    return [dict(zip(names, line, strict=False)) for line in table]


def _label(value: str, columns: TextColumns, known: Mapping[str, int], path: Path | str) -> int:
    names = {k.lower(): v for k, v in (columns.names or known).items()}
    if value.lower() in names:
        return names[value.lower()]
    if not columns.names and value.lstrip("-").isdigit():
        return int(value)
    raise ValueError(
        f"{path} has the label {value!r}, which stands for no class ({', '.join(names) or 'none are named'}); say what "
        "labels mean with --map NAME=NUMBER,…"
    )


def _texts(
    path: Path | str, rows: Sequence[Mapping[str, str]], columns: TextColumns, tokenizer: Any, known: Mapping[str, int]
) -> Examples:
    if tokenizer is None:
        raise ValueError(f"{path} is text, but the model has no tokenizer: put one into its folder (tokenizer.json)")
    if not rows:
        raise ValueError(f"{path} has no rows")
    wanted = [columns.text, columns.label, *([columns.pair] if columns.pair is not None else [])]
    for number, row in enumerate(rows, 1):
        missing = [c for c in wanted if c not in row]
        if missing:
            raise ValueError(f"row {number} of {path} has no column {missing[0]!r}; it has {', '.join(row)}")
    labels = [_label(row[columns.label].strip(), columns, known, path) for row in rows]
    length = min(columns.length, getattr(tokenizer, "model_max_length", columns.length))

    def batch(chosen: Sequence[int]) -> dict[str, Tensor]:
        texts = [[rows[i][columns.text] for i in chosen]]
        if columns.pair is not None:
            texts.append([rows[i][columns.pair] for i in chosen])
        coded = tokenizer(*texts, truncation=True, max_length=length, padding=True, return_tensors="pt")
        return {**coded, "labels": torch.tensor([labels[i] for i in chosen])}

    return Examples(str(path), len(rows), batch)


def _divided(source: str) -> tuple[Path, str]:
    """A path, and what is named inside it: ``archive.zip:inside``, ``folder:split`` of a folder of datasets."""
    before, _, inside = source.rpartition(":")
    if before and not Path(source).exists() and (before.endswith(".zip") or _is_datasets(Path(before))):
        return Path(before), inside
    return Path(source), ""


def is_function(source: str, base: Path = Path()) -> bool:
    """Whether a source is ``module:function`` rather than a file or something in one."""
    return ":" in source and not _divided(str(base / source))[1] and not (base / source).exists()


def _is_datasets(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _class_name(number: str, named: Sequence[str], source: str) -> str:
    if not 0 <= int(number) < len(named):
        raise ValueError(f"{source} has the label {number}, which is none of its classes; use a part with labels")
    return named[int(number)]


def _datasets_folder(
    folder: Path, split: str, images: ImageFormat | None, columns: TextColumns, tokenizer: Any, known: Mapping[str, int]
) -> Examples:
    """What ``datasets.save_to_disk`` wrote: texts, or images with their class."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{folder} is a folder of Hugging Face datasets: pip install datasets") from error
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"{folder} is no readable folder of datasets ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"{folder} has the parts {', '.join(found)}; name one as {folder}:{next(iter(found))}")
        found = found[split]
    source = f"{folder}:{split}" if split else str(folder)
    pictures = [name for name, kind in found.features.items() if isinstance(kind, datasets.Image)]
    if columns.label not in found.features:
        raise ValueError(f"{source} has no column {columns.label!r}; it has {', '.join(found.features)}")
    named = getattr(found.features[columns.label], "names", None)
    if not pictures:
        table = found.select_columns([c for c in (columns.text, columns.pair, columns.label) if c in found.features])
        rows = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in table]
        if named:
            rows = [{**row, columns.label: _class_name(row[columns.label], named, source)} for row in rows]
        own: dict[str, int] = {}
        if named and not columns.names and not {n.lower() for n in named} <= {n.lower() for n in known}:
            unnamed = all(n.isdigit() or n.upper().startswith("LABEL_") for n in known)
            if not unnamed:
                raise ValueError(
                    f"the classes of {source} ({', '.join(named)}) are not the model's ({', '.join(known)}); say what "
                    "labels mean with --map NAME=NUMBER,…"
                )
            own = {name: i for i, name in enumerate(named)}
        examples = _texts(source, rows, columns, tokenizer, own or known)
        return dataclasses.replace(examples, classes=tuple(own) or None)
    if images is None:
        raise ValueError(f"{source} holds images, but the model does not say what it expects; give size, mean, std")
    how = images

    def batch(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = found.select(list(chosen))
        pixels = [_pixels(row[pictures[0]], how) for row in rows]
        return torch.stack(pixels), torch.tensor([int(row[columns.label]) for row in rows])

    return Examples(source, len(found), batch, None if named is None else tuple(named))


# -- everything ----------------------------------------------------------------------------------------------------


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
    tokenizer : optional
        A tokenizer of transformers, for tables.
    labels : mapping of str to int, optional
        The model's own names of its classes, for tables that name labels.

    Returns
    -------
    Examples

    Raises
    ------
    ValueError, OSError, ImportError
        One sentence that names the file and the fix.
    """
    path, inside = _divided(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no data at {path}")
    if _is_datasets(path):
        return _datasets_folder(path, inside, images, text or TextColumns(), tokenizer, labels or {})
    name = path.name.removesuffix(".gz").lower()
    if path.is_dir() or path.suffix == ".zip" or name.endswith(("idx3-ubyte", ".idx3")):
        if images is None:
            raise ValueError(f"{source} holds images, but the model does not say what it expects; give size, mean, std")
        if path.is_dir():
            return _image_folder(path, images)
        return _image_archive(path, inside, images) if path.suffix == ".zip" else _idx_images(path, images)
    if path.suffix.lower() in _TABLES:
        columns = text or TextColumns()
        return _texts(path, read_table(path, columns.header), columns, tokenizer, labels or {})
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
    device : device
    **options
        Of :func:`load_examples`.

    Raises
    ------
    ValueError, OSError
        A file or function that cannot be read, tensors of unequal length.
    """
    if batch_size < 1 or (count is not None and count < 1):
        raise ValueError(f"the batch size and the number of batches must be at least 1, got {batch_size} and {count}")
    batches: Iterable[Any]
    if is_function(source):
        if examples is not None or seed is not None:
            raise ValueError(f"{source} is a function, which chooses its examples itself")
        batches = resolve(source)()
    else:
        found = load_examples(source, **options)
        chosen = choose(len(found), examples, seed)
        batches = (found.batch(chosen[i : i + batch_size]) for i in range(0, len(chosen), batch_size))
    result = [mapped(b, lambda t: t.to(device)) for b in itertools.islice(batches, count)]
    if not result:
        raise ValueError(f"{source} gave no batch")
    return result


def read_texts(path: str | os.PathLike[str], columns: Sequence[str], header: bool = True) -> list[str]:
    """Read all texts in some columns of a ``.tsv``, ``.csv`` or ``.jsonl`` table, row by row.

    Raises
    ------
    ValueError, OSError
        No such column; a file that cannot be read.
    """
    path = Path(path)
    found = []
    for number, row in enumerate(read_table(path, header), 1):
        missing = [c for c in columns if c not in row]
        if missing:
            raise ValueError(f"row {number} of {path} has no column {missing[0]!r}; it has {', '.join(row)}")
        found += [row[c] for c in columns]
    return found


def named_labels(text: str | None) -> dict[str, int]:
    """Read ``NAME=NUMBER,…``.

    Raises
    ------
    ValueError
        Anything else.
    """
    names = {}
    for entry in (text or "").split(","):
        if entry:
            name, _, number = entry.rpartition("=")
            if not name or not number.isdigit():
                raise ValueError(f"labels are mapped by NAME=NUMBER,…, and {entry!r} is none")
            names[name] = int(number)
    return names


@dataclass(frozen=True)
class DataChoice:
    """A data set, and which of its examples are taken how.

    Attributes
    ----------
    source : str
        See :func:`load_batches`.
    batch_size : int
    batches, examples, seed : int or None
        The first so many batches; the first so many examples, or as many at random.
    columns : TextColumns
    image_size : int or None
        Side of the images; by default, like mean and std, what the model says.
    mean, std : tuple of float or None
    """

    source: str
    batch_size: int = 256
    batches: int | None = None
    examples: int | None = None
    seed: int | None = None
    columns: TextColumns = TextColumns()
    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def load(self, loaded: LoadedModel, device: torch.device | str = "cpu") -> list[Any]:
        """Read the batches for a model."""
        return load_batches(
            self.source, batch_size=self.batch_size, count=self.batches, examples=self.examples, seed=self.seed,
            device=device, images=self.image_format(loaded.images), text=self.columns, tokenizer=loaded.tokenizer,
            labels=loaded.labels,
        )  # fmt: skip

    @property
    def is_text(self) -> bool:
        """Whether it holds text."""
        path, inside = _divided(self.source)
        if _is_datasets(path):
            about = list((path / inside).glob("**/dataset_info.json"))
            return not any('"Image"' in p.read_text(encoding="utf-8") for p in about)
        return path.suffix.lower() in _TABLES

    def image_format(self, known: ImageFormat | None) -> ImageFormat | None:
        """What is expected of images: what this choice says, else what the model says."""
        if self.image_size is None and self.mean is None and self.std is None:
            return known
        base = known or ImageFormat((224, 224), (0.5,), (0.5,))
        size = base.size if self.image_size is None else (self.image_size, self.image_size)
        mean, std = self.mean or base.mean, self.std or base.std
        channels = max(len(mean), len(std), 1 if known is None else known.channels)
        return ImageFormat(size, mean, std, channels, base.crop, base.resample)
