"""The base class of the optimisers on the quotient: which parameters are pairs, the order of a step, and the state."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..linalg import at_least_float32
from ..symmetries.certificate import Certification
from ..symmetries.pairs import SymmetricPair, check_pairs, refused
from ..symmetries.stacks import coverage, stacks
from .metric import Metric, on_cpu, wide
from .pairs import GONE, Bucket, Places, Step, alone, explain, gradients_of, group_of, orientation, reasons

Gradients = Mapping[Tensor, Tensor]

_NO_PAIR = (
    "no pair (G, H) is among the parameters{}, so the quotient optimiser has nothing to do; pass "
    "quotient_manifolds.symmetries.find_symmetric_pairs(model) of a model whose LoRA or attention weights are "
    "trainable, or use torch.optim.AdamW"
)


#: Who saved a state without pairs.
_UNKNOWN = (
    "an optimiser without pairs, such as AdamW (or by torch.distributed.checkpoint's get_optimizer_state_dict, which "
    "leaves the pairs out: save optimizer.state_dict() itself)"
)


class QuotientOptimizer(Optimizer):
    """Base class of optimisers for parameters of which some are pairs (G, H) that a model sees only through G Hᴴ.

    A subclass implements ``_step_pairs``; ``_Others`` of torch trains all others. Moments are at least float32, small
    matrices float64. Factors become equivalent ones, moments too, before their condition spoils a step.

    Attributes
    ----------
    certify : bool
        Check the symmetry of every pair with the first gradients. Set it to False where gradients are not taken at the
        weights that are updated, as with sharpness-aware minimisers other than ``sharpness.GeodesicSAM``.
    rest : float
        The learning rate of parameters outside pairs, as a share of the optimiser's; a group's own is for all of it.
    """

    certify, rest = True, 1.0
    _Others: Any = torch.optim.AdamW
    #: In the state of a bucket that has taken a step.
    _state_names = frozenset({"moment G", "moment H"})
    #: ``GradScaler`` then leaves unscaling and skipping to :meth:`step`.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, pairs: Iterable[SymmetricPair], **defaults: Any) -> None:
        self._pairs, self._alone = list[SymmetricPair](), list[SymmetricPair]()
        self._buckets, self._places, self._warned = list[Bucket](), list[Places](), False
        self._skipped: Tensor | int = 0
        self._others = self._Others([torch.zeros(1)], lr=0.0)
        super().__init__(params, defaults)
        self.add_pairs(pairs)
        if not self._pairs and not any(p.kind == "lora" for p in self._alone):
            raise ValueError(_NO_PAIR.format(f" ({reasons(self._alone)})" if self._alone else ""))

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap :meth:`step` as torch does for every class of optimisers, and keep ``torch.compile`` out of it."""
        return torch.compiler.disable(Optimizer.profile_hook_step(func))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimisers do; its key ``"pairs"`` may hold the pairs among them.

        Its ``lr`` holds for all of them; without one, that of the optimiser does, as for the groups it was made with.
        """
        group = {"rest": 1.0 if "lr" in param_group else self.rest, **param_group}
        if "params" not in group:
            raise ValueError(f"a parameter group needs the entry 'params', but has {', '.join(param_group) or 'none'}")
        pairs = group.pop("pairs", ())
        check_options({**self.defaults, **group}, self.defaults)
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
        chosen: dict[tuple[Any, ...], list[SymmetricPair]] = {}
        for i, pair in enumerate(given):
            keys = {b.key for b in pair.G + pair.H}
            group = None if keys & known else group_of(pair, home, paired)
            if group is None:
                continue
            flipped = orientation(pair)
            if flipped is None:
                given[i] = refused(pair, f"both factors have a rank below {pair.usable_group().h}")
                continue
            known |= keys
            found.append(pair)
            # Adapters take turns: those that are switched off stay out of the others' stacks.
            chosen.setdefault((group, flipped, pair.scale, pair.part), []).append(pair)
        self._pairs = found
        position = {id(p): i for i, p in enumerate(found)}
        for (group, flipped, *_), members in chosen.items():
            for stack in stacks(members):
                self._buckets.append(Bucket(stack.pairs, [position[id(p)] for p in stack.pairs], flipped, group))
        self._cover()
        for places in self._places:
            places.check(home)
        models = dict.fromkeys([*(places.model for places in self._places), *(p.model for p in given)])
        self._places = [Places(m, home) for m in models if m is not None]
        outside = home.keys() - {b.tensor for p in found for b in p.G + p.H}
        self._alone = alone(given, outside)
        if self._alone and (found or any(p.kind == "lora" for p in self._alone)):
            what = "adapters" if all(p.kind == "lora" for p in given) else "parts of the model"
            which = f"{len(self._alone)} of {len(given)} {what}, which form no pair: {reasons(self._alone)}"
            warnings.warn(f"{self._Others.__name__} trains {which}", stacklevel=5)

    def _cover(self) -> None:
        self._certification = Certification(b.stack for b in self._buckets)
        self._covered = coverage(b.stack for b in self._buckets)
        self._partly = {p: mask for p, mask in self._covered.items() if not bool(mask.all())}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, and return the loss of the closure, which is called once.

        On the CPU, NaN or infinite gradients and an anchor without full rank raise a ValueError, and neither weights
        nor state change; under a ``GradScaler``, infinite gradients skip the step with a warning. On other devices such
        a step changes nothing either, but :meth:`state_dict` alone says so, for the host need not wait for the device.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        own = {p for group in self.param_groups for p in group["params"]}
        for places in self._places:
            places.check(own)
        for p in self._pairs:
            if p.model is None and not all(getattr(b.module, b.attribute, None) in own for b in p.G + p.H):
                raise ValueError(f"parameters of the pair {p.name!r} {GONE}")
        gradients = gradients_of(self.param_groups, getattr(self, "grad_scale", None))
        if gradients:
            with torch.autocast(next(iter(own)).device.type, enabled=False):
                self._step(gradients)
        for places in () if gradients else self._places:
            places.warn_of_strangers()
        return loss

    def _step(self, gradients: Gradients) -> None:
        """Update the parameters that have a gradient."""
        steps = []
        for bucket in self._buckets:
            if any(active := bucket.active(gradients)):
                steps.append(Step(bucket, active, gradients, self._metric))
        outside = {p: g for p, g in gradients.items() if p not in self._covered}
        outside.update((p, gradients[p].masked_fill(mask, 0)) for p, mask in self._partly.items() if p in gradients)
        if not (steps or outside) or not self._is_sound(steps, gradients, outside):
            return
        if self.certify and any(p.G[0].tensor in gradients for p in self._certification.open):
            # Adapters that are switched off may never get a gradient, and checking reads from the device.
            self._certification.see(gradients).check()
        for s in steps:
            skewed = s.straighten_()
            if not on_cpu(skewed):
                self._skipped = self._skipped + skewed.any()
            elif not bool(skewed.any()):
                continue
            elif not self._warned:
                self._warned = True
                warnings.warn(
                    f"pair {s.name(skewed)!r}: its product is too large for the dtype of its factors; it takes no "
                    "step until that changes; lower the learning rate, or make the factors smaller",
                    RuntimeWarning,
                    stacklevel=4,
                )
            s.restrict(~skewed)
        bound = self.param_groups[0]["max_grad_norm"]  # that of a loaded state, too
        if bound is not None:
            squares = [s.squared_norm() for s in steps]
            squares += [torch.linalg.vector_norm(wide(g)).square() for g in outside.values()]
            norm = torch.stack([v.to(squares[0].device) for v in squares]).sum().sqrt()
            factor = (bound / (norm + 1e-12)).clamp_max(1.0)
            outside = {p: g * factor.to(g.device) for p, g in outside.items()}
            for s in steps:
                s.clip_(factor)
        if outside:
            self._step_others(outside)
        for s in steps:
            before = {} if s.mask is None else {name: value.clone() for name, value in s.state.items()}
            self._step_pairs(self.param_groups[s.bucket.group], s)
            if s.mask is not None:
                s.state.update((name, s.only(value, before.get(name, 0))) for name, value in s.state.items())

    def _is_sound(self, steps: Sequence[Step], gradients: Gradients, outside: Gradients) -> bool:
        """Return whether to take the step; if not, raise or warn on the CPU, and let nothing change elsewhere."""
        found_inf = getattr(self, "found_inf", None)
        # The sum of a gradient, in float32 at least, tells whether it is finite.
        sums = [g.sum() for s in steps for g in s.g]
        sums += [g.sum(dtype=at_least_float32(g.dtype)) for g in outside.values()]
        finite = torch.stack([v.isfinite().to(sums[0].device) for v in sums]).all()
        finite = finite if found_inf is None else (found_inf == 0).all()
        sound = torch.stack([finite, *[~s.unsound().any().to(finite.device) for s in steps]]).all()
        if not on_cpu(finite):
            self._skipped = self._skipped + ~(sound if found_inf is None else sound | ~finite)
            for s in steps:
                s.restrict(sound.to(s.x[0].device))
            # AdamW cannot take a step of zero length, and undoing one needs copies of weights and state. So where
            # AdamW has parameters to update, the host waits for the device once. Pairs alone need no waiting.
            return not outside or bool(sound)
        if not bool(finite) and found_inf is not None:
            warnings.warn("NaN or infinite gradients: this step is skipped", RuntimeWarning, stacklevel=4)
            return False
        if not bool(sound):
            explain(steps, gradients)
        return True

    def _step_others(self, gradients: Gradients) -> None:
        """Let an optimiser of torch update the parameters outside pairs, and the other entries of those in pairs."""
        groups = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p in gradients]
            lr = group["rest"] * float(group["lr"])
            decay = lr * group["weight_decay"]
            whole = [p for p in params if p not in self._partly]
            if decay and whole:
                torch._foreach_mul_(whole, 1 - decay)
            for p in params:
                if p in self._partly and p.dim() > 1:  # vectors do not decay
                    p.mul_(torch.where(self._partly[p], 1, 1 - decay))
            groups.append({**group, "params": params, "lr": lr, "weight_decay": 0.0, "maximize": False})
        kept = [(p, p.grad) for p in gradients]
        for p, g in gradients.items():
            p.grad = g.to(p.dtype)
        self._others.state, self._others.param_groups = self.state, [{**self._others.defaults, **g} for g in groups]
        self._others.step()
        for p, grad in kept:
            p.grad = grad

    def _metric(self, bucket: Bucket, M: Tensor, N: Tensor) -> Metric:
        """Return the metric of a bucket at points with these Gram matrices."""
        return Metric(M, N, bucket.scale)

    def _step_pairs(self, group: Mapping[str, Any], s: Step) -> None:
        """Update the pairs of a bucket, and their state."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "step"}  # which schedulers replace

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of torch's state and, under ``"pairs"`` and ``"buckets"``, the state of the pairs.

        It warns of steps off the CPU that changed nothing because gradients were not finite or an anchor lacked full
        rank.
        """
        if count := int(self._skipped):
            warnings.warn(
                f"{count} steps were skipped: gradients were NaN or infinite, or the second factor of a pair lacked "
                "full rank; check the loss, lower the learning rate, or train in bfloat16",
                RuntimeWarning,
                stacklevel=2,
            )
        names = ("members", "flipped", "group", "steps", "state")
        buckets = [{name: getattr(bucket, name) for name in names} for bucket in self._buckets]
        more = {"kind": type(self).__name__, "pairs": [p.name for p in self._pairs], "buckets": buckets}
        return copy.deepcopy({**super().state_dict(), **more})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict` of the same class of optimiser for the same pairs, and continue exactly."""
        pairs = _pairs_of(state_dict, self._pairs, type(self).__name__, self.param_groups)
        saved = copy.deepcopy(state_dict)  # torch would keep its tensors, which the next step changes
        buckets = [_restored(entry, pairs, self._state_names) for entry in saved["buckets"]]
        super().load_state_dict({name: saved[name] for name in ("state", "param_groups")})
        self._pairs, self._buckets = pairs, buckets
        self._cover()


