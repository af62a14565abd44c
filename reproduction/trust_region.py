"""Maximisation of a quadratic function over a ball, by the secular equation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.linalg
import scipy.optimize

__all__ = ["maximise_quadratic"]

_Array = npt.NDArray[np.float64]


def maximise_quadratic(g: _Array, H: _Array, radius: float) -> tuple[float, _Array]:
    r"""Maximise :math:`g^T b + \tfrac12 b^T H b` over :math:`\|b\| \le r`, globally.

    With the multiplier :math:`λ \ge \max(λ_{max}(H), 0)`, the maximiser solves :math:`(λI - H) b = g` and either lies
    on the sphere, :math:`\|b(λ)\| = r` (the secular equation), or inside with λ = 0.

    Parameters
    ----------
    g : array
        (d,).
    H : array
        (d, d), symmetric, of any signature.
    radius : float
        r > 0.

    Returns
    -------
    (float, array)
        The maximum and a maximiser (d,).

    Notes
    -----
    Moré and Sorensen 1983; in the hard case (g orthogonal to the top eigenspace) an eigenvector supplies the missing
    length.

    Examples
    --------
    >>> value, b = maximise_quadratic(np.array([0.0, 1.0]), np.diag([2.0, -1.0]), 1.0)
    >>> round(value, 6), np.abs(b).round(3)
    (1.166667, array([0.943, 0.333]))
    """
    values, vectors = scipy.linalg.eigh(H)
    c = vectors.T @ g
    top = values[-1]

    def at(shift: float) -> _Array:
        """Coefficients of b for λ = max(top, 0) + shift."""
        gap = max(top, 0.0) + shift - values
        return np.where(c == 0, 0.0, c / np.where(gap == 0, np.inf if shift else 1e-300, gap))

    def value(b: _Array) -> float:
        return float(c @ b + 0.5 * (values * b) @ b)

    if top < 0:
        inside = -c / values
        if np.linalg.norm(inside) <= radius:
            return value(inside), vectors @ inside
    scale = max(float(np.abs(values).max()), float(np.linalg.norm(g)) / radius, 1e-300)
    hardest = at(1e-14 * scale)
    if np.linalg.norm(hardest) < radius:  # hard case
        b = np.where(values > top - 1e-12 * scale, 0.0, hardest)
        b[-1] = np.sqrt(max(float(radius**2 - b @ b), 0.0)) * (1 if c[-1] >= 0 else -1)
    else:
        upper = np.linalg.norm(g) / radius + scale

        def excess(logarithm: float) -> float:
            return float(np.log(np.linalg.norm(at(np.exp(logarithm))) / radius))

        root = scipy.optimize.brentq(excess, np.log(1e-14 * scale), np.log(upper), xtol=1e-15, rtol=1e-14, maxiter=500)
        b = at(np.exp(root))
        b *= radius / np.linalg.norm(b)
    return value(b), vectors @ b
