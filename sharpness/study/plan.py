"""The plan of a sweep: its checkpoints, data and measures, and its jobs, told apart by contents, not by paths."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, field

from ..data import DataChoice, is_function
from ..errors import naming
from ..evaluation import checked_radii
from ..hessian import LOCAL, measure_of
from ..huggingface import INPUTS, files_of
from ..measures import Measure
from ..texts import read_table

__all__ = ["Accuracies", "Checkpoint", "Sweep", "as_data", "job_key", "of_model", "places", "switched", "versions"]

T = TypeVar("T")
#: A job as plain data: checkpoint, kind, and everything that its result depends on.
Job = Mapping[str, Any]
Count = Annotated[int, Meta(ge=1, le=2**53)]
#: Suffixes of checkpoint files.
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
#: What transformers reads of a model in a folder, besides its tokenizer and image processor.
_MODEL = ("config.json", "*.safetensors", "*.bin", "*.index.json")


class Accuracies(Struct, frozen=True, forbid_unknown_fields=True):
    r"""Known accuracies by model name, which replace a test set.

    Attributes
    ----------
    file : str
        ``.csv``, ``.tsv`` or ``.jsonl`` table.
    name : str
        Column of the models' names, which are those of the checkpoints with or without suffix.
    test, train : str or None
        Columns of accuracies, as fractions. Without ``train`` the training data are run through the model.
    match : {"name", "number"}
        Compare the names, or the only number in them (``Run 7`` matches ``bert_07``).

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     table = pathlib.Path(place, "accuracies.csv")
    ...     _ = table.write_text("run,accuracy\nRun 0,0.84\nRun 1,0.83\n")
    ...     Accuracies(str(table), name="run", test="accuracy", match="number").of("bert_01")
    {'test': 0.83}
    """

    file: str
    name: str
    test: str
    train: str | None = None
    match: Literal["name", "number"] = "name"

    def of(self, checkpoint: str) -> dict[str, float] | None:
        """Return the accuracies of one checkpoint, or None; see :meth:`read`."""
        return self.read().get(self._key(checkpoint))

    def read(self) -> dict[str, dict[str, float]]:
        """Return the accuracies (``test`` and possibly ``train``) by the compared name or number.

        Raises
        ------
        ValueError, OSError
            The file cannot be read, lacks a column, names a model twice, or holds values that are not fractions.
        """
        accuracies: dict[str, dict[str, float]] = {}
        columns = {"test": self.test, **({} if self.train is None else {"train": self.train})}
        for number, row in enumerate(read_table(self.file), 1):
            missing = [c for c in (self.name, *columns.values()) if c not in row]
            if missing:
                raise ValueError(f"row {number} of {self.file} has no column {missing[0]!r}; it has {', '.join(row)}")
            with naming(f"row {number} of {self.file} does not hold an accuracy"):
                values = {k: float(row[c]) for k, c in columns.items()}
            if not all(0 <= v <= 1 for v in values.values()):
                raise ValueError(f"row {number} of {self.file}: accuracies are fractions from 0 to 1, got {values}")
            if self._key(row[self.name]) in accuracies:
                raise ValueError(f"row {number} of {self.file} names the model {row[self.name]!r} a second time")
            accuracies[self._key(row[self.name])] = values
        return accuracies

    def _key(self, name: str) -> str:
        if self.match == "name":
            return Path(name).stem if Path(name).suffix in _SUFFIXES else name
        numbers = re.findall(r"\d+", name)
        if len(numbers) != 1:
            raise ValueError(f"{name!r} does not hold exactly one number to match it by")
        return str(int(numbers[0]))


class Checkpoint(Struct, frozen=True):
    """A model to be measured.

    Attributes
    ----------
    name : str
        Unique in a sweep: file or folder name.
    model : str
        Name for :func:`sharpness.models.load`.
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


class _Settings(Struct, kw_only=True):
    """Settings of :func:`sharpness.evaluate`."""

    steps: Count = 20
    relative_tol: Annotated[float, Meta(ge=0)] = 3e-4
    ascent: Literal["power", "apgd"] = "power"
    restarts: Annotated[int, Meta(ge=0)] = 0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    micro_batch: Count | None = None
    normalize_logits: bool = False


