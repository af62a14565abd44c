"""The work of a sweep, and its rows."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..baselines import distance, norms, relative_flatness
from ..data import DataChoice
from ..distributed import counter
from ..errors import naming, words_of
from ..evaluation import evaluate
from ..files import check_folder, write_json
from ..losses import Objective
from ..models import LoadedModel, load, load_state_dict
from ..progress import bar
from ..results import SharpnessResult
from ..search import RadiusError
from .plan import Checkpoint, Sweep, as_data, unit_key

__all__ = ["read_rows", "run_sweep"]


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
        key = json.dumps([as_data(choice), repr(choice.image_format(loaded.images)), loaded.text_key()], sort_keys=True)
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


def _do(unit: Mapping[str, Any], sweep: Sweep, loaded: _Loaded) -> dict[str, Any]:
    """Give the rows of a unit and, of radii that are too large for the loss to stay finite, why."""
    start = time.perf_counter()
    if unit["kind"] != "sharpness":
        found = _fits(unit, sweep, loaded) if unit["kind"] == "fit" else _baselines(sweep, loaded)
        wrong = [k for k, v in found.items() if isinstance(v, float) and not math.isfinite(v)]
        if wrong:
            raise ValueError(f"{wrong[0]} is {found[wrong[0]]}; the model has diverged, or does not fit the data")
        return {"rows": [{**unit, **found, "seconds": time.perf_counter() - start}]}
    radii, too_large = sorted(unit["rho"]), dict[str, str]()
    batches = loaded.batches(sweep.data)
    while True:
        try:
            result = evaluate(
                loaded.model, batches, measure=unit["measure"], rho=radii or None, keep_directions=False,
                progress=False, **unit["settings"], **unit["ablation"],
            )  # fmt: skip
            break
        except RadiusError as error:
            if len(radii) < 2:
                raise
            too_large[str(radii.pop())] = words_of(error)
    return {"rows": list(_rows(unit, result, time.perf_counter() - start)), "too_large": too_large}


def run_sweep(
    sweep: Sweep, folder: str | os.PathLike[str], *, shard: tuple[int, int] = (1, 1), progress: bool = True
) -> list[dict[str, Any]]:
    """Do what a sweep still lacks: units whose result was computed from the same contents are not done again.

    Parameters
    ----------
    sweep : Sweep
        What is to be done.
    folder
        For the results, a file a unit in its folder ``units``; see :func:`read_rows`.
    shard : (int, int)
        (i, n): this process takes the i-th of n parts of the checkpoints. Under torchrun the processes draw
        checkpoints from a common counter instead. What is done by whom makes no difference to the results.
    progress : bool
        Show a progress bar.

    Returns
    -------
    list of dict
        The units that failed, with their ``error``; they are recorded, and tried again by the next call. Where only
        some radii of a measure are too large, the others are kept, and a dict of those has their ``rho`` and ``error``.

    Raises
    ------
    ValueError
        No such shard.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from sharpness.sweep import Checkpoint, Sweep, read_rows
    >>> from sharpness.data import DataChoice
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, f"{place}/train.pt")
    ...     sweep = Sweep((net,), DataChoice(f"{place}/train.pt"), measures=("adaptive",), settings={"steps": 3})
    ...     failed = run_sweep(sweep, place, progress=False)
    ...     [(row["checkpoint"], row["kind"], row.get("rho")) for row in read_rows(place)]
    [('net', 'baselines', None), ('net', 'sharpness', 0.5)]
    """
    i, n = shard
    if not 1 <= i <= n:
        raise ValueError(f"shards are i/n with 1 ≤ i ≤ n, got {i}/{n}")
    done = check_folder(Path(folder) / "units")
    with naming(f"the device {sweep.device!r} cannot be used"):
        torch.zeros((), device=sweep.device)
    mine = list(sweep.checkpoints[i - 1 :: n])
    failed: list[dict[str, Any]] = []
    cache = _Cache(torch.device(sweep.device))
    with bar(len(mine), "checkpoints", "checkpoint", progress=progress) as shown:
        for position in counter(len(mine)):
            failed += _do_checkpoint(sweep, mine[position], done, cache)
            shown.update()
    return failed


def _do_checkpoint(sweep: Sweep, checkpoint: Checkpoint, done: Path, cache: _Cache) -> list[dict[str, Any]]:
    try:
        paths = [(u, done / f"{unit_key(u)}.json") for u in sweep.units(checkpoint)]
    except OSError as error:  # its files cannot be read
        return [{"checkpoint": checkpoint.name, "kind": "model", "error": words_of(error)}]
    records = [(u, path, _read(path)) for u, path in paths]
    failed = [f for _, _, record in records if _is_done(record) for f in _left_out(record)]
    open_units = [(u, path) for u, path, record in records if not _is_done(record)]
    loaded: _Loaded | None = None
    problem: Exception | None = None
    if open_units:
        try:
            loaded = _Loaded(sweep, checkpoint, cache)
        except Exception as error:  # whatever is wrong with one model, the others go on
            problem = error
    for unit, path in open_units:
        record: dict[str, Any] = {"unit": unit, "versions": _versions()}
        try:
            if loaded is None:
                assert problem is not None
                raise problem
            record.update(_do(unit, sweep, loaded))
        except Exception as error:
            record["error"] = words_of(error)
        write_json(path, record)
        failed += _left_out(record)
    return failed


def _read(path: Path) -> dict[str, Any]:
    """Read a unit's record; one that is not there, or no record, is empty."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    kinds = {"rows": list, "unit": dict, "versions": dict, "too_large": dict}
    sound = isinstance(found, dict) and all(isinstance(found.get(k, kind()), kind) for k, kind in kinds.items())
    return found if sound and all(_is_row(row) for row in found.get("rows", ())) else {}


