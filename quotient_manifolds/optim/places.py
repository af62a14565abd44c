"""Where a model holds the parameters of its optimiser: whoever replaces them later leaves the new ones untrained."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, nn

from ..symmetries import SymmetricPair
from ..symmetries.lora import lora_layers

__all__ = ["Places", "check_owned", "followed"]

#: What has become of parameters that are not where they were.
GONE = (
    "have been replaced or deleted since this optimiser was created (load_state_dict(assign=True), delete_adapter, "
    "merge_and_unload, or FSDP2 and DeepSpeed, whose shards have no geometry of their own); create it anew, or use DDP"
)


class Places:
    """The places of an optimiser's parameters in a model, looked up at every step, each module on the way once."""

    def __init__(self, model: nn.Module, own: AbstractSet[Tensor]) -> None:
        self.model = model
        self._adapters = [[m, a, m.scaling[a]] for m, a, B in lora_layers(model) if B in own]
        self._find(own)

    def _find(self, own: AbstractSet[Tensor]) -> None:
        self._names = {name: p for name, p in self.model.named_parameters() if p in own}
        self._walk: list[tuple[int, str]] = []  # to each module from that of an earlier number; the model has number 0
        number = {"": 0}

        def number_of(path: str) -> int:
            if path not in number:
                parent, _, last = path.rpartition(".")
                self._walk.append((number_of(parent), last))
                number[path] = len(self._walk)
            return number[path]

        self._ends = [(number_of(path), last) for path, _, last in (name.rpartition(".") for name in self._names)]

    def _are_right(self, own: AbstractSet[Tensor]) -> bool:
        found: list[Any] = [self.model]
        try:
            for i, name in self._walk:
                found.append(vars(found[i])["_modules"][name])
            return all(vars(found[i])["_parameters"][name] in own for i, name in self._ends)
        except (KeyError, TypeError):  # another module, or None
            return False

    def check(self, own: AbstractSet[Tensor]) -> None:
        """Raise if parameters have left the model or are merged into others; warn of a scale that has changed."""
        if not self._are_right(own):
            inside = set(self.model.parameters())
            gone = [name for name, p in self._names.items() if p not in own & inside]
            if gone:
                more = f" and {len(gone) - 1} other parameters" if gone[1:] else ""
                raise ValueError(f"{gone[0]!r}{more} of the model {GONE}")
            self._find(own)  # a wrapper has been put around a module
        for adapter in self._adapters:
            layer, name, scale = adapter
            if layer.merged_adapters:
                raise ValueError(
                    f"adapter {layer.merged_adapters[0]!r} is merged into the base weights, which a step of its "
                    "factors does not reach; call unmerge_adapter() first"
                )
            if layer.scaling[name] != scale:
                warnings.warn(
                    f"the scale of adapter {name!r} was {scale:g} when this optimiser was created and is "
                    f"{layer.scaling[name]:g} now: its steps are as long as for the former; create it anew",
                    stacklevel=5,
                )
                adapter[2] = layer.scaling[name]

    def warn_of_others(self) -> None:
        """Warn of a parameter with a gradient, given that the optimiser's own have none."""
        name = next((name for name, p in self.model.named_parameters() if p.grad is not None), None)
        if name is not None:
            warnings.warn(
                f"no parameter of this optimiser has a gradient, but {name!r}, which is none of them, has one: an "
                "adapter that is added later joins by add_param_group",
                stacklevel=5,
            )


def followed(known: Sequence[Places], models: Iterable[nn.Module | None], own: AbstractSet[Tensor]) -> list[Places]:
    """Find the places in known and further models, of parameters that may have become more."""
    for places in known:
        places.check(own)
    return [Places(m, own) for m in dict.fromkeys([*(places.model for places in known), *models]) if m is not None]


def check_owned(pairs: Iterable[SymmetricPair], own: AbstractSet[Tensor]) -> None:
    """Raise if parameters of pairs were replaced."""
    for pair in pairs:
        if not all(getattr(b.module, b.attribute, None) in own for b in pair.G + pair.H):
            raise ValueError(f"parameters of the pair {pair.name!r} {GONE}")
