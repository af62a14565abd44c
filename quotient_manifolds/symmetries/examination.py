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

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base import standard_normal
from ..batches import floats
from .attention import PLANES, Place
from .blocks import BlockStack
from .certificate import ROUNDING, broken, orbit_residuals
from .modules import Call, Watch, Wide, copied, preserve_model_state, random_state_kept, record, widened
from .pairs import ENCLOSING, FAILED, UNCERTIFIED, UNNAMED, UNREACHED, SymmetricPair, merged, no_pair, refused
from .registry import candidates, handler_of
from .roles import Roles, holds_keys, layout_pairs, places, proposals, roles_of
from .stacks import stacks

__all__ = ["examine", "examine_model"]

_NONE = "no continuous symmetry was found"
_LOCAL = "flat at the weights, but not further along the orbit"

#: Inputs with entries beyond this are masks.
_MASKED = 1e4
#: Number of cotangents (and randomly shifted inputs) with which a hypothesis is tested.
SAMPLES = 2
#: Where the heads of a module lie; or, for other layers, which of the proposed pairs hold, or why none does.
Finding = tuple[Place, Place] | list[int | str]


@dataclass(frozen=True)
class _Hypothesis:
    """A Lie algebra of h × h matrices, given by the linear maps that must vanish on C."""

    group: str
    dimension: int
    parts: tuple[Callable[[Tensor], Tensor], ...]
    rotary_size: int = 0


