import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quotient_manifolds.symmetries.whole import wiring_of
from sharpness.stream import vector_lengths
from tests.whole_networks import build


def test_rows_columns_and_tables():
    """Against sums that are written out."""
    model = build("vit")
    lengths = vector_lengths(model, wiring_of(model))
    layer = model.vit.layers[0]
    fc1, fc2, patches = layer.mlp.fc1, layer.mlp.fc2, model.vit.embeddings.patch_embeddings.projection
    for row in (0, 5):
        expected = (fc1.weight[row].square().sum() + fc1.bias[row] ** 2).sqrt()
        torch.testing.assert_close(lengths[fc1.weight].expand_as(fc1.weight)[row, 3], expected)
        torch.testing.assert_close(lengths[fc1.bias][row], expected)
    torch.testing.assert_close(lengths[fc2.weight].expand_as(fc2.weight)[2, 7], fc2.weight[:, 7].norm())
    torch.testing.assert_close(lengths[fc2.bias].expand_as(fc2.bias)[2], fc2.bias.norm())
    column = patches.weight[:, 0, 1, 2].norm()
    torch.testing.assert_close(lengths[patches.weight].expand_as(patches.weight)[4, 0, 1, 2], column)
    positions = model.vit.embeddings.position_embeddings
    torch.testing.assert_close(lengths[positions].expand_as(positions)[0, 3, 1], positions[0, 3].norm())
    assert set(lengths) == set(model.parameters())


def test_what_has_no_rows_with_biases():
    odd = nn.Sequential(nn.ConvTranspose2d(4, 2, 3), nn.LayerNorm([4, 7]), nn.Embedding(5, 3))
    lengths = vector_lengths(odd, None)
    assert all(lengths[p].expand_as(p).shape == p.shape for p in odd.parameters())


def test_other_layouts():
    conv1d, linear = Conv1D(2, 3), nn.Linear(3, 2, bias=False)
    lengths = vector_lengths(nn.Sequential(conv1d, linear), None)
    expected = torch.hypot(conv1d.weight[:, 1].norm(), conv1d.bias[1])
    torch.testing.assert_close(lengths[conv1d.weight].expand_as(conv1d.weight)[0, 1], expected)
    torch.testing.assert_close(lengths[linear.weight].expand_as(linear.weight)[1, 2], linear.weight[1].norm())
