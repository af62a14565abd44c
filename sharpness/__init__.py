"""Geodesic sharpness of transformers: the worst rise of the loss within a geodesic ball of the quotient."""

from .ascent import Search
from .direction import Direction, Profile, perturbed, profile
from .evaluation import evaluate, gradient_norm, hessian
from .hessian import HessianOperator
from .measures import MEASURES, Measure, get_measure
from .results import BatchResult, SharpnessResult
from .sam import GeodesicSAM
from .shares import LayerShare, LayerShares
from .space import WeightSpace

__all__ = [
    "MEASURES",
    "BatchResult",
    "Direction",
    "GeodesicSAM",
    "HessianOperator",
    "LayerShare",
    "LayerShares",
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
