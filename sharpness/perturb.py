"""Temporarily moved weights, and gradients there: only this file and, for shards, ``sharded.py`` move a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from quotient_manifolds.linalg import at_least_float32
from quotient_manifolds.symmetries.modules import (
    caching,
    check_model,
    drop_caches,
    floats,
    preserve_model_state,
    tree_map,
)

from .losses import to_float32

#: Attributes of modules that are False during a measurement. With the first, bitsandbytes packs a layer's 4-bit weights
#: for inference in the first pass that needs no gradient of its input: after that nothing can be differentiated through
#: the layer, and its old weights no longer fit. With the second, gradients are sparse and have no derivatives.
_SWITCHES: dict[str, tuple[type, ...]] = {
    "support_avx512bf16_for_cpu": (nn.Module,),
    "sparse": (nn.Embedding, nn.EmbeddingBag),
}


def preserved(model: nn.Module) -> preserve_model_state:
    """Return what leaves a model as it was, if ``with`` enters it twice, see :class:`preserve_model_state`."""
    check_model(model)
    return preserve_model_state(model, _SWITCHES)


@contextmanager
def pointing_to(model: nn.Module, copies: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let parameters point to copies; their own storage is untouched and is restored even after an error.

    Where a copy is wider than its parameter, all half-precision parameters and buffers of the model are float32
    meanwhile: next to w, bfloat16 has no numbers closer than w (1 ± 2⁻⁸), so that nearly all of a small ξ would be
    rounded away, in the weights and again by autocast, which casts them before every product. Not so above a frozen
    base, see :func:`stands_on_narrow_base`: it stays as it is, and the modules of the copies compute in float32.
    """
    data, hooks, above = dict(copies), list[RemovableHandle](), stands_on_narrow_base(model, copies)
    wider = {p for p, copy in copies.items() if p.dtype != copy.dtype}
    if wider and not above:
        others = (t for t in (*model.parameters(), *model.buffers()) if t not in data and _is_narrow(t))
        data |= {t: to_float32(t.data) for t in others}
    original, cached = {t: t.data for t in data}, caching(model)

    def put_back() -> None:
        for t, before in original.items():
            t.data = before
        for m in cached:
            drop_caches(m)
        for hook in hooks:
            hook.remove()

    try:
        try:
            for t, replacement in data.items():
                t.data = replacement
            hooks += [m.register_forward_pre_hook(drop_caches) for m in cached]  # in each pass, for the weights move on
            for m in model.modules() if above else ():
                narrow = [original[p].dtype for p in m.parameters(recurse=False) if p in wider]
                hooks += _compute_in_float32(m, narrow[0]) if narrow else []
            yield
        finally:  # repeat what an interrupt has cut short
            put_back()
    finally:
        put_back()


def becomes_float32(model: nn.Module, moving: Collection[Tensor]) -> bool:
    """Whether a half-precision model is in float32, and needs such batches, while some of its weights move."""
    return any(map(_is_narrow, moving)) and not stands_on_narrow_base(model, moving)


def stands_on_narrow_base(model: nn.Module, moving: Collection[Tensor]) -> bool:
    """Whether most of a model is frozen in half precision, or in integers, as below adapters.

    Wide copies of the base would need more memory than all moving weights. What moves must belong to modules that
    hold nothing else, whose own forward pass reads it: only those can compute in float32 by themselves.
    """
    known = set(moving)
    frozen = (p for p in model.parameters() if not p.requires_grad and p not in known)
    if sum(p.numel() for p in frozen if p.dtype != at_least_float32(p.dtype)) <= sum(p.numel() for p in known):
        return False
    for m in model.modules():
        own = [p for p in m.parameters(recurse=False) if _is_narrow(p)]
        read_by_its_parent = isinstance(m, NonDynamicallyQuantizableLinear)
        alone = known.issuperset(own) and not read_by_its_parent and next(m.children(), None) is None
        if not alone and not known.isdisjoint(own):
            return False
    return True


