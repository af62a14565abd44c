"""Stacks of pairs as batched points."""

import copy

import torch

from quotient_manifolds.symmetries import (
    find_symmetric_pairs,
    stacks,
)

from ... import networks


def test_gather_and_scatter_are_inverse_and_differentiable():
    model = networks.vit()
    before = copy.deepcopy(model.state_dict())
    for s in stacks(find_symmetric_pairs(model)):
        x = s.gather()
        assert x.shape == (4, s.n + s.m, 8)
        assert x.requires_grad
        s.scatter_(torch.zeros_like(x))
        assert s.gather().abs().max() == 0
        s.scatter_(x)
        for p, one in zip(s.pairs, x, strict=True):
            torch.testing.assert_close(p.gather(), one)
            assert p.manifold("mix").to_matrix(one).shape == (p.n, p.m)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    # The gradient of a stack is the stack of gradients.
    s = stacks(find_symmetric_pairs(model))[0]
    (s.gather() ** 2).sum().backward()
    grads = {p: p.grad for p in s.parameters()}
    torch.testing.assert_close(s.gather(grads), 2 * s.gather().detach())


def test_stacks_of_many_layers_are_single_tensors():
    model = networks.vit(layers=3)
    found = stacks(find_symmetric_pairs(model))
    assert [len(s) for s in found] == [6, 6]
    assert sum(len(s._rows.runs) for s in found) == 3 * 7  # one view a parameter and layer, not one a head
