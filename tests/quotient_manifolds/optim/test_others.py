"""What belongs to no pair steps as under torch's AdamW."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from quotient_manifolds.optim import QuotientAdam
from quotient_manifolds.optim.others import adamw_, is_number
from quotient_manifolds.symmetries import factor_pair


def test_steps_are_those_of_adamw():
    torch.manual_seed(0)
    mine = [torch.randn(3, 2), torch.randn(4)]
    theirs = [torch.nn.Parameter(p.clone()) for p in mine]
    optimizer = torch.optim.AdamW(theirs, 1e-2, (0.8, 0.99), 1e-6, 0.1)
    group = {"betas": (0.8, 0.99), "eps": 1e-6, "lr": 1e-2, "weight_decay": 0.1, "foreach": None}
    state = defaultdict(dict)
    for _ in range(3):
        for p in theirs:
            p.grad = torch.randn_like(p)
        adamw_(state, group, mine, [p.grad for p in theirs])
        optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b.detach())


def test_numbers():
    assert [is_number(v) for v in (1, 0.5, torch.tensor(2.0), True, "1", torch.ones(2))] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("foreach", [None, False, True])
def test_complex_parameters_outside_pairs_move_as_by_adamw(foreach):
    torch.manual_seed(0)
    G, H = (nn.Parameter(torch.randn(n, 2)) for n in (4, 3))
    c = nn.Parameter(torch.randn(5, dtype=torch.complex128))
    other = nn.Parameter(c.detach().clone())
    target = torch.randn(5, dtype=torch.complex128)
    ours = QuotientAdam([G, H, c], [factor_pair(G, H)], lr=0.01, foreach=foreach)
    theirs = torch.optim.AdamW([other], lr=0.01, weight_decay=0.0)
    for _ in range(5):
        for optimizer, p in ((ours, c), (theirs, other)):
            optimizer.zero_grad()
            ((p - target).abs().square().sum() + (G @ H.T).square().sum()).backward()
            optimizer.step()
    torch.testing.assert_close(c, other, rtol=1e-12, atol=1e-12)
