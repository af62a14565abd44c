r"""Examination of attention modules without a handler: which groups leave their outputs unchanged.

A module is run alone, in float64, on the inputs that a forward pass of the model gave it, and hypotheses are tested
with the gradient of a random cotangent of its outputs: where the heads lie (divisors of the widths, roles that share a
matrix) and which matrices Λ act on them. With the matrices C of :mod:`.certificate`, a head's group is the largest one
that

.. math:: \langle C, Λ \rangle = 0 \quad \text{for all } Λ \text{ of its Lie algebra}

admits. C is linear in the cotangent, so one random cotangent decides each hypothesis at these inputs, except on a set
of measure zero. A finite move then confirms what is divided out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..linalg import standard_normal
from .attention import PLANES, Heads
from .blocks import BlockStack
from .certificate import ROUNDING, broken, orbit_residuals, output_gradients
from .modules import Call, Wide, preserve_model_state, record, running_copy
from .pairs import ENCLOSING, FAILED, UNCERTIFIED, UNNAMED, UNREACHED, SymmetricPair, in_copy, merged, no_pair, refused
from .registry import Watch, candidates, handler_of
from .roles import Roles, holds_keys, possible_heads, proposals, roles_of
from .stacks import stacks

_NONE = "no continuous symmetry was found"
_LOCAL = "flat at the weights, but not further along the orbit"

#: Inputs with entries beyond this are masks.
_MASKED = 1e4
#: Number of cotangents (and randomly shifted inputs) with which a hypothesis is tested.
SAMPLES = 2


class _Algebra(NamedTuple):
    """A Lie algebra of h × h matrices, by the linear maps that must vanish on C, and the fields of heads it acts on."""

    dimension: int
    parts: Callable[[Tensor], tuple[Tensor, ...]]
    acting: dict[str, Any]


def _turns(C: Tensor, size: int, pairing: str) -> tuple[Tensor, Tensor]:
    """Return the parts of C along stretches and rotations of the leading planes."""
    i = torch.arange(size // 2, device=C.device)
    a, b = (i, i + size // 2) if pairing == "half" else (2 * i, 2 * i + 1)
    return C[..., a, a] + C[..., b, b], C[..., a, b] - C[..., b, a]


def _rotations(C: Tensor, size: int, pairing: str) -> tuple[Tensor, ...]:
    """Return the parts of C along rotations of the leading planes."""
    return (_turns(C, size, pairing)[1],)


def _rotary(C: Tensor, size: int, pairing: str) -> tuple[Tensor, ...]:
    """Return the parts of C along complex numbers on the leading planes, and along all matrices on the others."""
    return torch.cat(_turns(C, size, pairing), -1), C[..., size:, size:].flatten(-2)


def _algebras(h: int) -> list[_Algebra]:
    """List the candidates."""

    def skew(C: Tensor) -> tuple[Tensor, ...]:
        return ((C - C.mT).flatten(-2),)

    def trace(C: Tensor) -> tuple[Tensor, ...]:
        return (C.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True),)

    def shift(C: Tensor) -> tuple[Tensor, ...]:
        return (C.sum((-2, -1)).unsqueeze(-1),)

    found = [_Algebra(h * h, lambda C: (C.flatten(-2),), {})]
    for size in range(2, h + 1, 2):
        for pairing in PLANES[: 1 + (size > 2)]:
            of_planes = partial(_rotary, size=size, pairing=pairing)
            found.append(_Algebra(size + (h - size) ** 2, of_planes, {"group": pairing, "rotary_size": size}))
    for pairing in PLANES[: h // 2 if h % 2 == 0 else 0]:
        reason = f"rotations of the planes only ({pairing}), which are compact"
        found.append(_Algebra(h // 2, partial(_rotations, size=h, pairing=pairing), {"reason": reason}))
    both = f"O({h}) and one scale, which have no quotient here"
    found.append(_Algebra(h * (h - 1) // 2, skew, {"reason": f"O({h}) only, which is compact"}))
    found.append(_Algebra(h * (h - 1) // 2 + 1, lambda C: skew(C) + trace(C), {"reason": both}))
    found.append(_Algebra(h, lambda C: (C.diagonal(dim1=-2, dim2=-1),), {"group": "diagonal"}))
    found.append(_Algebra(1, trace, {"reason": "one scale, which has no quotient here"}))
    found.append(_Algebra(1, shift, {"reason": "one shift of all dimensions alike, which has no quotient here"}))
    return [a for a in found if a.dimension]


def _holds(algebra: _Algebra, one: Tensor, two: Tensor) -> bool:
    """Return whether the moments of both factors agree along an algebra, head by head."""
    floor = 1e-6 * torch.maximum(one.flatten(-2).norm(dim=-1), two.flatten(-2).norm(dim=-1))
    for a, b in zip(algebra.parts(one), algebra.parts(two), strict=True):
        scale = torch.maximum(torch.maximum(a.norm(dim=-1), b.norm(dim=-1)), floor)
        if not bool(((a - b).norm(dim=-1) <= ROUNDING * scale).all()):  # no hypothesis holds for NaN
            return False
    return True


def moments(pairs: Sequence[SymmetricPair], samples: Sequence[dict[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return Gᵀ∇_G and (Hᵀ∇_H)ᵀ of pairs of one shape, (samples, pairs, h, h)."""
    (stack,) = stacks(pairs)
    with torch.no_grad():
        G, H = stack.gather().split([stack.n, stack.m], dim=1)
        gradients = torch.stack([stack.gather(s) for s in samples]).split([stack.n, stack.m], dim=2)
        return G.mT @ gradients[0], (H.mT @ gradients[1]).mT


