import geoopt
import pytest
import torch

from quotient_manifolds import GeodesicExitError, GLQuotientInv, GLQuotientMix, RescaleQuotient

metrics = pytest.mark.parametrize("metric", ["inv", "mix"])


def point():
    return torch.tensor([[0.5, -2.0, 1.5], [-1.0, 0.7, 3.0]])


@metrics
def test_agrees_with_the_gl1_quotient_of_every_coordinate(metric):
    rescale = RescaleQuotient(metric)
    gl = {"inv": GLQuotientInv, "mix": GLQuotientMix}[metric](1, 1)
    x, u, v = point(), torch.randn(2, 3), torch.randn(2, 3)

    def columns(t):
        return t.T.unsqueeze(-1)  # three points of shape (1 + 1, 1)

    for name in ("proju", "egrad2rgrad", "acceleration", "retr"):
        mine, theirs = getattr(rescale, name)(x, u), getattr(gl, name)(columns(x), columns(u))
        torch.testing.assert_close(columns(mine), theirs)
    torch.testing.assert_close(rescale.inner(x, u, v), gl.inner(columns(x), columns(u), columns(v)).sum())
    torch.testing.assert_close(columns(rescale.canonical(x)), gl.canonical(columns(x)))
    torch.testing.assert_close(rescale.to_matrix(x), gl.to_matrix(columns(x)).flatten())


@metrics
def test_exponential_logarithm_and_distance(metric):
    manifold = RescaleQuotient(metric)
    x = point()
    B = torch.tensor([0.3, -0.2, 0.4])
    u = x * B
    beta, time = manifold.to_matrix(x), 0.7
    y = manifold.expmap(x, time * u)
    expected = beta * (2 * B * time).exp() if metric == "inv" else beta * (1 + 2 * B * time)
    torch.testing.assert_close(manifold.to_matrix(y), expected)
    torch.testing.assert_close(manifold.logmap(x, y), time * u)
    torch.testing.assert_close(manifold.dist(x, y), manifold.norm(x, time * u))
    alpha = torch.tensor([3.0, -0.2, 5.0])
    moved = manifold.act(y, alpha)
    torch.testing.assert_close(manifold.dist(x, moved), manifold.dist(x, y))
    torch.testing.assert_close(manifold.to_matrix(manifold.expmap(x, manifold.logmap(x, moved))), manifold.to_matrix(y))


@metrics
def test_exponential_solves_the_geodesic_equation(metric):
    manifold = RescaleQuotient(metric)
    x = point()
    u = x * torch.tensor([0.3, -0.2, 0.4])

    def curve(t):
        return manifold.expmap(x, t * u)

    t = torch.tensor(0.6)
    velocity = torch.func.jacfwd(curve)
    torch.testing.assert_close(torch.func.jacfwd(velocity)(t), manifold.acceleration(curve(t), velocity(t)))


@metrics
def test_retraction_is_of_second_order(metric):
    manifold = RescaleQuotient(metric)
    x = point()
    u = x * torch.tensor([0.3, -0.2, 0.4])
    errors = [(manifold.retr(x, t * u) - manifold.expmap(x, t * u)).abs().max() for t in (0.02, 0.01)]
    assert abs(float(torch.log2(errors[0] / errors[1])) - 3) < 0.1


def test_mix_says_when_it_leaves_the_manifold():
    manifold = RescaleQuotient("mix")
    x = point()
    u = x * torch.tensor([0.3, -0.8, 0.4])
    with pytest.raises(GeodesicExitError, match=r"leaves the manifold at t = 0.625") as caught:
        manifold.expmap(x, u)
    assert caught.value.time == pytest.approx(1 / 1.6)
    assert manifold.expmap(x, 0.62 * u).isfinite().all()
    assert manifold.retr(x, u).isfinite().all()  # silent, as optimisers need
    many = torch.stack([0.5 * u, u, -u, 0.1 * u])
    with pytest.raises(GeodesicExitError, match=r"t = 0.625, .*\(3 of 4 in the batch do\)") as caught:
        manifold.geodesic(x.expand_as(many), many, torch.tensor([0.5, 2.0]))
    assert caught.value.times.tolist() == pytest.approx([1.25, 0.625, 1.25, torch.inf])
    RescaleQuotient("inv").expmap(x, u)


