"""Torch models and their batches: names, classes and copies, and passes without side effects."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .._geoopt import ManifoldParameter
from ..linalg import at_least_float32, has_double

#: Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: What passes a batch through a model, and what passes its own batch, perhaps changed, and returns the outputs.
Forward = Callable[[nn.Module, Any], Any]
Run = Callable[..., list[Tensor]]
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
_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


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


def check_whole(model: nn.Module, *, or_rows: bool = False) -> None:
    """Raise for anything but a torch module of which this process has all weights, or their rows by FSDP2."""
    check_model(model)
    reshard(model)
    for name, p in model.named_parameters():
        if is_sharded(p) and not (or_rows and hasattr(p, "placements")):
            raise ValueError(
                f"parameter {name!r} is a shard of one (FSDP, DTensor or ZeRO-3), but whole weights are needed here; "
                "do this before fully_shard, after which pairs that were found still hold, or on the whole checkpoint "
                "(evaluate and gradient_norm measure what FSDP2's fully_shard sharded)"
            )


def is_point(p: Tensor) -> TypeGuard[Any]:
    """Return whether a parameter states the manifold on which it lies."""
    return isinstance(p, ManifoldParameter)


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return what strips the prefixes of ``torch.compile``, and of wrappers such as DDP, from a model's names."""
    names = [name.replace("_orig_mod.", "") for name, _ in model.named_parameters()]
    prefix = ""
    while names and all(name.startswith(f"{prefix}module.") for name in names):  # else a layer has this name
        prefix += "module."
    return lambda name: name.replace("_orig_mod.", "").removesuffix("_orig_mod").removeprefix(prefix)


def plain_class(module: nn.Module) -> type:
    """Return a module's class, as it was before FSDP2 or a parametrisation replaced it by a subclass."""
    cls = type(module)
    sharded = 2 if cls.__mro__[1].__name__ == "FSDPModule" else 0  # torch 2.7 does not say
    return cls.__mro__[1 if parametrize.is_parametrized(module) else getattr(cls, "_orig_cls_mro_index", sharded)]


class Shared:
    """What is set for all threads at once: the first user switches it, and the last one puts it back.

    ``switch(undo)`` appends what undoes a change, any number of times, to a list before it makes the change.
    """

    def __init__(self, switch: Callable[[list[Callable[[], object]]], object]) -> None:
        self._lock, self._users, self._switch = threading.RLock(), set[int](), switch
        self._undo: list[Callable[[], object]] = []

    def use(self, user: int, *, on: bool) -> None:
        """Switch it, or put it back when the last user has finished; a second call is harmless."""
        try:
            self._lock.acquire()
            if on:
                first = not self._users
                self._users.add(user)
                if first:
                    self._switch(self._undo)
            else:
                if self._users == {user}:
                    for undo in self._undo:
                        undo()
                    self._undo.clear()
                self._users.discard(user)
        finally:
            with suppress(RuntimeError):  # of a lock that is free
                while True:  # as often as calls took it that an interrupt ended: other threads would wait for ever
                    self._lock.release()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Switch it for the time of a ``with``."""
        user = object()
        try:
            self.use(id(user), on=True)
            yield
        finally:
            self.use(id(user), on=False)


def _leave_shortcuts(undo: list[Callable[[], object]]) -> None:
    """Let every pass read the weights as they are, with autograd: encoder layers and parametrisations may not."""
    undo.append(partial(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()))
    torch.backends.mha.set_fastpath_enabled(False)
    if parametrize._cache_enabled:
        undo.append(partial(setattr, parametrize, "_cache_enabled", parametrize._cache_enabled))
        parametrize._cache_enabled = 0


def _run_eagerly(undo: list[Callable[[], object]]) -> None:
    stance = torch.compiler.set_stance("force_eager")
    undo.append(partial(stance.__exit__, None, None, None))


_shortcuts = Shared(_leave_shortcuts)
#: Compiled code runs neither hooks nor modes.
eager = Shared(_run_eagerly)
#: Held while a thread draws what it will draw again, for torch's generators are those of all threads.
_drawing = threading.RLock()


@contextmanager
def drawing_again(devices: list[int]) -> Iterator[None]:
    """Draw from torch's generators, one thread at a time, and put them back."""
    with _drawing, torch.random.fork_rng(devices):
        yield


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


