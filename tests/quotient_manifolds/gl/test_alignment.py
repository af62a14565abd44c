import numpy as np
import scipy.optimize
import torch

from tests.geodesics import METRICS, metric


@metric
def test_align_finds_the_nearest_representative(name):
    torch.manual_seed(2)
    manifold = METRICS[name](6, 5)
    x = manifold.random(11, 2)
    y = manifold.act(x + 0.2 * torch.randn_like(x), torch.randn(2, 2))
    found = manifold.align(x, y)
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
