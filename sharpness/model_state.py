"""Measuring has no side effects: weights, modes, buffers, random state and global settings are restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from quotient_manifolds.symmetries import modules

__all__ = ["preserve_model_state"]

T = TypeVar("T")

#: Attributes of modules that are False during a measurement. With the first, bitsandbytes packs a layer's 4-bit
#: weights for inference in the first pass that needs no gradient of its input: after that nothing can be differentiated
#: through the layer, and its old weights no longer fit. With the second, gradients are sparse and have no derivatives.
_SWITCHES: dict[str, tuple[type, ...]] = {
    "support_avx512bf16_for_cpu": (nn.Module,),
    "sparse": (nn.Embedding, nn.EmbeddingBag),
}


def preserve_model_state(model: nn.Module, work: Callable[[], T]) -> T:
    """Do some work with a model in evaluation mode and gradients on, then restore everything.

    An interrupt during the clean-up is raised after it, and the interrupted step is repeated.
    """
    state = modules.preserve_model_state(model, _SWITCHES)
    with state, state, torch.inference_mode(False), torch.enable_grad():
        return work()
