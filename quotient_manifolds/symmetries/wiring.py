"""The wiring of a network around its residual streams: which norm feeds which layers, and what is added to a stream."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..weights import ByClass
from .pairs import SymmetricPair
from .slots import GL, Slot


@dataclass(frozen=True)
class Affine:
    """A map x ↦ W x + b, or a part of one; :func:`affine` makes one.

    Attributes
    ----------
    matrix : Slot
        W, (outputs, inputs); the dimensions of a convolution after the second count as inputs.
    bias : Slot or None
        b, (1, outputs).
    blind : bool
        A constant added to the output has no effect, as for keys under softmax.

    Examples
    --------
    See :func:`affine`.

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import slot
    >>> from quotient_manifolds.symmetries.whole import Affine
    >>> [s.size for s in Affine(slot(nn.Linear(3, 2), "weight")).written]
    [(3, 2)]
    """

    matrix: Slot
    bias: Slot | None = None
    blind: bool = False

    @property
    def slots(self) -> list[Slot]:
        """W and b, as far as they exist."""
        return [self.matrix] if self.bias is None else [self.matrix, self.bias]

    @property
    def written(self) -> list[Slot]:
        """The vectors that the layer adds to a stream, as rows: the columns of W, and b."""
        return [self.matrix.transposed(), *self.slots[1:]]


@dataclass(frozen=True)
class Norm:
    """A norm x ↦ γ ⊙ n(x) + β, with γ = offset + weight; :func:`norm` makes one.

    Attributes
    ----------
    gain, shift : Slot or None
        The parameters of γ and of β, (1, d).
    centring : bool
        n(x) sums to 0, as in LayerNorm; else RMSNorm.
    offset : float
        1 for Gemma's norms.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import norm
    >>> [s.size for s in norm(nn.Sequential(nn.LayerNorm(3)), "0").slots]
    [(1, 3), (1, 3)]
    """

    gain: Slot | None
    shift: Slot | None
    centring: bool = True
    offset: float = 0.0

    @property
    def slots(self) -> list[Slot]:
        """The parameters of γ and β, as far as they exist."""
        return [s for s in (self.gain, self.shift) if s is not None]

    def gamma(self, weights: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Read γ; without a parameter it is 1, as many as ``like`` has numbers."""
        return torch.ones_like(like) if self.gain is None else self.gain.read(weights)[0] + self.offset


@dataclass(frozen=True)
class Site:
    """A norm and the layers that read its output.

    Attributes
    ----------
    name : str
    norm : Norm
    readers : tuple of Affine
        All layers that read the output; empty if something else reads it too, so that nothing can be moved into them.
    carried : Affine or None
        Post-norm: the next layer whose output is added to the norm's.

    Examples
    --------
    See :func:`register_wiring`.

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import Site, affine, norm
    >>> model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4))
    >>> Site("norm", norm(model, "0"), (affine(model, "1"),)).readers[0].matrix.size
    (4, 3)
    """

    name: str
    norm: Norm
    readers: tuple[Affine, ...]
    carried: Affine | None = None


