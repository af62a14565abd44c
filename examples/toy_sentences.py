"""The toy task of the examples with transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["accuracy", "sentences"]


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw sentences of 16 of 40 words, three in four from the lower 20 in one class and the upper 20 in the other."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    common = torch.rand(count, 16, generator=generator) < 0.75
    upper = common == labels.bool()[:, None]
    ids = torch.randint(20, (count, 16), generator=generator) + 20 * upper
    return [{"input_ids": row, "labels": int(label)} for row, label in zip(ids, labels, strict=True)]


def accuracy(prediction: Any) -> dict[str, float]:
    """Compute the share of right answers."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}
