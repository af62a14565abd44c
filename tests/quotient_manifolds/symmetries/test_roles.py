"""Names of parameters, and where heads lie."""

import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries.attention import Place
from quotient_manifolds.symmetries.roles import layout_pairs, places, roles_of


class Named(nn.Module):
    def __init__(self, **widths):
        super().__init__()
        for name, width in widths.items():
            self.add_module(name, nn.Linear(8, width))


@pytest.mark.parametrize(
    ("widths", "letters"),
    [
        ({"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8}, "q k v o"),
        ({"to_q": 8, "to_kv": 16, "to_out": 8}, "q kv o"),
        ({"Wqkv": 24, "Wo": 8}, "qkv o"),
        ({"query_key_value": 24, "dense": 8}, "qkv o"),
        ({"q_lin": 8, "k_lin": 8, "v_lin": 8, "out_lin": 8, "gate": 8}, "q k v o"),
        ({"query": 8, "key": 8, "value": 8, "pos_query_proj": 8, "dense": 8}, "q k v o"),
        ({"fc1": 8, "fc2": 8}, None),
        ({"q_proj": 8, "k_proj": 8, "v_proj": 8}, None),
        ({"q": 8, "query": 8, "k": 8, "v": 8, "o": 8}, None),
    ],
    ids=str,
)
def test_names_say_the_roles(widths, letters):
    found = roles_of(Named(**widths))
    assert (None if found is None else set(found.homes.values())) == (None if letters is None else set(letters.split()))
    if "pos_query_proj" in widths:
        assert [c for c, p in found.projections.items() if p.further] == ["q"]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("order", ["qkv", "qvk"])
def test_rows_of_one_matrix(blocks, order):
    """Against the tensor of rows reshaped and split as a forward pass would."""
    heads, kv_heads, size = 4, 2, 3
    layer = Named(qkv=(heads + 2 * kv_heads) * size, o=heads * size)
    share = {"q": heads // blocks, "k": kv_heads // blocks, "v": kv_heads // blocks}
    parts = layer.qkv.weight.unflatten(0, (blocks, -1)).split([share[c] * size for c in order], dim=1)
    split = {c: part.reshape(-1, size, 8) for c, part in zip(order, parts, strict=True)}
    place = Place(heads, kv_heads, size, blocks, order)
    layer.o = nn.Linear(heads * size, 8)
    for p in layout_pairs("", roles_of(layer), place, place):
        x, g = p.gather(), p.head * kv_heads // heads
        first, second = ("q", "k") if p.kind == "qk" else ("v", None)
        assert torch.equal(x[:8].T, split[first][p.head if first == "q" else g])
        if second:
            assert torch.equal(x[9 : 9 + 8].T, split[second][g])


def test_places_try_every_divisor():
    layer = Named(q_proj=12, k_proj=6, v_proj=6)
    layer.o_proj = nn.Linear(12, 8)
    assert {(p.heads, p.kv_heads, p.size) for p in places(roles_of(layer), "qk")} == {
        (12, 6, 1), (6, 3, 2), (4, 2, 3), (2, 1, 6)
    }  # fmt: skip


class QuantLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))


def test_layers_of_other_classes_and_names():
    """I-BERT's linear layers are no subclass of torch's; CPM-Ant projects; a layer of positions belongs to the keys."""
    layer = nn.Module()
    for name in ("project_q", "project_k", "project_v", "attention_out"):
        layer.add_module(name, QuantLinear())
    layer.linear_pos = nn.Linear(8, 8, bias=False)
    found = roles_of(layer)
    assert sorted(set(found.homes.values())) == ["k", "o", "q", "v"]
    assert [p.module for p in found.projections["k"].further] == [layer.linear_pos]
    assert found.projections["q"].module is layer.project_q


def test_tensors_with_an_axis_of_heads():
    """As in XLNet: (width, heads, head size), for the positions' keys too, and a row a head added to the queries."""
    layer = nn.Module()
    for name in ("q", "k", "v", "o", "r"):
        setattr(layer, name, nn.Parameter(torch.randn(6, 2, 3)))
    layer.r_w_bias = nn.Parameter(torch.randn(2, 3))
    place = Place(2, 2, 3)
    qk, vo, *_ = layout_pairs("", roles_of(layer), place, place)
    x = qk.gather()
    assert torch.equal(x, torch.cat([layer.q[:, 0], layer.r_w_bias[:1], layer.k[:, 0], layer.r[:, 0]]))
    assert torch.equal(vo.gather(), torch.cat([layer.v[:, 0], layer.o[:, 0]]))
