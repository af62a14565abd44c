import pkgutil
import re
from pathlib import Path

import geoopt
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient, canonical_gauge

from . import oracle

MANIFOLDS = {"inv": GLQuotientInv, "mix": GLQuotientMix}
metrics = pytest.mark.parametrize("metric", ["inv", "mix"])


@st.composite
def cases(draw, largest=8):
    """A manifold, a point with well-conditioned factors, an element of GL(h) of a given condition number."""
    metric = draw(st.sampled_from(["inv", "mix"]))
    dtype = draw(st.sampled_from([torch.float64, torch.complex128]))
    h = draw(st.integers(1, largest))
    n, m = h + draw(st.integers(0, 5)), h + draw(st.integers(0, 5))
    batch = draw(st.sampled_from([(), (3,), (2, 2)]))
    condition = 10 ** draw(st.floats(0, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*batch, *shape, dtype=dtype, generator=generator)

    def orthonormal(rows):
        return torch.linalg.qr(normal(rows, h)).Q

    spread = torch.linspace(1, 3, h, dtype=torch.float64)
    G, H = orthonormal(n) * spread @ orthonormal(h), orthonormal(m) * spread @ orthonormal(h)
    s = condition ** torch.linspace(-0.5, 0.5, h, dtype=torch.float64)
    A = (orthonormal(h) * s) @ orthonormal(h).mH
    manifold = MANIFOLDS[metric](n, m)
    return manifold, manifold.pack_point(G, H), A, (lambda: normal(n + m, h)), lambda: normal(h, h)


def carry(manifold, u, A):
    """A tangent vector moved along the orbit: (ξ_G A⁻¹, ξ_H Aᴴ), by an explicit inverse."""
    xi, eta = manifold.unpack_tensor(u)
    return torch.cat([xi @ torch.linalg.inv(A), eta @ A.mH], dim=-2)


def carry_gradient(manifold, e, A):
    P, R = manifold.unpack_tensor(e)
    return torch.cat([P @ A.mH, R @ torch.linalg.inv(A)], dim=-2)


def close(a, b, tolerance=1e-8):
    scale = b.abs().amax()
    assert (a - b).abs().amax() <= tolerance * scale, f"relative difference {(a - b).abs().amax() / scale:.2e}"


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


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_retraction_is_of_second_order(metric, dtype):
    n, m, h = 4, 3, 2
    manifold = MANIFOLDS[metric](n, m)
    x = manifold.random(n + m, h, dtype=dtype)
    u = manifold.proju(x, torch.randn(n + m, h, dtype=dtype))
    u = u / manifold.norm(x, u) * (1.0 if metric == "inv" else 0.5)
    sizes = torch.tensor([0.02, 0.01, 0.005, 0.0025])

    def slope(retraction):
        errors = torch.stack([(retraction(t * u) - oracle.geodesic(metric, n, x, t * u)).abs().max() for t in sizes])
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
    check = {"fast_mode": False, "check_forward_ad": True}
    assert torch.autograd.gradcheck(lambda a, b: manifold.retr(a, manifold.proju(a, b)), (x, u), **check)
    assert torch.autograd.gradcheck(lambda a, b: manifold.egrad2rgrad(a, b), (x, u), **check)
    assert torch.autograd.gradgradcheck(lambda a, b: manifold.inner(a, manifold.proju(a, b)), (x, u))


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
    assert torch.autograd.gradcheck(lambda a: manifold.retr(a, manifold.proju(a, u)), (x,))


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_pullback_is_the_derivative_of_the_retraction(metric, dtype):
    manifold = MANIFOLDS[metric](5, 4)
    space = manifold.tangent_space_at(manifold.random(2, 9, 3, dtype=dtype))
    u = torch.randn(2, 9, 3, dtype=dtype, requires_grad=True)
    P = torch.randn(2, 9, 3, dtype=dtype)
    (expected,) = torch.autograd.grad((P.conj() * space.retr(u)).real.sum(), u)
    close(space.pullback(u.detach(), P), expected, 1e-12)


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
def test_tangent_space_at_a_known_gauge(metric):
    manifold = MANIFOLDS[metric](5, 4)
    x, u = manifold.random(9, 3), torch.randn(9, 3)
    gauge = canonical_gauge(*manifold.unpack_tensor(x))
    close(manifold.at_gauge(gauge, x).proju(u), manifold.proju(x, u), 1e-12)
    canonical = manifold.at_gauge(gauge)
    close(canonical.x, manifold.canonical(x), 1e-12)
    close(canonical.norm(carry(manifold, u, gauge.A)), manifold.norm(x, u), 1e-12)


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


@metrics
def test_float32_stays_float32_and_agrees_with_float64(metric):
    manifold = MANIFOLDS[metric](20, 15)
    x, u = manifold.random(3, 35, 5), torch.randn(3, 35, 5)
    for operation in (manifold.proju, manifold.egrad2rgrad, manifold.retr, manifold.norm):
        single = operation(x.float(), u.float())
        assert single.dtype == torch.float32
        close(single.double(), operation(x, u), 1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@metrics
def test_on_a_gpu(metric):
    manifold = MANIFOLDS[metric](20, 15)
    x, u = manifold.random(3, 35, 5), torch.randn(3, 35, 5)
    for operation in (manifold.proju, manifold.egrad2rgrad, manifold.retr, manifold.norm):
        close(operation(x.cuda(), u.cuda()).cpu(), operation(x, u), 1e-10)


@metrics
def test_the_floor_is_gauge_invariant_and_the_projection_stays_one(metric):
    manifold = MANIFOLDS[metric](6, 5)
    floored = MANIFOLDS[metric](6, 5, relaxation=0.3)
    Q, R = torch.linalg.qr(torch.randn(6, 3)).Q, torch.linalg.qr(torch.randn(5, 3)).Q
    s = torch.tensor([1.0, 0.5, 0.01]).sqrt()
    x = manifold.pack_point(Q * s, R * s)
    u = torch.randn(11, 3)
    A = torch.randn(3, 3)
    y, moved = manifold.act(x, A), carry(manifold, u, A)
    assert not torch.allclose(floored.proju(x, u), manifold.proju(x, u), rtol=1e-3)
    close(floored.proju(y, moved), carry(manifold, floored.proju(x, u), A))
    close(floored.retr(y, moved), manifold.act(floored.retr(x, u), A))
    close(floored.norm(y, moved), floored.norm(x, u))
    p = floored.proju(x, u)
    close(floored.proju(x, p), p, 1e-12)
    assert abs(floored.inner(x, p, manifold.vertical(x, torch.randn(3, 3)))) < 1e-12
    G, _ = manifold.unpack_tensor(y)  # the paper's GᵀG + εI, in contrast, is not a function of the orbit
    additive = torch.eye(3)
    assert not torch.allclose(
        torch.linalg.eigvalsh(G.T @ G + 0.1 * additive), torch.linalg.eigvalsh(torch.diag(s**2) + 0.1 * additive)
    )


def test_a_rank_deficient_point_counts_its_missing_directions_as_absent():
    manifold = GLQuotientMix(6, 5)
    Q, R = torch.linalg.qr(torch.randn(6, 3)).Q, torch.linalg.qr(torch.randn(5, 3)).Q
    s = torch.tensor([1.0, 0.5, 0.0])
    space = manifold.at_gauge(canonical_gauge(Q * s, R * s))
    c = space.project_coordinates(torch.randn(11, 3))
    assert torch.isfinite(c).all()
    assert c[:, 2].abs().max() == 0
    assert torch.isfinite(space.retr(space.from_coordinates(c))).all()


@metrics
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.randn(8, 2), ["5 + 4", "(8, 2)"]),
        (lambda: torch.randn(9, 5), ["h = 5", "min(n, m) = 4"]),
        (lambda: torch.cat([torch.zeros(5, 2), torch.randn(4, 2)]), ["full column rank", "(9, 2)", "B = 0"]),
        (lambda: torch.cat([torch.randn(5, 1).expand(5, 2), torch.randn(4, 2)]), ["full column rank", "factor G"]),
        (lambda: torch.full((9, 2), float("nan")), ["NaN", "(9, 2)"]),
        (lambda: torch.randn(9, 2).index_fill(0, torch.tensor([3]), float("inf")), ["infinite"]),
        (lambda: torch.ones(9, 2, dtype=torch.int64), ["int64", "float32"]),
        (lambda: torch.randn(9, 2).half(), ["float16", "float32"]),
        (lambda: torch.randn(9, 2).bfloat16(), ["bfloat16", "float32"]),
    ],
)
def test_bad_points_are_named(metric, make, words):
    manifold = MANIFOLDS[metric](5, 4)
    x = make()
    for operation in (
        lambda: manifold.proju(x, torch.ones_like(x)),
        lambda: manifold.retr(x, torch.ones_like(x)),
        lambda: manifold.assert_check_point_on_manifold(x),
    ):
        with pytest.raises(ValueError, match=type(manifold).__name__) as caught:
            operation()
        for word in words:
            assert word in str(caught.value)


