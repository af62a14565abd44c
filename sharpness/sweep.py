"""Many checkpoints, measures, radii and ablations: resumable, and spread over processes and machines.

A *unit* is one checkpoint under one measure with one set of switches, at all radii; or one checkpoint's fit, its loss
and error on training and test data; or its baselines, norms and the like. Every finished unit is a file of its own in
the results' folder, written as a whole or not at all, so that any number of processes on any number of machines may
work on one folder, and be killed.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .baselines import distance, norms, relative_flatness
from .data import DataChoice, TextColumns, is_function, read_table
from .distributed import counter
from .evaluation import evaluate
from .losses import Objective
from .measures import measure_with
from .models import LoadedModel, load, load_state_dict
from .results import SharpnessResult, write_json

__all__ = ["Accuracies", "Checkpoint", "Sweep", "read_config", "read_rows", "run_sweep"]

#: Settings of ``evaluate`` that a configuration may give.
_SETTINGS: dict[str, Any] = {
    "steps": 20,
    "tol": 3e-4,
    "ascent": "power",
    "restarts": 0,
    "seed": 0,
    "micro_batch": None,
    "normalize_logits": False,
}


@dataclass(frozen=True)
class Checkpoint:
    """A model to be measured.

    Attributes
    ----------
    name : str
        Unique in a sweep: file or folder name.
    model : str
        What :func:`sharpness.models.load` takes for a name.
    weights, head : str or None
        Its other arguments.
    """

    name: str
    model: str
    weights: str | None = None
    head: str | None = None


@dataclass(frozen=True)
class Accuracies:
    """Known accuracies by model name, which stand in for a test set.

    Attributes
    ----------
    file : str
        .csv, .tsv or .jsonl table.
    name : str
        Column of the models' names: those of the checkpoints, with or without their suffix.
    test, train : str or None
        Columns of accuracies, as fractions. Without ``train`` the training data are run through the model.
    match : {"name", "number"}
        Compare the names, or the one number in them (``Run 7`` is ``bert_07``).
    """

    file: str
    name: str
    test: str
    train: str | None = None
    match: str = "name"

    def __post_init__(self) -> None:
        if self.match not in ("name", "number"):
            raise ValueError(f'accuracies match by "name" or "number", not {self.match!r}')

    def read(self) -> dict[str, dict[str, float]]:
        """Give the accuracies (``test`` and maybe ``train``) by the form of the name that is compared."""
        found: dict[str, dict[str, float]] = {}
        wanted = {"test": self.test, **({} if self.train is None else {"train": self.train})}
        for number, row in enumerate(read_table(self.file), 1):
            missing = [c for c in (self.name, *wanted.values()) if c not in row]
            if missing:
                raise ValueError(f"row {number} of {self.file} has no column {missing[0]!r}; it has {', '.join(row)}")
            key = self.key(row[self.name])
            try:
                values = {k: float(row[c]) for k, c in wanted.items()}
            except ValueError as error:
                raise ValueError(f"row {number} of {self.file} holds no accuracy ({error})") from error
            if not all(0 <= v <= 1 for v in values.values()):
                raise ValueError(f"row {number} of {self.file}: accuracies are fractions from 0 to 1, got {values}")
            if key in found:
                raise ValueError(f"row {number} of {self.file} names the model {row[self.name]!r} a second time")
            found[key] = values
        return found

    def of(self, checkpoint: str) -> dict[str, float] | None:
        """The accuracies of one checkpoint, None if there are none."""
        return self.read().get(self.key(checkpoint))

    def key(self, name: str) -> str:
        """What is compared of a name."""
        if self.match == "name":
            return Path(name).stem if Path(name).suffix in _SUFFIXES else name
        numbers = re.findall(r"\d+", name)
        if len(numbers) != 1:
            raise ValueError(f"{name!r} does not hold exactly one number to match it by")
        return str(int(numbers[0]))


#: Of checkpoint files.
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


@dataclass(frozen=True)
class Sweep:
    """What is to be done.

    Attributes
    ----------
    checkpoints : tuple of Checkpoint
    data : DataChoice
        Measured on.
    train, test : DataChoice or None
        For the generalisation gap; ``train`` is ``data`` by default. Without ``test`` or ``accuracies`` there is none.
    accuracies : Accuracies or None
        In place of ``test``.
    baselines : bool
        Norms and relative flatness too, see :mod:`sharpness.baselines`.
    initial : Checkpoint or None
        What all models were fine-tuned from, for the distance from there.
    measures : tuple of str
    rho : dict of str to tuple of float
        Radii by measure; a measure without any has its own default.
    ablations : tuple of dict
        Switches of ``evaluate`` (``geodesic``, ``norm``, ``symmetry``, ``relaxation``, …), for those measures to which
        they mean something, or which it names under ``measures``, and with radii of its own if it has a ``rho`` (as
        above); ``{}`` is the measure itself.
    settings : dict
        Of ``evaluate``: steps, tol, ascent, restarts, seed, micro_batch, normalize_logits.
    device : str
    """

    checkpoints: tuple[Checkpoint, ...]
    data: DataChoice
    train: DataChoice | None = None
    test: DataChoice | None = None
    accuracies: Accuracies | None = None
    baselines: bool = True
    initial: Checkpoint | None = None
    measures: tuple[str, ...] = ("geodesic-inv", "geodesic-mix", "adaptive")
    rho: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    ablations: tuple[Mapping[str, Any], ...] = ({},)
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def units(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Give what there is to do for a checkpoint, as plain data; equal units have equal results."""
        where = {"checkpoint": checkpoint.name, "model": checkpoint.model, "weights": _digest(checkpoint)}
        if self.test is not None:
            yield {**where, "kind": "fit", "train": _plain(self.train or self.data), "test": _plain(self.test)}
        elif self.accuracies is not None:
            known = self.accuracies.of(checkpoint.name)
            yield {**where, "kind": "fit", "train": _plain(self.train or self.data), "known": known}
        if self.baselines:
            start = None if self.initial is None else _digest(self.initial)
            yield {**where, "kind": "baselines", "data": _plain(self.data), "initial": start}
        for name in self.measures:
            for ablation in self.ablations:
                switches = {k: v for k, v in ablation.items() if k not in _OF_AN_ABLATION}
                if not _applies(name, switches) or name not in ablation.get("measures", (name,)):
                    continue
                how = measure_with(name, **switches)
                radii = {**self.rho, **_radii(ablation.get("rho", {}), self.measures)}
                rho = [] if how.local else list(radii.get(name, ())) or [how.rho or math.nan]
                if math.nan in rho:
                    raise ValueError(f"the measure {name!r} has no radius of its own; give some under rho")
                yield {
                    **where, "kind": "sharpness", "measure": name, "rho": rho, "ablation": switches,
                    "data": _plain(self.data), "settings": {**_SETTINGS, **self.settings},
                }  # fmt: skip


