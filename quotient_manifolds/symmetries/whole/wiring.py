"""The wiring of a network around its residual streams: which norm feeds which layers, and what is added to a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..modules import ByClass, plain_class

__all__ = ["Affine", "Neurons", "Norm", "Site", "State", "Table", "Wiring", "register_wiring", "wiring_of"]


class State(dict[Tensor, Tensor]):
    """Values of a model's parameters in float64; parameters that were not changed are not stored.

    Examples
    --------
    >>> import torch
    >>> from quotient_manifolds.symmetries.whole import State
    >>> p = torch.nn.Parameter(torch.ones(2))
    >>> state = State({p: torch.zeros(2, dtype=torch.float64)})
    >>> float(state.of(p).sum()), float(State().of(p).sum())
    (0.0, 2.0)
    """

    def of(self, p: Tensor) -> Tensor:
        """Return the value of a parameter."""
        return self[p] if p in self else p.detach().to(torch.promote_types(p.dtype, torch.float64))


@dataclass(frozen=True)
class Affine:
    """A map x ↦ W x + b, or a part of one: the location of W (outputs, inputs) and b.

    Attributes
    ----------
    module : nn.Module
        Owner of the parameters.
    weight, bias : str
        Their names; the bias may be missing or None. Dimensions after the second count as inputs (convolutions).
    transposed : bool
        The weight is (inputs, outputs), as GPT-2's ``Conv1D``.
    inputs, outputs : (int, int)
        First and last (exclusive) column or row of W, where one layer reads several things.
    blind : bool
        A constant added to the output has no effect, as for keys under softmax.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import Affine, State
    >>> Affine(nn.Linear(3, 2)).matrix(State()).shape
    torch.Size([2, 3])
    """

    module: nn.Module = field(repr=False)
    weight: str = "weight"
    bias: str = "bias"
    transposed: bool = False
    inputs: tuple[int | None, int | None] = (None, None)
    outputs: tuple[int | None, int | None] = (None, None)
    blind: bool = False

    @property
    def W(self) -> Tensor:
        """The parameter of the weight."""
        found: Tensor = getattr(self.module, self.weight)
        return found

    @property
    def b(self) -> Tensor | None:
        """The parameter of the bias, if there is one."""
        return getattr(self.module, self.bias, None)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, the weight first."""
        return [self.W] if self.b is None else [self.W, self.b]

    @property
    def stream_dim(self) -> int:
        """The dimension of the weight that runs over the outputs."""
        return 1 if self.transposed else 0

    @property
    def _part(self) -> tuple[slice, slice]:
        return slice(*self.outputs), slice(*self.inputs)

    def matrix(self, state: State) -> Tensor:
        """Read W, (outputs, inputs)."""
        w = state.of(self.W)
        return (w.T if self.transposed else w.flatten(1))[self._part]

    def set_matrix(self, state: State, W: Tensor) -> None:
        """Write W."""
        whole = state.of(self.W)
        flat = (whole.T if self.transposed else whole.flatten(1)).clone()
        flat[self._part] = W
        state[self.W] = (flat.T if self.transposed else flat).reshape(whole.shape)

    def add_to_bias(self, state: State, c: Tensor) -> None:
        """Add a constant to the output; one without effect is left out."""
        if self.b is not None:
            after = state.of(self.b).clone()
            after[self._part[0]] += c
            state[self.b] = after
        else:
            assert self.blind, "no bias"