class Examination:
    """A module alone, in float64 and evaluation mode, on the inputs of a call.

    ``twin`` is a copy of the module, ``run`` returns its outputs, of changed inputs if it is given what changes them.
    """

    def __init__(self, twin: nn.Module, run: Callable[..., list[Tensor]]) -> None:
        self.twin, self.run = twin, run

    def sample(self, count: int = SAMPLES) -> Iterator[dict[Tensor, Tensor]]:
        """Iterate over gradients of random cotangents at shifted inputs."""
        generator = torch.Generator().manual_seed(0)
        weights = [p for p in self.twin.parameters() if p.is_floating_point()]
        widths = {size for p in weights if p.dim() > 1 for size in p.shape[:2]}
        for _ in range(count):
            shift = partial(_shifted, widths=widths, generator=generator)
            gradients = output_gradients(partial(self.run, shift), weights, generator)
            if not gradients:
                raise ValueError("no output depends on the weights in a way that autograd can follow")
            if not all(bool(g.isfinite().all()) for g in gradients.values()):
                raise ValueError("its gradients are not finite on this batch")
            yield gradients

    @cached_property
    def samples(self) -> list[dict[Tensor, Tensor]]:
        """What most hypotheses are tested with; for a module that is refused nothing runs."""
        return list(self.sample())

    @cached_property
    def roles(self) -> Roles | None:
        """Where the names of the weights say that projections are."""
        return roles_of(self.twin)

    def keeps(self, pairs: Iterable[SymmetricPair]) -> bool:
        """Return whether moves along the pairs of the twin leave its outputs unchanged."""
        return not broken([p for p in merged(pairs) if p.group and not p.thin], self.run)

    def pairs(self) -> list[SymmetricPair]:
        """List what gradients choose and moves confirm."""
        if self.roles is not None:
            return self.roles.pairs("", *self.heads(self.roles))
        chosen = [p for alternatives in proposals(self.twin, "") for p in self._chosen(alternatives)]
        return sorted(chosen, key=lambda p: p.head or 0)

    def _chosen(self, alternatives: Sequence[list[SymmetricPair]]) -> list[SymmetricPair]:
        """Return the first alternative that a gradient and a move confirm, or the reason why none holds."""
        reasons = []
        for pairs in alternatives:
            found = [r for stack in stacks(pairs) for s in self.samples for r in orbit_residuals(stack, s).tolist()]
            residuals = [r for r in found if not math.isnan(r)]
            if residuals and max(residuals) <= ROUNDING and self.keeps(pairs):
                return pairs
            reasons.append(_NONE if residuals else UNCERTIFIED)
        return [refused(p, p.reason or reasons[0]) for p in alternatives[0]]

    def known_sizes(self) -> list[int]:
        """List the head sizes that the module stores under common names."""
        names = ("head_dim", "head_size", "attention_head_size")
        stored = [getattr(m, name, None) for m in self.twin.modules() for name in names]
        return [size for size in stored if isinstance(size, int)]

    def heads(self, roles: Roles) -> tuple[Heads, Heads]:
        """Find the heads of queries and keys, and of values and outputs, with what acts on them."""
        sizes = self.known_sizes()
        vo = self._largest("vo", roles, sizes)
        qk = self._largest("qk", roles, [*sizes, vo.size])
        qk = replace(qk, key_bias_null=self._key_bias_is_null(merged(roles.of_kind("qk", qk))))
        return self._confirmed("qk", roles, qk), self._confirmed("vo", roles, vo)

    def _largest(self, kind: str, roles: Roles, sizes: Sequence[int]) -> Heads:
        """Find where heads lie and what acts on them: the largest group; of equal ones, that with a known head size."""
        none = Heads(1, 1, min(map(roles.width, "qkvo")), reason=_NONE)
        options = []
        for heads in possible_heads(roles, kind):
            pairs = merged(roles.of_kind(kind, heads))
            reason = next((p.reason for p in pairs if p.group is None), "")
            if reason:
                return replace(none, reason=reason)
            one, two = moments(pairs, self.samples)
            if not bool(one.any()) and not bool(two.any()):
                return replace(none, reason=UNCERTIFIED)
            doubt = sizes.index(heads.size) if heads.size in sizes else len(sizes)
            for algebra in _algebras(heads.size):
                options.append(((-len(pairs) * algebra.dimension, doubt, heads.size), heads, algebra, one, two))
        for _, heads, algebra, one, two in sorted(options, key=lambda option: option[0]):
            if _holds(algebra, one, two):
                return replace(heads, dimension=algebra.dimension, **algebra.acting)
        return none

    def _key_bias_is_null(self, pairs: Sequence[SymmetricPair]) -> bool:
        """Return whether the outputs do not depend on the key bias, on the dimensions that are not rotated."""
        biases, weights = [[b] for p in pairs for b in p.null], [[p.H[0]] for p in pairs if p.null]
        if not biases:
            return False
        null, seen = (max(float(BlockStack(b).gather(s).norm()) for s in self.samples) for b in (biases, weights))
        return null <= ROUNDING * seen

    def _confirmed(self, kind: str, roles: Roles, heads: Heads) -> Heads:
        """Return heads with the group that a move confirms."""
        scales = heads.group == "diagonal" or heads.size == 1
        fits = [replace(heads, group=group) for group in (heads.group, *(("positive",) if scales else ()))]
        return next((f for f in fits if self.keeps(roles.of_kind(kind, f))), replace(heads, reason=_LOCAL))


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
def examination(module: nn.Module, call: Call) -> Iterator[Examination]:
    """Yield the examination of a module; it is left unchanged."""
    with running_copy(module, call, lambda twin, c: twin(*c[0], **c[1])) as (twin, run):
        yield Examination(twin, run)


