"""Gradient descent on the quotient against its formula."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from quotient_manifolds.optim import QuotientSGD
from quotient_manifolds.symmetries import GL, block, pair


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_first_step(scale, nesterov):
    up, down = nn.Linear(3, 6, bias=False), nn.Linear(5, 3, bias=False)
    p = replace(pair([block(up, "weight")], [block(down, "weight", transpose=True)], GL(3)), scale=scale)
    G, H = p.gather().detach().split([6, 5])
    W = scale**2 * H.T @ H, scale**2 * G.T @ G + torch.linalg.inv(H.T @ H)
    optimizer = QuotientSGD([up.weight, down.weight], [p], 0.1, 0.9, 0.5, nesterov=nesterov)
    (up.weight @ down.weight).sin().sum().backward()
    optimizer.step()
    D = (G @ H.T).cos()
    for X, gradient, weight, found in ((G, D @ H, W[0], up.weight), (H, D.T @ G, W[1], down.weight.T)):
        step = (1.9 if nesterov else 1.0) * gradient @ torch.linalg.inv(weight)
        torch.testing.assert_close(found.detach(), (1 - 0.1 * 0.5) ** 0.5 * X - 0.1 * step)
