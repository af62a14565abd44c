"""Torch optimisers on the quotient: from all equivalent factors they make the same run."""

from .adam import QuotientAdam
from .canonicalize import canonicalize_lora_
from .create import create_quotient_lora_optimizer, create_quotient_optimizer
from .muon import QuotientMuon
from .sgd import QuotientSGD

__all__ = [
    "QuotientAdam",
    "QuotientMuon",
    "QuotientSGD",
    "canonicalize_lora_",
    "create_quotient_lora_optimizer",
    "create_quotient_optimizer",
]
