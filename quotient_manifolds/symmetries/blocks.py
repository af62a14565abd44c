"""Where numbers lie in a module, as strided views of its parameters, and the groups that act on their columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..linalg import standard_normal
from .modules import check_model

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

    def __post_init__(self) -> None:
        whole = isinstance(self.h, int) and not isinstance(self.h, bool)
        known = all(isinstance(v, bool) for v in (self.diagonal, self.positive)) and self.field in ("real", "complex")
        if not known or not whole or self.h < 1 or (self.positive and not self.diagonal):
            raise ValueError(
                f"no such group: {self.h} columns, diagonal {self.diagonal!r}, positive {self.positive!r}, field "
                f"{self.field!r}; numbers of a diagonal group may be positive"
            )

    def __str__(self) -> str:
        if self.diagonal:
            return f"({'ℂ*' if self.field == 'complex' else 'ℝ+' if self.positive else 'ℝ*'})^{self.h}"
        return f"GL({self.h}, ℂ)" if self.field == "complex" else f"GL({self.h})"

    @property
    def dimension(self) -> int:
        """Number of real parameters of the group."""
        return (self.h if self.diagonal else self.h**2) * (2 if self.field == "complex" else 1)

    @property
    def columns(self) -> tuple[int, ...]:
        """Shape of one row of a block on which the group acts: (h,), or (h, 2) for complex columns."""
        return (self.h, 2) if self.field == "complex" else (self.h,)

    def to_point(self, rows: Tensor) -> Tensor:
        """Turn real rows (pairs, n + m, h[, 2]) into points: (pairs, n + m, h), or (pairs, h, n + m, 1) if diagonal."""
        if self.field == "complex":  # complex numbers in half precision are hardly supported
            rows = torch.view_as_complex(rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous())
        return rows.transpose(1, 2).unsqueeze(-1) if self.diagonal else rows

    def from_point(self, x: Tensor) -> Tensor:
        """Turn points back into real rows."""
        if self.diagonal:
            x = x.squeeze(-1).transpose(1, 2)
        return torch.view_as_real(x) if self.field == "complex" else x


def random_elements(x: Tensor, condition: float, generator: torch.Generator) -> Tensor:
    """Draw U diag(s) Vᴴ for each of some points, in double precision.

    U and V are random orthogonal, numbers have random signs or phases; s is log-uniform, from condition^-½ to its root.
    """
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-1])
    like = torch.empty(0, dtype=torch.promote_types(x.dtype, torch.float64), device="cpu")
    draws = [standard_normal(shape, like, generator) for _ in range(2)]
    U, V = (d / d.abs() if shape[-1] == 1 else torch.linalg.qr(d).Q for d in draws)
    exponent = torch.rand(shape[:-1], dtype=torch.float64, device="cpu", generator=generator) - 0.5
    if shape[-1] > 1:
        exponent[..., 0], exponent[..., -1] = -0.5, 0.5
    return ((U * (condition**exponent).unsqueeze(-2)) @ V.mH).to(x.device)


def real_view(t: Tensor) -> Tensor:
    """View complex numbers as two real ones, (…, 2); return real tensors unchanged."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


