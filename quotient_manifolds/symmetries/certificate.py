r"""The gradient's certificate: whether the loss changes along an orbit, from a gradient that is available anyway.

A function that does not change along :math:`(G, H) \mapsto (G e^{Λ}, H e^{-Λ^H})` has derivative 0 there: for all Λ of
the group's Lie algebra :math:`\mathrm{Re}\langle C, Λ \rangle = 0` with

.. math:: C = G^H \nabla_G - (H^H \nabla_H)^H ,

an h × h matrix for each pair (one number per column for a diagonal group). This is Noether's theorem for networks: the
quantities that gradient flow conserves are the ones that certify a symmetry at a point (Kunin et al. 2021).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..linalg import at_least_float32, differentiated, in_double, standard_normal
from ..passes import Run
from .pairs import Cause, PairStack, SymmetricPair, stacks
from .slots import random_elements

#: Residuals up to this count as rounding of half-precision gradients, which under autocast float32 weights have too.
#: Measured on trained networks: up to 7e-3; in float32 up to 3e-6, in float64 up to 6e-15.
HALF_PRECISION = 0.1
#: Relative residuals and changes of outputs up to this are rounding of float64: symmetries show at most 1e-10, others
#: at least 1e-4.
ROUNDING = 1e-7
#: Condition number of the group elements that confirm a symmetry: so far along an orbit, clipped values are clipped.
CONDITION = 100.0


class NotASymmetryError(ValueError):
    """A pair that was to be divided out is not a symmetry of the loss.

    Attributes
    ----------
    pair : SymmetricPair
        The worst one.
    residual, tolerance : float
        Its residual, see :class:`Certificate`, and up to where it counts as rounding.

    Examples
    --------
    There is a ReLU between the factors:

    >>> import torch
    >>> from quotient_manifolds.symmetries import GL, NotASymmetryError, PairStack, certify, pair, slot
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU(), torch.nn.Linear(3, 4))
    >>> G = [slot(model, "0.weight", transpose=True), slot(model, "0.bias")]
    >>> wrong, weights = pair(G, [slot(model, "2.weight")], GL(3), name="layers"), dict(model.named_parameters())
    >>> model(torch.randn(8, 5)).square().sum().backward()
    >>> found = certify([PairStack([wrong])], weights, {name: p.grad for name, p in weights.items()})
    >>> try:
    ...     found.check()
    ... except NotASymmetryError as error:
    ...     print(error.pair.name, error.residual > 0.1)
    layers True
    """

    def __init__(self, pair: SymmetricPair, residual: float, tolerance: float) -> None:
        super().__init__(pair, residual, tolerance)  # all of them, so that pickle can make it anew
        self.pair, self.residual, self.tolerance = pair, residual, tolerance

    def __str__(self) -> str:
        return (
            f"the pair {self.pair.name!r} is not a symmetry of the loss: along its orbit the gradient does not vanish "
            f"(residual {self.residual:.1e}, rounding is up to {self.tolerance:.0e}); something acts between its "
            "factors (a hook, an adapter, a subclass, shared memory), or the loss has a penalty on the weights, or the "
            "gradient was clipped entry by entry, or was not taken at these weights (no zero_grad since they moved; or "
            "on purpose: optimizer.certify = False); leave the pair out of the symmetries, or skip its layer with "
            "quotient_manifolds.symmetries.skip"
        )


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


#: Random rows that C is multiplied by where it has more: its norm is estimated, but whether it is zero is exact.
PROBES = 8


@torch.no_grad()
def orbit_residuals(stack: PairStack, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
    r"""Return ‖ΩCᴴ‖ relative to its larger term, of every pair of a stack; NaN for 0/0.

    Ω is the identity up to h = 8, else Gaussian of shape (8, h): ΩCᴴ costs h/8 times less than C; with the few rows on
    the left the products are two to six times faster than with few columns on the right. For a diagonal group C is one
    number per column.
    """
    first = stack.runs[0].slot.read(weights)
    like = stack.group.to_point(first.new_empty(1, 0, *stack.shape[2:]))
    wide, h = at_least_float32(like.dtype), like.shape[-1]
    for name in stack.names:
        wide = torch.promote_types(wide, gradients.get(name, like).dtype)
    probe = torch.eye(h, dtype=wide, device=like.device)
    if h > PROBES:
        real = torch.empty(0, dtype=torch.float64, device="cpu")
        probe = standard_normal((PROBES, h), real, torch.Generator().manual_seed(0)).to(probe)
    one, two = (probe.new_zeros(stack.shape[0], *like.shape[1:-2], *probe.shape) for _ in range(2))
    for run in stack.runs:
        if run.slot.name in gradients:
            both = (run.slot.read(weights), run.slot.read(gradients))
            x, slope = (stack.group.to_point(rows).to(wide) for rows in both)
            if run.rows.start < stack.n:
                one[run.points] += (probe @ slope.mH) @ x
            else:
                two[run.points] += (probe @ x.mH) @ slope
    sizes = [torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim()))) for t in (one - two, one, two)]
    return sizes[0] / torch.maximum(sizes[1], sizes[2])


def certify(
    found: Iterable[PairStack],
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    *,
    tolerance: float = HALF_PRECISION,
    waiting: set[SymmetricPair] | None = None,
) -> Certificate:
    """Check with the gradient of a loss whether assumed symmetries of the weights hold.

    Parameters
    ----------
    found : iterable of PairStack
    weights : mapping of str to Tensor
        Where the gradient was taken, by name.
    gradients : mapping of str to Tensor
        Of any scale; those absent count as zero.
    tolerance : float
        Residuals up to this count as rounding. The default is for half precision, because a float32 gradient does not
        show whether half precision was used; 1e-4 is enough for one that was computed in float32.
    waiting : set of SymmetricPair, optional
        The pairs that had no gradient yet: stacks of others are left out, and those that have one now are removed.

    Returns
    -------
    Certificate

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import certify, find, stacks
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x, weights = torch.randn(2, 3, 8), dict(layer.named_parameters())
    >>> layer(x, x, x)[0].square()[..., 0].sum().backward()
    >>> gradients = {name: p.grad for name, p in weights.items()}
    >>> certify(stacks(find(layer).pairs, weights), weights, gradients, tolerance=1e-4).failures
    ()
    """
    looked = [s for s in found if waiting is None or not waiting.isdisjoint(s.pairs)]
    all_residuals = [
        pr for s in looked for pr in zip(s.pairs, orbit_residuals(s, weights, gradients).tolist(), strict=True)
    ]
    unreached = tuple(p for p, r in all_residuals if math.isnan(r))
    if waiting is not None:
        waiting.intersection_update(unreached)
    return Certificate({p: r for p, r in all_residuals if not math.isnan(r)}, unreached, tolerance)


@torch.enable_grad()
def output_gradients(run: Run, weights: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the gradients, by name, of a random linear function of outputs; ``.grad`` holds them afterwards."""
    for p in weights.values():
        p.requires_grad_()
        p.grad = None
    outputs = list(filter(differentiated, run()))
    draws = [standard_normal(tuple(t.shape), t, generator) for t in outputs]
    for t, draw in zip(outputs, draws, strict=True):  # a model may keep a part of the graph that it has made once
        (t * draw).sum().backward(retain_graph=True)
    return {name: p.grad for name, p in weights.items() if p.grad is not None}