def _planes(C: Tensor, size: int, pairing: str, *, turns_only: bool = False) -> Tensor:
    """Return the part of C along complex numbers, or only along rotations, of the leading planes."""
    i = torch.arange(size // 2, device=C.device)
    a, b = (i, i + size // 2) if pairing == "half" else (2 * i, 2 * i + 1)
    turn = C[..., a, b] - C[..., b, a]
    return turn if turns_only else torch.cat([C[..., a, a] + C[..., b, b], turn], -1)


def _hypotheses(h: int) -> list[_Hypothesis]:
    """List the candidate algebras, the largest first."""
    found = [_Hypothesis("GL", h * h, (lambda C: C.flatten(-2),))]
    for size in range(2, h + 1, 2):
        rest = (lambda C, r=size: C[..., r:, r:].flatten(-2),) if size < h else ()
        for pairing in PLANES[: 1 + (size > 2)]:
            turns = (lambda C, r=size, p=pairing: _planes(C, r, p), *rest)
            found.append(_Hypothesis(pairing, size + (h - size) ** 2, turns, size))
    for pairing in PLANES[: h // 2 if h % 2 == 0 else 0]:
        turn = (lambda C, p=pairing: _planes(C, h, p, turns_only=True),)
        found.append(_Hypothesis(f"rotations of the planes only ({pairing}), which are compact", h // 2, turn))
    trace = (lambda C: C.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True),)
    skew = (lambda C: (C - C.mT).flatten(-2),)
    found.append(_Hypothesis(f"O({h}) only, which is compact", h * (h - 1) // 2, skew))
    found.append(_Hypothesis(f"O({h}) and one scale, which have no quotient here", h * (h - 1) // 2 + 1, skew + trace))
    found.append(_Hypothesis("diagonal", h, (lambda C: C.diagonal(dim1=-2, dim2=-1),)))
    found.append(_Hypothesis("one scale, which has no quotient here", 1, trace))
    ones = (lambda C: C.sum((-2, -1)).unsqueeze(-1),)
    found.append(_Hypothesis("one shift of all dimensions alike, which has no quotient here", 1, ones))
    return sorted((f for f in found if f.dimension), key=lambda f: -f.dimension)


def _pairs(kind: str, roles: Roles, place: Place) -> list[SymmetricPair]:
    return merged(layout_pairs("", roles, *((place, None) if kind == "qk" else (None, place))))


def _moments(found: Sequence[SymmetricPair], samples: Sequence[dict[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return Gᵀ∇_G and (Hᵀ∇_H)ᵀ, (samples, pairs, h, h)."""
    (stack,) = stacks(found)
    with torch.no_grad():
        G, H = stack.gather().split([stack.n, stack.m], dim=1)
        gradients = torch.stack([stack.gather(s) for s in samples]).split([stack.n, stack.m], dim=2)
        return G.mT @ gradients[0], (H.mT @ gradients[1]).mT


def _holds(hypothesis: _Hypothesis, one: Tensor, two: Tensor) -> bool:
    """Return whether the moments of both factors agree along an algebra, head by head."""
    floor = 1e-6 * torch.maximum(one.flatten(-2).norm(dim=-1), two.flatten(-2).norm(dim=-1))
    for part in hypothesis.parts:
        a, b = part(one), part(two)
        scale = torch.maximum(torch.maximum(a.norm(dim=-1), b.norm(dim=-1)), floor)
        if not bool(((a - b).norm(dim=-1) <= ROUNDING * scale).all()):  # no hypothesis holds for NaN
            return False
    return True


def _best(
    kind: str, roles: Roles, samples: Callable[[], Sequence[dict[Tensor, Tensor]]], sizes: Sequence[int]
) -> Place:
    """Find where the heads lie and what acts on them: the largest group; of equal ones, that with a known head size."""
    fits: list[tuple[tuple[int, int, int, int], Place]] = []
    unreached, reason = False, ""
    for place in places(roles, kind):
        found = _pairs(kind, roles, place)
        reason = next((p.reason for p in found if p.group is None), reason)
        if reason:
            break
        one, two = _moments(found, samples())
        unreached = not bool(one.any()) and not bool(two.any())
        for hypothesis in () if unreached else _hypotheses(place.size):
            if fits and len(found) * hypothesis.dimension < -min(fits)[0][0]:  # the following ones are even smaller
                break
            if _holds(hypothesis, one, two):
                doubt = sizes.index(place.size) if place.size in sizes else len(sizes)
                rank = (-len(found) * hypothesis.dimension, doubt, place.size, len(fits))
                rotary = hypothesis.rotary_size
                fit = replace(place, group=hypothesis.group, dimension=hypothesis.dimension, rotary_size=rotary)
                fits.append((rank, fit))
                break
    if fits and not reason:
        return min(fits)[1]
    reason = reason or (UNCERTIFIED if unreached else _NONE)
    return Place(1, 1, min(map(roles.width, "qkvo")), group=reason)


def _shifted(call: Call, widths: set[int], generator: torch.Generator) -> Call:
    """Add noise to the inputs of the projections, so that no symmetry holds only by chance."""

    def shift(value: Any, name: str = "") -> Any:
        known = (
            isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and value.shape[-1] in widths
        )
        if not known or any(word in name for word in ("mask", "bias", "pos", "cos", "sin")):
            return value
        if not float(value.abs().max()) < _MASKED:  # a mask, without a name that says so
            return value
        return value + 0.5 * value.std() * standard_normal(tuple(value.shape), value, generator)

    return tuple(map(shift, call[0])), {k: shift(v, k) for k, v in call[1].items()}


def _outputs(twin: nn.Module, call: Call) -> list[Tensor]:
    with random_state_kept(twin), Wide():
        return floats(twin(*call[0], **call[1]))


def _samples(twin: nn.Module, call: Call, count: int = SAMPLES) -> Iterator[dict[Tensor, Tensor]]:
    """Return gradients of random cotangents at shifted inputs."""
    generator = torch.Generator().manual_seed(0)
    weights = [p for p in twin.parameters() if p.is_floating_point()]
    widths = {size for p in weights if p.dim() > 1 for size in p.shape[:2]}
    for _ in range(count):
        with torch.enable_grad():
            outputs = [t for t in _outputs(twin, _shifted(call, widths, generator)) if t.requires_grad]
            loss = sum((t * standard_normal(tuple(t.shape), t, generator)).sum() for t in outputs)
            if not isinstance(loss, Tensor):
                raise ValueError("no output depends on the weights in a way that autograd can follow")
            # A module may keep a part of the graph, such as biases that it has gathered once.
            found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        gradients: dict[Tensor, Tensor] = {p: g for p, g in zip(weights, found, strict=True) if g is not None}
        if not all(bool(g.isfinite().all()) for g in gradients.values()):
            raise ValueError("its gradients are not finite on this batch")
        yield gradients


def _key_bias_is_null(roles: Roles, qk: Place, samples: Sequence[dict[Tensor, Tensor]]) -> bool:
    """Return whether the outputs do not depend on the key bias, on the dimensions that are not rotated."""
    k, start = roles.placed("k", qk), qk.rotary_size
    rest = [(j, qk.size, start, qk.size - start) for j in range(qk.kv_heads)]
    biases = [[b] for r in rest for b in k.bias_blocks(*r)] if start < qk.size else []
    if not biases:
        return False
    weights = [[k.input_blocks(*r)[0]] for r in rest]
    null, seen = (max(float(BlockStack(b).gather(s).norm()) for s in samples) for b in (biases, weights))
    return null <= ROUNDING * seen


def _stays(twin: nn.Module, call: Call, pairs: Sequence[SymmetricPair]) -> bool:
    """Return whether moves along the pairs leave the outputs of a module unchanged."""
    return not broken([p for p in pairs if p.group and not p.thin], lambda: _outputs(twin, call))


def _alone(module: nn.Module, call: Call) -> tuple[nn.Module, Call]:
    """Copy a module and a call in float64, in evaluation mode and with gradients for frozen weights too."""
    twin = copied(module).double()
    for m in twin.modules():  # not eval(): some layers merge weights when they are told to
        m.training = False
    for p in twin.parameters():
        p.requires_grad_(p.is_floating_point())
    return twin, (widened(call[0]), widened(call[1]))


def examine(module: nn.Module, call: Call) -> tuple[Place, Place]:
    """Find the symmetries of queries and keys, and of values and outputs, in an attention module.

    Parameters
    ----------
    module : nn.Module
        A module that :func:`.roles.roles_of` can read; it is left unchanged.
    call : tuple
        Positional and keyword arguments of a call, which determine what the module computes.

    Returns
    -------
    qk, vo : Place
        The location of their heads and the group that acts on them, or the reason why none does.
    """
    twin, call = _alone(module, call)
    roles = _roles(twin)
    samples = functools.cache(lambda: list(_samples(twin, call)))  # for a module that is refused it need not run
    vo = _best("vo", roles, samples, _known_sizes(module))
    qk = _best("qk", roles, samples, [*_known_sizes(module), vo.size])
    qk = replace(qk, key_bias_null=bool(qk.dimension) and _key_bias_is_null(roles, qk, samples()))

    def confirmed(kind: str, place: Place) -> Place:
        scales = place.group == "diagonal" or place.size == 1
        fits = (replace(place, group=group) for group in (place.group, *(("positive",) if scales else ())))
        return next((f for f in fits if _stays(twin, call, _pairs(kind, roles, f))), replace(place, group=_LOCAL))

    return confirmed("qk", qk), confirmed("vo", vo)


def _known_sizes(module: nn.Module) -> list[int]:
    """List the head sizes that a module stores under common names."""
    names = ("head_dim", "head_size", "attention_head_size")
    found = [getattr(m, name, None) for m in module.modules() for name in names]
    return [size for size in found if isinstance(size, int)]


def examine_model(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[SymmetricPair]]:
    """List the pairs of the modules of unknown classes, by path, from their inputs in a forward pass.

    The model is run in evaluation mode; it and the random state are left unchanged.
    """
    known: dict[str, Finding] = {}
    modules = candidates(model)
    # Some models cannot be run in float64, because they make tensors of single precision inside.
    wide = all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point())
    with preserve_model_state(model):
        with Wide() if wide else nullcontext(), Watch(model) as watch:
            calls = record(run, modules)
        found = {name: _examined_pairs(name, m, calls.get(name), known) for name, m in modules.items()}
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


def _examined_pairs(name: str, module: nn.Module, call: Call | None, known: dict[str, Finding]) -> list[SymmetricPair]:
    """List the pairs of a module of an unknown class; without a group, but with a reason, where none is found.

    ``known`` holds what was found of modules of each kind; it is used again where a move confirms it.
    """
    if call is None:
        return no_pair(name, UNREACHED)
    if roles_of(module) is None and not proposals(module, ""):
        return no_pair(name, ENCLOSING)
    kind = _kind(module)
    try:
        if kind not in known or not _agrees(known[kind], module, call):
            known[kind] = _finding(module, call)
    except Exception as error:  # whatever third-party code raises
        return no_pair(name, f"{FAILED} alone: {type(error).__name__}: {error}".splitlines()[0])
    return _found_pairs(known[kind], module, name)


def _finding(module: nn.Module, call: Call) -> Finding:
    return examine(module, call) if roles_of(module) is not None else _held(module, call)


def _found_pairs(finding: Finding, module: nn.Module, name: str) -> list[SymmetricPair]:
    """List the pairs of a module for which, or for another of its kind, this was found."""
    if isinstance(finding, tuple):
        return layout_pairs(name, _roles(module), *finding)
    proposed = proposals(module, name)
    return [refused(one[0], i) if isinstance(i, str) else one[i] for one, i in zip(proposed, finding, strict=True)]


def _agrees(finding: Finding, module: nn.Module, call: Call) -> bool:
    """Whether moves along the pairs leave the outputs of a module unchanged."""
    twin, call = _alone(module, call)
    return _stays(twin, call, merged(_found_pairs(finding, twin, "")))


def _roles(module: nn.Module) -> Roles:
    """Return the roles of a module that has them; gradients and moves judge its layers, not their classes."""
    found = roles_of(module)
    assert found is not None
    return replace(found, projections={c: replace(p, examined=True) for c, p in found.projections.items()})


def _held(module: nn.Module, call: Call) -> list[int | str]:
    """Say which alternative of each proposal a gradient and a move confirm, or why none does."""
    twin, call = _alone(module, call)
    samples = list(_samples(twin, call))

    def obstacle(pair: SymmetricPair) -> str:
        (stack,) = stacks([pair])
        residuals = [r for s in samples if (r := float(orbit_residuals(stack, s))) == r]
        if not residuals:
            return UNCERTIFIED
        sound = max(residuals) <= ROUNDING and _stays(twin, call, [pair])
        return "" if sound else _NONE

    found = [[obstacle(pair) for pair in one] for one in proposals(twin, "")]
    return [reasons.index("") if "" in reasons else reasons[0] for reasons in found]


def _kind(module: nn.Module) -> str:
    """Describe a module by its classes, shapes, hooks and settings; modules of one description compute alike."""

    def facts(m: nn.Module) -> object:
        own = {k: v for k, v in vars(m).items() if not (k.startswith("_") and isinstance(v, dict))}
        settings = [
            (k, v) for k, v in own.items() if not isinstance(v, Tensor) and "layer_i" not in k and "idx" not in k
        ]
        shapes = [(n, tuple(p.shape)) for n, p in m.named_parameters(recurse=False)]
        hooks = [list(v.values()) for k, v in vars(m).items() if k.startswith("_forward") and isinstance(v, dict)]
        return type(m), hooks, sorted(settings, key=lambda s: s[0]), shapes

    return repr([(path, facts(m)) for path, m in module.named_modules()])
