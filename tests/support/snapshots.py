"""Everything of a model that a measurement must leave alone."""

import torch

from tests.support import networks


def snapshot(model):
    """Everything that a measurement must leave alone."""
    return {
        "data": {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "grad": {n: (None if p.grad is None else (id(p.grad), p.grad.clone())) for n, p in model.named_parameters()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "rng": torch.get_rng_state(),
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "grad_mode": torch.is_grad_enabled(),
    }


def assert_same(one, two):
    assert one.keys() == two.keys()
    for key in one:
        a, b = one[key], two[key]
        if isinstance(a, dict):
            assert_same(a, b)
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, b), key
        elif isinstance(a, tuple):
            assert a[0] == b[0], key
            assert torch.equal(a[1], b[1]), key
        else:
            assert a == b, key


MODELS = {
    "vit": (networks.vit, networks.images),
    "bert": (networks.bert, networks.text),
    "encoder": (lambda: networks.shake(networks.Encoder()), networks.tokens),
}


GEODESIC = ["geodesic-inv", "geodesic-mix"]


ALL = [*GEODESIC, "adaptive", "euclidean"]
