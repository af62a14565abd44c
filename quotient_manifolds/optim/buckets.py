"""Pairs of equal shape that take a step together: their state, and what one step needs of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..linalg import at_least_float32, column_rank_ratio
from ..symmetries import PairStack, SymmetricPair
from ..symmetries.blocks import is_sharded
from .preconditioner import Preconditioner, gram, wide

__all__ = ["PairBucket", "PairStep", "check_anchors", "group_of", "is_flipped", "trace"]


def trace(S: Tensor) -> Tensor:
    """Compute the real part of the trace, (…)."""
    return S.diagonal(dim1=-2, dim2=-1).real.sum(-1)


class PairBucket:
    """Pairs of equal shape in one parameter group, oriented so that H is the anchor: of full column rank.

    ``members`` are their positions among the optimiser's pairs, ``flipped`` says that G and H have changed roles,
    and ``state`` holds tensors whose first dimension are the pairs.
    """

    def __init__(self, pairs: Sequence[SymmetricPair], members: Sequence[int], flipped: bool, group: int) -> None:
        self.stack = PairStack([replace(p, G=p.H, H=p.G) if flipped else p for p in pairs])
        self.members, self.flipped, self.group = list(members), flipped, group
        self.state: dict[str, Tensor] = {}
        first = self.stack.pairs[0]
        rows = [torch.full((b.rows,), float(len(b.shape) > 1)) for b in (*first.G, *first.H)]
        # 1 for rows of matrices, 0 for biases, which do not decay: (n + m, 1).
        self.decaying = torch.cat(rows).unsqueeze(-1)
        self._subsets: dict[tuple[int, ...], PairStack] = {}

    def _active(self) -> tuple[PairStack, Tensor | None] | None:
        """Give the pairs that have a gradient, and their positions in the stack (None: all of them)."""
        found = []
        for i, p in enumerate(self.stack.pairs):
            without = [b for b in p.G + p.H if b.tensor.grad is None]
            if not without:
                found.append(i)
            elif len(without) < len(p.G + p.H):
                b = without[0]
                raise ValueError(
                    f"pair {p.name!r}: {b.place} has no gradient but the rest of the "
                    "pair has; train both factors, or give this pair to another optimiser"
                )
        if not found:
            return None
        if len(found) == len(self.stack):
            return self.stack, None
        key = tuple(found)
        if key not in self._subsets:
            self._subsets[key] = PairStack([self.stack.pairs[i] for i in found])
        return self._subsets[key], torch.tensor(found)

    def begin(self, metric: str, gradients: Mapping[Tensor, Tensor]) -> PairStep | None:
        """Gather what a step needs of the pairs that have a gradient; None if there is no such pair."""
        found = self._active()
        if found is None:
            return None
        stack, index = found
        x, g = stack.gather(), stack.gather(gradients)
        if not x.is_complex():
            x = x.to(at_least_float32(x.dtype))
        g = g.to(x.dtype)
        rows = [stack.n, stack.m]
        grams = torch.stack([gram(part) for part in g.split(rows, dim=-2)], dim=-3)
        return PairStep(self, stack, index, metric, x, g, grams, Preconditioner(metric, *x.split(rows, dim=-2)))


@dataclass
class PairStep:
    """One step of the pairs of a bucket that have gradients; the rows of G stand above those of H.

    ``index`` are their positions in the bucket (None: all), ``x`` and ``gradient`` (pairs, …, n + m, h), ``grams`` the
    Gram matrices of the gradients of G and of H, (pairs, …, 2, h, h), and ``preconditioner`` the metric at x.
    """

    bucket: PairBucket
    stack: PairStack
    index: Tensor | None
    metric: str
    x: Tensor
    gradient: Tensor
    grams: Tensor
    preconditioner: Preconditioner

    def read(self, name: str) -> Tensor:
        """Read the state of these pairs."""
        whole = self.bucket.state[name]
        return whole if self.index is None else whole[self.index.to(whole.device)]

    def write(self, **parts: Tensor) -> None:
        """Write the state of these pairs."""
        for name, part in parts.items():
            whole = self.bucket.state[name]
            if self.index is None:
                whole.copy_(part)
            else:
                whole[self.index.to(whole.device)] = part.to(whole.dtype)

    def times(self, rows: Tensor, A: Tensor) -> Tensor:
        """Multiply the rows of G by the first matrix of (pairs, …, 2, h, h), those of H by the second."""
        parts = rows.split([self.stack.n, self.stack.m], dim=-2)
        return torch.cat([X @ B for X, B in zip(parts, A.to(rows.dtype).unbind(-3), strict=True)], dim=-2)

    def squared_norm(self) -> Tensor:
        """Square the gradient's norm in the metric, ()."""
        K_inv = self.preconditioner.inverse_roots
        return trace(K_inv @ self.grams @ K_inv.mH).sum()

    def clip_(self, factor: float) -> None:
        """Make the gradients smaller."""
        if factor != 1:
            self.gradient, self.grams = self.gradient * factor, self.grams * factor**2

    def move_(self, direction: Tensor, lr: float, weight_decay: float) -> None:
        """Let the products decay to (1 - ηλ) times themselves, and move the weights against a direction."""
        if weight_decay:
            keep = max(1 - lr * weight_decay, 0) ** 0.5
            self.x = self.x * (1 - (1 - keep) * self.bucket.decaying.to(self.x.device, self.x.real.dtype))
        self.x = self.x - lr * direction
        self.stack.scatter_(self.x)

    def transport(self) -> Tensor:
        """Give the matrices, (pairs, …, 2, h, h), that take covectors to where the weights have moved."""
        moved = Preconditioner(self.metric, *self.x.split([self.stack.n, self.stack.m], dim=-2))
        return self.preconditioner.transport_covectors(moved)


