"""Geodesic sharpness of transformers: the worst rise of the loss within a geodesic ball of the quotient."""

from .ascent import Search
from .curvature import HessianOperator
from .direction import Direction, perturbed
from .evaluation import evaluate
from .layers import LayerShare, LayerShares
from .local import LocalBatch, LocalResult, gradient_norm, hessian
from .measures import MEASURES, Measure, get_measure
from .profiles import Profile, profile
from .results import BatchResult, SharpnessResult
from .sam import GeodesicSAM
from .space import WeightSpace

__all__ = [
    "MEASURES",
    "BatchResult",
    "Direction",
    "GeodesicSAM",
    "HessianOperator",
    "LayerShare",
    "LayerShares",
    "LocalBatch",
    "LocalResult",
    "Measure",
    "Profile",
    "Search",
    "SharpnessResult",
    "WeightSpace",
    "evaluate",
    "get_measure",
    "gradient_norm",
    "hessian",
    "perturbed",
    "profile",
]
