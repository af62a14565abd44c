"""The base class of the optimisers on the quotient: which parameters are pairs, the order of a step, and the state."""

from __future__ import annotations

import cmath
import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..symmetries.found import Symmetries, certify
from ..symmetries.lora import lora_layers
from ..symmetries.pairs import SymmetricPair, check_pairs, coverage, stacks
from ..symmetries.refusals import Claim
from ..weights import is_sharded, trained, unwrapped, weights_of
from .clipping import clipped
from .metric import HOST, StepMetric
from .others import Others, described
from .pairs import alone, chosen, doubts, explain, reasons
from .parameters import Layer, Store, Tensors, by_name, check_options, check_places, cut, full, named
from .rules import Rule, State, moments
from .stack import Stack, restored

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


class QuotientOptimizer(Optimizer):
    """Base class of optimisers for parameters of which some are pairs (G, H) that a model sees only through G Hᴴ.

    A subclass names its rule, see :mod:`quotient_manifolds.optim.rules`; optimisers of torch train all other
    parameters. Moments are at least float32, small matrices float64. Factors become equivalent ones, moments too,
    before their condition spoils a step.

    Parameters
    ----------
    params, symmetries, lr
        As for :class:`QuotientAdam`, which also has the ``options``: ``weight_decay``, ``max_grad_norm``, ``within``,
        ``others``.
    rule_options : dict
        The options of the rule and their defaults, which every parameter group may have otherwise.

    Attributes
    ----------
    rule : callable
        From a metric, gradients and a state to an update and the new state.
    new_state : callable
        From rows of G and of H, in whose memory moments may lie, and the options of the rule to its first state; by
        default two moments.
    transports : bool
        Carry moments to the new point, as covectors.
    shared : tuple of str
        Options that parameters outside pairs have too, unless their group names another class.
    certify : bool
        Check the symmetry of every pair with the first gradients. Set it to False where gradients are not taken at the
        weights that are updated, as with sharpness-aware minimisers other than ``sharpness.GeodesicSAM``.
    rest : float
        The learning rate of parameters outside pairs, as a share of the optimiser's; a group's own is for all of it.
    others : str
        The class in ``torch.optim`` that trains parameters outside pairs, unless their group names another.

    Examples
    --------
    Gradient descent; ``docs/howto/optimizer.md`` writes Lion:

    >>> import torch
    >>> from quotient_manifolds.optim import QuotientOptimizer
    >>> from quotient_manifolds.optim.rules import Update
    >>> from quotient_manifolds.symmetries import factor_pair
    >>> class Descent(QuotientOptimizer):
    ...     new_state = staticmethod(lambda rows: {})
    ...     @staticmethod
    ...     def rule(metric, g, state):
    ...         K_inv = metric.inverse_roots
    ...         return Update(g.rows, K_inv.mH @ K_inv), state
    >>> G, H = (torch.nn.Parameter(torch.eye(n, 2)) for n in (4, 3))
    >>> optimizer = Descent([("G", G), ("H", H)], [factor_pair(G, H)], 0.1, {})
    >>> loss = (G @ H.T).square().sum()
    >>> loss.backward()
    >>> optimizer.step()
    >>> bool((G @ H.T).square().sum() < loss)
    True
    """

    rule: ClassVar[Rule]
    new_state: ClassVar[Callable[..., State]] = staticmethod(moments)
    transports, shared = True, tuple[str, ...]()
    certify, rest, others = True, 1.0, "AdamW"

    def __init__(
        self,
        params: Any,
        symmetries: Symmetries | Iterable[SymmetricPair],
        lr: float,
        rule_options: dict[str, Any],
        **options: Any,
    ) -> None:
        self._within: nn.Module | None = options.pop("within", None)
        self._stacks, self._inside = list[Stack](), set[str]()  # the names of what has lain in the model
        self._layers = list[Layer]()  # of LoRA
        self._homes = dict[str, tuple[Any, ...]]()
        self._warned, self._skipped = set[str](), torch.tensor(0)
        self._rule_options, self._others = tuple(rule_options), Others(self.others, self.shared)
        own = {"weight_decay": 0.0, "max_grad_norm": None, "others": self.others}
        if unknown := options.keys() - own.keys():
            raise TypeError(f"{type(self).__name__} has no option {min(unknown)!r}")
        super().__init__(params, {**own, **options, "lr": lr, **rule_options})
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
        group = {**self.defaults, "rest": 1.0 if "lr" in param_group else self.rest, **param_group}
        group["others"] = described(group["others"])
        check_options(group, self.defaults)
        if not isinstance(group["params"], set):  # which torch refuses
            group["params"] = named(group, self._within)
        super().add_param_group(group)

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
        weights = by_name(self.param_groups)
        moving, taken = trained(weights), {s: p.name for p in old for s in p.slots}
        choice = chosen(given.restricted(moving), taken, self.param_groups, weights)
        new = [
            Stack(s.pairs, flipped, group, weights)
            for (group, flipped, *_), pairs in choice.alike.items()
            for s in stacks(pairs, weights)
        ]
        self._stacks += new
        self._cover(weights)
        self._note_layers(weights)
        left = alone(choice.left, {k: p for k, p in moving.items() if k not in self._covered or k in self._partly})
        if not self._stacks and not any(p.kind == "lora" for p in left):
            why = f" ({reasons(left)})" if left else ""
            raise ValueError(
                f"no pair (G, H) is among the parameters{why}; create_quotient_lora_optimizer(model, lr=…) finds those "
                "of adapters, create_quotient_optimizer those of attention; for a model without either use AdamW"
            )
        if dead := choice.dead:
            words = f"{len(dead)} adapters have directions in which both factors are 0, which stay so ({dead[0]!r})"
            warnings.warn(f"{words}; those that `quotient-lora resize --rank` adds can learn", stacklevel=5)
        if left:
            every: list[Claim] = [*left, *(p for s in new for p in s.given)]
            what = "adapters" if all(p.kind == "lora" for p in every) else "parts of the model"
            which = f"{len(left)} of {len(every)} {what}, which form no pair: {reasons(left)}"
            warnings.warn(f"{self._rest()} trains {which}", stacklevel=5)

    def _note_layers(self, weights: Tensors) -> None:
        """Note which weights lie in the model, and the LoRA layers there with the scales of their pairs."""
        if self._within is None:
            return
        self._inside |= weights_of(self._within).keys() & weights.keys()
        scales = {name: p.scale for s in self._stacks for p in s.given for name in p.names}
        own = {p: name for name, p in weights.items()}
        layers = ((layer, name, own.get(B)) for layer, name, B in lora_layers(self._within))
        self._layers = [(layer, name, scales.get(B)) for layer, name, B in layers if B is not None]

    def _rest(self) -> str:
        return " or ".join(dict.fromkeys(group["others"]["name"].rpartition(".")[2] for group in self.param_groups))

    def _cover(self, weights: Tensors) -> None:
        self._store = self._store_of(weights)
        self._uncertified = {p for s in self._stacks for p in s.pairs.pairs}
        # Most masks are not kept: a byte for every weight.
        masks = coverage((s.pairs for s in self._stacks), weights)
        self._covered = {name: int((~mask).sum()) for name, mask in masks.items()}
        self._partly = {name: cut(weights[name], mask) for name, mask in masks.items() if self._covered[name]}
        # What the state of a weight depends on: its dtype, device, and how it is sharded.
        self._homes = {k: (p.dtype, p.device, getattr(p, "placements", None)) for k, p in weights.items()}
        self._paired = {name for name, left in self._covered.items() if not left}
        self._others.build(self.param_groups, self._paired, self.state)

    def _store_of(self, weights: Tensors) -> Store:
        """Return where the weights of the pairs lie, of which processes then share the sharded ones."""
        sharded = [s for s in self._stacks if any(is_sharded(weights[run.slot.name]) for run in s.pairs.runs)]
        if not sharded:
            return Store()
        from .sharded import ShardedPairs

        return ShardedPairs(sharded, weights)

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
        weights = by_name(self.param_groups)
        if self._within is not None:
            check_places(self._within, self._layers, {k: p for k, p in weights.items() if k in self._inside})
        homes = {name: (p.dtype, p.device, getattr(p, "placements", None)) for name, p in weights.items()}
        if any(self._homes.get(name, home) != home for name, home in homes.items()):  # as after model.double()
            self.load_state_dict(self.state_dict())
        with torch.autocast(next(iter(weights.values())).device.type, enabled=False):
            with self._store.lent(weights) as (gradients, *whole):
                if any(map(attrgetter("is_sparse"), gradients.values())):
                    raise ValueError(
                        "a gradient is sparse, which is not supported; build the embedding with sparse=False"
                    )
                outside = self._step_pairs(weights, gradients, *whole) if gradients else {}
            if outside:
                self._others.build(self.param_groups, self._paired, self.state)
                self._others.step(self.param_groups, weights, outside, self._partly, self.state)
        return loss

    def _step_pairs(
        self, weights: Tensors, gradients: Tensors, whole: Tensors, whole_gradients: Tensors
    ) -> dict[str, Tensor]:
        """Update the pairs that have a gradient, given as it is, and whole where pairs are this process's.

        Returns the gradients outside pairs, if the step is taken.
        """
        started = [s for s in self._stacks if s.begin(whole, whole_gradients)]
        running = [s for s in started if s.runs]
        outside = {name: g for name, g in gradients.items() if name not in self._paired}
        outside.update((k, outside[k].masked_fill(mask, 0)) for k, mask in self._partly.items() if k in outside)
        for s in running:  # elsewhere in double precision where straighten_ will act, which sees one step more
            s.measure(self._metric, *((False, True) if s.g.on_cpu else (s.steps % 8 == 0,)))
        if not self._is_sound(running, gradients, outside):
            return {}
        if self.certify and self._uncertified:
            self._certify(started, weights, gradients)
        for s in started:
            s.steps += 1
        for s in (s for s in running if not s.straight):
            self._straighten(s)
        if (bound := self.param_groups[0]["max_grad_norm"]) is not None:  # that of a loaded state, too
            outside = clipped(float(bound), running, outside, self._store)
        for s in running:
            group = self.param_groups[s.group]
            s.state, lr = s.state or self._new_state(s), float(group["lr"])
            options = {name: group[name] for name in self._rule_options}
            update, state = self.rule(s.metric, s.g, dict(s.state), **options)
            s.advance_(update, state, lr, lr * group["weight_decay"], whole, transport=self.transports)
        return outside

    def _certify(self, started: Iterable[Stack], weights: Tensors, gradients: Tensors) -> None:
        """Check the pairs that had no gradient yet, at their steps 1, 2, 3, 5, 9, and so on.

        Some keep waiting, such as experts without tokens, and looking reads from the device.
        """
        looking = (s for s in started if s.steps & (s.steps - 1) == 0)
        if all(self._uncertified.isdisjoint(s.pairs.pairs) for s in looking):
            return
        pairs = {name: full(weights[name]) for name in self._covered}
        known = {name: full(g) for name, g in gradients.items() if name in pairs}
        seen = certify((s.pairs for s in self._stacks), pairs, known, waiting=self._uncertified)
        if words := doubts(seen):
            self._warn_once("certificate", words)

    def _straighten(self, s: Stack) -> None:
        """Move pairs with a crooked anchor to another gauge; where that is impossible they take no step."""
        stays = s.straighten_(self._metric)
        s.g.restrict(~stays)
        if not s.g.on_cpu:
            self._skipped = self._skipped.to(stays.device) + stays.any()
        elif bool(stays.any()):
            self._warn_once("too large", f"pair {s.name(stays)!r}: its product {_TOO_LARGE}")

    def _is_sound(self, running: Sequence[Stack], gradients: Tensors, outside: Tensors) -> bool:
        """Return whether to take the step; if not, raise on the CPU, and let nothing change elsewhere."""
        # The norm of a gradient, or its sum in float32 at least, tells whether it is finite.
        numbers = [s.g.sizes if s.straight else s.g.sizes / s.sound().all() for s in running]
        total = self._store.total(numbers, outside.values())
        if total.device.type != HOST:
            sound = total.abs() < torch.inf
            self._skipped = self._skipped.to(sound.device) + ~sound
            for s in running:
                s.g.restrict(sound.to(s.g.sizes.device))
            # AdamW cannot take a step of zero length, and undoing one needs copies of weights and state. So where
            # AdamW has parameters to update, the host waits for the device once. Pairs alone need no waiting.
            return not outside or bool(sound)
        if cmath.isfinite(total.item()):
            return True
        explain(running, gradients, self._within)

    def _warn_once(self, what: str, words: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(words, RuntimeWarning, stacklevel=6)

    def _metric(self, s: Stack, grams: Tensor) -> StepMetric:
        """Return the metric of a stack at points with these Gram matrices."""
        M, N = grams.unbind(-3)
        return StepMetric(M, N, s.scale)

    def _new_state(self, s: Stack) -> State:
        """Return the state of a stack before its first step."""
        group = self.param_groups[s.group]
        return self.new_state(s.room(), **{name: group[name] for name in self._rule_options})

    def __repr__(self) -> str:
        kinds = Counter((p.kind == "lora", p.group.h) for s in self._stacks for p in s.given)
        parts = [f"{n} {'adapter' if lora else 'pair'}{'s' * (n > 1)} of rank {h}" for (lora, h), n in kinds.items()]
        left = sum(self._covered.get(name, p.numel()) for name, p in by_name(self.param_groups).items())
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
        stacks = [{k: getattr(s, k) for k in kept} | {"state": self._store.whole_state(s)} for s in self._stacks]
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
        saved = copy.deepcopy(state_dict)  # torch would keep tensors, which the next step changes
        weights = by_name(self.param_groups)
        # Others have reached full rank since the saved optimiser was created.
        found = restored(saved["stacks"], (p for s in self._stacks for p in s.given), weights, self._new_state)
        groups = [{k: v for k, v in group.items() if k != "param_names"} for group in saved["param_groups"]]
        for mine, group in zip(self.param_groups, groups, strict=False):
            if (trainer := group["others"]["name"]) != mine["others"]["name"]:
                raise ValueError(f"in this state {trainer} trains what is in no pair; make the optimiser with that")
        super().load_state_dict({"state": saved["state"], "param_groups": groups})
        for w, state in self.state.items():
            state.update((k, cut(w, v)) for k, v in state.items() if isinstance(v, Tensor) and v.shape == w.shape)
        self._stacks = found
        self._cover(weights)
