"""Attention that no handler covers is named."""

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import (
    UnknownAttentionError,
    check_coverage,
)


class Mystery(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


class MysteryFused(Mystery):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))


class MysterySubclass(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


@pytest.mark.parametrize("module", [Mystery(), MysteryFused(), MysterySubclass(4, 2)], ids=lambda m: type(m).__name__)
def test_unknown_attention_is_named(module):
    model = nn.Sequential(nn.Linear(4, 4), module.double())
    with pytest.raises(
        UnknownAttentionError, match=rf"module '1' of class .*{type(module).__name__}.*register"
    ) as caught:
        check_coverage(model, lambda: model(torch.randn(2, 3, 4)))
    assert caught.value.path == "1"
    assert caught.value.cls is type(module)


def test_a_softmax_over_class_scores_is_no_attention():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    check_coverage(model, lambda: model(torch.randn(2, 4)))
