"""What is seen of a pass: how roughly it computes, whether it hides weights from autograd, and why it failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from quotient_manifolds.linalg import differentiated
from quotient_manifolds.passes import eager, floats, tensors
from quotient_manifolds.weights import plain_class

from .batches import IGNORED


class _Roughest(TorchFunctionMode):
    """Note the largest rounding error of the numbers that a pass computes."""

    eps = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.eps = max(self.eps, *(torch.finfo(t.dtype).eps for t in floats(result)), 0.0)
        return result


def computed_in(run: Callable[[], Any]) -> float:
    """Return the rounding error of the roughest numbers that a pass computes: it may cast the weights, or autocast."""
    with eager(), _Roughest() as seen:
        run()
    return seen.eps


class Reentrant(TorchFunctionMode):
    """Note a reentrant checkpoint behind which autograd sees no weights, because its inputs need no gradient."""

    hidden = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = None if self.hidden else sys._getframe(1)  # noqa: SLF001
        while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
            frame = frame.f_back
        if frame is not None:
            self.hidden = not differentiated(*tensors(frame.f_locals["args"]))
        return func(*args, **(kwargs or {}))


def explain(error: Exception, model: nn.Module) -> None:
    """Raise what says which rows an embedding lacks, or which labels are beyond the classes, if an error means that."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if isinstance(error, IndexError) else None):
        if frame.f_code is F.cross_entropy.__code__:
            scores, labels = frame.f_locals["input"], frame.f_locals["target"]
            found = labels[labels != IGNORED]
            raise ValueError(
                f"the labels go from {int(found.min())} to {int(found.max())}, but the classes of "
                f"{plain_class(model).__name__} from 0 to {scores.shape[1] - 1}; number them so ({IGNORED} marks "
                "labels that do not count)"
            ) from error
        if frame.f_code is F.embedding.__code__:
            ids, table = frame.f_locals["input"], frame.f_locals["weight"]
            path = next((name for name, p in model.named_parameters() if p is table), "an embedding")
            raise ValueError(
                f"rows {int(ids.min())} to {int(ids.max())} of {path} are asked for, but {plain_class(model).__name__} "
                f"has {len(table)} of them; use its own tokenizer, and inputs that are no longer than it has positions"
            ) from error
