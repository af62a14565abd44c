"""The one door to a model: names of its weights, other values in their place, what restores it, and its copies."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from .linalg import at_least_float32, differentiated, has_double
from .passes import Forward, Run, Shared, Wide, drawing_again, floats, tensors, to_device, widened

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=Tensor)
#: Attributes of modules that are False meanwhile. Without the second, bitsandbytes packs a layer's 4-bit weights for
#: inference in the first pass that needs no gradient of its input: after that nothing can be differentiated through the
#: layer, and its old weights no longer fit. With the third, gradients are sparse and have no derivatives. With the
#: last three, DDP waits in a pass for other processes, which do not make the same passes.
_SWITCHES: dict[str, tuple[type, ...]] = {
    "training": (nn.Module,),  # not model.eval(): some merge weights then
    "support_avx512bf16_for_cpu": (nn.Module,),
    "sparse": (nn.Embedding, nn.EmbeddingBag),
    **dict.fromkeys(
        ("require_forward_param_sync", "require_backward_grad_sync", "static_graph"), (DistributedDataParallel,)
    ),
}


def check_model(model: object) -> None:
    """Raise for anything that is not a torch module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a shard of FSDP (a DTensor or a flat parameter) or of DeepSpeed's ZeRO-3."""
    return type(tensor).__name__ == "DTensor" or any(hasattr(tensor, mark) for mark in ("_is_flat_param", "ds_id"))


def reshard(model: nn.Module) -> None:
    """Let no module keep weights that FSDP2 has gathered: what is written to them is lost, or to shards is not seen."""
    for m in model.modules():
        if hasattr(m, "reshard"):
            m.reshard()  # type: ignore[operator]


def check_whole(model: nn.Module, *, or_rows: bool = False) -> bool:
    """Raise for anything but a torch module of which this process has all weights, or their rows by FSDP2.

    Returns whether it has rows alone; then no module keeps gathered weights.
    """
    check_model(model)
    reshard(model)
    sharded = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    for name, p in sharded.items():
        if not (or_rows and hasattr(p, "placements")):
            raise ValueError(
                f"parameter {name!r} is a shard of one (FSDP, DTensor or ZeRO-3), but whole weights are needed here; "
                "do this before fully_shard, after which pairs that were found still hold, or on the whole checkpoint "
                "(evaluate and gradient_norm measure what FSDP2's fully_shard sharded)"
            )
    return bool(sharded)


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return what strips the prefixes of ``torch.compile``, and of wrappers such as DDP, from a model's names."""
    prefix, names = "", [name.replace("_orig_mod.", "") for name, _ in model.named_parameters()]
    while names and all(name.startswith(f"{prefix}module.") for name in names):  # else a layer has this name
        prefix += "module."
    return lambda name: f"{name}.".replace("_orig_mod.", "").removeprefix(prefix).rstrip(".")


def unwrapped(names: Iterable[str], known: Set[str]) -> list[str]:
    """Strip the prefixes of ``torch.compile`` and of wrappers such as DDP from names, until some are known."""
    plain = [name.replace("_orig_mod.", "") for name in names]
    while plain and known.isdisjoint(plain) and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by their plain names; one of several names is the first."""
    check_model(model)
    plain = plain_names(model)
    return {plain(name): p for name, p in model.named_parameters()}


def trained(weights: Mapping[str, T]) -> dict[str, T]:
    """Return those of some named weights that are not frozen."""
    return {name: p for name, p in weights.items() if differentiated(p)}


def first_names(model: nn.Module) -> dict[str, str]:
    """Return for every further name of tied weights the first one, under which :func:`weights_of` has them."""
    plain, first = plain_names(model), dict[Tensor, str]()
    # By one walk, for peft's multi-head attention makes its weights anew in each.
    every = [(plain(name), p) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: one for name, p in every if name != (one := first.setdefault(p, name))}


def places_of(model: nn.Module) -> Counter[str]:
    """Count the modules, and names in them, that hold each weight of :func:`weights_of`; tied weights have several."""
    names = {p: name for name, p in weights_of(model).items()}
    held = (p for m in model.modules() for _, p in m.named_parameters(recurse=False, remove_duplicate=False))
    return Counter(names[p] for p in held if p in names)  # peft's multi-head attention makes some anew in each walk


def naming(model: nn.Module) -> Callable[[str, str], str]:
    """Return what gives a weight of the module at a path its name in the model, of a tied one the first.

    The name "" gives that of the module.
    """
    plain, first = plain_names(model), first_names(model)

    def name_of(path: str, own: str) -> str:
        whole = plain(f"{path}.{own}".removeprefix("."))
        return first.get(whole, whole)

    return name_of


def plain_class(module: nn.Module) -> type:
    """Return a module's class, as it was before FSDP2 or a parametrisation replaced it by a subclass."""
    cls = type(module)
    sharded = 2 if cls.__mro__[1].__name__ == "FSDPModule" else 0  # torch 2.7 does not say
    return cls.__mro__[1 if parametrize.is_parametrized(module) else getattr(cls, "_orig_cls_mro_index", sharded)]


