"""Manifolds for weights that a network sees only through a product.

``GLQuotientInv``, ``GLQuotientMix`` and ``RescaleQuotient`` are geoopt manifolds; ``quotient_manifolds.symmetries``
finds the points in a network.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import QuotientManifold, TangentSpace
    from .geodesics import GeodesicExitError
    from .manifold import GLQuotientInv, GLQuotientMix, from_matrix
    from .means import ConvergenceError, FrechetMean, frechet_mean
    from .metrics import Gauge, canonical_gauge
    from .rescale import RescaleQuotient
    from .tangent import GLTangentSpace

__all__ = [
    "ConvergenceError",
    "FrechetMean",
    "GLQuotientInv",
    "GLQuotientMix",
    "GLTangentSpace",
    "Gauge",
    "GeodesicExitError",
    "QuotientManifold",
    "RescaleQuotient",
    "TangentSpace",
    "canonical_gauge",
    "frechet_mean",
    "from_matrix",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import what only some programs use."""
    for file in (
        (".base", ".metrics", ".geodesics", ".means", ".tangent", ".manifold", ".rescale") if name in __all__ else ()
    ):
        module = import_module(file, __name__)
        if hasattr(module, name):
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what is imported later too."""
    return sorted({*globals(), *__all__})