#: Entries of an ablation that are no switches of ``evaluate``.
_OF_AN_ABLATION = ("rho", "measures")


def _radii(rho: Any, measures: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """A number, a list or either by measure, to radii by measure."""
    by_measure = rho if isinstance(rho, Mapping) else dict.fromkeys(measures, rho)
    return {k: tuple(float(r) for r in (v if isinstance(v, (list, tuple)) else [v])) for k, v in by_measure.items()}


def _plain(choice: DataChoice) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(choice)))
    return found


def _digest(checkpoint: Checkpoint) -> str:
    """Of the weights' contents: another file of the same name is another checkpoint."""
    found = [Path(p) for p in (checkpoint.weights or checkpoint.model, checkpoint.head) if p is not None]
    files = [p for path in found for p in (sorted(path.iterdir()) if path.is_dir() else [path]) if p.is_file()]
    return _digest_of(tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files))


@functools.cache
def _digest_of(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, _ in files:
        with open(path, "rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest()[:20]


def _applies(name: str, ablation: Mapping[str, Any]) -> bool:
    """Whether the switches mean anything for a measure."""
    try:
        measure_with(name, **ablation)
    except ValueError:
        return False
    return True


def _key(unit: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(unit, sort_keys=True).encode()).hexdigest()[:20]


# -- configuration -------------------------------------------------------------------------------------------------


def _data_choice(found: Any, base: Path) -> DataChoice:
    if isinstance(found, str):
        found = {"source": found}
    own = {f.name for f in fields(DataChoice)} - {"columns"}
    text = {f.name for f in fields(TextColumns)}
    unknown = sorted(set(found) - own - text)
    if unknown or "source" not in found:
        raise ValueError(
            f"data has the unknown entry {unknown[0]!r}; known are {', '.join(sorted(own | text))}"
            if unknown
            else "data needs a source"
        )
    source = str(found["source"])
    if not is_function(source, base):
        source = str(base / source)
    columns = TextColumns(**{k: v for k, v in found.items() if k in text})
    rest: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k in own and k != "source"
    }
    return DataChoice(source, columns=columns, **rest)


def _accuracies(found: Any, base: Path) -> Accuracies:
    known = {f.name for f in fields(Accuracies)}
    if not isinstance(found, dict) or not {"file", "name", "test"} <= set(found) or not set(found) <= known:
        raise ValueError(f"accuracies need file, name and test, and may have train and match; got {found}")
    return Accuracies(**{**found, "file": str(base / found["file"])})


def _initial(found: Any, base: Path) -> Checkpoint:
    path = base / str(found)
    if not path.exists():
        raise ValueError(f"there are no initial weights at {path}")
    return Checkpoint(path.name, str(path))


def _checkpoints(entries: Any, base: Path) -> tuple[Checkpoint, ...]:
    found: list[Checkpoint] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        entry = {"path": entry} if isinstance(entry, str) else dict(entry)
        unknown = sorted(set(entry) - {"path", "model", "head"})
        if unknown or "path" not in entry:
            raise ValueError(f"a checkpoint has a path and maybe model and head, not {unknown or list(entry)}")
        paths = sorted(glob.glob(str(base / entry["path"])))
        if not paths:
            raise ValueError(f"no checkpoint matches {entry['path']!r} in {base}")
        head = None if entry.get("head") is None else str(base / entry["head"])
        for path in paths:
            if entry.get("model") is None:
                found.append(Checkpoint(Path(path).name, path))
            else:
                found.append(Checkpoint(Path(path).name, str(entry["model"]), path, head))
    names = [c.name for c in found]
    double = sorted({n for n in names if names.count(n) > 1})
    if double:
        raise ValueError(f"two checkpoints are called {double[0]!r}; give their files or folders different names")
    return tuple(found)


def read_config(path: str | os.PathLike[str]) -> Sweep:
    """Read a sweep from a YAML or JSON file.

    Parameters
    ----------
    path
        With the entries ``checkpoints`` (a pattern, or a list of ``{path, model, head}``), ``data``, ``train``,
        ``test`` (a source, or the attributes of :class:`sharpness.data.DataChoice` and
        :class:`sharpness.data.TextColumns`), or ``accuracies`` (those of :class:`Accuracies`) in place of ``test``,
        ``measures``, ``rho`` (a list for all measures, or lists by measure), ``ablations`` (a list of switches),
        ``baselines`` (true or false), ``initial`` (a checkpoint file or a transformers folder), ``device``, and
        settings of :func:`sharpness.evaluate`. Paths are relative to the file.

    Raises
    ------
    ValueError, OSError
        One sentence that names the entry.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            try:
                import yaml
            except ImportError as error:
                raise ImportError(
                    "YAML needs PyYAML: pip install 'quotient-manifolds[sweep]', or write the sweep as .json"
                ) from error
            found = yaml.safe_load(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be parsed ({error})") from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise ValueError(f"{path} cannot be parsed ({' '.join(str(error).split())})") from error
        raise
    known = {
        "checkpoints", "data", "train", "test", "accuracies", "baselines", "initial", "measures", "rho", "ablations",
        "device", *_SETTINGS,
    }  # fmt: skip
    if not isinstance(found, dict) or not {"checkpoints", "data"} <= set(found):
        raise ValueError(f"{path} needs the entries checkpoints and data")
    unknown = sorted(set(found) - known)
    if unknown:
        raise ValueError(f"{path} has the unknown entry {unknown[0]!r}; known are {', '.join(sorted(known))}")
    if found.get("test") is not None and "accuracies" in found:
        raise ValueError(f"{path} has both test and accuracies, which stand in for it; leave one out")
    measures = tuple(found.get("measures", Sweep.measures))
    ablations = tuple(found.get("ablations", ({},)))
    if not isinstance(found.get("ablations", []), list) or not all(isinstance(a, dict) for a in ablations):
        raise ValueError(f"{path}: ablations is a list of switches, as [{{}}, {{geodesic: first-order}}]")
    radii = _radii(found.get("rho", {}), measures)
    more = [_radii(ablation.get("rho", {}), measures) for ablation in ablations]
    for name in (
        *measures,
        *radii,
        *(m for r in more for m in r),
        *(m for a in ablations for m in a.get("measures", ())),
    ):
        measure_with(name)
    for ablation in ablations:
        strange = [m for m in ablation.get("measures", ()) if m not in measures]
        if strange:
            raise ValueError(f"{path}: an ablation names the measure {strange[0]}, which is not among measures")
        switches = {k: v for k, v in ablation.items() if k not in _OF_AN_ABLATION}
        try:
            applied = any(_applies(name, switches) for name in ablation.get("measures", measures))
        except TypeError as error:
            raise ValueError(f"{path}: an ablation has an unknown switch ({error})") from error
        if not applied:
            raise ValueError(f"{path}: the ablation {ablation} means nothing for any of {', '.join(measures)}")
    parts = {k: _data_choice(found[k], path.parent) for k in ("train", "test") if found.get(k) is not None}
    return Sweep(
        _checkpoints(found["checkpoints"], path.parent),
        _data_choice(found["data"], path.parent),
        parts.get("train"),
        parts.get("test"),
        _accuracies(found["accuracies"], path.parent) if "accuracies" in found else None,
        bool(found.get("baselines", True)),
        _initial(found["initial"], path.parent) if found.get("initial") is not None else None,
        measures,
        radii,
        ablations,
        {k: found[k] for k in _SETTINGS if k in found},
        str(found.get("device", "cpu")),
    )


# -- work ----------------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "geoopt", "quotient-manifolds")}


def _fit(model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float | None]:
    """Mean loss and error over examples."""
    objective = Objective()
    loss, wrong, counted, total = 0.0, 0, 0, 0
    with torch.no_grad():
        for batch in batches:
            found = objective(model, batch)
            size = found.counted or 1
            loss += float(found.loss) * size
            total += size
            wrong, counted = wrong + (found.wrong or 0), counted + (found.counted or 0)
    return {"loss": loss / total, "error": wrong / counted if counted else None}


def _rows(unit: Mapping[str, Any], result: SharpnessResult, seconds: float) -> Iterator[dict[str, Any]]:
    for rho in result.rhos:
        batches = result.at(rho)
        rises = [b.error_increase for b in batches]
        yield {
            **{k: v for k, v in unit.items() if k != "rho"},
            "rho": rho,
            "sharpness": result.mean(rho),
            "per_batch": [b.value for b in batches],
            "base_loss": sum(b.base_loss for b in batches) / len(batches),
            "error_increase": None if None in rises else sum(r for r in rises if r is not None) / len(rises),
            "passes": sum(b.passes for b in batches),
            "unconverged": sum(b.converged is False for b in batches),
            "weakest_singular_value": result.weakest,
            "absent_directions": result.absent,
            "seconds": seconds,
        }


class _Cache:
    """Batches that several checkpoints share: reading thousands of images takes as long as running them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._batches: dict[str, list[Any]] = {}

    def batches(self, choice: DataChoice, loaded: LoadedModel) -> list[Any]:
        key = json.dumps([_plain(choice), repr(choice.image_format(loaded.images)), loaded.text_key()], sort_keys=True)
        if key not in self._batches:
            if len(self._batches) > 2:  # training, test and measured examples of one kind of model
                self._batches.clear()
            self._batches[key] = choice.load(loaded, self.device)
        return self._batches[key]


class _Loaded:
    """The checkpoint at hand, and its batches."""

    def __init__(self, sweep: Sweep, checkpoint: Checkpoint, cache: _Cache) -> None:
        self.found = load(checkpoint.model, checkpoint.weights, head=checkpoint.head)
        self.model = self.found.model.to(cache.device).eval()
        self.cache = cache

    def batches(self, choice: DataChoice) -> list[Any]:
        return self.cache.batches(choice, self.found)


def _fits(unit: Mapping[str, Any], sweep: Sweep, loaded: _Loaded) -> dict[str, Any]:
    row: dict[str, Any] = {}
    train = sweep.train or sweep.data
    if sweep.accuracies is not None:
        known = unit["known"]
        if known is None:
            raise ValueError(f"{sweep.accuracies.file} has no accuracy of {unit['checkpoint']!r}")
        row = {f"{part}_error": 1 - value for part, value in known.items()}
        if "train" in known:
            return row
    for part, choice in (("train", train), ("test", sweep.test)):
        if choice is not None:
            row.update({f"{part}_{k}": v for k, v in _fit(loaded.model, loaded.batches(choice)).items()})
    return row


def _baselines(sweep: Sweep, loaded: _Loaded) -> dict[str, Any]:
    row: dict[str, Any] = dict(norms(loaded.model))
    row["relative_flatness"] = relative_flatness(loaded.model, loaded.batches(sweep.data))
    if sweep.initial is not None:
        row["distance"] = _distance(sweep.initial, loaded)
    return row


def _distance(initial: Checkpoint, loaded: _Loaded) -> float:
    """From the initial weights, which are read as the checkpoint is, or, of another head, as they are."""
    path = Path(initial.model)
    if path.is_dir():
        found = load(str(path)).model
        # A bare body has no prefix before its names.
        body = getattr(loaded.model, "base_model", None)
        same = getattr(found, "base_model_prefix", "") and found is getattr(found, "base_model", None)
        return distance(body if same and body is not None else loaded.model, found.state_dict())
    state = load_state_dict(path)
    # Fine-tuned image towers of CLIP are stored with two prefixes.
    return distance(loaded.model, {**state, **{k.removeprefix("model."): v for k, v in state.items()}})


def _do(unit: Mapping[str, Any], sweep: Sweep, loaded: _Loaded) -> list[dict[str, Any]]:
    start = time.perf_counter()
    if unit["kind"] != "sharpness":
        found = _fits(unit, sweep, loaded) if unit["kind"] == "fit" else _baselines(sweep, loaded)
        return [{**unit, **found, "seconds": time.perf_counter() - start}]
    result = evaluate(
        loaded.model, loaded.batches(sweep.data), measure=unit["measure"], rho=unit["rho"] or None,
        keep_directions=False, progress=False, **unit["settings"], **unit["ablation"],
    )  # fmt: skip
    return list(_rows(unit, result, time.perf_counter() - start))


def run_sweep(
    sweep: Sweep, folder: str | os.PathLike[str], *, shard: tuple[int, int] = (1, 1), progress: bool = True
) -> list[dict[str, Any]]:
    """Do what a sweep still lacks.

    Parameters
    ----------
    sweep : Sweep
    folder
        For the results, a file a unit.
    shard : (int, int)
        (i, n): this process takes the i-th of n parts of the checkpoints. Under torchrun the processes draw
        checkpoints from a common counter instead. What is done by whom makes no difference to the results.
    progress : bool

    Returns
    -------
    list of dict
        The units of this call that failed, with their ``error``; they are recorded, and tried again by the next call.
    """
    i, n = shard
    if not 1 <= i <= n:
        raise ValueError(f"shards are i/n with 1 ≤ i ≤ n, got {i}/{n}")
    done = Path(folder) / "units"
    done.mkdir(parents=True, exist_ok=True)
    mine = list(sweep.checkpoints[i - 1 :: n])
    failed: list[dict[str, Any]] = []
    cache = _Cache(torch.device(sweep.device))
    for position in tqdm(counter(len(mine)), total=len(mine), desc="checkpoints", disable=not progress):
        failed += _do_checkpoint(sweep, mine[position], done, cache)
    return failed


def _do_checkpoint(sweep: Sweep, checkpoint: Checkpoint, done: Path, cache: _Cache) -> list[dict[str, Any]]:
    open_units = [(u, done / f"{_key(u)}.json") for u in sweep.units(checkpoint)]
    open_units = [(u, path) for u, path in open_units if not _is_done(path)]
    if not open_units:
        return []
    failed = []
    loaded: _Loaded | None = None
    problem = ""
    try:
        loaded = _Loaded(sweep, checkpoint, cache)
    except _PROBLEMS as error:
        problem = _words(error)
    for unit, path in open_units:
        record: dict[str, Any] = {"unit": unit, "versions": _versions()}
        try:
            if loaded is None:
                raise ValueError(problem)
            record["rows"] = _do(unit, sweep, loaded)
        except _PROBLEMS as error:
            record["error"] = _words(error)
            failed.append({**unit, "error": record["error"]})
        write_json(path, record)
    return failed


#: What a bad checkpoint or a bad file may raise; the sweep goes on.
_PROBLEMS = (ValueError, OSError, RuntimeError, KeyError, IndexError, ImportError)


def _words(error: Exception) -> str:
    return f"{' '.join(str(error).split())[:500]}" or type(error).__name__


def _is_done(path: Path) -> bool:
    return path.is_file() and "error" not in json.loads(path.read_text(encoding="utf-8"))


def read_rows(folder: str | os.PathLike[str], sweep: Sweep | None = None) -> list[dict[str, Any]]:
    """Read the rows of all finished units, in the order of checkpoint, measure, ablation and radius.

    Parameters
    ----------
    folder
        As :func:`run_sweep` had it.
    sweep : Sweep, optional
        Only what belongs to it; else everything in the folder.
    """
    done = Path(folder) / "units"
    if not done.is_dir():
        raise FileNotFoundError(f"{folder} holds no results of a sweep (a folder 'units')")
    paths: Iterable[Path] = sorted(done.glob("*.json"))
    if sweep is not None:
        paths = [p for c in sweep.checkpoints for u in sweep.units(c) if (p := done / f"{_key(u)}.json").is_file()]
    rows: list[dict[str, Any]] = []
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows += [{**row, "unit": path.stem, **found["versions"]} for row in found.get("rows", ())]
    return sorted(rows, key=_place)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    ablation = json.dumps(row.get("ablation", {}), sort_keys=True)
    return row["checkpoint"], row["kind"], row.get("measure", ""), ablation, row.get("rho", 0.0)
