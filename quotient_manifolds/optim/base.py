"""The base class of the optimisers on the quotient: which parameters are pairs, the order of a step, and the state."""

from __future__ import annotations

import cmath
import copy
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..linalg import at_least_float32
from ..symmetries.certificate import Certification, NotASymmetryError
from ..symmetries.found import Symmetries
from ..symmetries.lora import lora_layers
from ..symmetries.pairs import Cause, Claim, SymmetricPair, check_pairs, refused
from ..symmetries.stacks import coverage, stacks
from ..weights import is_sharded, trained, unwrapped, weights_of
from .metric import StepMetric, on_cpu, trace, wide
from .pairs import REPLACED, Layer, alone, check_places, explain, group_of, named, orientation, reasons
from .sharded import ShardedPairs, cut, full
from .stack import Stack, restored

#: Tensors by the names of parameters.
Tensors = Mapping[str, Tensor]

#: Who saved a state without pairs.
_UNKNOWN = (
    "an optimiser without pairs, such as AdamW (or by get_optimizer_state_dict of torch.distributed.checkpoint, which "
    "leaves the pairs out: save optimizer.state_dict() itself)"
)
_TOO_LARGE = "is too large for the dtype of its factors, so it takes no step; lower the learning rate"
_SKIPPED = (
    "gradients were NaN or infinite, or the second factor of a pair lacked full rank; check the loss, lower the "
    "learning rate, or train in bfloat16"
)
#: Options: from where, below which number, and in words.
_OPTIONS = {
    "lr": (0, 1e30, "a number of at least 0"),
    "weight_decay": (0, 1e30, "a number of at least 0"),
    "betas": (0, 1, "two numbers in [0, 1)"),
    "eps": (5e-324, math.inf, "positive (a factor without a gradient is divided by it)"),
    "momentum": (0, 1, "a number in [0, 1)"),
    "max_grad_norm": (5e-324, math.inf, "positive (None turns clipping off)"),
}


