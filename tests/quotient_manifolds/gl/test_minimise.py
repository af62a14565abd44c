import torch

from quotient_manifolds import GLQuotientInv
from quotient_manifolds.gl.bent import first_path
from quotient_manifolds.gl.minimise import Minimiser
from quotient_manifolds.gl.path import Path, energy
from tests.geodesics import metric, problem


@metric
def test_the_path_of_least_energy_is_the_geodesic(name):
    manifold, x, u = problem(name, 6, 5, 2, batch=(4,))
    u = 0.5 * u
    path = first_path(manifold.metric, 6, x, manifold.act(manifold.expmap(x, u), torch.eye(2) * 1.3), 10)
    found = Minimiser(path)
    found.run(100, 1e-9)
    assert found.error.max() <= 1e-9 < Minimiser(path).error.max()
    torch.testing.assert_close(found.value, manifold.inner(x, u), rtol=1e-8, atol=0)
    torch.testing.assert_close(manifold.proju(x, found.path.start_velocity()), u, rtol=1e-6, atol=1e-6)


@metric
def test_a_path_near_the_least_follows_its_end(name):
    """The velocity changes by that of the geodesic to the moved end, although the path is no minimum."""
    manifold, x, u = problem(name, 6, 5, 2, batch=(4,))
    y = manifold.expmap(x, 0.5 * u)
    minimiser = Minimiser(first_path(manifold.metric, 6, x, y, 10))
    minimiser.run(100, 1e-3)
    before, closely = manifold.proju(x, minimiser.path.start_velocity()), Minimiser(minimiser.path)
    way = 1e-5 * torch.randn_like(x)
    way[0] = 0
    goal = torch.full((4,), 1e-3)
    goal[1] = 0.9
    after = manifold.proju(x, minimiser.follow(way, goal).start_velocity())
    expected = manifold.logmap(x, y + way) - manifold.logmap(x, y)
    change = after - before
    assert change[0].abs().max() < 1e-12
    assert (change[2:] - expected[2:]).norm() < 0.03 * expected[2:].norm()
    # An item with a goal of its own stops earlier.
    close = manifold.proju(x, closely.follow(way, goal.clamp_max(1e-3)).start_velocity()) - before
    assert (change[1] - expected[1]).norm() > 10 * (close[1] - expected[1]).norm()


def test_an_end_that_would_move_far_stays():
    """Where the first order means nothing, a step may overflow, and the geodesics of a whole batch fail with it."""
    manifold, x, u = problem("mix", 6, 5, 2, batch=(2,))
    minimiser = Minimiser(first_path(manifold.metric, 6, x, manifold.expmap(x, 0.5 * u), 4))
    before = minimiser.run(100, 1e-3)
    way = 1e-5 * torch.randn_like(x)
    way[0] *= 1e10
    after = minimiser.follow(way, torch.full((2,), 1e-3))
    assert torch.equal(after.y[0], before.y[0] + way[0])
    assert 0 < (after.y[1] - before.y[1]).norm() < 1e-3
    assert not torch.equal(after.y[1], before.y[1] + way[1])


def test_a_saddle_is_seen_and_left():
    """Beyond half a great circle a geodesic is none of the shortest: an angle of 4 in the plane of two columns."""
    manifold = GLQuotientInv(3, 3)
    x = torch.tensor([[1.0, 0, 0, 1.0, 0, 0]]).unsqueeze(-1)
    u = torch.zeros_like(x)
    u[:, 1], u[:, 4] = 4.0, 0.5
    path = first_path(manifold.metric, 3, x, manifold.expmap(x, u), 12)
    w, phi, *_, t = path.rule()
    c = torch.einsum("q,qk,bqij->bkij", w, phi, manifold.geodesic(x, u, t)[1].movedim(0, 1))[:, 1:]
    long = Path(path.metric, 3, x, path.y, c)
    value, g = energy(long)
    assert g.abs().max() < 1e-4
    least, direction = Minimiser(long).softest()
    assert least < -0.05
    minimiser = Minimiser(Minimiser(long).down(direction))
    minimiser.run(200, 1e-6)
    assert minimiser.value < 0.8 * value
    assert minimiser.softest()[0] > 0