@dataclass(frozen=True)
class Block:
    """A strided view of a parameter, as some rows of a stack with h columns; :func:`block` makes one.

    The parameter is looked up at every use, so the block follows when it is replaced (``load_state_dict(assign=True)``,
    wrappers). The view is given in real elements of the contiguous parameter of that shape; ``size`` is (rows, h), or
    (rows, h, 2) for complex columns.
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

    @classmethod
    def from_view(cls, module: nn.Module, attribute: str, part: Tensor) -> Block:
        """Describe a view, such as ``w[:2].T``, of the parameter's :func:`outline` w."""
        shape = tuple(getattr(module, attribute).shape)
        return cls(module, attribute, shape, int(part.storage_offset()), tuple(part.shape), tuple(part.stride()))

    def part(self, start: int, count: int, rotary: str | None = None) -> Block:
        """View some of the columns, as they are or in the planes of two that RoPE rotates."""
        down, right = self.stride
        size = (count,) if rotary is None else (count // 2, 2)
        stride = {None: (right,), "half": (right, right * (count // 2)), "interleaved": (2 * right, right)}[rotary]
        offset = self.offset + start * right
        return Block(self.module, self.attribute, self.shape, offset, (self.size[0], *size), (down, *stride))

    def of(self, whole: Tensor) -> Tensor:
        """View the block in a contiguous tensor of the parameter's shape."""
        whole = real_view(whole)
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


def outline(module: nn.Module, attribute: str) -> Tensor:
    """Return a contiguous tensor of a parameter's shape, without memory."""
    whole: Tensor = getattr(module, attribute)
    return torch.empty(whole.shape, dtype=torch.complex64 if whole.is_complex() else None, device="meta")


def block(
    module: nn.Module,
    attribute: str,
    rows: slice = slice(None),
    columns: slice = slice(None),
    *,
    transpose: bool = False,
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

    Returns
    -------
    Block
        Of size (rows, h). No copy: it follows the parameter. Of columns that RoPE turns in planes,
        ``.part(0, h, "half")`` or ``"interleaved"`` makes complex ones, of size (rows, h/2, 2).

    Raises
    ------
    ValueError
        The parameter is a single number.

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
    whole = outline(module, attribute)
    if whole.dim() == 0:
        name = f"{attribute} of {type(module).__name__}"
        raise ValueError(f"{name} is a single number; a block needs a matrix or vector")
    if whole.dim() > 2:  # convolutions, and torch's bias_k of shape (1, 1, width)
        whole = whole.flatten(1)
    part = whole[None, rows] if whole.dim() == 1 else whole[rows, columns]
    return Block.from_view(module, attribute, part.T if transpose and whole.dim() == 2 else part)


def masks(blocks: Iterable[Block]) -> dict[Tensor, Tensor]:
    """Return, for every parameter of some blocks, which of its entries belong to them."""
    found: dict[Tensor, Tensor] = {}
    for b in blocks:
        if (t := b.tensor) not in found:
            found[t] = torch.zeros(real_view(t).shape, dtype=torch.bool, device=t.device)
        b.of(found[t]).fill_(True)
    return found


class Run(NamedTuple):
    """Blocks of consecutive points at equal distances in one parameter: (count, rows, h) or (count, rows, h, 2)."""

    block: Block
    points: slice
    rows: slice


def _runs_of(column: Sequence[Block], row: int) -> Iterator[Run]:
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
        joined = replace(b, size=(stop - start, *b.size), stride=(step, *b.stride))
        yield Run(joined, slice(start, stop), slice(row, row + b.rows))
        start = stop


class BlockStack:
    """The rows of several points, each a list of blocks of the same sizes: read and written as few strided views."""

    def __init__(self, points: Sequence[Sequence[Block]]) -> None:
        self.runs: list[Run] = []
        row = 0
        for column in zip(*points, strict=True):
            self.runs.extend(_runs_of(column, row))
            row += column[0].rows
        self._shapes = [run.block.shape for run in self.runs]
        self.shape = (len(points), row, *self.runs[0].block.size[2:]) if self.runs else (len(points), 0)

    def gather(self, tensors: Mapping[Tensor, Tensor] | None = None) -> Tensor:
        """Copy the rows, (points, rows, h[, 2]), differentiably; absent ``tensors`` are zero."""
        columns: dict[int, list[Tensor]] = {}
        for run in self.runs:
            p = run.block.tensor
            source = p if tensors is None else tensors.get(p)
            if source is None:  # not p.new_zeros, which for a shard would be one
                view = torch.zeros(run.block.size, dtype=p.dtype.to_real(), device=p.device)
            else:
                view = run.block.of(source.contiguous())
            columns.setdefault(run.rows.start, []).append(view)
        return torch.cat(list(map(torch.cat, columns.values())), dim=1)

    def parameters(self) -> list[Tensor]:
        """List the parameter of each run."""
        found = [getattr(run.block.module, run.block.attribute) for run in self.runs]
        return found if [p.shape for p in found] == self._shapes else [run.block.tensor for run in self.runs]

    def views(self, rows: Tensor, tensors: Iterable[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of rows, run by run, and of tensors in place of the parameters; None counts as zero."""
        of_rows, of_tensors = list[Tensor](), list[Tensor]()
        for (b, points, own_rows), tensor in zip(self.runs, tensors, strict=True):
            of_rows.append(rows[points, own_rows])
            if tensor is None:
                of_tensors.append(rows.new_zeros(b.size))
            else:  # Block.of in place: this runs for every block at every step
                whole = tensor if tensor.is_contiguous() else tensor.contiguous()
                whole = real_view(whole) if whole.is_complex() else whole
                of_tensors.append(whole.as_strided(b.size, b.stride, whole.storage_offset() + b.offset))
        return of_rows, of_tensors

    @torch.no_grad()
    def scatter_(self, rows: Tensor, tensors: Mapping[Tensor, Tensor] | None = None) -> None:
        """Write rows into the parameters, or into their replacements in ``tensors``, by one call."""
        if tuple(rows.shape) != self.shape:
            raise ValueError(f"a stack of {self.shape[0]} pairs needs {self.shape} numbers, got {tuple(rows.shape)}")
        parameters = self.parameters()
        targets = parameters if tensors is None else [tensors.get(p, p) for p in parameters]
        wholes = {t: t.contiguous() for t in targets}
        parts, views = self.views(rows, map(wholes.get, targets))
        torch._foreach_copy_(views, parts)
        for target, whole in wholes.items():
            if whole is not target:
                target.copy_(whole)
