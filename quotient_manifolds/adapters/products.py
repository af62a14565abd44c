"""Sums, means and merges of products G Hᵀ in float64, from their factors (experts, n, r) and (experts, m, r)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from numbers import Real

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..linalg import as_count
from ..manifold import MANIFOLDS
from ..means import frechet_mean

#: Factors of a layer, G (experts, n, r) and H (experts, m, r).
Factors = tuple[Tensor, Tensor]
#: Singular values below this part of the largest are lost when factors are stored in single precision.
NEGLIGIBLE = torch.finfo(torch.float32).eps


def product_svd(G: Tensor, H: Tensor, full: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, σ, V with U diag(σ) Vᵀ = G Hᵀ, without forming the product; what is rounding error is 0 in σ.

    With ``full``, U and V have as many orthonormal columns as G and H can have; the first are those of σ.
    """
    (Q, R), (P, T) = torch.linalg.qr(G), torch.linalg.qr(H)
    size = torch.linalg.matrix_norm(R) * torch.linalg.matrix_norm(T)
    if not bool(size.square().isfinite().all()):
        raise ValueError("the product is too large for float64; use smaller weights")
    U, sigma, Vh = torch.linalg.svd(R @ T.mT, full_matrices=full)
    rounding = 10 * torch.finfo(G.dtype).eps * size
    return Q @ U, torch.where(sigma > rounding.unsqueeze(-1), sigma, 0), P @ Vh.mT


def present(sigma: Tensor) -> Tensor:
    """Tell which singular values are not negligible; (…, k)."""
    return sigma > NEGLIGIBLE * sigma[..., :1]


