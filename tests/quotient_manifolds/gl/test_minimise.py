import numpy as np
import torch

from quotient_manifolds import GLQuotientInv
from quotient_manifolds.gl.minimise import Minimiser, softest
from quotient_manifolds.gl.path import energy, first_path
from tests.geodesics import metric, problem


@metric
def test_both_methods_find_the_geodesic(name):
    manifold, x, u = problem(name, 6, 5, 2, batch=(4,))
    u = 0.5 * u
    path = first_path(manifold.metric, 6, x, manifold.act(manifold.expmap(x, u), torch.eye(2) * 1.3), 10)
    one = Minimiser(path)
    one.run(100, 1e-6)
    two = Minimiser(one.path)
    two.newton(8, 1e-10)
    assert one.error.max() <= 1e-6 < Minimiser(path).error.max()
    assert two.error.max() <= 1e-10
    torch.testing.assert_close(two.value, manifold.inner(x, u), rtol=1e-8, atol=0)
    torch.testing.assert_close(manifold.proju(x, two.path.start_velocity()), u, rtol=1e-5, atol=1e-5)


def test_a_saddle_is_seen_and_left():
    """Beyond half a great circle a geodesic is none of the shortest: an angle of 4 in the plane of two columns."""
    manifold = GLQuotientInv(3, 3)
    x = torch.tensor([[1.0, 0, 0, 1.0, 0, 0]]).unsqueeze(-1)
    u = torch.zeros_like(x)
    u[:, 1], u[:, 4] = 4.0, 0.5
    path = first_path(manifold.metric, 3, x, manifold.expmap(x, u), 12)
    w, phi, *_ = path.rule()
    t = (torch.tensor(np.polynomial.legendre.leggauss(14)[0]) + 1) / 2
    c = torch.einsum("q,qk,bqij->bkij", w, phi, manifold.geodesic(x, u, t)[1].movedim(0, 1))[:, 1:]
    long = path.moved(torch.cat([c.flatten(1), torch.zeros(1, 1)], 1))
    value, g = energy(long)
    assert g.abs().max() < 1e-4
    least, direction = softest(long)
    assert least < -0.05
    minimiser = Minimiser(Minimiser(long).down(direction))
    minimiser.run(200, 1e-6)
    assert minimiser.value < 0.8 * value
    assert softest(minimiser.path)[0] > 0
