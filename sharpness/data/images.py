"""Images: folders and zips of class folders, idx files."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..extras import require_extra
from ..models import ImageFormat
from .examples import Examples, class_number, is_sorted

__all__ = ["idx_images", "image_archive", "image_examples", "image_folder", "labels_beside", "needed_format", "pixels"]

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def _image_module() -> Any:
    with require_extra("reading images needs Pillow", "images"):
        from PIL import Image
    return Image


def needed_format(known: ImageFormat | None, source: str) -> ImageFormat:
    """Return the image format that the model expects; raise a ValueError if it is not known."""
    if known is None:
        raise ValueError(
            f"{source} holds images, but the model does not say which format it expects; pass size, mean and std"
        )
    return known


def pixels(image: Any, how: ImageFormat) -> Tensor:
    """Resize, crop and normalise an image of Pillow: (channels, height, width), float32 on the CPU."""
    Image = _image_module()
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image, dtype=np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    image = image.convert("L" if how.channels == 1 else "RGB")
    height, width = how.size
    wide, high = width, height
    if how.crop:
        scale = max(width / image.width, height / image.height)
        scale = how.resize / min(image.size) if isinstance(how.resize, int) else scale
        # Rounded down, as torchvision and transformers do; the small number is for what is whole but for rounding.
        given = how.resize[::-1] if isinstance(how.resize, tuple) else [int(scale * k + 1e-6) for k in image.size]
        wide, high = max(width, given[0]), max(height, given[1])
    if image.size != (wide, high):
        image = image.resize((wide, high), getattr(Image.Resampling, how.resample.upper()))
    left, top = (wide - width) // 2, (high - height) // 2
    image = image.crop((left, top, left + width, top + height))
    x = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
    x = x.unsqueeze(-1) if x.dim() == 2 else x
    mean, std = (torch.tensor(v, dtype=torch.float32) for v in (how.mean, how.std))
    return ((x - mean) / std).permute(2, 0, 1)


def image_examples(
    source: str, read: Callable[[int], Tensor], labels: Sequence[int], classes: Sequence[str] | None,
    known: Mapping[str, int],
) -> Examples:  # fmt: skip
    """Return examples of images, which are read one at a time, with the numbers of their classes.

    ``labels`` are positions in ``classes``; where these are classes of the model (``known``), they have its numbers.
    """
    numbers = [class_number(name, known) for name in classes or ()]
    wrong = next((label for label in labels if label < 0), None)
    if wrong is not None:
        raise ValueError(f"{source} has the label {wrong}, which is no class; use a split with labels")
    if any(n is not None for n in numbers):
        if None in numbers:
            raise ValueError(
                f"{source} has the class {(classes or ())[numbers.index(None)]!r}, which is none of the model's "
                f"({', '.join(known)}); rename its folder, or remove it"
            )
        labels, classes = [int(numbers[label] or 0) for label in labels], sorted(known, key=lambda name: known[name])

    def batch(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.stack([read(i) for i in chosen]), torch.tensor([int(labels[i]) for i in chosen])

    return Examples(len(labels), batch, None if classes is None else tuple(classes), is_sorted(labels))


def _read_image(name: str, data: bytes, how: ImageFormat) -> Tensor:
    Image = _image_module()
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return pixels(image, how)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = "it is no image that Pillow knows" if isinstance(error, Image.UnidentifiedImageError) else error
        raise ValueError(f"the image {name} cannot be read ({why}); remove it or replace it") from error


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _of_classes(
    source: str, names: Sequence[str], folders: Sequence[str], read: Callable[[str], bytes], how: ImageFormat,
    known: Mapping[str, int],
) -> Examples:  # fmt: skip
    """Collect images named CLASS/NAME; names are of all files, and folders all class folders, to notice empty ones."""
    images = [n for n in names if n.count("/") == 1 and PurePosixPath(n).suffix.lower() in _IMAGES and not _hidden(n)]
    by_class: dict[str, list[str]] = {folder: [] for folder in folders if not _hidden(folder)}
    for name in images:
        by_class.setdefault(name.split("/")[0], []).append(name)
    empty = sorted(folder for folder, found in by_class.items() if not found)
    if empty:
        raise ValueError(f"the class folder {empty[0]} of {source} holds no image; fill it or remove it")
    if not by_class:
        raise ValueError(f"{source} has no class folders with images (CLASS/NAME.jpg or .png)")
    # Unless the model says otherwise, classes are numbered by sorted folder names, as in torchvision's ImageFolder; but
    # where all names are numbers, 2 comes before 10.
    classes = sorted(by_class, key=int if all(map(str.isdecimal, by_class)) else None)
    items = [(name, label) for label, folder in enumerate(classes) for name in sorted(by_class[folder])]

    found = image_examples(
        source,
        lambda i: _read_image(items[i][0], read(items[i][0]), how),
        [label for _, label in items],
        classes,
        known,
    )
    taken = set(images)
    others = sorted(name for name in names if name not in taken)
    if not others:
        return replace(found, sorted=True)
    remark = (
        f"{len(others)} of the {len(names)} files of {source} are left out, such as {others[0]}: they are hidden, not "
        "directly in the folder of a class, or no images by their names"
    )
    return replace(found, sorted=True, remarks=(remark,))


def image_folder(folder: Path, how: ImageFormat, known: Mapping[str, int]) -> Examples:
    """Open a folder of class folders."""
    inside = list(folder.iterdir())
    classes = [p.name for p in inside if p.is_dir()]
    names = [p.name for p in inside if not p.is_dir()]
    for c in classes:
        for place, _, files in os.walk(folder / c):
            names += [f"{Path(place).relative_to(folder).as_posix()}/{name}" for name in files]
    return _of_classes(str(folder), names, classes, lambda n: (folder / n).read_bytes(), how, known)


def image_archive(path: Path, inside: str, how: ImageFormat, known: Mapping[str, int]) -> Examples:
    """Open class folders below ``inside`` of a zip."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} is not a readable zip archive ({error})") from error
    root = inside.strip("/") + "/" if inside.strip("/") else ""
    below = [n[len(root) :] for n in archive.namelist() if n.startswith(root) and n != root]
    names = [n for n in below if not n.endswith("/")]
    folders = [n.rstrip("/") for n in below if n.endswith("/") and n.count("/") == 1]
    if not any(n.count("/") == 1 and PurePosixPath(n).suffix.lower() in _IMAGES and not _hidden(n) for n in names):
        tops = sorted({n.split("/")[0] for n in below if "/" in n and not _hidden(n)})
        hint = f"; name a folder in it, as {path}:{root}{tops[0]}" if tops else ""
        raise ValueError(f"{path} has no images CLASS/NAME below {root or 'its top'!r}{hint}")

    def read(name: str) -> bytes:
        try:
            return archive.read(root + name)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last for passwords, methods
            raise ValueError(f"{root}{name} in {path} cannot be read ({error}); create the archive again") from error

    return _of_classes(f"{path}:{root}" if root else str(path), names, folders, read, how, known)


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
        raise ValueError(f"{path} is not a readable idx file ({error})") from error


def labels_beside(path: Path) -> Path:
    """Return the path of the labels of an idx file of images; the path itself for another file."""
    return path.with_name(path.name.replace("images-idx3", "labels-idx1").replace("images.idx3", "labels.idx1"))


def idx_images(path: Path, how: ImageFormat) -> Examples:
    """Open ``…images-idx3-ubyte`` with its ``…labels-idx1-ubyte`` beside it."""
    labels_at = labels_beside(path)
    if not labels_at.is_file() or labels_at == path:
        raise FileNotFoundError(f"{path} needs its labels beside it, in {labels_at.name}")
    images, labels = _idx(path), _idx(labels_at)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(
            f"{path} holds {images.shape} numbers and {labels_at.name} {labels.shape}: these are not images and labels"
        )
    Image = _image_module()

    classes = [str(i) for i in range(int(labels.max()) + 1)]
    return image_examples(str(path), lambda i: pixels(Image.fromarray(images[i]), how), labels.tolist(), classes, {})
