"""Collections: one model, fine-tuned many times with random recipes or seeds, to compare sharpness and generalisation.

A collection is a folder with one checkpoint per model, its recipe and data in a JSON file beside it, and a
configuration for ``sharpness sweep``. A model's JSON file is written last; a model that has one is not trained again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from quotient_manifolds.networks import quiet
from sharpness.data import DataChoice, load_examples
from sharpness.errors import naming
from sharpness.evaluation import progress_bar
from sharpness.files import atomic_write, check_folder, write_json
from sharpness.models import LoadedModel, load
from sharpness.study.plan import shard_of

from .finetune import TrainingImages, TrainingTexts, finetune, scores_of
from .folders import atomic_write_folder
from .recipes import Recipe, random_recipe
from .vision import ImageTransform

__all__ = ["train_collection"]


def train_collection(
    model: str, data: DataChoice, folder: str | os.PathLike[str], *, checkpoint: str | None = None, models: int = 24,
    recipes: Sequence[Recipe] | None = None, test: DataChoice | None = None, points: int = 256,
    first: int = 0, shard: str = "1/1", autocast: bool = False, half: bool = False, device: str = "cpu",
    progress: bool = True,
) -> Path:  # fmt: skip
    """Train a model many times; a call keeps the models that an interrupted one has finished.

    Parameters
    ----------
    model, checkpoint : str
        As for :func:`sharpness.models.load`. A transformers folder for text gets a new head for the labels.
    data : DataChoice
        Training data of every model. Images are ordered by class, so use a seed to choose a part of them.
    folder
        For ``model_00.safetensors`` …, or folders ``model_00`` … of transformers models, with ``model_00.json`` beside
        them; for networks trained from scratch their starts, ``start_00.safetensors`` …; and ``sweep.json``, which
        ``sharpness sweep`` takes, unless that is there already.
    models, recipes : int, sequence of Recipe
        Number of models, and one recipe per model; by default :func:`random_recipe` of the seeds 0 ….
    test : DataChoice, optional
        Written into ``sweep.json``.
    points : int
        Training examples that ``sweep.json`` measures on.
    first : int
        Number of the first model to train; those before it are left to another call, or folder.
    shard : (int, int)
        (i, n): train the i-th of n parts.
    autocast : bool
        Train with passes in bfloat16, see :func:`reproduction.finetune.finetune`.
    half : bool
        Save checkpoints in half precision, at half the size; they are loaded in single precision and then tested.
    device, progress : str, bool
        Device for training, and whether to show a progress bar.

    Returns
    -------
    Path
        Of ``sweep.json``.

    Raises
    ------
    ValueError, OSError
        The model or the data cannot be used, or the folder has models of other recipes or data, or was made for other
        test data.

    Examples
    --------
    Two vision transformers that differ in their seed, on eight images:

    >>> import pathlib, tempfile
    >>> from PIL import Image
    >>> recipes = [Recipe(epochs=1, batch=8, seed=seed) for seed in range(2)]
    >>> with tempfile.TemporaryDirectory() as place:
    ...     for name, grey in (("black", 0), ("white", 255)):
    ...         (images := pathlib.Path(place, "images", name)).mkdir(parents=True)
    ...         for i in range(4):
    ...             Image.new("L", (32, 32), grey).save(images / f"{i}.png")
    ...     network, data = "reproduction.vision:vit_cifar10", DataChoice(f"{place}/images")
    ...     config = train_collection(network, data, f"{place}/collection", recipes=recipes, progress=False)
    ...     print(*sorted(path.name for path in config.parent.iterdir()))
    model_00.json model_00.safetensors model_01.json model_01.safetensors start_00.safetensors start_01.safetensors
    sweep.json
    """
    folder = check_folder(folder)
    loaded = load(model, checkpoint, untrained=True)
    if recipes is None:
        recipes = [random_recipe(seed, images=not holds_texts(data.source)) for seed in range(models)]
    if not 0 <= first < len(recipes):
        raise ValueError(f"there are the models 0 to {len(recipes) - 1}, so the first cannot be {first}")
    about = {"model": model, "checkpoint": checkpoint, "data": asdict(data), "autocast": autocast}
    records: list[dict[str, Any]] = [{"recipe": asdict(r), **about} for r in recipes]
    numbers = shard_of(range(first, len(recipes)), shard)
    todo = [i for i in numbers if not _is_done(folder / f"model_{i:02d}.json", records[i])]
    config = folder / "sweep.json"
    written = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if test is not None and written and _unnamed(written.get("test", {})) != _unnamed(_plain(test)):
        raise ValueError(f"{config} was written for other test data; delete it, or use another folder")
    if not todo and config.is_file():
        return config
    training, names = _training(replace(loaded, num_classes=None), data)  # a head is made for the data's classes
    if test is not None:  # that it has another column must not be told after the training
        load_examples(test, replace(loaded, labels=names, num_classes=None))
    if not holds_texts(data.source):  # whose folders hold the names of classes
        data = replace(data, label_map=data.label_map or names)
        test = test and replace(test, label_map=test.label_map or names)
    folder.mkdir(parents=True, exist_ok=True)
    if not config.is_file():
        write_json(config, _config(loaded, model, checkpoint, data, test, min(points, len(training.labels))))
    with progress_bar(len(todo), "models", "model", progress=progress) as shown:
        for i in todo:
            start = time.perf_counter()
            torch.manual_seed(recipes[i].seed)
            own = holds_texts(data.source)
            net = _classifier(loaded, names) if own else load(model, checkpoint, untrained=True).model
            scale_(net, recipes[i].init_scale)
            if checkpoint is None and loaded.folder is None:
                _save(net, loaded, folder / f"start_{i:02d}", half)
            losses = finetune(net, training, recipes[i], autocast=autocast, device=device)
            last = losses[-max(1, len(losses) // recipes[i].epochs) :]
            _save(net.to("cpu"), loaded, folder / f"model_{i:02d}", half)
            seconds = time.perf_counter() - start
            record = {**records[i], "last_epoch_loss": fmean(last), "seconds": seconds}
            write_json(folder / f"model_{i:02d}.json", record | {"commit": commit(), "device": device})
            shown.update()
    return config


@torch.no_grad()
def scale_(net: nn.Module, factor: float) -> None:
    """Multiply every matrix and every kernel of a convolution."""
    for p in net.parameters():
        if p.dim() in (2, 4):
            p.mul_(factor)


def commit() -> str | None:
    """Return the commit of this code, or None outside a checkout or without git."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            encoding="utf-8",
        )
    except OSError:  # no git
        return None
    return found.stdout.strip() or None


