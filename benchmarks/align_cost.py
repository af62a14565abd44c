"""Time and memory of aligning two BERT-base networks (110 million parameters, float32, random weights).

Once the second is independent of the first, once a copy of it after random moves of all kinds.
"""

from __future__ import annotations

import os
import resource
import sys

import torch
from transformers import BertConfig, BertForSequenceClassification

from quotient_manifolds.symmetries import ALL, find, move_
from quotient_manifolds.symmetries.whole import align_models
from tests.support.whole_networks import random_element

from ._common import write
from .logarithm import timed


def peak() -> float:
    """Return the largest resident set so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    settings = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
    if not settings.items() <= os.environ.items():  # large blocks go back to the system at once
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})
    torch.manual_seed(0)
    one, other = (BertForSequenceClassification(BertConfig()) for _ in range(2))
    size = sum(p.numel() * p.element_size() for p in one.parameters())
    inputs, rows = peak(), []
    for what in ("independent", "a copy"):
        if what == "a copy":
            other = random_element(one, seed=1).of(one)
            move_(other, find(other, scope=ALL))
        (_, found), times = timed(lambda other=other: align_models(one, other))
        rows.append(
            {"what": what, "parameters": size // 4, **times, "distance": found.distance / found.size}
            | {"before": found.history[0] ** 0.5 / found.size, "sweeps": len(found.history) - 1}
            | ({"peak_in_models": (peak() - inputs) / size} if what == "independent" else {})
        )
    write("align_cost", rows)


if __name__ == "__main__":
    main()
