"""The measures: which metric every weight carries, how the ball is followed, and what is sought in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["MEASURES", "Measure", "measure", "measure_with"]


@dataclass(frozen=True)
class Measure:
    r"""A metric on all weights of a model, a retraction, and what is asked of the loss.

    Attributes
    ----------
    name : str
        Shown in results; those of :data:`MEASURES` can be given in place of the measure.
    pairs : {"inv", "mix", None}
        Metric of the attention pairs; None treats their weights like all others.
    elementwise : {"adaptive", "euclidean"}
        Metric of every other weight w: :math:`\|ξ \oslash |w|\|^2` or :math:`\|ξ\|^2`.
    geodesic : {"second-order", "first-order", "rk4", "exact"}
        How pairs move along ξ: x + ξ + ½ acceleration(ξ); the straight line x + ξ; the geodesic equation integrated by
        ``substeps`` steps of the classical Runge–Kutta method; or the exact geodesic. A mix geodesic that would leave
        the manifold is then shortened to 0.99 of its exit time.
    substeps : int
        Steps of "rk4".
    norm : {"metric", "adaptive"}
        Length of a pair's horizontal vectors: in the metric, or entry by entry as of any other weight (paper, App. G,
        the corrected norm off; not invariant).
    symmetry : {"all", "qk", "vo", "none"}
        The kinds of pairs that are divided out; with "none" the measure is the elementwise one.
    relaxation : float
        ε, see ``relaxation_kind``.
    relaxation_kind : {"floor", "additive"}
        A floor ε σ_1 on the singular values in the metric of the pairs, see :class:`quotient_manifolds.GLQuotientInv`,
        or the paper's M + εI, N + εI (Figure 9; not invariant).
    metric_scale : float
        The whole metric times c: the same geodesics, and the ball of radius ρ√c is the one of radius ρ before.
        Paper, App. I.3.
    case : {"worst", "average", "gradient-norm", "hessian"}
        The largest rise of the loss in the ball of radius ρ; the mean rise over Gaussian horizontal directions with
        standard deviation ρ in every coordinate; the length of the loss's gradient in the metric, which is the limit
        of worst/ρ for small ρ; or the largest eigenvalue and the trace of the Riemannian Hessian. The last two have no
        radius.
    p : {2, inf}
        The ball's norm in the coordinates of the metric; inf for elementwise measures only.
    rho : float or None
        Radius that is used if none is given.

    Raises
    ------
    ValueError
        A value that is not among those named, or a combination without meaning.

    Notes
    -----
    Paper, §5.2 (inv and mix), App. G (the norm) and I.3 (the scale). "adaptive" with p = 2 or inf is adaptive
    sharpness (Kwon et al. 2021; Andriushchenko et al. 2023), "euclidean" with p = 2 the inner maximum of SAM (Foret et
    al. 2021).

    Examples
    --------
    A measure of one's own, the mean rise in random directions along exact geodesics:

    >>> import torch
    >>> from sharpness import Measure, evaluate
    >>> mine = Measure("average-inv", pairs="inv", geodesic="exact", case="average", rho=0.05)
    >>> model = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> result = evaluate(model, [torch.ones(2, 3, 4)], lambda f, x: f(x)[..., 0].square().mean(), measure=mine)
    >>> len(result.batches[0].history), result.batches[0].spread is not None
    (20, True)
    """

    name: str
    pairs: str | None = None
    elementwise: str = "adaptive"
    geodesic: str = "second-order"
    substeps: int = 4
    norm: str = "metric"
    symmetry: str = "all"
    relaxation: float = 1e-12
    relaxation_kind: str = "floor"
    metric_scale: float = 1.0
    case: str = "worst"
    p: float = 2.0
    rho: float | None = None

    def __post_init__(self) -> None:
        for attribute, allowed in (
            ("pairs", ("inv", "mix", None)),
            ("elementwise", ("adaptive", "euclidean")),
            ("geodesic", ("second-order", "first-order", "rk4", "exact")),
            ("norm", ("metric", "adaptive")),
            ("symmetry", ("all", "qk", "vo", "none")),
            ("relaxation_kind", ("floor", "additive")),
            ("case", ("worst", "average", "gradient-norm", "hessian")),
            ("p", (2, math.inf)),
        ):
            if getattr(self, attribute) not in allowed:
                raise ValueError(
                    f"measure {self.name!r}: {attribute} must be one of {allowed}, got {getattr(self, attribute)!r}"
                )
        self._check_numbers()
        if self.divides and self.p != 2:
            raise ValueError(
                f"measure {self.name!r}: the ball with p = inf is not defined on a quotient; use p=2, or the measure "
                '"adaptive" or "euclidean"'
            )
        if self.geodesic in ("rk4", "exact") and self.relaxation_kind != "floor":
            raise ValueError(
                f"measure {self.name!r}: the additive relaxation has no geodesic equation; use second-order"
            )
        if self.norm == "adaptive" and (self.elementwise != "adaptive" or self.relaxation_kind != "floor"):
            raise ValueError(
                f'measure {self.name!r}: norm="adaptive" needs elementwise="adaptive" and relaxation_kind="floor"'
            )

    def _check_numbers(self) -> None:
        for attribute in ("metric_scale", "relaxation", "substeps", *(["rho"] if self.rho is not None else [])):
            value = getattr(self, attribute)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"measure {self.name!r}: {attribute} must be a number, got {value!r}")
        if not self.metric_scale > 0:
            raise ValueError(f"measure {self.name!r}: metric_scale must be positive, got {self.metric_scale}")
        if self.substeps < 1:
            raise ValueError(f"measure {self.name!r}: substeps must be at least 1, got {self.substeps}")
        if not self.relaxation >= 0 or (self.relaxation_kind == "additive" and self.relaxation == 0):
            raise ValueError(
                f"measure {self.name!r}: relaxation must be positive (0 is allowed for the floor), got "
                f"{self.relaxation}"
            )

    @property
    def local(self) -> bool:
        """Whether it is a quantity at the weights themselves, without a radius."""
        return self.case in ("gradient-norm", "hessian")

    @property
    def divides(self) -> bool:
        """Whether attention pairs are taken modulo their symmetry."""
        return self.pairs is not None and self.symmetry != "none"


#: The measures by name.
MEASURES: dict[str, Measure] = {
    "geodesic-inv": Measure("geodesic-inv", pairs="inv", rho=0.1),
    "geodesic-mix": Measure("geodesic-mix", pairs="mix", rho=0.1),
    "adaptive": Measure("adaptive", rho=0.5),
    "euclidean": Measure("euclidean", elementwise="euclidean", rho=0.05),
    "gradient-norm": Measure("gradient-norm", pairs="inv", case="gradient-norm"),
    "riemannian-hessian": Measure("riemannian-hessian", pairs="inv", case="hessian"),
    "euclidean-hessian": Measure("euclidean-hessian", elementwise="euclidean", case="hessian"),
}


def measure(name: str | Measure) -> Measure:
    """Look a measure up by name; a :class:`Measure` passes through.

    Parameters
    ----------
    name : str or Measure
        One of :data:`MEASURES`.

    Returns
    -------
    Measure

    Raises
    ------
    ValueError
        An unknown name.
    """
    if isinstance(name, Measure):
        return name
    if not isinstance(name, str) or name not in MEASURES:
        raise ValueError(f"unknown measure {name!r}; choose one of {', '.join(MEASURES)}, or pass a Measure")
    return MEASURES[name]


#: Switches that act on attention pairs alone.
_OF_PAIRS = ("geodesic", "norm", "symmetry", "relaxation", "relaxation_kind")


def measure_with(name: str | Measure, **switches: Any) -> Measure:
    """Look a measure up and set those switches that are not None.

    Parameters
    ----------
    name : str or Measure
        See :func:`measure`.
    **switches
        Fields of :class:`Measure`.

    Returns
    -------
    Measure

    Raises
    ------
    ValueError
        An unknown name or value, or a combination without meaning, such as a geodesic for "adaptive".

    Examples
    --------
    >>> measure_with("geodesic-inv", geodesic="exact", norm=None).geodesic
    'exact'
    """
    base = measure(name)
    given = {key: value for key, value in switches.items() if value is not None}
    if base.pairs is None:
        for key in _OF_PAIRS:
            if key in given and not (key == "symmetry" and given[key] == "none"):
                raise ValueError(
                    f"{key} says how attention pairs are treated, but the measure {base.name!r} treats them as any "
                    f"other weight; leave {key} out, or use a geodesic measure"
                )
    return replace(base, **given)
