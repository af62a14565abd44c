"""The singular values of a network's pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gauge import canonical_gauge
from ..linalg import in_double
from .pairs import SymmetricPair, check_pairs
from .stacks import stacks

__all__ = ["PairSpectrum", "spectra"]


@dataclass(frozen=True)
class PairSpectrum:
    """Singular values of one pair.

    ``product`` holds those of G Hᴴ in descending order, (h,), float64: the invariants of the orbit; for a diagonal
    group those of its columns, each of which is a pair. The smallest ones of the factors depend on the representative.
    """

    name: str
    kind: str
    product: Tensor
    min_singular_value_G: float
    min_singular_value_H: float


def spectra(pairs: Iterable[SymmetricPair]) -> list[PairSpectrum]:
    r"""Compute the singular values of :math:`G H^H`, and the smallest ones of G and H, pair by pair.

    The mix metric's ball of radius ρ stays on the manifold while ρ is below the smallest singular value of any
    :math:`G H^H`, divided by √2; a floor (``relaxation``) replaces small singular values.

    Parameters
    ----------
    pairs : iterable of SymmetricPair
        Pairs as returned by ``find_symmetric_pairs(model)``; those without a group are left out.

    Returns
    -------
    list of PairSpectrum
        With the pair's ``name`` and ``kind``; ``product``, (h,), in descending order, of G Hᴴ; and
        ``min_singular_value_G``, ``min_singular_value_H``, which depend on the representative. Computed in float64
        where the weights are, and returned on the CPU.

    Notes
    -----
    Paper, App. H.1.

    Examples
    --------
    >>> from torch import nn
    >>> from quotient_manifolds.symmetries import find_symmetric_pairs, spectra
    >>> attention = nn.MultiheadAttention(8, 2)
    >>> found = spectra(find_symmetric_pairs(attention))
    >>> [(s.kind, len(s.product)) for s in found]
    [('qk', 4), ('vo', 4), ('qk', 4), ('vo', 4)]
    """
    used = [p for p in check_pairs(pairs) if p.group is not None]
    found: dict[int, PairSpectrum] = {}
    with torch.no_grad():
        for s in stacks(used):
            G, H = s.manifold().unpack_tensor(in_double(s.gather()))
            sigma = canonical_gauge(G, H).sigma
            ends = [torch.linalg.svdvals(X)[..., -1] for X in (G, H)]
            for i, p in enumerate(s.pairs):
                product = sigma[i].flatten().sort(descending=True).values.cpu()
                found[id(p)] = PairSpectrum(p.name, p.kind, product, *(float(end[i].min()) for end in ends))
    return [found[id(p)] for p in used]