def test_bad_arguments_are_named():
    manifold = GLQuotientInv(5, 4)
    x = manifold.random(9, 2)
    with pytest.raises(ValueError, match="does not fit the point"):
        manifold.proju(x, torch.randn(9, 3))
    with pytest.raises(ValueError, match=r"dtype torch.float64 .* torch.float32"):
        manifold.inner(x, x, x.float())
    with pytest.raises(ValueError, match="device"):
        manifold.proju(x, torch.empty(9, 2, device="meta"))
    with pytest.raises(ValueError, match="n must be a positive integer"):
        GLQuotientInv(0, 3)
    with pytest.raises(ValueError, match="relaxation"):
        GLQuotientInv(2, 3, relaxation=1.5)
    with pytest.raises(ValueError, match="packs 2 factors"):
        manifold.pack_point(torch.randn(4, 2), torch.randn(5, 2))
    with pytest.raises(ValueError, match="number of columns"):
        manifold.pack_point(torch.randn(5, 2), torch.randn(4, 3))
    for bad, words in (
        (torch.eye(3), "needs matrices"),
        (torch.eye(2).float(), "dtype"),
        (torch.zeros(2, 2), "singular"),
    ):
        with pytest.raises(ValueError, match=words):
            manifold.act(x, bad)
    with pytest.raises(ValueError, match="not horizontal"):
        manifold.assert_check_vector_on_tangent(x, manifold.vertical(x, torch.randn(2, 2)))


