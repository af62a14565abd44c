"""A device that stands in for a GPU where there is none: it computes on the CPU, and refuses to mix with its tensors.

Within ``with second_device() as device:`` tensors can be made on the device and moved to it. As on a GPU, an operation
that is given tensors of both devices raises, but for numbers, copies and indices; results are those of the CPU to
rounding. ``Module.to`` replaces the parameters there, so that an optimiser made before sees none of them.
"""

import contextlib
import functools

import geoopt
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "cuda" if torch.cuda.is_available() else "second"
#: Operations that may read tensors of the CPU.
_CROSSING = {"_to_copy", "copy_", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_"}

#: Whether torch can have devices that are written in Python.
POSSIBLE = NAME == "cuda" or hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
_DOUBLE = True
#: Autocast changes nothing on the device.
_LIBRARY = torch.library.Library("_", "IMPL")


@functools.cache
def _register():
    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    _LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return torch.device(NAME, 0)


class Remote(torch.Tensor):
    """A tensor on the device; ``inner`` holds its numbers."""

    @staticmethod
    def __new__(cls, inner):
        if not _DOUBLE and inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"Cannot convert a tensor to {inner.dtype}, which the device {NAME!r} does not support")
        inner = inner.resolve_conj()  # which the wrapper would not know
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=_register(),
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        if not isinstance(value, Remote):
            raise RuntimeError("data of another device")
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def tolist(self):
        return self.cpu().tolist()

    def __deepcopy__(self, memo):
        copied = Remote(self.inner.clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __repr__(self, **options):
        return f"Remote({self.inner!r})"


class RemotePoint(Remote):
    """A ManifoldParameter on the device: geoopt can make none of such tensors."""

    __class__ = property(lambda self: geoopt.ManifoldParameter)
    _is_param = True


def _manifold_parameter(cls, data=None, manifold=None, requires_grad=True):
    if not isinstance(data, Remote):
        return _ON_CPU(cls, data, manifold, requires_grad)
    made = RemotePoint(data.inner)
    made.manifold = manifold
    return made.requires_grad_(requires_grad)


_ON_CPU = geoopt.ManifoldParameter.__new__


def _run(operation, args, kwargs):
    name, given = operation.overloadpacket.__name__, kwargs.get("device")
    goal = None if given is None else torch.device(given).type
    known, others = {}, []

    def inner(x):
        if isinstance(x, Remote):
            known[id(held := x.inner)] = x
            return held
        if isinstance(x, torch.Tensor) and x.dim():
            others.append(x)
        return x

    args, kwargs = _mapped(inner, args), {k: _mapped(inner, v) for k, v in kwargs.items() if k != "pin_memory"}
    if not known and goal != NAME:
        return operation(*args, **kwargs)
    if known and others and name not in _CROSSING:
        raise RuntimeError(f"expected all tensors to be on the same device, but {operation} has cpu and {NAME}")
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"expected a {NAME!r} device type for generator but found 'cpu'")
    if goal == NAME:
        kwargs["device"] = "cpu"
    found = operation(*args, **kwargs)
    if goal == "cpu" or name == "_local_scalar_dense" or (name == "copy_" and id(args[0]) not in known):
        return found
    return _mapped(lambda t: (known[id(t)] if id(t) in known else Remote(t)) if torch.is_tensor(t) else t, found)


def _mapped(function, x):
    return type(x)([_mapped(function, v) for v in x]) if type(x) in (tuple, list) else function(x)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        of_cpu = not types and kwargs.get("device") is None
        return operation(*args, **kwargs) if of_cpu else _run(operation, args, kwargs)


class _FromNumbers(TorchFunctionMode):
    """torch.tensor and torch.as_tensor, whose copy to the device is hidden from other modes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == NAME:
            return function(*args, **{**kwargs, "device": None}).to(kwargs["device"])
        return function(*args, **kwargs)


@contextlib.contextmanager
def second_device(double=True):
    """Yield the device, which may refuse double precision."""
    global _DOUBLE
    _DOUBLE = double
    if NAME == "cuda":
        yield torch.device(NAME, 0)
        return
    device = _register()
    geoopt.ManifoldParameter.__new__ = _manifold_parameter
    try:
        with _Operations(), _FromNumbers():
            yield device
    finally:
        geoopt.ManifoldParameter.__new__ = _ON_CPU
