"""Attention of torch.nn."""

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries import (
    find_symmetric_pairs,
    verify,
)

from ... import networks
from ...architectures import change


@pytest.mark.parametrize(
    "options",
    [{"kdim": 6, "vdim": 7}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}],
    ids=lambda o: next(iter(o)),
)
def test_variants_of_multihead_attention(options):
    layer = networks.shake(nn.MultiheadAttention(8, 2, batch_first=True, **options))
    k, v = torch.randn(3, 5, options.get("kdim", 8)), torch.randn(3, 5, options.get("vdim", 8))
    q = torch.randn(3, 4, 8)
    assert change(layer, lambda m: m(q, k, v)[0]) < 1e-12


@pytest.mark.parametrize("decoder", [False, True])
def test_torch_layers(decoder):
    cls = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    layer = networks.shake(cls(8, 2, 12, batch_first=True))
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    assert [p.name.split()[0] for p in find_symmetric_pairs(layer)[::4]] == ["self_attn", "multihead_attn"][
        : 1 + decoder
    ]
    report = verify(layer, x, forward=lambda m, b: m(b, memory) if decoder else m(b))
    assert max(report.changes.values()) < 1e-9