@metrics
def test_projx_lifts_a_rank_deficient_tensor_on_the_manifold(metric):
    manifold = MANIFOLDS[metric](5, 4)
    x = torch.cat([torch.zeros(5, 2), torch.randn(4, 2)])
    lifted = manifold.projx(x)
    manifold.assert_check_point_on_manifold(lifted)
    assert torch.equal(lifted[5:], x[5:])
    valid = manifold.random(9, 2)
    assert manifold.projx(valid) is valid
    with pytest.raises(ValueError, match="NaN"):
        manifold.projx(torch.full((9, 2), float("nan")))


@metrics
def test_points_that_pass_the_check_are_accepted(metric):
    """Factors of condition 1e3 and 1e4 in float32: G Hᴴ is rank-deficient to rounding, the point is one."""
    manifold = MANIFOLDS[metric](8, 7, relaxation=1e-3)
    torch.manual_seed(0)
    s = torch.logspace(0, -3, 3)
    G = (torch.linalg.qr(torch.randn(8, 3)).Q * s) @ torch.linalg.qr(torch.randn(3, 3)).Q
    H = (torch.linalg.qr(torch.randn(7, 3)).Q * s**1.3) @ torch.linalg.qr(torch.randn(3, 3)).Q
    x = torch.cat([G, H]).float()
    manifold.assert_check_point_on_manifold(x)
    u = manifold.proju(x, torch.randn(15, 3).float())
    assert manifold.retr(x, 1e-3 * u).isfinite().all()


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
        expected = 2 * space.project_coordinates(space.dual_coordinates(space.pullback(u, egrad)))
        torch.testing.assert_close(space.pullback_coordinates(c, egrad, 2.0), expected)
        out = torch.empty_like(c)
        assert space.retr_coordinates(c, out=out) is out


@metrics
def test_vertical_moment(metric):
    manifold = MANIFOLDS[metric](7, 5)
    x = manifold.random(12, 3)
    space = manifold.tangent_space_at(x)
    u, L = torch.randn_like(x), torch.randn(3, 3)
    A = space.gauge.A
    vertical = manifold.vertical(x, space.gauge.A_inv @ L @ A)  # (GΛ, −HΛᴴ) of the canonical representative
    torch.testing.assert_close((space.vertical_moment(u) * L).sum(), space.inner(u, vertical))
    torch.testing.assert_close((space.vertical_covector(L) * u).sum(), space.inner(u, vertical))
    assert space.vertical_moment(space.proju(u)).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("cls", [GLQuotientInv, GLQuotientMix])
