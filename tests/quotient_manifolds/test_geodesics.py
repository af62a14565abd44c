"""Exact geodesics."""

import math
import pickle

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch.autograd import forward_ad

from quotient_manifolds import (
    ConvergenceError,
    GeodesicExitError,
    GLQuotientInv,
    GLQuotientMix,
    GLTangentSpace,
    RescaleQuotient,
    canonical_gauge,
)
from tests.support import oracle
from tests.support.extent import EXHAUSTIVE, checkered
from tests.support.geodesics import METRICS, field, metric, problem

# -- geodesic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    checkered(METRICS, (torch.float64, torch.complex128), ((7, 5, 3), (4, 6, 1), (3, 3, 3), (3, 8, 3))),
    ids=str,
)
def test_expmap_against_integration(name, dtype, shape):
    manifold, x, u = problem(name, *shape, dtype=dtype)
    expected = oracle.geodesic(name, shape[0], x, u)
    found = manifold.expmap(x, u)
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()
    assert (manifold.retr(x, u) - expected).abs().max() > 1e-5  # which the second-order retraction does not meet


@metric
@field
def test_speed_and_horizontality_along_the_way(name, dtype):
    manifold, x, u = problem(name, dtype=dtype, batch=(2,))
    t = torch.tensor([[-1.0, -0.3, 0.0], [0.2, 0.7, 1.0]])
    points, velocities = manifold.geodesic(x, u, t)
    assert points.shape == velocities.shape == (2, 3, *x.shape)
    norms = manifold.norm(points, velocities)
    torch.testing.assert_close(norms, manifold.norm(x, u).expand_as(norms), rtol=1e-10, atol=0)
    off = manifold.norm(points, velocities - manifold.proju(points, velocities))
    assert off.max() < 1e-10 * norms.max()
    torch.testing.assert_close(points[0, 2], x)
    torch.testing.assert_close(velocities[0, 2], u)
    torch.testing.assert_close(points[1, 2], manifold.expmap(x, u), rtol=1e-11, atol=1e-11)
    # The velocity is the derivative.
    plus, minus = (manifold.geodesic(x, u, 0.7 + d)[0] for d in (1e-5, -1e-5))
    torch.testing.assert_close((plus - minus) / 2e-5, velocities[1, 1], rtol=1e-6, atol=1e-6)


@metric
@field
def test_equivariance(name, dtype):
    manifold, x, u = problem(name, dtype=dtype)
    U, V = (torch.linalg.qr(torch.randn(3, 3, dtype=dtype))[0] for _ in range(2))
    A = U @ torch.diag(torch.tensor([100.0, 1.0, 0.01])).to(dtype) @ V
    y = manifold.act(x, A)
    v = manifold.act(x + u, A) - y
    end, moved = manifold.act(manifold.expmap(x, u), A), manifold.expmap(y, v)
    assert (end - moved).abs().max() < 1e-8 * end.abs().max()


@field
def test_square_matrices_move_on_straight_lines(dtype):
    manifold, x, u = problem("mix", 3, 3, 3, dtype=dtype)
    (G, H), (xi, eta) = manifold.unpack_tensor(x), manifold.unpack_tensor(u)
    t = torch.linspace(0, 1, 5)
    expected = G @ H.mH + t[:, None, None] * (xi @ H.mH + G @ eta.mH)
    found = manifold.to_matrix(manifold.geodesic(x, u, t)[0])
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


@metric
def test_error_of_the_second_order_retraction(name):
    manifold, x, u = problem(name)
    errors = []
    for k in range(4, 8):
        step = u / 2**k
        errors.append(float((manifold.retr(x, step) - manifold.expmap(x, step)).norm()))
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    np.testing.assert_allclose(ratios, 8, atol=0.5)


