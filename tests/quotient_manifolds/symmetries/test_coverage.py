"""Attention that no handler covers is named."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import sharpness
from quotient_manifolds.symmetries import GL, UnknownAttentionError, block, check_coverage, find_symmetric_pairs, pair


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
    again = pickle.loads(pickle.dumps(caught.value))  # as a pool of processes does
    assert (str(again), again.path, again.cls) == (str(caught.value), "1", type(module))


def test_a_softmax_over_class_scores_is_no_attention():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    check_coverage(model, lambda: model(torch.randn(2, 4)))


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.three, self.mix = nn.Linear(4, 12), mix

    def forward(self, x):
        return self.mix(*self.three(x).chunk(3, -1))


def exponentials(q, k, v):
    weights = (q @ k.mT).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


MIXERS = {
    "softmax of two dimensions": lambda q, k, v: (q[0] @ k[0].T).softmax(-1) @ v[0],
    "sigmoid": lambda q, k, v: torch.sigmoid(q @ k.mT) @ v,
    "exponentials and their sum": exponentials,
    "einsum": lambda q, k, v: torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, k).relu(), v),
    "linear": lambda q, k, v: q @ (k.mT @ v),
    "transposed": lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v,
    "flex_attention": lambda q, k, v: flex_attention(q[:, None], k[:, None], v[:, None]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MIXERS)
def test_attention_without_a_softmax_of_three_dimensions(name):
    model, x = nn.Sequential(nn.Linear(4, 4), Mixing(MIXERS[name])).float(), torch.randn(2, 3, 4).float()
    with torch.no_grad(), pytest.raises(UnknownAttentionError, match="module '1'"):
        check_coverage(model, lambda: model(x))


@pytest.mark.parametrize(
    "mix",
    [
        lambda q, k, v: q[:, 0] @ k[:, 0].T,  # similarities of two towers
        lambda q, k, v: (q @ k.mT).flatten(1).softmax(-1),
        lambda q, k, v: q * k.sigmoid() + v,
    ],
)
def test_what_is_no_attention_is_let_be(mix):
    model, x = nn.Sequential(nn.Linear(4, 4), Mixing(mix)), torch.randn(2, 3, 4)
    check_coverage(model, lambda: model(x))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).numpy() for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(torch.from_numpy(np.tanh(q @ k.swapaxes(1, 2)) @ v))


def test_what_cannot_be_watched_is_said():
    model, x = nn.Sequential(Named()), torch.randn(2, 3, 4)
    with torch.no_grad(), pytest.raises(UnknownAttentionError, match="cannot be watched"):
        check_coverage(model, lambda: model(x))


def test_what_was_examined_is_covered():
    model, x = nn.Sequential(Named()), torch.randn(2, 3, 4)
    Named.forward = lambda self, x: self.o_proj(
        nn.functional.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))
    )
    found = find_symmetric_pairs(model, batch=x)
    assert [str(p.group) for p in found] == ["GL(4)", "GL(4)"]
    check_coverage(model, lambda: model(x), found)


class Attending(Named):
    def forward(self, x, cache=None):
        q = self.q_proj(x if cache is None else cache.turned(x))
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, self.k_proj(x), self.v_proj(x)))


class BesideTorch(Attending):
    def __init__(self):
        super().__init__()
        self.known = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return super().forward(self.known(x, x, x, need_weights=False)[0])


def test_a_registered_layer_says_nothing_of_what_holds_it():
    model, x = BesideTorch(), torch.randn(2, 3, 4)
    found = find_symmetric_pairs(model)
    assert len(found) == 4
    with pytest.raises(UnknownAttentionError, match="BesideTorch"):
        check_coverage(model, lambda: model(x), found)


class BySoftmax(Named):
    def __init__(self):
        super().__init__()
        self.attend = nn.Softmax(-1)

    def forward(self, x):
        return self.o_proj(self.attend(self.q_proj(x) @ self.k_proj(x).mT) @ self.v_proj(x))


def test_a_module_without_weights_is_named_by_what_holds_it():
    """To skip softmax, as the error advised, would switch the check off everywhere."""
    model, x = nn.Sequential(BySoftmax()), torch.randn(2, 3, 4)
    with pytest.raises(UnknownAttentionError, match=r"module '0' .*skip\('.*BySoftmax'\)"):
        check_coverage(model, lambda: model(x))


def test_what_no_pass_reaches_is_not_refused():
    model, x = Two(), torch.randn(2, 3, 4)
    found = find_symmetric_pairs(model, batch=x, forward=lambda m, x: m(x, cached=False, both=False))
    assert {p.reason for p in found if p.module == "two"} == {"the batch does not reach it"}
    check_coverage(model, lambda: model(x, cached=False, both=False), found)


class TurningCache:
    def turned(self, x):
        return -x


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Attending(), Attending()

    def forward(self, x, cached=True, both=True):
        x = self.one(x, TurningCache()) if cached else self.one(x)
        return self.two(x) if both else x


class NeedsCache(Attending):
    def forward(self, x, cache):
        return super().forward(cache.turned(x))


@pytest.mark.parametrize("reason", ["could not be examined alone", "the batch does not reach it"])
def test_what_was_not_examined_is_not_covered(reason):
    model, x = Two(), torch.randn(2, 3, 4)
    if "alone" in reason:
        model.one = NeedsCache()
    found = find_symmetric_pairs(model, batch=x, forward=lambda m, x: m(x, both="alone" in reason))
    assert any(p.group is not None for p in found)
    with pytest.raises(UnknownAttentionError, match=reason):
        check_coverage(model, lambda: model(x), found)


def test_pairs_of_ones_own_cover_the_module_that_holds_their_projections():
    """Whatever they are called; what a pair says of one layer is nothing of another."""

    class Model(nn.Sequential):
        pass

    model, x = Model(Attending(), Attending()), torch.randn(2, 3, 4)

    def mine(layer):
        G, H = ([block(p, "weight", transpose=True), block(p, "bias")] for p in (layer.q_proj, layer.k_proj))
        return pair(G, H, GL(4), name="mine")

    check_coverage(model, lambda: model(x), [mine(layer) for layer in model])
    with pytest.raises(UnknownAttentionError, match="module '1'"):
        check_coverage(model, lambda: model(x), [mine(model[0])])
    batch = (x, torch.randint(4, (2,)))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])

    with pytest.warns(UserWarning, match="outside of the pairs that were given, module '1' of class .*Attending"):
        found = sharpness.evaluate(model, [batch], loss, rho=0.1, steps=2, pairs=[mine(model[0])])
    assert float(found) > 0
    (remark,) = found.remarks
    assert remark.startswith("outside of the pairs that were given, module '1' of class ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharpness.evaluate(model, [batch], loss, rho=0.1, steps=2, pairs=[mine(layer) for layer in model])
    examined = sharpness.evaluate(model, [batch], loss, rho=0.1, steps=2)
    assert len(examined.direction(0).pairs) == 4
    assert examined.remarks == (
        "layers of classes without a handler were examined on the first batch: Attending (4 pairs)",
    )