class ByClass(dict[str, F]):
    """Functions for modules of exactly some classes, by their qualified names."""

    def register(self, *classes: type | str) -> Callable[[F], F]:
        """Return a decorator that registers a function for the classes."""

        def decorate(function: F) -> F:
            for c in classes:
                self[c if isinstance(c, str) else f"{c.__module__}.{c.__qualname__}"] = function
            return function

        return decorate

    def of(self, module: nn.Module) -> F | None:
        """Look up the function for the exact class of a module."""
        cls = plain_class(module)
        return self.get(f"{cls.__module__}.{cls.__qualname__}")


def _leave_shortcuts(undo: list[Callable[[], object]]) -> None:
    """Let every pass read the weights as they are, with autograd: encoder layers and parametrisations may not."""
    undo.append(partial(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()))
    torch.backends.mha.set_fastpath_enabled(False)
    if parametrize._cache_enabled:
        undo.append(partial(setattr, parametrize, "_cache_enabled", parametrize._cache_enabled))
        parametrize._cache_enabled = 0


_shortcuts = Shared(_leave_shortcuts)
#: The threads that move weights, by the weights' ids.
_movers: dict[int, int] = {}


def _claim(weights: Iterable[Tensor], claimed: list[int]) -> None:
    """Keep other threads from moving weights, and list those that this one had not claimed; raise if one moves them."""
    me = threading.get_ident()
    for key in map(id, weights):
        if _movers.get(key) != me:
            if _movers.setdefault(key, me) != me:
                raise RuntimeError(
                    "another thread measures or moves weights of this model; use a model in one thread at a time, or "
                    "give each thread a copy (copy.deepcopy) that was made before"
                )
            claimed.append(key)


def _release(claimed: list[int]) -> None:
    """Let other threads move weights; a second call, when they may do so already, is harmless."""
    while claimed:
        _movers.pop(claimed[-1], None)
        claimed.pop()


