"""float64 all the way."""

import torch
from torch.nn import functional as F

from quotient_manifolds.symmetries.modules import Wide, widened


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
