"""What to measure, and how to search for it; a parser reads the options without importing torch.

A measure is a metric on all weights of a model, and a retraction; :mod:`sharpness.patches` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from quotient_manifolds.symmetries import SymmetricPair

AscentName = Literal["power", "apgd"]


@dataclass(frozen=True)
class Measure:
    r"""A metric on all weights of a model, and a retraction.

    Attributes
    ----------
    name : str
        Shown in results; a name in :data:`MEASURES` can be passed instead of the measure.
    pair_metric : {"inv", "mix", None}
        Metric of the symmetric pairs, unless a ``pair_patch`` has its own; None treats their weights like all others.
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
    rho : float or None
        Default radius.
    pair_patch : type or None
        Of the class: what computes with pairs, if it is not :class:`sharpness.patches.PairPatch`; a subclass of the
        measure sets it, for a metric or motion of your own.

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
    pair_metric: Literal["inv", "mix", None] = None
    elementwise: Literal["adaptive", "euclidean", "vector"] = "adaptive"
    form: Literal["own", "canonical"] = "own"
    geodesic: Literal["second-order", "first-order", "exact"] = "second-order"
    symmetry: Literal["all", "qk", "vo", "none"] = "all"
    rho: float | None = None
    pair_patch: ClassVar[Any] = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Measure).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise ValueError(f"measure {self.name!r}: {name} must be one of {get_args(kind)}, got {value!r}")

    @property
    def at_weights(self) -> Measure:
        """The measure of the same gradient and Hessian at the weights, without exact geodesics, which cost more."""
        return replace(self, geodesic="second-order") if divides(self) and self.geodesic == "exact" else self

    @property
    def takes_points(self) -> bool:
        """Whether every ``geoopt.ManifoldParameter`` moves along its manifold, in the metric that it states."""
        return self.pair_metric is not None and self.form == "own"


#: The measures by name.
MEASURES: dict[str, Measure] = {
    "geodesic-inv": Measure("geodesic-inv", pair_metric="inv", rho=0.1),
    "geodesic-mix": Measure("geodesic-mix", pair_metric="mix", rho=0.1),
    "complete-inv": Measure("complete-inv", pair_metric="inv", elementwise="vector", form="canonical", rho=0.1),
    "complete-mix": Measure("complete-mix", pair_metric="mix", elementwise="vector", form="canonical", rho=0.1),
    "adaptive": Measure("adaptive", rho=0.5),
    "euclidean": Measure("euclidean", elementwise="euclidean", rho=0.05),
}


def divides(measure: Measure, pair: SymmetricPair | None = None) -> bool:
    """Return whether a measure takes a pair modulo its symmetry, or without one any pair at all.

    Of positive numbers a representative may have other signs.
    """
    if pair is None:
        return measure.pair_metric is not None and measure.symmetry != "none"
    return not pair.group.positive and bool(pair.metric or measure.symmetry in ("all", pair.kind))


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
        for key in ("geodesic", "symmetry"):
            if key in changes and changes[key] != "none":
                raise ValueError(
                    f"{key} says how symmetric pairs are treated, but the measure {measure.name!r} treats them like "
                    f"any other weight; leave {key} out, or use a geodesic measure"
                )
    return replace(measure, **changes) if changes else measure


def checked_radii(measure: Measure, rho: float | Iterable[float] | None) -> tuple[float, ...]:
    """Return the radii of a measure; raise a ValueError for invalid ones."""
    if rho is None:
        if measure.rho is None:
            raise ValueError(f"pass a radius rho: the measure {measure.name!r} has no default")
        rho = measure.rho
    several = isinstance(rho, Iterable) and getattr(rho, "ndim", 1) > 0
    try:
        radii = () if isinstance(rho, (str, bool, Mapping)) else tuple(map(float, rho if several else [rho]))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        radii = ()
    if not radii or not all(0 < r < math.inf for r in radii):
        raise ValueError(f"rho must be one or several positive numbers, got {rho!r}")
    if len(set(radii)) < len(radii):
        raise ValueError(f"rho names a radius twice: {rho!r}")
    return radii


# -- how to search for the largest loss --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """Options of the search for the largest loss, or of its mean over random directions.

    Attributes
    ----------
    steps : int
        Upper bound on the steps of an ascent, of one forward and one backward pass each. If the loss falls outwards at
        the best point of the sphere, further ascents search inside the ball: on spheres of a half, a quarter, … of
        the radius, and by Auto-PGD from the best point.
    relative_tol : float
        Stop an ascent when a first-order step can gain less than this share of the increase found so far; 0 takes all
        steps.
    ascent : {"power", "apgd"}
        The generalised power method or Auto-PGD, see :mod:`sharpness.ascent`.
    restarts : int
        Number of further ascents from random directions; the best result counts.
    seed : int
        Seed of the random directions, which depend only on (seed, batch, number of the start).

    Raises
    ------
    ValueError
        A value out of range.

    Examples
    --------
    Its attributes are options of :func:`sharpness.evaluate`, and stand in what that returns:

    >>> import sharpness, torch
    >>> batch = torch.eye(2), torch.tensor([0, 1])
    >>> sharpness.evaluate(torch.nn.Linear(2, 2), [batch], measure="adaptive", restarts=1, seed=3).statistic.search
    Search(steps=20, relative_tol=0.0003, ascent='power', restarts=1, seed=3)
    """

    steps: int = 20
    relative_tol: float = 3e-4
    ascent: AscentName = "power"
    restarts: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        from quotient_manifolds.linalg import as_count

        for name, least, most in (("steps", 1, math.inf), ("restarts", 0, math.inf), ("seed", 0, 2**63)):
            object.__setattr__(self, name, as_count(name, getattr(self, name), least=least, most=most))
        tol = self.relative_tol
        if isinstance(tol, bool) or not isinstance(tol, Real) or not 0 <= tol < math.inf:
            raise ValueError(f"relative_tol must be a number of at least 0, got {tol!r}")
        if self.ascent not in get_args(AscentName):
            raise ValueError(f"unknown ascent {self.ascent!r}; choose one of {', '.join(get_args(AscentName))}")