@metrics
def test_random_vectors_are_horizontal_standard_gaussians(metric):
    manifold = RescaleQuotient(metric)
    space = manifold.tangent_space_at(point().expand(5000, 2, 3))
    u = space.random(torch.Generator().manual_seed(0))
    torch.testing.assert_close(space.proju(u), u)
    assert abs(space.inner(u).mean() - 3) < 5 * (6 / 5000) ** 0.5


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="metric must be"):
        RescaleQuotient("euclidean")
    manifold = RescaleQuotient("inv")
    with pytest.raises(ValueError, match=r"RescaleQuotient.*needs shape \(…, 2, d\), got \(3, 2\)"):
        manifold.retr(torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="zero entries"):
        manifold.proju(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2))
    with pytest.raises(ValueError, match="NaN"):
        manifold.proju(torch.full((2, 2), float("nan")), torch.ones(2, 2))
    with pytest.raises(ValueError, match="differ in sign"):
        manifold.dist(torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    with pytest.raises(ValueError, match="complex128"):
        manifold.proju(torch.ones(2, 2, dtype=torch.complex128), torch.ones(2, 2, dtype=torch.complex128))
    assert (manifold.projx(torch.zeros(2, 3)) != 0).all()


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_geodesics_with_velocity_and_means(metric):
    manifold = RescaleQuotient(metric)
    x = manifold.random(3, 2, 4)
    u = x * torch.empty(3, 1, 4).uniform_(-0.2, 0.2)
    t = torch.linspace(-1, 1, 5)
    points, velocities = manifold.geodesic(x, u, t)
    assert points.shape == velocities.shape == (5, 3, 2, 4)
    torch.testing.assert_close(points[-1], manifold.expmap(x, u))
    torch.testing.assert_close(velocities[2], u)
    speed = manifold.norm(points, velocities)
    torch.testing.assert_close(speed, manifold.norm(x, u).expand_as(speed))
    plus, minus = (manifold.geodesic(x, u, 0.5 + d)[0] for d in (1e-5, -1e-5))
    torch.testing.assert_close((plus - minus) / 2e-5, manifold.geodesic(x, u, 0.5)[1], rtol=1e-6, atol=1e-8)
    # As the GL(1) quotient of every coordinate.
    cls = GLQuotientInv if metric == "inv" else GLQuotientMix
    pairs = cls(1, 1).expmap(x.mT.unsqueeze(-1), u.mT.unsqueeze(-1)).squeeze(-1).mT
    torch.testing.assert_close(pairs, points[-1], rtol=1e-9, atol=1e-9)
    y = manifold.act(manifold.expmap(x, u), torch.full((4,), 3.0))
    path = manifold.geodesic_between(x, y, [0.0, 0.5, 1.0])
    torch.testing.assert_close(manifold.to_matrix(path[2]), manifold.to_matrix(y))
    middle = manifold.mean(torch.stack([x, y]))
    torch.testing.assert_close(manifold.to_matrix(middle), manifold.to_matrix(path[1]))
    a, b = manifold.to_matrix(x), manifold.to_matrix(y)
    expected = a.sign() * (a * b).sqrt() if metric == "inv" else (a + b) / 2
    torch.testing.assert_close(manifold.to_matrix(middle), expected)


def test_logarithm_and_distance_check_their_points():
    manifold, good = RescaleQuotient("inv"), torch.ones(2, 3)
    for bad, words in ((torch.zeros(2, 3), "zero entries"), (torch.full((2, 3), torch.nan), "NaN or infinite")):
        for method in (manifold.logmap, manifold.dist):
            with pytest.raises(ValueError, match=words):
                method(good, bad)
            with pytest.raises(ValueError, match=words):
                method(bad, good)


def test_distances_differentiate_also_where_they_are_zero():
    x = torch.rand(2, 3).add(0.5).requires_grad_()
    for metric in ("inv", "mix"):
        (g,) = torch.autograd.grad(RescaleQuotient(metric).dist(x, x.detach()), x)
        assert torch.equal(g, torch.zeros_like(g))


def test_a_scaled_geodesic_is_refused_as_that_of_the_others():
    scaled = geoopt.Scaled(RescaleQuotient("inv"), 2.0)
    with pytest.raises(NotImplementedError, match="geodesic"):
        scaled.geodesic(torch.ones(2, 3), torch.ones(2, 3), 0.5)


@pytest.mark.parametrize("size", [1e-18, 1.0, 1e15])
def test_products_beyond_single_precision(size):
    x, y = (size * torch.tensor([[0.5, 0.7, 1.2], [1.5, 0.9, 0.8]]).float().roll(k, 1) for k in (0, 1))
    for manifold in (RescaleQuotient("inv"), RescaleQuotient("mix")):
        assert manifold.dist(x, y).dtype == manifold.logmap(x, y).dtype == torch.float32
        torch.testing.assert_close(
            manifold.dist(x, y).double(), manifold.dist(x.double(), y.double()), rtol=1e-5, atol=0
        )
    assert RescaleQuotient("inv").canonical(x).isfinite().all()
    assert (RescaleQuotient("inv").canonical(x) != 0).all()


def test_zeros_have_no_inverse():
    with pytest.raises(ValueError, match="has zeros, and no inverse"):
        RescaleQuotient("inv").act(point(), torch.tensor([1.0, 0.0, 2.0]))


@pytest.mark.parametrize("t", [1j, torch.tensor([1j]), "1", True])
def test_times_are_real(t):
    x = point()
    with pytest.raises(TypeError, match="times must be real numbers"):
        RescaleQuotient("inv").geodesic(x, 0.1 * x, t)
