"""Sweeps from YAML or JSON files."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from ..data import DataChoice, is_function
from ..errors import naming, require_extra
from ..hessian import measure_of
from ..measures import Measure
from .plan import Checkpoint, Common, Sweep, applies

__all__ = ["read_config"]

T = TypeVar("T")
Radii = float | list[float] | dict[str, float | list[float]]


class _Entry(Struct, forbid_unknown_fields=True):
    """A pattern of checkpoints in the file."""

    path: str
    model: str | None = None


class _File(Common, kw_only=True, forbid_unknown_fields=True):
    """The entries of the file; see read_config."""

    checkpoints: str | _Entry | list[str | _Entry]
    data: str | dict[str, Any]
    train: str | dict[str, Any] | None = None
    test: str | dict[str, Any] | None = None
    initial: str | None = None
    rho: Radii = field(default_factory=dict)


def read_config(path: str | os.PathLike[str]) -> Sweep:
    """Read a sweep from a YAML or JSON file.

    Parameters
    ----------
    path
        File, ``.json`` or else YAML, with the attributes of :class:`Sweep` as entries. ``checkpoints`` is a pattern, or
        a list of ``{path, model}``; ``data``, ``train`` and ``test`` are a source, or the attributes of
        :class:`sharpness.data.DataChoice`; ``rho`` is a list for all measures,
        or has lists by measure; ``initial`` is a checkpoint file or a transformers folder. Paths are relative to the
        file.

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
    tree = _parsed(path)
    with naming(str(path)):
        return _sweep(_converted(tree, _File), path.parent)


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


def _converted(tree: Any, kind: type[T], entry: str = "") -> T:
    """Convert plain data; raise a ValueError that names the entry, below one of the file."""
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("Object ", "").replace("field", "entry").partition(" - at `$")
        entry = (entry + where.strip("`").replace("[...]", "")).removeprefix(".")
        known = f"; known are {', '.join(_File.__struct_fields__)}" if not entry and "unknown entry" in what else ""
        raise ValueError(f"{f'entry {entry}: ' if entry else ''}{what}{known}") from error


def _sweep(file: _File, base: Path) -> Sweep:
    if file.test is not None and file.accuracies is not None:
        raise ValueError("there are both test and accuracies, which replace it; leave one out")
    if len(set(file.measures)) < len(file.measures):
        raise ValueError("measures contains a name twice")
    if file.restarts and any(ablation.get("statistic") == "average" for ablation in file.ablations):
        raise ValueError(
            "restarts belong to searches, but an ablation has statistic: average; give it a sweep of its own"
        )
    if file.sharded and (file.baselines or file.initial):
        raise ValueError("baselines and initial are for whole models; leave them out with sharded: true")
    by_measure = file.rho if isinstance(file.rho, dict) else dict.fromkeys(file.measures, file.rho)
    rho = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in by_measure.items()}
    for name in (*file.measures, *rho):
        measure_of(name)
    for ablation in file.ablations:
        _check_ablation(ablation, file.measures)
    accuracies = file.accuracies
    if accuracies is not None:
        accuracies = msgspec.structs.replace(accuracies, file=str(base / accuracies.file))
    initial = None if file.initial is None else Checkpoint(Path(file.initial).name, str(base / file.initial))
    if initial is not None and not Path(initial.model).exists():
        raise ValueError(f"there are no initial weights at {initial.model}")
    data = {name: _choice(getattr(file, name), base, name) for name in ("data", "train", "test") if getattr(file, name)}
    common: dict[str, Any] = {name: getattr(file, name) for name in Common.__struct_fields__}
    checkpoints = _checkpoints(file.checkpoints if isinstance(file.checkpoints, list) else [file.checkpoints], base)
    more = {"checkpoints": checkpoints, "accuracies": accuracies, "initial": initial, "rho": rho}
    return Sweep(**{**common, **data, **more})


def _choice(entry: str | dict[str, Any], base: Path, name: str) -> DataChoice:
    given: dict[str, Any] = {"source": entry} if isinstance(entry, str) else {**entry}
    # Columns without a header are numbers.
    given.update({k: str(given[k]) for k in ("text", "pair", "label") if isinstance(given.get(k), int)})
    unknown = given.keys() - DataChoice.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"entry {name}: contains unknown entry `{min(unknown)}`")
    choice = _converted(given, DataChoice, name)
    if not is_function(choice.source, base):
        choice = replace(choice, source=str(base / choice.source))
    return choice


def _checkpoints(entries: list[str | _Entry], base: Path) -> tuple[Checkpoint, ...]:
    checkpoints: list[Checkpoint] = []
    for entry in entries:
        entry = _Entry(entry) if isinstance(entry, str) else entry
        paths = sorted(str(base / place) for place in glob.glob(entry.path, root_dir=base))
        if not paths:
            raise ValueError(f"no checkpoint matches {entry.path!r} in {base}")
        for path in paths:
            model, weights = (path, None) if entry.model is None else (entry.model, path)
            checkpoints.append(Checkpoint(Path(path).name, model, weights))
    names = [c.name for c in checkpoints]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"two checkpoints are called {twice[0]!r}; rename one of their files or folders")
    if not names:
        raise ValueError("there are no checkpoints")
    return tuple(checkpoints)


def _check_ablation(ablation: Mapping[str, Any], measures: Iterable[str]) -> None:
    known = {"statistic", "measures", *(f.name for f in fields(Measure))} - {"name", "rho"}
    for key in ablation:
        if key not in known:
            raise ValueError(f"an ablation has an unknown switch {key!r}; known are {', '.join(sorted(known))}")
    own = _converted(ablation.get("measures", list(measures)), list[str], "ablations")
    strange = [name for name in own if name not in measures]
    if strange:
        raise ValueError(f"an ablation names the measure {strange[0]!r}, which is not among measures")
    if not any(applies(name, ablation) for name in own):
        raise ValueError(f"the ablation {ablation} has no meaning for any of {', '.join(measures)}")