def _is_done(path: Path, record: Mapping[str, Any]) -> bool:
    """Return whether a model is there, with its record, which must be the same."""
    if not path.is_file() or not (path.with_suffix("").is_dir() or path.with_suffix(".safetensors").is_file()):
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    for key, value in json.loads(json.dumps(record)).items():
        if found.get(key) != value:
            raise ValueError(
                f"{path} was made with another {key} ({found.get(key)}, not {value}); use another folder, or the "
                "former arguments"
            )
    return True


def holds_texts(source: str) -> bool:
    """Return whether a source is a table of text, or a folder that ``datasets`` saved without images."""
    path = Path(source)
    if path.is_dir():
        about = list(path.glob("**/dataset_info.json"))
        return bool(about) and not any('"Image"' in p.read_text(encoding="utf-8") for p in about)
    return path.suffix.lower() in (".csv", ".jsonl", ".parquet", ".tsv")


def _save(net: Any, loaded: LoadedModel, path: Path, half: bool) -> None:
    """Write a transformers folder for a transformers model, else safetensors."""
    # Clones: tied weights share memory, which safetensors refuses.
    weights = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in net.state_dict().items()}
    if half:
        weights = {k: v.half() if v.is_floating_point() else v for k, v in weights.items()}
    if loaded.folder is not None:

        def write(own: Path) -> None:
            with quiet():
                net.save_pretrained(own, state_dict=weights)  # the configuration records the precision of the model
            assert loaded.folder is not None
            if loaded.tokenizer is not None:
                loaded.tokenizer.save_pretrained(own)
            if (loaded.folder / "preprocessor_config.json").is_file():
                shutil.copy(loaded.folder / "preprocessor_config.json", own)

        atomic_write_folder(path, write)
    else:
        from safetensors.torch import save_file

        with atomic_write(path.with_name(path.name + ".safetensors")) as own_file:
            save_file(weights, own_file)


def _classifier(loaded: LoadedModel, names: Mapping[str, int]) -> Any:
    """Load the pre-trained body of a transformers folder with a new head of sequence classification."""
    import transformers

    with quiet(), naming(f"{loaded.folder} has no variant that classifies texts"):
        net = transformers.AutoModelForSequenceClassification.from_pretrained(
            loaded.folder, local_files_only=True, trust_remote_code=False, ignore_mismatched_sizes=True,
            num_labels=len(names), label2id=dict(names), id2label={v: k for k, v in names.items()},
        )  # fmt: skip
    if isinstance(loaded.model, type(net)):  # the model came with a head, which was reused
        body = {id(m) for m in net.base_model.modules()}
        for m in net.modules():
            if isinstance(m, nn.Linear) and id(m) not in body:
                m.reset_parameters()
    return net


