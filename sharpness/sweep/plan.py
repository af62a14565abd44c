"""The plan of a sweep: its jobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict as fields_of

from ..data import DataChoice, is_function
from ..hessian import LOCAL, measure_of
from ..measures import Measure
from .accuracies import Accuracies
from .digests import of_data, of_model

__all__ = ["Checkpoint", "Sweep"]

Count = Annotated[int, Meta(ge=1, le=2**53)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: A job as plain data: checkpoint, kind, and everything that its result depends on.
Job = Mapping[str, Any]


class Settings(Struct, kw_only=True):
    """Settings of :func:`sharpness.evaluate` that a configuration may contain."""

    steps: Count = 20
    relative_tol: Annotated[float, Meta(ge=0)] = 3e-4
    ascent: Literal["power", "apgd"] = "power"
    restarts: Annotated[int, Meta(ge=0)] = 0
    seed: Seed = 0
    micro_batch: Count | None = None
    normalize_logits: bool = False


@dataclass(frozen=True)
class Checkpoint:
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


@dataclass(frozen=True)
class Sweep:
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
    baselines : bool
        Whether to compute norms and relative flatness too, see :mod:`sharpness.baselines`.
    initial : Checkpoint or None
        The model from which all were fine-tuned, for the distance from it.
    measures : tuple of str
        Names in ``sharpness.MEASURES``, or of quantities at the weights in ``sharpness.hessian.LOCAL``.
    rho : dict of str to tuple of float
        Radii by measure; by default the measure's own.
    ablations : tuple of dict
        Fields of ``Measure`` (``geodesic``, ``symmetry``, ``relaxation``, …) and ``statistic``, applied to all measures
        for which they have a meaning, or to those listed under ``measures``; with an entry ``rho`` (as above) an
        ablation has its own radii. ``{}`` is the measure itself.
    settings : dict
        Of ``evaluate``: steps, relative_tol, ascent, restarts, seed, micro_batch, normalize_logits.
    device : str
        Device of torch.
    sharded : bool
        Shard every model over the processes of torchrun, which then measure each checkpoint together.

    Examples
    --------
    The jobs of one checkpoint, with first-order geodesics as an ablation where there are geodesics:

    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> sweep = Sweep(
    ...     (net,), DataChoice("train.pt"), measures=("geodesic-inv", "adaptive"), rho={"adaptive": (0.1, 0.5)},
    ...     ablations=({}, {"geodesic": "first-order"}), baselines=False,
    ... )
    >>> [(job["measure"], job["rho"], job["ablation"]) for job in sweep.jobs(net)]
    [('geodesic-inv', [0.1], {}), ('geodesic-inv', [0.1], {'geodesic': 'first-order'}), ('adaptive', [0.1, 0.5], {})]
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
    sharded: bool = False

    def __post_init__(self) -> None:
        self.measured()

    def jobs(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Return the jobs of a checkpoint, whose files are read for their digests. Equal jobs have equal results."""
        where = {"checkpoint": checkpoint.name, "model": checkpoint.model, "weights": _digest(checkpoint)}
        if self.test is not None:
            yield {**where, "kind": "fit", "train": as_data(self.train or self.data), "test": as_data(self.test)}
        elif self.accuracies is not None:
            known = self.accuracies.of(checkpoint.name)
            yield {**where, "kind": "fit", "train": as_data(self.train or self.data), "known": known}
        if self.baselines:
            start = None if self.initial is None else _digest(self.initial)
            yield {**where, "kind": "baselines", "data": as_data(self.data), "initial": start}
        for name, ablation, rho in self.measured():
            yield {
                **where, "kind": "sharpness", "measure": name, "rho": rho, "ablation": ablation,
                "data": as_data(self.data), "settings": {**fields_of(Settings()), **self.settings},
            }  # fmt: skip

    def measured(self) -> list[tuple[str, dict[str, Any], list[float]]]:
        """List the measures with the fields that are changed, and their radii, each once.

        Raises a ValueError if two entries of ``ablations`` share some radii of a measure, but not all.
        """
        found: list[tuple[str, dict[str, Any], list[float]]] = []
        for name in self.measures:
            for ablation in self.ablations:
                if not applies(name, ablation) or name not in ablation.get("measures", (name,)):
                    continue
                radii = {**self.rho, **radii_by_measure(ablation.get("rho", {}), self.measures)}
                default = filter(None, [switched(name, ablation).rho])
                rho = [] if name in LOCAL else list(radii.get(name) or default)
                changed = switches(ablation)
                others = [set(r) for n, c, r in found if (n, c) == (name, changed)]
                common = next((set(rho) & r for r in others if set(rho) & r and set(rho) != r), None)
                if common:
                    raise ValueError(
                        f"two entries of ablations measure {name} at rho = {min(common):g}; give all radii in one"
                    )
                if set(rho) not in others:
                    found.append((name, changed, rho))
        return found


def switches(ablation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that an ablation changes: all entries but its radii and measures."""
    return {k: v for k, v in ablation.items() if k not in ("rho", "measures")}


def switched(name: str, ablation: Mapping[str, Any]) -> Measure:
    """Return a measure with the fields of an ablation."""
    changes = switches(ablation)
    statistic = changes.pop("statistic", None)
    if statistic is not None and (name in LOCAL or statistic not in ("worst", "average")):
        raise ValueError(f"statistic={statistic!r} has no meaning for {name!r}; it is 'worst' or 'average' over a ball")
    return measure_of(name, **changes)


def applies(name: str, ablation: Mapping[str, Any]) -> bool:
    """Tell whether the fields have a meaning for a measure."""
    try:
        switched(name, ablation)
    except ValueError:
        return False
    return True


def radii_by_measure(rho: Any, measures: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """Turn a number, a list, or a mapping from measures to either, into radii by measure."""
    by_measure = rho if isinstance(rho, Mapping) else dict.fromkeys(measures, rho)
    return {k: tuple(float(r) for r in (v if isinstance(v, (list, tuple)) else [v])) for k, v in by_measure.items()}


def as_data(choice: DataChoice) -> dict[str, Any]:
    """Turn a choice of data into JSON data, with a digest of the contents of its source."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(choice)))
    return {**found, "digest": of_data(choice.source)}


def _digest(checkpoint: Checkpoint) -> str:
    return of_model(checkpoint.model, checkpoint.weights)


def job_key(job: Job) -> str:
    """Hash a job for the name of its file, by contents and not by paths."""

    def contents(value: Any) -> Any:
        if isinstance(value, Mapping) and "digest" in value and not is_function(value["source"]):
            return {k: v for k, v in value.items() if k != "source"}
        return value

    known = {k: contents(v) for k, v in job.items() if k != "model" or not Path(v).exists()}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:20]
