"""Torch optimisers on the quotient: from all equivalent factors they make the same run."""

from .create import canonicalize_lora_, create_quotient_lora_optimizer, create_quotient_optimizer
from .optimizers import QuotientAdam, QuotientMuon, QuotientSGD

__all__ = [
    "QuotientAdam",
    "QuotientMuon",
    "QuotientSGD",
    "canonicalize_lora_",
    "create_quotient_lora_optimizer",
    "create_quotient_optimizer",
]
