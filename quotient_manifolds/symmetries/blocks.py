"""A block: some rows of a stack, as a strided view of a parameter; and many blocks read and written at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Block", "BlockStack", "ByClass", "block", "check_model", "is_sharded", "plain_class", "plain_names"]

F = TypeVar("F", bound=Callable[..., Any])


def check_model(model: object) -> None:
    """Raise for anything that is not a torch module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor is a shard of FSDP (a DTensor or a flat parameter) or of DeepSpeed's ZeRO-3."""
    return type(tensor).__name__ == "DTensor" or any(hasattr(tensor, mark) for mark in ("_is_flat_param", "ds_id"))


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return what strips the prefixes of ``torch.compile``, and of wrappers such as DDP, from a model's names."""
    names = [name.replace("_orig_mod.", "") for name, _ in model.named_parameters()]
    prefix = ""
    while names and all(name.startswith(f"{prefix}module.") for name in names):  # else a layer has this name
        prefix += "module."
    return lambda name: name.replace("_orig_mod.", "").removesuffix("_orig_mod").removeprefix(prefix)


def plain_class(module: nn.Module) -> type:
    """Return a module's class, as it was before FSDP2 replaced it by a subclass."""
    cls = type(module)
    index = getattr(cls, "_orig_cls_mro_index", None)
    return cls if index is None else cls.__mro__[index]


class ByClass(dict[str, F]):
    """Functions for modules of exactly some classes, by their qualified names."""

    def register(self, *classes: type | str) -> Callable[[F], F]:
        """Return a decorator that registers a function for the classes."""

        def decorate(function: F) -> F:
            self.update((c if isinstance(c, str) else _qualified(c), function) for c in classes)
            return function

        return decorate

    def of(self, module: nn.Module) -> F | None:
        """Look up the function for the exact class of a module."""
        return self.get(_qualified(plain_class(module)))


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True)
class Block:
    """A strided view of a parameter, as some rows of a stack with h columns; :func:`block` makes one.

    The parameter is looked up at every use, so the block follows when it is replaced (``load_state_dict(assign=True)``,
    wrappers). The view is given in elements of the contiguous parameter of that shape; ``size`` is (rows, h), or (rows,
    h, 2) for complex columns.
    """

    module: nn.Module = field(repr=False)
    attribute: str
    shape: tuple[int, ...]
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        """The whole parameter."""
        found: Tensor = getattr(self.module, self.attribute)
        if tuple(found.shape) != self.shape:
            raise ValueError(
                f"{self.place} had shape {self.shape} when its symmetries were found and has {tuple(found.shape)} now; "
                "call find_symmetric_pairs(model) again"
            )
        return found

    @property
    def place(self) -> str:
        """Description for messages, such as ``"weight of Linear"``."""
        return f"{self.attribute} of {type(self.module).__name__}"

    @property
    def key(self) -> tuple[Any, int, tuple[int, ...], tuple[int, ...]]:
        """Key that is equal for two blocks of the same numbers."""
        # A parametrised weight is computed anew each time, as a tensor whose id may have been another's.
        stays = (tensor := self.tensor) is self.tensor
        where = id(tensor) if stays else (id(self.module), self.attribute)
        return (where, self.offset, self.size, self.stride)

    @property
    def rows(self) -> int:
        """Number of rows that the block contributes to its stack."""
        return self.size[0]

    def of(self, whole: Tensor) -> Tensor:
        """View the block in a contiguous tensor of the parameter's shape."""
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


