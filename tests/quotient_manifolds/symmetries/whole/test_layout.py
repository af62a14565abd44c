import pytest
import torch
from torch import nn

from quotient_manifolds.symmetries.whole import State, Wiring
from quotient_manifolds.symmetries.whole.layout import Layout, Sublayer, affine, has, table, wire


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks, self.last = nn.Embedding(5, 4), nn.ModuleList([Block(), Block()]), nn.LayerNorm(4)


LAYOUT = Layout("blocks", (Sublayer("norm", ("up",), "none|down", act="relu"),), "last", tables=("words",))


def test_a_stack_before_and_after_norms():
    model, head = Stack(), nn.Linear(4, 3)
    from quotient_manifolds.symmetries.whole import Affine

    before = wire(Wiring(), model, LAYOUT, [Affine(head)])
    assert [(s.name, s.readers[0].module) for s in before.sites] == [
        ("blocks.0.norm", model.blocks[0].up), ("blocks.1.norm", model.blocks[1].up), ("last", head),
    ]  # fmt: skip
    assert [w.module for _, w in before.writers] == [b.down for b in model.blocks]
    assert [n.kind for n in before.neurons] == ["relu"] * 2
    after = wire(Wiring(), model, Layout("blocks", LAYOUT.sublayers, "last", post_norm=True), [Affine(head)])
    assert [(s.norm.module, s.readers[0].module, s.carried and s.carried.module) for s in after.sites] == [
        (model.last, model.blocks[0].up, model.blocks[0].down),
        (model.blocks[0].norm, model.blocks[1].up, model.blocks[1].down),
        (model.blocks[1].norm, head, None),
    ]


def test_names():
    model = Stack()
    assert table(model, "words[1:3]").vectors(State()).shape == (2, 4)
    assert affine(model.blocks[0], "down").W is model.blocks[0].down.weight
    attention = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    assert affine(attention, "attn").W is attention["attn"].in_proj_weight
    bare = nn.ParameterDict({"proj": nn.Parameter(torch.zeros(4, 3))})
    assert affine(bare, "proj").matrix(State()).shape == (3, 4)
    assert has(model.blocks[0], "none|down")
    assert not has(model, "none|blocks.5")
    with pytest.raises(AttributeError, match="has none of"):
        affine(model, "a|b")