def maximum(numbers: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN, which Python's max may ignore."""
    return float(torch.tensor([0.0, *numbers], dtype=torch.float64, device="cpu").max())


def change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest change of finite outputs, relative to their largest; NaN if one became NaN, or for none."""
    finite = [(b[at], a[at]) for b, a in zip(before, after, strict=True) if (at := b.isfinite()).any()]
    scale = max((float(b.abs().max()) for b, _ in finite), default=math.nan)
    return maximum(float((a - b).abs().max()) for b, a in finite) / max(scale, 1e-300)


@torch.no_grad()
def move_stacks_(found: Iterable[PairStack], weights: Mapping[str, Tensor], condition: float, seed: int) -> None:
    """Move pairs from their balanced representatives along their orbits, by random elements of the groups."""
    generator = torch.Generator().manual_seed(operator.index(seed))
    for s in found:
        balanced, _ = s.canonical(in_double(s.gather(weights)))
        A = random_elements(balanced, condition, generator)
        if s.group.positive:
            A = A.abs()
        elif balanced.shape[-1] == 1 and not balanced.is_complex():
            # Real numbers: one of every pair changes its sign, which a canonical representative may have done already.
            same = (A * (balanced * s.gather(weights)).sum(-2, keepdim=True)).flatten(1).gt(0).all(1)
            A = torch.where(same.reshape(-1, *[1] * (A.dim() - 1)), -A, A)
        s.scatter_(s.manifold().act(balanced, A), weights)


@contextmanager
def preserve_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors afterwards."""
    kept = [(t, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        for t, value in kept:
            t.detach().copy_(value)


@contextmanager
def moved(
    pairs: Sequence[SymmetricPair], weights: Mapping[str, Tensor], condition: float = CONDITION, seed: int = 0
) -> Iterator[None]:
    """Move pairs along their orbits for the time of a ``with``."""
    found = stacks(pairs, weights)
    with preserve_values(weights[name] for name in dict.fromkeys(name for s in found for name in s.names)):
        move_stacks_(found, weights, condition, seed)
        yield


@torch.no_grad()
def broken(
    pairs: Iterable[SymmetricPair], weights: Mapping[str, Tensor], run: Run, tolerance: float = ROUNDING
) -> list[SymmetricPair]:
    """Find the layers of which moves change the outputs of ``run``; the weights are as before afterwards.

    All pairs are moved together, and halved as long as an output changes by more than rounding. What has passed stays
    moved meanwhile, so that all that is left holds together.
    """
    layers: dict[tuple[str, str], list[SymmetricPair]] = {}
    for p in pairs:
        layers.setdefault((p.module, p.kind), []).append(p)
    if not layers:
        return []
    before = run()

    def failing(some: list[list[SymmetricPair]], passed: ExitStack) -> list[SymmetricPair]:
        moving = [p for layer in some for p in layer]
        with ExitStack() as stack:
            stack.enter_context(moved(moving, weights))
            if change(before, run()) <= tolerance:
                passed.push(stack.pop_all())
                return []
        half = len(some) // 2
        return [*failing(some[:half], passed), *failing(some[half:], passed)] if half else moving

    with ExitStack() as passed:
        return failing(list(layers.values()), passed)
