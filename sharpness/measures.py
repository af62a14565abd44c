"""Measures: the metric of every weight, and how pairs move along a tangent vector."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar

__all__ = ["LOCAL", "MEASURES", "Measure", "checked_radii", "get_measure", "measure_of"]


@dataclass(frozen=True)
class Measure:
    r"""A metric on all weights of a model, and a retraction.

    Attributes
    ----------
    name : str
        Shown in results; a name in :data:`MEASURES` can be passed instead of the measure.
    pair_metric : {"inv", "mix", None}
        Metric of the symmetric pairs; None treats their weights like all others.
    elementwise : {"adaptive", "euclidean", "vector"}
        Metric of every other weight w: :math:`\|ξ \oslash |w|\|^2` or :math:`\|ξ\|^2`; or, of every vector v in the
        residual stream (a neuron's row with its bias, a column of a layer that writes, a row of an embedding),
        :math:`\|ξ_v\|^2 / \|v\|^2`.
    form : {"own", "canonical"}
        Whether to measure at the model's own weights or at their canonical form
        (:mod:`quotient_manifolds.symmetries.whole`), which is the same for all equivalent weights.
    geodesic : {"second-order", "first-order", "exact"}
        How pairs move along ξ: x + ξ + ½ acceleration(ξ); the straight line x + ξ; or the exact geodesic (mix: where it
        would leave the manifold, shortened to 0.99 of its exit time).
    symmetry : {"all", "qk", "vo", "none"}
        The kinds of pairs that are divided out; with "none" the measure is the elementwise one.
    relaxation : float
        ε of the paper's relaxed Gram matrices, for a ``pair_block`` that has them.
    rho : float or None
        Default radius.
    pair_block : type or None
        Of the class: the class of the pairs' blocks, if it is not :class:`sharpness.blocks.PairBlock`; a subclass of
        the measure sets it, for a metric or motion of your own.

    Raises
    ------
    ValueError
        A value is not among those named. Numbers are checked where they are used.

    Notes
    -----
    Paper, §5.2 (inv and mix). "adaptive" is adaptive sharpness (Kwon et al. 2021; Andriushchenko et al. 2023),
    "euclidean" the inner maximum of SAM (Foret et al. 2021).

    Examples
    --------
    A measure of one's own, along exact geodesics:

    >>> import torch
    >>> from sharpness import Measure, evaluate
    >>> mine = Measure("exact-inv", pair_metric="inv", geodesic="exact", rho=0.05)
    >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> result = evaluate(model, [torch.ones(2, 3, 4)], lambda f, x: f(x)[..., 0].square().mean(), measure=mine)
    >>> float(result) > 0
    True
    """

    name: str
    pair_metric: str | None = None
    elementwise: str = "adaptive"
    form: str = "own"
    geodesic: str = "second-order"
    symmetry: str = "all"
    relaxation: float = 0.0
    rho: float | None = None
    pair_block: ClassVar[Any] = None

    def __post_init__(self) -> None:
        for attribute, allowed in (
            ("pair_metric", ("inv", "mix", None)),
            ("elementwise", ("adaptive", "euclidean", "vector")),
            ("form", ("own", "canonical")),
            ("geodesic", ("second-order", "first-order", "exact")),
            ("symmetry", ("all", "qk", "vo", "none")),
        ):
            if getattr(self, attribute) not in allowed:
                raise ValueError(
                    f"measure {self.name!r}: {attribute} must be one of {allowed}, got {getattr(self, attribute)!r}"
                )

    @property
    def divides(self) -> bool:
        """Whether pairs are taken modulo their symmetry."""
        return self.pair_metric is not None and self.symmetry != "none"


#: The measures by name.
MEASURES: dict[str, Measure] = {
    "geodesic-inv": Measure("geodesic-inv", pair_metric="inv", rho=0.1),
    "geodesic-mix": Measure("geodesic-mix", pair_metric="mix", rho=0.1),
    "complete-inv": Measure("complete-inv", pair_metric="inv", elementwise="vector", form="canonical", rho=0.1),
    "complete-mix": Measure("complete-mix", pair_metric="mix", elementwise="vector", form="canonical", rho=0.1),
    "adaptive": Measure("adaptive", rho=0.5),
    "euclidean": Measure("euclidean", elementwise="euclidean", rho=0.05),
}

#: Quantities at the weights by their names in ``sharpness run`` and sweeps: the measure, and the statistic.
LOCAL: dict[str, tuple[str, str]] = {
    "gradient-norm": ("geodesic-inv", "gradient norm"),
    "riemannian-hessian": ("geodesic-inv", "Hessian"),
    "euclidean-hessian": ("euclidean", "Hessian"),
}

#: Fields that concern only pairs.
_OF_PAIRS = ("geodesic", "symmetry", "relaxation")


def get_measure(measure: str | Measure, **changes: Any) -> Measure:
    """Look up a measure by name, and change some of its fields.

    Parameters
    ----------
    measure : str or Measure
        A name in :data:`MEASURES`, or a :class:`Measure`.
    **changes
        Fields of :class:`Measure`.

    Returns
    -------
    Measure

    Raises
    ------
    ValueError
        A name or value is unknown, or the combination has no meaning, such as a geodesic for "adaptive".

    Examples
    --------
    >>> get_measure("geodesic-inv", geodesic="exact").geodesic
    'exact'
    """
    if not isinstance(measure, Measure):
        if not isinstance(measure, str) or measure not in MEASURES:
            raise ValueError(f"unknown measure {measure!r}; choose one of {', '.join(MEASURES)}, or pass a Measure")
        measure = MEASURES[measure]
    if measure.pair_metric is None:
        for key in _OF_PAIRS:
            if key in changes and not (key == "symmetry" and changes[key] == "none"):
                raise ValueError(
                    f"{key} says how symmetric pairs are treated, but the measure {measure.name!r} treats them like "
                    f"any other weight; leave {key} out, or use a geodesic measure"
                )
    known = [f.name for f in fields(Measure)]
    for key in changes:
        if key not in known:
            raise ValueError(f"a measure has no {key!r}; its fields are {', '.join(known)}")
    return replace(measure, **changes)


def measure_of(name: str, **changes: Any) -> Measure:
    """Return the measure with a name in MEASURES or LOCAL, with some fields changed."""
    if name not in MEASURES and name not in LOCAL:
        raise ValueError(f"unknown measure {name!r}; choose one of {', '.join([*MEASURES, *LOCAL])}")
    return get_measure(LOCAL[name][0] if name in LOCAL else name, **changes)


def checked_radii(measure: Measure, rho: float | Iterable[float] | None) -> tuple[float, ...]:
    """Return the radii of a measure; raise a ValueError for invalid ones."""
    if rho is None:
        if measure.rho is None:
            raise ValueError(f"pass a radius rho: the measure {measure.name!r} has no default")
        rho = measure.rho
    scalar = isinstance(rho, Real) or getattr(rho, "ndim", None) == 0
    try:
        if isinstance(rho, (str, bool, Mapping)):
            raise TypeError
        radii = tuple(float(r) for r in ([rho] if scalar else rho))  # type: ignore[union-attr, arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}") from None
    if not radii or any(not (math.isfinite(r) and r > 0) for r in radii):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}")
    if len(set(radii)) < len(radii):
        raise ValueError(f"rho names a radius twice: {rho!r}")
    return radii
