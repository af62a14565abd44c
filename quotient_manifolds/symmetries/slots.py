"""Where numbers lie in named weights, as strided views, and the groups that act on their columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..weights import check_model

#: How RoPE pairs dimensions.
PLANES = ("half", "interleaved")


@dataclass(frozen=True)
class GL:
    """The group of invertible matrices, or of diagonal ones, that acts on the columns of a pair.

    Attributes
    ----------
    h : int
        Number of columns of G and H, over the field.
    diagonal : bool
        Every column is multiplied by its own non-zero number.
    positive : bool
        These numbers are positive, as is needed before a ReLU.
    field : {"real", "complex"}
        Over the complex numbers a column is a pair of real columns, such as a plane that RoPE rotates.
    columns : tuple of int
        Shape of one row of a block on which the group acts: (h,), or (h, 2) for complex columns.

    Raises
    ------
    ValueError
        There is no such group.

    Examples
    --------
    An attention head of size 64, and the same under RoPE:

    >>> from quotient_manifolds.symmetries import GL
    >>> for group in (GL(64), GL(32, diagonal=True, field="complex")):
    ...     print(group, group.dimension)
    GL(64) 4096
    (ℂ*)^32 64
    """

    h: int
    _: KW_ONLY
    diagonal: bool = False
    positive: bool = False
    field: str = "real"
    columns: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        whole = isinstance(self.h, int) and not isinstance(self.h, bool)
        known = all(isinstance(v, bool) for v in (self.diagonal, self.positive)) and self.field in ("real", "complex")
        if not known or not whole or self.h < 1 or (self.positive and not self.diagonal):
            raise ValueError(
                f"no such group: {self.h} columns, diagonal {self.diagonal!r}, positive {self.positive!r}, field "
                f"{self.field!r}; numbers of a diagonal group may be positive"
            )
        vars(self).update(columns=(self.h, 2) if self.field == "complex" else (self.h,))

    def __str__(self) -> str:
        if self.diagonal:
            return f"({'ℂ*' if self.field == 'complex' else 'ℝ+' if self.positive else 'ℝ*'})^{self.h}"
        return f"GL({self.h}, ℂ)" if self.field == "complex" else f"GL({self.h})"

    @property
    def dimension(self) -> int:
        """Number of real parameters of the group."""
        return (self.h if self.diagonal else self.h**2) * (2 if self.field == "complex" else 1)

    def to_point(self, rows: Tensor) -> Tensor:
        """Turn real rows (pairs, n + m, h[, 2]) into points: (pairs, n + m, h), or (pairs, h, n + m, 1) if diagonal."""
        if self.field == "complex":  # complex numbers in half precision are hardly supported
            rows = torch.view_as_complex(rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous())
        return rows.transpose(1, 2).unsqueeze(-1) if self.diagonal else rows

    def from_point(self, x: Tensor) -> Tensor:
        """Turn points back into real rows; those of a diagonal group may stand in one list, (pairs · h, n + m, 1)."""
        if self.diagonal:
            x = x.reshape(-1, self.h, x.shape[-2]).transpose(1, 2)
        return torch.view_as_real(x) if self.field == "complex" else x


def real_view(t: Tensor) -> Tensor:
    """View complex numbers as two real ones, (…, 2); return real tensors unchanged."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


