"""Canonical gauge, metrics, tangent spaces and their coordinates."""

import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given

from quotient_manifolds import GLQuotientInv, GLQuotientMix, GLTangentSpace, canonical_gauge, from_matrix
from quotient_manifolds.metrics import METRICS
from tests.support import oracle
from tests.support.points import ALL, MANIFOLDS, carry, cases, close, metrics, two_points

# -- gauge ------------------------------------------------------------------------------------------------------------


@metrics
def test_tangent_space_at_a_known_gauge(metric):
    manifold = MANIFOLDS[metric](5, 4)
    x, u = manifold.random(9, 3), torch.randn(9, 3)
    gauge = canonical_gauge(*manifold.unpack_tensor(x))
    close(GLTangentSpace(manifold.metric, gauge, x).proju(u), manifold.proju(x, u), 1e-12)
    canonical = GLTangentSpace(manifold.metric, gauge)
    close(canonical.x, manifold.canonical(x), 1e-12)
    close(canonical.norm(carry(manifold, u, gauge.A)), manifold.norm(x, u), 1e-12)


@given(cases())
def test_canonical_representative(case):
    manifold, x, A, _, _ = case
    c = manifold.canonical(x)
    close(manifold.to_matrix(c), manifold.to_matrix(x))
    G, H = manifold.unpack_tensor(c)
    M, N = G.mH @ G, H.mH @ H
    close(M, N)
    close(M, torch.diag_embed(M.diagonal(dim1=-2, dim2=-1)))
    sigma = M.diagonal(dim1=-2, dim2=-1).real
    gaps = (sigma[..., :-1] - sigma[..., 1:]).min() if sigma.shape[-1] > 1 else torch.tensor(1.0)
    if gaps > 1e-2:
        close(manifold.canonical(manifold.act(x, A)), c, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_from_matrix(dtype):
    W = torch.randn(2, 6, 5, dtype=dtype)
    x = from_matrix(W, 3)
    G, H = x.split([6, 5], dim=-2)
    U, s, Vh = torch.linalg.svd(W, full_matrices=False)
    assert torch.allclose(G @ H.mH, (U[..., :3] * s[..., None, :3]) @ Vh[..., :3, :])
    assert torch.allclose(G.mH @ G, H.mH @ H)
    with pytest.raises(ValueError, match="no point of rank 6"):
        from_matrix(W, 6)
    with pytest.raises(ValueError, match="rank below 2"):
        from_matrix(torch.ones(3, 3), 2)


def test_factors_of_two_precisions_and_numbers_of_numpy():
    with pytest.raises(ValueError, match=r"a pair: G of shape \(4, 2\) has dtype torch.float32 but H"):
        canonical_gauge(torch.randn(4, 2, dtype=torch.float32), torch.randn(3, 2, dtype=torch.float64))
    assert from_matrix(torch.randn(4, 3), np.int64(2)).shape == (7, 2)
    with pytest.raises(ValueError, match="from_matrix: h must be a whole number of at least 1"):
        from_matrix(torch.randn(4, 3), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_factors_of_any_size_have_a_gauge(dtype):
    """What is representable is right to rounding; singular values that are not are one error."""
    G, H = torch.linalg.qr(torch.randn(5, 2)).Q.to(dtype), torch.linalg.qr(torch.randn(4, 2)).Q.to(dtype)
    one, large = canonical_gauge(G, H), 2.0 ** (62 if dtype == torch.float32 else 500)
    for p, q in ((large, 1 / large), (large, 1.0), (1.0, 1 / large), (large, 0.5)):
        gauge, eps = canonical_gauge(p * G, q * H), 50 * torch.finfo(dtype).eps
        close(gauge.x / (p * q) ** 0.5, one.x, eps)
        close(gauge.sigma / p / q, one.sigma, eps)
        close(gauge.A * (q / p) ** 0.5, one.A, eps)
        close(gauge.A @ gauge.A_inv, torch.eye(2).to(dtype), eps)
    for size in (2.0**24 * large, 2.0**-24 / large):
        with pytest.raises(ValueError, match=r"singular values of G Hᴴ over- or underflow in torch.float\d\d; rescale"):
            canonical_gauge(size * G, size * H)
    assert torch.equal(canonical_gauge(0 * G, H).sigma, torch.zeros(2, dtype=dtype))  # an absent factor is no underflow


def test_from_matrix_of_any_size_and_its_derivative():
    X = torch.randn(4, 3)
    for size in (2.0**-1000, 2.0**1000):
        close(from_matrix(size * X, 2) / size**0.5, from_matrix(X, 2), 1e-12)
    X.requires_grad_()
    assert torch.autograd.gradcheck(lambda X: from_matrix(X, 2).square().sum(), X)
    equal = torch.eye(3).requires_grad_()
    with pytest.raises(ValueError, match="no derivative where singular values are equal"):
        from_matrix(equal, 2)[0].sum().backward()
    with pytest.raises(ValueError, match="NaN or infinite"):
        from_matrix(torch.full((3, 3), torch.nan), 1)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_the_printed_sylvester_equation_is_not_the_projection():
    # Paper, §5.2: AΛ + ΛAᵀ = B in place of AΛᵀ + ΛᵀA = B.
    manifold = GLQuotientInv(5, 4)
    x, u = manifold.random(9, 3), torch.randn(9, 3)
    G, H = manifold.unpack_tensor(x)
    xi, eta = manifold.unpack_tensor(u)
    A = (G.T @ G) @ (H.T @ H)
    B = G.T @ G @ H.T @ eta - xi.T @ G @ H.T @ H
    eye = torch.eye(3)
    L = torch.linalg.solve(torch.kron(A, eye) + torch.kron(eye, A), B.reshape(-1)).reshape(3, 3)
    printed = torch.cat([xi + G @ L, eta - H @ L.T])
    assert not manifold.check_vector_on_tangent(x, printed)
    assert manifold.check_vector_on_tangent(x, manifold.proju(x, u))


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("n", "m", "h"), [(4, 3, 1), (5, 4, 3), (3, 3, 3)])
def test_against_the_definitions(metric, dtype, n, m, h):
    manifold = MANIFOLDS[metric](n, m)
    x, u, v = (torch.randn(n + m, h, dtype=dtype) for _ in range(3))
    close(manifold.inner(x, u, v), oracle.metric(metric, n, x, u, v), 1e-10)
    close(manifold.proju(x, u), oracle.project(metric, n, x, u), 1e-10)
    close(manifold.acceleration(x, u), oracle.euler_lagrange(metric, n, x, u), 1e-8)
    # The Riemannian gradient represents the differential on horizontal vectors.
    g = manifold.egrad2rgrad(x, u)
    p = manifold.proju(x, v)
    close(manifold.inner(x, g, p), (u.conj() * p).real.sum(), 1e-10)


def test_every_formula_stands_where_the_page_says():
    page = (Path(__file__).parents[2] / "docs" / "math" / "geometry.md").read_text(encoding="utf-8")
    names = re.findall(r"`(quotient_manifolds\.[\w.]+)`", page)
    assert len(names) > 12
    for name in names:
        assert pkgutil.resolve_name(name) is not None


# -- tangent ----------------------------------------------------------------------------------------------------------


def carry_gradient(manifold, e, A):
    P, R = manifold.unpack_tensor(e)
    return torch.cat([P @ A.mH, R @ torch.linalg.inv(A)], dim=-2)


@given(cases())
def test_projection_is_idempotent_horizontal_and_orthogonal_to_every_vertical_vector(case):
    manifold, x, _, vector, algebra = case
    p = manifold.proju(x, vector())
    close(manifold.proju(x, p), p, 1e-10)
    G, H = manifold.unpack_tensor(x)
    M, N = G.mH @ G, H.mH @ H
    xi, eta = manifold.unpack_tensor(p)
    if isinstance(manifold, GLQuotientInv):
        left, right = xi.mH @ G @ N, M @ H.mH @ eta
    else:
        left, right = G.mH @ xi @ N, M @ eta.mH @ H
    assert (left - right).abs().max() <= 1e-10 * left.abs().max().clamp_min(1)
    v = manifold.vertical(x, algebra())
    cosine = manifold.inner(x, p, v) / (manifold.norm(x, p) * manifold.norm(x, v)).clamp_min(1e-300)
    assert cosine.abs().max() < 1e-10


@given(cases())
def test_every_operation_is_equivariant(case):
    manifold, x, A, vector, _ = case
    y = manifold.act(x, A)
    u, v, e = vector(), vector(), vector()
    moved = carry(manifold, u, A)
    close(manifold.to_matrix(y), manifold.to_matrix(x))
    close(manifold.inner(y, moved, carry(manifold, v, A)), manifold.inner(x, u, v))
    close(manifold.norm(y, moved), manifold.norm(x, u))
    close(manifold.proju(y, moved), carry(manifold, manifold.proju(x, u), A))
    gradient = manifold.egrad2rgrad(x, e)
    close(manifold.egrad2rgrad(y, carry_gradient(manifold, e, A)), carry(manifold, gradient, A))
    close(manifold.acceleration(y, moved), carry(manifold, manifold.acceleration(x, u), A))
    close(manifold.retr(y, moved), manifold.act(manifold.retr(x, u), A))


def test_the_equivariance_test_can_fail():
    manifold = GLQuotientInv(5, 4)
    x, u = manifold.random(9, 3), torch.randn(9, 3)
    A = torch.diag(torch.tensor([1.0, 10.0, 100.0]))
    with pytest.raises(AssertionError, match="relative difference"):  # the straight step in Euclidean projection
        close(manifold.act(x, A) + carry_gradient(manifold, u, A), manifold.act(x + u, A))
    with pytest.raises(AssertionError, match="relative difference"):  # the Euclidean norm
        close(carry(manifold, u, A).norm(), u.norm())


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_retraction_is_of_second_order(metric, dtype):
    n, m, h = 4, 3, 2
    manifold = MANIFOLDS[metric](n, m)
    x = manifold.random(n + m, h, dtype=dtype)
    u = manifold.proju(x, torch.randn(n + m, h, dtype=dtype))
    u = u / manifold.norm(x, u) * (1.0 if metric == "inv" else 0.5)
    sizes = torch.tensor([0.02, 0.0025])

    exact = [oracle.geodesic(metric, n, x, t * u) for t in sizes]

    def slope(retraction):
        errors = torch.stack([(retraction(t * u) - end).abs().max() for t, end in zip(sizes, exact, strict=True)])
        logs = torch.log(sizes) - torch.log(sizes).mean()
        return float((logs * torch.log(errors)).sum() / (logs**2).sum())

    assert abs(slope(lambda v: manifold.retr(x, v)) - 3) < 0.1
    assert abs(slope(lambda v: x + v) - 2) < 0.1  # the test tells the order: a straight step has one less


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_batched_equals_looped(metric, dtype):
    manifold = MANIFOLDS[metric](6, 5)
    x, u = (torch.randn(2, 3, 11, 4, dtype=dtype) for _ in range(2))
    for operation in (manifold.proju, manifold.egrad2rgrad, manifold.acceleration, manifold.retr, manifold.norm):
        batched = operation(x, u)
        for i in range(2):
            for j in range(3):
                close(operation(x[i, j], u[i, j]), batched[i, j], 1e-10)
    # Vectors broadcast against the point and the point against vectors.
    close(manifold.proju(x[0, 0], u), manifold.proju(x[0, 0].expand_as(u), u), 1e-10)
    close(manifold.proju(x, u[0, 0]), manifold.proju(x, u[0, 0].expand_as(x)), 1e-10)


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_derivatives(metric, dtype):
    manifold = MANIFOLDS[metric](3, 3)
    x = torch.randn(6, 2, dtype=dtype, requires_grad=True)
    u = torch.randn(6, 2, dtype=dtype, requires_grad=True)
    check = {"fast_mode": True, "check_forward_ad": True}
    assert torch.autograd.gradcheck(lambda a, b: manifold.retr(a, manifold.proju(a, b)), (x, u), **check)
    assert torch.autograd.gradcheck(lambda a, b: manifold.egrad2rgrad(a, b), (x, u), **check)
    assert torch.autograd.gradgradcheck(lambda a, b: manifold.inner(a, manifold.proju(a, b)), (x, u), fast_mode=True)


@metrics
def test_the_norm_has_the_curvature_of_the_metric_at_zero(metric):
    manifold = MANIFOLDS[metric](4, 3)
    x, u = manifold.random(7, 2), torch.randn(7, 2)
    form = torch.func.hessian(lambda v: manifold.inner(x, manifold.proju(x, v)) / 2)(torch.zeros(7, 2))
    close((form * u).sum((-2, -1)).mul(u).sum(), manifold.inner(x, manifold.proju(x, u)), 1e-10)


@metrics
def test_derivatives_where_singular_values_coincide(metric):
    manifold = MANIFOLDS[metric](4, 3)
    x = manifold.origin(7, 3).requires_grad_()
    u = torch.randn(7, 3)
    assert torch.autograd.gradcheck(lambda a: manifold.retr(a, manifold.proju(a, u)), (x,), fast_mode=True)


@given(cases())
def test_random_vectors_depend_on_the_orbit_alone(case):
    manifold, x, A, _, _ = case
    y = manifold.act(x, A)
    one = manifold.tangent_space_at(x).random(torch.Generator().manual_seed(3))
    two = manifold.tangent_space_at(y).random(torch.Generator().manual_seed(3))
    close(two, carry(manifold, one, A))
    assert manifold.check_vector_on_tangent(x, one)


@metrics
def test_random_vectors_are_standard_gaussian(metric):
    manifold = MANIFOLDS[metric](5, 4)
    space = manifold.tangent_space_at(manifold.random(9, 2).expand(4000, 9, 2))
    square = space.inner(space.random(torch.Generator().manual_seed(0)))
    dimension = 9 * 2 - 4
    assert abs(square.mean() - dimension) < 5 * (2 * dimension / 4000) ** 0.5


@pytest.mark.parametrize("manifold", ALL, ids=str)
def test_vmap_gives_what_a_batch_gives(manifold):
    x, u = two_points(manifold)
    for name in ("inner", "norm", "proju", "egrad2rgrad", "retr", "acceleration", "expmap"):
        method = getattr(manifold, name)
        assert torch.allclose(torch.func.vmap(method)(x, u), method(x, u)), name
    for name in ("to_matrix", "canonical", "projx"):
        method = getattr(manifold, name)
        assert torch.allclose(torch.func.vmap(method)(x), method(x)), name


@pytest.mark.parametrize("manifold", ALL[:2], ids=str)
def test_autocast_does_not_round(manifold):
    x = torch.randn(3, 7, 2, dtype=torch.float32)
    u = torch.randn_like(x)
    names = ("inner", "proju", "egrad2rgrad", "retr", "acceleration")
    expected = [getattr(manifold, name)(x, u) for name in names]
    canonical, product = manifold.canonical(x), manifold.to_matrix(x)
    coordinates = manifold.tangent_space_at(x).coordinates(u)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (u.mT @ x).dtype == torch.bfloat16  # it is on
        for name, value in zip(names, expected, strict=True):
            found = getattr(manifold, name)(x, u)
            assert found.dtype == torch.float32
            assert torch.equal(found, value), name
        assert torch.equal(manifold.canonical(x), canonical)
        assert torch.equal(manifold.to_matrix(x), product)
        assert torch.equal(manifold.tangent_space_at(x).coordinates(u), coordinates)


# -- local metric -----------------------------------------------------------------------------------------------------


def test_a_rank_deficient_point_counts_its_missing_directions_as_absent():
    manifold = GLQuotientMix(6, 5)
    Q, R = torch.linalg.qr(torch.randn(6, 3)).Q, torch.linalg.qr(torch.randn(5, 3)).Q
    s = torch.tensor([1.0, 0.5, 0.0])
    space = GLTangentSpace(manifold.metric, canonical_gauge(Q * s, R * s))
    c = space.project_coordinates(torch.randn(11, 3))
    assert torch.isfinite(c).all()
    assert c[:, 2].abs().max() == 0
    assert torch.isfinite(space.retr(space.from_coordinates(c))).all()


# -- coordinates ------------------------------------------------------------------------------------------------------


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
        space = GLTangentSpace(manifold.metric, gauge, tolerance=tolerance)
        c, egrad = space.project_coordinates(torch.randn_like(x)), torch.randn_like(x)
        u = space.from_coordinates(c)
        torch.testing.assert_close(space.retr_coordinates(c), space.retr(u))
        u.requires_grad_()
        (slope,) = torch.autograd.grad((egrad.conj() * space.retr(u)).real.sum(), u)
        expected = space.project_coordinates(space.dual_coordinates(slope))
        torch.testing.assert_close(space.pullback_coordinates(c, egrad), expected)
        out = torch.empty_like(c)
        assert space.pullback_coordinates(c, egrad, out=out) is out


@metrics
@pytest.mark.parametrize("spread", [1e5, 1e7])
def test_weak_directions_in_single_precision(metric, spread):
    """σ_h is below the rounding of σ_1 in the product, but not in the factors: it moves as in double precision."""
    manifold, (a, b, turn) = (
        MANIFOLDS[metric](3, 3),
        (torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0] for _ in range(3)),
    )
    scales = torch.tensor([1.0, spread**-0.5, 1 / spread], dtype=torch.float64).sqrt()
    x = (torch.cat([a * scales, b * scales]) @ turn).float()
    exact = manifold.proju(x.double(), torch.randn(6, 3, dtype=torch.float64) * scales @ turn)
    exact = exact * (0.5 if metric == "inv" else 0.1 / spread) / manifold.norm(x.double(), exact)
    u = exact.float()
    # Rounding of the factors, 6e-8, is divided by the square root of the spread.
    tolerance = {"rtol": 1e-6 * spread**0.5, "atol": 0.0}
    torch.testing.assert_close(manifold.norm(x, u).double(), manifold.norm(x.double(), exact), **tolerance)
    weakest = []
    for point, vector in ((x, u), (x.double(), exact)):
        G, H = manifold.unpack_tensor(manifold.expmap(point, vector).double())
        weakest.append(torch.linalg.svdvals(G @ H.mT)[-1])
    torch.testing.assert_close(weakest[0], weakest[1], **tolerance)
    G, H = manifold.unpack_tensor(manifold.canonical(x).double())
    torch.testing.assert_close(
        torch.linalg.svdvals(G @ H.mT)[-1] * spread, torch.ones((), dtype=torch.float64), **tolerance
    )


@metrics
def test_a_direction_that_is_rounding_of_the_product_is_refused(metric):
    x = torch.cat([torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64))] * 2)
    with pytest.raises(ValueError, match="nothing could move along it; use fewer columns"):
        MANIFOLDS[metric](2, 2).norm(x, x)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_look_without_derivatives_leaves_those_of_the_next(metric):
    """What a space computes once follows the point, whatever is asked of it first."""
    torch.manual_seed(0)
    G, H = (torch.randn(n, 2, dtype=torch.float64) for n in (5, 4))
    u, found = torch.randn(9, 2, dtype=torch.float64), []
    for look in (False, True):
        own = G.clone().requires_grad_()
        space = GLTangentSpace(METRICS[metric], canonical_gauge(own, H))
        if look:
            with torch.no_grad():
                space.coordinates(u)
        (gradient,) = torch.autograd.grad(space.coordinates(u).square().sum(), own)
        found.append(gradient)
    assert float(found[0].norm()) > 0
    torch.testing.assert_close(*found)
