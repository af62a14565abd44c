r"""Examination of attention modules without a handler: which groups leave their outputs unchanged.

A module is run alone, in float64, on the inputs that a forward pass of the model gave it, and hypotheses are tested
with the gradient of a random cotangent of those outputs that the model uses: where the heads lie (divisors of the
widths, roles that share a matrix) and which matrices Λ act on them. With the matrices C of :mod:`.certificate`, a
head's group is the largest one that

.. math:: \langle C, Λ \rangle = 0 \quad \text{for all } Λ \text{ of its Lie algebra}

admits. C is linear in the cotangent, so one random cotangent decides each hypothesis at these inputs, except on a set
of measure zero; two are taken, for inputs by chance special. A finite move then confirms what is divided out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..linalg import standard_normal
from ..passes import Call, Run, Wide, drawing_again, eager, floats, record, tree_map
from ..weights import naming, preserve_model_state, running_copy, weights_of
from .attention import HANDLERS, Proposal, candidates, no_pair, proposals, uncovered, watched
from .found import merged, placed
from .orbits import ROUNDING, broken, output_gradients
from .pairs import SymmetricPair, stacks
from .refusals import Cause, Claim, Refusal
from .roles import Heads, holds_keys
from .slots import PLANES, SlotStack

_NONE = "no symmetry was found that has a quotient"
_LOCAL = "flat at the weights, but not further along the orbit"

#: Inputs with entries beyond this are masks.
_MASKED = 1e4
#: Number of cotangents (and randomly shifted inputs) with which a hypothesis is tested.
SAMPLES = 2


def _groups(heads: Heads, one: Tensor, two: Tensor) -> Iterator[tuple[int, Heads]]:
    """Yield the groups that the moments of both factors let act on heads, with their dimensions."""
    h, i = heads.size, torch.arange(heads.size, device=one.device)
    floor = 1e-6 * torch.maximum(one.flatten(-2).norm(dim=-1), two.flatten(-2).norm(dim=-1))

    def agree(a: Tensor, b: Tensor) -> bool:
        """Return whether parts of the moments are the same, head by head; NaN is not."""
        scale = torch.maximum(torch.maximum(a.norm(dim=-1), b.norm(dim=-1)), floor)
        return bool(((a - b).norm(dim=-1) <= ROUNDING * scale).all())

    def turns(C: Tensor) -> Tensor:
        """Return the parts along stretches and rotations of planes (a, b)."""
        return torch.cat([C[..., a, a] + C[..., b, b], C[..., a, b] - C[..., b, a]], -1)

    rest = ((n, [C[..., n:, n:].flatten(-2) for C in (one, two)]) for n in range(0, h + 1, 2))
    size = next((n for n, parts in rest if agree(*parts)), -1)
    if size == 0:
        yield h * h, heads
    for pairing in PLANES[: 1 + (size > 2)] if size > 0 else ():
        a, b = (i[: size // 2], i[size // 2 : size]) if pairing == "half" else (i[:size:2], i[1:size:2])
        if agree(turns(one), turns(two)):
            yield size + (h - size) ** 2, replace(heads, group=pairing, rotary_size=size)
    if agree(*(C.diagonal(dim1=-2, dim2=-1) for C in (one, two))):
        yield h, replace(heads, group="diagonal")


def moments(
    pairs: Sequence[SymmetricPair], weights: Mapping[str, Tensor], samples: Sequence[dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return Gᵀ∇_G and (Hᵀ∇_H)ᵀ of pairs of one shape, (samples, pairs, h, h)."""
    (stack,) = stacks(pairs, weights)
    with torch.no_grad():
        x = stack.gather(weights)
        G, H = x.split([stack.n, stack.m], dim=1)
        gradients = torch.stack([stack.gather(s, x) for s in samples]).split([stack.n, stack.m], dim=2)
        return G.mT @ gradients[0], (H.mT @ gradients[1]).mT


def pairs_of(claims: Iterable[Claim]) -> list[SymmetricPair]:
    """List the pairs, without what is refused."""
    return [p for p in claims if isinstance(p, SymmetricPair)]


