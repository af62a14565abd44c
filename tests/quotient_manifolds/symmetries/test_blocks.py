"""Blocks: strided views of parameters, read and written."""

import pytest
import torch
import transformers
from torch import nn

from quotient_manifolds.symmetries import (
    GL,
    Projection,
    SymmetricPair,
    block,
    find_symmetric_pairs,
)


def test_scatter_into_a_strided_parameter():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 4).T)
    assert not layer.weight.is_contiguous()
    pair = SymmetricPair("p", "qk", GL(2), (block(layer, "weight", slice(0, 2), transpose=True),),
                         (block(layer, "weight", slice(2, 4), transpose=True),))  # fmt: skip
    expected = layer.weight.detach().clone()
    x = pair.gather().detach()
    torch.testing.assert_close(x, torch.cat([expected[:2].T, expected[2:].T]))
    pair.scatter_(2 * x)
    torch.testing.assert_close(layer.weight.detach(), 2 * expected)


def test_rotary_blocks_read_planes_as_complex_numbers():
    layer = nn.Linear(3, 8, bias=False)
    for pairing, planes in (("half", [(0, 2), (1, 3)]), ("interleaved", [(0, 1), (2, 3)])):
        q = Projection(layer).input_blocks(1, 4, 0, 4, pairing)
        k = Projection(layer).input_blocks(0, 4, 0, 4, pairing)
        pair = SymmetricPair("p", "qk", GL(2, diagonal=True, field="complex"), q, k)
        x = pair.gather()
        assert x.shape == (2, 6, 1)
        for f, (a, b) in enumerate(planes):
            torch.testing.assert_close(x[f, :3, 0], torch.complex(layer.weight[4 + a], layer.weight[4 + b]))
        before = layer.weight.detach().clone()
        pair.scatter_(x.detach())
        assert torch.equal(layer.weight, before)
        # A complex scalar on G and its inverse conjugate on H leave every product g h̄ as it is.
        c = torch.randn(2, 1, 1, dtype=torch.complex128)
        pair.scatter_(pair.manifold().act(x.detach(), c))
        torch.testing.assert_close(pair.manifold().to_matrix(pair.gather()), pair.manifold().to_matrix(x))
        with torch.no_grad():
            layer.weight.copy_(before)


def test_a_block_follows_a_replaced_parameter_and_notices_another_shape():
    layer = nn.Linear(4, 4)
    pair = SymmetricPair("p", "qk", GL(2), Projection(layer).input_blocks(0, 2, 0, 2),
                         Projection(layer).input_blocks(1, 2, 0, 2))  # fmt: skip
    layer.weight = nn.Parameter(torch.ones(4, 4))
    assert pair.gather()[:4].eq(1).all()
    layer.weight = nn.Parameter(torch.ones(6, 4))
    with pytest.raises(ValueError, match="call find"):
        pair.gather()


def test_weights_that_are_computed_anew_are_told_apart():
    """The id of a temporary tensor was taken for its identity: pairs were lost, or called tied."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertModel(config)
    for layer in model.encoder.layer:
        for name in ("query", "key"):
            nn.utils.parametrizations.weight_norm(getattr(layer.attention.self, name))
    found = find_symmetric_pairs(model)
    refused = [p for p in found if p.group is None]
    assert len(refused) == 4
    assert all(p.reason.endswith("is computed, not a parameter") for p in refused), refused
    first, other = (block(layer.attention.self.query, "weight") for layer in model.encoder.layer)
    assert first.key == block(model.encoder.layer[0].attention.self.query, "weight").key != other.key
