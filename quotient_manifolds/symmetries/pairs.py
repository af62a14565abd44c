"""A block of a parameter; a pair of stacks of blocks; the group that acts on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..gl import GLQuotientInv, GLQuotientMix

__all__ = ["Block", "Group", "PairStack", "SymmetricPair", "block", "is_sharded", "pair", "stack", "stacks"]

_MANIFOLDS: dict[str, type[GLQuotientInv] | type[GLQuotientMix]] = {"inv": GLQuotientInv, "mix": GLQuotientMix}


@dataclass(frozen=True)
class Group:
    """The group that acts on the columns of a pair.

    Attributes
    ----------
    h : int
        Number of columns of G and H, over the field at hand.
    kind : {"GL", "scalars"}
        ``"GL"``: any invertible h × h matrix; ``"scalars"``: every column by a non-zero number of its own.
    field : {"real", "complex"}
        Over the complex numbers a column is a pair of real columns, as the planes that RoPE rotates.

    Raises
    ------
    ValueError
        No such group.

    Examples
    --------
    An attention head of size 64, and the same under RoPE:

    >>> from quotient_manifolds.symmetries import Group
    >>> for group in (Group(64), Group(32, "scalars", "complex")):
    ...     print(group, group.dimension)
    GL(64) 4096
    (ℂ*)^32 64
    """

    h: int
    kind: str = "GL"
    field: str = "real"

    def __post_init__(self) -> None:
        whole = isinstance(self.h, int) and not isinstance(self.h, bool)
        if self.kind not in ("GL", "scalars") or self.field not in ("real", "complex") or not whole or self.h < 1:
            raise ValueError(f"no such group: {self.h} columns, kind {self.kind!r}, field {self.field!r}")

    def __str__(self) -> str:
        symbol = "ℂ" if self.field == "complex" else "ℝ"
        return (
            f"GL({self.h})"
            if (self.kind, self.field) == ("GL", "real")
            else (f"GL({self.h}, ℂ)" if self.kind == "GL" else f"({symbol}*)^{self.h}")
        )

    @property
    def dimension(self) -> int:
        """Number of real parameters of the group."""
        return (self.h**2 if self.kind == "GL" else self.h) * (2 if self.field == "complex" else 1)


@dataclass(frozen=True)
class Block:
    """A strided view of a parameter, seen as some rows of a stack with h columns.

    The parameter is looked up at every use, so replaced parameters (``load_state_dict(assign=True)``, wrappers) are
    followed. Build one with :func:`block`.

    Attributes
    ----------
    module, attribute
        Where the parameter is found.
    shape : tuple of int
        Shape of the parameter.
    offset, size, stride
        The view, in elements of the contiguous parameter; size is (rows, h), or (rows, h, 2) for complex columns.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import block
    >>> queries = block(nn.MultiheadAttention(8, 2), "in_proj_weight", slice(0, 4), transpose=True)
    >>> queries.size, queries.stride, queries.rows
    ((8, 4), (1, 8), 8)
    """

    module: nn.Module = field(repr=False, compare=False)
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
                f"{type(self.module).__name__}.{self.attribute} had shape {self.shape} when its symmetries were "
                f"found and has {tuple(found.shape)} now; call find_symmetric_pairs(model) again"
            )
        return found

    @property
    def key(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """What makes two blocks the same numbers."""
        return (id(self.tensor), self.offset, self.size, self.stride)

    @property
    def rows(self) -> int:
        """Number of rows that the block contributes to its stack."""
        return self.size[0]


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
        Where the parameter is found.
    rows, columns : slice
        The slice; ``columns`` only for matrices. A vector (a bias) is one row; of a tensor with more dimensions (a
        convolution) all but the first count as one.
    transpose : bool
        The head's dimensions are the rows of the parameter, as the output dimensions of ``nn.Linear`` are.
    rotary : {None, "half", "interleaved"}
        Read pairs of head dimensions as one complex column: (i, i + h/2), or (2i, 2i + 1).

    Returns
    -------
    Block
        Of size (rows, h), or (rows, h/2, 2) with ``rotary``. No copy: it follows the parameter.

    Raises
    ------
    ValueError
        A parameter that is a single number, or another word for ``rotary``.

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
    frame = torch.empty(shape, device="meta")
    if frame.dim() > 2:  # convolutions, and torch's bias_k of shape (1, 1, width)
        frame = frame.flatten(1)
    if frame.dim() == 1:
        view = frame[rows].unsqueeze(0)
    elif frame.dim() == 2:
        view = frame[rows, columns]
        view = view.T if transpose else view
    else:
        raise ValueError(f"{type(module).__name__}.{attribute} is a single number; a block needs a matrix or a vector")
    if rotary == "half":
        view = view.unflatten(1, (2, -1)).transpose(1, 2)
    elif rotary == "interleaved":
        view = view.unflatten(1, (-1, 2))
    elif rotary is not None:
        raise ValueError(f'rotary pairing must be "half" or "interleaved", got {rotary!r}')
    return Block(module, attribute, shape, int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a parameter is a shard of one: of FSDP (a DTensor, or a flat parameter), or of DeepSpeed's ZeRO-3.

    Parameters
    ----------
    tensor : Tensor

    Returns
    -------
    bool

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries import is_sharded
    >>> is_sharded(torch.nn.Linear(2, 2).weight)
    False
    """
    return type(tensor).__name__ == "DTensor" or any(hasattr(tensor, mark) for mark in ("_is_flat_param", "ds_id"))