def _pairs_of(
    state: Mapping[str, Any], known: Iterable[SymmetricPair], own: str, groups: Sequence[Mapping[str, Any]]
) -> list[SymmetricPair]:
    """List an optimiser's pairs that a state has moments of; raise a ValueError if the state is of another kind."""
    if (kind := state.get("kind", _UNKNOWN)) != own:
        raise ValueError(
            f"this state was saved by {kind}, not by {own}, and its moments mean something else; to switch, load the "
            "model's weights and start a new optimiser with a short warm-up of the rate"
        )
    names, sizes = set(state["pairs"]), [[len(g["params"]) for g in some] for some in (state["param_groups"], groups)]
    # An adapter may have reached full rank since the saved optimiser was created.
    pairs = [p for p in known if p.name in names or sizes[0] != sizes[1]]
    if state["pairs"] != [p.name for p in pairs]:
        differing = sorted(names ^ {p.name for p in pairs})[:3]
        raise ValueError(f"the state belongs to other pairs: {', '.join(differing) or 'their order differs'}")
    keys = (key for g in state["param_groups"] for key in g["params"])
    for key, p in zip(keys, (p for g in groups for p in g["params"]), strict=False):
        for value in state["state"].get(key, {}).values():
            if isinstance(value, Tensor) and value.dim():
                _check_shape(value.shape, p.shape)
    return pairs


