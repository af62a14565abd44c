import numpy as np
import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix, GLTangentSpace, canonical_gauge
from reproduction.rk4 import rk4

field = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
quotients = pytest.mark.parametrize("cls", [GLQuotientInv, GLQuotientMix])


def problem(cls, dtype=torch.float64):
    torch.manual_seed(0)
    manifold = cls(7, 5)
    x = manifold.random(12, 3, dtype=dtype)
    u = manifold.proju(x, torch.randn_like(x))
    return manifold, x, 0.3 * u / manifold.norm(x, u)


@quotients
@field
def test_runge_kutta_is_of_fourth_order(cls, dtype):
    manifold, x, u = problem(cls, dtype)
    space, exact = manifold.tangent_space_at(x), manifold.expmap(x, u)
    errors = np.array([float((rk4(space, u, k) - exact).norm()) for k in (4, 8, 16)])
    np.testing.assert_allclose(errors[:-1] / errors[1:], 16, rtol=0.15)


@quotients
def test_directions_that_the_point_lacks_stay_put(cls):
    manifold, x, _ = problem(cls)
    x[:7, 2] = 0
    space = GLTangentSpace(manifold.metric, canonical_gauge(*manifold.unpack_tensor(x)))
    u = space.from_coordinates(space.project_coordinates(0.1 * torch.randn(12, 3))).requires_grad_()
    end = rk4(space, u, 16)
    torch.testing.assert_close(end, space.geodesic(u)[0], rtol=1e-6, atol=1e-6)
    assert bool(torch.autograd.grad(end.sum(), u)[0].isfinite().all())
