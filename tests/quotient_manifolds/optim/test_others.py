"""What belongs to no pair steps as under torch's AdamW."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.optim.base import is_number
from quotient_manifolds.optim.places import alone, orientation, reasons
from quotient_manifolds.symmetries import SymmetricPair, adapter_pairs, factor_pair

from ...training import lora, trainable


def test_steps_are_those_of_adamw():
    torch.manual_seed(0)
    G, H, *mine = (nn.Parameter(torch.randn(size)) for size in ((4, 2), (3, 2), (3, 2), (4,)))
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    options = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(theirs, **options)
    ours = QuotientAdam([G, H, *mine], [factor_pair(G, H)], **options)
    for _ in range(3):
        for p, q in zip(theirs, mine, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        ours.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


def test_numbers():
    assert [is_number(v) for v in (1, 0.5, torch.tensor(2.0), True, "1", torch.ones(2))] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_complex_parameters_outside_pairs_move_as_by_adamw(lr):
    torch.manual_seed(0)
    G, H = (nn.Parameter(torch.randn(n, 2)) for n in (4, 3))
    c = nn.Parameter(torch.randn(5, dtype=torch.complex128))
    other = nn.Parameter(c.detach().clone())
    target = torch.randn(5, dtype=torch.complex128)
    ours = QuotientAdam([G, H, c], [factor_pair(G, H)], lr=lr)
    theirs = torch.optim.AdamW([other], lr=lr, weight_decay=0.0)
    for _ in range(5):
        for optimizer, p in ((ours, c), (theirs, other)):
            optimizer.zero_grad()
            ((p - target).abs().square().sum() + (G @ H.T).square().sum()).backward()
            optimizer.step()
    torch.testing.assert_close(c, other, rtol=1e-12, atol=1e-12)


def test_what_is_trained_alone():
    """Pairs without a group count if the optimiser has a weight of theirs that belongs to no other pair."""
    layer = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 1), "frozen": nn.MultiheadAttention(4, 1)})
    kinds = [SymmetricPair(name, "attention", None, reason=name, model=layer) for name in layer]
    own = dict.fromkeys([*layer["attention"].parameters(), layer["frozen"].in_proj_bias]).keys()
    assert alone(kinds, own) == kinds[:1]
    assert alone([replace(kinds[0], frozen=True)], own) == alone([replace(kinds[0], model=None)], own) == []
    model = lora()
    pairs = [replace(p, group=None, reason="no") for p in adapter_pairs(model)]
    assert alone(pairs, dict.fromkeys(trainable(model)).keys()) == pairs
    assert alone(pairs, dict.fromkeys(trainable(model)[:1]).keys()) == pairs[:1]
    assert reasons([*pairs, kinds[0]]) == ("no ('base_model.model.0 lora default' and 1 more); attention ('attention')")


def test_the_orientation_of_a_pair():
    G, H = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.zeros(4, 2))
    assert orientation(factor_pair(H, G)) is False
    assert orientation(factor_pair(G, H)) is True
    adapter = replace(factor_pair(G, H), kind="lora")
    G.data[:, 1] = 0
    assert orientation(adapter) is None
    with pytest.raises(ValueError, match="both factors lack full column rank"):
        orientation(replace(adapter, kind="user"))
    G.data.zero_()
    with pytest.raises(ValueError, match="both factors lack full column rank"):  # no gradient moves it
        orientation(adapter)
