"""Find the weights of a network that it sees only through products: from a model to its pairs (G, H)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..batches import default_forward
    from .attention import Heads, Projection, attention_pairs
    from .blocks import GL, block
    from .certificate import Certificate, NotASymmetryError, certify
    from .discovery import apply_random_symmetry_, find_symmetric_pairs, verify
    from .distance import ModelDistance, PairDistance, model_distance
    from .lora import adapter_pairs
    from .pairs import SymmetricPair, factor_pair, pair
    from .registry import UnknownAttentionError, check_coverage, register_attention, skip
    from .stacks import PairStack, spectra, stacks

    average_lora_: Any

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

#: Where the names come from, each importing no more than those before it.
_FILES = (
    *("..batches", ".blocks", ".pairs", ".stacks", ".lora", ".certificate", ".attention", ".registry", ".discovery"),
    *(".distance", "..adapters"),
)


def __getattr__(name: str) -> Any:
    """Import the file that a name comes from, and no others: most programs need few of them."""
    for file in _FILES if name in __all__ else ():
        module = import_module(file, __name__)
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
