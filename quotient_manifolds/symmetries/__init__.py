"""Find the weights of a network that it sees only through products: from a model to its pairs (G, H)."""

from ..batches import default_forward
from .attention import Heads, Projection, attention_pairs
from .blocks import GL, block
from .certificate import Certificate, NotASymmetryError, certify
from .discovery import apply_random_symmetry_, find_symmetric_pairs, verify
from .distance import ModelDistance, PairDistance, average_lora_, model_distance
from .lora import adapter_pairs
from .pairs import SymmetricPair, factor_pair, pair
from .registry import UnknownAttentionError, check_coverage, register_attention, skip
from .stacks import PairStack, spectra, stacks

__all__ = [
    "GL",
    "Certificate",
    "Heads",
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