@dataclass
class Wiring:
    """The known wiring of a network around its streams; an adapter appends to these lists.

    Attributes
    ----------
    sites : list of Site
    writers : list of (str, Affine)
        Layers whose output is added to a stream.
    tables : list of (str, Slot)
        Other vectors that are added to a stream, as rows.
    alike : list of Slot
        Rows whose entries keep the order of the stream's, but not its basis: a tied decoder reads them.
    common : list of (str, Slot, tuple of Slot)
        Vectors that are always added to each other: each of the first to exactly one of the others.
    scales : list of (str, Slot, Affine)
        LayerScale: one number for each output of a writer, (1, d).
    neurons : list of SymmetricPair
        As :func:`neurons` describes them.
    hidden : list of (str, tuple of Slot)
        All weights of a layer of hidden neurons, gates included, one column a neuron: they may be permuted.
    odd : set of str
        The names of those whose activation is odd (tanh): they may change their signs too.
    qk_norms : list of (str, Norm, Norm)
        Norms of queries and keys, under RoPE in halves.
    score_tables : list of (str, tuple of Slot)
        Rows of a table (positions, heads) that are added to the scores of the same queries before softmax.
    classifiers : list of (str, Affine)
        Layers that compute the logits of a softmax.
    reads_stream_raw : bool
        A stream is also read without a centring norm.
    closed : bool
        All layers that read from or write to a stream are listed, so that it can be rotated, or its entries permuted.
    reason : str
        Why nothing is wired of a network whose class is known.

    Examples
    --------
    See :func:`register_wiring`.

    >>> from quotient_manifolds.symmetries.whole import Wiring
    >>> Wiring().centred
    True
    """

    sites: list[Site] = field(default_factory=list)
    writers: list[tuple[str, Affine]] = field(default_factory=list)
    tables: list[tuple[str, Slot]] = field(default_factory=list)
    alike: list[Slot] = field(default_factory=list)
    common: list[tuple[str, Slot, tuple[Slot, ...]]] = field(default_factory=list)
    scales: list[tuple[str, Slot, Affine]] = field(default_factory=list)
    neurons: list[SymmetricPair] = field(default_factory=list)
    hidden: list[tuple[str, tuple[Slot, ...]]] = field(default_factory=list)
    odd: set[str] = field(default_factory=set)
    qk_norms: list[tuple[str, Norm, Norm]] = field(default_factory=list)
    score_tables: list[tuple[str, tuple[Slot, ...]]] = field(default_factory=list)
    classifiers: list[tuple[str, Affine]] = field(default_factory=list)
    reads_stream_raw: bool = False
    closed: bool = True
    reason: str = ""

    @property
    def centred(self) -> bool:
        """Whether nothing depends on the mean over the entries of a vector in the stream."""
        return not self.reads_stream_raw and all(s.norm.centring for s in self.sites)

    @property
    def vectors(self) -> list[Slot]:
        """The vectors in a stream, as rows: of readers, of writers, and whole tables."""
        found = [r.matrix for s in self.sites for r in s.readers] + [b for _, a in self.writers for b in a.written]
        return found + [replace(b, offset=0, size=(math.prod(b.shape) // b.size[1], b.size[1])) for _, b in self.tables]

    def tied(self) -> set[str]:
        """Find the weights that are used in several places."""
        uses: Counter[str] = Counter()
        for s in self.sites:
            if s.readers:
                uses.update({b.name for b in (*s.norm.slots, *(b for r in s.readers for b in r.slots))})
        for _, w in self.writers:
            uses.update(b.name for b in w.slots)
        uses.update({b.name for _, b in self.tables})
        return {name for name, count in uses.items() if count > 1}


Adapter = Callable[[nn.Module], Wiring]
ADAPTERS = ByClass[Adapter]()
#: From a whole network and the name of its backbone, of a known class, to a wiring.
BACKBONES = ByClass[Callable[[nn.Module, str], Wiring]]()
#: A decorator for such functions: they wire a backbone alone, and below every head that is defined beside its class.
register_backbone = BACKBONES.register


def register_wiring(*classes: type | str) -> Callable[[Adapter], Adapter]:
    """Register an adapter for networks of exactly these classes.

    Parameters
    ----------
    classes : type or str
        Classes of whole networks, or their qualified names.

    Returns
    -------
    callable
        Decorator for a function ``adapter(model) -> Wiring``, whose slots have the names of weights in the model.

    Examples
    --------
    A norm in front of a linear layer that reads it alone:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import ALL, find
    >>> from quotient_manifolds.symmetries.whole import Site, Wiring, affine, norm, register_wiring
    >>> class Probe(nn.Sequential): pass
    >>> @register_wiring(Probe)
    ... def probe(model):
    ...     return Wiring(sites=[Site("0", norm(model, "0"), (affine(model, "1"),))])
    >>> find(Probe(nn.LayerNorm(4), nn.Linear(4, 3)), scope=ALL).dimensions
    {'gain': 4, 'shift': 4, 'reader': 3, 'rotation': 3}
    """
    return ADAPTERS.register(*classes)


def neurons(name: str, kind: str, up: Affine, down: Affine) -> SymmetricPair:
    """Describe hidden neurons: a row of a gated up-projection, or before a ReLU, and a column down.

    u → c u, down column / c, with c ≠ 0 or c > 0: GL(1) for every neuron.

    Parameters
    ----------
    name : str
    kind : str
        ``"glu"`` if another layer gates them, ``"relu"`` if they are rectified.
    up, down : Affine
        The layers whose rows and columns they are; of ``up`` the rows of the neurons alone, without a gate's.

    Returns
    -------
    SymmetricPair

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries.whole import affine, neurons
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> print(neurons("mlp", "relu", affine(model, "0"), affine(model, "2")).group)
    (ℝ+)^8
    """
    group = GL(up.matrix.size[0], diagonal=True, positive=kind == "relu")
    return SymmetricPair(name, kind, group, tuple(up.written), (down.matrix,), part="neurons")
