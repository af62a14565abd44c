"""The measures: which metric every weight carries, and how the ball is followed away from its centre."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MEASURES", "Measure", "measure"]


@dataclass(frozen=True)
class Measure:
    r"""A metric on all weights of a model, and a retraction.

    Attributes
    ----------
    name : str
    pairs : {"inv", "mix", None}
        Metric of the attention pairs; None treats their weights like all others.
    elementwise : {"adaptive", "euclidean"}
        Metric of every other weight w: :math:`\|ξ \oslash |w|\|^2` or :math:`\|ξ\|^2`.
    geodesic : {"second-order", "first-order"}
        x + ξ + ½ acceleration(ξ), or the straight line x + ξ.
    relaxation : float
        Floor on the singular values in the metric of the pairs, see :class:`quotient_manifolds.GLQuotientInv`.
    metric_scale : float
        The whole metric times c: the same geodesics, and the ball of radius ρ√c is the one of radius ρ before.
        Paper, App. I.3.
    """

    name: str
    pairs: str | None = None
    elementwise: str = "adaptive"
    geodesic: str = "second-order"
    relaxation: float = 1e-12
    metric_scale: float = 1.0

    def __post_init__(self) -> None:
        for attribute, allowed in (
            ("pairs", ("inv", "mix", None)),
            ("elementwise", ("adaptive", "euclidean")),
            ("geodesic", ("second-order", "first-order")),
        ):
            if getattr(self, attribute) not in allowed:
                raise ValueError(
                    f"measure {self.name!r}: {attribute} must be one of {allowed}, got {getattr(self, attribute)!r}"
                )
        if not self.metric_scale > 0:
            raise ValueError(f"measure {self.name!r}: metric_scale must be positive, got {self.metric_scale}")


#: The measures by name.
MEASURES: dict[str, Measure] = {
    "geodesic-inv": Measure("geodesic-inv", pairs="inv"),
    "geodesic-mix": Measure("geodesic-mix", pairs="mix"),
    "adaptive": Measure("adaptive"),
    "euclidean": Measure("euclidean", elementwise="euclidean"),
}


def measure(name: str | Measure) -> Measure:
    """Look a measure up by name; a :class:`Measure` passes through."""
    if isinstance(name, Measure):
        return name
    if name not in MEASURES:
        raise ValueError(f"unknown measure {name!r}; choose one of {', '.join(MEASURES)}, or pass a Measure")
    return MEASURES[name]
