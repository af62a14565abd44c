import math

import pytest
import torch
from torch.nn import functional as F

import sharpness
from sharpness import get_measure
from sharpness.ascent import auto_pgd, power
from sharpness.balls import CubeBall, RoundBall


@pytest.mark.parametrize("ascent", ["power", "apgd"])
def test_the_cube(trained, ascent):
    model, _, (x, y) = trained
    result = sharpness.evaluate(
        model,
        [(x, y)],
        measure=get_measure("adaptive", ball_norm=math.inf),
        rho=1e-5,
        steps=5,
        relative_tol=0,
        ascent=ascent,
        restarts=1,
    )
    loss = F.cross_entropy(model(x).logits, y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    slope = sum(float((g * p.detach()).abs().sum()) for g, p in zip(gradients, model.parameters(), strict=True))
    assert float(result) == pytest.approx(1e-5 * slope, rel=0.01)
    parameters = dict(model.named_parameters())
    for name, v in result.direction(0).tensors.items():
        assert float((v / parameters[name].detach()).abs().max()) <= 1e-5 * (1 + 1e-9)
    assert "ball_norm=inf" in str(result)


@pytest.mark.parametrize("ascend", [power, auto_pgd])
def test_the_cube_has_its_maximum_in_a_corner(ascend):
    g = torch.tensor([3.0, -1.0, 0.5])

    def f(x, wanted):
        return float(g @ x + 0.05 * x @ x), g + 0.1 * x

    found = ascend(f, torch.zeros(3), CubeBall(2.0), 20)
    torch.testing.assert_close(found.point, torch.tensor([2.0, -2.0, 2.0]))
    assert RoundBall(2.0).norm(found.point) > 2
