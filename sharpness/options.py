"""Options of the commands: which data, and how to run; a parser reads them without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .models import LoadedModel


@dataclass(frozen=True)
class RunOptions:
    """Options of the command ``sharpness run`` beside those of data and search.

    Attributes
    ----------
    measure
        One or several. With a radius (its default): geodesic-inv, geodesic-mix, complete-inv, complete-mix (0.1),
        adaptive (0.5), euclidean (0.05). Without one: gradient-norm, riemannian-hessian, euclidean-hessian.
    rho
        Radii of the ball, by default the measure's own.
    out
        JSON file for results, command, versions and digests.
    report
        HTML file with the results, figures of the worst directions and all settings.
    checkpoint
        Local weights for a named model (.safetensors, or a state dict saved by torch).
    micro_batch
        Pass so many examples at a time, to save memory.
    device
        cpu or cuda.
    verbose
        Also print the settings of the search.
    quiet
        Show no progress.

    Examples
    --------
    >>> RunOptions(measure=("adaptive",)).device
    'cpu'
    """

    measure: tuple[str, ...] = ("geodesic-inv",)
    rho: tuple[float, ...] | None = None
    out: Path | None = None
    report: Path | None = None
    checkpoint: str | None = None
    micro_batch: int | None = None
    device: str = "cpu"
    verbose: bool = False
    quiet: bool = False


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
        - a folder that Hugging Face's ``datasets`` saved (``folder/split`` where it has several), of texts or images;
        - ``owner/name/split`` or ``owner/name/configuration/split``, a data set on the Hub, with a revision behind an
          ``@``: tables of texts, or Parquet files of images;
        - a ``.safetensors`` file, or one that torch saved, of named tensors whose first dimension runs over the
          examples: with the names x and y batches are pairs, else dicts for a transformers model;
        - ``module:function``, a function without arguments that returns an iterable of batches.
    text : str
        Column of the text: its name in the header, or its number from 0 where there is none.
    label : str
        Column of the label; models that predict the next token need none.
    pair : str or None
        Column of the second text, for pairs of texts.
    label_map : mapping of str to int or str
        Class numbers of labels, or names of the model's classes for them; without it, labels are numbers or the names
        in the model's configuration.
    header : bool
        The first line of a .tsv or .csv file names the columns; with --no-header it is data.
    num_examples : int or None
        Number of examples: the first ones, or random ones if the data are sorted by class, as in folders of classes.
    batch_size : int
        Examples per batch at most. Batches are as equal as possible, since each counts as much as the others.
    batches : int or None
        Number of batches at most.
    subset_seed : int or None
        Seed of a random choice of examples. Without it the first examples are taken; if the data are sorted by class,
        random ones with the seed 0.
    max_length : int
        Longest input in tokens, special ones included, unless the tokenizer's limit is lower.

    Examples
    --------
    One choice serves many models, each with its own tokenizer or image transform:

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
    text: str = "text"
    label: str = "label"
    pair: str | None = None
    label_map: Mapping[str, int | str] = field(default_factory=dict)
    header: bool = True
    num_examples: int | None = None
    batch_size: int = 256
    batches: int | None = None
    subset_seed: int | None = None
    max_length: int = 128

    def __post_init__(self) -> None:
        from quotient_manifolds.linalg import as_count

        for name in ("batch_size", "batches", "num_examples", "subset_seed", "max_length"):
            if (value := getattr(self, name)) is not None or getattr(DataChoice, name) is not None:
                object.__setattr__(self, name, as_count(name, value, least=int(name != "subset_seed")))

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
            Batches as :func:`sharpness.evaluate` takes them: dicts of text with labels, padded after the texts, or
            pairs of images, float32 (examples, channels, height, width), and classes. Images are turned as their EXIF
            orientation says. Its ``remarks`` say what was left out.

        Raises
        ------
        ValueError, OSError, ImportError
            The data cannot be read, or there is too little of it.
        """
        batches: Batches = import_module("sharpness.data").batches_of(self, loaded, device)
        return batches
