import torch

from quotient_manifolds.gl.gauge import canonical_gauge
from tests.geodesics import METRICS, field, metric, problem


@field
def test_cone_identity_of_mix(dtype):
    manifold, x, u = problem("mix", dtype=dtype)
    (G, H), (xi, eta) = manifold.unpack_tensor(x), manifold.unpack_tensor(u)
    t = torch.linspace(-1, 1, 9)
    found = manifold.to_matrix(manifold.geodesic(x, u, t)[0]).abs().square().sum((-2, -1))
    X0, slope = G @ H.mH, xi @ H.mH + G @ eta.mH
    expected = X0.abs().square().sum() + 2 * t * (X0.conj() * slope).real.sum() + 2 * t**2 * manifold.inner(x, u)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@metric
def test_directions_that_the_point_lacks_stay_put(name):
    manifold, x, _ = problem(name, 7, 5, 3)
    lacking = x.clone()
    lacking[:7, 2] = 0
    space = manifold.at_gauge(canonical_gauge(*manifold.unpack_tensor(lacking)))
    assert not bool(space.present[2])
    u = space.from_coordinates(space.project_coordinates(0.1 * torch.randn(12, 3)))
    end = space.expmap(u)
    # The same as the point of rank 2.
    smaller = METRICS[name](7, 5)
    two = smaller.at_gauge(canonical_gauge(lacking[:7, :2], lacking[7:, :2]))
    reference = smaller.to_matrix(two.expmap(u[:, :2] * torch.sign((space.x[:, :2] * two.x).sum(0))))
    torch.testing.assert_close(manifold.to_matrix(end), reference, rtol=1e-9, atol=1e-9)
