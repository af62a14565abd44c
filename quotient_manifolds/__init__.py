"""Manifolds for weights that a network sees only through a product.

``GLQuotientInv``, ``GLQuotientMix`` and ``RescaleQuotient`` are geoopt manifolds; ``quotient_manifolds.symmetries``
finds the points in a network.
"""

from .base import QuotientManifold, TangentSpace
from .gauge import Gauge, canonical_gauge, from_product
from .geodesics import GeodesicExitError
from .gl import GLQuotientInv, GLQuotientMix
from .gl_tangent import GLTangentSpace
from .logarithm import ConvergenceError
from .rescale import RescaleQuotient

__all__ = [
    "ConvergenceError",
    "GLQuotientInv",
    "GLQuotientMix",
    "GLTangentSpace",
    "Gauge",
    "GeodesicExitError",
    "QuotientManifold",
    "RescaleQuotient",
    "TangentSpace",
    "canonical_gauge",
    "from_product",
]
__version__ = "0.1.0"
