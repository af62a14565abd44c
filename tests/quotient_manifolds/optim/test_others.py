"""What belongs to no pair steps as under torch's AdamW."""

from collections import defaultdict

import torch

from quotient_manifolds.optim.others import adamw_, is_number


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
