"""The base class of the optimisers on the quotient: which parameters are pairs, the order of a step, and the state."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..linalg import at_least_float32
from ..symmetries import SymmetricPair, stacks
from ..symmetries.certificate import Certification
from ..symmetries.pairs import check_pairs, refused
from ..symmetries.stacks import coverage
from .buckets import PairBucket, PairStep, check_anchors, group_of
from .gradients import all_finite, clip_factor, collect_gradients, warn_of_size
from .others import adamw_, alone, check_options, is_number, orientation, reasons
from .places import Places, check_owned, followed
from .preconditioner import Preconditioner

__all__ = ["QuotientOptimizer"]

#: Who saved a state without pairs.
_UNKNOWN = (
    "an optimiser without pairs, such as AdamW (or by torch.distributed.checkpoint's get_optimizer_state_dict, which "
    "leaves the pairs out: save optimizer.state_dict() itself)"
)

_NO_PAIR = (
    "no pair (G, H) is among the parameters{}, so the quotient optimiser has nothing to do; pass "
    "quotient_manifolds.symmetries.find_symmetric_pairs(model) of a model whose LoRA or attention weights are "
    "trainable, or use torch.optim.AdamW"
)


class QuotientOptimizer(Optimizer):
    """Base class of optimisers for parameters of which some are pairs (G, H) that a model sees only through G Hᴴ.

    A subclass implements ``_step_pairs``, a step of stacked pairs, and ``_step_others`` for parameters outside pairs.
    The state lies on the device of the weights, with moments at least in float32; small matrices are computed in
    float64. Factors are replaced by equivalent ones, moments with them, before a step that their condition would spoil.

    Attributes
    ----------
    certify : bool
        Check the symmetry of every pair with the first gradients. Set it to False where gradients are not taken at the
        weights that are updated, as with sharpness-aware minimisers other than ``sharpness.GeodesicSAM``.
    rest : float
        The learning rate of parameters outside pairs, as a share of the optimiser's; a group's own is for all of it.
    """

    certify, rest = True, 1.0
    _others = "AdamW"  # what trains parameters outside pairs

    #: In the state of a bucket that has taken a step.
    _state_names = frozenset({"moment G", "moment H"})

    #: ``GradScaler`` then leaves unscaling and skipping to :meth:`step`.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, pairs: Iterable[SymmetricPair], defaults: dict[str, Any]) -> None:
        check_options(defaults)
        bound = defaults["max_grad_norm"]
        if bound is not None and not (is_number(bound) and bound > 0):
            raise ValueError(f"max_grad_norm must be positive, got {bound!r}; None turns clipping off")
        self._pairs, self._alone = list[SymmetricPair](), list[SymmetricPair]()
        self._buckets, self._places = list[PairBucket](), list[Places]()
        self._certification = Certification([])
        self._skipped: Tensor | int = 0
        self._warned = False
        self._covered: dict[Tensor, Tensor] = {}
        self._rests: dict[Tensor, Tensor] = {}
        super().__init__(params, defaults)
        self.add_pairs(pairs)
        if not self._pairs and not any(p.kind == "lora" for p in self._alone):
            raise ValueError(_NO_PAIR.format(f" ({reasons(self._alone)})" if self._alone else ""))

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap :meth:`step` as torch does for every class of optimisers, and keep ``torch.compile`` out of it."""
        return torch.compiler.disable(Optimizer.profile_hook_step(func))

    def _own(self) -> AbstractSet[Tensor]:
        return dict.fromkeys(p for group in self.param_groups for p in group["params"]).keys()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimisers do; its key ``"pairs"`` may hold the pairs among them.

        Its ``lr`` holds for all of them; without one, that of the optimiser does, as for the groups it was made with.
        """
        group = dict(param_group)
        group.setdefault("rest", 1.0 if "lr" in group else self.rest)
        if "params" not in group:
            raise ValueError(f"a parameter group needs the entry 'params', but has {', '.join(group) or 'none'}")
        pairs = group.pop("pairs", ())
        bound = group.get("max_grad_norm", self.defaults["max_grad_norm"])
        if not (bound is None or is_number(bound)) or bound != self.defaults["max_grad_norm"]:
            raise ValueError("max_grad_norm clips all groups together; pass it to the optimiser, not to a group")
        check_options({**self.defaults, **group})
        super().add_param_group(group)
        try:
            self.add_pairs(pairs)
        except Exception:
            self.param_groups.pop()
            raise

    def add_pairs(self, pairs: Iterable[SymmetricPair]) -> None:
        """Tell which of the optimiser's parameters form pairs; known pairs are ignored.

        Adapters that form no pair are trained like parameters outside pairs, and a warning names them.
        """
        home = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        found, given = list(self._pairs), check_pairs(pairs)
        known = {b.key for p in found for b in p.G + p.H}
        paired = {b.tensor for p in (*found, *given) if p.group is not None for b in p.G + p.H}
        chosen: dict[tuple[int, bool, float], list[SymmetricPair]] = {}
        for i, pair in enumerate(given):
            keys = {b.key for b in pair.G + pair.H}
            group = None if keys & known else group_of(pair, home, paired)
            flipped = None if group is None else orientation(pair)
            if group is not None and flipped is not None:
                known |= keys
                chosen.setdefault((group, flipped, pair.scale), []).append(pair)
                found.append(pair)
            elif group is not None:
                given[i] = refused(pair, f"both factors have a rank below {pair.usable_group().h}")
        self._pairs = found
        position = {id(p): i for i, p in enumerate(found)}
        for (group, flipped, _), members in chosen.items():
            for stack in stacks(members):
                self._buckets.append(PairBucket(stack.pairs, [position[id(p)] for p in stack.pairs], flipped, group))
        self._certification = Certification(b.stack for b in self._buckets)
        self._cover()
        self._places = followed(self._places, (p.model for p in given), home.keys())
        paired = {b.tensor for p in found for b in p.G + p.H}
        self._alone = alone(given, home.keys() - paired)
        if self._alone and (found or any(p.kind == "lora" for p in self._alone)):
            _warn_of_others(self._others, self._alone, given)

    def _cover(self) -> None:
        """Record which entries of the pairs' parameters belong to pairs, and the other entries of those parameters."""
        self._covered = coverage(bucket.stack for bucket in self._buckets)
        self._rests = {p: ~mask for p, mask in self._covered.items() if not bool(mask.all())}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, and return the loss of the closure, which is called once.

        On the CPU, NaN or infinite gradients and an anchor without full rank raise a ValueError, and neither weights
        nor state change. Under a ``GradScaler``, infinite gradients skip the step with a warning. On other devices such
        a step changes nothing either, but raises and prints nothing, so that the host need not wait for the device;
        :meth:`state_dict` warns of how many there were, except for those that a ``GradScaler`` counts.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = self._first_parameter()
        with torch.autocast(first.device.type, enabled=False):
            found_inf = getattr(self, "found_inf", None)
            gradients = collect_gradients(self.param_groups, getattr(self, "grad_scale", None))
            ok = all_finite(gradients, found_inf) if gradients else False
            if not gradients:
                for places in self._places:
                    places.warn_of_others()
            if ok is False:
                return loss
            begun = [b.begin(partial(self._metric, b), gradients) for b in self._buckets]
            steps = [s for s in begun if s is not None]
            sound = check_anchors(steps)
            self._certify(gradients)
            if isinstance(ok, Tensor):
                finite, ok = ok, ok if sound is None else ok & sound.to(ok.device)
                self._skipped = (finite & ~ok if found_inf is not None else ~ok).to(torch.int64) + self._skipped
                # AdamW cannot take a step of zero length, and undoing one needs copies of weights and state. So where
                # AdamW has parameters to update, the host waits for the device once. Pairs alone need no waiting.
                if any(self._is_other(p) for p in gradients):
                    if not bool(ok):
                        return loss
                    ok = True
            for s in steps:
                s.ok = ok if isinstance(ok, Tensor) else None
            steps = [s for s in steps if self._balance_(s)]
            bound = self.param_groups[0]["max_grad_norm"]  # that of a loaded state, too
            clip = None if bound is None else clip_factor(bound, steps, gradients, self._covered, self._rests)
            for s in steps:
                s.clip = clip
            self._step_all(steps, gradients, clip)
        return loss

    def _first_parameter(self) -> Tensor:
        """Return a parameter; all must still be in the model, and those of the pairs among the optimiser's."""
        own = self._own()
        check_owned([p for p in self._pairs if p.model is None], own)
        for places in self._places:
            places.check(own)
        return next(iter(own))

    def _is_other(self, p: Tensor) -> bool:
        """Tell whether entries of a parameter belong to no pair."""
        return p in self._rests or p not in self._covered

    def _step_all(self, steps: Sequence[PairStep], gradients: Mapping[Tensor, Tensor], clip: Tensor | None) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            own = {p: gradients[p] for p in group["params"] if p in gradients and self._is_other(p)}
            outside = {**group, "lr": group.get("rest", 1.0) * float(group["lr"])} if own else group
            if clip is not None:
                own = {p: g * clip.to(g.device) for p, g in own.items()}
            others = {p: g.to(p.dtype) for p, g in own.items() if p not in self._rests}
            if others:
                self._step_others(outside, list(others), list(others.values()))
            for p, g in own.items():
                if p in self._rests:
                    self._step_rest(outside, p, g)
        for s in steps:
            self._step_pairs(self.param_groups[s.bucket.group], s)

    def _certify(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Check the symmetry of every pair with its gradients, until a non-zero one has certified it."""
        waiting = self._certification.open if self.certify else ()
        # Adapters that are switched off may never get a gradient, and checking reads from the device.
        if any(p.G[0].tensor in gradients for p in waiting):
            self._certification.see(gradients).check()

    def _balance_(self, s: PairStep) -> bool:
        """Move pairs to a good gauge; where there is none, do not take their step, and warn at the first time."""
        skewed = s.balance_()
        if skewed.device.type != "cpu":
            s.ok = ~skewed.any() if s.ok is None else s.ok.to(skewed.device) & ~skewed.any()
            self._skipped = skewed.any().to(torch.int64) + self._skipped
        elif bool(skewed.any()):
            if not self._warned:
                warn_of_size(s.name(int(skewed.nonzero()[0, 0])))
            self._warned = True
            return False
        return True

    def _metric(self, bucket: PairBucket, M: Tensor, N: Tensor) -> Preconditioner:
        """Return the metric of a bucket at points with these Gram matrices."""
        return Preconditioner(M, N, bucket.scale)

    def _step_pairs(self, group: Mapping[str, Any], s: PairStep) -> None:
        """Update the pairs of a bucket."""
        raise NotImplementedError

    def _step_others(self, group: Mapping[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        """Update parameters that belong to no pair."""
        adamw_(self.state, group, params, gradients)

    def _step_rest(self, group: Mapping[str, Any], p: Tensor, gradient: Tensor) -> None:
        """Update the entries outside pairs of a parameter that belongs to pairs in part; vectors do not decay."""
        stand_in = p.to(at_least_float32(p.dtype), copy=True)
        self.state[stand_in] = self.state[p]
        group = {**group, "weight_decay": (p.dim() > 1) * group["weight_decay"]}
        self._step_others(group, [stand_in], [gradient.to(stand_in.dtype)])
        del self.state[stand_in]
        rest = self._rests[p].to(p.device)
        p[rest] = stand_in[rest].to(p.dtype)

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "_pairs",
            "_buckets",
            "_places",
            "_certification",
            "_covered",
            "_rests",
            "_skipped",
            "_warned",
            "certify",
        )
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # options that older saved states do not have
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of torch's state and, under ``"pairs"`` and ``"buckets"``, the state of the pairs.

        It warns of steps off the CPU that changed nothing because gradients were not finite or an anchor lacked full
        rank.
        """
        _warn_of_skipped(int(self._skipped))
        found = super().state_dict()
        found["kind"], found["pairs"] = type(self).__name__, [p.name for p in self._pairs]
        found["buckets"] = [
            {"members": b.members, "flipped": b.flipped, "group": b.group, "state": b.state} for b in self._buckets
        ]
        return copy.deepcopy(found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict` of the same class of optimiser for the same pairs, and continue exactly."""
        pairs = _pairs_of(state_dict, self, self._pairs, self._state_names)
        buckets = [_restored(entry, pairs) for entry in state_dict["buckets"]]
        keys = list(itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"]))
        params = list(itertools.chain.from_iterable(g["params"] for g in self.param_groups))
        states = state_dict["state"]
        _check_shapes(zip((states.get(key, {}) for key in keys), params, strict=False))
        # torch would keep tensors of the given state, which the next step changes.
        given = {k: v for k, v in state_dict.items() if k not in ("kind", "pairs", "buckets")}
        super().load_state_dict({**given, "state": copy.deepcopy(states)})
        self._pairs, self._buckets = pairs, buckets
        self._cover()
        # torch rounds state to the dtype of its parameter; that of entries outside the pairs is wider.
        for key, p in zip(keys, params, strict=True):
            for name, given in states.get(key, {}).items() if p in self._rests else ():
                if isinstance(given, Tensor) and name != "step":
                    self.state[p][name] = given.detach().to(p.device, copy=True)


def _warn_of_skipped(steps: int) -> None:
    if steps:
        warnings.warn(
            f"{steps} steps were skipped: gradients were NaN or infinite, or the second factor of a pair lacked full "
            "rank; check the loss, lower the learning rate, or train in bfloat16",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_of_others(trainer: str, alone: Sequence[SymmetricPair], given: Sequence[SymmetricPair]) -> None:
    what = "adapters" if all(p.kind == "lora" for p in given) else "parts of the model"
    which = f"{len(alone)} of {len(given)} {what}, which form no pair: {reasons(alone)}"
    warnings.warn(f"{trainer} trains {which}", stacklevel=6)


def _pairs_of(
    state_dict: Mapping[str, Any], optimizer: Optimizer, own: Sequence[SymmetricPair], entries: frozenset[str]
) -> list[SymmetricPair]:
    """Return those of an optimiser's pairs of which a state has moments; raise if the state is not of its kind."""
    if state_dict.get("kind") != type(optimizer).__name__:
        raise ValueError(
            f"this state was saved by {state_dict.get('kind', _UNKNOWN)}, not by {type(optimizer).__name__}, and its "
            "moments mean something else; to switch, load the model's weights and start a new optimiser with a "
            "short warm-up of the learning rate"
        )
    for entry in state_dict["buckets"]:
        _check_names(entry["state"].keys(), entries)
    names = set(state_dict["pairs"])
    sizes = [[len(g["params"]) for g in groups] for groups in (state_dict["param_groups"], optimizer.param_groups)]
    # An adapter may have reached full rank since the saved optimiser was created.
    pairs = [p for p in own if p.name in names or sizes[0] != sizes[1]]
    if state_dict["pairs"] != [p.name for p in pairs]:
        differing = sorted(names ^ {p.name for p in pairs})[:3]
        raise ValueError(f"the state belongs to other pairs: {', '.join(differing) or 'their order differs'}")
    return pairs


def _check_names(given: Collection[str], wanted: frozenset[str]) -> None:
    if given and given != wanted:  # none before the first step
        raise ValueError(
            f"the state of pairs has {', '.join(sorted(given))} where this optimiser has {', '.join(sorted(wanted))}: "
            "it is of another version; load the model's weights and start with a new optimiser"
        )


def _check_shape(given: Tensor, wanted: Tensor) -> None:
    if given.shape != wanted.shape:
        raise ValueError(
            f"the state is for weights of shape {tuple(given.shape)}, but the weights now have shape "
            f"{tuple(wanted.shape)}: another rank, or another model"
        )


def _check_shapes(pairs: Iterable[tuple[Mapping[str, Any], Tensor]]) -> None:
    """Raise if the state of a parameter outside pairs is for one of another shape."""
    for state, p in pairs:
        for given in state.values():
            if isinstance(given, Tensor) and given.dim():
                _check_shape(given, p)


def _restored(entry: Mapping[str, Any], pairs: Sequence[SymmetricPair]) -> PairBucket:
    """Restore a bucket from its entry in ``state_dict``."""
    if len({abs(pairs[i].scale) for i in entry["members"]}) > 1:
        raise ValueError(
            "pairs that had one scale have several now; set lora_alpha, ranks and rslora as they were, or make a new "
            "optimizer"
        )
    bucket = PairBucket([pairs[i] for i in entry["members"]], entry["members"], entry["flipped"], entry["group"])
    x = bucket.stack.gather()
    rows = {"G": bucket.stack.n, "H": bucket.stack.m}
    for name, given in entry["state"].items():
        if name.startswith("moment "):
            _check_shape(given, x[..., : rows[name[-1]], :])
        bucket.state[name] = given.to(x.device, copy=True)
    return bucket
