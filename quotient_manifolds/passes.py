"""Batches and passes of torch models: walking through tensors, watching, and computing in double precision."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]
#: What passes a batch through a model, and what passes its own batch, perhaps changed, and returns the outputs.
Forward = Callable[[nn.Module, Any], Any]
Run = Callable[..., list[Tensor]]
_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


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


def _run_eagerly(undo: list[Callable[[], object]]) -> None:
    stance = torch.compiler.set_stance("force_eager")
    undo.append(partial(stance.__exit__, None, None, None))


#: Compiled code runs neither hooks nor modes.
eager = Shared(_run_eagerly)
#: Held while a thread draws what it will draw again, for torch's generators are those of all threads.
_drawing = threading.RLock()


@contextmanager
def drawing_again(devices: list[int]) -> Iterator[None]:
    """Draw from torch's generators, one thread at a time, and put them back."""
    with _drawing, torch.random.fork_rng(devices):
        yield


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
    >>> from quotient_manifolds.passes import tree_map
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


def operations(loss: Tensor) -> set[str]:
    """Return the names of the operations in the graph behind a loss."""
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {None, *nodes}
    for node in nodes:
        behind = {n for n, _ in node.next_functions} - seen
        seen |= behind
        nodes.extend(behind)
    return {node.name() for node in nodes}