def test_scalar_closed_forms():
    """Paper, Appendix D and §5.1: (g eᴮᵗ, h eᴮᵗ) and (g, h) √(1 + 2Bt)."""
    g, h, B = 1.3, -0.4, 0.35
    x, u = torch.tensor([[g], [h]]), torch.tensor([[g * B], [h * B]])
    t = torch.linspace(-1, 3, 9)
    inv = GLQuotientInv(1, 1).geodesic(x, u, t)[0]
    torch.testing.assert_close(inv, x * torch.exp(B * t)[:, None, None], rtol=1e-12, atol=0)
    mix = GLQuotientMix(1, 1).geodesic(x, u, t)[0]
    torch.testing.assert_close(mix, x * torch.sqrt(1 + 2 * B * t)[:, None, None], rtol=1e-10, atol=0)
    with pytest.raises(GeodesicExitError, match="leaves the manifold at t = ") as caught:
        GLQuotientMix(1, 1).geodesic(x, -u, 3.0)
    assert caught.value.time == pytest.approx(1 / (2 * B), rel=1e-9)


def test_exit_times():
    """For square matrices a geodesic leaves where det(X₀ + t D) first vanishes."""
    manifold, x, u = problem("mix", 3, 3, 3, length=6.0, batch=(4,))
    x[0] = manifold.canonical(x[0])
    u[0] = -x[0] * torch.tensor([0.0, 0.0, 0.9])  # the least singular value vanishes at t = 1/1.8
    least = torch.linalg.svdvals(manifold.to_matrix(x))[:, 2]
    u[1] = 0.6 / 6.0 * least[1] * u[1]  # too short to leave: the boundary is σ/√2 away
    (G, H), (xi, eta) = manifold.unpack_tensor(x), manifold.unpack_tensor(u)
    X0, D = G @ H.mH, xi @ H.mH + G @ eta.mH
    times = []
    for a, b in zip(X0.numpy(), D.numpy(), strict=True):
        grid = np.linspace(0, 1, 4001)
        values = np.linalg.det(a + grid[:, None, None] * b)
        crossing = np.nonzero(values[:-1] * values[1:] < 0)[0]
        times.append(
            brentq(lambda t, a=a, b=b: np.linalg.det(a + t * b), *grid[crossing[0] : crossing[0] + 2], xtol=1e-14)
            if len(crossing)
            else math.inf
        )
    expected = torch.tensor(times)
    assert expected[1].isinf()
    assert expected[0] == pytest.approx(1 / 1.8)
    found = manifold.tangent_space_at(x).exit_time(u)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)
    with pytest.raises(GeodesicExitError) as caught:
        manifold.expmap(x, u)
    assert caught.value.time == pytest.approx(min(times), rel=1e-8)
    torch.testing.assert_close(caught.value.times, expected, rtol=1e-8, atol=0)
    inside = u * (0.99 * expected).clamp_max(1)[:, None, None]
    assert manifold.expmap(x, inside).isfinite().all()
    assert manifold.retr(x, u).isfinite().all()  # silent, as optimisers need
    assert GLQuotientInv(3, 3).tangent_space_at(x).exit_time(u).isinf().all()


@metric
@pytest.mark.parametrize("zero", [False, True])
def test_derivatives(name, zero):
    manifold, x, u = problem(name, 4, 3, 2, length=0.2)
    u = torch.zeros_like(u) if zero else u
    # Along horizontal vectors, on which the exponential is defined.
    basis = torch.stack([manifold.proju(x, e.view_as(x)) for e in torch.eye(x.numel())])

    def end(c):
        return manifold.expmap(x, u + torch.einsum("i,ijk->jk", c, basis))

    assert torch.autograd.gradcheck(end, torch.zeros(len(basis), requires_grad=True), atol=1e-6, fast_mode=True)

    def from_point(y):
        return manifold.to_matrix(manifold.expmap(y, manifold.proju(y, u)))

    assert torch.autograd.gradcheck(from_point, x.clone().requires_grad_(), atol=1e-6, fast_mode=True)


@metric
def test_float32(name):
    manifold, x, u = problem(name, 40, 30, 8, batch=(3,))
    exact = manifold.expmap(x, u)
    rounded = manifold.expmap(x.float(), u.float())
    assert rounded.dtype == torch.float32
    assert (rounded.double() - exact).abs().max() < 1e-4 * exact.abs().max()


def test_expmap_and_transport_of_geoopt_agree():
    for name in METRICS:
        manifold, x, u = problem(name)
        v = manifold.proju(x, torch.randn_like(x))
        y, w = manifold.expmap_transp(x, u, v)
        torch.testing.assert_close(y, manifold.expmap(x, u))
        torch.testing.assert_close(w, manifold.transp(x, y, v))
        torch.testing.assert_close(manifold.transp_follow_expmap(x, u, v), w)


