"""Where networks hide the GL(h) quotient: from a model to its pairs (G, H)."""

from . import huggingface, torch_nn  # noqa: F401  (each registers its adapters)
from .attention import Projection, attention_pairs
from .pairs import Block, Group, PairStack, SymmetricPair, block, stack, stacks
from .registry import PairList, find, register
from .verify import UnknownAttentionError, act_randomly_, check_coverage

__all__ = [
    "Block",
    "Group",
    "PairList",
    "PairStack",
    "Projection",
    "SymmetricPair",
    "UnknownAttentionError",
    "act_randomly_",
    "attention_pairs",
    "block",
    "check_coverage",
    "find",
    "register",
    "stack",
    "stacks",
]
