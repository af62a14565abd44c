"""The GL(h) quotients as manifolds of pymanopt, whose trust regions converge faster than linearly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    from pymanopt.manifolds.manifold import Manifold
except ImportError as error:
    raise ImportError(
        "this module needs pymanopt: install the extra pymanopt, pip install '.[pymanopt]' in the checkout"
    ) from error

from .linalg import as_count
from .manifold import GLQuotientInv, GLQuotientMix
from .tangent import GLTangentSpace

__all__ = ["as_pymanopt"]

Array = np.ndarray[Any, Any]


def as_pymanopt(manifold: GLQuotientInv | GLQuotientMix, h: int) -> Manifold:
    r"""Return the points of h columns as a manifold of pymanopt, with its Hessian.

    For a function f of the product :math:`G H^T`, and horizontal vectors ξ, ζ at x,

    .. math:: \langle \mathrm{Hess} f(x)[ξ], ζ \rangle = D^2 f(x)[ξ, ζ] + D f(x)[\mathrm{acc}(ξ, ζ)],
              \qquad \mathrm{acc} = -Γ,

    where :math:`\mathrm{acc}(ξ, ξ)` is the acceleration of the geodesic with velocity ξ.

    Parameters
    ----------
    manifold : GLQuotientInv or GLQuotientMix
        Its metric is that of the gradient, the Hessian and the distance.
    h : int
        The rank, at most min(n, m).

    Returns
    -------
    pymanopt.manifolds.manifold.Manifold
        Points and tangent vectors are real NumPy arrays (n + m, h), G above H, computed with in float64; the dimension
        is (n + m − h) h. It has every method of pymanopt's class; ``retraction`` is ``manifold.retr``, ``transport``
        the projection. Random points and vectors depend on NumPy's global seed, as those of pymanopt do. The radius of
        :class:`pymanopt.optimizers.TrustRegions` is that of pymanopt, the root of the dimension.

    Raises
    ------
    ImportError
        pymanopt is missing.
    TypeError, ValueError
        Another manifold, or an h that does not fit. The methods raise for complex arrays, and for other shapes.

    Notes
    -----
    The connection of the quotient is the horizontal part of that of the total space (Absil, Mahony and Sepulchre 2008,
    §5.3.4), and a geodesic of the total space that starts horizontally stays horizontal. So the formula needs nothing
    but the acceleration, which is quadratic in ξ, and :math:`\mathrm{acc}(ξ, ·) = \tfrac12 D\,\mathrm{acc}(ξ)`.

    Examples
    --------
    The best approximation of rank 2 in a weighted norm, to the last digits:

    >>> import numpy, pymanopt, torch
    >>> from quotient_manifolds import GLQuotientMix
    >>> from quotient_manifolds.pymanopt import as_pymanopt
    >>> numpy.random.seed(0)
    >>> target, weight = torch.from_numpy(numpy.random.rand(2, 8, 6))
    >>> quotient = GLQuotientMix(8, 6)
    >>> manifold = as_pymanopt(quotient, 2)
    >>> @pymanopt.function.pytorch(manifold)
    ... def cost(x):
    ...     return (weight * (quotient.to_matrix(x) - target) ** 2).sum() / 2
    >>> trust_regions = pymanopt.optimizers.TrustRegions(min_gradient_norm=1e-9, verbosity=0)
    >>> result = trust_regions.run(pymanopt.Problem(manifold, cost))
    >>> result.point.shape, bool(result.gradient_norm < 1e-9)
    ((14, 2), True)
    """
    if not isinstance(manifold, GLQuotientInv | GLQuotientMix):
        given = manifold.__name__ if isinstance(manifold, type) else type(manifold).__name__
        raise TypeError(f"as_pymanopt needs a GLQuotientInv(n, m) or a GLQuotientMix(n, m), got {given}")
    return _Quotient(manifold, as_count("as_pymanopt: h", h, most=min(manifold.n, manifold.m) + 1))


class _Quotient(Manifold):
    """The methods of pymanopt's interface, which documents them."""

    def __init__(self, manifold: GLQuotientInv | GLQuotientMix, h: int) -> None:
        self._manifold, self._shape = manifold, (manifold.n + manifold.m, h)
        self._last: GLTangentSpace | None = None
        super().__init__(f"{manifold} with {h} columns", (manifold.n + manifold.m - h) * h)

    def _tensor(self, value: Any) -> Tensor:
        """Return a copy in double precision."""
        if isinstance(value, (Tensor, tuple, list)):
            raise TypeError(
                f"{self}: points and vectors for pymanopt are NumPy arrays, got a {type(value).__name__}; "
                "for a tensor pass x.numpy(), for factors numpy.concatenate([G, H])"
            )
        array = np.asarray(value)
        if array.dtype.kind not in "fiu":
            raise TypeError(
                f"{self}: points and vectors for pymanopt are real arrays, got {array.dtype}; "
                "for complex ones use the optimisers of geoopt"
            )
        if array.shape != self._shape:
            raise ValueError(f"{self}: points and vectors have the shape {self._shape}, got {array.shape}")
        return torch.from_numpy(np.array(array, dtype=np.float64, order="C"))

    def _at(self, point: Array) -> Any:
        """Return the tangent space, with the point factorised once for all vectors at it."""
        x = self._tensor(point)
        if self._last is None or not torch.equal(self._last.x, x):
            self._last = self._manifold.tangent_space_at(x)
        return self._last

    # -- tangent vectors -------------------------------------------------------------------------------------------

    def inner_product(self, point: Array, tangent_vector_a: Array, tangent_vector_b: Array) -> float:
        return float(self._at(point).inner(self._tensor(tangent_vector_a), self._tensor(tangent_vector_b)))

    def norm(self, point: Array, tangent_vector: Array) -> float:
        return float(self._at(point).norm(self._tensor(tangent_vector)))

    def projection(self, point: Array, vector: Array) -> Array:
        return self._at(point).proju(self._tensor(vector)).numpy()

    to_tangent_space = projection

    def zero_vector(self, point: Array) -> Array:
        return np.zeros(self._shape)

    # -- derivatives -----------------------------------------------------------------------------------------------

    def euclidean_to_riemannian_gradient(self, point: Array, euclidean_gradient: Array) -> Array:
        return self._at(point).egrad2rgrad(self._tensor(euclidean_gradient)).numpy()

    def euclidean_to_riemannian_hessian(
        self, point: Array, euclidean_gradient: Array, euclidean_hessian: Array, tangent_vector: Array
    ) -> Array:
        space, u = self._at(point), self._tensor(tangent_vector).requires_grad_()
        with torch.enable_grad():
            acceleration = space.acceleration(u)
        (correction,) = torch.autograd.grad(acceleration, u, self._tensor(euclidean_gradient) / 2)
        return space.egrad2rgrad(self._tensor(euclidean_hessian) + correction).numpy()

    # -- between points --------------------------------------------------------------------------------------------

    def retraction(self, point: Array, tangent_vector: Array) -> Array:
        space = self._at(point)
        return space.retr(space.proju(self._tensor(tangent_vector))).numpy()

    def exp(self, point: Array, tangent_vector: Array) -> Array:
        return self._manifold.expmap(self._tensor(point), self._tensor(tangent_vector)).numpy()

    def log(self, point_a: Array, point_b: Array) -> Array:
        return self._manifold.logmap(self._tensor(point_a), self._tensor(point_b)).numpy()

    def dist(self, point_a: Array, point_b: Array) -> float:
        return float(self._manifold.dist(self._tensor(point_a), self._tensor(point_b)))

    def transport(self, point_a: Array, point_b: Array, tangent_vector_a: Array) -> Array:
        return self.projection(point_b, tangent_vector_a)

    def pair_mean(self, point_a: Array, point_b: Array) -> Array:
        return self.exp(point_a, self.log(point_a, point_b) / 2)

    # -- at random -------------------------------------------------------------------------------------------------

    def random_point(self) -> Array:
        return np.random.standard_normal(self._shape)

    def random_tangent_vector(self, point: Array) -> Array:
        seed = int(np.random.randint(2**31))
        vector = self._at(point).random(torch.Generator().manual_seed(seed)).numpy()
        return vector / self.norm(point, vector)
