import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from quotient_manifolds import ConvergenceError, GLQuotientInv, GLQuotientMix
from quotient_manifolds.gl.tangent import GLTangentSpace
from tests.extent import EXHAUSTIVE
from tests.geodesics import METRICS, field, metric, problem
from tests.points import MANIFOLDS, metrics


@metric
@field
@pytest.mark.parametrize("shape", [(7, 5, 3), (4, 6, 1), (3, 3, 3)], ids=str)
def test_logarithm_inverts_the_exponential(name, dtype, shape):
    manifold, x, u = problem(name, *shape, dtype=dtype, batch=(2,))
    u = u * (1.0 if name == "inv" else 0.5)
    y = manifold.act(manifold.expmap(x, u), torch.randn(2, shape[2], shape[2], dtype=dtype))
    found = manifold.logmap(x, y)
    torch.testing.assert_close(found, u, rtol=1e-7, atol=1e-8)
    assert manifold.norm(x, found - manifold.proju(x, found)).max() < 1e-10
    end, target = manifold.to_matrix(manifold.expmap(x, found)), manifold.to_matrix(y)
    assert (end - target).abs().max() < 1e-8 * target.abs().max()
    torch.testing.assert_close(manifold.dist(x, y, keepdim=True), manifold.norm(x, u, keepdim=True), rtol=1e-8, atol=0)


@metric
@field
def test_distance_of_orbits(name, dtype):
    """Points that no exponential made: a perturbed copy."""
    torch.manual_seed(1)
    manifold = METRICS[name](9, 6)
    x = manifold.random(15, 3, dtype=dtype)
    y = x + 0.2 * torch.randn_like(x)
    A, B = (torch.randn(3, 3, dtype=dtype) for _ in range(2))
    moved = manifold.act(x, A)
    one, back, between, along = manifold.dist(
        torch.stack([x, y, moved, x]), torch.stack([y, x, manifold.act(y, B), moved])
    )
    torch.testing.assert_close(back, one, rtol=1e-8, atol=0)
    torch.testing.assert_close(between, one, rtol=1e-8, atol=0)
    assert along < 1e-7
    # Shorter than the straight line between the best aligned representatives, and not by much.
    aligned = manifold.align(x, y)
    straight = manifold.norm(x, aligned - x)
    assert 0.5 * straight < one < 1.2 * straight


@metric
def test_logarithm_is_equivariant(name):
    manifold, x, u = problem(name)
    y = manifold.expmap(x, 0.5 * u)
    A = torch.randn(3, 3)
    moved = manifold.act(x, A)
    expected = manifold.act(x + 0.5 * u, A) - moved
    torch.testing.assert_close(manifold.logmap(moved, y), expected, rtol=1e-6, atol=1e-7)


@field
@pytest.mark.parametrize("shape", [(5, 4, 2), (10, 10, 3), *([(6, 4, 4)] if EXHAUSTIVE else [])], ids=str)
def test_independent_points_have_a_distance(shape, dtype):
    n, m, h = shape
    manifold = GLQuotientInv(n, m)
    x, y = (manifold.random(3, n + m, h, dtype=dtype) for _ in range(2))
    u = manifold.logmap(x, 5 * y)
    end, target = manifold.to_matrix(manifold.expmap(x, u)), manifold.to_matrix(5 * y)
    miss = torch.linalg.matrix_norm(end - target) / torch.linalg.matrix_norm(target)
    assert miss.max() < 1e-8
    moved = manifold.act(x, torch.randn(3, h, h, dtype=dtype))
    d, back, between, along = manifold.dist(torch.stack([x, 5 * y, moved, x]), torch.stack([5 * y, x, 5 * y, moved]))
    torch.testing.assert_close(back, d, rtol=0, atol=1e-8)
    torch.testing.assert_close(between, d, rtol=0, atol=1e-7)
    assert along.max() < 1e-7
    # Not longer than the straight path between representatives that fit each other, as the metric along it has it.
    (G, H), (P, R) = (manifold.unpack_tensor(manifold.canonical(z)) for z in (x, 5 * y))
    U, _, Vh = torch.linalg.svd(P.mH @ G + R.mH @ H)
    x, aligned = manifold.canonical(x), manifold.pack_point(P @ U @ Vh, R @ U @ Vh)
    t, w = (torch.tensor(a) for a in np.polynomial.legendre.leggauss(16))
    path = x + ((t + 1) / 2)[:, None, None, None] * (aligned - x)
    velocity = (aligned - x).expand_as(path)
    straight = (w[:, None] / 2 * manifold.norm(path, manifold.proju(path, velocity))).sum(0)
    assert bool((d <= straight + 1e-8).all())
    assert bool((d < 0.99 * straight).any())