@dataclass(frozen=True)
class SymmetricPair:
    """Weights (G, H) that a network sees only through G Hᴴ, or the reason why there are none.

    Attributes
    ----------
    name : str
        For example ``"encoder.layer.3.attention qk head 5"``.
    kind : str
        ``"qk"``, ``"vo"``, ``"lora"``, or a user's own word.
    group : Group or None
        What acts on the columns; None where no continuous symmetry exists or the pair cannot be used.
    G, H : tuple of Block
        Blocks stacked as rows of the two factors.
    reason : str
        Why ``group`` is None; empty otherwise.
    null : tuple of Block
        Blocks of H that the network does not see at all: the key bias, which adds the same number to all scores of a
        query. One that does not stand in H any more (``find_symmetric_pairs(key_bias="drop")``) is left out of every
        measure.

    Raises
    ------
    ValueError
        No group and no reason; blocks that do not fit the group; an empty factor; one block in both factors.

    Examples
    --------
    Balance the queries and keys of one head, which leaves the layer's function as it is:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs
    >>> first = find_symmetric_pairs(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))[0]
    >>> first.name, first.kind, first.n, first.m
    ('self_attn qk head 0', 'qk', 9, 9)
    >>> first.scatter_(first.manifold("inv").canonical(first.gather()))
    """

    name: str
    kind: str
    group: Group | None
    G: tuple[Block, ...] = field(default=(), repr=False)
    H: tuple[Block, ...] = field(default=(), repr=False)
    reason: str = ""
    null: tuple[Block, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("G", "H", "null"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.group is None:
            if not self.reason:
                raise ValueError(f"pair {self.name!r} has no group; give the reason")
            return
        if not isinstance(self.group, Group):
            raise TypeError(f"pair {self.name!r}: group must be a Group, got {type(self.group).__name__}")
        width = (self.group.h, 2) if self.group.field == "complex" else (self.group.h,)
        for b in self.G + self.H:
            if not isinstance(b, Block):
                raise TypeError(f"pair {self.name!r}: factors are made of blocks, see block(), not {type(b).__name__}")
            if b.size[1:] != width:
                raise ValueError(
                    f"pair {self.name!r}: the group {self.group} acts on {width} columns, but a block of "
                    f"{type(b.module).__name__}.{b.attribute} has {b.size[1:]}"
                )
        if not self.G or not self.H:
            raise ValueError(f"pair {self.name!r} needs at least one block in G and one in H")
        both = {b.key for b in self.G} & {b.key for b in self.H}
        if both:
            raise ValueError(
                f"pair {self.name!r}: the same block stands in G and in H (tied weights); only an orthogonal group "
                "is left, which is not supported; leave the layer out with quotient_manifolds.symmetries.skip"
            )

    @property
    def n(self) -> int:
        """Rows of G."""
        return sum(b.rows for b in self.G)

    @property
    def m(self) -> int:
        """Rows of H."""
        return sum(b.rows for b in self.H)

    @property
    def dropped(self) -> tuple[Block, ...]:
        """Null blocks that were taken out of H."""
        kept = {b.key for b in self.H}
        return tuple(b for b in self.null if b.key not in kept)

    def drop_null(self) -> SymmetricPair:
        """Give the pair without its null blocks."""
        null = {b.key for b in self.null}
        return replace(self, H=tuple(b for b in self.H if b.key not in null))

    def manifold(self, metric: str = "inv") -> GLQuotientInv | GLQuotientMix:
        """Give the manifold on which the tensor of :meth:`gather` is a point; metric is ``"inv"`` or ``"mix"``."""
        return _MANIFOLDS[metric](self.n, self.m)

    def parameters(self) -> list[Tensor]:
        """List the parameters that the blocks belong to, each once."""
        return list({id(b.tensor): b.tensor for b in self.G + self.H}.values())

    def gather(self) -> Tensor:
        """Copy the weights into one point, (n + m, h), or (h, n + m, 1) for a group of scalars; differentiable."""
        return stack([self]).gather()[0]

    def scatter_(self, x: Tensor) -> None:
        """Write a point of :meth:`gather`'s shape back into the weights."""
        stack([self]).scatter_(x.unsqueeze(0))

    def without_group(self, reason: str) -> SymmetricPair:
        """Give the same pair, listed with a reason for not being used."""
        return replace(self, group=None, reason=reason)


def pair(
    G: Iterable[Block], H: Iterable[Block], group: Group, *, name: str = "pair", kind: str = "user"
) -> SymmetricPair:
    """Describe a pair of one's own.

    Parameters
    ----------
    G, H : iterable of Block
        Blocks stacked as rows of the two factors, see :func:`block`.
    group : Group
        ``Group(h)`` for any invertible h × h matrix, ``Group(h, "scalars")`` for a rescaling of every column.
    name, kind : str
        Of one's own choice.

    Returns
    -------
    SymmetricPair
        For ``find_symmetric_pairs(model, extra=[…])`` or ``sharpness.evaluate(…, pairs=[…])``.

    Examples
    --------
    Two linear layers with a bias between them, x ↦ W₂(W₁x + b₁):

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Group, block, pair
    >>> first, second = nn.Linear(5, 3), nn.Linear(3, 4)
    >>> p = pair([block(first, "weight", transpose=True), block(first, "bias")], [block(second, "weight")], Group(3))
    >>> p.gather().shape
    torch.Size([10, 3])
    """
    return SymmetricPair(name, kind, group, tuple(G), tuple(H))


def check_model(model: object) -> None:
    """Raise for what is no torch module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")


def check_pairs(pairs: Iterable[SymmetricPair]) -> list[SymmetricPair]:
    """Give pairs as a list; a TypeError for anything else."""
    found = list(pairs)
    for p in found:
        if not isinstance(p, SymmetricPair):
            raise TypeError(
                f"pairs must be SymmetricPair, as find_symmetric_pairs(model) gives them, got {type(p).__name__}"
            )
    return found


@dataclass(frozen=True)
class _Run:
    """Blocks of consecutive pairs that lie at equal distances in one parameter: one view with a batch dimension."""

    first: Block
    start: int
    count: int
    step: int
    row: int

    def view(self, tensor: Tensor) -> Tensor:
        """See the blocks in a contiguous tensor of the parameter's shape: (count, rows, h) or (count, rows, h, 2)."""
        b = self.first
        return tensor.as_strided((self.count, *b.size), (self.step, *b.stride), tensor.storage_offset() + b.offset)


class PairStack:
    """Pairs of equal shape and group as one batched point.

    Build one with :func:`stack`; ``pairs`` keeps their order, the first dimension of the point.

    Attributes
    ----------
    pairs : tuple of SymmetricPair
    group : Group
    n, m : int
        Rows of every G and H.

    Raises
    ------
    ValueError
        Pairs of different shape or group, or without a group.

    Examples
    --------
    The Riemannian gradients of all heads at once:

    >>> import torch
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs, stacks
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> qk, vo = stacks(find_symmetric_pairs(layer))
    >>> layer(torch.ones(1, 3, 8)).square().sum().backward()
    >>> gradients = vo.gather({p: p.grad for p in vo.parameters()})
    >>> vo.manifold("mix").egrad2rgrad(vo.gather(), gradients).shape
    torch.Size([2, 17, 4])
    """

    def __init__(self, pairs: Sequence[SymmetricPair]) -> None:
        first = pairs[0]
        if first.group is None:
            raise ValueError(f"pair {first.name!r} has no symmetry: {first.reason}")
        for p in pairs:
            if (p.group, p.n, p.m) != (first.group, first.n, first.m):
                raise ValueError(f"pairs {first.name!r} and {p.name!r} differ in shape or group; see stack()")
        self.pairs = tuple(pairs)
        self.group: Group = first.group
        self.n, self.m = first.n, first.m
        self._runs = _runs(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def manifold(self, metric: str = "inv", **options: float) -> GLQuotientInv | GLQuotientMix:
        """Give the manifold of the stacked point; metric is ``"inv"`` or ``"mix"``, options are the manifold's own."""
        return _MANIFOLDS[metric](self.n, self.m, **options)

    def parameters(self) -> list[Tensor]:
        """List the parameters involved, each once, those of dropped blocks included."""
        dropped = [b.tensor for p in self.pairs for b in p.dropped]
        return list({id(t): t for t in [*(r.first.tensor for r in self._runs), *dropped]}.values())

    def _shape(self) -> tuple[int, ...]:
        width = (self.group.h, 2) if self.group.field == "complex" else (self.group.h,)
        return (len(self.pairs), self.n + self.m, *width)

    def gather(self, tensors: Mapping[Tensor, Tensor] | None = None, *, out: Tensor | None = None) -> Tensor:
        """Copy the blocks into one point.

        Parameters
        ----------
        tensors : mapping, optional
            What to read in place of each parameter (gradients, say), by parameter; those absent count as zero.
        out : Tensor, optional
            Contiguous real memory that the result may use, at least as many numbers; not differentiable then.

        Returns
        -------
        Tensor
            (pairs, n + m, h), or (pairs, h, n + m, 1) for a group of scalars; complex if the group's field is.
            Differentiable with respect to the parameters.
        """
        if out is not None:
            return self._gather_into(out.view(-1)[: math.prod(self._shape())].view(self._shape()), tensors)
        parts: dict[tuple[int, int], Tensor] = {}
        for run in self._runs:
            source = run.first.tensor
            if tensors is not None:
                found = tensors.get(source)
                source = torch.zeros_like(source) if found is None else found
            parts[run.row, run.start] = run.view(source.contiguous())
        rows = sorted({row for row, _ in parts})
        stacked = [torch.cat([parts[k] for k in sorted(parts) if k[0] == row]) for row in rows]
        return self._as_point(torch.cat(stacked, dim=1))

    def _gather_into(self, x: Tensor, tensors: Mapping[Tensor, Tensor] | None) -> Tensor:
        for run in self._runs:
            source = run.first.tensor if tensors is None else tensors.get(run.first.tensor)
            part = x[run.start : run.start + run.count, run.row : run.row + run.first.rows]
            if source is None:
                part.zero_()
            else:
                part.copy_(run.view(source.contiguous()))
        return self._as_point(x)

    def _as_point(self, x: Tensor) -> Tensor:
        if self.group.field == "complex":  # there are no complex numbers of half precision worth having
            x = torch.view_as_complex(x.to(torch.promote_types(x.dtype, torch.float32)).contiguous())
        return x.transpose(1, 2).unsqueeze(-1) if self.group.kind == "scalars" else x

    def _from_point(self, x: Tensor) -> Tensor:
        if self.group.kind == "scalars":
            x = x.squeeze(-1).transpose(1, 2)
        return torch.view_as_real(x) if self.group.field == "complex" else x

    @torch.no_grad()
    def scatter_(self, x: Tensor, tensors: Mapping[Tensor, Tensor] | None = None) -> None:
        """Write a point into the parameters.

        Parameters
        ----------
        x : Tensor
            Of the shape that :meth:`gather` gives; rounded to the parameters' dtype.
        tensors : mapping, optional
            What to write to in place of each parameter.

        Raises
        ------
        ValueError
            Another shape.
        """
        x = self._from_point(x)
        if tuple(x.shape) != self._shape():
            raise ValueError(f"a stack of {len(self)} pairs needs {self._shape()} numbers, got shape {tuple(x.shape)}")
        for run in self._runs:
            target = run.first.tensor
            target = target if tensors is None else tensors[target]
            part = x[run.start : run.start + run.count, run.row : run.row + run.first.rows]
            if target.is_contiguous():
                run.view(target).copy_(part)
            else:
                whole = target.contiguous()
                run.view(whole).copy_(part)
                target.copy_(whole)

    @torch.no_grad()
    def mark_(self, tensors: Mapping[Tensor, Tensor]) -> None:
        """Set what ``tensors`` gives for each parameter to True wherever a block lies, dropped ones included."""
        for run in self._runs:
            run.view(tensors[run.first.tensor]).fill_(True)
        for p in self.pairs:
            for b in p.dropped:
                mark = tensors[b.tensor]
                mark.as_strided(b.size, b.stride, mark.storage_offset() + b.offset).fill_(True)


def _runs(pairs: Sequence[SymmetricPair]) -> list[_Run]:
    found: list[_Run] = []
    row = 0
    for k in range(len(pairs[0].G + pairs[0].H)):
        column = [(p.G + p.H)[k] for p in pairs]
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
            found.append(_Run(b, start, stop - start, step, row))
            start = stop
        row += column[0].rows
    return found


def stack(pairs: Iterable[SymmetricPair]) -> PairStack:
    """Stack pairs of equal shape, group and block layout into one batched point.

    Parameters
    ----------
    pairs : iterable of SymmetricPair
        In the order of the point's first dimension.

    Returns
    -------
    PairStack

    Raises
    ------
    ValueError
        No pair at all, pairs that differ, or one without a symmetry; :func:`stacks` sorts a mixed list first.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs, stack
    >>> pairs = find_symmetric_pairs(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    >>> stack(p for p in pairs if p.kind == "qk").gather().shape
    torch.Size([2, 18, 4])
    """
    found = check_pairs(pairs)
    if not found:
        raise ValueError("stack() needs at least one pair")
    return PairStack(found)


def stacks(pairs: Iterable[SymmetricPair]) -> list[PairStack]:
    """Sort the usable pairs by group, shape, block layout, dtype and device, and stack each kind.

    Parameters
    ----------
    pairs : iterable of SymmetricPair
        Those without a group are left out.

    Returns
    -------
    list of PairStack
        In the order in which the kinds first occur.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs, stacks
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> [(len(s), str(s.group), s.n, s.m) for s in stacks(find_symmetric_pairs(layer))]
    [(2, 'GL(4)', 9, 9), (2, 'GL(4)', 9, 8)]
    """
    kinds: dict[object, list[SymmetricPair]] = {}
    for p in check_pairs(pairs):
        if p.group is None:
            continue
        like = p.G[0].tensor
        layout = (tuple(b.rows for b in p.G), tuple(b.rows for b in p.H))
        kinds.setdefault((p.group, layout, like.dtype, like.device), []).append(p)
    return [PairStack(group) for group in kinds.values()]
