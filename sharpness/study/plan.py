"""The plan of a sweep: its file, checkpoints, data and measures, and its jobs, told apart by contents, not by paths."""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from quotient_manifolds.hub import fetch_model, is_name

from ..errors import about, naming, words_of
from ..hub_data import fetch_data, is_function, pinned_data
from ..measures import Search, checked_radii
from ..models import INPUTS, pinned
from ..options import DataChoice
from ..other_statistics import LOCAL, measure_of

T = TypeVar("T")
#: What transformers reads of a model in a folder, besides its tokenizer and image processor.
_MODEL = ("config.json", "*.safetensors", "*.bin", "*.index.json")


class Checkpoint(Struct, frozen=True):
    """A model to be measured.

    Attributes
    ----------
    name : str
        Unique in a sweep: file or folder name, or that on the Hub.
    model : str
        Name for :func:`sharpness.models.load`; one of the Hub names a commit.
    weights : str or None
        Its ``checkpoint``.

    Examples
    --------
    Weights in a file, of the network that a function gives:

    >>> Checkpoint("net0.pt", "my_project:network", "nets/net0.pt").weights
    'nets/net0.pt'
    """

    name: str
    model: str
    weights: str | None = None


class Sweep(Struct, kw_only=True, forbid_unknown_fields=True):
    """The checkpoints of a sweep and what to measure.

    Attributes
    ----------
    checkpoints : tuple of Checkpoint
        Models to be measured.
    data : DataChoice
        The data for the measures.
    train, test : DataChoice or None
        Data for the loss and error of every checkpoint, of which the generalisation gap consists; without both there
        are none. ``train`` is ``data`` by default.
    baselines : str or None
        ``module:function`` of further quantities: from a model, the batches and the initial weights (a state dict, or
        None) to numbers by name, of which none is called "error".
    initial : str or None
        For it, the model from which all were fine-tuned: a state dict's file or a transformers folder.
    measures : tuple of str
        Names in ``sharpness.MEASURES``, or of quantities at the weights in ``sharpness.other_statistics.LOCAL``.
    rho : float, tuple of float, or dict of these by measure
        Radii; by default the measure's own.
    search : Search
        The search for the largest loss; in a file its attributes are entries like the others.
    micro_batch
        As for :func:`sharpness.evaluate`.
    device : str
        Device of torch.

    Raises
    ------
    ValueError
        A radius has no meaning, a measure is unknown, or there are no initial weights.

    Examples
    --------
    The jobs of one checkpoint. A measure of one's own is one more entry of ``sharpness.MEASURES``:

    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> sweep = Sweep(
    ...     checkpoints=(net,), data=DataChoice("train.pt"), measures=("geodesic-inv", "adaptive"),
    ...     rho={"adaptive": (0.1, 0.5)},
    ... )
    >>> [(job["measure"], job["rho"]) for job in sweep.jobs(net)]
    [('geodesic-inv', [0.1]), ('adaptive', [0.1, 0.5])]
    """

    checkpoints: tuple[Checkpoint, ...]
    data: DataChoice
    train: DataChoice | None = None
    test: DataChoice | None = None
    baselines: str | None = None
    initial: str | None = None
    measures: tuple[str, ...] = ("geodesic-inv", "geodesic-mix", "adaptive")
    rho: float | tuple[float, ...] | dict[str, float | tuple[float, ...]] = field(default_factory=dict)
    search: Search = field(default_factory=Search)
    micro_batch: Annotated[int, Meta(ge=1)] | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.initial is not None and not (Path(self.initial).exists() or is_name(self.initial)):
            raise ValueError(f"there are no initial weights at {self.initial}")
        for name in (*self.measures, *(self.rho if isinstance(self.rho, dict) else ())):
            measure_of(name)
        self.measured()

    def sources(self) -> list[DataChoice]:
        """List the data that are read."""
        return [choice for choice in (self.data, self.train, self.test) if choice is not None]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of :func:`sharpness.evaluate`."""
        return {**asdict(self.search), "micro_batch": self.micro_batch}

    def jobs(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Return the jobs of a checkpoint, whose files are read for their digests. Equal jobs have equal results.

        If the checkpoint cannot be read, there is only one, with the error.
        """
        try:
            weights = of_model(checkpoint.model, checkpoint.weights)
        except OSError as error:
            yield {"checkpoint": checkpoint.name, "kind": "model", "error": words_of(error)}
            return
        where = {"checkpoint": checkpoint.name, "model": checkpoint.model, "weights": weights}
        data = as_data(self.data)
        if self.train is not None or self.test is not None:
            parts = {"train": self.train or self.data, "test": self.test}
            yield {**where, "kind": "fit", **{k: as_data(v) for k, v in parts.items() if v is not None}}
        if self.baselines is not None:
            code = [self.baselines, digest(self.baselines)]
            initial = None if self.initial is None else of_model(self.initial, None)
            yield {**where, "kind": "baselines", "data": data, "initial": initial, "code": code}
        for name, rho in self.measured().items():
            job = {"measure": name, "rho": rho, "data": data, "settings": self.settings}
            yield {**where, "kind": "sharpness", **job}

    def measured(self) -> dict[str, list[float]]:
        """Return the radii of every measure, none for a quantity at the weights."""
        plan = {}
        for name in self.measures:
            given = self.rho.get(name) if isinstance(self.rho, dict) else self.rho
            plan[name] = [] if name in LOCAL else list(checked_radii(measure_of(name), given))
        return plan


