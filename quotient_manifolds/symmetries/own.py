"""Pairs of your own: of layers without a nonlinearity between them, and of factors outside any network."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .pairs import SymmetricPair
from .slots import GL, Slot, slot


def pair(G: Iterable[Slot], H: Iterable[Slot], group: GL, *, name: str = "pair", kind: str = "user") -> SymmetricPair:
    """Describe a pair of your own.

    Parameters
    ----------
    G, H : iterable of Slot
        Slots stacked as rows of the two factors, see :func:`slot`.
    group : GL
        ``GL(h)`` for any invertible h × h matrix, ``GL(h, diagonal=True)`` for a rescaling of every column.
    name, kind : str
        Any words; the name appears in messages and tables.

    Returns
    -------
    SymmetricPair
        For ``find(model).adding(…)``, which ``sharpness.evaluate(…, symmetries=…)`` takes.

    Examples
    --------
    Two linear layers with a bias between them, x ↦ W₂(W₁x + b₁):

    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import GL, pair, slot
    >>> model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4))
    >>> G = [slot(model, "0.weight", transpose=True), slot(model, "0.bias")]
    >>> pair(G, [slot(model, "1.weight")], GL(3)).gather(dict(model.named_parameters())).shape
    torch.Size([10, 3])
    """
    return SymmetricPair(name, kind, group, tuple(G), tuple(H))


def factor_pair(G: nn.Parameter, H: nn.Parameter, *, name: str = "factors") -> SymmetricPair:
    r"""Describe two factors outside any network, called ``"G"`` and ``"H"``, of which only the product G Hᵀ counts.

    Parameters
    ----------
    G, H : nn.Parameter
        (n, h) and (m, h), real, of one dtype and device.
    name : str
        For messages.

    Returns
    -------
    SymmetricPair

    Raises
    ------
    ValueError
        Factors that are no parameters, not real, of different dtypes or devices, or no matrices with the same number of
        columns.

    Examples
    --------
    Matrix factorisation by an optimiser that does not see how the product is split between its factors:

    >>> import torch
    >>> from torch import nn
    >>> from quotient_manifolds.optim import QuotientAdam
    >>> from quotient_manifolds.symmetries import factor_pair
    >>> _ = torch.manual_seed(0)
    >>> target = torch.randn(30, 4) @ torch.randn(4, 20)
    >>> G, H = nn.Parameter(torch.randn(30, 4)), nn.Parameter(torch.randn(20, 4))
    >>> optimizer = QuotientAdam([("G", G), ("H", H)], [factor_pair(G, H)], lr=0.1)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     loss = (G @ H.T - target).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    >>> loss.item() < 0.1
    True
    """
    if not all(isinstance(X, nn.Parameter) and X.is_floating_point() for X in (G, H)):
        raise ValueError("factors are real torch.nn.Parameter, which are trained; wrap tensors in nn.Parameter")
    if G.dim() != 2 or H.dim() != 2 or G.shape[1] != H.shape[1]:
        raise ValueError(
            f"factors are matrices (n, h) and (m, h) with the same h, got {tuple(G.shape)} and {tuple(H.shape)}"
        )
    if (G.dtype, G.device) != (H.dtype, H.device):
        raise ValueError(f"factors have one dtype and device, got {G.dtype}, {G.device} and {H.dtype}, {H.device}")
    both = nn.ParameterDict({"G": G, "H": H})
    return pair([slot(both, "G")], [slot(both, "H")], GL(G.shape[1]), name=name)
