import numpy as np
import pytest
import scipy.optimize
import torch

from reproduction.alignment import align
from tests.support.geodesics import METRICS, field, metric


@metric
def test_align_finds_the_nearest_representative(name):
    torch.manual_seed(2)
    manifold = METRICS[name](6, 5)
    x = manifold.random(11, 2)
    y = manifold.act(x + 0.2 * torch.randn_like(x), torch.randn(2, 2))
    found = align(manifold, x, y)
    torch.testing.assert_close(manifold.to_matrix(found), manifold.to_matrix(y))
    value = float(manifold.norm(x, found - x))

    def distance(a):
        z = manifold.act(found, torch.eye(2) + torch.tensor(a).view(2, 2))
        return float(manifold.norm(x, z - x))

    best = min(
        scipy.optimize.minimize(distance, start, method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}).fun
        for start in (np.zeros(4), np.array([0.1, -0.2, 0.1, 0.3]))
    )
    assert value <= best + 1e-9
    assert float(manifold.norm(x, y - x)) > 1.5 * value


@metric
@field
@pytest.mark.parametrize(("n", "m", "h", "spread"), [(33, 32, 8, 1), (6, 5, 2, 1e3), (4, 4, 4, 10), (9, 7, 1, 1)])
def test_align_reaches_a_minimum_between_independent_points(name, dtype, n, m, h, spread):
    """Heads of networks that were trained apart: Gauss and Newton's steps alone do not get there."""
    manifold = METRICS[name](n, m)
    scale = spread ** torch.linspace(0, -0.5, h)
    x, y = (
        manifold.act(manifold.canonical(manifold.random(6, n + m, h, dtype=dtype)) * scale, A)
        for A in torch.randn(2, 6, h, h, dtype=dtype)
    )
    found = align(manifold, x, y)
    torch.testing.assert_close(manifold.to_matrix(found), manifold.to_matrix(y), rtol=1e-6, atol=1e-6)
    to_gauge = manifold.tangent_space_at(x).to_gauge
    space, L = manifold.tangent_space_at(manifold.canonical(x)), torch.randn(50, 6, h, h, dtype=dtype)

    def squares(step):
        """In the gauge of x: f(e^{±sΛ}) for random Λ of length 1."""
        exponent = step * L / torch.linalg.matrix_norm(L)[..., None, None]
        there = torch.cat(to_gauge(found), -2).split([n, m], -2)
        A = torch.linalg.matrix_exp(exponent)
        moved = torch.cat([there[0] @ A, there[1] @ torch.linalg.inv(A).mH], -2)
        return space.inner(moved - space.x)

    least, plus, minus = squares(0.0), squares(1e-4), squares(-1e-4)
    first, second = (plus - minus) / 2e-4, (plus + minus - 2 * least) / 1e-8
    assert second.min() > 0
    assert (first**2 / (2 * second) / least).max() < 1e-9  # by how much a step along Λ could shorten it
    assert (least[0] <= space.inner(torch.cat(to_gauge(manifold.canonical(y)), -2) - space.x)).all()
