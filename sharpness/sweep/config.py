"""Sweeps from YAML or JSON files."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ..data import DataChoice, TextColumns, is_function
from ..errors import naming, require_extra, words_of
from ..evaluation import checked_radii
from ..hessian import LOCAL, measure_of
from ..measures import Measure
from .accuracies import Accuracies
from .plan import Checkpoint, Count, Seed, Settings, Sweep, applies, radii_by_measure

__all__ = ["read_config"]

Radii = float | list[float] | dict[str, float | list[float]]


class _Data(Struct, forbid_unknown_fields=True):
    """The attributes of DataChoice and TextColumns; columns without a header are numbers."""

    source: str
    batch_size: Count | UnsetType = UNSET
    batches: Count | UnsetType | None = UNSET
    num_examples: Count | UnsetType | None = UNSET
    subset_seed: Seed | UnsetType | None = UNSET
    image_size: Count | UnsetType | None = UNSET
    text: str | int | UnsetType = UNSET
    pair: str | int | UnsetType | None = UNSET
    label: str | int | UnsetType = UNSET
    label_map: dict[str, Annotated[int, Meta(ge=0)]] | UnsetType = UNSET
    header: bool | UnsetType = UNSET
    max_length: Count | UnsetType = UNSET


class _Checkpoint(Struct, forbid_unknown_fields=True):
    path: str
    model: str | None = None


class _Ablation(Struct):
    """The entries of an ablation that are not fields of the measure."""

    rho: Radii | UnsetType = UNSET
    measures: list[str] | UnsetType = UNSET


class _Config(Settings, kw_only=True, forbid_unknown_fields=True):
    """The entries of the file; see read_config."""

    checkpoints: str | _Checkpoint | list[str | _Checkpoint]
    data: str | _Data
    train: str | _Data | None = None
    test: str | _Data | None = None
    accuracies: Accuracies | None = None
    baselines: bool = True
    initial: str | None = None
    measures: list[str] = msgspec.field(default_factory=lambda: list(Sweep.measures))
    rho: Radii = msgspec.field(default_factory=dict)
    ablations: list[dict[str, Any]] = msgspec.field(default_factory=lambda: [{}])
    device: str = "cpu"
    sharded: bool = False


def read_config(path: str | os.PathLike[str]) -> Sweep:
    """Read a sweep from a YAML or JSON file.

    Parameters
    ----------
    path
        File, ``.json`` or else YAML, with the entries ``checkpoints`` (a pattern, or a list of ``{path,
        model}``), ``data``, ``train``, ``test`` (a source, or the attributes of :class:`sharpness.data.DataChoice` and
        :class:`sharpness.data.TextColumns`), or ``accuracies`` (those of :class:`Accuracies`) in place of ``test``,
        ``measures``, ``rho`` (a list for all measures, or lists by measure), ``ablations`` (a list of switches),
        ``baselines`` (true or false), ``initial`` (a checkpoint file or a transformers folder), ``device``,
        ``sharded`` (true or false), and settings of :func:`sharpness.evaluate` (``steps``, ``relative_tol``,
        ``ascent``, ``restarts``, ``seed``, ``micro_batch``, ``normalize_logits``). Paths are relative to the file.

    Returns
    -------
    Sweep

    Raises
    ------
    ValueError, OSError, ImportError
        An entry is invalid, which one sentence names; or PyYAML is missing for a YAML file.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     pathlib.Path(place, "net.pt").touch()
    ...     entry = {"path": "*.pt", "model": "torch.nn:PReLU"}
    ...     config = {"checkpoints": [entry], "data": "train.pt", "rho": {"adaptive": [0.1, 0.5]}}
    ...     _ = pathlib.Path(place, "sweep.json").write_text(json.dumps(config))
    ...     sweep = read_config(f"{place}/sweep.json")
    >>> sweep.checkpoints[0].name, sweep.measures, sweep.rho["adaptive"]
    ('net.pt', ('geodesic-inv', 'geodesic-mix', 'adaptive'), (0.1, 0.5))
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no configuration {str(path)!r}")
    found = _validated(path, _parsed(path))
    if found.test is not None and found.accuracies is not None:
        raise ValueError(f"{path} has both test and accuracies, which replace it; leave one out")
    try:
        return _sweep(found, path.parent)
    except (ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error


def _parsed(path: Path) -> Any:
    with naming(f"{path} cannot be parsed"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        with require_extra("YAML needs PyYAML (.json does without)", "sweep"):
            import yaml

        class Loader(yaml.SafeLoader):
            """YAML 1.2's numbers (1e-3 is one) and no aliases, a few of which can exceed the memory."""

            def compose_node(self, parent: Any, index: Any) -> Any:
                if self.check_event(yaml.AliasEvent):
                    event = self.get_event()
                    raise ValueError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}; write it out")
                return super().compose_node(parent, index)

        number = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
        return yaml.load(text, Loader)


def _validated(path: Path, found: Any) -> _Config:
    try:
        return msgspec.convert(found, _Config)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("Object ", "").replace("field", "entry").partition(" - at `$")
        entry = where.strip("`").removeprefix(".").replace("[...]", "")
        known = f"; known are {', '.join(_Config.__struct_fields__)}" if not entry and "unknown entry" in what else ""
        raise ValueError(f"{path}{f', entry {entry}' if entry else ''}: {what}{known}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def _sweep(found: _Config, base: Path) -> Sweep:
    measures, accuracies = tuple(found.measures), found.accuracies
    for name in measures:
        measure_of(name)
    if len(set(measures)) < len(measures):
        raise ValueError("measures contains a name twice")
    radii = radii_by_measure(found.rho, measures)
    _check_radii(radii, measures)
    if found.restarts and any(ablation.get("statistic") == "average" for ablation in found.ablations):
        raise ValueError(
            "restarts belong to searches, but an ablation has statistic: average; give it a sweep of its own"
        )
    for ablation in found.ablations:
        _check_ablation(ablation, measures)
    if found.sharded and found.baselines:
        raise ValueError("baselines are those of whole models; with sharded: true, add baselines: false")
    if accuracies is not None:
        accuracies = msgspec.structs.replace(accuracies, file=str(base / accuracies.file))
    return Sweep(
        checkpoints=_checkpoints(found.checkpoints, base),
        data=_choice(found.data, base),
        train=None if found.train is None else _choice(found.train, base),
        test=None if found.test is None else _choice(found.test, base),
        accuracies=accuracies,
        baselines=found.baselines,
        initial=None if found.initial is None else _initial(found.initial, base),
        measures=measures,
        rho=radii,
        ablations=tuple(found.ablations),
        settings={k: getattr(found, k) for k in Settings.__struct_fields__},
        device=found.device,
        sharded=found.sharded,
    )


def _choice(found: str | _Data, base: Path) -> DataChoice:
    data = _Data(found) if isinstance(found, str) else found
    given = {k: v for k in data.__struct_fields__ if (v := getattr(data, k)) is not UNSET}
    if not is_function(data.source, base):
        given["source"] = str(base / data.source)
    text = {k: given.pop(k) for k in TextColumns.__dataclass_fields__ if k in given}
    text.update({k: str(text[k]) for k in ("text", "pair", "label") if text.get(k) is not None})
    return DataChoice(columns=TextColumns(**text), **given)


def _initial(found: str, base: Path) -> Checkpoint:
    path = base / found
    if not path.exists():
        raise ValueError(f"there are no initial weights at {path}")
    return Checkpoint(path.name, str(path))


def _checkpoints(entries: str | _Checkpoint | list[str | _Checkpoint], base: Path) -> tuple[Checkpoint, ...]:
    found: list[Checkpoint] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        entry = _Checkpoint(entry) if isinstance(entry, str) else entry
        paths = sorted(str(base / found) for found in glob.glob(entry.path, root_dir=base))
        if not paths:
            raise ValueError(f"no checkpoint matches {entry.path!r} in {base}")
        for path in paths:
            model, weights = (path, None) if entry.model is None else (entry.model, path)
            found.append(Checkpoint(Path(path).name, model, weights))
    names = [c.name for c in found]
    double = sorted({n for n in names if names.count(n) > 1})
    if double:
        raise ValueError(f"two checkpoints are called {double[0]!r}; rename one of their files or folders")
    if not found:
        raise ValueError("there are no checkpoints")
    return tuple(found)


def _check_radii(radii: Mapping[str, tuple[float, ...]], measures: tuple[str, ...]) -> None:
    for name, rho in radii.items():
        if (rho or name in measures) and name not in LOCAL:
            checked_radii(measure_of(name), rho)


def _check_ablation(ablation: Mapping[str, Any], measures: tuple[str, ...]) -> None:
    msgspec.convert({k: v for k, v in ablation.items() if k in ("rho", "measures")}, _Ablation)
    _check_radii(radii_by_measure(ablation.get("rho", {}), measures), measures)
    strange = [m for m in ablation.get("measures", ()) if m not in measures]
    if strange:
        raise ValueError(f"an ablation names the measure {strange[0]!r}, which is not among measures")
    known = {"statistic", "rho", "measures", *(f.name for f in fields(Measure))} - {"name"}
    for key in ablation:
        if key not in known:
            raise ValueError(f"an ablation has an unknown switch {key!r}; known are {', '.join(sorted(known))}")
    try:
        applied = any(applies(name, ablation) for name in ablation.get("measures", measures))
    except TypeError as error:
        raise ValueError(f"an ablation has an unknown switch ({words_of(error)})") from error
    if not applied:
        raise ValueError(f"the ablation {ablation} has no meaning for any of {', '.join(measures)}")
