"""How to search for the largest loss; a parser reads its options without importing torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

AscentName = Literal["power", "apgd"]


def counted(options: Any, **least: int) -> None:
    """Raise unless these options, of which some may be None by default, are whole numbers from the least on."""
    from quotient_manifolds.linalg import as_count

    for name, at_least in least.items():
        if (value := getattr(options, name)) is not None or getattr(type(options), name) is not None:
            most = 2**63 if name == "seed" else math.inf
            object.__setattr__(options, name, as_count(name, value, least=at_least, most=most))


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
        counted(self, steps=1, restarts=0, seed=0)
        tol = self.relative_tol
        if isinstance(tol, bool) or not isinstance(tol, Real) or not 0 <= tol < math.inf:
            raise ValueError(f"relative_tol must be a number of at least 0, got {tol!r}")
        if self.ascent not in get_args(AscentName):
            raise ValueError(f"unknown ascent {self.ascent!r}; choose one of {', '.join(get_args(AscentName))}")
