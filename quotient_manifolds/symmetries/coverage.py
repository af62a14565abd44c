"""Detection of attention in a forward pass that no handler covers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .discovery import UNREACHED, candidates, unexamined
from .modules import Watch, plain_names
from .pairs import SymmetricPair, check_pairs
from .registry import handler_of
from .roles import roles_of

__all__ = ["UnknownAttentionError", "check_coverage"]


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
    with torch.compiler.set_stance("force_eager"), Watch(model) as watch:
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
            while path and isinstance(module, nn.Softmax):  # what holds it has a class of its own
                path = path.rpartition(".")[0]
                module = model.get_submodule(path)
            reason = missed.get(plain(path))
            call = call if reason is None else f"{call}; of its examination: {reason}"
            raise UnknownAttentionError(path or "(the model itself)", type(module), call)
    return result