@dataclass(eq=False, repr=False)
class preserve_model_state:
    """Put a model in evaluation mode; afterwards everything in it and in torch that passes may change is as before.

    That is weights and gradients (by their memory, not their values), modes, buffers, the random state and global
    settings. Torch's fast path of encoder layers is off meanwhile, because it bypasses the modules inside, and no other
    thread may move the weights. ``with state, state:`` restores everything even if an interrupt comes during the
    clean-up, which is then repeated.
    """

    model: nn.Module
    claimed: list[int] = field(default_factory=list, init=False)
    saved: bool = field(default=False, init=False)

    def save(self) -> None:
        """Note everything as it is."""
        model, modules = self.model, list(self.model.modules())
        self.attributes: list[tuple[Any, str, Any]] = [
            (m, name, getattr(m, name))
            for name, classes in _SWITCHES.items()
            for m in modules
            if isinstance(m, classes) and hasattr(m, name)
        ]
        self.data = [(p, p.data, p.grad) for p in model.parameters()]
        self.buffers = [(m, dict(m._buffers)) for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self.contents = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
        devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
        get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state
        self.settings: list[tuple[Callable[..., Any], Any]] = [  # of this thread
            (torch.set_grad_enabled, torch.is_grad_enabled()),
            (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        ]
        # Of all threads: what was not drawn from stays as it is.
        self.random: list[tuple[Callable[[], Tensor], Callable[[Tensor], Any], Tensor]] = [
            (torch.get_rng_state, torch.set_rng_state, torch.get_rng_state()),
            *((partial(get, device=i), partial(put, device=i), get(i)) for i in devices),
        ]
        self.caching = caching(model)
        self.hooks: list[RemovableHandle] = []
        self.saved = True

    def __enter__(self) -> None:
        try:
            _claim(self.model.parameters(), self.claimed)
            if not self.saved:
                self.save()
            _shortcuts.use(id(self), on=True)
            torch.set_autocast_cache_enabled(False)  # it would cache casts of the weights while they move
            for module, name, _ in self.attributes:
                setattr(module, name, False)
            if not self.hooks:
                self.hooks += [m.register_forward_pre_hook(drop_caches) for m in self.caching]
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """Restore everything; a second call is harmless."""
        try:
            if not self.saved:
                return
            for hook in self.hooks:
                hook.remove()
            for module in self.caching:
                drop_caches(module)
            for p, data, grad in self.data:
                p.data, p.grad = data, grad
            for module, name, value in self.attributes:
                setattr(module, name, value)
            for module, found in self.buffers:
                for name in set(module._buffers) - set(found):
                    del module._buffers[name]
                module._buffers.update(found)  # buffers that a pass filled or replaced
            for buffer, value in self.contents:
                if not torch.equal(buffer, value):
                    buffer.detach().copy_(value)  # not under no_grad(), which an interrupt might leave switched on
            for setter, before in self.settings:
                setter(before)
            for get, put, state in self.random:
                if not torch.equal(get(), state):
                    put(state)
            self.saved = False  # a second call leaves what another thread may move by then
        finally:
            _shortcuts.use(id(self), on=False)
            _release(self.claimed)


def caching(model: nn.Module) -> list[nn.Module]:
    """List the modules that do something when ``train()`` is called, and hold no others that do."""
    return [m for m in model.modules() if [c for c in m.modules() if type(c).train is not nn.Module.train] == [m]]


def drop_caches(module: nn.Module, *_: Any) -> None:
    """Tell a module that keeps tensors besides parameters and buffers to drop what it made in evaluation mode.

    timm's LeViT and others gather biases once in evaluation mode, and would not see weights that move.
    """
    own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
    if not module.training and next(tensors(own), None) is not None:
        modes = [(m, m.training) for m in module.modules()]
        module.train()
        module.train(False)
        for m, training in modes:
            m.training = training


@contextmanager
def pointing_to(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let parameters point to other values, by name; their own storage is untouched, and restored even after an error.

    Where a value is wider than its parameter, all half-precision parameters and buffers of the model are float32
    meanwhile: next to w, bfloat16 has no numbers closer than w (1 ± 2⁻⁸), so that nearly all of a small ξ would be
    rounded away, in the weights and again by autocast, which casts them before every product. A frozen base in half
    precision below float32 adapters stays as it is.
    """
    weights = weights_of(model)
    data: dict[Tensor, Tensor] = {weights[name]: value for name, value in values.items()}
    if any(p.dtype != value.dtype for p, value in data.items()):
        others = (t for t in (*model.parameters(), *model.buffers()) if t not in data and is_narrow(t))
        data |= {t: t.data.to(at_least_float32(t.dtype)) for t in others}
    original, cached, hooks, claimed = dict[Tensor, Tensor](), caching(model), list[RemovableHandle](), list[int]()

    def put_back() -> None:
        for t, before in original.items():
            t.data = before
        for m in cached:
            drop_caches(m)
        for hook in hooks:
            hook.remove()
        original.clear()  # a second call leaves what another thread may move by then
        cached.clear()
        _release(claimed)

    try:
        try:
            _claim(data, claimed)
            original.update((t, t.data) for t in data)
            for t, replacement in data.items():
                t.data = replacement
            hooks += [m.register_forward_pre_hook(drop_caches) for m in cached]  # in each pass, for the weights move on
            yield
        finally:  # repeat what an interrupt has cut short
            put_back()
    finally:
        put_back()


def is_narrow(t: Tensor) -> bool:
    """Return whether a tensor is in half precision."""
    return t.is_floating_point() and t.dtype != at_least_float32(t.dtype)


def copied(model: Any) -> Any:
    """Copy a model, without the graphs of tensors that it has kept from a pass (pruning, weight norm, caches)."""
    kept = (t for m in model.modules() for t in tensors(vars(m)) if not t.is_leaf)
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in kept})


@contextmanager
def running_copy(
    model: nn.Module, batch: Any, forward: Forward, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[nn.Module, Run]]:
    """Yield a copy of a model, in evaluation mode and another dtype, and what returns its outputs.

    All passes draw the same random numbers. What changes their batch may be given to them.
    """
    claimed: list[int] = []
    try:
        _claim(model.parameters(), claimed)  # else those of another thread's measurement may be copied
        twin = copied(model)
    finally:
        _release(claimed)
    if dtype == torch.float64 and not all(has_double(p.device.type) for p in model.parameters()):
        twin, batch = twin.cpu(), to_device(batch, torch.device("cpu"))
    if dtype == torch.float64:
        _dequantize_4bit_(twin)
    twin = twin.double() if dtype == torch.float64 else twin.float()
    for p in twin.parameters():
        if p.is_complex():  # points, which no such method of a module reaches
            p.data = p.data.to(dtype.to_complex())
    batch = widened(batch, dtype)
    devices = sorted({p.device.index or 0 for p in twin.parameters() if p.is_cuda})

    def run(change: Callable[[Any], Any] | None = None) -> list[Tensor]:
        inputs = batch if change is None else change(batch)
        with drawing_again(devices), Wide() if dtype == torch.float64 else nullcontext():
            return [t.to(dtype) for t in floats(forward(twin, inputs))]

    with preserve_model_state(twin):
        yield twin, run


@torch.no_grad()
def _dequantize_4bit_(model: nn.Module) -> None:
    """Let 4-bit layers of bitsandbytes compute in float64, for which they return unwritten memory on a CPU."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "compute_type_is_set")]
    for layer in layers:
        units = torch.eye(layer.in_features, device=layer.weight.device)
        weight = (layer(units) - layer(0 * units)).mT.double()
        layer.forward = MethodType(lambda own, x, weight=weight: nn.functional.linear(x, weight, own.bias), layer)