def test_the_triangle_inequality():
    manifold = GLQuotientInv(5, 4)
    x, y, z = (manifold.random(100 if EXHAUSTIVE else 12, 9, 2) for _ in range(3))
    a, b, c = manifold.dist(torch.stack([x, y, x]), torch.stack([y, z, z]))
    for one, two, three in ((a, b, c), (b, c, a), (c, a, b)):
        assert bool((one + two > three - 1e-9).all())
    # With equality at a point between, where the square of a distance breaks it.
    middle = manifold.geodesic_between(x[:4], z[:4], 0.5)
    a, b = manifold.dist(torch.stack([x[:4], middle]), torch.stack([middle, z[:4]]))
    torch.testing.assert_close(a + b, c[:4], rtol=0, atol=1e-8)
    assert bool((a**2 + b**2 < 0.6 * c[:4] ** 2).all())


def test_pairs_of_vectors_against_the_closed_form():
    """h = 1: angles θ, φ and the ratio r of sizes give d² = θ² + φ² + ½ log² r, of both signs the nearer one."""
    manifold = GLQuotientInv(6, 4)
    x, y = manifold.random(40, 10, 1), manifold.random(40, 10, 1)
    cosine, ratio = [], 1.0
    for X, Y in zip(manifold.unpack_tensor(x), manifold.unpack_tensor(y), strict=True):
        sizes = [torch.linalg.matrix_norm(Z) for Z in (X, Y)]
        cosine.append((X * Y).sum((-2, -1)) / (sizes[0] * sizes[1]))
        ratio = ratio * sizes[1] / sizes[0]
    plus, minus = (sum((s * c).arccos() ** 2 for c in cosine) for s in (1, -1))
    expected = (torch.minimum(plus, minus) + ratio.log() ** 2 / 2).sqrt()
    torch.testing.assert_close(manifold.dist(x, y), expected, rtol=1e-8, atol=1e-9)
    assert float((plus - minus).min()) < 0 < float((plus - minus).max())


@field
def test_square_matrices_of_mix_go_straight(dtype):
    """n = m = h: the product moves on a straight line, d = ‖ΔX‖/√2, which may leave the manifold (if it is real)."""
    manifold = GLQuotientMix(3, 3)
    x = manifold.random(60, 6, 3, dtype=dtype)
    y = x + torch.cat([0.2 * torch.randn(60, 3, 3, dtype=dtype), torch.zeros(60, 3, 3)], -2)
    y = manifold.act(y, torch.randn(60, 3, 3, dtype=dtype))
    X, Y = manifold.to_matrix(x), manifold.to_matrix(y)
    t = torch.linspace(0, 1, 4000)[:, None, None, None]
    turned = torch.linalg.det(X + t * (Y - X)) / torch.linalg.det(X)
    leaves = (turned.real < 0).any(0) if dtype == torch.float64 else torch.zeros(60, dtype=torch.bool)
    d = manifold.dist(x, y, on_error="nan")
    assert torch.equal(d.isnan(), leaves)
    assert dtype.is_complex or 1 < leaves.sum() < 59
    expected = torch.linalg.matrix_norm(Y - X) / 2**0.5
    torch.testing.assert_close(d[~leaves], expected[~leaves], rtol=1e-8, atol=0)
    u = manifold.logmap(x[~leaves], y[~leaves])
    (G, H), (P, R) = manifold.unpack_tensor(x[~leaves]), manifold.unpack_tensor(u)
    torch.testing.assert_close(P @ H.mH + G @ R.mH, (Y - X)[~leaves], rtol=1e-6, atol=1e-8)
    if leaves.any():
        with pytest.raises(ConvergenceError, match=r"different components|leaves the manifold .* at t = "):
            manifold.logmap(x[leaves], y[leaves])


