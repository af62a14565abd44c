"""All continuous symmetries of a whole network: counted, moved, folded into a canonical form, verified."""

from .. import architectures
from ..kinds import Action
from ..layout import affine, norm
from ..wiring import Affine, Norm, Site, State, Wiring, neurons, register_wiring, wiring_of
from .align import Alignment, Element, align_models
from .canonical import CanonicalForm, apply_random_moves_, canonical_form, canonicalize_, verify_whole
from .independence import Independence, independence_test
from .units import Move

__all__ = [
    "Action",
    "Affine",
    "Alignment",
    "CanonicalForm",
    "Element",
    "Independence",
    "Move",
    "Norm",
    "Site",
    "State",
    "Wiring",
    "affine",
    "align_models",
    "apply_random_moves_",
    "architectures",
    "canonical_form",
    "canonicalize_",
    "independence_test",
    "neurons",
    "norm",
    "register_wiring",
    "verify_whole",
    "wiring_of",
]
