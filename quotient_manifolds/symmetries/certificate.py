r"""The gradient's certificate: whether the loss changes along an orbit, from a gradient that is available anyway.

A function that does not change along :math:`(G, H) \mapsto (G e^{Λ}, H e^{-Λ^H})` has derivative 0 there: for all Λ of
the group's Lie algebra :math:`\mathrm{Re}\langle C, Λ \rangle = 0` with

.. math:: C = G^H \nabla_G - (H^H \nabla_H)^H ,

an h × h matrix for each pair (one number per column for a diagonal group). This is Noether's theorem for networks: the
quantities that gradient flow conserves are the ones that certify a symmetry at a point (Kunin et al. 2021).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from .refusals import Cause, NotASymmetryError


@dataclass(frozen=True)
class Certificate:
    r"""What a gradient, and finite moves, say about symmetries.

    Attributes
    ----------
    residuals : dict of SymmetricPair or Action to float
        Of pairs :math:`\|CΩ\|_F / \|G^H \nabla_G Ω\|_F` with eight random columns Ω; of others the derivative along
        the symmetry, relative to the lengths of gradient and move. Both are 0 up to rounding for a symmetry. What is
        in ``unreached`` is left out.
    unreached : tuple of SymmetricPair or Action
        What has a gradient that is exactly zero (frozen, zero, or not reached by the batch) is not certified.
    tolerance : float
        Residuals up to this count as rounding.
    changes : dict of SymmetricPair or Action to float
        The largest change of an output when a symmetry, and those of its kind that were moved with it, move, relative
        to the largest output. Empty if nothing was moved.
    changes_tolerance : float
        Changes up to this count as rounding.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import certify, find, stacks
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> layer(torch.randn(2, 3, 8)).square()[..., 0].sum().backward()
    >>> weights = dict(layer.named_parameters())
    >>> print(certify(stacks(find(layer).pairs, weights), weights, {name: p.grad for name, p in weights.items()}))
    4 symmetries certified, largest residual ... (rounding is up to 1e-01)
    """

    residuals: dict[Any, float]
    unreached: tuple[Any, ...]
    tolerance: float
    changes: dict[Any, float] = field(default_factory=dict)
    changes_tolerance: float = 1e-9

    def _beyond_rounding(self) -> tuple[list[Any], list[Any]]:
        """List what residuals refuse, and what moves do."""
        parts = ((self.residuals, self.tolerance), (self.changes, self.changes_tolerance))
        by_gradient, by_moves = ([p for p, v in values.items() if not v <= bound] for values, bound in parts)
        return by_gradient, by_moves

    @property
    def failures(self) -> tuple[Any, ...]:
        """What is no symmetry."""
        return tuple(dict.fromkeys(itertools.chain(*self._beyond_rounding())))

    @property
    def ok(self) -> bool:
        """Whether all of them are symmetries."""
        return not self.failures

    def check(self) -> None:
        """Raise a NotASymmetryError that names the worst by its gradient."""
        by_gradient, _ = self._beyond_rounding()
        if by_gradient:
            worst = max(by_gradient, key=lambda p: self.residuals[p])
            raise NotASymmetryError(worst, self.residuals[worst], self.tolerance)

    def _repr_html_(self) -> str:
        """Show every symmetry with its residual and the change of outputs, the worst first, in a notebook."""
        from ..notebook import html_table

        every = dict.fromkeys([*self.residuals, *self.changes])
        bad = set(self.failures)
        rows = [
            [s.label, self.residuals.get(s), self.changes.get(s), "no symmetry" if s in bad else "symmetry"]
            for s in sorted(every, key=lambda s: (s not in bad, -self.changes.get(s, 0.0), s.label))
        ]
        return html_table(["symmetry", "residual", "change", "verdict"], rows, str(self).splitlines())

    def __str__(self) -> str:
        by_gradient, by_moves = self._beyond_rounding()
        worst, sound = max(self.residuals.values(), default=0.0), len(self.residuals) - len(by_gradient)
        lines = [f"{sound} symmetries certified, largest residual {worst:.1e} (rounding is up to {self.tolerance:.0e})"]
        wrong = [(p, f"residual {self.residuals[p]:.1e}") for p in by_gradient]
        lines += [f"{Cause.UNCERTIFIED.value}: {p.label}" for p in self.unreached]
        if self.changes:
            what = f"{len(self.changes)} symmetries moved, largest relative change of an output"
            lines.append(f"{what} {max(self.changes.values()):.1e} (rounding is up to {self.changes_tolerance:.0e})")
        wrong += [(p, f"moves change the outputs by {self.changes[p]:.1e}") for p in by_moves]
        lines += [f"NOT A SYMMETRY: {p.label}: {how}" for p, how in wrong]
        return "\n".join(lines)
