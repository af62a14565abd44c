"""What there is to do in a sweep: its units of work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..data import DataChoice, is_function
from ..measures import measure_with
from .accuracies import Accuracies
from .digests import of_data, of_model

__all__ = ["SETTINGS", "Checkpoint", "Sweep", "applies", "as_data", "radii_by_measure", "switches", "unit_key"]


#: Settings of ``evaluate`` that a configuration may give.
SETTINGS: dict[str, Any] = {
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

    Examples
    --------
    Two files with weights of one network:

    >>> network = "torch.nn:PReLU"
    >>> collection = tuple(Checkpoint(f"net{i}", network, f"nets/net{i}.pt") for i in range(2))
    >>> [(checkpoint.name, checkpoint.weights) for checkpoint in collection]
    [('net0', 'nets/net0.pt'), ('net1', 'nets/net1.pt')]
    """

    name: str
    model: str
    weights: str | None = None
    head: str | None = None


@dataclass(frozen=True)
class Sweep:
    """What is to be measured of which checkpoints.

    Attributes
    ----------
    checkpoints : tuple of Checkpoint
        Models to be measured.
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
        Names from ``sharpness.MEASURES``.
    rho : dict of str to tuple of float
        Radii by measure; a measure without any has its own default.
    ablations : tuple of dict
        Switches of ``evaluate`` (``geodesic``, ``norm``, ``symmetry``, ``relaxation``, …), for those measures to which
        they mean something, or which it names under ``measures``, and with radii of its own if it has a ``rho`` (as
        above); ``{}`` is the measure itself.
    settings : dict
        Of ``evaluate``: steps, tol, ascent, restarts, seed, micro_batch, normalize_logits.
    device : str
        Device of torch.

    Examples
    --------
    The units of work of one checkpoint, with first-order geodesics as an ablation where there are geodesics:

    >>> net = Checkpoint("net", "torch.nn:PReLU")
    >>> sweep = Sweep(
    ...     (net,), DataChoice("train.pt"), measures=("geodesic-inv", "adaptive"), rho={"adaptive": (0.1, 0.5)},
    ...     ablations=({}, {"geodesic": "first-order"}), baselines=False,
    ... )
    >>> [(unit["measure"], unit["rho"], unit["ablation"]) for unit in sweep.units(net)]
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

    def units(self, checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
        """Give what there is to do for a checkpoint, as plain data; equal units have equal results.

        Parameters
        ----------
        checkpoint : Checkpoint
            Its files are read, for a hash of the weights.

        Yields
        ------
        dict
            A unit of work.
        """
        where = {"checkpoint": checkpoint.name, "model": checkpoint.model, "weights": _digest(checkpoint)}
        if self.test is not None:
            yield {**where, "kind": "fit", "train": as_data(self.train or self.data), "test": as_data(self.test)}
        elif self.accuracies is not None:
            known = self.accuracies.of(checkpoint.name)
            yield {**where, "kind": "fit", "train": as_data(self.train or self.data), "known": known}
        if self.baselines:
            start = None if self.initial is None else _digest(self.initial)
            yield {**where, "kind": "baselines", "data": as_data(self.data), "initial": start}
        for name in self.measures:
            for ablation in self.ablations:
                switched = switches(ablation)
                if not applies(name, switched) or name not in ablation.get("measures", (name,)):
                    continue
                how = measure_with(name, **switched)
                radii = {**self.rho, **radii_by_measure(ablation.get("rho", {}), self.measures)}
                rho = [] if how.local else list(radii.get(name) or filter(None, [how.rho]))
                yield {
                    **where, "kind": "sharpness", "measure": name, "rho": rho, "ablation": switched,
                    "data": as_data(self.data), "settings": {**SETTINGS, **self.settings},
                }  # fmt: skip


def switches(ablation: Mapping[str, Any]) -> dict[str, Any]:
    """Give what an ablation sets of ``evaluate``: all but its radii and measures."""
    return {k: v for k, v in ablation.items() if k not in ("rho", "measures")}


def radii_by_measure(rho: Any, measures: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """Turn a number, a list or either by measure into radii by measure."""
    by_measure = rho if isinstance(rho, Mapping) else dict.fromkeys(measures, rho)
    return {k: tuple(float(r) for r in (v if isinstance(v, (list, tuple)) else [v])) for k, v in by_measure.items()}


def as_data(choice: DataChoice) -> dict[str, Any]:
    """Turn a choice of data into what JSON can hold, with a digest of what the source holds."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(choice)))
    return {**found, "digest": of_data(choice.source)}


def _digest(checkpoint: Checkpoint) -> str:
    return of_model(checkpoint.model, checkpoint.weights, checkpoint.head)


def applies(name: str, ablation: Mapping[str, Any]) -> bool:
    """Whether the switches mean anything for a measure."""
    try:
        measure_with(name, **ablation)
    except ValueError:
        return False
    return True


def unit_key(unit: Mapping[str, Any]) -> str:
    """Hash a unit of work, for the name of its file: by contents, not by the spelling of paths."""

    def contents(value: Any) -> Any:
        if isinstance(value, Mapping) and "digest" in value and not is_function(value["source"]):
            return {k: v for k, v in value.items() if k != "source"}
        return value

    known = {k: contents(v) for k, v in unit.items() if k != "model" or not Path(v).exists()}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:20]