class QuotientOptimizer(Optimizer):
    """Base class of optimisers for parameters of which some are pairs (G, H) that a model sees only through G Hᴴ.

    A subclass implements ``_step_pairs``; ``others`` of torch trains all others. Moments are at least float32, small
    matrices float64. Factors become equivalent ones, moments too, before their condition spoils a step.

    Attributes
    ----------
    certify : bool
        Check the symmetry of every pair with the first gradients. Set it to False where gradients are not taken at the
        weights that are updated, as with sharpness-aware minimisers other than ``sharpness.GeodesicSAM``.
    rest : float
        The learning rate of parameters outside pairs, as a share of the optimiser's; a group's own is for all of it.
    others : str
        The class in ``torch.optim`` that trains parameters outside pairs; a group may name another, and then has the
        ``betas``, ``eps`` and ``momentum`` that are that one's defaults.
    """

    certify, rest, others = True, 1.0, "AdamW"

    def __init__(self, params: Any, symmetries: Symmetries | Iterable[SymmetricPair], options: dict[str, Any]) -> None:
        self._within: nn.Module | None = options.pop("within", None)
        self._stacks, self._inside = list[Stack](), set[str]()  # the names of what has lain in the model
        self._layers = list[Layer]()  # of LoRA
        self._homes = dict[str, tuple[Any, ...]]()
        self._warned, self._skipped = set[str](), torch.tensor(0)
        if unknown := options.keys() - _OPTIONS.keys():
            raise TypeError(f"{type(self).__name__} has no option {min(unknown)!r}")
        # Schedules that cycle a momentum would cycle betas[0] instead if both were defaults.
        apart = options.keys() & {"betas", "eps"} if "momentum" in options else ()
        self._of_others = {name: options.pop(name) for name in apart}
        super().__init__(params, {"weight_decay": 0.0, "max_grad_norm": None, **options})
        self.add_pairs(symmetries)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap :meth:`step` as torch does for every class of optimisers, and keep ``torch.compile`` out of it."""
        whole = torch.compiler.disable(Optimizer.profile_hook_step(func))
        # A plain function around it: torch 2.7 compiles what it finds inside a method that is disabled.
        return functools.wraps(func)(lambda *args, **kwargs: whole(*args, **kwargs))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimisers do; :meth:`add_pairs` tells which of them form pairs.

        They come with their names, as from ``named_parameters``. Its ``lr`` holds for all of them; without one, that of
        the optimiser does, as for the groups it was made with.
        """
        if "symmetries" in param_group:
            raise TypeError("a group of parameters takes no symmetries; pass them to add_pairs")
        group = {"rest": 1.0 if "lr" in param_group else self.rest, "others": self.others, **param_group}
        theirs = self._of_others
        if group["others"] != self.others:
            other = getattr(torch.optim, group["others"])([torch.empty(0, 0, requires_grad=True)])
            theirs = {k: other.defaults[k] for k in ("betas", "eps", "momentum") if k in other.defaults}
        check_options({**self.defaults, **theirs, **group}, self.defaults)
        if not isinstance(group["params"], set):  # which torch refuses
            group["params"] = named(group, self._within)
        super().add_param_group({**theirs, **group})

    def add_pairs(self, symmetries: Symmetries | Iterable[SymmetricPair]) -> None:
        """Tell which of the optimiser's parameters form pairs; known pairs are ignored.

        Those of which a weight is frozen, or not among the parameters, are trained like parameters outside pairs, and
        so is what is refused; a warning names them.
        """
        given = symmetries if isinstance(symmetries, Symmetries) else Symmetries(tuple(check_pairs(symmetries)))
        old = [p for s in self._stacks for p in s.given]
        claims: list[Claim] = [*old, *given.pairs, *given.refused]
        known = {name for p in claims for name in p.names}
        for g in self.param_groups if self._within is None else ():
            g["param_names"] = unwrapped(g["param_names"], known)
        weights = self._weights()
        home = {name: i for i, g in enumerate(self.param_groups) for name in g["param_names"]}
        moving = trained(weights)
        found, taken = given.restricted(moving), {s: p.name for p in old for s in p.slots}
        left, chosen = list(found.refused), dict[tuple[Any, ...], list[SymmetricPair]]()
        for pair in (p for p in found.pairs if taken.keys().isdisjoint(p.slots)):
            group, flipped = group_of(pair, home, weights), orientation(pair, weights)
            if flipped is None:
                left.append(refused(pair, Cause.DEFICIENT, f"a rank below {pair.group.h}"))
                continue
            if pair.name in taken.values():
                raise ValueError(f"two pairs are called {pair.name!r}; give each of yours another name")
            taken.update(dict.fromkeys(pair.slots, pair.name))
            # Adapters take turns: those that are switched off stay out of the others' stacks.
            alike = (group, flipped, pair.scale, pair.part, is_sharded(weights[pair.G[0].name]))
            chosen.setdefault(alike, []).append(pair)
        new = [Stack(s.pairs, alike[1], alike[0], weights) for alike, ps in chosen.items() for s in stacks(ps, weights)]
        self._stacks += new
        self._cover(weights)
        if self._within is not None:
            self._inside |= weights_of(self._within).keys() & weights.keys()
            scales = {name: p.scale for s in self._stacks for p in s.given for name in p.names}
            own = {p: name for name, p in weights.items()}
            layers = ((layer, name, own.get(B)) for layer, name, B in lora_layers(self._within))
            self._layers = [(layer, name, scales.get(B)) for layer, name, B in layers if B is not None]
        left = alone(left, {k: p for k, p in moving.items() if k not in self._covered or k in self._partly})
        if not self._stacks and not any(p.kind == "lora" for p in left):
            why = f" ({reasons(left)})" if left else ""
            raise ValueError(
                f"no pair (G, H) is among the parameters{why}; create_quotient_lora_optimizer(model, lr=…) finds those "
                "of adapters, create_quotient_optimizer those of attention; for a model without either use AdamW"
            )
        if left:
            every: list[Claim] = [*left, *(p for s in new for p in s.given)]
            what = "adapters" if all(p.kind == "lora" for p in every) else "parts of the model"
            which = f"{len(left)} of {len(every)} {what}, which form no pair: {reasons(left)}"
            warnings.warn(f"{self._rest()} trains {which}", stacklevel=5)

    def _weights(self) -> dict[str, Tensor]:
        """Return the parameters as they are now, by their names."""
        groups = [(group["param_names"], group["params"]) for group in self.param_groups]
        if any(len(names) != len(params) for names, params in groups):
            raise ValueError(f"a group has not as many names as parameters: some {REPLACED}")
        found = [named for group in groups for named in zip(*group, strict=True)]
        if len(weights := dict(found)) < len(found):
            name = Counter(name for name, _ in found).most_common(1)[0][0]
            raise ValueError(
                f"two parameters are called {name!r}; put several models into one module, such as nn.ModuleList, and "
                "take names and symmetries of that"
            )
        return weights

    def _rest(self) -> str:
        return " or ".join(dict.fromkeys(group["others"] for group in self.param_groups))

    def _cover(self, weights: Tensors) -> None:
        self._shards = ShardedPairs(self._stacks, weights)
        self._certification = Certification(s.pairs for s in self._stacks)
        # Most masks are not kept: a byte for every weight.
        masks = coverage((s.pairs for s in self._stacks), weights)
        self._covered = {name: int((~mask).sum()) for name, mask in masks.items()}
        cuts = {name: (weights[name], m) for name, m in masks.items() if self._covered[name]}
        self._partly = {name: cut(p, m) if is_sharded(p) else m for name, (p, m) in cuts.items()}
        self._homes = {name: home_of(p) for name, p in weights.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, and return the loss of the closure, which is called once.

        On the CPU, NaN or infinite gradients and an anchor without full rank raise a ValueError, and neither weights
        nor state change. On other devices such a step changes nothing either, but :meth:`state_dict` alone says so, for
        the host need not wait for the device.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:  # which schedules change
            check_options(group, self.param_groups[0])
        weights = self._weights()
        if self._within is not None:
            check_places(self._within, self._layers, {k: p for k, p in weights.items() if k in self._inside})
        homes = {name: home_of(p) for name, p in weights.items()}
        if any(self._homes.get(name, home) != home for name, home in homes.items()):  # as after model.double()
            self.load_state_dict(self.state_dict())
        gradients = self._shards.gradients(weights)
        if any(map(attrgetter("is_sparse"), gradients.values())):
            raise ValueError("a gradient is sparse, which is not supported; build the embedding with sparse=False")
        if gradients:
            with torch.autocast(next(iter(weights.values())).device.type, enabled=False):
                self._step(weights, gradients)
        return loss

    def _step(self, weights: Tensors, gradients: Tensors) -> None:
        """Update the parameters that have a gradient."""
        whole, whole_gradients = self._shards.gather(weights, gradients)
        started = [s for s in self._stacks if s.begin(whole, whole_gradients)]
        running = [s for s in started if s.runs]
        outside = {name: g for name, g in gradients.items() if name not in self._covered}
        outside.update((k, gradients[k].masked_fill(mask, 0)) for k, mask in self._partly.items() if k in gradients)
        for s in running:  # elsewhere in double precision where straighten_ will act, which sees one step more
            s.measure(self._metric, *((False, True) if on_cpu(s.sizes) else (s.steps % 8 == 0,)))
        if not self._is_sound(running, gradients, outside):
            return
        # At steps 1, 2, 3, 5, 9, and so on: pairs without a gradient, such as experts without tokens, keep waiting, and
        # looking reads from the device.
        looking = [s for s in started if s.steps & (s.steps - 1) == 0]
        if self.certify and any(not self._certification.open.isdisjoint(s.pairs.pairs) for s in looking):
            pairs = {name: full(weights[name]) for name in self._covered}
            self._certify(pairs, {name: full(g) for name, g in gradients.items() if name in pairs})
        for s in started:
            s.steps += 1
        for s in running:
            if s.straight:
                continue
            stays = s.straighten_(self._metric)
            s.restrict(~stays)
            if not on_cpu(stays):
                self._skipped = self._skipped.to(stays.device) + stays.any()
            elif bool(stays.any()):
                self._warn_once("too large", f"pair {s.name(stays)!r}: its product {_TOO_LARGE}")
        bound = self.param_groups[0]["max_grad_norm"]  # that of a loaded state, too
        if bound is not None:
            outside = _clip(float(bound), running, outside, self._shards)
        for s in running:
            group = self.param_groups[s.group]
            s.state = s.state or self._new_state(s)
            self._step_pairs(group, s)
        self._shards.scatter_(whole, weights)
        whole.clear()
        if outside:
            _step_others(self, self._partly, weights, outside)
        for s in running:
            if not on_cpu(s.sizes):
                del s.x, s.g, s.spare

    def _is_sound(self, running: Sequence[Stack], gradients: Tensors, outside: Tensors) -> bool:
        """Return whether to take the step; if not, raise on the CPU, and let nothing change elsewhere."""
        # The norm of a gradient, or its sum in float32 at least, tells whether it is finite.
        parts = self._shards.once(outside.values(), copies=True)
        numbers = [g.sum(dtype=at_least_float32(g.dtype)) for g in parts]
        numbers += [s.sizes if s.straight else s.sizes / s.sound().all() for s in running]
        total = self._shards.sum(numbers)
        if not on_cpu(total):
            sound = total.abs() < torch.inf
            self._skipped = self._skipped.to(sound.device) + ~sound
            for s in running:
                s.restrict(sound.to(s.sizes.device))
            # AdamW cannot take a step of zero length, and undoing one needs copies of weights and state. So where
            # AdamW has parameters to update, the host waits for the device once. Pairs alone need no waiting.
            return not outside or bool(sound)
        if cmath.isfinite(total.item()):
            return True
        explain(running, gradients, self._within)

    def _certify(self, weights: Tensors, gradients: Tensors) -> None:
        """Raise for a pair that is no symmetry; warn if none has passed, or only adapters, which are ones, fail."""
        found = self._certification.see(weights, gradients)
        try:
            found.check()
        except NotASymmetryError as error:
            wrong = found.failures
            if len(wrong) < len(found.residuals) and any(p.kind != "lora" for p in wrong):
                raise
            self._warn_once("certificate", f"{error}; the steps are taken all the same")

    def _warn_once(self, what: str, words: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(words, RuntimeWarning, stacklevel=5)

    def _metric(self, s: Stack, grams: Tensor) -> StepMetric:
        """Return the metric of a stack at points with these Gram matrices."""
        M, N = grams.unbind(-3)
        return StepMetric(M, N, s.scale)

    def _new_state(self, s: Stack) -> dict[str, Tensor]:
        """Return the state of a stack before its first step."""
        return {f"moment {side}": m.zero_() for side, m in zip("GH", s.room(), strict=True)}

    def _step_pairs(self, group: Mapping[str, Any], s: Stack) -> None:
        """Update the pairs of a stack, and their state."""
        raise NotImplementedError

    def __repr__(self) -> str:
        kinds = Counter((p.kind == "lora", p.group.h) for s in self._stacks for p in s.given)
        parts = [f"{n} {'adapter' if lora else 'pair'}{'s' * (n > 1)} of rank {h}" for (lora, h), n in kinds.items()]
        left = sum(self._covered.get(name, p.numel()) for name, p in self._weights().items())
        what = f"{', '.join(parts) or 'nothing'} on the quotient; {left} other weights by {self._rest()}"
        return f"{what}\n{super().__repr__()}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "step"}  # which schedulers replace

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of torch's state and, under ``"pairs"`` and ``"stacks"``, the state of the pairs.

        It warns of steps off the CPU that changed nothing because gradients were not finite or an anchor lacked full
        rank.
        """
        if count := int(self._skipped):
            warnings.warn(f"{count} steps were skipped: {_SKIPPED}", RuntimeWarning, stacklevel=2)
        kept = ("names", "flipped", "group", "steps")
        stacks = [{k: getattr(s, k) for k in kept} | {"state": self._shards.whole_state(s)} for s in self._stacks]
        more = {"kind": type(self).__name__, "pairs": [name for s in stacks for name in s["names"]], "stacks": stacks}
        found = {**super().state_dict(), **more}
        found["state"] = {i: {k: full(v) for k, v in state.items()} for i, state in found["state"].items()}
        return copy.deepcopy(found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict` of the same class of optimiser for the same pairs, and continue exactly.

        Pairs are found by their names; other parameters, as by all of torch's optimisers, by their order.
        """
        if (kind := state_dict.get("kind", _UNKNOWN)) != (own := type(self).__name__):
            raise ValueError(
                f"this state was saved by {kind}, not by {own}; to switch, load the model's weights and start a new "
                "optimiser with a short warm-up of the rate"
            )
        saved, weights = (
            copy.deepcopy(state_dict),
            self._weights(),
        )  # torch would keep tensors, which the next step changes
        # Others have reached full rank since the saved optimiser was created.
        found = restored(saved["stacks"], (p for s in self._stacks for p in s.given), weights, self._new_state)
        groups = [{k: v for k, v in group.items() if k != "param_names"} for group in saved["param_groups"]]
        super().load_state_dict({"state": saved["state"], "param_groups": groups})
        for w, state in self.state.items():
            if is_sharded(w):
                state.update((k, cut(w, v)) for k, v in state.items() if isinstance(v, Tensor) and v.shape == w.shape)
        self._stacks = found
        self._cover(weights)


def _clip(bound: float, running: Sequence[Stack], outside: Tensors, shards: ShardedPairs) -> dict[str, Tensor]:
    """Multiply all gradients so that their common norm, in which pairs count by the metric, is at most a bound."""
    squares = [torch.linalg.vector_norm(wide(g)).square() for g in shards.once(outside.values())]
    for s in running:
        if shards.rank == 0 or s.own != slice(None):  # every process steps a pair that is not sharded
            K_inv = s.metric.inverse_roots
            squares.append(s.only(trace(K_inv @ s.grams() @ K_inv.mH), 0).sum())
    factor = (bound / (shards.sum(squares).sqrt() + 1e-12)).clamp_max(1.0)
    for s in running:
        torch._foreach_mul_(s.g, factor.to(s.g[0].device, s.dtype))
    return {name: g * factor.to(g.device) for name, g in outside.items()}


def _step_others(optimizer: QuotientOptimizer, partly: Tensors, weights: Tensors, gradients: Tensors) -> None:
    """Let optimisers of torch update the parameters outside pairs, and the other entries of those in pairs."""
    kept = {weights[name]: weights[name].grad for name in gradients}
    for name, g in gradients.items():
        weights[name].grad = g.to(weights[name].dtype)
    for group in optimizer.param_groups:
        names = [name for name in group["param_names"] if name in gradients]
        lr = group["rest"] * float(group["lr"])
        decay = lr * group["weight_decay"]
        whole = [weights[name] for name in names if name not in partly]
        if decay and whole:
            torch._foreach_mul_(whole, 1 - decay)
        for name in names:
            if name in partly and weights[name].dim() > 1:  # vectors do not decay
                weights[name].mul_(torch.where(partly[name], 1, 1 - decay))
        if names:
            params = [(name, weights[name]) for name in names]
            own = {**group, "params": params, "lr": lr, "weight_decay": 0.0}
            others = getattr(torch.optim, group["others"])([own])  # for this step, with rates and state of ours
            others.state = optimizer.state
            others.step()
    for p, grad in kept.items():
        p.grad = grad


def home_of(p: Tensor) -> tuple[Any, ...]:
    """Return what the state of a parameter depends on: its dtype, device, and how it is sharded."""
    return p.dtype, p.device, getattr(p, "placements", None)


def is_number(value: Any, least: float = -math.inf, below: float = math.inf) -> bool:
    """Return whether a value is a number in [least, below), or a tensor with one such number."""
    number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
    return number and not isinstance(value, bool) and least <= float(value) < below


def check_options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for an option of a parameter group that is out of range."""
    for name, (least, below, words) in _OPTIONS.items():
        value = group.get(name)
        if name not in group or (name == "max_grad_norm" and value is None):
            continue
        values = value if name == "betas" and isinstance(value, tuple | list) else [value]
        if len(values) != (2 if name == "betas" else 1) or not all(is_number(v, least, below) for v in values):
            raise ValueError(f"{name} must be {words}, got {value!r}")
    if group["max_grad_norm"] != defaults["max_grad_norm"]:
        raise ValueError("max_grad_norm clips all groups together; pass it to the optimiser, not to a group")