def block(
    module: nn.Module,
    attribute: str,
    rows: slice = slice(None),
    columns: slice = slice(None),
    *,
    transpose: bool = False,
    rotary: str | None = None,
) -> Block:
    """Describe a slice of a parameter as rows of a stack, one column for each of the h dimensions of a head.

    Parameters
    ----------
    module, attribute
        Location of the parameter.
    rows, columns : slice
        The slice; ``columns`` only for matrices. A vector (a bias) is one row; of a tensor with more dimensions (a
        convolution) all but the first count as one.
    transpose : bool
        The head's dimensions are the rows of the parameter, like the output dimensions of ``nn.Linear``.
    rotary : {None, "half", "interleaved"}
        Read pairs of head dimensions as one complex column: (i, i + h/2), or (2i, 2i + 1).

    Returns
    -------
    Block
        Of size (rows, h), or (rows, h/2, 2) with ``rotary``. No copy: it follows the parameter.

    Raises
    ------
    ValueError
        The parameter is a single number, or ``rotary`` has another value.

    Examples
    --------
    The second head's rows of a key projection, and its bias, of 2 heads of size 4:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import block
    >>> keys = nn.Linear(6, 8)
    >>> block(keys, "weight", slice(4, 8), transpose=True).size, block(keys, "bias", slice(4, 8)).size
    ((6, 4), (1, 4))
    """
    check_model(module)
    if not isinstance(rows, slice) or not isinstance(columns, slice):
        raise TypeError(f"rows and columns must be slices, got {rows!r} and {columns!r}")
    shape = tuple(getattr(module, attribute).shape)
    whole = torch.empty(shape, device="meta")
    if whole.dim() > 2:  # convolutions, and torch's bias_k of shape (1, 1, width)
        whole = whole.flatten(1)
    if whole.dim() == 1:
        view = whole[rows].unsqueeze(0)
    elif whole.dim() == 2:
        view = whole[rows, columns]
        view = view.T if transpose else view
    else:
        raise ValueError(f"{attribute} of {type(module).__name__} is a single number; a block needs a matrix or vector")
    if rotary == "half":
        view = view.unflatten(1, (2, -1)).transpose(1, 2)
    elif rotary == "interleaved":
        view = view.unflatten(1, (-1, 2))
    elif rotary is not None:
        raise ValueError(f'rotary pairing must be "half" or "interleaved", got {rotary!r}')
    return Block(module, attribute, shape, int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


@dataclass(frozen=True)
class _Run:
    """Blocks of consecutive points at equal distances in one parameter: one view with a batch dimension."""

    first: Block
    start: int
    count: int
    step: int
    row: int

    def view(self, tensor: Tensor) -> Tensor:
        """View the blocks in a contiguous tensor of the parameter's shape: (count, rows, h) or (count, rows, h, 2)."""
        b = self.first
        return tensor.as_strided((self.count, *b.size), (self.step, *b.stride), tensor.storage_offset() + b.offset)

    def part(self, x: Tensor) -> Tensor:
        """View the blocks in the rows of all points."""
        return x[self.start : self.start + self.count, self.row : self.row + self.first.rows]


def _runs_of(column: Sequence[Block], row: int) -> Iterator[_Run]:
    """Join the blocks that lie in the same rows of consecutive points."""
    ids = [id(b.tensor) for b in column]
    start = 0
    while start < len(column):
        b = column[start]
        stop, step = start + 1, 0
        while stop < len(column):
            c = column[stop]
            gap = c.offset - column[stop - 1].offset
            same = ids[stop] == ids[start] and c.size == b.size and c.stride == b.stride
            if not same or gap <= 0 or (step and gap != step):
                break
            step, stop = gap, stop + 1
        yield _Run(b, start, stop - start, step, row)
        start = stop


class BlockStack:
    """The rows of several points, each a list of blocks of the same sizes: read and written as few strided views."""

    def __init__(self, points: Sequence[Sequence[Block]]) -> None:
        self.runs: list[_Run] = []
        row = 0
        for column in zip(*points, strict=True):
            self.runs.extend(_runs_of(column, row))
            row += column[0].rows
        self.shape = (len(points), row, *self.runs[0].first.size[1:]) if self.runs else (len(points), 0)

    def gather(self, tensors: Mapping[Tensor, Tensor] | None = None, out: Tensor | None = None) -> Tensor:
        """Copy the rows, (points, rows, h[, 2]), differentiably unless into ``out``; absent ``tensors`` are zero."""
        parts: list[tuple[int, Tensor]] = []
        for run in self.runs:
            source = run.first.tensor if tensors is None else tensors.get(run.first.tensor)
            if out is None:
                like = run.first.tensor
                found = like.new_zeros(run.count, *run.first.size) if source is None else run.view(source.contiguous())
                parts.append((run.row, found))
            elif source is None:
                run.part(out).zero_()
            else:
                run.part(out).copy_(run.view(source.contiguous()))
        if out is not None:
            return out
        columns = [torch.cat([part for _, part in same]) for _, same in groupby(parts, lambda part: part[0])]
        return torch.cat(columns, dim=1)

    @torch.no_grad()
    def scatter_(self, rows: Tensor, tensors: Mapping[Tensor, Tensor] | None = None) -> None:
        """Write rows into the parameters, or into their replacements in ``tensors``."""
        if tuple(rows.shape) != self.shape:
            raise ValueError(f"a stack of {self.shape[0]} pairs needs {self.shape} numbers, got {tuple(rows.shape)}")
        for run in self.runs:
            target = run.first.tensor if tensors is None else tensors[run.first.tensor]
            whole = target.contiguous()
            run.view(whole).copy_(run.part(rows))
            if whole is not target:
                target.copy_(whole)

    @torch.no_grad()
    def mark_(self, tensors: Mapping[Tensor, Tensor]) -> None:
        """Set the entry of ``tensors`` for each parameter to True wherever a block lies."""
        for run in self.runs:
            run.view(tensors[run.first.tensor]).fill_(True)