class Common(_Settings, kw_only=True):
    """What a sweep and its file have alike."""

    accuracies: Accuracies | None = None
    baselines: str | None = None
    measures: tuple[str, ...] = ("geodesic-inv", "geodesic-mix", "adaptive")
    ablations: tuple[dict[str, Any], ...] = ({},)
    device: str = "cpu"
    sharded: bool = False


class Sweep(Common, kw_only=True):
    """The checkpoints of a sweep and what to measure.

    Attributes
    ----------
    checkpoints : tuple of Checkpoint
        Models to be measured.
    data : DataChoice
        The data for the measures.
    train, test : DataChoice or None
        Data for the generalisation gap; ``train`` is ``data`` by default. Without ``test`` or ``accuracies`` there is
        no gap.
    accuracies : Accuracies or None
        Known accuracies instead of ``test``.
    baselines : str or None
        ``module:function`` of further quantities: from a model, the batches and the initial weights (a state dict, or
        None) to numbers by name.
    initial : Checkpoint or None
        The model from which all were fine-tuned, for the distance from it.
    measures : tuple of str
        Names in ``sharpness.MEASURES``, or of quantities at the weights in ``sharpness.hessian.LOCAL``.
    rho : dict of str to tuple of float
        Radii by measure; by default the measure's own.
    ablations : tuple of dict
        Fields of ``Measure`` (``geodesic``, ``symmetry``, …) and ``statistic``, changed in all measures
        for which they have a meaning, or in those listed under ``measures``. ``{}`` is the measure itself.
    steps, relative_tol, ascent, restarts, seed, micro_batch, normalize_logits
        As for :func:`sharpness.evaluate`.
    device : str
        Device of torch.
    sharded : bool
        Shard every model over the processes of torchrun, which then measure each checkpoint together.

    Raises
    ------
    ValueError
        A radius or an ablation has no meaning.

    Examples
    --------
    The jobs of one checkpoint, with first-order geodesics as an ablation where there are geodesics:

    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> sweep = Sweep(
    ...     checkpoints=(net,), data=DataChoice("train.pt"), measures=("geodesic-inv", "adaptive"),
    ...     rho={"adaptive": (0.1, 0.5)}, ablations=({}, {"geodesic": "first-order"}),
    ... )
    >>> [(job["measure"], job["rho"], job["ablation"]) for job in sweep.jobs(net)]
    [('geodesic-inv', [0.1], {}), ('geodesic-inv', [0.1], {'geodesic': 'first-order'}), ('adaptive', [0.1, 0.5], {})]
    """

    checkpoints: tuple[Checkpoint, ...]
    data: DataChoice
    train: DataChoice | None = None
    test: DataChoice | None = None
    initial: Checkpoint | None = None
    rho: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measured()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of :func:`sharpness.evaluate`."""
        return {name: getattr(self, name) for name in _Settings.__struct_fields__}

    def jobs(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Return the jobs of a checkpoint, whose files are read for their digests. Equal jobs have equal results."""
        where = {"checkpoint": checkpoint.name, "model": checkpoint.model, "weights": _digest(checkpoint)}
        if self.test is not None:
            yield {**where, "kind": "fit", "train": as_data(self.train or self.data), "test": as_data(self.test)}
        elif self.accuracies is not None:
            known = self.accuracies.of(checkpoint.name)
            yield {**where, "kind": "fit", "train": as_data(self.train or self.data), "known": known}
        if self.baselines is not None or self.initial is not None:
            function = None if self.baselines is None else [self.baselines, of_data(self.baselines)]
            initial = None if self.initial is None else _digest(self.initial)
            yield {**where, "kind": "baselines", "data": as_data(self.data), "initial": initial, "code": function}
        for name, ablation, rho in self.measured():
            yield {
                **where, "kind": "sharpness", "measure": name, "rho": rho, "ablation": ablation,
                "data": as_data(self.data), "settings": self.settings,
            }  # fmt: skip

    def measured(self) -> list[tuple[str, dict[str, Any], list[float]]]:
        """List the measures with the fields that are changed, and their radii, each once."""
        plan: dict[str, tuple[str, dict[str, Any], list[float]]] = {}
        for name in self.measures:
            rho = () if name in LOCAL else checked_radii(measure_of(name), self.rho.get(name))
            for ablation in self.ablations:
                if name in ablation.get("measures", (name,)) and applies(name, ablation):
                    switches = {k: v for k, v in ablation.items() if k != "measures"}
                    plan[json.dumps([name, switches], sort_keys=True)] = name, switches, list(rho)
        return list(plan.values())


