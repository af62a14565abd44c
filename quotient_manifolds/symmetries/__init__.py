"""Where networks hide the GL(h) quotient: from a model to its pairs (G, H)."""

from ..batches import default_forward
from . import huggingface, torch_nn, vision  # noqa: F401  (each registers its adapters)
from .attention import Projection, attention_pairs
from .pairs import Block, Group, PairStack, SymmetricPair, block, is_sharded, pair, stack, stacks
from .registry import PairList, adapter_pairs, find_symmetric_pairs, register_attention, skip
from .spectrum import PairSpectrum, spectra
from .verify import UnknownAttentionError, Verification, apply_random_symmetry_, check_coverage, verify

__all__ = [
    "Block",
    "Group",
    "PairList",
    "PairSpectrum",
    "PairStack",
    "Projection",
    "SymmetricPair",
    "UnknownAttentionError",
    "Verification",
    "adapter_pairs",
    "apply_random_symmetry_",
    "attention_pairs",
    "block",
    "check_coverage",
    "default_forward",
    "find_symmetric_pairs",
    "is_sharded",
    "pair",
    "register_attention",
    "skip",
    "spectra",
    "stack",
    "stacks",
    "verify",
]
