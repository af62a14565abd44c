"""What a network does not see of its weights: from a model to its symmetries, a value of names and numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..passes import default_forward
from .certificate import Certificate
from .found import Symmetries, certify
from .lora import adapter_pairs, lora_pairs_by_name
from .own import factor_pair, pair
from .pairs import PairStack, SymmetricPair, stacks
from .refusals import Cause, NotASymmetryError, Refusal, UnknownAttentionError
from .slots import GL, Slot, slot

if TYPE_CHECKING:
    from .attention import check_coverage
    from .discovery import ALL, find
    from .exchange import from_json, to_json
    from .folding import CanonicalForm, canonical_form
    from .handlers import attention_pairs, register_attention, skip
    from .moves import canonicalize_, move_, moved_weights, verify
    from .parameters import manifold_parameters_, plain_parameters_
    from .roles import Heads, Projection


__all__ = [
    "ALL",
    "GL",
    "CanonicalForm",
    "Cause",
    "Certificate",
    "Heads",
    "ModelDistance",
    "NotASymmetryError",
    "PairDistance",
    "PairStack",
    "Projection",
    "Refusal",
    "Slot",
    "SymmetricPair",
    "Symmetries",
    "UnknownAttentionError",
    "adapter_pairs",
    "attention_pairs",
    "canonical_form",
    "canonicalize_",
    "certify",
    "check_coverage",
    "default_forward",
    "factor_pair",
    "find",
    "from_json",
    "lora_pairs_by_name",
    "manifold_parameters_",
    "model_distance",
    "move_",
    "moved_weights",
    "pair",
    "plain_parameters_",
    "register_attention",
    "skip",
    "slot",
    "stacks",
    "to_json",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import what only some programs use: optimisers of adapters do without the classes of attention."""
    later = ("attention", "handlers", "roles", "discovery", "parameters", "exchange", "folding", "moves")
    files = (*(f".{name}" for name in later), "..compare")
    for file in files if name in __all__ else ():
        module = import_module(file, __name__)
        if hasattr(module, name):
            return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what is imported later too."""
    return sorted({*globals(), *__all__})
