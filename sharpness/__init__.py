"""Geodesic sharpness of transformers: the worst rise of the loss within a geodesic ball of the quotient."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .critical import critical_sharpness
    from .curvature import HessianOperator
    from .direction import Direction, LayerShare, LayerShares, perturbed
    from .evaluation import evaluate
    from .measures import MEASURES, Measure, Search, get_measure
    from .measuring import direction_of
    from .monitor import measured
    from .other_statistics import average, gradient_norm, hessian
    from .results import SharpnessResult
    from .sam import GeodesicSAM
    from .space import WeightSpace
    from .spectra import Spectrum, spectrum
    from .statistic import BatchResult

__all__ = [
    "MEASURES",
    "BatchResult",
    "Direction",
    "GeodesicSAM",
    "HessianOperator",
    "LayerShare",
    "LayerShares",
    "Measure",
    "Search",
    "SharpnessResult",
    "Spectrum",
    "WeightSpace",
    "average",
    "critical_sharpness",
    "direction_of",
    "evaluate",
    "get_measure",
    "gradient_norm",
    "hessian",
    "measured",
    "perturbed",
    "spectrum",
]


def __getattr__(name: str) -> Any:
    """Import torch with the first name that needs it, which the parser of the command line does not."""
    files = (
        ".evaluation",
        ".curvature",
        ".direction",
        ".measures",
        ".monitor",
        ".other_statistics",
        ".results",
        ".sam",
        ".space",
        ".spectra",
    )
    for file in files if name in __all__ else ():
        module = import_module(file, __name__)
        if hasattr(module, name):
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what is imported later too."""
    return sorted({*globals(), *__all__})
