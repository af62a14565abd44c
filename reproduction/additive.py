r"""The paper's additive relaxation of the Gram matrices, :math:`G^H G + εI`.

It serves to reproduce the paper's Figure 9: unlike the floor of :class:`quotient_manifolds.GLQuotientInv` it depends on
the representative, so nothing here is invariant along orbits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quotient_manifolds import Gauge, GLQuotientInv, GLQuotientMix, TangentSpace
from quotient_manifolds.linalg import hermitian_power, in_double, pack, standard_normal, weighted_sylvester
from quotient_manifolds.metrics import Gram, LocalMetric, Pair
from sharpness.measures import Measure
from sharpness.patches import PairPatch

__all__ = ["AdditiveMeasure", "AdditivePatch", "AdditiveTangentSpace"]


class AdditiveTangentSpace(TangentSpace):
    r"""The tangent space at x with the paper's relaxed Gram matrices.

    .. math:: \hat M = G^H G + εI, \qquad \hat N = H^H H + εI

    replace M and N in the metric and its inverses; the vertical space stays :math:`(GΛ, -HΛ^H)`.

    Parameters
    ----------
    manifold : GLQuotientInv or GLQuotientMix
    x : Tensor
        The representative, (…, n + m, h). Another representative of its orbit gives other distances.
    epsilon : float
        ε > 0, in units of squared weights.
    dtype : torch.dtype, optional
        Working precision; by default that of x. The set-up is done in float64.

    Raises
    ------
    ValueError
        ε is not positive.

    Notes
    -----
    Paper, §5.2 and Figure 9.

    Examples
    --------
    Lengths depend on the representative, here of the product 1:

    >>> import torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> from reproduction.additive import AdditiveTangentSpace
    >>> manifold, x = GLQuotientMix(1, 1), torch.tensor([[[1.0], [1.0]], [[2.0], [0.5]]])
    >>> AdditiveTangentSpace(manifold, x, 0.1).norm(x)
    tensor([1.4832, 1.5572])
    >>> manifold.norm(x, x)
    tensor([1.4142, 1.4142])
    """

    def __init__(
        self, manifold: GLQuotientInv | GLQuotientMix, x: Tensor, epsilon: float, dtype: torch.dtype | None = None
    ) -> None:
        if not epsilon > 0:
            raise ValueError(f"the additive relaxation must be positive, got {epsilon}")
        real = (x.dtype if dtype is None else dtype).to_real()
        cast = real.to_complex() if x.is_complex() else real
        self.manifold, self.x = manifold, x.to(cast)
        exact, grams = [], []
        for X in self.split(in_double(x)):
            M = X.mH @ X
            M_hat = M + epsilon * torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
            exact.append(M)
            grams.append(Gram(M_hat, torch.linalg.inv(M_hat)))
        self.sigma = torch.linalg.svdvals(hermitian_power(exact[0], 0.5) @ hermitian_power(exact[1], 0.5))
        W_G, W_H = LocalMetric.of(manifold.metric, self.split(self.x), *grams).weights
        roots, inverse_roots = ([hermitian_power(W, p) for W in (W_G, W_H)] for p in (0.5, -0.5))
        self._solve = weighted_sylvester(exact[0], exact[1], inverse_roots[1], inverse_roots[0])
        self._roots, self._inverse_roots = ([W.to(cast) for W in Ws] for Ws in (roots, inverse_roots))
        narrow = (Gram(*(X.to(cast) for X in gram)) for gram in grams)
        self._local = LocalMetric.of(manifold.metric, self.split(self.x), *narrow)

    def split(self, u: Tensor) -> Pair:
        """Split into the two factors, views (…, n, h) and (…, m, h)."""
        first, second = u.split(self.manifold.row_split(), dim=-2)
        return first, second

    def inner(self, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Compute the inner product with the relaxed weights; (…) or (…, 1, 1)."""
        result = self._local.inner(self.split(u), self.split(u if v is None else v))
        return result[..., None, None] if keepdim else result

    def proju(self, u: Tensor) -> Tensor:
        """Project on the horizontal space; shape of u."""
        # M Λ W_G + W_H Λ N = W_H ξ_Hᴴ H − Gᴴ ξ_G W_G, solved in float64
        (xi, eta), (G, H), (W_G, W_H) = self.split(u), self._local.factors, self._local.weights
        L = self._solve(in_double(W_H @ (eta.mH @ H) - G.mH @ xi @ W_G)).to(u.dtype)
        return pack(xi + G @ L, eta - H @ L.mH)

    def egrad2rgrad(self, u: Tensor) -> Tensor:
        """Turn a Euclidean gradient into the Riemannian one; shape of u."""
        return self.proju(pack(*(P @ W @ W for P, W in zip(self.split(u), self._inverse_roots, strict=True))))

    def acceleration(self, u: Tensor) -> Tensor:
        """Evaluate the geodesic equation with the relaxed inverses; shape of u."""
        (G, H), (xi, eta) = self._local.factors, self.split(u)
        (a, b), (c, d) = self._local.equations((xi, eta))
        return pack(G @ a + xi @ b, H @ c + eta @ d)

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw a horizontal vector, standard Gaussian in coordinates."""
        return self.proju(self.from_coordinates(standard_normal(tuple(self.x.shape), self.x, generator)))

    def coordinates(self, u: Tensor) -> Tensor:
        """Return coordinates in which the metric is the identity; shape of u."""
        return pack(*(X @ W for X, W in zip(self.split(u), self._roots, strict=True)))

    def from_coordinates(self, c: Tensor) -> Tensor:
        """Invert :meth:`coordinates`."""
        return pack(*(X @ W for X, W in zip(self.split(c), self._inverse_roots, strict=True)))

    def dual_coordinates(self, e: Tensor) -> Tensor:
        """Return the coordinates of a Euclidean gradient."""
        return self.from_coordinates(e)  # the roots are Hermitian

    def project_coordinates(self, c: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Project coordinates on those of horizontal vectors."""
        result = self.coordinates(self.proju(self.from_coordinates(c)))
        return result if out is None else out.copy_(result)


class AdditivePatch(PairPatch):
    """Pairs at the model's own representative; ε is the measure's ``relaxation``, and must be positive.

    Their geodesics are of second order.
    """

    def __init__(self, *arguments: Any, at_model: bool = True) -> None:
        super().__init__(*arguments, at_model=True)

    def horizontal_space(self, gauge: Gauge, x: Tensor | None) -> AdditiveTangentSpace:
        """Return the horizontal space in the relaxed metric."""
        if self.measure.geodesic == "exact":
            raise ValueError("the additive relaxation has no geodesic equation; use second-order")
        assert x is not None
        assert isinstance(self.measure, AdditiveMeasure)
        return AdditiveTangentSpace(self.stack.manifold(str(self.measure.pair_metric)), x, self.measure.relaxation)


@dataclass(frozen=True)
class AdditiveMeasure(Measure):
    """A measure whose pairs are such blocks, with ε > 0."""

    relaxation: float = 0.0
    pair_patch: ClassVar[Any] = AdditivePatch