class Examination:
    """A module alone, in float64 and evaluation mode, on the inputs of a call.

    ``twin`` is a copy of the module, ``run`` returns its outputs, of changed inputs if it is given what changes them.
    """

    def __init__(self, twin: nn.Module, run: Run) -> None:
        self.twin, self.run, self.weights, self._name_of = twin, run, weights_of(twin), naming(twin)

    def sample(self, count: int = SAMPLES) -> Iterator[dict[str, Tensor]]:
        """Iterate over gradients of random cotangents at shifted inputs."""
        generator = torch.Generator().manual_seed(0)
        weights = {name: p for name, p in self.weights.items() if p.is_floating_point()}
        widths = {size for p in weights.values() if p.dim() > 1 for size in p.shape[:2]}
        for _ in range(count):
            shift = partial(_shifted, widths=widths, generator=generator)
            gradients = output_gradients(partial(self.run, shift), weights, generator)
            if not gradients:
                raise ValueError("no output depends on the weights in a way that autograd can follow")
            if not all(bool(g.isfinite().all()) for g in gradients.values()):
                raise ValueError("its gradients are not finite on this batch")
            yield gradients

    @cached_property
    def samples(self) -> list[dict[str, Tensor]]:
        """What most hypotheses are tested with; for a module that is refused nothing runs."""
        return list(self.sample())

    def _idle(self, module: nn.Module) -> bool:
        """Return whether no output depends on a module."""
        own = set(map(id, module.parameters()))
        names = [name for name, p in self.weights.items() if id(p) in own and p.is_floating_point()]
        return bool(names) and not any(name in s and bool(s[name].any()) for s in self.samples for name in names)

    def _pairs(self, proposal: Proposal, heads: Heads) -> list[Claim]:
        """List the pairs of heads, with the names of the twin's weights."""
        return list(placed(proposal.pairs(heads), "", self._name_of))

    def keeps(self, claims: Iterable[Claim]) -> bool:
        """Return whether moves along the pairs of the twin leave its outputs unchanged."""
        return not broken([p for p in pairs_of(merged(claims)) if not p.thin], self.weights, self.run)

    def heads(self) -> Iterator[tuple[Proposal, Heads]]:
        """Yield what is proposed with the heads that gradients choose and a move confirms."""
        size = 0
        for proposal in proposals(self.twin, self._idle):
            heads = self._largest(proposal, size)
            null = self._key_bias_is_null(pairs_of(merged(self._pairs(proposal, heads))))
            yield proposal, (heads := self._confirmed(proposal, replace(heads, key_bias_null=null)))
            size = heads.size

    def claims(self) -> list[Claim]:
        """List the pairs of these heads, queries and keys first."""
        chosen = [p for proposal, heads in reversed(list(self.heads())) for p in self._pairs(proposal, heads)]
        return sorted(chosen, key=lambda p: p.head or 0)

    def _largest(self, proposal: Proposal, size: int) -> Heads:
        """Find where heads lie and what acts on them: the largest group; in doubt of a size that others have."""
        none, options = Heads(1, 1, 1, reason=_NONE), []
        for heads in proposal.heads:
            claims = merged(self._pairs(proposal, heads))
            wrong = next((p for p in claims if isinstance(p, Refusal)), None)
            if wrong is not None:
                return replace(none, cause=wrong.cause, reason=wrong.detail)
            pairs = pairs_of(claims)
            if computed := next((name for p in pairs for name in p.names if name not in self.weights), ""):
                return replace(none, cause=Cause.COMPUTED, reason=computed)
            one, two = moments(pairs, self.weights, self.samples)
            if not bool(one.any()) and not bool(two.any()):
                return replace(none, cause=Cause.UNCERTIFIED, reason="")
            for dimension, choice in _groups(heads, one, two):
                options.append((-len(pairs) * dimension, heads.size != size, heads.size, choice))
        return min(options, key=lambda option: option[:3])[-1] if options else none

    def _key_bias_is_null(self, pairs: Sequence[SymmetricPair]) -> bool:
        """Return whether the outputs do not depend on the key bias, on the dimensions that are not rotated."""
        biases, rows = [[s] for p in pairs for s in p.null], [[p.H[0]] for p in pairs if p.null]
        if not biases:
            return False
        like = self.weights[biases[0][0].name]
        null, seen = (max(float(SlotStack(b).gather(s, like).norm()) for s in self.samples) for b in (biases, rows))
        return null <= ROUNDING * seen

    def _confirmed(self, proposal: Proposal, heads: Heads) -> Heads:
        """Return heads with the group that a move confirms."""
        scales = heads.group == "diagonal" or heads.size == 1
        fits = [replace(heads, group=group) for group in (heads.group, *(("positive",) if scales else ()))]
        return next((f for f in fits if self.keeps(self._pairs(proposal, f))), replace(heads, reason=_LOCAL))


def _shifted(call: Call, widths: set[int], generator: torch.Generator) -> Call:
    """Add noise to the inputs of the projections, so that no symmetry holds only by chance."""

    def shift(value: Any, name: str = "") -> Any:
        known = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
        if not known or value.shape[-1] not in widths or any(w in name for w in ("mask", "bias", "pos", "cos", "sin")):
            return value
        if not float(value.abs().max()) < _MASKED:  # a mask, without a name that says so
            return value
        return value + 0.5 * value.std() * standard_normal(tuple(value.shape), value, generator)

    return tuple(map(shift, call[0])), {k: shift(v, k) for k, v in call[1].items()}


