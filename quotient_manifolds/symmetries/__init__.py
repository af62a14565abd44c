"""Find the weights of a network that it sees only through products: from a model to its pairs (G, H)."""

from ..batches import default_forward
from . import known  # noqa: F401  (it registers handlers)
from .attention import Projection, attention_pairs
from .averaging import average_lora_
from .blocks import GL, block
from .certificate import Certificate, NotASymmetryError, certify
from .coverage import UnknownAttentionError, check_coverage
from .distance import ModelDistance, PairDistance, model_distance
from .pairs import SymmetricPair, factor_pair, pair
from .registry import adapter_pairs, find_symmetric_pairs, register_attention, skip
from .spectrum import spectra
from .stacks import PairStack, stacks
from .verify import apply_random_symmetry_, verify

__all__ = [
    "GL",
    "Certificate",
    "ModelDistance",
    "NotASymmetryError",
    "PairDistance",
    "PairStack",
    "Projection",
    "SymmetricPair",
    "UnknownAttentionError",
    "adapter_pairs",
    "apply_random_symmetry_",
    "attention_pairs",
    "average_lora_",
    "block",
    "certify",
    "check_coverage",
    "default_forward",
    "factor_pair",
    "find_symmetric_pairs",
    "model_distance",
    "pair",
    "register_attention",
    "skip",
    "spectra",
    "stacks",
    "verify",
]
