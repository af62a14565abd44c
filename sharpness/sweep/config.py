"""A sweep from a YAML or JSON file."""

from __future__ import annotations

import glob
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..data import DataChoice, TextColumns, is_function
from ..extras import needs
from ..measures import measure_with
from .accuracies import Accuracies
from .plan import SETTINGS, Checkpoint, Sweep, applies, radii_by_measure, switches

__all__ = ["read_config"]


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
        File, ``.json`` or else YAML, with the entries ``checkpoints`` (a pattern, or a list of ``{path, model,
        head}``), ``data``, ``train``, ``test`` (a source, or the attributes of :class:`sharpness.data.DataChoice` and
        :class:`sharpness.data.TextColumns`), or ``accuracies`` (those of :class:`Accuracies`) in place of ``test``,
        ``measures``, ``rho`` (a list for all measures, or lists by measure), ``ablations`` (a list of switches),
        ``baselines`` (true or false), ``initial`` (a checkpoint file or a transformers folder), ``device``, and
        settings of :func:`sharpness.evaluate` (``steps``, ``tol``, ``ascent``, ``restarts``, ``seed``,
        ``micro_batch``, ``normalize_logits``). Paths are relative to the file.

    Returns
    -------
    Sweep

    Raises
    ------
    ValueError, OSError, ImportError
        One sentence that names the entry; YAML without PyYAML.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     pathlib.Path(place, "net.pt").touch()
    ...     entry = {"path": "*.pt", "model": "sharpness.studies.vision:vit_cifar10"}
    ...     config = {"checkpoints": [entry], "data": "train.pt", "rho": {"adaptive": [0.1, 0.5]}}
    ...     _ = pathlib.Path(place, "sweep.json").write_text(json.dumps(config))
    ...     sweep = read_config(f"{place}/sweep.json")
    >>> sweep.checkpoints[0].name, sweep.measures, sweep.rho["adaptive"]
    ('net.pt', ('geodesic-inv', 'geodesic-mix', 'adaptive'), (0.1, 0.5))
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            with needs("YAML needs PyYAML (.json does without)", "sweep"):
                import yaml
            found = yaml.safe_load(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be parsed ({error})") from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise ValueError(f"{path} cannot be parsed ({' '.join(str(error).split())})") from error
        raise
    known = {
        "checkpoints", "data", "train", "test", "accuracies", "baselines", "initial", "measures", "rho", "ablations",
        "device", *SETTINGS,
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
    radii = radii_by_measure(found.get("rho", {}), measures)
    more = [radii_by_measure(ablation.get("rho", {}), measures) for ablation in ablations]
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
        try:
            applied = any(applies(name, switches(ablation)) for name in ablation.get("measures", measures))
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
        {k: found[k] for k in SETTINGS if k in found},
        str(found.get("device", "cpu")),
    )
