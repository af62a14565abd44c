"""The options of the search for the largest loss in a ball."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from quotient_manifolds.checks import as_count

from .ascent import ASCENTS

__all__ = ["Search"]


@dataclass(frozen=True)
class Search:
    """Options of the search for the largest loss, or of its mean over random directions.

    Attributes
    ----------
    steps : int
        Upper bound on the steps of an ascent, of one forward and one backward pass each. Where the loss falls outwards
        at the best point of the sphere, further ascents search inside the ball, on spheres of a half, a quarter, …
        of the radius.
    relative_tol : float
        Stop an ascent when a first-order step can gain less than this share of the increase found so far; 0 takes all
        steps.
    ascent : {"power", "apgd"}
        The generalised power method or Auto-PGD, see :mod:`sharpness.ascent`.
    restarts : int
        Number of further ascents from random directions; the best result counts.
    num_samples : int
        Number of random directions of an average, at one forward pass each.
    seed : int
        Seed of the random directions, which depend only on (seed, batch, number of the start or sample).

    Raises
    ------
    ValueError
        A value out of range.

    Examples
    --------
    Its attributes are options of :func:`sharpness.evaluate`, and stand in what that returns:

    >>> import sharpness, torch
    >>> batch = torch.eye(2), torch.tensor([0, 1])
    >>> sharpness.evaluate(torch.nn.Linear(2, 2), [batch], measure="adaptive", restarts=1, seed=3).search
    Search(steps=20, relative_tol=0.0003, ascent='power', restarts=1, num_samples=20, seed=3)
    """

    steps: int = 20
    relative_tol: float = 3e-4
    ascent: str = "power"
    restarts: int = 0
    num_samples: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("steps", 1, math.inf), ("restarts", 0, math.inf), ("num_samples", 1, math.inf), ("seed", 0, 2**63)
        ):  # fmt: skip
            object.__setattr__(self, name, as_count(name, getattr(self, name), least=least, most=most))
        tol = self.relative_tol
        if isinstance(tol, bool) or not isinstance(tol, Real) or not 0 <= tol < math.inf:
            raise ValueError(f"relative_tol must be a number of at least 0, got {tol!r}")
        if not isinstance(self.ascent, str) or self.ascent not in ASCENTS:
            raise ValueError(f"unknown ascent {self.ascent!r}; choose one of {', '.join(ASCENTS)}")
