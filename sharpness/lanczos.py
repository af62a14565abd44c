"""Lanczos' method on the horizontal space of a model's weights: the largest eigenvalues, and a spectral density."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from torch import Tensor

from quotient_manifolds.linalg import finite

from .space import WeightSpace

#: Relative accuracy of eigenvalues.
_TOLERANCE = 1e-4
#: Random vectors and steps of a density.
_STARTS, _STEPS = 3, 32


class Products:
    """Products with a matrix, counted; as an operator of scipy it is −``shift`` off the horizontal space."""

    def __init__(self, space: WeightSpace, product: Callable[[Tensor], Tensor], bar: Any) -> None:
        self.space, self.product, self.bar, self.number = space, product, bar, 0

    def __call__(self, v: Tensor) -> Tensor:
        """Multiply a vector, (dim,)."""
        self.number += 1
        self.bar.update()
        found = self.product(v)
        if not finite(found):
            raise ValueError("a product with the matrix has NaN or infinite entries; the loss has no such derivative")
        return found

    def shifted(self, shift: float) -> scipy.sparse.linalg.LinearOperator:
        """Return the operator of scipy."""
        space = self.space
        dtype = np.float64 if space.dtype == torch.float64 else np.float32

        def product(v: np.ndarray) -> np.ndarray:
            x = torch.as_tensor(np.ascontiguousarray(v).reshape(-1), dtype=space.dtype).to(space.device)
            found = self(x)
            if shift:
                found.sub_(x - space.project(x), alpha=shift)
            return found.cpu().numpy()

        return scipy.sparse.linalg.LinearOperator((space.dim, space.dim), product, dtype=dtype)


def largest(matrix: Products, k: int, seed: int) -> tuple[float, ...]:
    """Find the k largest eigenvalues on the horizontal space."""
    start = matrix.space.random(torch.Generator().manual_seed(seed))
    if not bool(start.any()):
        raise ValueError("there is no direction to move in: all trainable weights are zero or in pairs of rank 0")
    if not bool(matrix(start).any()):
        return (0.0,) * min(k, matrix.space.dim)  # only zero has a random vector in its kernel
    v0 = start.cpu().numpy()
    found = _eigenvalues(matrix.shifted(0.0), v0, k)
    if found[-1] > _TOLERANCE * found[0] > 0:
        return tuple(found.tolist())
    # Vectors off the horizontal space have the eigenvalue 0, which may be above some in it: move it below all.
    bound = 2 * float(np.abs(_eigenvalues(matrix.shifted(0.0), v0, 1, which="LM")).max())
    found = _eigenvalues(matrix.shifted(bound), v0, k)
    return tuple(found[found > -0.75 * bound].tolist())


def _eigenvalues(
    operator: scipy.sparse.linalg.LinearOperator, start: np.ndarray, k: int, which: str = "LA"
) -> np.ndarray:
    """Return the k largest eigenvalues, in descending order; all of a small matrix."""
    dim = operator.shape[0]
    if dim <= max(2 * k + 1, 20):  # as many vectors as Lanczos' method takes
        return np.linalg.eigvalsh(operator.matmat(np.eye(dim, dtype=operator.dtype)))[::-1][
            : k if which == "LA" else dim
        ]
    found = scipy.sparse.linalg.eigsh(operator, k, which=which, v0=start, tol=_TOLERANCE, return_eigenvectors=False)
    return np.sort(found)[::-1]


def spectral_density(matrix: Products, seed: int) -> tuple[tuple[float, float], ...]:
    """Return points and weights of Gauss quadrature by Lanczos' method, from random horizontal vectors."""
    generator, points = torch.Generator().manual_seed(seed), list[tuple[float, float]]()
    for _ in range(_STARTS):
        nodes, weights = _quadrature(matrix, matrix.space.random(generator))
        points += zip(nodes.tolist(), (weights / _STARTS).tolist(), strict=True)
    return tuple(sorted(points))


def _quadrature(matrix: Callable[[Tensor], Tensor], start: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights with Σ w λᵖ = xᵀAᵖx / xᵀx for p < 2 · steps, without orthogonalising again."""
    x, before, diagonal, beside = start / start.norm(), torch.zeros_like(start), list[float](), list[float]()
    for _ in range(_STEPS):
        y = matrix(x)
        if beside:
            y = y - beside[-1] * before
        diagonal.append(float(x @ y))
        y = y - diagonal[-1] * x
        size = float(y.norm())
        if size <= 10 * torch.finfo(x.dtype).eps * max(map(abs, diagonal)):
            break  # the vectors so far span an invariant subspace
        beside.append(size)
        before, x = x, y / size
    nodes, vectors = scipy.linalg.eigh_tridiagonal(diagonal, beside[: len(diagonal) - 1])
    return nodes, vectors[0] ** 2
