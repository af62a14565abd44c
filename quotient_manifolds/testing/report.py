"""The result of checking a manifold."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ManifoldCheck", "ManifoldReport"]


@dataclass(frozen=True)
class ManifoldCheck:
    """The result of checking one property.

    Attributes
    ----------
    name : str
        The property that was checked.
    value : float
        Largest relative error, or the slope of an error.
    bound : float
        Bound that an error must not exceed, or a slope must reach.
    kind : {"error", "slope"}
    hint : str
        The meaning of a failure.

    Examples
    --------
    >>> from quotient_manifolds.testing import ManifoldCheck
    >>> check = ManifoldCheck("retraction: slope of the error", 1.98, 2.9, "slope", "no retraction of order 2")
    >>> print(check)
    FAILED  retraction: slope of the error        slope 1.98 not ≥ 2.9
            no retraction of order 2
    """

    name: str
    value: float
    bound: float
    kind: str
    hint: str

    @property
    def ok(self) -> bool:
        """Whether the property holds."""
        return self.value <= self.bound if self.kind == "error" else self.value >= self.bound

    def __str__(self) -> str:
        found = f"{self.value:.1e} ≤ {self.bound:.0e}" if self.kind == "error" else f"{self.value:.2f} ≥ {self.bound:g}"
        if not self.ok:
            found = found.replace("≤", "not ≤").replace("≥", "not ≥")
        line = f"{'ok' if self.ok else 'FAILED':<8}{self.name:<38}{self.kind} {found}"
        return line if self.ok else f"{line}\n        {self.hint}"


@dataclass(frozen=True)
class ManifoldReport:
    """The result of :func:`check_manifold`; ``print`` shows one line per property.

    Attributes
    ----------
    manifold : str
        Its ``repr``.
    shape : tuple of int
        Of the point.
    checks : tuple of ManifoldCheck
        The checks in the order in which they were made.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> from quotient_manifolds.testing import check_manifold
    >>> manifold = GLQuotientMix(3, 3)
    >>> x = torch.linspace(-1, 1, 12, dtype=torch.float64).sin().reshape(6, 2) + manifold.origin(3 + 3, 2)
    >>> report = check_manifold(manifold, x, retraction_order=3)
    >>> [check.name for check in report.failures]
    ['retraction: slope of the error']
    """

    manifold: str
    shape: tuple[int, ...]
    checks: tuple[ManifoldCheck, ...]

    @property
    def failures(self) -> tuple[ManifoldCheck, ...]:
        """The properties that do not hold."""
        return tuple(c for c in self.checks if not c.ok)

    @property
    def ok(self) -> bool:
        """Whether all properties hold."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raise an AssertionError with one line for each property if one does not hold."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        state = "all properties hold" if self.ok else f"{len(self.failures)} of {len(self.checks)} properties FAILED"
        return "\n".join([f"{self.manifold} at a point of shape {self.shape}: {state}", *map(str, self.checks)])
