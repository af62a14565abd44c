"""All continuous symmetries of a whole network: counted, moved, folded into a canonical form, verified."""

from . import architectures
from .canonical import CanonicalForm, apply_random_moves_, canonical_form, canonicalize_, verify_whole
from .kinds import Symmetry
from .layout import affine, norm
from .wiring import Affine, Norm, Site, State, Wiring, neuron_pairs, neurons, register_wiring, wiring_of

__all__ = [
    "Affine",
    "CanonicalForm",
    "Norm",
    "Site",
    "State",
    "Symmetry",
    "Wiring",
    "affine",
    "apply_random_moves_",
    "architectures",
    "canonical_form",
    "canonicalize_",
    "neuron_pairs",
    "neurons",
    "norm",
    "register_wiring",
    "verify_whole",
    "wiring_of",
]