def switched(name: str, ablation: Mapping[str, Any]) -> Measure:
    """Return a measure with the fields of an ablation."""
    statistic = ablation.get("statistic", "worst")
    if statistic not in ("worst", "average") or (name in LOCAL and "statistic" in ablation):
        raise ValueError(f"statistic={statistic!r} has no meaning for {name!r}; it is 'worst' or 'average' over a ball")
    return measure_of(name, **{k: v for k, v in ablation.items() if k not in ("statistic", "measures")})


def applies(name: str, ablation: Mapping[str, Any]) -> bool:
    """Return whether the fields have a meaning for a measure."""
    try:
        switched(name, ablation)
    except ValueError:
        return False
    return True


def shard_of(items: Sequence[T], shard: tuple[int, int]) -> Sequence[T]:
    """Take the i-th of n parts, every n-th item."""
    i, n = shard
    if not 1 <= i <= n:
        raise ValueError(f"shards are i/n with 1 ≤ i ≤ n, got {i}/{n}")
    return items[i - 1 :: n]


def as_data(choice: DataChoice) -> dict[str, Any]:
    """Turn a choice of data into JSON data, with a digest of the contents of its source."""
    return {**json.loads(json.dumps(asdict(choice))), "digest": of_data(choice.source)}


def _digest(checkpoint: Checkpoint) -> str:
    return of_model(checkpoint.model, checkpoint.weights)


def job_key(job: Job) -> str:
    """Hash a job for the name of its file, by contents and not by paths."""
    known = {k: v for k, v in job.items() if k != "model" or not Path(v).exists()}
    for name in ("data", "train", "test"):
        if name in known and not is_function(known[name]["source"]):
            known[name] = {k: v for k, v in known[name].items() if k != "source"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:20]


def versions() -> dict[str, str]:
    """Return the versions of the libraries that results depend on."""
    return {name: version(name) for name in ("torch", "geoopt", "quotient-manifolds")}


def places(name: str) -> list[Path]:
    """List what is read of a model or a source of data: a folder, files, or the code of ``module:function``."""
    return _code(name) if is_function(name) else [Path(name)]


def of_data(source: str) -> str:
    """Digest the contents of a source of data; for ``module:function`` the module's code."""
    if is_function(source):
        return _of_files([("", path) for path in _code(source)])
    path = Path(source)
    if path.is_file():
        return _of_files([(path.suffix, path)])
    return _of_files((p.relative_to(path).as_posix(), p) for p in sorted(path.rglob("*")) if p.is_file())


def of_model(model: str, weights: str | None) -> str:
    """Digest a model: weights with the code or name, or a folder's configuration, weights, tokenizer, preprocessor."""
    files: list[tuple[str, Path]] = []
    if Path(model).is_dir():
        files += [(p.name, p) for p in files_of(Path(model), (*_MODEL, *INPUTS))]
    elif Path(model).is_file():  # weights without a folder
        files.append(("weights", Path(model)))
    elif ":" in model:
        files += [("code", path) for path in _code(model)]
    files += [] if weights is None else [("weights", Path(weights))]
    return _of_files([(name, p) for name, p in files if p.is_file()])


def _code(name: str) -> list[Path]:
    """Find the file of the module in ``module:function``; None if there is no such module."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name.partition(":")[0])
    except (ImportError, ValueError, AttributeError):
        return []
    return [Path(found.origin)] if found is not None and found.origin and Path(found.origin).is_file() else []


def _of_files(files: Iterable[tuple[str, Path]]) -> str:
    stats = ((name, str(p), p.stat()) for name, p in files)
    return _of_contents(tuple((name, path, s.st_size, s.st_mtime_ns) for name, path, s in stats))


@functools.cache
def _of_contents(files: tuple[tuple[str, str, int, int], ...]) -> str:
    """Digest names and contents, cached by size and time of change, so a file that is written again is read again."""
    digest = hashlib.sha256()
    for name, path, size, _ in files:
        digest.update(f"{name}\0{size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest()[:20]