def _restored(entry: Mapping[str, Any], pairs: Sequence[SymmetricPair], names: AbstractSet[str]) -> Bucket:
    """Restore a bucket from its entry in a ``state_dict``, in which its state must have certain names."""
    members, state = entry["members"], entry["state"]
    if state and state.keys() != names:
        raise ValueError(
            f"the state of pairs has {', '.join(sorted(state))} where this optimiser has "
            f"{', '.join(sorted(names))}: it is of another version; load the model's weights and start "
            "with a new optimiser"
        )
    if len({abs(pairs[i].scale) for i in members}) > 1:
        raise ValueError(
            "pairs that had one scale have several now; set lora_alpha, ranks and rslora as they were, or make a "
            "new optimizer"
        )
    bucket = Bucket([pairs[i] for i in members], members, entry["flipped"], entry["group"])
    for name, rows in (("moment G", bucket.stack.n), ("moment H", bucket.stack.m)) if state else ():
        _check_shape(state[name].shape, (len(members) * bucket.points, rows, bucket.stack.group.h // bucket.points))
    bucket.steps = entry["steps"]
    bucket.state = {name: value.to(pairs[members[0]].G[0].tensor.device) for name, value in state.items()}
    return bucket


def _check_shape(given: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise if the state of a weight is for one of another shape."""
    if tuple(given) != tuple(wanted):
        raise ValueError(
            f"the state is for weights of shape {tuple(given)}, but the weights now have shape {tuple(wanted)}: "
            "another rank, or another model"
        )


#: The least positive number.
_TINY = 5e-324


def is_number(value: Any, least: float = -math.inf, below: float = math.inf) -> bool:
    """Return whether a value is a number in [least, below), or a tensor with one such number."""
    number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
    return number and not isinstance(value, bool) and least <= float(value) < below


def check_options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for an option of a parameter group that is out of range."""
    betas, bound, common = group.get("betas", (0, 0)), group["max_grad_norm"], defaults["max_grad_norm"]
    two = isinstance(betas, tuple | list) and len(betas) == 2
    conditions = {
        "lr must be a number of at least 0": is_number(group["lr"], 0, 1e30),
        "weight_decay must be a number of at least 0": is_number(group["weight_decay"], 0, 1e30),
        "betas must be two numbers in [0, 1)": two and all(is_number(b, 0, 1) for b in betas),
        "eps must be positive (a factor without a gradient is divided by it)": is_number(group.get("eps", 1), _TINY),
        "momentum must be a number in [0, 1)": is_number(group.get("momentum", 0), 0, 1),
        "nesterov must be True or False": isinstance(group.get("nesterov", False), bool),
        "maximize must be True or False": isinstance(group["maximize"], bool),
        "max_grad_norm must be positive (None turns clipping off)": bound is None or is_number(bound, _TINY),
        "max_grad_norm clips all groups together; pass it to the optimiser, not to a group": bound == common,
        "nesterov needs a momentum above 0": not group.get("nesterov") or bool(group["momentum"]),
    }
    for words, holds in conditions.items():
        if not holds:
            raise ValueError(f"{words}, got {group.get(words.split()[0])!r}")