def balanced(G: Tensor, H: Tensor, rank: int, energy: float = 1.0, whole: bool = False) -> Factors:
    """Return balanced factors of the nearest product of at most this rank; with as many columns, if ``whole``.

    ``energy`` is the share of the sum of squared singular values that is enough.
    """
    G, H, _ = truncated(product_svd(G, H, full=True), rank, energy, whole)
    return G, H


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the smallest dtype that holds the numbers of all; float8 would lose percents, so it counts as float32."""
    dtypes = (torch.float32 if t.is_floating_point() and t.element_size() == 1 else t.dtype for t in tensors)
    return reduce(torch.promote_types, dtypes)


def check_kept(rank: int | None, energy: float | None) -> None:
    """Raise unless something says how much of products is kept."""
    if rank is None and energy is None:
        raise ValueError("say to which rank, or which share of energy to keep (--rank, --energy)")


def truncated(
    svd: tuple[Tensor, Tensor, Tensor], rank: int, energy: float = 1.0, whole: bool = False
) -> tuple[Tensor, Tensor, float]:
    """Return the same of a product that is given as U, σ and V, and what it lacks, relative to the product."""
    U, sigma, V = svd
    before = sigma.square().cumsum(-1) - sigma.square()
    kept = present(sigma) & ((before < energy * sigma.square().sum(-1, keepdim=True)) | (energy == 1))
    count = rank if whole else min(rank, max(1, int(kept.sum(-1).max())))
    kept = torch.where(kept & (torch.arange(kept.shape[-1], device=kept.device) < count), sigma, 0)
    lost = float((sigma - kept).norm() / sigma.norm()) if bool(sigma.any()) else 0.0
    root = pad(kept.sqrt(), (0, count))[..., :count].unsqueeze(-2)
    # Where the product is 0, G is 0 and H is not, as in a new adapter: two zeros would remain zero in training.
    V = _directions(V, count)
    return pad(U, (0, count))[..., :count] * root, V * torch.where(root > 0, root, V.shape[-2] ** -0.5), lost


def _directions(V: Tensor, count: int) -> Tensor:
    """Return orthonormal columns, of which V are the first and the others random; more than there are come again."""
    if (lacking := min(count, V.shape[-2]) - V.shape[-1]) > 0:
        drawn = torch.randn(V.shape[-2], lacking, generator=torch.Generator().manual_seed(0), dtype=V.dtype)
        Q, _ = torch.linalg.qr(torch.cat([V, drawn.to(V.device).expand(*V.shape[:-1], lacking)], -1))
        V = torch.cat([V, Q[..., V.shape[-1] :]], -1)
    return V[..., torch.arange(count) % V.shape[-1]]


@dataclass(frozen=True)
class Method:
    """How products are merged; see :func:`quotient_manifolds.adapters.merge` for its arguments.

    Without ``energy`` every layer has the given rank, or as many columns as its factors have side by side.
    """

    name: str
    weights: Sequence[float]
    space: str = "core"
    density: float = 0.5
    rank: int | None = None
    energy: float | None = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        known = self.name in ("sum", "ties", "dare", *MANIFOLDS) and self.space in ("core", "knots")
        shares = [share for share in (self.density, self.energy) if share is not None]
        if not (known and all(isinstance(share, Real) and 0 < share <= 1 for share in shares)):
            raise ValueError(
                "method must be one of sum, ties, dare, inv, mix, space core or knots, density and energy above 0 and "
                f"at most 1, got {self}"
            )
        if self.rank is not None:
            as_count("rank", self.rank, most=2**31)

    def factors(self, parts: Sequence[Factors], whole: bool) -> tuple[Tensor, Tensor, float]:
        """Return balanced factors of the merged product, and what they lack, relative to the product.

        With ``whole`` their rank does not depend on the product.
        """
        total = sum(G.shape[-1] for G, _ in parts)
        if self.name in MANIFOLDS:
            G, H = _quotient_mean(self.name, parts, self.weights)
        else:
            G, H = signed_sum(parts, self.weights) if self.name == "sum" else self._of_entries(parts)
        del parts  # as large as what follows
        rank, svd = self.rank or total, product_svd(G, H, full=True)
        if self.energy is None:
            return truncated(svd, rank, whole=True)
        return truncated(svd, min(rank, total), self.energy, whole)

    def array(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return the sum of arrays times their weights, or what TIES and DARE make of them."""
        return self._merged([w * array for w, array in zip(self.weights, arrays, strict=True)])

    def _merged(self, arrays: Sequence[Tensor]) -> Tensor:
        if self.name not in ("ties", "dare"):
            return torch.stack([*arrays]).sum(0)
        from peft.utils.merge_utils import dare_linear, ties  # it takes seconds

        # Its own weights come after TIES has elected signs, so that it would not know of negative ones.
        return (ties if self.name == "ties" else dare_linear)([*arrays], arrays[0].new_ones(len(arrays)), self.density)

    def _of_entries(self, parts: Sequence[Factors]) -> Factors:
        """Merge entries in common bases of the products."""
        core = self.space == "core"
        found = [product_svd(w * G, H) for w, (G, H) in zip(self.weights, parts, strict=True)]
        rows = _basis([U * s.pow(0.5 if core else 1).unsqueeze(-2) for U, s, _ in found])
        columns = _basis([V * s.sqrt().unsqueeze(-2) for _, s, V in found]) if core else None
        entries = [(rows.mT @ U * s.unsqueeze(-2)) @ (V if columns is None else columns.mT @ V).mT for U, s, V in found]
        merged = self._merged(entries).mT
        return rows, merged if columns is None else columns @ merged


def signed_sum(parts: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Return factors of the sum of products with weights."""
    G = torch.cat([w * G for w, (G, _) in zip(weights, parts, strict=True)], -1)
    return G, torch.cat([H for _, H in parts], -1)


def _basis(parts: Sequence[Tensor]) -> Tensor:
    """Return the left singular vectors of matrices side by side; 0 where they have no more."""
    U, sigma, _ = torch.linalg.svd(torch.cat([*parts], -1), full_matrices=False)
    return U * present(sigma).unsqueeze(-2)


def _quotient_mean(metric: str, parts: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Return the Fréchet mean on the quotient."""
    ranks, n, m = [H.shape[-1] for _, H in parts], parts[0][0].shape[-2], parts[0][1].shape[-2]
    if len(set(ranks)) > 1:
        raise ValueError(f"a mean on the quotient needs equal ranks, not {ranks} (0: the layer is missing)")
    if ranks[0] > min(n, m) or not all(bool(present(product_svd(*part)[1]).all()) for part in parts):
        raise ValueError("a product that lacks full rank, as at B = 0, has no place on the quotient")
    points = torch.stack([torch.cat(part, -2) for part in parts])
    mean = frechet_mean(MANIFOLDS[metric](n, m), points, points.new_tensor(weights)).point
    return mean[..., :n, :], mean[..., n:, :]