def check_anchors(steps: Sequence[PairStep]) -> None:
    """Raise where weights were replaced by ones whose anchor lacks rank."""
    sound = [s.preconditioner.is_sound() for s in steps]
    if not sound or bool(torch.stack([v.all().to(sound[0].device) for v in sound]).all()):
        return
    s, good = next((s, v) for s, v in zip(steps, sound, strict=True) if not bool(v.all()))
    bad = int((~good).flatten(1).any(1).nonzero()[0] if good.dim() > 1 else (~good).nonzero()[0])
    raise ValueError(
        f"pair {s.stack.pairs[bad].name!r}: its {'first' if s.bucket.flipped else 'second'} factor has lost "
        "its rank since the optimiser was made; no weight was changed; make a new optimiser for these weights"
    )


def group_of(pair: SymmetricPair, home: Mapping[Tensor, int], paired: Collection[Tensor]) -> int | None:
    """Give the parameter group in which a usable pair lies; None for pairs that are to be passed over.

    ``home`` has the group of every parameter, ``paired`` are the parameters of all usable pairs.
    """
    blocks = pair.G + pair.H
    inside = {home[b.tensor] for b in blocks if b.tensor in home}
    if not inside:
        return None
    if pair.group is None:
        if pair.frozen and any(b.tensor in home and b.tensor not in paired for b in blocks):
            raise ValueError(
                f"pair {pair.name!r} is half frozen ({pair.reason}), but the quotient needs both factors to move; "
                "unfreeze it, or train the other half with torch.optim.AdamW"
            )
        return None
    for b in blocks:
        if b.tensor not in home:
            raise ValueError(
                f"pair {pair.name!r}: {b.place} is not among the optimiser's "
                "parameters but the rest of the pair is; pass both factors"
            )
    if len(inside) > 1:
        raise ValueError(
            f"pair {pair.name!r} is split over the parameter groups {sorted(inside)}; put both of its factors into "
            "one group, for they move together"
        )
    for b in blocks:
        if is_sharded(b.tensor):
            raise ValueError(
                f"pair {pair.name!r} has a sharded parameter ({type(b.tensor).__name__}; FSDP, DTensor or ZeRO-3), but "
                "its geometry needs whole factors; use DDP, or keep these modules out of the sharding"
            )
    return inside.pop()


def is_flipped(pair: SymmetricPair) -> bool:
    """Tell whether the factors must change roles, because H lacks full column rank and G does not."""
    x = pair.gather().detach()
    full = []
    for X in x.split([pair.n, pair.m], dim=-2):
        tolerance = X.shape[-1] * torch.finfo(at_least_float32(X.real.dtype)).eps
        full.append(X.shape[-2] >= X.shape[-1] and bool((column_rank_ratio(wide(X)) > tolerance).all()))
    if not any(full):
        raise ValueError(
            f"pair {pair.name!r}: both factors lack full column rank ({pair.n} and {pair.m} rows, {x.shape[-1]} "
            "columns), so that some directions can never get a gradient; initialise one of them with a full-rank "
            "matrix, lower the rank, or leave the pair out"
        )
    return not full[1]
