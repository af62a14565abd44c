"""Pairs: what makes one, and those of one's own."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.symmetries import (
    GL,
    NotASymmetryError,
    Projection,
    SymmetricPair,
    apply_random_symmetry_,
    block,
    factor_pair,
    find_symmetric_pairs,
    pair,
    verify,
)


def test_tied_and_doubled_blocks_are_errors():
    layer = nn.Linear(4, 4)
    q = Projection(layer).input_blocks(0, 2, 0, 2)
    with pytest.raises(ValueError, match="is in G and in H"):
        SymmetricPair("tied", "qk", GL(2), q, q)
    k = Projection(layer).input_blocks(1, 2, 0, 2)
    pair = SymmetricPair("twice", "qk", GL(2), q, k)
    with pytest.raises(ValueError, match="belongs to pair 'twice'"):
        find_symmetric_pairs(layer, extra=[pair, replace(pair, module="again")])
    with pytest.raises(ValueError, match="two pairs are called 'twice'; give each of yours another name"):
        find_symmetric_pairs(layer, extra=[pair, pair])
    assert find_symmetric_pairs(layer, extra=[pair])[0] == pair
    with pytest.raises(ValueError, match="acts on"):
        SymmetricPair("narrow", "qk", GL(3), q, k)
    with pytest.raises(ValueError, match="pass the reason"):
        SymmetricPair("nothing", "qk", None)


class TwoLinear(nn.Module):
    """x ↦ W₂(W₁x + b₁): the paper's Example A.2."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 4)

    def forward(self, x):
        return self.second(self.first(x))


class Diagonal(nn.Module):
    """x ↦ (u ⊙ v)ᵀ x."""

    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        return x @ (self.u * self.v)


def own_pair(model):
    if isinstance(model, Diagonal):
        return pair([block(model, "u")], [block(model, "v")], GL(6, diagonal=True), name="diagonal")
    G = [block(model.first, "weight", transpose=True), block(model.first, "bias")]
    return pair(G, [block(model.second, "weight")], GL(3), name="linear")


@pytest.mark.parametrize("cls", [TwoLinear, Diagonal])
@pytest.mark.parametrize("measure", ["geodesic-inv", "geodesic-mix"])
def test_pairs_of_ones_own(cls, measure):
    model = cls()
    x = torch.randn(20, 5 if cls is TwoLinear else 6)
    y = torch.randn_like(model(x).detach())
    p = own_pair(model)
    assert verify(model, x, extra=[p]).ok
    wrong = pair(p.G[:1], p.H, p.group, name="wrong") if cls is TwoLinear else None
    if wrong is not None:
        assert verify(model, x, extra=[wrong]).failures == ["wrong"]
    twin = copy.deepcopy(model)
    assert apply_random_symmetry_(twin, 30.0, pairs=[own_pair(twin)]) == 1
    torch.testing.assert_close(twin(x), model(x))

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def value(model, **options):
        return sharpness.evaluate(model, [(x, y)], loss, rho=0.05, **options)

    one = value(model, measure=measure, pairs=find_symmetric_pairs(model, extra=[own_pair(model)]))
    two = value(twin, measure=measure, pairs=find_symmetric_pairs(twin, extra=[own_pair(twin)]))
    assert abs(float(one) - float(two)) < 1e-8 * float(one)
    with sharpness.perturbed(model, one.direction(0)):
        assert float(loss(model, (x, y)).detach()) == pytest.approx(one.batches[0].worst_loss, rel=1e-9)
    plain = [float(value(m, measure="adaptive")) for m in (model, twin)]
    if cls is TwoLinear:
        assert abs(plain[0] - plain[1]) > 0.05 * plain[0]
    else:  # elementwise rescaling is what adaptive sharpness divides out
        assert abs(plain[0] - plain[1]) < 1e-8 * plain[0]


def test_factors_outside_networks():
    """Equivalent factors have equivalent paths under the optimiser; with AdamW they have not."""
    torch.manual_seed(0)
    target, A = torch.randn(6, 5), torch.randn(3, 3)
    start = torch.randn(6, 3), torch.randn(5, 3)
    moved = start[0] @ torch.linalg.inv(A), start[1] @ A.T
    ends = {}
    for which in ("quotient", "adamw"):
        for factors in (start, moved):
            G, H = (nn.Parameter(f.clone()) for f in factors)
            optimizer = (
                QuotientAdam([G, H], [factor_pair(G, H)], lr=0.1)
                if which == "quotient"
                else torch.optim.AdamW([G, H], lr=0.1)
            )
            for _ in range(5):
                optimizer.zero_grad()
                (G @ H.T - target).square().mean().backward()
                optimizer.step()
            ends.setdefault(which, []).append((G @ H.T).detach())
    assert torch.allclose(*ends["quotient"], atol=1e-9)
    assert not torch.allclose(*ends["adamw"], atol=1e-2)
    with pytest.raises(ValueError, match=r"matrices \(n, h\) and \(m, h\) with the same h"):
        factor_pair(nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 4)))


def test_pairs_of_different_modules_are_different_pairs():
    """A dict by pair had one entry for both; the true symmetry's residual hid that of the false one."""

    def layers(middle):
        net = nn.Sequential(nn.Linear(5, 3), middle, nn.Linear(3, 4)).double()
        G = [block(net[0], "weight", transpose=True), block(net[0], "bias")]
        return net, pair(G, [block(net[2], "weight")], GL(3))

    torch.manual_seed(0)
    (wrong, first), (right, second) = layers(nn.ReLU()), layers(nn.Identity())
    assert first != second
    assert len({first, second}) == 2
    both, x = nn.Sequential(wrong, nn.Linear(4, 5).double(), right), torch.randn(9, 5, dtype=torch.float64)
    y = torch.randint(4, (9,))
    named = [replace(first, module="first"), replace(second, module="second")]
    assert verify(both, x, extra=named).failures == ["first"]
    for pairs in (named, [first, second]):
        with pytest.raises(NotASymmetryError):
            sharpness.evaluate(both, [(x, y)], rho=0.1, steps=1, pairs=pairs)
    copied = copy.deepcopy(named)
    assert copied[0].G[0].module is not named[0].G[0].module


def test_a_pair_of_another_model_cannot_be_verified():
    layer = nn.Linear(4, 3)
    G, H = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(3, 2))
    with pytest.raises(ValueError, match="the pair 'factors' belongs to another model"):
        verify(layer, torch.randn(2, 4), extra=[factor_pair(G, H)])


def test_factors_are_real_parameters_of_one_kind():
    G, H = (nn.Parameter(torch.randn(n, 2)) for n in (4, 3))
    assert factor_pair(G, H).n == 4
    wrong = {
        "real torch.nn.Parameter": [(G.detach(), H), (nn.Parameter(G.to(torch.complex64)), H)],
        "one dtype and device": [(nn.Parameter(G.detach().half()), H)],
        "same h": [(nn.Parameter(torch.randn(4, 3)), H)],
    }
    for words, cases in wrong.items():
        for case in cases:
            with pytest.raises(ValueError, match=words):
                factor_pair(*case)