def _training(loaded: LoadedModel, data: DataChoice) -> tuple[TrainingImages | TrainingTexts, dict[str, int]]:
    """Read training examples and the names of the classes."""
    if holds_texts(data.source):
        examples = load_examples(data, loaded)
        texts = TrainingTexts(
            examples, examples.choose(data.num_examples, data.subset_seed), loaded.tokenizer.pad_token_id or 0, 0
        )
        # Several spellings may denote one class, but a class has one name in the configuration.
        by_number = {v: k for k, v in reversed(list(examples.classes.items()))}
        found = sorted({*texts.labels.tolist(), *(examples.classes.values() if data.label_map else ())})
        if found != list(range(len(found))):
            raise ValueError(
                f"the labels of {data.source} are the numbers {found}; map them to 0, 1, … with --label-map"
            )
        texts.classes = len(found)
        return texts, {by_number.get(i, str(i)): i for i in found}
    how = None if loaded.transform is None else _normalisation(loaded.transform)
    examples = load_examples(data, replace(loaded, transform=how and how[0], labels={}))
    if not examples.classes or how is None:
        raise ValueError(f"{data.source} holds neither a table of text nor images with classes, which collections need")
    chosen = examples.choose(data.num_examples, data.subset_seed)
    images = TrainingImages(examples, chosen, how[1], max(examples.classes.values()) + 1)
    with torch.no_grad():
        width = scores_of(loaded.model, images.images[:1]).shape[1]
    if width < images.classes:
        raise ValueError(f"{data.source} has {images.classes} classes, but the model only {width}")
    images.classes = width
    return images, dict(examples.classes)


def _normalisation(transform: Callable[[Any], Tensor]) -> tuple[Callable[[Any], Tensor], ImageTransform]:
    """Return a transform of images without its normalisation, so that they can be augmented, and with it alone."""
    if isinstance(transform, ImageTransform):
        channels = len(transform.mean)
        return replace(transform, mean=(0.0,) * channels, std=(1.0,) * channels), transform
    black, white = (transform(Image.new("RGB", (64, 64), colour)) for colour in ("black", "white"))
    std = 1 / (white - black)[:, 0, 0]
    mean = -black[:, 0, 0] * std
    found = ImageTransform((black.shape[1], black.shape[2]), tuple(mean.tolist()), tuple(std.tolist()))
    return lambda image: transform(image) * std[:, None, None] + mean[:, None, None], found


def _config(
    loaded: LoadedModel, model: str, checkpoint: str | None, data: DataChoice, test: DataChoice | None, points: int
) -> dict[str, Any]:
    """Collect what ``sharpness sweep`` needs to measure the collection."""
    # Measure training examples: the first of the same random choice or, if all were used, any.
    measured = {"num_examples": points if data.num_examples is None else min(points, data.num_examples)}
    measured["batch_size"] = min(256, measured["num_examples"])
    if data.num_examples is None and data.subset_seed is None:
        measured["subset_seed"] = 0
    folders = loaded.folder is not None
    checkpoints = [{"path": "model_*[0-9]"} if folders else {"path": "model_*.safetensors", "model": model}]
    config: dict[str, Any] = {
        "checkpoints": checkpoints, "data": _plain(data, **measured), "train": _plain(data),
        "baselines": "reproduction.baselines:baselines",
        "micro_batch": 16 if holds_texts(data.source) else 32,
        "measures": ["geodesic-inv", "geodesic-mix", "adaptive"],
        "rho": {"geodesic-inv": [0.02, 0.05, 0.1, 0.2], "geodesic-mix": [0.01, 0.02, 0.05, 0.1],
                "adaptive": [0.05, 0.1, 0.2, 0.5]},
    }  # fmt: skip
    start = model if folders else checkpoint
    if start is not None:
        config["initial"] = os.path.abspath(start)
    if test is not None:
        config["test"] = _plain(test)
    return config


def _unnamed(choice: dict[str, Any]) -> dict[str, Any]:
    """Leave out the numbers of classes, which follow from the training data."""
    return {k: v for k, v in choice.items() if k != "label_map"}


def _plain(choice: DataChoice, **more: Any) -> dict[str, Any]:
    """Describe data as an entry of a sweep's configuration."""
    found = {**asdict(choice), **more, "source": os.path.abspath(choice.source)}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return {k: v for k, v in plain.items() if v not in (None, {})}
