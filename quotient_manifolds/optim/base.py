"""What the optimisers on the quotient share: which parameters are pairs, clipping, decay, mixed precision, state."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..linalg import at_least_float32, column_rank_ratio
from ..symmetries import PairStack, SymmetricPair, stacks
from ..symmetries.blocks import is_sharded
from ..symmetries.pairs import check_pairs
from .buckets import PairBucket, PairStep, trace
from .frames import Frames, gram, wide

__all__ = ["QuotientOptimizer"]


class QuotientOptimizer(Optimizer):
    """Base of the optimisers for parameters some of which are pairs (G, H) that a model sees through G Hᴴ only.

    Parameters
    ----------
    params : iterable
        Parameters or parameter groups, as for any torch optimiser.
    pairs : iterable of SymmetricPair
        ``quotient_manifolds.symmetries.find_symmetric_pairs(model)``; those without a group are passed over, and those
        none of whose parameters are among ``params``.
    defaults : dict
        Options of a parameter group: ``lr``, ``weight_decay``, ``metric``, ``maximize`` and ``max_grad_norm``, and
        those of a subclass. Every group's own are checked as these are.

    Raises
    ------
    ValueError
        An option out of range; no pair among the parameters; a pair whose parameters lie in several groups or are not
        all there; a pair with one frozen factor, or with two factors that both lack rank; sharded parameters.

    Notes
    -----
    A subclass gives ``_direction`` for pairs and ``_step_others`` for what belongs to no pair. State lies on the
    device of the weights, moments in float32 at least; small matrices are worked out in float64.

    Examples
    --------
    Train a second layer later on:

    >>> from torch import nn
    >>> from quotient_manifolds.optim import QuotientSGD
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs
    >>> first, second = (nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
    >>> optimizer = QuotientSGD(first.parameters(), find_symmetric_pairs(first), lr=0.1)
    >>> optimizer.add_param_group({"params": second.parameters(), "pairs": find_symmetric_pairs(second)})
    >>> len(optimizer.state_dict()["pairs"])
    8
    """

    #: ``GradScaler`` then leaves unscaling and skipping to :meth:`step`.
    _step_supports_amp_scaling = True
    #: Name of the first moment in ``state``.
    _moment = "exp_avg"

    def __init__(self, params: Any, pairs: Iterable[SymmetricPair], defaults: dict[str, Any]) -> None:
        self._check_options(defaults)
        bound = defaults["max_grad_norm"]
        if bound is not None and not (is_number(bound) and bound > 0):
            raise ValueError(f"max_grad_norm must be positive, got {bound!r}; None does not clip")
        self._pairs: list[SymmetricPair] = []
        self._buckets: list[PairBucket] = []
        self._covered: dict[Tensor, Tensor] = {}
        super().__init__(params, defaults)
        self.add_pairs(pairs)
        if not self._pairs:
            raise ValueError(
                "there is no pair (G, H) among the parameters, so there is nothing to divide out; pass "
                "quotient_manifolds.symmetries.find_symmetric_pairs(model) of a model whose LoRA or attention weights "
                "are trainable, or use torch.optim.AdamW"
            )

    def _check_options(self, group: Mapping[str, Any]) -> None:
        """Raise for an option of a parameter group that is out of range."""
        if group["metric"] not in ("inv", "mix"):
            raise ValueError(f'metric must be "mix" or "inv", got {group["metric"]!r}')
        for name in ("lr", "weight_decay"):
            if not (is_number(group[name]) and 0 <= float(group[name]) < 1e30):
                raise ValueError(f"{name} must be a number that is not negative, got {group[name]!r}")
        if not isinstance(group.get("maximize", False), bool):
            raise ValueError(f"maximize must be True or False, got {group['maximize']!r}")

    # -- which parameters are pairs ------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimisers do.

        Parameters
        ----------
        param_group : dict
            Its key ``"pairs"`` may hold the pairs among its parameters.

        Raises
        ------
        ValueError
            An option out of range, a pair that cannot be used (see the class), or another ``max_grad_norm``; the
            group is not added then.
        """
        group = dict(param_group)
        if "params" not in group:
            raise ValueError(f"a parameter group needs the entry 'params', but has {', '.join(group) or 'none'}")
        pairs = group.pop("pairs", ())
        if group.get("max_grad_norm", self.defaults["max_grad_norm"]) != self.defaults["max_grad_norm"]:
            raise ValueError("max_grad_norm clips all groups together; give it to the optimiser, not to a group")
        self._check_options({**self.defaults, **group})
        super().add_param_group(group)
        try:
            self.add_pairs(pairs)
        except Exception:
            self.param_groups.pop()
            raise

    def add_pairs(self, pairs: Iterable[SymmetricPair]) -> None:
        """Tell which of the optimiser's parameters form pairs.

        Parameters
        ----------
        pairs : iterable of SymmetricPair
            Those known already are passed over.

        Raises
        ------
        ValueError
            A pair that cannot be used, see the class.
        """
        home = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        known = {b.key for p in self._pairs for b in p.G + p.H}
        chosen: dict[tuple[int, bool], list[int]] = {}
        found, given = list(self._pairs), check_pairs(pairs)
        paired = {b.tensor for p in (*found, *given) if p.group is not None for b in p.G + p.H}
        for pair in given:
            if any(b.key in known for b in pair.G + pair.H):
                continue
            group = _group_of(pair, home, paired)
            if group is not None:
                known.update(b.key for b in pair.G + pair.H)
                chosen.setdefault((group, _is_flipped(pair)), []).append(len(found))
                found.append(pair)
        self._pairs = found
        for (group, flipped), members in chosen.items():
            position = {id(found[i]): i for i in members}
            for stack in stacks(found[i] for i in members):
                self._buckets.append(PairBucket(stack.pairs, [position[id(p)] for p in stack.pairs], flipped, group))
        self._covered = self._coverage()

    def _coverage(self) -> dict[Tensor, Tensor]:
        """Tell for every parameter of a pair which of its entries belong to one."""
        masks: dict[Tensor, Tensor] = {}
        for bucket in self._buckets:
            for p in bucket.stack.parameters():
                masks.setdefault(p, torch.zeros(p.shape, dtype=torch.bool, device=p.device))
            bucket.stack.mark_(masks)
        return masks

    # -- a step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Parameters
        ----------
        closure : callable, optional
            Recomputes the loss and its gradients; called once.

        Returns
        -------
        object
            The closure's loss, or None.

        Raises
        ------
        ValueError
            NaN or infinite gradients; neither weights nor state have changed then. Under a ``GradScaler`` the step is
            skipped with a warning.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.autocast(self._device.type, enabled=False):
            gradients = self._gradients()
            if not gradients or not self._finite(gradients):
                return loss
            steps = [s for bucket in self._buckets for s in self._begin(bucket, gradients)]
            self._check_anchors(steps)
            clip = self._clip(steps, gradients)
            for group in self.param_groups:
                present = [p for p in group["params"] if p in gradients]
                whole = [p for p in present if p not in self._covered]
                if whole:
                    self._step_others(group, whole, [(gradients[p] * clip).to(p.dtype) for p in whole])
                self._step_rests(group, [p for p in present if p in self._covered], gradients, clip)
            for s in steps:
                self._step_pairs(s.scaled(clip))
        return loss

    @property
    def _device(self) -> torch.device:
        found: torch.device = next(p.device for group in self.param_groups for p in group["params"])
        return found

    def _check_anchors(self, steps: Sequence[PairStep]) -> None:
        """Raise where weights were replaced by ones whose anchor lacks rank."""
        sound = [s.frames.sound() for s in steps]
        if sound and not bool(torch.stack([v.all().to(self._device) for v in sound]).all()):
            s, good = next((s, v) for s, v in zip(steps, sound, strict=True) if not bool(v.all()))
            bad = int((~good).flatten(1).any(1).nonzero()[0] if good.dim() > 1 else (~good).nonzero()[0])
            raise ValueError(
                f"pair {s.stack.pairs[bad].name!r}: its {'first' if s.bucket.flipped else 'second'} factor has lost "
                "its rank since the optimiser was made; no weight was changed; make a new optimiser for these weights"
            )

    def _gradients(self) -> dict[Tensor, Tensor]:
        scale = getattr(self, "grad_scale", None)
        found = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which is not supported; build "
                        "the embedding with sparse=False"
                    )
                # In float32: the scale is beyond the range of half precision, and so is what it saved.
                g = p.grad if scale is None else p.grad.to(at_least_float32(p.dtype)) / scale.to(p.grad.device)
                found[p] = -g if group.get("maximize", False) else g
        return found

    def _finite(self, gradients: Mapping[Tensor, Tensor]) -> bool:
        """Tell whether all gradients are finite; if not, warn under a GradScaler, raise else."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            if float(found_inf) == 0:
                return True
            warnings.warn("NaN or infinite gradients: this step is skipped", RuntimeWarning, stacklevel=4)
            return False
        if bool(torch.stack([g.isfinite().all().to(self._device) for g in gradients.values()]).all()):
            return True
        bad = next(p for p, g in gradients.items() if not bool(g.isfinite().all()))
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(bad.shape)} has NaN or infinite entries; no weight was "
            "changed; look at the loss, lower the learning rate, or train in bfloat16 or float32"
        )

    def _begin(self, bucket: PairBucket, gradients: Mapping[Tensor, Tensor]) -> Iterable[PairStep]:
        found = bucket.active()
        if found is None:
            return
        stack, index = found
        x, g = stack.gather(), stack.gather(gradients)
        if not x.is_complex():
            x = x.to(at_least_float32(x.dtype))
        G, H = x.split([stack.n, stack.m], dim=-2)
        dG, dH = g.to(x.dtype).split([stack.n, stack.m], dim=-2)
        frames = Frames(self.param_groups[bucket.group]["metric"], G, H)
        yield PairStep(bucket, stack, index, frames, (dG, dH), (gram(dG), gram(dH)))

    def _clip(self, steps: Sequence[PairStep], gradients: Mapping[Tensor, Tensor]) -> float:
        """Give the factor that brings the gradient's norm, that of pairs in the metric, to ``max_grad_norm``."""
        bound = self.defaults["max_grad_norm"]
        if bound is None:
            return 1.0
        squares = []
        for s in steps:
            for factor, S in zip("GH", s.grams, strict=True):
                K_inv = s.frames.inverse_root(factor)
                squares.append(trace(K_inv @ S @ K_inv.mH).sum())
        for p, g in gradients.items():
            mask = self._covered.get(p)
            squares.append(wide(g if mask is None else g.masked_fill(mask.to(g.device), 0)).square().sum())
        norm = torch.stack([v.to(self._device) for v in squares]).sum().sqrt()
        return min(1.0, bound / (float(norm) + 1e-12))

    def _step_pairs(self, s: PairStep) -> None:
        """Move both factors of the pairs, and carry the moments along."""
        group, stack, frames = self.param_groups[s.bucket.group], s.stack, s.frames
        lr = float(group["lr"])
        rows = [stack.n, stack.m]
        moments = self._moments(stack, group)
        m = stack.gather(moments).split(rows, dim=-2) if moments else (None, None)
        moved, steps = [], []
        for factor, m_old in zip("GH", m, strict=True):
            direction, m_new = self._direction(group, s, factor, m_old, frames.inverse_root(factor))
            steps.append(direction * -lr)
            moved.append(m_new)
        x = torch.cat([frames.G, frames.H], dim=-2)
        if group["weight_decay"]:
            keep = max(1 - lr * group["weight_decay"], 0) ** 0.5
            x = x * (1 - (1 - keep) * s.bucket.decaying.to(x.device, x.real.dtype))
        x = x + torch.cat(steps, dim=-2)
        stack.scatter_(x)
        if not moments:
            return
        G, H = x.split(rows, dim=-2)
        transport = frames.carry(Frames(frames.metric, G, H))
        stack.scatter_(torch.cat([v @ T.to(v.dtype) for v, T in zip(moved, transport, strict=True)], dim=-2), moments)
        for factor, T in zip("GH", transport, strict=True):
            if factor in s.bucket.small and s.bucket.small[factor].dim() == T.dim():
                s.write(factor, T.mH @ s.read(factor).to(T.dtype) @ T)

    def _moments(self, stack: PairStack, group: Mapping[str, Any]) -> dict[Tensor, Tensor]:
        """Give first moments of the pairs' parameters: covectors in their own coordinates, at least in float32."""
        for p in stack.parameters():
            if self._moment not in self.state[p]:
                self.state[p][self._moment] = torch.zeros_like(p, dtype=at_least_float32(p.dtype))
        return {p: self.state[p][self._moment] for p in stack.parameters()}

    def _direction(
        self, group: Mapping[str, Any], s: PairStep, factor: str, m: Any, K_inv: Tensor
    ) -> tuple[Tensor, Any]:
        """Give the direction of ascent of the factor ``"G"`` or ``"H"``, and its new first moment."""
        raise NotImplementedError

    def _step_others(self, group: Mapping[str, Any], params: list[Tensor], gradients: list[Tensor]) -> None:
        """Step parameters that belong to no pair."""
        raise NotImplementedError

    def _step_rests(
        self, group: Mapping[str, Any], params: list[Tensor], gradients: Mapping[Tensor, Tensor], clip: float
    ) -> None:
        """Step the entries that belong to no pair, of parameters that have others which do."""
        for p in params:
            rest = ~self._covered[p].to(p.device)
            if not bool(rest.any()):
                continue
            # A float32 parameter of its own, whose state is the same but for the pairs' first moment.
            state = self.state[p]
            stand_in = p.to(at_least_float32(p.dtype), copy=True)
            moment = state.get(self._moment)
            self.state[stand_in] = {k: v.clone() if k == self._moment else v for k, v in state.items()}
            self._step_others(group, [stand_in], [(gradients[p] * clip).to(stand_in.dtype)])
            p[rest] = stand_in[rest].to(p.dtype)
            new = self.state.pop(stand_in)
            if moment is not None and self._moment in new:
                moment[rest] = new[self._moment][rest]
                new[self._moment] = moment
            elif self._moment in new:
                new[self._moment][~rest] = 0
            state.update(new)

    # -- state -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        names = ("_pairs", "_buckets", "_covered")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # options that a state saved earlier does not have
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Give torch's state and, under ``"pairs"`` and ``"buckets"``, what belongs to whole pairs."""
        found = super().state_dict()
        found["kind"], found["pairs"] = type(self).__name__, [p.name for p in self._pairs]
        found["buckets"] = [
            {"members": list(b.members), "flipped": b.flipped, "group": b.group, "small": dict(b.small)}
            for b in self._buckets
        ]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; training goes on exactly as it would have.

        Parameters
        ----------
        state_dict : dict
            From an optimiser of the same class for the same pairs.

        Raises
        ------
        ValueError
            The state is of other pairs, or of another optimiser.
        """
        if state_dict.get("kind") != type(self).__name__:
            raise ValueError(
                f"this state was saved by {state_dict.get('kind', 'an optimiser without pairs, such as AdamW')}, not "
                f"by {type(self).__name__}, and its moments mean something else; to switch, load the model's weights "
                "and begin with a new optimiser and a short warm-up of the learning rate"
            )
        if state_dict["pairs"] != [p.name for p in self._pairs]:
            differing = sorted(set(state_dict["pairs"]) ^ {p.name for p in self._pairs})[:3]
            raise ValueError(f"the state belongs to other pairs: {', '.join(differing) or 'their order differs'}")
        buckets = []
        for entry in state_dict["buckets"]:
            pairs = [self._pairs[i] for i in entry["members"]]
            bucket = PairBucket(pairs, entry["members"], entry["flipped"], entry["group"])
            device = pairs[0].G[0].tensor.device
            bucket.small = {  # counters stay on the CPU
                k: v.clone() if k == "step" else v.to(device, copy=True) for k, v in entry["small"].items()
            }
            buckets.append(bucket)
        keys = list(itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"]))
        params = list(itertools.chain.from_iterable(g["params"] for g in self.param_groups))
        for key, p in zip(keys, params, strict=False):
            given = state_dict["state"].get(key, {}).get(self._moment)
            if isinstance(given, Tensor) and given.shape != p.shape:
                raise ValueError(
                    f"the state is of a parameter of shape {tuple(given.shape)}, where there is one of shape "
                    f"{tuple(p.shape)} now: another rank, or another model"
                )
        own = ("kind", "pairs", "buckets")
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in own})
        self._buckets, self._covered = buckets, self._coverage()
        # torch rounds state to the dtype of its parameter; moments of half-precision weights are wider.
        for key, p in zip(keys, params, strict=True):
            for name, given in state_dict["state"].get(key, {}).items() if p in self._covered else ():
                if isinstance(given, Tensor) and name != "step":
                    self.state[p][name] = given.detach().to(p.device, copy=True)


def is_number(value: Any) -> bool:
    """Tell a number, or a tensor with one, from anything else."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def _group_of(pair: SymmetricPair, home: Mapping[Tensor, int], paired: Collection[Tensor]) -> int | None:
    """Give the parameter group in which a usable pair lies; None for pairs that are to be passed over.

    ``paired`` are the parameters of all usable pairs.
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
    outside = [b for b in blocks if b.tensor not in home]
    if outside:
        b = outside[0]
        raise ValueError(
            f"pair {pair.name!r}: {b.attribute} of {type(b.module).__name__} is not among the optimiser's parameters "
            "but the rest of the pair is; pass both factors"
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


def _is_flipped(pair: SymmetricPair) -> bool:
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
