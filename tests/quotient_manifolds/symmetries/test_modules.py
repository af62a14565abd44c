"""Looking at a model changes nothing of it; float64 all the way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quotient_manifolds.symmetries import find_symmetric_pairs, verify
from quotient_manifolds.symmetries.modules import Wide, preserve_model_state, record, widened


class Own(nn.MultiheadAttention):
    """Of a class that no handler knows."""


class Busy(nn.Module):
    """Normalises, drops out, draws, and fills and adds buffers."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.attention = nn.BatchNorm1d(5), nn.Dropout(0.5), Own(8, 2, batch_first=True)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", None)
        self.drop.training = False

    def forward(self, x):
        self.calls += 1
        self.late = torch.randn(3)
        self.register_buffer("more", torch.ones(1))
        x = self.drop(self.norm(x))
        return self.attention(x, x, x)[0]


def test_modes_buffers_and_random_numbers_are_as_they_were():
    model, x = Busy(), torch.randn(2, 5, 8)
    before, modes, random = (
        copy.deepcopy(model.state_dict()),
        [m.training for m in model.modules()],
        torch.get_rng_state(),
    )
    found = find_symmetric_pairs(model, batch=x)
    assert [str(p.group) for p in found] == ["GL(4)"] * 4
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    assert model.late is None
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in after.items())
    model(x)  # the comparison sees what a plain forward pass does
    assert not torch.equal(torch.get_rng_state(), random)
    assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])


def test_inner_modules_are_reached_where_torch_has_a_fast_path():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(1, 3, 8)
    fast = torch.backends.mha.get_fastpath_enabled()
    with preserve_model_state(layer):
        calls = record(lambda: layer(x), {"a": layer.self_attn})
        assert not layer.self_attn.training
    assert torch.equal(calls["a"][0][0], x)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert all(m.training for m in layer.modules())


class Cached(nn.MultiheadAttention):
    """Adds to its inputs what it has gathered once in evaluation mode."""

    def __init__(self):
        super().__init__(8, 2, batch_first=True)
        self.table, self.cache = nn.Parameter(torch.ones(3, 8)), {}

    def train(self, mode=True):
        self.cache = {}
        return super().train(mode)

    def forward(self, x):
        if "table" not in self.cache:
            self.cache["table"] = self.table[[0, 1, 2, 1, 0]]
        x = x + self.cache["table"]
        return super().forward(x, x, x, need_weights=False)[0]


class Keeping(Cached):
    """As the other, but nothing drops its cache."""

    def train(self, mode=True):
        return nn.Module.train(self, mode)


@pytest.mark.parametrize("kind", [Cached, Keeping])
def test_caches_with_a_graph_hinder_no_examination(kind):
    model, x = nn.Sequential(kind()).eval(), torch.randn(2, 5, 8)
    model(x)
    for _ in range(2):
        assert [p.reason for p in find_symmetric_pairs(model, batch=x)] == [""] * 4
        assert verify(model, x).ok
    assert not model[0]._forward_pre_hooks
    with torch.no_grad():
        before = model(x)
        assert torch.equal(model(x), before)


def test_casts_to_single_precision_are_left_out():
    x = torch.randn(3, 4)

    def narrow(x):
        y = F.softmax(x.float(), -1, dtype=torch.float32).to(torch.bfloat16).type(torch.float16)
        return (y + torch.arange(4, dtype=torch.float32) + torch.zeros(4).half()).to(x.dtype)

    assert (narrow(x) - x.softmax(-1) - torch.arange(4)).abs().max() > 1e-5
    torch.set_default_dtype(torch.float32)
    with Wide():
        assert torch.equal(narrow(x), x.softmax(-1) + torch.arange(4))
    assert torch.get_default_dtype() is torch.float32


def test_a_batch_is_widened():
    found = widened({"x": torch.ones(2, dtype=torch.float32, requires_grad=True), "ids": torch.arange(2)})
    assert found["x"].dtype is torch.float64
    assert not found["x"].requires_grad
    assert found["ids"].dtype is torch.int64