def shard_of(items: Sequence[T], shard: str) -> Sequence[T]:
    """Take the i-th of n parts, every n-th item; ``shard`` is i/n."""
    i, _, n = shard.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise ValueError(f"a shard is i/n with 1 ≤ i ≤ n, such as 1/4, but not {shard!r}")
    return items[int(i) - 1 :: int(n)]


# -- files -------------------------------------------------------------------------------------------------------------


class _Entry(Struct, forbid_unknown_fields=True):
    """A pattern of checkpoints in the file."""

    path: str
    model: str | None = None


def read_config(path: str | os.PathLike[str]) -> Sweep:
    """Read a sweep from a JSON file.

    Parameters
    ----------
    path
        File with the attributes of :class:`Sweep` as entries, and those of its search. ``checkpoints`` is a pattern, or
        a list of patterns and of ``{path, model}``; ``data``, ``train`` and ``test`` are a source, or the attributes of
        :class:`sharpness.data.DataChoice`. Paths are relative to the file; models may be names of the Hub.

    Returns
    -------
    Sweep

    Raises
    ------
    ValueError, OSError
        An entry is invalid, which one sentence names.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     pathlib.Path(place, "net.pt").touch()
    ...     entry = {"path": "*.pt", "model": "torch.nn:PReLU"}
    ...     config = {"checkpoints": [entry], "data": "train.pt", "rho": {"adaptive": [0.1, 0.5]}}
    ...     _ = pathlib.Path(place, "sweep.json").write_text(json.dumps(config), encoding="utf-8")
    ...     sweep = read_config(f"{place}/sweep.json")
    >>> sweep.checkpoints[0].name, sweep.measures, sweep.rho["adaptive"]
    ('net.pt', ('geodesic-inv', 'geodesic-mix', 'adaptive'), (0.1, 0.5))
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no configuration {str(path)!r}")
    with about(str(path)):
        with naming("it is no object of JSON"):
            entries = msgspec.json.decode(path.read_text(encoding="utf-8-sig"), type=dict[str, Any])
        return planned(entries, path.parent)


def planned(entries: dict[str, Any], base: Path = Path()) -> Sweep:
    """Return the sweep that entries describe, see :func:`read_config`, with paths below a folder."""
    if "checkpoints" in entries:
        entries["checkpoints"] = _checkpoints(entries["checkpoints"], base)
    for name in ("data", "train", "test"):
        if entries.get(name) is not None:
            entries[name] = read_choice(entries[name], base)
    if entries.get("initial") is not None:
        if not isinstance(entries["initial"], str):
            raise ValueError(f"initial must be the place or name of a model, got {entries['initial']!r}")
        entries["initial"] = _here_or_pinned(entries["initial"], base)
    search = {f.name: entries.pop(f.name) for f in fields(Search) if f.name in entries}
    return _converted({**entries, "search": {**_converted(entries.get("search", {}), dict[str, Any]), **search}}, Sweep)


def _converted(value: Any, kind: Any) -> Any:
    """Convert an entry to a type; raise an error of ours where it is of another."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def read_choice(entry: Any, base: Path = Path()) -> DataChoice:
    """Read a source, or a dict of the attributes of DataChoice, with paths below a folder."""
    given = {"source": entry} if isinstance(entry, str) else dict(_converted(entry, dict[str, Any]))
    unknown = given.keys() - DataChoice.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"data has no {min(unknown)!r}; its entries are {', '.join(DataChoice.__dataclass_fields__)}")
    choice = _converted(given, DataChoice)
    if is_function(choice.source, base):
        return choice
    here, named = base / choice.source, is_name(choice.source, 4)
    return replace(choice, source=pinned_data(choice.source) if named and not here.exists() else str(here))


