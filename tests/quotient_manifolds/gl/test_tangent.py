import pytest
import torch
from hypothesis import given

from quotient_manifolds import GLQuotientInv, GLQuotientMix, canonical_gauge
from tests import oracle
from tests.points import ALL, MANIFOLDS, carry, cases, close, metrics, two_points


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
    sizes = torch.tensor([0.02, 0.01, 0.005, 0.0025])

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