@dataclass(frozen=True)
class Norm:
    """A norm x ↦ γ ⊙ n(x) + β, with γ = offset + weight.

    Attributes
    ----------
    module : nn.Module
        Owner of ``weight`` and ``bias``; either may be missing.
    centring : bool
        n(x) sums to 0, as in LayerNorm; else RMSNorm.
    offset : float
        1 for Gemma's norms.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import Norm
    >>> [tuple(p.shape) for p in Norm(nn.LayerNorm(3), centring=True).parameters]
    [(3,), (3,)]
    """

    module: nn.Module = field(repr=False)
    centring: bool
    offset: float = 0.0

    @property
    def gain(self) -> Tensor | None:
        """The parameter of γ."""
        return getattr(self.module, "weight", None)

    @property
    def shift(self) -> Tensor | None:
        """The parameter of β."""
        return getattr(self.module, "bias", None)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of γ and β, as far as they exist."""
        return [p for p in (self.gain, self.shift) if p is not None]

    def gamma(self, state: State) -> Tensor | None:
        """Read γ."""
        return None if self.gain is None else state.of(self.gain) + self.offset


@dataclass(frozen=True)
class Table:
    """Vectors in a stream: rows of a parameter (…, d), such as embeddings, positions, a class token, a bias.

    Attributes
    ----------
    module : nn.Module
        Owner of the parameter.
    attribute : str
        Its name.
    rows : (int, int)
        First and last (exclusive) row.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import State, Table
    >>> Table(nn.Embedding(5, 3), rows=(1, None)).vectors(State()).shape
    torch.Size([4, 3])
    """

    module: nn.Module = field(repr=False)
    attribute: str = "weight"
    rows: tuple[int | None, int | None] = (None, None)

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        found: Tensor = getattr(self.module, self.attribute)
        return found

    def vectors(self, state: State) -> Tensor:
        """Read the vectors, (rows, d)."""
        whole = state.of(self.parameter)
        return whole.reshape(-1, whole.shape[-1])[slice(*self.rows)]

    def add(self, state: State, c: Tensor) -> None:
        """Add a tensor that broadcasts to (rows, d) to the vectors."""
        whole = state.of(self.parameter)
        rows = whole.reshape(-1, whole.shape[-1]).clone()
        rows[slice(*self.rows)] = rows[slice(*self.rows)] + c
        state[self.parameter] = rows.reshape(whole.shape)


@dataclass(frozen=True)
class Site:
    """A norm and the layers that read its output.

    Attributes
    ----------
    name : str
    norm : Norm
    readers : tuple of Affine
        All layers that read the output.
    carried : Affine or None
        Post-norm: the next layer whose output is added to the norm's.
    raw : bool
        Something else reads the output too, so nothing can be moved into the readers.

    Examples
    --------
    See :func:`register_wiring`.

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import Affine, Norm, Site
    >>> Site("norm1", Norm(nn.LayerNorm(3), centring=True), (Affine(nn.Linear(3, 4)),)).raw
    False
    """

    name: str
    norm: Norm
    readers: tuple[Affine, ...]
    carried: Affine | None = None
    raw: bool = False


@dataclass(frozen=True)
class Neurons:
    """Hidden neurons between two layers.

    Attributes
    ----------
    name : str
    kind : str
        ``"glu"`` if another layer gates them, ``"relu"`` if they are rectified.
    up, down : Affine
        The layers whose rows and columns they are.
    first : int
        Row of ``up`` where they begin; a gate may come before them.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import Affine, Neurons
    >>> Neurons("mlp", "relu", Affine(nn.Linear(3, 8)), Affine(nn.Linear(8, 3))).first
    0
    """

    name: str
    kind: str
    up: Affine
    down: Affine
    first: int = 0


@dataclass
class Wiring:
    """The known wiring of a network around its streams; an adapter appends to these lists.

    Attributes
    ----------
    sites : list of Site
    writers : list of (str, Affine)
        Layers whose output is added to a stream.
    tables : list of (str, Table)
        Other vectors that are added to a stream.
    common : list of (str, Table, tuple of Table)
        Vectors that are always added to each other: each of the first to exactly one of the others.
    scales : list of (str, Table, Affine)
        LayerScale: one number for each output of a writer.
    neurons : list of Neurons
    qk_norms : list of (str, Norm, Norm)
        Norms of queries and keys, under RoPE in halves.
    score_tables : list of (str, tuple of Table)
        Rows of a table (positions, heads) that are added to the scores of the same queries before softmax.
    classifiers : list of (str, Affine)
        Layers that compute the logits of a softmax.
    reads_stream_raw : bool
        A stream is also read without a centring norm.
    closed : bool
        All layers that read from or write to a stream are listed, so that it can be rotated.

    Examples
    --------
    See :func:`register_wiring`.

    >>> from quotient_manifolds.symmetries.whole import Wiring
    >>> Wiring().centred
    True
    """

    sites: list[Site] = field(default_factory=list)
    writers: list[tuple[str, Affine]] = field(default_factory=list)
    tables: list[tuple[str, Table]] = field(default_factory=list)
    common: list[tuple[str, Table, tuple[Table, ...]]] = field(default_factory=list)
    scales: list[tuple[str, Table, Affine]] = field(default_factory=list)
    neurons: list[Neurons] = field(default_factory=list)
    qk_norms: list[tuple[str, Norm, Norm]] = field(default_factory=list)
    score_tables: list[tuple[str, tuple[Table, ...]]] = field(default_factory=list)
    classifiers: list[tuple[str, Affine]] = field(default_factory=list)
    reads_stream_raw: bool = False
    closed: bool = True

    @property
    def centred(self) -> bool:
        """Whether nothing depends on the mean over the entries of a vector in the stream."""
        return not self.reads_stream_raw and all(s.norm.centring for s in self.sites)

    def tied(self) -> set[Tensor]:
        """Find the parameters that are used in several places."""
        uses: Counter[Tensor] = Counter()
        for s in self.sites:
            if s.readers:
                uses.update({*s.norm.parameters, *(p for r in s.readers for p in r.parameters)})
        for _, w in self.writers:
            uses.update(w.parameters)
        uses.update({(id(t.module), t.attribute): t.parameter for _, t in self.tables}.values())
        return {p for p, count in uses.items() if count > 1}


Adapter = Callable[[nn.Module], Wiring]
_ADAPTERS = ByClass[Adapter]()
#: From a whole network and its backbone, of a known class, to a wiring.
_BACKBONES = ByClass[Callable[[nn.Module, nn.Module], Wiring]]()
#: A decorator for such functions: they wire a backbone alone, and below every head that is defined beside its class.
register_backbone = _BACKBONES.register


def register_wiring(*classes: type | str) -> Callable[[Adapter], Adapter]:
    """Register an adapter for networks of exactly these classes.

    Parameters
    ----------
    classes : type or str
        Classes of whole networks, or their qualified names.

    Returns
    -------
    callable
        Decorator for a function ``adapter(model) -> Wiring``.

    Examples
    --------
    A norm in front of a linear layer that reads it alone:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import Affine, Norm, Site, Wiring, count, register_wiring
    >>> class Probe(nn.Sequential): pass
    >>> @register_wiring(Probe)
    ... def probe(model):
    ...     return Wiring(sites=[Site("0", Norm(model[0], centring=True), (Affine(model[1]),))])
    >>> count(Probe(nn.LayerNorm(4), nn.Linear(4, 3)))
    {'gain': 4, 'shift': 4, 'reader': 3, 'rotation': 3}
    """
    return _ADAPTERS.register(*classes)


def wiring_of(model: nn.Module) -> Wiring | None:
    """Look up the wiring of a network by its exact class, or by that of its backbone under a head of the same file.

    Parameters
    ----------
    model : nn.Module
        Plain, compiled, or in DDP.

    Returns
    -------
    Wiring or None
        None for an unknown class; an empty wiring if layers of the class were replaced.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import wiring_of
    >>> len(wiring_of(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)).sites)
    6
    """
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        model = next(model.children())
    adapter = _ADAPTERS.of(model)
    try:
        if adapter is not None:
            return adapter(model)
        for base in (model, *model.children()):
            headed = _BACKBONES.of(base)
            if headed is not None and plain_class(base).__module__ == plain_class(model).__module__:
                return headed(model, base)
        return None
    except AttributeError:  # replaced layers, options that the adapter does not cover
        return Wiring(closed=False)
