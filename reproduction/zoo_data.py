"""Test sets of the zoos: natural-language inference as tables, and corrupted test images of CIFAR-10."""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from sharpness.files import read_table, write_text

__all__ = ["LABELS", "corrupt", "corrupted_images", "inference_tables", "normalised"]

_Pixels = npt.NDArray[np.uint8]
#: Names of the classes; the training table spells one of them differently.
LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2, "contradictory": 2}


def normalised(text: str) -> str:
    """Normalise a text so that tokenised and plain spellings agree, as far as BERT's tokenizer distinguishes them.

    Examples
    --------
    >>> normalised("They do n't ; I don 't ."), normalised("They don't; I don't.")
    ("they don't ; i don't .", "they don't; i don't.")
    """
    text = re.sub(r" ?n ?'t\b", "n't", " ".join(text.lower().split()))
    return text.replace("``", '"').replace("''", '"').replace("`", "'")


def inference_tables(data: Path, out: Path, *, train: int = 3000, seed: int = 0) -> tuple[Path, Path, Path]:
    """Write ``train.jsonl``, ``test.jsonl`` and ``shift.jsonl``, unless they are there.

    Parameters
    ----------
    data : Path
        Folder with ``train15k/multinli.train.en.tsv`` (15,001 pairs of MultiNLI, tokenised), ``dev_matched/*.txt`` (its
        9,815 matched pairs) and ``hard/MNLIMismatchedHardWithHardTest`` (4,530 mismatched pairs that a classifier of
        the hypothesis alone gets wrong, Gururangan et al. 2018).
    out : Path
        Folder for the tables, which have the columns premise, hypothesis, label. Pairs are sorted by length, so that
        batches contain little padding.
    train : int
        Number of training pairs, drawn at random from those that are not tested.
    seed : int
        Seed of that draw.

    Returns
    -------
    tuple of Path
        Paths of the three tables.
    """
    paths = out / "train.jsonl", out / "test.jsonl", out / "shift.jsonl"
    if all(p.is_file() for p in paths):
        return paths
    test = [
        (r["premise"], r["hypothesis"], r["gold_label"]) for p in (data / "dev_matched").glob("*.txt") for r in _tsv(p)
    ]
    hard = data / "hard" / "MNLIMismatchedHardWithHardTest"
    columns = [(hard / f"{name}.test").read_text(encoding="utf-8").split("\n") for name in ("s1", "s2", "labels")]
    shift = [row for row in zip(*columns, strict=False) if row[2]]
    known = {_key(*row[:2]) for row in (*test, *shift)}
    rows = [(r["premise"], r["hypo"], r["label"]) for r in read_table(data / "train15k" / "multinli.train.en.tsv")]
    rows = [row for row in rows if row[2] in LABELS and _key(*row[:2]) not in known]
    chosen = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:train]]
    for path, found in zip(paths, (chosen, test, shift), strict=True):
        _write_pairs(path, found)
    return paths


def _tsv(path: Path) -> list[dict[str, str]]:
    """Read a table whose quotation marks are text, whatever its suffix."""
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")), delimiter="\t", quoting=csv.QUOTE_NONE))


def _key(premise: str, hypothesis: str) -> tuple[str, str]:
    first, second = (re.sub(r"\W", "", normalised(t)) for t in (premise, hypothesis))
    return first, second


def _write_pairs(path: Path, rows: Iterable[tuple[str, ...]]) -> None:
    found = [{"premise": normalised(a), "hypothesis": normalised(b), "label": label} for a, b, label in rows]
    found.sort(key=lambda row: len(row["premise"]) + len(row["hypothesis"]))
    write_text(path, "".join(json.dumps(row) + "\n" for row in found))


def corrupt(pixels: _Pixels, kind: int, rng: np.random.Generator) -> _Pixels:
    """Corrupt an image, (height, width, 3), in one of five ways, after Hendrycks and Dietterich 2019.

    Parameters
    ----------
    pixels : array of uint8
    kind : int
        0: Gaussian noise; 1: blur; 2: lower contrast; 3: brighter; 4: coarse pixels.
    rng : numpy.random.Generator
        Generator of the noise.

    Returns
    -------
    array of uint8
    """
    image = Image.fromarray(pixels)
    if kind == 0:
        return np.clip(pixels + rng.normal(0, 20, pixels.shape), 0, 255).astype(np.uint8)
    if kind == 1:
        return np.asarray(image.filter(ImageFilter.GaussianBlur(0.9)))
    if kind == 2:
        middle = pixels.mean(axis=(0, 1))
        return np.clip(middle + 0.4 * (pixels - middle), 0, 255).astype(np.uint8)
    if kind == 3:
        return np.clip(pixels + 60.0, 0, 255).astype(np.uint8)
    small = image.resize((image.width * 5 // 8, image.height * 5 // 8), Image.Resampling.BOX)
    return np.asarray(small.resize(image.size, Image.Resampling.NEAREST))


def corrupted_images(source: Path, folder: Path) -> Path:
    """Write the images of a folder of class folders, each corrupted in one of five ways in turn, unless it exists.

    Parameters
    ----------
    source, folder : Path
        Folder of class folders, and the new one.

    Returns
    -------
    Path
        ``folder``.
    """
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(prefix=".sharpness-", dir=folder.parent) as place:
        own = Path(place) / folder.name
        paths = sorted((p for p in source.rglob("*") if p.is_file()), key=Path.as_posix)
        for number, path in enumerate(paths):
            pixels = np.asarray(Image.open(path).convert("RGB"))
            changed = (own / path.relative_to(source)).with_suffix(".png")
            changed.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(corrupt(pixels, number % 5, np.random.default_rng(number))).save(changed)
        own.rename(folder)
    return folder