def _is_row(row: Any) -> bool:
    words = isinstance(row, dict) and all(isinstance(row.get(k, ""), str) for k in ("checkpoint", "kind", "measure"))
    return words and {"checkpoint", "kind"} <= set(row) and isinstance(row.get("rho", 0.0), (int, float))


def _is_done(record: Mapping[str, Any]) -> bool:
    return {"unit", "versions", "rows"} <= set(record) and "error" not in record


def _left_out(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what failed of a unit: all of it, or some radii."""
    found = [{**record["unit"], "error": record["error"]}] if "error" in record else []
    too_large = record.get("too_large", {})
    return found + [{**record["unit"], "rho": float(rho), "error": why} for rho, why in too_large.items()]


def read_rows(folder: str | os.PathLike[str], sweep: Sweep | None = None) -> list[dict[str, Any]]:
    """Read the rows of all finished units, in the order of checkpoint, kind, measure, ablation and radius.

    Parameters
    ----------
    folder
        As :func:`run_sweep` had it.
    sweep : Sweep, optional
        Only what belongs to it; else everything in the folder.

    Returns
    -------
    list of dict
        One a radius of a measure, one a checkpoint's fit, one its baselines; see :mod:`sharpness.rows`.

    Raises
    ------
    FileNotFoundError
        The folder holds no results.

    Examples
    --------
    The loss and error of a network, as a sweep records them:

    >>> import tempfile
    >>> import torch
    >>> from sharpness.data import DataChoice
    >>> from sharpness.sweep import Checkpoint, Sweep
    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"x": torch.randn(4, 4), "y": torch.arange(4)}, f"{place}/data.pt")
    ...     data = DataChoice(f"{place}/data.pt")
    ...     failed = run_sweep(Sweep((net,), data, test=data, measures=(), baselines=False), place, progress=False)
    ...     row = read_rows(place)[0]
    >>> row["checkpoint"], row["kind"], row["test_error"] == row["train_error"]
    ('net', 'fit', True)
    """
    done = Path(folder) / "units"
    if not done.is_dir():
        raise FileNotFoundError(f"{folder} holds no results of a sweep (a folder 'units')")
    paths: Iterable[Path] = sorted(done.glob("*.json"))
    if sweep is not None:
        paths = [p for c in sweep.checkpoints for u in sweep.units(c) if (p := done / f"{unit_key(u)}.json").is_file()]
    rows: list[dict[str, Any]] = []
    for path in paths:
        found = _read(path)
        rows += [{**row, "unit": path.stem, **found["versions"]} for row in found.get("rows", ())]
    return sorted(rows, key=_place)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    ablation = json.dumps(row.get("ablation", {}), sort_keys=True)
    return row["checkpoint"], row["kind"], row.get("measure", ""), ablation, row.get("rho", 0.0)