@pytest.mark.parametrize("moved", [False, True])
def test_along_gradient(cls, dtype, moved):
    """Length and retraction of a gradient of a function of the product, also in the frame of an older gauge."""
    manifold = cls(7, 5)
    x = manifold.random(3, 12, 3, dtype=dtype)
    gauge = canonical_gauge(*manifold.unpack_tensor(x))
    if moved:
        x = x + 0.05 * torch.randn_like(x)
    C = torch.randn(3, 7, 5, dtype=dtype)
    G, H = manifold.unpack_tensor(x)
    egrad = torch.cat([C @ H, C.mH @ G], dim=-2)
    square, along = manifold.at_gauge(gauge, x, moved=moved).along_gradient(egrad)
    rgrad = manifold.egrad2rgrad(x, egrad)
    assert torch.allclose(square, manifold.inner(x, rgrad, rgrad), rtol=1e-9)
    for t in (0.0, 0.01, -0.3):
        assert torch.allclose(along(t), manifold.retr(x, t * rgrad), atol=1e-9)


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_derivatives_where_the_floor_is_active(metric, dtype):
    """Singular values 1, 0.9, 0.3, 0.2 under a floor of 0.5: metric, projection and gradient against differences."""
    manifold = MANIFOLDS[metric](6, 5, relaxation=0.5)
    G, H = (torch.linalg.qr(torch.randn(2, n, 4, dtype=dtype)).Q for n in (6, 5))
    root = torch.tensor([1.0, 0.9, 0.3, 0.2]).sqrt()
    x = manifold.act(torch.cat([G * root, H * root], -2), torch.randn(2, 4, 4, dtype=dtype)).requires_grad_()
    a, b, d = (torch.randn_like(x) for _ in range(3))
    for f in (
        lambda x: manifold.inner(x, a, b),
        lambda x: (manifold.proju(x, a) * b.conj()).real.sum((-1, -2)),
        lambda x: (manifold.egrad2rgrad(x, a) * b.conj()).real.sum((-1, -2)),
        lambda x: (manifold.acceleration(x, a) * b.conj()).real.sum((-1, -2)),
    ):
        (g,) = torch.autograd.grad(f(x).sum(), x)
        with torch.no_grad():
            expected = (f(x + 1e-5 * d) - f(x - 1e-5 * d)) / 2e-5
        assert torch.allclose((g.conj() * d).real.sum((-1, -2)), expected, rtol=1e-5)
    (first,) = torch.autograd.grad(manifold.inner(x, a, b).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.real.sum().backward()


ALL = (GLQuotientInv(4, 3), GLQuotientMix(4, 3), RescaleQuotient("inv"), RescaleQuotient("mix"))


def two_points(manifold):
    shape = (2, 2, 5) if isinstance(manifold, RescaleQuotient) else (2, 7, 2)
    x = torch.randn(shape)
    return x, 0.1 * torch.stack([manifold.proju(p, torch.randn_like(p)) for p in x])


@pytest.mark.parametrize("manifold", ALL, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_vectors_that_are_not_finite_are_one_error_everywhere(manifold, bad):
    x, u = two_points(manifold)
    u[0, 0, 0] = bad
    for name in ("inner", "norm", "proju", "egrad2rgrad", "retr", "expmap", "acceleration"):
        with pytest.raises(ValueError, match=r"the vector u of shape .* has NaN or infinite entries"):
            getattr(manifold, name)(x, u)
    with pytest.raises(ValueError, match="has NaN or infinite entries"):
        manifold.transp(x, x, u)
    with pytest.raises(TypeError, match="u must be a tensor, got dict"):
        manifold.proju(x, {})
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        manifold.to_matrix([1.0])


@pytest.mark.parametrize("manifold", ALL, ids=str)
def test_vmap_gives_what_a_batch_gives(manifold):
    x, u = two_points(manifold)
    for name in ("inner", "norm", "proju", "egrad2rgrad", "retr", "acceleration"):
        method = getattr(manifold, name)
        assert torch.allclose(torch.func.vmap(method)(x, u), method(x, u)), name
    for name in ("to_matrix", "canonical", "projx"):
        method = getattr(manifold, name)
        assert torch.allclose(torch.func.vmap(method)(x), method(x)), name
    if manifold is not ALL[1]:  # mix follows its geodesics by an adaptive solver
        assert torch.allclose(torch.func.vmap(manifold.expmap)(x, u), manifold.expmap(x, u))


@pytest.mark.parametrize("manifold", ALL[:2], ids=str)
def test_autocast_does_not_round(manifold):
    x = torch.randn(3, 7, 2, dtype=torch.float32)
    u = torch.randn_like(x)
    names = ("inner", "proju", "egrad2rgrad", "retr", "acceleration")
    expected = [getattr(manifold, name)(x, u) for name in names]
    canonical, product = manifold.canonical(x), manifold.to_matrix(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (u.mT @ x).dtype == torch.bfloat16  # it is on
        for name, value in zip(names, expected, strict=True):
            found = getattr(manifold, name)(x, u)
            assert found.dtype == torch.float32
            assert torch.equal(found, value), name
        assert torch.equal(manifold.canonical(x), canonical)
        assert torch.equal(manifold.to_matrix(x), product)
        assert torch.equal(
            manifold.tangent_space_at(x).coordinates(u), manifold.tangent_space_at(x).coordinates(u).float()
        )


@pytest.mark.parametrize("manifold", ALL[:2], ids=str)
def test_no_tensor_is_made_on_another_device(manifold):
    """With another default device, whatever does not follow its arguments meets a tensor without numbers."""
    x, u = two_points(manifold)
    y = x + 0.05 * torch.randn_like(x)
    with torch.device("meta"):
        assert torch.ones(1).is_meta
        for name in ("inner", "norm", "proju", "egrad2rgrad", "retr", "acceleration", "expmap", "exit_time"):
            assert not getattr(manifold, name)(x, u).is_meta
        for name in ("logmap", "dist", "align"):
            assert not getattr(manifold, name)(x, y).is_meta
        assert not manifold.geodesic(x, u, 0.5)[0].is_meta
        assert not manifold.geodesic_between(x, y, 0.5).is_meta
        assert not manifold.mean(torch.stack([x, y])).is_meta
        assert not manifold.parallel_transport(x, u, u)[1].is_meta


@pytest.mark.parametrize("manifold", ALL[:2], ids=str)
def test_batches_without_points(manifold):
    none = torch.zeros(0, 7, 2)
    for name in ("proju", "retr", "expmap", "acceleration"):
        assert getattr(manifold, name)(none, none).shape == (0, 7, 2)
    assert manifold.norm(none, none).shape == (0,)
    with pytest.raises(ValueError, match="with k ≥ 1"):
        manifold.mean(torch.zeros(0, 7, 2))


@pytest.mark.parametrize("rows", [5.7, True, "5", -1, None])
def test_row_counts_are_whole_numbers(rows):
    with pytest.raises(ValueError, match=r"GLQuotientInv: n must be a positive integer, got"):
        GLQuotientInv(rows, 4)
    assert GLQuotientInv(np.int64(5), 4).n == 5


def test_a_divergent_run_gets_advice_that_helps():
    manifold = GLQuotientMix(4, 3)
    x = geoopt.ManifoldParameter(manifold.random(7, 2), manifold=manifold)
    optimizer = geoopt.optim.RiemannianSGD([x], lr=1e12)
    for _ in range(20):
        optimizer.zero_grad()
        (manifold.to_matrix(x) - 1).square().sum().backward()
        try:
            optimizer.step()
        except ValueError as error:
            assert "lower the learning rate" in str(error) or "learning rate is too high" in str(error)  # noqa: PT017
            return
    pytest.fail("it did not diverge")


def test_every_formula_stands_where_the_page_says():
    page = (Path(__file__).parents[1] / "docs" / "math" / "geometry.md").read_text()
    names = re.findall(r"`(quotient_manifolds\.[\w.]+)`", page)
    assert len(names) > 12
    for name in names:
        assert pkgutil.resolve_name(name) is not None
