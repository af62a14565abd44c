"""Adapters in canonical gauge."""

import copy

import torch

from quotient_manifolds.optim import (
    canonicalize_lora_,
)
from quotient_manifolds.symmetries import (
    adapter_pairs,
)

from ...training import (
    X,
    lora,
    moved,
)


def test_balancing_keeps_the_function_and_evens_the_factors():
    model = moved(lora())
    before = model(X)
    names = canonicalize_lora_(model)
    assert len(names) == 2
    assert torch.allclose(model(X), before, atol=1e-10)
    for p in adapter_pairs(model):
        G, H = p.gather().detach().split([p.n, p.m])
        M, N = G.T @ G, H.T @ H
        assert torch.allclose(M, N, atol=1e-10)
        assert torch.allclose(M, torch.diag(torch.diag(M)), atol=1e-10)


def test_balancing_leaves_a_fresh_adapter_alone():
    model = lora(full_rank=False)
    before = copy.deepcopy(model.state_dict())
    assert canonicalize_lora_(model) == []
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_adapters_loaded_for_inference_are_balanced():
    model, frozen = moved(lora()), moved(lora())
    frozen.requires_grad_(False)  # as PEFT loads them
    assert canonicalize_lora_(frozen) == canonicalize_lora_(model)
    assert all(torch.equal(v, frozen.state_dict()[k]) for k, v in model.state_dict().items())