def _compute_in_float32(module: nn.Module, narrow: torch.dtype) -> list[RemovableHandle]:
    """Let a module whose weights are now in float32 accept and return the dtype of its neighbours."""
    came: list[torch.dtype] = []

    def widen(_: nn.Module, args: Any, kwargs: Any) -> Any:
        came.append(next((t.dtype for t in floats((args, kwargs))), narrow))
        return to_float32(args), to_float32(kwargs)

    def narrow_again(_: nn.Module, args: Any, output: Any) -> Any:
        dtype = came.pop()
        return tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    return [module.register_forward_pre_hook(widen, with_kwargs=True), module.register_forward_hook(narrow_again)]


def _is_narrow(t: Tensor) -> bool:
    return t.is_floating_point() and t.dtype != at_least_float32(t.dtype)


class Gradients:
    """The gradients of losses with respect to some parameters; ``.grad`` is left alone.

    ``beside`` are parameters that a backward pass also reaches, and whose ``.grad`` is put back. ``backward`` says that
    gradients come through ``.grad`` alone, as FSDP2's do: then they are this process's rows.
    """

    def __init__(self, parameters: Sequence[Tensor], beside: Iterable[Tensor] = (), *, backward: bool = False) -> None:
        self._parameters = list(parameters)
        self._all = list(dict.fromkeys([*self._parameters, *beside]))
        self._backward = backward
        self._reentrant: bool | None = True if backward else None

    def sum_over(self, losses: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Sum the gradients of losses one after the other, so that a generator needs the memory of only one of them."""
        total: dict[Tensor, Tensor] = {}
        for loss in losses:
            for p, g in self._of(loss).items():  # which may share memory and must not be written to
                total[p] = total[p] + g if p in total else g
            del loss
        return total

    def with_hessian_product(
        self, losses: Iterable[Tensor], moving: Mapping[Tensor, Tensor]
    ) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
        """Add up gradients, and products of the Hessians with a vector."""
        if self._backward:
            raise ValueError("the Hessian of a sharded model is not measured: FSDP2 has no second derivatives")
        first, second = dict[Tensor, Tensor](), dict[Tensor, Tensor]()
        for loss in losses:
            grads = torch.autograd.grad(loss, self._parameters, create_graph=True, materialize_grads=True)
            slopes = ((g.conj() * moving[p]).real.sum() for p, g in zip(self._parameters, grads, strict=True))
            slope = sum(slopes, start=loss.new_zeros(()))
            twice = grads[:0]
            if slope.requires_grad:
                twice = torch.autograd.grad(slope, self._parameters, materialize_grads=True)
            for into, some in ((first, grads), (second, twice)):
                for p, g in zip(self._parameters, some, strict=False):
                    into[p] = into[p] + g.detach() if p in into else g.detach()
        return first, second

    def _of(self, loss: Tensor) -> dict[Tensor, Tensor]:
        if not loss.requires_grad:
            raise ValueError("the loss does not depend on any trainable parameter; check loss_fn and requires_grad")
        if self._reentrant is None:  # one walk through the graph is enough, because the model does not change
            self._reentrant = _has_reentrant_checkpoint(loss)
        if not self._reentrant:
            grads: Sequence[Tensor | None] = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        else:  # autograd.grad does not work with reentrant checkpoints: collect in .grad, and restore its old value
            before = [p.grad for p in self._all]
            try:
                for p in self._all:
                    p.grad = None
                loss.backward()
                grads = [p.grad for p in self._parameters]
            finally:
                for p, g in zip(self._all, before, strict=True):
                    p.grad = g
        found = zip(self._parameters, grads, strict=True)
        return {p: g if type(g) is Tensor and not g.is_sparse else _plain(g) for p, g in found if g is not None}


def _plain(g: Any) -> Tensor:
    """Return this process's rows of a sharded gradient, and a sparse one as a dense tensor."""
    found: Tensor = g.to_local() if hasattr(g, "to_local") else g
    return found.to_dense() if found.is_sparse else found


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    queue: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {None, *queue}
    for node in queue:
        children = {child for child, _ in node.next_functions} - seen
        seen |= children
        queue.extend(children)
    return any(node.name() == "CheckpointFunctionBackward" for node in queue)
