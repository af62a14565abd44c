"""Logarithm and distance: the results, paths, their minimisation and the search."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from quotient_manifolds import ConvergenceError, GLQuotientInv, GLQuotientMix
from quotient_manifolds.linalg import polar
from quotient_manifolds.logarithm import search as module
from quotient_manifolds.logarithm.minimise import Minimiser, Preconditioner
from quotient_manifolds.logarithm.paths import Bent, Path, energy, first_path, flat, moved_end, unflat
from quotient_manifolds.logarithm.search import SOLVED, Shortest, shortest
from quotient_manifolds.metrics import INV
from quotient_manifolds.tangent import GLTangentSpace
from reproduction.alignment import align
from tests.support import oracle
from tests.support.extent import EXHAUSTIVE, checkered
from tests.support.geodesics import METRICS, field, metric, problem
from tests.support.points import MANIFOLDS, metrics

# -- logarithm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    checkered(METRICS, (torch.float64, torch.complex128), ((7, 5, 3), (4, 6, 1), (3, 3, 3))),
    ids=str,
)
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
    aligned = align(manifold, x, y)
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


def _before_the_quotient(name, n, x, y):
    """Distance of columns (G, H) themselves: a cylinder for inv, and for mix a cone; inf where no geodesic joins them.

    With the product σ and the ratio e^τ of the lengths of G and H, mix has ½(dσ² + σ²(dτ² + 2da² + 2db²)).
    """
    logs, angles = [], []
    for X, Y in zip(oracle.split(x, n), oracle.split(y, n), strict=True):
        one, two = (Z.norm(dim=(-2, -1)) for Z in (X, Y))
        cosine = ((X.conj() * Y).sum((-2, -1)).real / (one * two)).clamp(-1, 1)
        logs.append((two / one).log())
        one_number = X.shape[-2] == 1 and not X.is_complex()
        angles.append(torch.where(cosine < 0, torch.inf, 0) if one_number else cosine.arccos())
    around = angles[0].square() + angles[1].square()
    if name == "inv":
        return (logs[0].square() + logs[1].square() + around).sqrt()
    turn = ((logs[0] - logs[1]).square() + 2 * around).sqrt()
    one, two = (torch.stack([X.norm(dim=(-2, -1)) for X in oracle.split(z, n)]).prod(0) for z in (x, y))
    straight = (one.square() / 2 + two.square() / 2 - one * two * turn.cos()).sqrt()
    return torch.where(turn < np.pi, straight, torch.inf)


def _nearest_in_the_orbit(name, n, x, y):
    """Search a grid over the numbers that act on y, which is made finer six times around its best; (2, b) by sign."""
    G, H = oracle.split(y, n)
    found = []
    for sign in (1, -1) if not x.is_complex() else (1,):
        at, widths = torch.zeros(len(x), dtype=torch.complex128), [3.0, np.pi * x.is_complex()]
        for level in range(7):
            stretch = torch.linspace(-1, 1, 25) * widths[0]
            turn = torch.linspace(-1, 1, 181 if level == 0 else 25) * widths[1] if x.is_complex() else torch.zeros(1)
            trial = at + torch.complex(*torch.meshgrid(stretch, turn, indexing="ij")).reshape(-1, 1)
            number = sign * trial.exp()[..., None, None]
            number = number if x.is_complex() else number.real
            d = _before_the_quotient(name, n, x, torch.cat([G / number, H * number.conj()], -2))
            least, best = d.min(0)
            at, widths = trial[best, torch.arange(len(x))], [w / 8 for w in widths]
        found.append(least)
    return torch.stack(found)


@pytest.mark.parametrize(("name", "dtype"), checkered(METRICS, (torch.float64, torch.complex128)), ids=str)
def test_one_column_against_a_grid_over_the_group(name, dtype):
    torch.manual_seed(0)
    x, u = torch.randn(2, 10, 5, 1, dtype=dtype)
    y = (x + 0.3 * u).requires_grad_()  # a function that is 0 at x and grows at speed 1 is the distance from x
    (slope,) = torch.autograd.grad(_before_the_quotient(name, 3, x, y).sum(), y)
    (a, b), sizes = ([Z.norm(dim=(-2, -1)) for Z in oracle.split(z, 3)] for z in (slope, y.detach()))
    p, q = sizes if name == "inv" else (1 / sizes[1], 1 / sizes[0])
    torch.testing.assert_close((a * p).square() + (b * q).square(), torch.ones(10), rtol=1e-9, atol=0)
    for n, m in ((3, 2), (1, 4), (3, 1)):
        manifold = METRICS[name](n, m)
        x, y = torch.randn(2, 10, n + m, 1, dtype=dtype)
        y[0] = 1.2 * x[0]
        x[1], y[1] = x[0], -y[0]  # the other sign is nearer than for the first
        if not dtype.is_complex:  # seen from the tip of mix's cone at an angle of √2 π
            y[2] = torch.cat([x[2, :n], -3 * x[2, n:]])
        by_sign = _nearest_in_the_orbit(name, n, x, y)
        expected = by_sign.amin(0)
        d = manifold.dist(x, y, on_error="nan")
        torch.testing.assert_close(d.nan_to_num(torch.inf), expected, rtol=1e-8, atol=0)
        there = d.isfinite()
        assert bool(there[2]) == (name == "inv" or dtype.is_complex)
        assert dtype.is_complex or by_sign[:, 0].argmin() != by_sign[:, 1].argmin()
        u = manifold.logmap(x[there], y[there])
        end, target = manifold.to_matrix(manifold.expmap(x[there], u)), manifold.to_matrix(y[there])
        torch.testing.assert_close(end, target, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(manifold.norm(x[there], u), d[there])


def test_one_column_at_its_limits():
    """Points that are equal or opposite, and where the shortest path of mix leads through the tip of its cone."""
    x = torch.tensor([[1.0], [1.0], [0.0]])
    opposite = torch.tensor([[1.0], [-3.0], [0.0]])
    inv, mix = GLQuotientInv(1, 2), GLQuotientMix(1, 2)
    assert float(inv.dist(x, x)) == float(mix.dist(x, x)) == 0
    torch.testing.assert_close(inv.dist(x, opposite), torch.tensor((np.pi**2 + np.log(3) ** 2 / 2) ** 0.5))
    end = inv.to_matrix(inv.expmap(x, inv.logmap(x, opposite)))
    torch.testing.assert_close(end, torch.tensor([[-3.0, 0.0]]))
    with pytest.raises(ConvergenceError, match=r"stays on the manifold for 1 of 1 pairs.* at t = 0\.25,"):
        mix.dist(x, opposite)  # σ grows from 1 to 3, and its shortest path falls to 0 first
    angle = 0.999 * np.pi / 2**0.5
    near = torch.tensor([[1.0], [3 * np.cos(angle)], [3 * np.sin(angle)]])
    d = mix.dist(x, near)
    torch.testing.assert_close(d, torch.tensor((5 - 3 * np.cos(0.999 * np.pi)) ** 0.5))
    assert float(d) < 4 / 2**0.5  # which the path through the tip has


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
        with pytest.raises(ConvergenceError, match=r"different components|stays on the manifold .* at t = "):
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
    with pytest.raises(ConvergenceError, match=r"no geodesic was found that stays on the manifold for 1 of 1 pairs"):
        line.logmap(p, q)
    with pytest.raises(ValueError, match="on_error"):
        square.logmap(x, y, on_error="ignore")


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
    u = 0.3 * u
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
    assert mean.dtype == align(manifold, narrow_x, narrow_y).dtype == torch.float32
    middle = manifold.geodesic_between(narrow_x, narrow_y, 0.5)
    torch.testing.assert_close(manifold.to_matrix(mean), manifold.to_matrix(middle), rtol=1e-3, atol=1e-3)


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


@pytest.mark.parametrize(("name", "dtype"), checkered(METRICS, (torch.complex128, torch.float64)), ids=str)
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
    for call in (manifold.dist, manifold.logmap):
        for points in ((x, y), (y, x)):
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
def test_a_lost_distance_has_no_derivative_and_harms_no_other(manifold, monkeypatch):
    """Factors with orthogonal columns stopped the whole batch, but only where derivatives were wanted."""
    monkeypatch.setattr("quotient_manifolds.geodesics._MAX_STEPS", 25)  # of 200: what is lost is lost sooner
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


# -- path -------------------------------------------------------------------------------------------------------------


def some_path(name, dtype=torch.float64, count=4):
    manifold, x, u = problem(name, 6, 5, 2, dtype=dtype, batch=(3,))
    y = manifold.act(manifold.expmap(x, 0.5 * u), torch.randn(3, 2, 2, dtype=dtype))
    path = first_path(manifold.metric, 6, x, y, count)
    return manifold, path.moved(0.05 * flat(torch.randn_like(path.c), torch.zeros(3, 2, 2, dtype=dtype)))


@metric
@field
def test_the_energy_is_that_of_the_metric_and_its_gradient_is_one(name, dtype):
    manifold, path = some_path(name, dtype)
    value, g = energy(path)
    _, factors = path.states()
    x, v = torch.cat(factors, -2).tensor_split(2, 1)
    assert torch.equal(torch.cat(path.points(), -2), x)
    expected = manifold.inner(x.movedim(1, 0), v.movedim(1, 0)).movedim(0, 1) @ path.rule()[0]
    torch.testing.assert_close(value, expected)
    d = torch.randn_like(g)
    ends = [energy(path.moved(s * 1e-6 * d))[0] for s in (1, -1)]
    torch.testing.assert_close((g.conj() * d).real.sum(1), (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-6)


def test_a_geodesic_is_a_path_of_which_the_gradient_vanishes():
    """Fitted at many times: the coefficients of the velocity of an exact geodesic."""
    manifold, x, u = problem("inv", 6, 5, 2, batch=(3,))
    path = first_path(manifold.metric, 6, x, manifold.expmap(x, u), 12)
    w, phi, *_, fit, t = path.rule()
    velocity = manifold.geodesic(x, u, t)[1].movedim(0, 1)
    c = torch.einsum("q,qk,bqij->bkij", w, phi, velocity)[:, 1:]
    value, g = energy(Path(path.metric, 6, x, path.y, c))
    torch.testing.assert_close(value, manifold.inner(x, u), rtol=1e-9, atol=0)
    assert g.abs().max() < 1e-8
    assert energy(Path(path.metric, 6, x, path.y, 0 * c))[1].abs().max() > 1e-2  # the straight path is none
    torch.testing.assert_close(torch.einsum("kq,bqij->bkij", fit, manifold.geodesic(x, u, t)[0].movedim(0, 1)), c)
    torch.testing.assert_close(Path(path.metric, 6, x, path.y, c).start_velocity(), u, rtol=1e-7, atol=1e-7)


def test_vectors_of_coefficients_and_of_the_end():
    _, path = some_path("inv")
    c, L = unflat(flat(path.c, torch.ones(3, 2, 2)), path)
    assert torch.equal(c, path.c)
    assert bool((L == 1).all())


def test_only_well_conditioned_paths_are_rounded_to_single_precision():
    x, y = torch.linalg.qr(torch.randn(2, 3, 6, 2)).Q, torch.linalg.qr(torch.randn(2, 3, 5, 2)).Q
    start, end = torch.cat([x[0], y[0]], -2), torch.cat([x[0] + 0.1 * x[1], y[0] + 0.1 * y[1]], -2)
    path = Path(INV, 6, start, end, 0.1 * torch.randn(3, 3, 11, 2) / 11)
    single = path.in_single()
    assert single.x.dtype == single.y.dtype == single.c.dtype == torch.float32
    torch.testing.assert_close(energy(single)[0].double(), energy(path)[0], rtol=1e-5, atol=0)
    thin = torch.tensor([1.0, 1e-3])
    for bad in (
        Path(path.metric, 6, path.x * thin, path.y, path.c),
        Path(path.metric, 6, path.x, path.y * thin, path.c),
    ):
        assert bad.in_single() is bad


# -- bent -------------------------------------------------------------------------------------------------------------


def ends(dtype=torch.float64, n=12, m=9, h=3, seed=0):
    """Independent random points, the second turned to fit the first."""
    torch.manual_seed(seed)
    manifold = METRICS["inv"](n, m)
    x, y = (manifold.canonical(manifold.random(5, n + m, h, dtype=dtype)) for _ in range(2))
    P, _, Qh = torch.linalg.svd(y[:, :n].mH @ x[:, :n] + y[:, n:].mH @ x[:, n:])
    return manifold, x, y @ (P @ Qh)


@field
def test_a_bent_path_is_shorter_than_a_straight_one(dtype):
    manifold, x, y = ends(dtype)
    path = first_path(manifold.metric, 12, x, y, 4)
    straight = energy(Path(path.metric, 12, x, y, 0 * path.c))[0]
    least = manifold.dist(x, y) ** 2
    assert bool((energy(path)[0] - least < 0.5 * (straight - least)).all())
    # The spans of both ends at right angles, columns of one size: a geodesic, each column a quarter of a circle.
    eye = torch.eye(6, dtype=dtype)
    one, other = (torch.cat([eye[:, k : k + 3]] * 2)[None] for k in (0, 3))
    path = first_path(manifold.metric, 6, one, other, 8)
    torch.testing.assert_close(energy(path)[0], torch.tensor([6 * torch.pi**2 / 4], dtype=path.x.real.dtype))


@field
def test_coefficients_follow_the_end(dtype):
    """Against differences; exact but for the change of f, which counts with the middle size."""
    manifold, x, y = ends(dtype)
    like = first_path(manifold.metric, 12, x, y, 4)
    L = torch.randn(5, 3, 3, dtype=dtype)
    moved = [first_path(manifold.metric, 12, x, moved_end(12, y, s * 1e-5 * L), 4).c for s in (1, -1)]
    expected = (moved[0] - moved[1]) / 2e-5
    bent = [Bent(X, Y, like) for X, Y in zip(like.split(x), like.split(y), strict=True)]
    for b in bent:
        b.prepare()
    found = torch.cat([b.following(m) for b, m in zip(bent, (L, -L.mH), strict=True)], -2)
    assert (found - expected).norm() < 0.15 * expected.norm()
    # Exact where both ends have one size.
    X, Y = (torch.linalg.qr(z)[0] for z in (x[:, :12], y[:, :12]))
    skew = L - L.mH
    bent = Bent(X, Y, like)
    bent.prepare()
    ahead, behind = (Bent(X, Y @ torch.linalg.matrix_exp(s * 1e-5 * skew), like).coefficients() for s in (1, -1))
    torch.testing.assert_close(bent.following(skew), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("h", "dtype"), [(2, torch.float64), (1, torch.complex128), (2, torch.complex128)])
def test_a_half_turn_has_no_singular_matrix_on_its_way(h, dtype):
    """From the identity to its negative, where a straight path goes through zero."""
    eye = torch.eye(h, dtype=dtype)
    x, y = (torch.cat([s * eye, s * eye])[None] for s in (1, -1))
    found = first_path(METRICS["inv"](h, h).metric, h, x, y, 4).points()[0]
    assert torch.linalg.svdvals(found).min() > 0.9


def test_an_item_that_is_not_finite_leaves_the_others_alone():
    X = torch.randn(3, 4, 2)
    bad = X.clone()
    bad[1] = torch.nan
    bad[2, 0] = torch.inf
    torch.testing.assert_close(polar(bad)[0], polar(X)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_square_factors_turn_without_losing_rank(dtype):
    manifold = METRICS["inv"](4, 4)
    x, y = (manifold.random(8, 8, 4, dtype=dtype) for _ in range(2))
    if dtype == torch.float64:
        for part in (slice(0, 4), slice(4, 8)):
            wrong = torch.linalg.det(x[:, part]) * torch.linalg.det(y[:, part]) < 0
            y[wrong, part.start] = -y[wrong, part.start]
    path = first_path(manifold.metric, 4, x, y, 4)
    found = path.points()[0]
    lowest = torch.linalg.svdvals(found)[..., -1].amin(1) / torch.linalg.svdvals(x[:, :4])[..., -1]
    straight = x[:, None] + torch.linspace(0, 1, 10)[:, None, None] * (y - x)[:, None]
    assert lowest.median() > 0.2
    if dtype == torch.float64:
        signs = torch.linalg.det(straight[:, :, :4]).sign()
        assert bool((signs != signs[:, :1]).any())


# -- preconditioner ---------------------------------------------------------------------------------------------------


@metric
def test_the_preconditioner_is_symmetric_and_near_the_inverse(name):
    _, path = some_path(name)
    pc = Preconditioner(path)
    a, b = (torch.randn_like(energy(path)[1]) for _ in range(2))
    size = (pc(a, path).norm(dim=1) * b.norm(dim=1)).max().item()
    torch.testing.assert_close((pc(a, path) * b).sum(1), (a * pc(b, path)).sum(1), rtol=0, atol=3e-6 * size)
    assert bool(((pc(a, path) * a).sum(1) > 0).all())

    if name == "inv":  # near the inverse where the path is a geodesic, nearly
        manifold, x, u = problem(name, 6, 5, 2, batch=(3,))
        path = first_path(manifold.metric, 6, x, manifold.expmap(x, 0.5 * u), 4)
        pc = Preconditioner(path)

        def product(d):
            return (energy(path.moved(1e-5 * d))[1] - energy(path.moved(-1e-5 * d))[1]) / 2e-5

        d = torch.randn(20, *a.shape)
        ratios = torch.stack([(v * product(v)).sum(1) / (v * v).sum(1) for v in d])
        # The same quotients in coordinates that the preconditioner makes: P⁻¹ d for d.
        ours = torch.stack([(pc(v, path) * product(pc(v, path))).sum(1) / (v * pc(v, path)).sum(1) for v in d])
        assert ours.min() > 0.3
        assert ours.log().abs().median() < 0.3 * ratios.log().abs().median()


@pytest.mark.parametrize("entry", [torch.nan, torch.inf, 1e153, 1e200])
def test_a_path_that_failed_leaves_the_others_alone(entry):
    manifold, x, u = problem("inv", 5, 4, 3, batch=(3,))
    path = first_path(manifold.metric, 5, x, manifold.expmap(x, 0.5 * u), 4)
    y = path.y.clone()
    y[1] *= entry
    a = torch.randn_like(energy(path)[1])
    found = Preconditioner(replace(path, y=y))(a, path)
    expected = Preconditioner(path)(a, path)[::2]  # in single precision
    torch.testing.assert_close(found[::2], expected, rtol=1e-3, atol=1e-3)


# -- minimise ---------------------------------------------------------------------------------------------------------


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


def test_a_saddle_is_left():
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
    still, minimiser = Minimiser(long), Minimiser(Minimiser(long).disturbed(0.03))
    still.run(200, 1e-6)
    assert still.value > 0.99 * value
    minimiser.run(200, 1e-6)
    assert minimiser.value < 0.8 * value


# -- shortest ---------------------------------------------------------------------------------------------------------


def points(b=12):
    manifold = GLQuotientInv(6, 4)
    return manifold, *(manifold.canonical(manifold.random(b, 10, 2)) for _ in range(2))


def test_a_mirror_image_is_found_where_it_is_nearer(monkeypatch):
    manifold = GLQuotientInv(5, 4)
    x, y = (manifold.canonical(manifold.random(100, 9, 2)) for _ in range(2))
    both = shortest(manifold.metric, 5, x, y)
    monkeypatch.setattr(module, "_MIRRORED", 1)
    one = shortest(manifold.metric, 5, x, y)
    assert max(both.residual.max(), one.residual.max()) <= SOLVED
    assert bool((both.length <= one.length * (1 + 1e-8)).all())
    assert bool((both.length < 0.999 * one.length).any())


def test_the_geodesics_end_where_they_say():
    manifold, x, y = points(4)
    found = shortest(manifold.metric, manifold.n, x, y)
    end, velocity = manifold.geodesic(x, found.u, 1.0)
    torch.testing.assert_close(end, found.end)
    torch.testing.assert_close(velocity, found.end_velocity)
    torch.testing.assert_close(manifold.to_matrix(end), manifold.to_matrix(y), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.length, manifold.norm(x, found.u))


def test_items_do_not_depend_on_their_batch(monkeypatch):
    manifold, x, y = points(5)
    together = shortest(manifold.metric, manifold.n, x, y).length
    monkeypatch.setattr(module, "_CHUNK", 1)
    torch.testing.assert_close(shortest(manifold.metric, manifold.n, x, y).length, together, rtol=1e-8, atol=0)


def test_only_what_is_better_is_kept():
    def made(length, residual):
        two = torch.ones(2, 10, 2)
        lengths, residuals, inf = torch.tensor(length), torch.tensor(residual), torch.full((2,), torch.inf)
        return Shortest(two, two, two, residuals, lengths, inf)

    known = made([1.0, 1.0], [1e-12, 1e-3])
    known.improve(torch.arange(2), made([2.0, 2.0], [1e-13, 1e-12]))
    assert known.length.tolist() == [1.0, 2.0]
    known.improve(torch.arange(2), made([0.5, 2.0], [1e-10, 1e-10]))
    assert known.length.tolist() == [0.5, 2.0]
    assert known.residual.tolist() == [1e-10, 1e-12]
