"""How a whole network is wired, and networks in the coordinates of others: aligned, compared, told apart."""

from .. import architectures
from ..actions import Action, State
from ..folding import wiring_of
from ..layout import affine, norm
from ..wiring import Affine, Norm, Site, Wiring, neurons, register_wiring
from .align import Alignment, Element, align_models
from .independence import Independence, independence_test
from .rewriting import Rewriting, rewriting
from .units import Move

__all__ = [
    "Action",
    "Affine",
    "Alignment",
    "Element",
    "Independence",
    "Move",
    "Norm",
    "Rewriting",
    "Site",
    "State",
    "Wiring",
    "affine",
    "align_models",
    "architectures",
    "independence_test",
    "neurons",
    "norm",
    "register_wiring",
    "rewriting",
    "wiring_of",
]
