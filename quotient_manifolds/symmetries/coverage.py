"""Detection of attention in a forward pass that no handler covers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..batches import tensors
from .blocks import is_sharded, plain_names
from .discovery import UNREACHED, candidates, unexamined
from .pairs import SymmetricPair, check_pairs
from .registry import handler_of
from .roles import roles_of

__all__ = ["UnknownAttentionError", "check_coverage"]

#: Functions whose call makes a module an attention layer, if no handler covers it.
_ATTENTION_CALLS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "flex_attention",
    "softmax",
}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum"}
#: Marks of tensors other than plain activations: made from weights only, or from a product of two activations.
_WEIGHT, _SCORE = 1, 2


class UnknownAttentionError(ValueError):
    """A module computes attention, but no handler knows which symmetries its weights have.

    Attributes
    ----------
    path : str
        The module's name in the model.
    cls : type
        Its class.
    call : str
        What it calls.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import UnknownAttentionError, check_coverage
    >>> class SelfSimilarity(torch.nn.Module):
    ...     def forward(self, x):
    ...         return (x @ x.mT).softmax(-1) @ x
    >>> model = torch.nn.Sequential(SelfSimilarity())
    >>> try:
    ...     check_coverage(model, lambda: model(torch.ones(1, 3, 4)))
    ... except UnknownAttentionError as error:
    ...     print(error.path, error.cls.__name__)
    0 SelfSimilarity
    """

    def __init__(self, path: str, cls: type, call: str) -> None:
        super().__init__(path, cls, call)  # all of them, so that pickle can make it anew
        self.path, self.cls, self.call = path, cls, call

    def __str__(self) -> str:
        name = f"{self.cls.__module__}.{self.cls.__qualname__}"
        return (
            f"module {self.path!r} of class {name} computes attention (it calls {self.call}), but no handler knows the "
            "symmetries of this class; write a handler with quotient_manifolds.symmetries.register_attention, treat "
            f"its weights as having no symmetry with quotient_manifolds.symmetries.skip({name!r}), or use "
            'measure="adaptive", which needs none'
        )


class _Watch(TorchFunctionMode):
    """Record which module was running when attention was computed.

    Attention is a call of a function known to compute it, or a product of activations with the result of another
    product of activations, whatever happened in between (sigmoid, exponentials and their sum, nothing at all).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[tuple[nn.Module, str]] = []
        self._running: list[nn.Module] = []
        self._kinds: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._weights = {self._place(t) for t in [*model.parameters(), *model.buffers()]} - {0}

    def __enter__(self) -> _Watch:
        enter = register_module_forward_pre_hook(lambda module, _: self._running.append(module))
        self._hooks = [enter, register_module_forward_hook(self._leave, always_call=True)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass

    @staticmethod
    def _place(t: Tensor) -> int:
        plain = t.layout == torch.strided and t.device.type != "meta" and not is_sharded(t)
        return t.untyped_storage().data_ptr() if plain else 0

    def _kind(self, t: Tensor) -> int:
        own = (
            isinstance(t, nn.Parameter) or self._place(t) in self._weights
        )  # a tensor that FSDP gathers is a parameter too
        return _WEIGHT if own else self._kinds.get(t, 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        if not self._running:
            return result
        operands = [*tensors(args), *tensors(kwargs or {})]
        kinds = [self._kind(t) for t in operands if t.is_floating_point()]
        if name in _ATTENTION_CALLS and (name != "softmax" or operands[0].dim() >= 3):
            # A softmax over class scores has two dimensions; attention weights have heads or batches besides.
            self.calls.append((self._running[-1], name))
        made = _SCORE if _SCORE in kinds else 0
        if kinds and set(kinds) == {_WEIGHT}:
            made = _WEIGHT
        elif name in _PRODUCTS and len(kinds) > 1 and _WEIGHT not in kinds:
            if made:
                self.calls.append((self._running[-1], f"{name} on the result of a product"))
            made = 0 if made else _SCORE
        elif name == "linear":
            made = 0
        if made:
            for t in tensors(result):
                self._kinds[t] = made
        return result


def check_coverage(model: nn.Module, run: Callable[[], Any], pairs: Iterable[SymmetricPair] = ()) -> Any:
    """Run a forward pass and refuse attention that no handler covers.

    Parameters
    ----------
    model : nn.Module
        A compiled model is watched as the eager model that it was compiled from.
    run : callable
        Performs one forward pass of the model.
    pairs : iterable of SymmetricPair
        As :func:`find_symmetric_pairs` finds them with a batch, for example. Modules that they name, or whose
        projections they contain, count as examined, except those with a pair that says that the batch did not reach it
        (which are refused only if they are seen to compute attention here), that its gradient was zero, or that it
        could not be examined.

    Returns
    -------
    object
        What ``run`` returns.

    Raises
    ------
    UnknownAttentionError
        A module that is neither registered nor examined, and not inside such a module, calls softmax (on three or more
        dimensions), scaled-dot-product attention, flex_attention or torch's own multi-head attention; or multiplies
        activations with the result of a product of activations; or holds weights named like queries, keys, values and
        outputs (which may be used in code that cannot be watched); or is TorchScript.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import check_coverage
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> check_coverage(layer, lambda: layer(torch.ones(1, 3, 8))).shape
    torch.Size([1, 3, 8])
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnknownAttentionError(name, type(module), "TorchScript code, which cannot be watched")
    with torch.compiler.set_stance("force_eager"), _Watch(model) as watch:
        result = run()
    names = {module: name for name, module in model.named_modules()}
    pairs, plain = check_pairs(pairs), plain_names(model)
    missed = {p.module: p.reason for p in pairs if unexamined(p)}
    examined = {p.module for p in pairs if p.kind != "lora"} - set(missed)
    known = [m for m, n in names.items() if handler_of(m) is not None or plain(n) in examined]
    covered = {inner for module in known for inner in module.modules()}
    owners = {b.module for p in pairs if p.kind != "lora" and p.module not in missed for b in p.G + p.H}
    # Around a registered layer with weights of its own, as torch's MultiheadAttention, there may be other attention.
    owners = {m for m in owners if handler_of(m) is None}
    covered |= {m for m in names if not owners.isdisjoint([m, *m.children()])}
    unseen = [
        m for name, m in candidates(model, lambda m: m in covered).items()
        if roles_of(m) is not None and missed.get(plain(name)) != UNREACHED
    ]  # fmt: skip
    for module, call in [
        *watch.calls,
        *((m, "code that cannot be watched, by the names of its weights") for m in unseen),
    ]:
        if module not in covered:
            path = names.get(module, "(outside the model)")
            while path and module in names and next(module.parameters(), None) is None:  # such as a softmax
                path = path.rpartition(".")[0]
                module = model.get_submodule(path)
            reason = missed.get(plain(path))
            call = call if reason is None else f"{call}; of its examination: {reason}"
            raise UnknownAttentionError(path or "(the model itself)", type(module), call)
    return result