def _checkpoints(entries: Any, base: Path) -> list[Checkpoint]:
    checkpoints: list[Checkpoint] = []
    entries = _converted(entries, str | Annotated[list[str | _Entry], Meta(min_length=1)])
    for entry in [entries] if isinstance(entries, str) else entries:
        entry = _Entry(entry) if isinstance(entry, str) else entry
        paths = sorted(str(base / place) for place in glob.glob(entry.path, root_dir=base))
        if not paths and entry.model is None and is_name(entry.path):
            checkpoints.append(Checkpoint(entry.path, pinned(entry.path)))
            continue
        if not paths:
            raise ValueError(f"no checkpoint matches {entry.path!r} in {base}")
        pairs = [(path, None) if entry.model is None else (entry.model, path) for path in paths]
        checkpoints += [Checkpoint(Path(weights or model).name, model, weights) for model, weights in pairs]
    twice = [name for name, count in Counter(c.name for c in checkpoints).items() if count > 1]
    if twice:
        raise ValueError(f"two checkpoints are called {min(twice)!r}; rename one of their files or folders")
    return checkpoints


def _here_or_pinned(name: str, base: Path) -> str:
    """Return a path below a folder, or a name of the Hub with its commit if nothing has that path."""
    return str(base / name) if (base / name).exists() or not is_name(name) else pinned(name)


# -- contents ----------------------------------------------------------------------------------------------------------


def as_data(choice: DataChoice) -> dict[str, Any]:
    """Turn a choice of data into JSON data, with a digest of the contents of its source."""
    return {**asdict(choice), "digest": digest(choice.source)}


def of_model(model: str, weights: str | None) -> str:
    """Digest a model: weights with the code or name, or a folder's configuration, weights, tokenizer, preprocessor."""
    return digest(model, weights, (*_MODEL, *INPUTS))


def places(name: str) -> list[Path]:
    """List what is read of a model or of data: a folder, a file, or the code of ``module:function``."""
    if not is_function(name):
        return [Path(name)]
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError, AttributeError):
        return []
    return [Path(found.origin)] if found is not None and found.origin else []


def digest(name: str, weights: str | None = None, patterns: Sequence[str] = ("**/*",)) -> str:
    """Digest the contents of what is read of a model or of data, and of weights; of a folder the files of patterns."""
    root, files = Path(name), {path.suffix: path for path in places(name)}
    if is_name(name):
        root = fetch_model(name).place
    elif is_name(name, 4):
        files = {f"{i}": path for i, path in enumerate(fetch_data(name).files)}
    if root.is_dir():
        files = {path.relative_to(root).as_posix(): path for pattern in patterns for path in root.glob(pattern)}
    if weights is not None:
        files["weights"] = Path(weights)
    stats = ((label, str(path), path.stat()) for label, path in sorted(files.items()) if path.is_file())
    return _of_contents(tuple((label, path, s.st_size, s.st_mtime_ns) for label, path, s in stats))


@functools.cache
def _of_contents(files: tuple[tuple[str, str, int, int], ...]) -> str:
    """Digest names and contents, cached by size and time of change, so a file that is written again is read again."""
    sha = hashlib.sha256()
    for name, path, size, _ in files:
        sha.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(2**24):
                sha.update(block)
    return sha.hexdigest()[:20]