def test_no_times_and_times_that_mean_nothing():
    for manifold in (GLQuotientInv(4, 3), GLQuotientMix(4, 3)):
        x = manifold.random(7, 2)
        u = manifold.proju(x, 0.1 * torch.randn(7, 2))
        points, velocities = manifold.geodesic(x, u, torch.zeros(0))
        assert points.shape == velocities.shape == (0, 7, 2)


def test_an_exit_backwards_has_a_negative_time():
    for manifold, shape in ((GLQuotientMix(1, 1), (2, 1)), (RescaleQuotient("mix"), (2, 1))):
        x = torch.ones(shape)
        for direction in (1, -1):
            with pytest.raises(GeodesicExitError, match=f"at t = {'-' * (direction < 0)}0.5, before") as caught:
                manifold.geodesic(x, -direction * x, [0.1 * direction, float(direction)])
            assert caught.value.time == pytest.approx(0.5 * direction, rel=1e-6)


def test_errors_travel_between_processes():
    for error in (GeodesicExitError("left", 0.5, torch.ones(2)), ConvergenceError("missed", torch.ones(2))):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))
        for name in vars(error):
            assert torch.equal(torch.as_tensor(getattr(copy, name)), torch.as_tensor(getattr(error, name)))


@metric
@field
def test_every_mode_of_differentiation(name, dtype):
    """Reverse and forward mode, and torch.func: grad, jvp, vmap and their compositions."""
    manifold, x, u = problem(name, 5, 4, 2, dtype=dtype, batch=(3,))
    u = u / 8  # a few steps of the solver, through which every mode goes
    covector, dx, du = torch.randn(5, 4, dtype=dtype), torch.randn_like(x), torch.randn_like(u)

    def value(x, u):
        return (manifold.to_matrix(manifold.expmap(x, u)) * covector).real.sum()

    points = x.clone().requires_grad_(), u.clone().requires_grad_()
    expected = torch.autograd.grad(value(*points), points)
    found = torch.func.grad(value, (0, 1))(x, u)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    ends = [value(x + s * 1e-6 * dx, u + s * 1e-6 * du) for s in (1, -1)]
    slope = (ends[0] - ends[1]) / 2e-6
    torch.testing.assert_close(torch.func.jvp(value, (x, u), (dx, du))[1], slope, rtol=1e-6, atol=1e-6)
    with forward_ad.dual_level():
        dual = value(forward_ad.make_dual(x, dx), forward_ad.make_dual(u, du))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, slope, rtol=1e-6, atol=1e-6)
    each = torch.func.vmap(torch.func.grad(value))(x, u)
    torch.testing.assert_close(each, expected[0])
    if name == "mix" and (EXHAUSTIVE or not dtype.is_complex):  # what torch.vmap hides counts: items leave the manifold
        times = manifold.tangent_space_at(x).exit_time(-10 * x)
        assert bool(times.isfinite().all())
        found = torch.func.vmap(lambda x, u: manifold.tangent_space_at(x).exit_time(u))(x, -10 * x)
        torch.testing.assert_close(found, times)
        with pytest.raises(GeodesicExitError, match="leaves the manifold"):
            torch.func.vmap(manifold.expmap)(x, -10 * x)


# -- geodesic ode -----------------------------------------------------------------------------------------------------


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
    space = GLTangentSpace(manifold.metric, canonical_gauge(*manifold.unpack_tensor(lacking)))
    assert not bool(space.present[2])
    u = space.from_coordinates(space.project_coordinates(0.1 * torch.randn(12, 3)))
    end, _ = space.geodesic(u)
    # The same as the point of rank 2.
    smaller = METRICS[name](7, 5)
    two = GLTangentSpace(smaller.metric, canonical_gauge(lacking[:7, :2], lacking[7:, :2]))
    end_of_two, _ = two.geodesic(u[:, :2] * torch.sign((space.x[:, :2] * two.x).sum(0)))
    reference = smaller.to_matrix(end_of_two)
    torch.testing.assert_close(manifold.to_matrix(end), reference, rtol=1e-9, atol=1e-9)
