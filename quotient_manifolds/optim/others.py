"""What trains parameters outside pairs: optimisers of torch, each built once, with defaults and options of its own."""

from __future__ import annotations

import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .parameters import Tensors

Group = Mapping[str, Any]


def described(others: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the name of a class of optimisers, and its options, as a dict."""
    found = dict(others) if isinstance(others, Mapping) else {"name": others}
    if not isinstance(found.get("name"), str):
        raise ValueError(f'others must be a name, such as "AdamW", or a dict with a name and options, got {others!r}')
    if theirs := sorted({"lr", "weight_decay"} & found.keys()):
        raise ValueError(f"others takes no {theirs[0]}; give it to the optimiser, or to the group of parameters")
    return found


def build(others: Mapping[str, Any], params: Iterable[Tensor]) -> Optimizer:
    """Build an optimiser, of ``torch.optim`` or, by a name with dots, of another library."""
    options = {k: v for k, v in others.items() if k != "name"}
    name: str = others["name"]
    make = pkgutil.resolve_name(name) if "." in name else getattr(torch.optim, name, None)
    if make is None:
        raise ValueError(f"torch.optim has no {name}; of another library give the module too, as in 'library.{name}'")
    found: Optimizer = make([*params] or [torch.empty(0, 0, requires_grad=True)], lr=1.0, **options)  # set at each step
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{name} evaluates the loss within its step, so it cannot train what lies outside pairs")
    return found


class Others:
    """One optimiser of torch for every parameter group, which trains what of it lies outside pairs.

    The rate, the decay, the parameters and the state are those of the group, which schedules and users change; so are
    the ``shared`` options where the group names the same class as the optimiser of the pairs does by default.
    """

    def __init__(self, default: str, shared: Sequence[str]) -> None:
        self._default, self._shared, self._built = default, shared, list[Optimizer]()

    def build(self, groups: Sequence[Group], inside: Collection[str], state: defaultdict[Tensor, Any]) -> None:
        """Build those of new groups, for all but what is ``inside`` pairs; some have a state from the start."""
        for group in groups[len(self._built) :]:
            named = zip(group["param_names"], group["params"], strict=True)
            params = [p for name, p in named if name not in inside]
            self._built.append(made := build(group["others"], params))
            for p in params:
                if p in made.state:
                    state.setdefault(p, made.state[p])
            made.state, made.param_groups[0]["params"] = state, []  # told at each step: others may replace them

    def step(
        self,
        groups: Sequence[Group],
        weights: Tensors,
        gradients: Tensors,
        partly: Tensors,
        state: defaultdict[Tensor, Any],
    ) -> None:
        """Update the parameters that have a gradient, but not where ``partly`` says that an entry belongs to a pair."""
        kept = {weights[name]: weights[name].grad for name in gradients}
        for name, g in gradients.items():
            weights[name].grad = g.to(weights[name].dtype)
        for group, others in zip(groups, self._built, strict=True):
            if names := [name for name in group["param_names"] if name in gradients]:
                lr = group["rest"] * float(group["lr"])
                _decay_({name: weights[name] for name in names}, partly, lr * group["weight_decay"])
                shared = self._shared if group["others"]["name"] == self._default else ()
                own = {**{k: group[k] for k in shared}, **group["others"]}
                own.update(params=[weights[name] for name in names], lr=lr, weight_decay=0.0)
                others.state = state
                others.param_groups[0].update(own)
                others.step()
                others.param_groups[0]["params"] = []
        for p, grad in kept.items():
            p.grad = grad


def _decay_(weights: Tensors, partly: Tensors, decay: float) -> None:
    """Multiply weights, or their entries outside pairs, by 1 - ``decay``; a vector that is partly in pairs stays."""
    whole = [w for name, w in weights.items() if name not in partly]
    if decay and whole:
        torch._foreach_mul_(whole, 1 - decay)
    for name, w in weights.items():
        if decay and name in partly and w.dim() > 1:
            w.mul_(torch.where(partly[name], 1, 1 - decay))
