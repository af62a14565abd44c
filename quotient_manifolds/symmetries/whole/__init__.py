"""All continuous symmetries of a whole network: counted, moved, folded into a canonical form, verified."""

from . import language, vision
from .canonical import CanonicalForm, apply_random_moves_, canonical_form, canonicalize_, count, neuron_pairs
from .kinds import Symmetry
from .verify import WholeVerification, verify_whole
from .wiring import Affine, Neurons, Norm, Site, State, Table, Wiring, register_wiring, wiring_of

__all__ = [
    "Affine",
    "CanonicalForm",
    "Neurons",
    "Norm",
    "Site",
    "State",
    "Symmetry",
    "Table",
    "WholeVerification",
    "Wiring",
    "apply_random_moves_",
    "canonical_form",
    "canonicalize_",
    "count",
    "language",
    "neuron_pairs",
    "register_wiring",
    "verify_whole",
    "vision",
    "wiring_of",
]