def examine_model(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[SymmetricPair]]:
    """List the pairs of the modules of unknown classes, by path, from their inputs in a forward pass.

    The model is run in evaluation mode; it and the random state are left unchanged.
    """
    examined: dict[str, tuple[nn.Module, list[SymmetricPair]]] = {}
    modules = candidates(model)
    # Some models cannot be run in float64, because they make tensors of single precision inside.
    wide = all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point())
    with preserve_model_state(model):
        with Wide() if wide else nullcontext(), Watch(model) as watch:
            calls = record(run, modules)
        found = {name: _examined_pairs(name, m, calls.get(name), examined) for name, m in modules.items()}
    covered = [*(m for m in model.modules() if handler_of(m) is not None), *modules.values()]
    return found | {name: no_pair(name, UNNAMED) for name in _unnamed(model, covered, watch)}


def _unnamed(model: nn.Module, covered: Iterable[nn.Module], watch: Watch) -> Iterator[str]:
    """Iterate over the modules with weights, outside of others, that compute attention or hold keys and values."""
    inside = {inner for m in covered for inner in m.modules()}
    names = {m: name for name, m in model.named_modules()}
    for m in [*(m for m, _ in watch.calls), *(m for m in names if holds_keys(m))]:
        path = names.get(m, "")
        while path and next(model.get_submodule(path).parameters(), None) is None:  # such as a softmax
            path = path.rpartition(".")[0]
        if m in names and m not in inside:
            yield path


def _examined_pairs(
    name: str, module: nn.Module, call: Call | None, examined: dict[str, tuple[nn.Module, list[SymmetricPair]]]
) -> list[SymmetricPair]:
    """List the pairs of a module of an unknown class; without a group, but with a reason, where none is found.

    ``examined`` holds a module of each kind with its pairs; they are used again where a move confirms them.
    """
    if call is None:
        return no_pair(name, UNREACHED)
    if roles_of(module) is None and not proposals(module, ""):
        return no_pair(name, ENCLOSING)
    kind = _kind(module)
    try:
        with examination(module, call) as alone:
            if kind in examined:
                pairs = in_copy(examined[kind][1], examined[kind][0], alone.twin)
            if kind not in examined or not alone.keeps(pairs):
                pairs = alone.pairs()
    except Exception as error:  # whatever third-party code raises
        return no_pair(name, f"{FAILED} alone: {type(error).__name__}: {error}".splitlines()[0])
    pairs = [replace(p, module=name) for p in in_copy(pairs, alone.twin, module)]
    examined[kind] = module, pairs
    return pairs


def _kind(module: nn.Module) -> str:
    """Describe a module by its classes, shapes, hooks and settings; modules of one description compute alike."""

    def facts(m: nn.Module) -> object:
        settings, hooks = [], []
        for k, v in sorted(vars(m).items()):
            if k.startswith("_") and isinstance(v, dict):
                hooks += list(v.values()) if k.startswith("_forward") else []
            elif not isinstance(v, Tensor) and "layer_i" not in k and "idx" not in k:
                settings.append((k, v))
        return type(m), hooks, settings, [(n, tuple(p.shape)) for n, p in m.named_parameters(recurse=False)]

    return repr([(path, facts(m)) for path, m in module.named_modules()])
