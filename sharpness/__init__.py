"""Geodesic sharpness of transformers: the worst rise of the loss within a geodesic ball of the quotient."""

from .direction import Direction, perturbed
from .evaluation import evaluate
from .layers import LayerShare, LayerShares
from .measures import MEASURES, Measure
from .profiles import Profile, profile
from .results import BatchResult, SharpnessResult
from .sam import GeodesicSAM
from .space import WeightSpace

__all__ = [
    "MEASURES",
    "BatchResult",
    "Direction",
    "GeodesicSAM",
    "LayerShare",
    "LayerShares",
    "Measure",
    "Profile",
    "SharpnessResult",
    "WeightSpace",
    "evaluate",
    "perturbed",
    "profile",
]
