"""The share of each layer and head in a worst direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .direction import Direction

__all__ = ["LayerShare", "LayerShares", "layer_shares"]


@dataclass(frozen=True)
class LayerShare:
    """The share of a part of a model in a worst direction.

    Attributes
    ----------
    layer : str
        The block that contains an attention module, such as ``vit.layers.3``; else the module.
    kind : str
        ``"qk"`` or ``"vo"`` of a head, ``"lora"`` or the kind of another pair, or ``"weights"`` for all other weights.
    head : int or None
        Number of the head, from 0; None for weights and for pairs without a head.
    share : float
        Share of the squared length in the measure's metric, between 0 and 1.

    Examples
    --------
    >>> LayerShare("layers.0", "qk", head=1, share=0.25)
    LayerShare(layer='layers.0', kind='qk', head=1, share=0.25)
    """

    layer: str
    kind: str
    head: int | None
    share: float


class LayerShares(list[LayerShare]):
    """Shares in the order of the model's parameters, which add up to 1; ``print`` shows a table with a row per layer.

    Parameters
    ----------
    iterable : iterable of LayerShare, optional

    Examples
    --------
    ``result.by_layer()`` gives one. Printed, it adds up the heads of a layer:

    >>> first, second = LayerShare("layers.0", "qk", 0, 0.5), LayerShare("layers.0", "qk", 1, 0.2)
    >>> print(LayerShares([first, second, LayerShare("layers.0", "weights", None, 0.3)]))
    layer           qk  weights
    layers.0     70.0%    30.0%
    """

    def by_layer(self) -> dict[str, dict[str, float]]:
        """Add up the heads.

        Returns
        -------
        dict of str to dict of str to float
            Shares by layer and kind.
        """
        found: dict[str, dict[str, float]] = {}
        for s in self:
            row = found.setdefault(s.layer, {})
            row[s.kind] = row.get(s.kind, 0.0) + s.share
        return found

    def __str__(self) -> str:
        rows = self.by_layer()
        kinds = sorted({s.kind for s in self}, key=lambda k: (k == "weights", k))
        wide = max((len(layer) for layer in rows), default=5)
        lines = [f"{'layer':<{wide}}" + "".join(f"{kind:>9}" for kind in kinds)]
        for layer, row in rows.items():
            lines.append(f"{layer:<{wide}}" + "".join(f"{row[k]:>9.1%}" if k in row else " " * 9 for k in kinds))
        return "\n".join(lines)


def _block(module: str) -> str:
    """Cut a path after its last number: ``vit.layers.3.attention`` is in ``vit.layers.3``."""
    parts = module.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])


def _layer(parameter: str, blocks: Sequence[str]) -> str:
    """Find the block of the attention module that contains a parameter, or else the parameter's own module."""
    inside = [b for b in blocks if parameter.startswith(f"{b}.")]
    return max(inside, key=len) if inside else _block(parameter.rpartition(".")[0]) or parameter


def layer_shares(directions: Sequence[Direction]) -> LayerShares:
    """Compute the share of each layer and head in directions of one model and measure, averaged over directions."""
    first = directions[0]
    moving = [d for d in directions if d.norm > 0]
    if not moving:
        raise ValueError(
            "the worst directions have length 0, because the loss did not rise at this radius; use a larger one"
        )
    blocks = sorted({_block(p.module) for p in first.pairs if p.head is not None})
    keys = [(_layer(f"{p.module}.", blocks), p.kind, p.head) for p in first.pairs]
    found: dict[tuple[str, str, int | None], float] = {}
    for direction in moving:
        own = [((_layer(name, blocks), "weights", None), square) for name, square in direction.squares.items()]
        for key, square in [*zip(keys, direction.pair_squares, strict=True), *own]:
            found[key] = found.get(key, 0.0) + square / direction.norm**2 / len(moving)
    order: dict[str, int] = {}
    for name in first.tensors:
        order.setdefault(_layer(name, blocks), len(order))

    def place(key: tuple[str, str, int | None]) -> tuple[int, bool, str, int]:
        layer, kind, number = key
        inside = [i for name, i in order.items() if name == layer or name.startswith(f"{layer}.") or not layer]
        return min(inside, default=len(order)), kind == "weights", kind, number or 0

    return LayerShares(LayerShare(*key, found[key]) for key in sorted(found, key=place))