@contextmanager
def examination(module: nn.Module, call: Call, used: Sequence[bool] = ()) -> Iterator[Examination]:
    """Yield the examination of a module, by those of its outputs that are used; it is left unchanged."""

    def outputs(twin: nn.Module, call: Call) -> list[Tensor]:
        found = floats(twin(*call[0], **call[1]))
        return list(itertools.compress(found, used)) if len(found) == len(used) else found

    with running_copy(module, call, outputs) as (twin, run):
        yield Examination(twin, run)


def examine_model(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[Claim]]:
    """List the pairs of the modules of unknown classes, by path, from their inputs in a forward pass.

    Their weights have the names that they have in the modules.

    The model is run in evaluation mode; it and the random state are left unchanged.
    """
    examined: dict[str, list[Claim]] = {}
    modules = candidates(model)
    # Some models cannot be run in float64, because they make tensors of single precision inside.
    wide = all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point())
    with preserve_model_state(model):
        with Wide() if wide else nullcontext(), watched(model) as attending:
            calls = record(run, modules)
        with Wide() if wide else nullcontext():
            used = _used_outputs(run, modules) if modules else {}
        found = {name: _claims_of(m, calls.get(name), examined, used.get(type(m), ())) for name, m in modules.items()}
    known = [*(m for m in model.modules() if HANDLERS.of(m) is not None), *modules.values()]
    attending += [(m, "") for m in model.modules() if holds_keys(m)]
    unnamed = uncovered(model, attending, {inner for m in known for inner in m.modules()})
    return found | {path: no_pair(Cause.UNNAMED) for path, *_ in unnamed}


def _used_outputs(run: Callable[[], Any], modules: Mapping[str, nn.Module]) -> dict[type, list[bool]]:
    """Tell, by class, which of several tensors that modules return change what ``run`` returns.

    A cache of keys and values, for example, that nothing reads has no symmetry that counts.
    """
    counts: dict[type, set[int]] = {}
    devices = sorted({p.device.index or 0 for m in modules.values() for p in m.parameters() if p.is_cuda})

    def outputs(cls: type | None = None, changed: int = -1) -> list[Tensor]:
        """Run the model, with one output of each module of a class changed."""

        def change(module: nn.Module, _: Any, result: Any) -> Any:
            counts.setdefault(type(module), set()).add(len(floats(result)))
            if type(module) is not cls:
                return None
            numbers = itertools.count()
            return tree_map(
                lambda t: t + t.abs() + 1 if t.is_floating_point() and next(numbers) == changed else t, result
            )

        with ExitStack() as hooks, drawing_again(devices), torch.no_grad(), eager():
            for module in modules.values():
                hooks.callback(module.register_forward_hook(change).remove)
            return floats(run())

    def matters(cls: type, number: int) -> bool:
        try:
            after = outputs(cls, number)
        except Exception:  # of code that demands its own type of mapping
            return True
        return len(before) != len(after) or not all(map(torch.equal, before, after))

    before = outputs()
    several = {cls: max(count) for cls, count in counts.items() if len(count) == 1 and max(count) > 1}
    found = {cls: [matters(cls, i) for i in range(count)] for cls, count in several.items()}
    return {cls: used for cls, used in found.items() if any(used)}  # else all are, once a gate has left zero


def _claims_of(
    module: nn.Module, call: Call | None, examined: dict[str, list[Claim]], used: Sequence[bool] = ()
) -> list[Claim]:
    """List the pairs of a module of an unknown class, or why there are none.

    ``examined`` holds the pairs of a module of each kind; they are used again where a move confirms them. ``used`` says
    which of its outputs count.
    """
    if call is None:
        return no_pair(Cause.UNREACHED)
    kind = _kind(module)
    claims = examined.get(kind, [])
    try:
        with examination(module, call, used) as alone:
            if not claims or not alone.keeps(claims):
                claims = alone.claims() or no_pair(Cause.UNNAMED)
    except Exception as error:  # whatever third-party code raises
        return no_pair(Cause.FAILED, f"alone: {type(error).__name__}: {error}".splitlines()[0])
    examined[kind] = claims
    return claims


def _kind(module: nn.Module) -> str:
    """Describe a module by its classes, shapes, hooks and settings; modules of one description compute alike."""
    own = ("_parameters", "_buffers", "_modules")

    def facts(m: nn.Module) -> object:
        known = {k: v for k, v in vars(m).items() if k not in own and "layer_i" not in k and "idx" not in k}
        settings = {k: v for k, v in known.items() if not isinstance(v, Tensor)}
        return type(m), settings, [(n, tuple(p.shape)) for n, p in m.named_parameters(recurse=False)]

    return repr([(path, facts(m)) for path, m in module.named_modules()])
