"""Data sets: images, text and tensors, from files and folders, in batches."""

from __future__ import annotations

import functools
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quotient_manifolds.hub import is_name

from .batches import IGNORED
from .checkpoints import load_state_dict
from .devices import checked_device, move
from .errors import called, naming, require_extra
from .files import read_table, strings
from .hub_data import check_source, fetch_data, is_function
from .models import LoadedModel
from .options import Batches, DataChoice

__all__ = ["DataChoice"]

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_TABLES = {".csv", ".jsonl", ".parquet", ".tsv"}
_TENSORS = {"", ".safetensors", ".pt", ".pth", ".bin", ".ckpt"}


@dataclass(frozen=True)
class Examples:
    """A source of examples: its size, and ``batch``, from positions to a batch on the CPU.

    ``classes`` are the numbers of the classes by name, as far as they have names; ``sorted`` says that the examples
    stand class by class, see :func:`is_sorted`; ``remarks`` say what a listing left out.
    """

    size: int
    batch: Callable[[Sequence[int]], Any] = field(repr=False)
    classes: Mapping[str, int] = field(default_factory=dict)
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


def batches_of(choice: DataChoice, loaded: LoadedModel, device: torch.device | str) -> Batches:
    """Read the batches of a choice for a model, see :meth:`DataChoice.load`."""
    device = checked_device(device)
    remarks: tuple[str, ...] = ()
    if is_function(choice.source):
        plain = DataChoice(choice.source, batches=choice.batches, batch_size=choice.batch_size)
        if given := [f.name for f in fields(choice) if getattr(choice, f.name) != getattr(plain, f.name)]:
            raise ValueError(f"{choice.source} is a function, which makes its batches itself; omit {', '.join(given)}")
        made = called(choice.source)
        with naming(f"{choice.source} failed"):  # if it makes one batch after the other
            batches = iter(list(itertools.islice(made, choice.batches)))
    else:
        examples = load_examples(choice, loaded)
        remarks = examples.remarks
        chosen = examples.choose(choice.num_examples, choice.subset_seed)
        chosen = chosen[: None if choice.batches is None else choice.batches * choice.batch_size]
        parts = np.array_split(chosen, -(-len(chosen) // choice.batch_size))
        batches = (examples.batch(part.tolist()) for part in parts)
    result = Batches(move(b, device) for b in itertools.islice(batches, choice.batches))
    if not result:
        raise ValueError(f"{choice.source} gave no batch")
    result.remarks = remarks
    return result


# -- sources -----------------------------------------------------------------------------------------------------------


def load_examples(choice: DataChoice, loaded: LoadedModel) -> Examples:
    """Open the source of a choice that is not a function, for a model; examples are read on demand."""
    path = Path(choice.source)
    check_source(choice.source)
    if is_name(choice.source, 4):
        return _of_hub(choice, loaded)
    kind = path.suffix.lower()
    if kind == ".parquet" or any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _dataset(choice, loaded)
    if path.is_dir():
        return _image_folder(choice, loaded)
    if kind in _TABLES:
        return _texts(choice, read_table(path, choice.header), None, loaded)
    if kind in _TENSORS:
        return _tensors(path)
    raise ValueError(f"{path} is not data by its name: no folder, nor one of {' '.join(sorted(_TABLES | _TENSORS))}")


def is_sorted(labels: Sequence[float]) -> bool:
    """Return whether examples stand class by class, as in a folder of classes: the first ones are of one class."""
    runs = [label for label, _ in itertools.groupby(labels)]
    return 1 < len(set(runs)) == len(runs) < len(labels)


def _tensors(path: Path) -> Examples:
    named = load_state_dict(path)
    lengths = {name: len(t) if t.dim() else 0 for name, t in named.items()}
    if len(set(lengths.values())) > 1 or not all(t.dim() for t in named.values()):
        raise ValueError(f"{path}: the tensors have unequal numbers of examples, or none, {lengths}")

    def batch(chosen: Sequence[int]) -> Any:
        part = {name: t[list(chosen)] for name, t in named.items()}
        return (part["x"], part["y"]) if set(part) == {"x", "y"} else part

    labels = named.get("y", named.get("labels"))
    by_class = labels is not None and labels.numel() == len(labels) and is_sorted(labels.flatten().tolist())
    return Examples(min(lengths.values()), batch, sorted=by_class)


def _dataset(choice: DataChoice, loaded: LoadedModel) -> Examples:
    """Open texts, or images with their class, that ``datasets`` reads: a folder that it saved, or a parquet file."""
    source = choice.source
    with require_extra(f"reading {source} needs datasets", "datasets"):
        import datasets
        from pyarrow import parquet
    with naming(f"{source} is not readable by datasets"):
        is_file = Path(source).is_file()
        data = datasets.Dataset(parquet.read_table(source)) if is_file else datasets.load_from_disk(source)
    if isinstance(data, datasets.DatasetDict):
        raise ValueError(f"{source} has the splits {', '.join(data)}; name one as {Path(source, next(iter(data)))}")
    names: Any = getattr(data.features.get(choice.label), "names", None)
    return _rows(choice, data, names, loaded)


def _of_hub(choice: DataChoice, loaded: LoadedModel) -> Examples:
    """Open a split of a data set on the Hub: tables of text as those on disk, Parquet by ``datasets``."""
    found = fetch_data(choice.source)
    names = found.class_names(choice.label)
    if found.files[0].suffix.lower() != ".parquet":
        rows = [row for path in found.files for row in read_table(path, choice.header)]
        return _texts(choice, _named(rows, choice.label, names), names, loaded)
    import datasets
    from pyarrow import parquet

    with naming(f"{choice.source} is not readable by datasets"):
        data = datasets.concatenate_datasets([datasets.Dataset(parquet.read_table(path)) for path in found.files])
    return _rows(choice, data, getattr(data.features.get(choice.label), "names", names), loaded)


def _named(rows: list[dict[str, str]], label: str, names: Sequence[str] | None) -> list[dict[str, str]]:
    """Put names of classes in the place of their numbers."""
    for row in rows if names else ():
        number = row.get(label, "-1")
        if number.isdecimal() and int(number) < len(names or ()):
            row[label] = (names or ())[int(number)]
    return rows


def _rows(choice: DataChoice, data: Any, names: list[str] | None, loaded: LoadedModel) -> Examples:
    """Open texts, or images with their class, of a data set in memory."""
    import datasets

    source = choice.source
    wanted = [c for c in (choice.text, choice.pair, choice.label) if c in data.features]
    rows = _named([strings(row) for row in data.select_columns(wanted).to_list()], choice.label, names)
    pictures = [name for name, kind in data.features.items() if isinstance(kind, datasets.Image)]
    if not pictures:
        return _texts(choice, rows, names, loaded)
    if choice.label not in data.features:
        raise ValueError(f"{source} has no column {choice.label!r}; it has {', '.join(data.features)}")

    def read(row: int) -> Any:
        with naming(f"the image in row {row} of {source} cannot be read"):
            return data[row][pictures[0]]

    return _images(choice, read, [row.get(choice.label, "") for row in rows], names, loaded)


def class_number(name: str, known: Mapping[str, int]) -> int | None:
    """Return the number of a class by its name: as it is or, if that is unique, whatever the case; None if unknown."""
    if name in known:
        return known[name]
    alike = [number for other, number in known.items() if other.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None


def label_numbers(
    choice: DataChoice, labels: Sequence[str], names: Sequence[str] | None, loaded: LoadedModel
) -> tuple[list[int] | list[float], Mapping[str, int]]:
    """Return the numbers of labels, and those of all classes by name; for a regression, the numbers that labels are.

    The number of a label is the first of these that there is:

    1. what ``label_map``, which must know all labels, says: a number, or the name of a class of the model;
    2. the number of the model's class of this name;
    3. its place among ``names``, if the data name all their classes: ImageNet's order for WordNet ids; else the given
       order, if the model does not name its classes and has as many;
    4. itself, where the data do not name their classes: ``3`` or ``3.0``; ``true`` is 1 and ``false`` 0.
    """
    count, known = loaded.num_classes, loaded.labels
    if choice.label_map:
        known = {name: _mapped(name, to, loaded.labels) for name, to in choice.label_map.items()}
    elif names and all(class_number(name, known) is None for name in names):
        as_many, wordnet = count in (None, len(names)), all(re.fullmatch(r"n\d{8}", name) for name in names)
        if wordnet and not as_many:
            known = _imagenet(choice.source, count)
        elif wordnet or all(name.isdigit() or name.upper().startswith("LABEL_") for name in known):
            if not as_many:
                raise ValueError(
                    f"the number of classes is {len(names)} in {choice.source}, such as {names[0]!r}, but {count} in "
                    "the model, which does not name them; say which they are with --label-map NAME=NUMBER,…"
                )
            known = {name: i for i, name in enumerate(names)}

    @functools.cache
    def number_of(label: str) -> int | float:
        whole = re.fullmatch(r"0*(\d{1,9})(\.0*)?", label, re.ASCII)
        plain = whole[1] if whole else {"false": "0", "true": "1"}.get(label.lower(), label)
        if count == 1 and not choice.label_map:
            with naming(f"{choice.source} has the label {label!r}, but the model predicts a number"):
                return float(label)
        number = class_number(label, known)
        number = class_number(plain, known) if number is None else number
        if number is None and plain.isdecimal() and not (choice.label_map or names):
            number = int(plain)
        if number is None:
            raise ValueError(
                f"{choice.source} has the label {label!r}, which is not the name of a class ({_listed(known)}); say "
                "what labels mean with --label-map NAME=NUMBER,…, rename it, or use a split with labels"
            )
        if count == 1:
            return float(number)
        if number < 0 or (count is not None and number >= count):
            raise ValueError(
                f"{choice.source} has the label {label!r}, which is class {number}, but the classes of the model are 0 "
                f"to {'…' if count is None else count - 1}; say what labels mean with --label-map NAME=NUMBER,…"
            )
        return number

    return [number_of(label) for label in labels], known


def _listed(known: Mapping[str, int]) -> str:
    return textwrap.shorten(", ".join(known), 200, placeholder=" …") or "none are named"


def _mapped(name: str, to: int | str, known: Mapping[str, int]) -> int:
    number = class_number(to, known) if isinstance(to, str) else to
    if number is None:
        raise ValueError(f"--label-map {name}={to}: the model has no class {to!r} ({_listed(known)}); give its number")
    return number


def _imagenet(source: str, count: int | None) -> dict[str, int]:
    """Return the classes of ImageNet by WordNet id, for models of all of them."""
    with require_extra(f"{source} has some of ImageNet's classes, whose numbers timm knows", "timm"):
        from timm.data import ImageNetInfo, infer_imagenet_subset
    subset = infer_imagenet_subset({"num_classes": count})
    return {} if subset is None else {name: i for i, name in enumerate(ImageNetInfo(subset).label_names())}


# -- images ------------------------------------------------------------------------------------------------------------


def _image_folder(choice: DataChoice, loaded: LoadedModel) -> Examples:
    """Open a folder of class folders; hidden ones are no classes.

    Unless the model or ``label_map`` says otherwise, folders whose names are all numbers are the classes of these
    numbers, and others are numbered in the order of their names, as in torchvision's ImageFolder.
    """
    folder = Path(choice.source)
    names = [p.name for p in folder.iterdir() if p.is_dir() and not _is_hidden(p)]
    numbered = all(map(str.isdecimal, names))
    names = sorted(names, key=int if numbered else None)
    paths: list[Path] = []
    for name in names:
        inside = sorted(p for p in (folder / name).iterdir() if p.suffix.lower() in _IMAGES and not _is_hidden(p))
        if not inside:
            raise ValueError(f"the class folder {name} of {folder} holds no image; fill it or remove it")
        paths += inside
    if not paths:
        raise ValueError(f"{folder} has no class folders with images (CLASS/NAME.jpg or .png)")

    def read(i: int) -> Any:
        from PIL import Image

        with naming(f"the image {paths[i].relative_to(folder).as_posix()} cannot be read; remove it or replace it"):
            with Image.open(paths[i]) as image:
                image.load()
            return image

    others = sorted({p for p in folder.rglob("*") if p.is_file()} - {*paths})
    remarks: tuple[str, ...] = ()
    if others:
        remarks = (
            f"{len(others)} of the {len(paths) + len(others)} files of {folder} are left out, such as "
            f"{others[0].relative_to(folder).as_posix()}: they are hidden, not directly in the folder of a class, or "
            "no images by their names",
        )
    if not (numbered or choice.label_map or loaded.labels or loaded.num_classes):
        remarks += (
            f"the folders of {folder} are taken for the classes 0 to {len(names) - 1} in the order of their names; if "
            "the model numbers them otherwise, say how with --label-map NAME=NUMBER,…",
        )
    labels, own = [path.parent.name for path in paths], {name: int(name) for name in names if numbered}
    examples = _images(choice, read, labels, None if numbered else names, loaded)
    return replace(examples, classes=examples.classes or own, sorted=True, remarks=remarks)


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name == "__MACOSX"


def _images(
    choice: DataChoice, read: Callable[[int], Any], labels: list[str], names: list[str] | None, loaded: LoadedModel
) -> Examples:
    """Return examples of images, from positions to Pillow's images, with their classes."""
    with require_extra("reading images needs Pillow", "images"):
        from PIL import Image, ImageOps
    transform = loaded.transform
    if transform is None:
        raise ValueError(
            f"{choice.source} holds images, but the model does not say how to prepare them; give it an "
            "image_transform, a function from an image of Pillow to a tensor (channels, height, width)"
        )
    numbers, classes = label_numbers(choice, labels, names, loaded)

    def pixels(image: Any) -> Tensor:
        image = ImageOps.exif_transpose(image)  # as datasets turns images that it decodes
        if image.mode.startswith(("I", "F")):  # 16 bits or floats, which Pillow would cut off at 255
            grey, most = np.asarray(image, dtype=np.float64), 65535 if image.mode.startswith("I") else 1
            if not (grey.min() >= 0 and grey.max() <= most):
                raise ValueError(
                    f"pixels go from {grey.min():g} to {grey.max():g}, not within 0 to {most}, as in grey images of "
                    f"{'16 bits' if most > 1 else 'floats'}; save them with 8 bits"
                )
            image = Image.fromarray((grey / most * 255).round().astype(np.uint8))
        return transform(image.convert("RGB"))

    def batch(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        with naming(f"the images of {choice.source} do not make a batch"):
            images = torch.stack([pixels(read(i)) for i in chosen])
        return images, torch.tensor([numbers[i] for i in chosen])

    return Examples(len(labels), batch, classes, is_sorted(numbers))


# -- texts -------------------------------------------------------------------------------------------------------------


def _texts(
    choice: DataChoice, rows: Sequence[Mapping[str, str]], names: Sequence[str] | None, loaded: LoadedModel
) -> Examples:
    """Return examples of texts, with the class of each, or all its tokens as labels for a model that predicts them."""
    source, tokenizer, predicts = choice.source, loaded.tokenizer, loaded.predicts_tokens
    if tokenizer is None:
        raise ValueError(f"{source} is text, but the model has no tokenizer: put one into its folder (tokenizer.json)")
    if not rows:
        raise ValueError(f"{source} has no rows")
    texts = [choice.text] if choice.pair is None else [choice.text, choice.pair]
    for number, row in enumerate(rows, 1):
        for column in texts if predicts else [*texts, choice.label]:
            if column not in row:
                raise ValueError(f"row {number} of {source} has no column {column!r}; it has {', '.join(row)}")
    labels = [] if predicts else [row[choice.label].strip() for row in rows]
    numbers, classes = label_numbers(choice, labels, None if predicts else names, loaded)

    def batch(chosen: Sequence[int]) -> dict[str, Tensor]:
        with naming(f"the tokenizer for {source} does not work"):
            length = min(choice.max_length, int(getattr(tokenizer, "model_max_length", choice.max_length)))
            given = [[_beginning(rows[i][column], tokenizer, length) for i in chosen] for column in texts]
            coded = tokenizer(*given, truncation=True, max_length=length, padding=True, return_tensors="pt")
            if (found := coded["input_ids"].shape[1]) > length:
                raise ValueError(f"it does not cut {found} tokens to {length}; choose a larger --max-length")
            if predicts:
                return {**coded, "labels": coded["input_ids"].masked_fill(coded["attention_mask"] == 0, IGNORED)}
        return {**coded, "labels": torch.tensor([numbers[i] for i in chosen])}

    return Examples(len(rows), batch, classes, is_sorted(numbers))


def _beginning(text: str, tokenizer: Any, length: int) -> str:
    """Cut a long text well behind its first tokens: of a pair, tokenizers lists each rest with each of the other's."""
    if len(text) < 50 * length or not getattr(tokenizer, "is_fast", False) or tokenizer.truncation_side != "right":
        return text
    first = {"truncation": True, "max_length": 2 * length, "add_special_tokens": False}
    spans = tokenizer(text, return_offsets_mapping=True, **first)["offset_mapping"]
    return text[: spans[-1][1]] if len(spans) == 2 * length else text