def test_what_has_no_logarithm_is_named_and_fails_alone():
    square = GLQuotientInv(3, 3)
    x = torch.eye(3).repeat(4, 2, 1) + 0.1 * torch.randn(4, 6, 3)  # products near 1, and so of one component
    y = square.act(x + 0.1 * torch.randn_like(x), torch.randn(4, 3, 3))
    y[1, 0] = -y[1, 0]
    y[1, 3:] = x[1, 3:]
    y[1, :3] = x[1, :3] * torch.tensor([-1.0, 1.0, 1.0])[:, None]
    with pytest.raises(ConvergenceError, match=r"for 1 of 4 pairs: .* different components") as caught:
        square.logmap(x, y)
    assert caught.value.residual.isinf().tolist() == [False, True, False, False]
    d = square.dist(x, y, on_error="nan")
    assert d.isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(d[0], square.dist(x[0], y[0]), rtol=1e-8, atol=0)
    # A straight line through zero.
    line = GLQuotientMix(2, 2)
    p = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    q = torch.tensor([[-1.0], [1e-3], [1.0], [0.0]])
    with pytest.raises(ConvergenceError, match=r"leaves the manifold for 1 of 1 pairs: .* falls to"):
        line.logmap(p, q)
    for wrong in ({"on_error": "ignore"}, {"n_starts": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            square.logmap(x, y, **wrong)


def test_distances_in_inference_mode():
    manifold = GLQuotientInv(4, 3)
    x, y = manifold.random(2, 7, 2, dtype=torch.float64)
    expected = manifold.dist(x, y)
    with torch.inference_mode():
        points = x.clone(), y.clone()
        assert torch.equal(manifold.dist(x, y), expected)
        assert torch.equal(manifold.dist(*points), expected)
    assert torch.equal(manifold.dist(*points), expected)


def test_a_search_that_breaks_down_leaves_the_others_alone():
    """Columns equal to 1e-6: paths there lose all digits."""
    manifold = GLQuotientInv(6, 5)
    torch.manual_seed(2)
    x, y = (manifold.random(4, 11, 3, dtype=torch.float64) for _ in range(2))
    y[1, :, 1] = y[1, :, 0] + 1e-6 * torch.randn(11, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match=r"(was found|is missing) for 1 of 4 pairs") as caught:
        manifold.logmap(x, y)
    assert (caught.value.residual < 1e-8).tolist() == [True, False, True, True]


@metric
def test_interpolation_and_means(name):
    manifold, x, u = problem(name, 5, 4, 2)
    u = 0.6 * u
    y = manifold.act(manifold.expmap(x, u), torch.randn(2, 2))
    t = torch.tensor([0.0, 0.5, 1.0])
    path = manifold.geodesic_between(x, y, t)
    torch.testing.assert_close(path[0], x)
    torch.testing.assert_close(manifold.to_matrix(path[2]), manifold.to_matrix(y), rtol=1e-8, atol=1e-8)
    middle = manifold.mean(torch.stack([x, y]))
    torch.testing.assert_close(manifold.to_matrix(middle), manifold.to_matrix(path[1]), rtol=1e-7, atol=1e-7)
    # Of three points: the sum of logarithms vanishes, whatever the representatives.
    z = manifold.expmap(x, 0.4 * manifold.proju(x, torch.randn_like(x)) * manifold.norm(x, u) / 3)
    points = torch.stack([x, y, z])
    others = torch.stack([manifold.act(p, torch.randn(2, 2)) for p in points])
    mean, moved = manifold.mean(torch.stack([points, others], 1))
    total = manifold.logmap(mean.expand_as(points), points).sum(0)
    # The mean logarithm, a third of it, vanishes to 1e-9, in mix of the size of the products (documented).
    sizes = torch.linalg.matrix_norm(manifold.to_matrix(points)) / 2**0.5
    assert manifold.norm(mean, total) < 4e-9 * (sizes.max() if name == "mix" else 1)
    torch.testing.assert_close(manifold.to_matrix(moved), manifold.to_matrix(mean), rtol=1e-7, atol=1e-7)
    # The mean of the factors themselves is another matrix, which depends on the representatives.
    plain = [manifold.to_matrix(torch.stack([x, manifold.act(y, torch.randn(2, 2))]).mean(0)) for _ in range(2)]
    assert (plain[0] - plain[1]).norm() > 0.1 * plain[0].norm()


@pytest.mark.parametrize("cls", [GLQuotientInv, GLQuotientMix])
def test_single_precision_in_single_precision_out(cls):
    manifold = cls(6, 5)
    x = manifold.random(3, 11, 2)
    u = manifold.proju(x, torch.randn_like(x))
    u = 0.1 * u / manifold.norm(x, u, keepdim=True)
    y = manifold.act(manifold.expmap(x, u), torch.randn(3, 2, 2))
    narrow_x, narrow_y = x.float(), y.float()
    found = manifold.logmap(narrow_x, narrow_y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, u.float(), rtol=1e-3, atol=1e-4)
    length = torch.full((3,), 0.1, dtype=torch.float32)
    torch.testing.assert_close(manifold.dist(narrow_x, narrow_y), length, rtol=1e-3, atol=1e-4)
    mean = manifold.mean(torch.stack([narrow_x, narrow_y]))
    assert mean.dtype == manifold.align(narrow_x, narrow_y).dtype == torch.float32
    middle = manifold.geodesic_between(narrow_x, narrow_y, 0.5)
    torch.testing.assert_close(manifold.to_matrix(mean), manifold.to_matrix(middle), rtol=1e-3, atol=1e-3)
    end, carried = manifold.parallel_transport(narrow_x, u.float(), u.float())
    assert end.dtype == carried.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("kind", [GLQuotientInv, GLQuotientMix])
def test_distances_differentiate_in_both_points(kind, dtype):
    """Against differences; the derivative that autograd took of the shooting was wrong, even in sign."""
    manifold = kind(6, 5)
    x = torch.randn(3, 11, 2, dtype=dtype)
    A = torch.randn(3, 2, 2, dtype=dtype)
    y = manifold.act(x + 0.15 * torch.randn_like(x), A)
    points = [x.requires_grad_(), y.requires_grad_()]
    distance = manifold.dist if dtype == torch.float64 else manifold.dist2
    found, d = torch.autograd.grad(distance(*points).sum(), points), torch.randn(2, 3, 11, 2, dtype=dtype)
    d[1] = manifold.act(d[1], A)  # as small a step for a point that lies far out on its orbit
    with torch.no_grad():  # one point moves forwards and backwards, then the other
        moved = [torch.stack([p + s * 1e-5 * d[i] * (i == j) for i in (0, 1) for s in (1, -1)])
                 for j, p in enumerate(points)]  # fmt: skip
        ends = distance(*moved).sum(-1)
    for i, g in enumerate(found):
        expected = pytest.approx(float(ends[2 * i] - ends[2 * i + 1]) / 2e-5, rel=1e-5)
        assert (g.conj() * d[i]).real.sum() == expected
        assert not bool((-g.conj() * d[i]).real.sum() == expected)


@metric
@field
def test_distances_differentiate_in_every_mode(name, dtype):
    manifold, x, u = problem(name, 5, 4, 2, dtype=dtype, batch=(3,))
    y = manifold.act(manifold.retr(x, 0.3 * u), torch.randn(3, 2, 2, dtype=dtype))
    points, (dx, dy) = (x.clone().requires_grad_(), y.clone().requires_grad_()), torch.randn(2, *x.shape, dtype=dtype)
    expected = torch.autograd.grad(manifold.dist(*points).sum(), points)
    for i, g in enumerate(torch.func.vmap(torch.func.grad(manifold.dist, (0, 1)))(x, y)):
        torch.testing.assert_close(g, expected[i])
    near = torch.stack([y[0], x[0]])
    torch.testing.assert_close(torch.func.vmap(manifold.dist, (None, 0))(x[0], near), manifold.dist(x[0], near))
    slope = sum((g.conj() * d).real.sum((-2, -1)) for g, d in zip(expected, (dx, dy), strict=True))
    torch.testing.assert_close(torch.func.jvp(manifold.dist, (x, y), (dx, dy))[1], slope)
    only = torch.func.jvp(lambda z: manifold.dist(x, z), (y,), (dy,))[1]
    torch.testing.assert_close(only, (expected[1].conj() * dy).real.sum((-2, -1)))
    with forward_ad.dual_level():
        dual = manifold.dist(forward_ad.make_dual(x, dx), forward_ad.make_dual(y, dy))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, slope)


def test_the_gradient_of_half_the_squared_distance_is_minus_the_logarithm():
    manifold = GLQuotientMix(6, 5)
    x = manifold.random(11, 2).requires_grad_()
    y = manifold.act(x.detach() + 0.1 * torch.randn(11, 2), torch.randn(2, 2))
    (egrad,) = torch.autograd.grad(0.5 * manifold.dist2(x, y), x)
    gradient = manifold.egrad2rgrad(x.detach(), egrad)
    assert torch.allclose(gradient, -manifold.logmap(x.detach(), y), atol=1e-9)
    at_one_point = manifold.dist(x, x.detach())
    assert bool(torch.autograd.grad(at_one_point, x)[0].isfinite().all())


def test_a_distance_says_that_it_differentiates_once():
    x = GLQuotientInv(5, 4).random(9, 2).requires_grad_()
    d = GLQuotientInv(5, 4).dist2(x, 1.1 * x.detach())
    (g,) = torch.autograd.grad(d, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


@metrics
def test_derivatives_where_some_pairs_have_no_distance(metric):
    manifold = MANIFOLDS[metric](2, 2)
    x = torch.eye(2).repeat(3, 2, 1) + 0.1 * torch.randn(3, 4, 2)  # products near 1, and so of one component
    y = x + 0.02 * torch.randn(3, 4, 2)
    y[1, :2] = y[1, :2] @ torch.diag(torch.tensor([1.0, -1.0]))  # another component
    sound = torch.tensor([0, 2])
    whole, part = (v.clone().requires_grad_() for v in (x, x[sound]))
    d = manifold.dist(whole, y, on_error="nan")
    assert d.isnan().tolist() == [False, True, False]
    d.nan_to_num().sum().backward()
    manifold.dist(part, y[sound]).sum().backward()
    assert not whole.grad[1].any()
    torch.testing.assert_close(whole.grad[sound], part.grad, rtol=1e-8, atol=1e-10)


@metric
@pytest.mark.parametrize("size", [1e-12, 1e10])
def test_the_size_of_the_points_does_not_limit_the_search(name, size):
    manifold, x, u = problem(name)
    y = manifold.retr(x, 0.3 * u)
    unit = size**2 if name == "mix" else 1.0
    torch.testing.assert_close(manifold.dist(size * x, size * y), unit * manifold.dist(x, y), rtol=1e-8, atol=0)


def test_rank_by_rounding_is_refused_before_anything_is_widened():
    generator = torch.Generator().manual_seed(0)
    manifold, G = GLQuotientInv(5, 4), torch.randn(5, 1, generator=generator) @ torch.randn(1, 2, generator=generator)
    x = torch.cat([G, torch.randn(4, 2, generator=generator)])
    y = manifold.random(9, 2)
    for call in (manifold.dist, manifold.logmap, manifold.align, lambda x, y: manifold.parallel_transport(x, y, y)):
        for points in ((x, y), (y, x))[: 1 if "lambda" in call.__name__ else 2]:
            with pytest.raises(ValueError, match="does not have full column rank"):
                call(*points)


def test_a_geodesic_that_cannot_be_followed_leaves_the_others_alone(monkeypatch):
    manifold, x, u = problem("mix", 5, 4, 2, batch=(3,))
    y, follow = manifold.retr(x, 0.3 * u), GLTangentSpace.geodesic
    expected = manifold.dist(x, y)

    def refuse(self, u, *args, **kwargs):
        if (self.gauge.sigma[:, 0] / self.gauge.sigma[:, 1] / sigma - 1).abs().min() < 1e-9:
            raise ArithmeticError("the geodesic equation cannot be solved here")
        return follow(self, u, *args, **kwargs)

    start = min(x[1], y[1], key=lambda z: float(manifold.tangent_space_at(z).gauge.sigma.sum()))
    sigma = manifold.tangent_space_at(start).gauge.sigma
    sigma = sigma[0] / sigma[1]  # the search scales its points
    monkeypatch.setattr(GLTangentSpace, "geodesic", refuse)
    d = manifold.dist(x, y, on_error="nan")
    assert d.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(d[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("manifold", [GLQuotientMix(4, 4), GLQuotientInv(4, 4)], ids=str)
def test_a_lost_distance_has_no_derivative_and_harms_no_other(manifold):
    """Factors with orthogonal columns stopped the whole batch, but only where derivatives were wanted."""
    one, zero = torch.eye(2), torch.zeros(2, 2)
    far = torch.cat([zero, one * torch.tensor([1.0, 1e-9]), zero, one])
    x = torch.stack([torch.cat([one, zero, one, zero]), manifold.random(8, 2)]).requires_grad_()
    y = torch.stack([far, manifold.retr(x[1].detach(), 0.1 * torch.randn(8, 2))])
    d = manifold.dist(x, y, on_error="nan")
    lost = d.isnan()
    d[~lost].sum().backward()
    assert not lost[1]
    assert x.grad[1].norm() > 0.1
    assert x.grad.isfinite().all()
