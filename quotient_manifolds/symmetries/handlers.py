"""What those who write a handler of an attention class need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from .attention import HANDLERS, Handler, no_pair, pairs_of_roles
from .refusals import Cause, Claim
from .roles import Heads, Projection


def register_attention(*classes: type | str) -> Callable[[Handler], Handler]:
    """Register a handler for attention modules of exactly these classes.

    Parameters
    ----------
    classes : type or str
        Classes, or their qualified names (``"library.file.Class"``), so that a handler need not import the library.
        Subclasses are not covered, because they may compute something else.

    Returns
    -------
    callable
        Decorator for a function ``handler(module) -> iterable of SymmetricPair or Refusal``, whose slots have the names
        that weights have in the module. See :func:`quotient_manifolds.symmetries.attention_pairs` for the usual case.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Heads, Projection, attention_pairs, find, register_attention
    >>> class MyAttention(nn.Module):
    ...     def __init__(self, dim, heads):
    ...         super().__init__()
    ...         self.heads = heads
    ...         self.to_q, self.to_k = nn.Linear(dim, dim), nn.Linear(dim, dim)
    ...         self.to_v, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
    >>> @register_attention(MyAttention)
    ... def my_attention(module):
    ...     q, k, v, o = (Projection(module, name) for name in ("to_q", "to_k", "to_v", "to_out"))
    ...     return attention_pairs(Heads(module.heads), q=q, k=k, v=v, o=o)
    >>> print(find(nn.Sequential(MyAttention(8, 2))))
    0 qk    2 × GL(4), 9+9 rows
    0 vo    2 × GL(4), 9+8 rows
    """
    return HANDLERS.register(*classes)


def skip(*classes: type | str) -> None:
    """Declare that no symmetry of attention modules of these classes is to be used.

    Their weights are then treated like all others (with the adaptive metric, in geodesic sharpness).

    Parameters
    ----------
    classes : type or str
        As for :func:`register_attention`.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find, skip
    >>> class Gated(nn.MultiheadAttention): pass
    >>> skip(Gated)
    >>> print(find(nn.Sequential(Gated(8, 2))))
    0    1 × none (skipped on request)
    """

    @register_attention(*classes)
    def skipped(module: nn.Module) -> list[Claim]:
        return no_pair(Cause.SKIPPED)


def attention_pairs(heads: Heads, *, q: Projection, k: Projection, v: Projection, o: Projection) -> list[Claim]:
    r"""List the Q–K and V–O pairs of a multi-head attention layer, one of each per query head.

    With the column convention q = x W_Q + b_q and biases as one more row: :math:`G = [W_Q; b_q^T]`,
    :math:`H = [W_K; b_k^T]`, and :math:`G = [W_V; b_v^T]`, H the head's slice of :math:`W_O^T`; the group is GL(h).

    Parameters
    ----------
    heads : Heads
        Number of heads and, if it is not clear from the projections, their size; ``group``, ``rotary_size`` (RoPE) and
        ``reason`` are those of queries and keys.
    q, k, v, o : Projection
        Location of the weights.

    Returns
    -------
    list of SymmetricPair or Refusal
        Of kind ``"qk"`` or ``"vo"``; under RoPE the rotated dimensions form a separate pair. Their weights have the
        names that they have in the layer.

    Notes
    -----
    Paper, §4.2 and App. C; in App. C.1 the printed W_iᵒ are rows of Wᵒ.

    Examples
    --------
    Grouped queries under RoPE; :func:`find` merges the heads that share keys:

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import Heads, Projection, attention_pairs
    >>> sizes = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8)}
    >>> layer = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    >>> projections = {name: Projection(layer, name) for name in layer}
    >>> pairs = attention_pairs(Heads(4, 2, group="half", rotary_size=2), **projections)
    >>> print(pairs[0].part, pairs[0].group, pairs[1].kind, pairs[1].group)
    rotary (ℂ*)^1 vo GL(2)
    """
    size = heads.size or getattr(q.module, q.weight).shape[1 if q.conv1d else 0] // heads.number
    qk = replace(heads, size=size, kv_number=heads.kv_number or heads.number)
    roles = {"q": q, "k": k, "v": v, "o": replace(o, into=False)}
    return pairs_of_roles(roles, qk=qk, vo=Heads(qk.number, qk.kv_number, size))