@dataclass(frozen=True)
class Slot:
    """Where some rows of a stack with h columns lie: a strided view of a weight, by its name; :func:`slot` makes one.

    The view is given in real elements of a contiguous tensor of the weight's shape. Two slots of the same numbers are
    equal.

    Attributes
    ----------
    name : str
        The weight's name in the model, as in its state dict.
    shape : tuple of int
        Of the whole weight, (…, 2) if it is complex.
    offset, size, stride
        Of the view; the size is (rows, h), or (rows, h, 2) for complex columns. Outside pairs a row may have any shape.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import slot
    >>> keys = slot(torch.nn.Linear(2, 4), "weight", slice(2), transpose=True)
    >>> keys.size, keys.of(torch.arange(8.0).view(4, 2))
    ((2, 2), tensor([[0., 2.],
            [1., 3.]]))
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def from_view(cls, name: str, whole: Tensor, part: Tensor) -> Slot:
        """Describe a view, such as ``w[:2].T``, of a weight's :func:`outline` w."""
        return cls(
            name, tuple(real_view(whole).shape), int(part.storage_offset()), tuple(part.shape), tuple(part.stride())
        )

    def part(self, start: int, count: int, rotary: str | None = None) -> Slot:
        """View some of the columns, as they are or in the planes of two that RoPE rotates."""
        down, right = self.stride
        size = (count,) if rotary is None else (count // 2, 2)
        stride = {None: (right,), "half": (right, right * (count // 2)), "interleaved": (2 * right, right)}[rotary]
        return replace(self, offset=self.offset + start * right, size=(self.size[0], *size), stride=(down, *stride))

    def transposed(self) -> Slot:
        """View the same numbers, columns as rows."""
        return replace(self, size=self.size[::-1], stride=self.stride[::-1])

    def of(self, whole: Tensor) -> Tensor:
        """View the slot in a contiguous tensor of the weight's shape."""
        whole = real_view(whole)
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    def read(self, weights: Mapping[str, Tensor]) -> Tensor:
        """View the slot in the weight of its name."""
        return self.of(weight_of(self, weights).contiguous())


def weight_of(slot: Slot, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the weight in which a slot lies; raise if there is none of its name and shape."""
    try:
        whole = weights[slot.name]
    except KeyError:
        raise ValueError(f"there is no weight {slot.name!r}; were these symmetries found in another model?") from None
    shape = (*whole.shape, 2) if whole.is_complex() else tuple(whole.shape)
    if shape != slot.shape:
        raise ValueError(
            f"{slot.name!r} had shape {slot.shape} when its symmetries were found and has {shape} now; find them again"
        )
    return whole


def outline(module: nn.Module, name: str) -> Tensor:
    """Return a contiguous tensor of the shape that a weight of a module has, without memory."""
    whole = attrgetter(name)(module)
    if not isinstance(whole, Tensor):
        raise TypeError(f"{name!r} of {type(module).__name__} is no weight, but of type {type(whole).__name__}")
    return torch.empty(whole.shape, dtype=torch.complex64 if whole.is_complex() else None, device="meta")


def slot(
    module: nn.Module,
    name: str,
    rows: slice = slice(None),
    columns: slice = slice(None),
    *,
    transpose: bool = False,
) -> Slot:
    """Describe a slice of a weight as rows of a stack, one column for each of the h dimensions of a head.

    Parameters
    ----------
    module : nn.Module
        The model; for those who write a handler, the module that it is given.
    name : str
        The weight's name there, such as ``"self_attn.in_proj_weight"``.
    rows, columns : slice
        The slice; ``columns`` only for matrices. A vector (a bias) is one row; of a tensor with more dimensions (a
        convolution) all but the first count as one.
    transpose : bool
        The head's dimensions are the rows of the weight, like the output dimensions of ``nn.Linear``.

    Returns
    -------
    Slot
        Of size (rows, h). Of columns that RoPE turns in planes, ``.part(0, h, "half")`` or ``"interleaved"`` makes
        complex ones, of size (rows, h/2, 2).

    Raises
    ------
    ValueError
        The weight is a single number.

    Examples
    --------
    The second head's rows of a key projection, and its bias, of 2 heads of size 4:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import slot
    >>> keys = nn.Linear(6, 8)
    >>> slot(keys, "weight", slice(4, 8), transpose=True).size, slot(keys, "bias", slice(4, 8)).size
    ((6, 4), (1, 4))
    """
    check_model(module)
    if not isinstance(rows, slice) or not isinstance(columns, slice):
        raise TypeError(f"rows and columns of a slot must be slices, got {rows!r} and {columns!r}")
    if not isinstance(transpose, bool):
        raise TypeError(f"transpose of a slot must be True or False, got {transpose!r}")
    whole = outline(module, name)
    if whole.dim() == 0:
        raise ValueError(f"{name!r} of {type(module).__name__} is a single number; a slot needs a matrix or vector")
    flat = whole.flatten(1) if whole.dim() > 2 else whole  # convolutions, and torch's bias_k of shape (1, 1, width)
    part = flat[None, rows] if flat.dim() == 1 else flat[rows, columns]
    return Slot.from_view(name, whole, part.T if transpose and flat.dim() == 2 else part)


def masks(slots: Iterable[Slot], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, for every weight of some slots, which of its entries belong to them."""
    found: dict[str, Tensor] = {}
    for s in slots:
        if s.name not in found:
            found[s.name] = torch.zeros(s.shape, dtype=torch.bool, device=weight_of(s, weights).device)
        s.of(found[s.name]).fill_(True)
    return found


class Run(NamedTuple):
    """Slots of consecutive points at equal distances in one weight: (count, rows, h) or (count, rows, h, 2)."""

    slot: Slot
    points: slice
    rows: slice


class SlotStack:
    """The rows of several points, each a list of slots of the same sizes: read and written as few strided views.

    With a group they are read and written as points, see :meth:`GL.to_point`.
    """

    def __init__(self, points: Sequence[Sequence[Slot]], group: GL | None = None) -> None:
        self.runs: list[Run] = []
        row = 0
        for column in zip(*points, strict=True):
            rows, start = slice(row, row + column[0].size[0]), 0
            row = rows.stop
            while start < len(column):
                first, stop = column[start], start + 1
                step = column[stop].offset - first.offset if stop < len(column) else 0
                while step > 0 and stop < len(column):
                    if column[stop] != replace(first, offset=first.offset + (stop - start) * step):
                        break
                    stop += 1
                stride = (step if stop > start + 1 else 0, *first.stride)
                joined = replace(first, size=(stop - start, *first.size), stride=stride)
                self.runs.append(Run(joined, slice(start, stop), rows))
                start = stop
        self.group = group
        self.shape = (len(points), row, *self.runs[0].slot.size[2:]) if self.runs else (len(points), 0)
        self.names = tuple(dict.fromkeys(run.slot.name for run in self.runs))

    def __len__(self) -> int:
        return self.shape[0]

    def gather(self, weights: Mapping[str, Tensor], like: Tensor | None = None) -> Tensor:
        """Copy rows of weights, or of gradients, differentiably; absent weights are zeros of the kind of ``like``.

        Rows are (points, rows, h[, 2]); points are (points, rows, h), or (points, h, rows, 1) for a diagonal group, and
        complex if the group's field is.
        """
        columns: dict[int, list[Tensor]] = {}
        for run in self.runs:
            if like is None or run.slot.name in weights:
                view = run.slot.read(weights)
            else:
                view = torch.zeros(run.slot.size, dtype=like.dtype.to_real(), device=like.device)
            columns.setdefault(run.rows.start, []).append(view)
        rows = torch.cat(list(map(torch.cat, columns.values())), dim=1)
        return rows if self.group is None else self.group.to_point(rows)

    def views(self, x: Tensor, tensors: Iterable[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """List views of rows or points, run by run, each with that of the run's weight, given here; None is zero."""
        rows, found = x if self.group is None else self.group.from_point(x), list[tuple[Tensor, Tensor]]()
        if tuple(rows.shape) != self.shape:
            raise ValueError(f"a stack of {self.shape[0]} pairs needs {self.shape} numbers, got {tuple(rows.shape)}")
        for (s, points, own_rows), tensor in zip(self.runs, tensors, strict=True):
            if tensor is None:
                view = rows.new_zeros(s.size)
            else:  # Slot.of in place: this runs for every slot at every step
                whole = tensor if tensor.is_contiguous() else tensor.contiguous()
                whole = real_view(whole) if whole.is_complex() else whole
                view = whole.as_strided(s.size, s.stride, whole.storage_offset() + s.offset)
            found.append((rows[points, own_rows], view))
        return found

    @torch.no_grad()
    def scatter_(self, x: Tensor, weights: Mapping[str, Tensor]) -> None:
        """Write what :meth:`gather` copies into weights, rounded to their dtype, by one call."""
        targets = [weight_of(run.slot, weights) for run in self.runs]
        wholes = {t: t.contiguous() for t in targets}
        parts, views = zip(*self.views(x, map(wholes.get, targets)), strict=True)
        torch._foreach_copy_(views, parts)
        for target, whole in wholes.items():
            if whole is not target:
                target.copy_(whole)