class preserve_model_state:
    """Put a model in evaluation mode; afterwards everything in it and in torch that passes may change is as before.

    That is weights and gradients (by their memory, not their values), modes, buffers, the random state and global
    settings. Torch's fast path of encoder layers is off meanwhile, because it bypasses the modules inside, and no other
    thread may move the weights. ``with state, state:`` restores everything even if an interrupt comes during the
    clean-up, which is then repeated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.claimed, self.saved = model, list[int](), False

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
            self.restore()
            raise

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
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
def pointing_to(model: nn.Module, copies: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let parameters point to copies; their own storage is untouched and is restored even after an error.

    Where a copy is wider than its parameter, all half-precision parameters and buffers of the model are float32
    meanwhile: next to w, bfloat16 has no numbers closer than w (1 ± 2⁻⁸), so that nearly all of a small ξ would be
    rounded away, in the weights and again by autocast, which casts them before every product. A frozen base in half
    precision below float32 adapters stays as it is.
    """
    data = dict(copies)
    if any(p.dtype != copy.dtype for p, copy in copies.items()):
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


def record(run: Callable[[], Any], wanted: Mapping[str, nn.Module]) -> dict[str, Call]:
    """Run a model and keep the inputs of the first call of each module, without caches of earlier tokens."""
    calls: dict[str, Call] = {}

    def plain(value: Any) -> Any:
        return None if type(value).__name__.endswith("Cache") else value

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, (tuple(map(plain, args)), {k: plain(v) for k, v in kwargs.items()}))

    with ExitStack() as hooks, torch.no_grad(), eager():
        for name, module in wanted.items():
            hooks.callback(module.register_forward_pre_hook(partial(keep, name), with_kwargs=True).remove)
        run()
    return calls


def widened(batch: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Copy a batch, with floating-point tensors in another dtype; autograd may keep copies of inference tensors."""
    return tree_map(lambda t: t.detach().to(dtype if t.is_floating_point() else t.dtype, copy=True), batch)


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


#: What makes tensors of numbers that are given.
_NUMBERS = {torch.full, torch.tensor, torch.scalar_tensor, torch.arange, torch.linspace}


class Wide(TorchFunctionMode):
    """Turn every cast to a narrower floating-point type into one to float64: ``with Wide(): model(batch)``.

    So is the default dtype of what is made, which torch keeps for all threads and which is left alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        given = kwargs or {}
        if func in _NUMBERS and not given.get("dtype") and float in map(type, (*args, *given.values())):
            kwargs = {**given, "dtype": torch.float64}  # single precision may not hold them
        if len(args) > 1 or kwargs:  # attributes of tensors, which are read all the time, have one argument
            args, kwargs = tuple(_wide(a) for a in args), {k: _wide(a) for k, a in (kwargs or {}).items()}
        result = func(*args, **(kwargs or {}))
        made = isinstance(result, Tensor) and result.dtype in _NARROW and not floats([args, kwargs or {}])
        return result.double() if made else result


def _wide(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in _NARROW else argument


def tensors(batch: Any) -> Iterator[Tensor]:
    """Walk through the tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(item)


def floats(batch: Any) -> list[Tensor]:
    """List the floating-point tensors of a batch, or of what a model returns."""
    return [t for t in tensors(batch) if t.is_floating_point()]


def tree_map(change: Callable[[Tensor], Any], batch: Any) -> Any:
    """Apply a function to every tensor of a batch.

    Mappings become dicts; objects that are not containers are returned unchanged.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries.modules import tree_map
    >>> tree_map(lambda t: t + 1, {"x": torch.zeros(2), "name": "first"})
    {'x': tensor([1., 1.]), 'name': 'first'}
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {k: tree_map(change, v) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(tree_map(change, v) for v in batch))
    if isinstance(batch, (list, tuple)):
        parts = [tree_map(change, v) for v in batch]
        return parts if isinstance(batch, list) else tuple(parts)
    return batch


def default_forward(model: nn.Module, batch: Any) -> Any:
    """Call a model: ``model(**batch)`` for a mapping, ``model(x)`` for a pair (x, y), else ``model(batch)``.

    Parameters
    ----------
    model : nn.Module
    batch : mapping, sequence or Tensor

    Returns
    -------
    object
        What the model returns.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import default_forward
    >>> inputs, labels = torch.ones(8, 5), torch.zeros(8)
    >>> default_forward(torch.nn.Linear(5, 2), (inputs, labels)).shape
    torch.Size([8, 2])
    """
    if isinstance(batch, (Mapping, list, tuple)) and next(tensors(batch), None) is None:
        raise ValueError(f"the batch, of type {type(batch).__name__}, holds no tensor; give a mapping or a pair (x, y)")
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (list, tuple)):
        return model(batch[0])
    return model(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device; a batch that is already there is returned unchanged.

    Tensors made under ``torch.inference_mode``, which autograd cannot keep, are copied.
    """
    stays = all(t.device == device and not t.is_inference() for t in tensors(batch))
    return batch if stays else tree_map(lambda t: t.to(device, copy=t.is_inference()), batch)
