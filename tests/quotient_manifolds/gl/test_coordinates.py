import pytest
import torch

from quotient_manifolds import canonical_gauge
from tests.points import MANIFOLDS, close, metrics


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_coordinates_make_the_metric_the_identity(metric, dtype):
    manifold = MANIFOLDS[metric](5, 4)
    x = manifold.random(2, 9, 3, dtype=dtype)
    space = manifold.tangent_space_at(x)
    u, e = (torch.randn(2, 9, 3, dtype=dtype) for _ in range(2))
    c = space.coordinates(u)
    close(c.abs().square().sum((-2, -1)), space.inner(u), 1e-10)
    close(space.from_coordinates(c), u, 1e-10)
    close((space.dual_coordinates(e).conj() * c).real.sum(), (e.conj() * u).real.sum(), 1e-10)
    close(space.project_coordinates(c), space.coordinates(space.proju(u)), 1e-10)


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(12, 4), (3, 12, 4)], ids=str)
def test_coordinates_to_points_and_back_at_once(metric, dtype, shape):
    """The fused forms that the ascent uses are the public operations one after the other."""
    manifold = MANIFOLDS[metric](7, 5)
    x = manifold.random(*shape, dtype=dtype)
    gauge = canonical_gauge(*manifold.unpack_tensor(x))
    for tolerance in (None, float(gauge.sigma.min() / gauge.sigma.max()) * 1.01):  # all directions, and one absent
        space = manifold.at_gauge(gauge, tolerance=tolerance)
        c, egrad = space.project_coordinates(torch.randn_like(x)), torch.randn_like(x)
        u = space.from_coordinates(c)
        torch.testing.assert_close(space.retr_coordinates(c), space.retr(u))
        u.requires_grad_()
        (slope,) = torch.autograd.grad((egrad.conj() * space.retr(u)).real.sum(), u)
        expected = 2 * space.project_coordinates(space.dual_coordinates(slope))
        torch.testing.assert_close(space.pullback_coordinates(c, egrad, 2.0), expected)
        out = torch.empty_like(c)
        assert space.retr_coordinates(c, out=out) is out
