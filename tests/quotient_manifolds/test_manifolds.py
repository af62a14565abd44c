"""geoopt's own checks of a manifold, its containers and optimisers, sizes, and the sentences of errors."""

import collections
import contextlib
import copy
import gc
import io
import itertools
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import geoopt
import numpy as np
import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient
from quotient_manifolds.base import TangentSpace
from quotient_manifolds.manifold import GLQuotient
from quotient_manifolds.metrics import MIX
from tests.support.extent import EXHAUSTIVE, checkered, share
from tests.support.points import ALL, MANIFOLDS, carry, close, metrics, two_points

# -- base -------------------------------------------------------------------------------------------------------------


UnaryCase = collections.namedtuple("UnaryCase", "shape,x,ex,v,ev,manifold")


def gl_case(manifold):
    generator = torch.Generator().manual_seed(42)
    shape = (manifold.n + manifold.m, 3)
    ex, ev = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    x = ex.clone()  # every tensor of full rank is a point
    ev = ev * (reach(manifold, x) / manifold.norm(x, manifold.proju(x, ev)))
    v = manifold.proju(x, ev)
    return UnaryCase(shape, geoopt.ManifoldTensor(x, manifold=manifold), ex, v, ev, manifold)


def reach(manifold, x):
    """Length of tangents within the region where the geodesic is the shortest, and where the logarithm finds it.

    inv: 1, far less than the π/2 by which columns could turn; mix: 0.3 σ_h, where σ_h/√2 may leave the manifold.
    """
    if isinstance(manifold, GLQuotientInv):
        return 1.0
    return 0.3 * float(torch.linalg.svdvals(manifold.to_matrix(x))[x.shape[-1] - 1])


def rescale_case(metric):
    manifold = RescaleQuotient(metric)
    generator = torch.Generator().manual_seed(42)
    ex, ev = (torch.randn((2, 6), dtype=torch.float64, generator=generator) for _ in range(2))
    # The mix geodesic leaves the manifold where 1 + 2B ≤ 0: keep |B| ≤ 0.2.
    ev = ev * ex.abs() / 10
    v = ex * (ev / ex).mean(0)
    return UnaryCase((2, 6), geoopt.ManifoldTensor(ex.clone(), manifold=manifold), ex, v, ev, manifold)


CASES = [gl_case(GLQuotientInv(7, 5)), gl_case(GLQuotientMix(7, 5)), rescale_case("inv"), rescale_case("mix")]


@pytest.fixture(params=[True, False], ids=["Scaled", "NotScaled"])
def scaled(request):
    return request.param


@pytest.fixture(params=[1, 2, 3, 4, 5] if EXHAUSTIVE else [1])
def seed(request):
    torch.manual_seed(request.param)


#: Tests that draw numbers, each with several seeds.
drawn = pytest.mark.usefixtures("seed")


@pytest.fixture(params=CASES, ids=lambda case: repr(case.manifold))
def unary_case(request, scaled):
    case = request.param
    return case._replace(manifold=geoopt.Scaled(case.manifold, 2)) if scaled else case


def small(case, *shape):
    """Random ambient vectors that stay within the domain of every exponential."""
    u = torch.randn(*shape, *case.shape, dtype=case.x.dtype)
    base, x = geoopt.utils.canonical_manifold(case.manifold), case.x.detach()
    if isinstance(base, RescaleQuotient):
        return u * x.abs() / 10
    return u * (reach(base, x) / base.norm(x, base.proju(x, u)))[..., None, None]


def test_projection_identity(unary_case):
    np.testing.assert_allclose(unary_case.x, unary_case.manifold.projx(unary_case.x), atol=1e-6)


def test_projection_via_assert(unary_case):
    px = unary_case.manifold.projx(unary_case.ex)
    unary_case.manifold.assert_check_point_on_manifold(px)
    np.testing.assert_allclose(unary_case.x.detach(), px.detach(), atol=1e-6)


def test_vector_projection_via_assert(unary_case):
    pv = unary_case.manifold.proju(unary_case.x, unary_case.ev)
    unary_case.manifold.assert_check_vector_on_tangent(unary_case.x, pv)
    np.testing.assert_allclose(unary_case.v.detach(), pv.detach(), atol=1e-6)


def test_broadcast_projx(unary_case):
    X = torch.stack([unary_case.ex] * 4)
    pX = unary_case.manifold.projx(X)
    unary_case.manifold.assert_check_point_on_manifold(pX)
    for x, px in zip(X, pX, strict=True):
        unary_case.manifold.assert_check_point_on_manifold(px)
        np.testing.assert_allclose(px.detach(), unary_case.manifold.projx(x).detach(), atol=1e-7)


def test_broadcast_proju(unary_case):
    pX = torch.stack([unary_case.x] * 4)
    U = torch.stack([unary_case.v] * 4)
    pU = unary_case.manifold.proju(pX, U)
    unary_case.manifold.assert_check_vector_on_tangent(pX, pU)
    for px, u, pu in zip(pX, U, pU, strict=True):
        unary_case.manifold.assert_check_vector_on_tangent(px, pu, atol=1e-5)
        np.testing.assert_allclose(pu.detach(), unary_case.manifold.proju(px, u).detach(), atol=1e-5)


def test_broadcast_retr(unary_case):
    pX = torch.stack([unary_case.x] * 4)
    pU = unary_case.manifold.proju(pX, torch.stack([unary_case.v] * 4))
    Y = unary_case.manifold.retr(pX, pU)
    unary_case.manifold.assert_check_point_on_manifold(Y)
    for px, pu, y in zip(pX, pU, Y, strict=True):
        unary_case.manifold.assert_check_point_on_manifold(y)
        np.testing.assert_allclose(y.detach(), unary_case.manifold.retr(px, pu).detach(), atol=1e-5)


@drawn
def test_broadcast_transp(unary_case):
    pX = torch.stack([unary_case.x] * 4)
    pU = unary_case.manifold.proju(pX, torch.stack([unary_case.v] * 4))
    pV = unary_case.manifold.proju(pX, torch.randn(4, *unary_case.shape, dtype=unary_case.x.dtype))
    Y = unary_case.manifold.retr(pX, pU)
    Q = unary_case.manifold.transp_follow_retr(pX, pU, pV)
    unary_case.manifold.assert_check_vector_on_tangent(Y, Q)
    for px, pu, pv, y, q in zip(pX, pU, pV, Y, Q, strict=True):
        unary_case.manifold.assert_check_vector_on_tangent(y, q)
        qq = unary_case.manifold.transp_follow_retr(px, pu, pv)
        np.testing.assert_allclose(q.detach(), qq.detach(), atol=1e-5)


def test_reversibility(unary_case):
    # Transport by projection does not carry a vector back along the same curve.
    assert unary_case.manifold.reversible is False


@drawn
def test_logmap(unary_case):
    pX = torch.stack([unary_case.x] * 4)
    U = unary_case.manifold.proju(pX, small(unary_case))
    Y = unary_case.manifold.expmap(pX, U)
    Uh, Zero = unary_case.manifold.logmap(torch.stack([pX, pX]), torch.stack([Y, pX]))
    Yh = unary_case.manifold.expmap(pX, Uh)
    np.testing.assert_allclose(Yh.detach(), Y.detach(), atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(Zero.detach(), 0.0, atol=1e-6, rtol=1e-6)


def test_dist(unary_case):
    norm = unary_case.manifold.norm(unary_case.x, unary_case.v)
    new_point = unary_case.manifold.expmap(unary_case.x, unary_case.v)
    dist = unary_case.manifold.dist(unary_case.x, new_point)
    np.testing.assert_allclose(dist.detach(), norm.detach())


# -- beyond upstream's list -----------------------------------------------------------------------------------------


@drawn
def test_shapes_of_inner_and_norm(unary_case):
    x = torch.stack([unary_case.x.detach()] * 4)
    u = unary_case.manifold.proju(x, small(unary_case, 4))
    assert unary_case.manifold.inner(x, u).shape == (4,)
    assert unary_case.manifold.inner(x, u, keepdim=True).shape == (4, 1, 1)
    assert unary_case.manifold.norm(x, u, keepdim=True).shape == (4, 1, 1)
    np.testing.assert_allclose(unary_case.manifold.norm(x, u) ** 2, unary_case.manifold.inner(x, u, u))


def test_scaled_follows_the_same_geodesics(unary_case):
    base = geoopt.utils.canonical_manifold(unary_case.manifold)
    scale = 2 if unary_case.manifold is not base else 1
    x, v = unary_case.x.detach(), unary_case.v
    for name in ("retr", "expmap", "acceleration"):
        one, two = getattr(unary_case.manifold, name)(x, v), getattr(base, name)(x, v / scale)
        np.testing.assert_allclose(one, two)
    if scale != 1:
        with pytest.raises(NotImplementedError):
            unary_case.manifold.tangent_space_at(x)


@drawn
def test_random_and_origin(unary_case):
    for make in (unary_case.manifold.random, geoopt.utils.canonical_manifold(unary_case.manifold).origin):
        x = make(4, *unary_case.shape, dtype=torch.float32)
        assert x.dtype == torch.float32
        assert x.shape == (4, *unary_case.shape)
        unary_case.manifold.assert_check_point_on_manifold(x)


def test_inside_a_product_manifold():
    manifolds = [case.manifold for case in CASES[:3]]
    product = geoopt.ProductManifold(*((m, case.shape) for m, case in zip(manifolds, CASES, strict=False)))
    points = [case.x.detach() for case in CASES[:3]]
    x = product.pack_point(*points)
    u = torch.randn_like(x) / 10
    p = product.proju(x, u)
    product.assert_check_vector_on_tangent(x, p)
    parts = product.unpack_tensor(product.retr(x, p))
    for m, point, part, vector in zip(manifolds, points, parts, product.unpack_tensor(p), strict=True):
        np.testing.assert_allclose(part, m.retr(point, vector))


def low_rank_problem():
    generator = torch.Generator().manual_seed(7)
    left, right = (torch.linalg.qr(torch.randn(rows, 2, generator=generator)).Q for rows in (8, 6))
    target = left @ torch.diag(torch.tensor([1.0, 0.7])) @ right.T
    start = torch.randn(14, 2, generator=generator) / 2
    return target, start


def descend(optimiser, manifold, start, target, steps, enough=0.0, **options):
    x = geoopt.ManifoldParameter(start.clone(), manifold=manifold)
    opt = optimiser([x], **options)
    for _ in range(steps):
        opt.zero_grad()
        loss = (manifold.to_matrix(x) - target).square().sum()
        if loss < enough:
            break
        loss.backward()
        opt.step()
    return manifold.to_matrix(x.detach()), float((manifold.to_matrix(x.detach()) - target).square().sum())


OPTIMISERS = [
    (geoopt.optim.RiemannianSGD, {"lr": 0.1}),
    (geoopt.optim.RiemannianSGD, {"lr": 0.1, "stabilize": 10}),
    (geoopt.optim.RiemannianAdam, {"lr": 0.2, "stabilize": 10}),
    (geoopt.optim.RiemannianAdam, {"lr": 0.1, "betas": (0.9, 0.99)}),
]


@pytest.mark.parametrize(
    ("method", "manifold"), checkered(OPTIMISERS, (GLQuotientInv(8, 6), GLQuotientMix(8, 6))), ids=str
)
def test_optimisers_converge(method, manifold):
    optimiser, options = method
    target, start = low_rank_problem()
    steps = 300 if isinstance(manifold, GLQuotientMix) else 650
    assert descend(optimiser, manifold, start, target, steps, enough=1e-6, **options)[1] < 1e-6


@pytest.mark.parametrize(
    ("method", "manifold"), checkered(OPTIMISERS, (GLQuotientMix(8, 6), GLQuotientInv(8, 6))), ids=str
)
def test_optimisers_follow_equivalent_paths_from_equivalent_starts(method, manifold):
    optimiser, options = method
    target, start = low_rank_problem()
    A = torch.tensor([[3.0, 1.0], [0.2, 0.1]])
    moved = manifold.act(start, A)
    one = descend(optimiser, manifold, start, target, 50, **options)[0]
    two = descend(optimiser, manifold, moved, target, 50, **options)[0]
    assert (one - two).abs().max() < 1e-8 * one.abs().max()
    # Gradient descent on the factors, in contrast, depends on the representative.
    euclidean = geoopt.Euclidean(ndim=2)
    euclidean.to_matrix = manifold.to_matrix
    one = descend(geoopt.optim.RiemannianSGD, euclidean, start, target, 50, lr=1e-4)[0]
    two = descend(geoopt.optim.RiemannianSGD, euclidean, moved, target, 50, lr=1e-4)[0]
    assert (one - two).abs().max() > 1e-2 * one.abs().max()


def test_complex_points_optimise():
    manifold = GLQuotientMix(5, 4)
    target = torch.randn(5, 2, dtype=torch.complex128) @ torch.randn(2, 4, dtype=torch.complex128)
    target = target / torch.linalg.matrix_norm(target, 2)
    start = torch.randn(9, 2, dtype=torch.complex128) / 2
    x = geoopt.ManifoldParameter(start, manifold=manifold)
    opt = geoopt.optim.RiemannianSGD([x], lr=0.1)
    for _ in range(400):
        opt.zero_grad()
        loss = (manifold.to_matrix(x) - target).abs().square().sum()
        loss.backward()
        opt.step()
    assert loss < 1e-6


# -- sizes: every operation is homogeneous, and gives numbers or says why not ---------------------------------------


def operations(manifold):
    """Name ↦ (an operation, the power of pq in its result for mix).

    Where G is multiplied by p and H by q, vectors and points (results too) are multiplied likewise, and lengths by pq
    (mix) or by nothing (inv). The arguments are a point, a horizontal and another vector, a near point, and a covector.
    """
    found = {
        "inner": (lambda x, u, v, y, e: manifold.inner(x, u, v), 2),
        "norm": (lambda x, u, v, y, e: manifold.norm(x, u), 1),
        "dist": (lambda x, u, v, y, e: manifold.dist(x, y), 1),
        "proju": (lambda x, u, v, y, e: manifold.proju(x, v), 0),
        "transp": (lambda x, u, v, y, e: manifold.transp(x, y, v), 0),
        "acceleration": (lambda x, u, v, y, e: manifold.acceleration(x, u), 0),
        "retr": (lambda x, u, v, y, e: manifold.retr(x, v), 0),
        "expmap": (lambda x, u, v, y, e: manifold.expmap(x, v), 0),
        "velocity": (lambda x, u, v, y, e: manifold.geodesic(x, u, 0.5)[1], 0),
        "logmap": (lambda x, u, v, y, e: manifold.logmap(x, y), 0),
        "mean": (lambda x, u, v, y, e: manifold.mean(torch.stack([x, y])), 0),
        "random": (lambda x, u, v, y, e: manifold.tangent_space_at(x).random(torch.Generator().manual_seed(0)), -1),
        "derivative": (lambda x, u, v, y, e: derivative(manifold, x, u) * x * x, 1),
        "egrad2rgrad": (lambda x, u, v, y, e: manifold.egrad2rgrad(x, e), -1),
        "act": (lambda x, u, v, y, e: manifold.act(x, manifold.random_element(x, torch.Generator().manual_seed(0))), 0),
        "projx": (lambda x, u, v, y, e: manifold.projx(x), 0),
    }
    return found


def derivative(manifold, x, u):
    """The derivative of the length of a constant vector, where all Gram matrices move."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(manifold.norm(x, u), x)[0]


def sized(manifold, t, p, q):
    G, H = manifold.unpack_tensor(t)
    return torch.cat([G * p, H * q], dim=-2)


def case_of(manifold):
    """A well-conditioned point, a horizontal and another vector, a near point and a covector, of few bits."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, 5) if isinstance(manifold, RescaleQuotient) else (7, 2)
    x, v, w = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3))
    x = x.sign() * (0.5 + x.abs())
    if isinstance(manifold, GLQuotient):
        x = torch.cat([torch.linalg.qr(X).Q for X in manifold.unpack_tensor(x)])
    x, v = x.float().double(), (0.05 * v).float().double()
    u = manifold.proju(x, v).float().double()
    return x, u, v, (x + 0.02 * w).float().double(), w.float().double()


SIZES = {torch.float32: (2.0**-66, 2.0**63), torch.float64: (2.0**-498, 2.0**498)}
NAMES = [(manifold, name) for manifold in ALL for name in operations(manifold)]


@pytest.mark.parametrize(
    ("manifold", "name", "dtype"), [(*named, dtype) for named, dtype in checkered(NAMES, SIZES)], ids=str
)
def test_operations_are_homogeneous(manifold, name, dtype):
    """1e-20 to 1e19 in float32, 1e-150 to 1e150 in float64, equal for both factors or not."""
    operation, power = operations(manifold)[name]
    *arguments, covector = case_of(manifold)
    mix = manifold.metric in ("mix", MIX)
    exact, info = operation(*arguments, covector), torch.finfo(dtype)
    # In float32, which is computed in float64, unequal factors only now and then.
    for p, q in (checkered if dtype == torch.float32 else itertools.product)(SIZES[dtype], SIZES[dtype]):
        expected = exact if exact.dim() == 0 else sized(manifold, exact, p, q)
        for factor in (p, q) * abs(power) * mix:
            expected = expected * factor if power > 0 else expected / factor
        given = [sized(manifold, t, p, q).to(dtype) for t in arguments]
        given.append(sized(manifold, covector, *((q, p) if mix else (1 / p, 1 / q))).to(dtype))
        if not bool((expected.abs() < info.max).all()):
            if name == "derivative":  # which autograd computes: nothing can name it
                continue
            with pytest.raises(ValueError, match=f"{type(manifold).__name__}.*rescale the point"):
                operation(*given)
        elif bool((expected.abs() > info.tiny).any()):
            found = operation(*given)
            assert found.dtype == dtype
            found, expected = (
                t if t.dim() == 0 else sized(manifold, t, 1 / p, 1 / q) for t in (found.double(), expected)
            )
            close(
                found / expected.abs().amax(),
                expected / expected.abs().amax(),
                3e-5 if dtype == torch.float32 else 1e-8,
            )


@pytest.mark.parametrize(("manifold", "name"), share(NAMES, 2), ids=str)
def test_no_decomposition_that_fails_in_silence_is_believed(manifold, name, monkeypatch):
    """Some libraries return NaN instead of an error."""
    arguments = case_of(manifold)
    monkeypatch.setattr("quotient_manifolds.geodesics._MAX_STEPS", 10)
    for broken in ("svd", "qr", "eigh", "cholesky", "inv", "solve"):
        original = getattr(torch.linalg, broken)

        def nan(*args, original=original, **options):
            found = original(*args, **options)
            if isinstance(found, tuple):
                return type(found)(torch.full_like(t, torch.nan) for t in found)
            return found * torch.nan

        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, broken, nan)
            with contextlib.suppress(ValueError, ArithmeticError, torch.linalg.LinAlgError):
                found = operations(manifold)[name][0](*arguments)
                assert found.isfinite().all(), broken


@pytest.mark.parametrize("manifold", ALL, ids=str)
class TestOneSentence:
    def test_times_that_are_not_finite(self, manifold):
        x, u, *_ = case_of(manifold)
        for bad in (torch.nan, torch.inf, -torch.inf, torch.tensor([0.5, torch.nan])):
            with pytest.raises(ValueError, match="times must be finite, got"):
                manifold.geodesic(x, u, bad)

    def test_a_tensor_without_numbers(self, manifold):
        x = case_of(manifold)[0].to("meta")
        for name in ("norm", "proju", "retr", "dist"):
            with pytest.raises(ValueError, match="x is on the device meta, without numbers"):
                getattr(manifold, name)(x, x)

    def test_a_result_that_its_dtype_does_not_hold(self, manifold):
        x = (1e30 * case_of(manifold)[0]).float()
        with pytest.raises(ValueError, match=f"{type(manifold).__name__}.*: to_matrix gives numbers.*rescale"):
            manifold.to_matrix(x)
        assert not manifold.to_matrix(x * torch.nan).isfinite().any()  # what came in leaves


@pytest.mark.parametrize("manifold", ALL, ids=str)
def test_the_derivative_of_the_length_of_zero_is_zero(manifold):
    x = case_of(manifold)[0]
    u = torch.zeros_like(x, requires_grad=True)
    for length in (manifold.norm(x, u), manifold.tangent_space_at(x).norm(u), TangentSpace.norm(SimpleSquare(), u)):
        assert torch.equal(torch.autograd.grad(length, u)[0], torch.zeros_like(u))


class SimpleSquare:
    """What the norm of the base class needs."""

    def inner(self, u, keepdim=False):
        return u.square().sum()


@pytest.mark.parametrize("manifold", ALL, ids=str)
def test_vectors_stand_for_their_horizontal_part(manifold):
    """A vertical part moves the representative, not the point of the quotient."""
    x, u, *_ = case_of(manifold)
    L = 0.3 * manifold.random_algebra(x, torch.Generator().manual_seed(0))
    other = u + manifold.vertical(x, L)
    for follow in (manifold.retr, manifold.expmap, lambda x, u: manifold.geodesic(x, u, 0.7)[0]):
        close(follow(x, other), follow(x, u), 1e-13)
    space = manifold.tangent_space_at(x)
    assert (space.retr(other) - space.retr(u)).abs().max() > 1e-3  # as it is: the space takes horizontal vectors
    with pytest.raises(ValueError, match="not horizontal"):
        manifold.assert_check_vector_on_tangent(x, other)


@pytest.mark.parametrize("manifold", ALL, ids=str)
def test_points_that_are_made_know_their_manifold(manifold):
    shape = tuple(np.int64(s) for s in case_of(manifold)[0].shape)
    for make in (manifold.random, manifold.origin):
        for x in (make(*shape), make(shape), make(2, *shape, dtype=torch.float32)):
            assert isinstance(x, geoopt.ManifoldTensor)
            assert x.manifold is manifold
    assert manifold.random(*shape, requires_grad=True).requires_grad


@pytest.mark.parametrize("manifold", ALL, ids=str)
def test_autocast_changes_nothing(manifold):
    x, u, v, y, e = (t.float() for t in case_of(manifold))
    for name, (operation, _) in operations(manifold).items():
        if name == "derivative":  # torch: no backward pass under autocast
            continue
        expected = operation(x, u, v, y, e)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(operation(x, u, v, y, e), expected), name


@pytest.mark.parametrize("manifold", [GLQuotientMix(5, 4), RescaleQuotient("mix"), RescaleQuotient("inv")], ids=str)
def test_the_line_search_of_armijo_converges(manifold):
    """geoopt's default; its Wolfe search takes a transported direction for the derivative along the retraction."""
    x = torch.ones(2, 4, dtype=torch.float64) if manifold.name == "RescaleQuotient" else manifold.origin(9, 4)
    x = geoopt.ManifoldParameter(x.double() + 0.1 * torch.rand_like(x, dtype=torch.float64), manifold=manifold)
    target = 1.5 * manifold.to_matrix(x.detach())
    optimizer = geoopt.optim.RiemannianLineSearch([x], cg_method="steepest")

    def closure():
        optimizer.zero_grad()
        loss = (manifold.to_matrix(x) - target).square().sum()
        loss.backward()
        return loss.item()

    first = closure()
    for _ in range(20):
        optimizer.step(closure)
    assert closure() < 1e-3 * first


@pytest.mark.parametrize("manifold", [GLQuotientInv(5, 4), RescaleQuotient("mix"), geoopt.Sphere()], ids=str)
def test_states_load_as_weights_only(manifold):
    point = manifold.random(9 if isinstance(manifold, GLQuotientInv) else 2, 3).detach()
    x, module = geoopt.ManifoldParameter(point.clone(), manifold=manifold), torch.nn.Module()
    module.x = x
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    module.load_state_dict({k: v + 1 for k, v in torch.load(file, weights_only=True).items()})
    assert module.x is x
    torch.testing.assert_close(x.detach().as_subclass(torch.Tensor), point.as_subclass(torch.Tensor) + 1)
    whole = io.BytesIO()
    torch.save(x, whole)
    whole.seek(0)
    with pytest.raises(Exception, match=r"functools\.partial"):
        torch.load(whole, weights_only=True)
    whole.seek(0)
    assert type(torch.load(whole, weights_only=False).manifold) is type(manifold)


def test_samplers_need_what_these_manifolds_lack():
    x = geoopt.ManifoldParameter(GLQuotientInv(5, 4).origin(9, 2))
    with pytest.raises(ValueError, match="reversible retraction"):
        geoopt.samplers.RSGLD([x])


@pytest.mark.parametrize("balance", [1.0, 4.0])
def test_why_samplers_are_refused(monkeypatch, balance):
    """Their noise is ``egrad2rgrad`` of white noise: G⁻² in place of G⁻¹, so that it depends on the representative.

    For n = 2, m = h = 1 and r = ‖G Hᵀ‖ the metric is ½ (d log r)² + dθ²: in time ε, Brownian motion has the variance 2ε
    of log r. A step of RSGLD has ε(‖G‖² + ‖H‖²) instead.
    """
    monkeypatch.setattr(GLQuotientInv, "reversible", True)
    manifold, epsilon = GLQuotientInv(2, 1), 1e-4
    start = torch.tensor([[0.6 * balance], [0.8 * balance], [1.5 / balance]]).expand(20_000, 3, 1)
    x = geoopt.ManifoldParameter(start.clone(), manifold=manifold)
    geoopt.samplers.RSGLD([x], epsilon=epsilon).step(lambda: 0 * x.sum())
    moved = manifold.to_matrix(x.detach()).norm(dim=(-2, -1)).log()
    expected = epsilon * float(start[0].square().sum())
    assert float(moved.var()) == pytest.approx(expected, rel=0.05)
    assert float(moved.var()) != pytest.approx(2 * epsilon, rel=0.5)


@pytest.mark.parametrize(("deviation", "explodes"), [(1e-3, True), (0.1, False), (0.3, False)])
def test_mix_starts_at_the_scale_of_the_answer(deviation, explodes):
    """A step that is longer than the product itself overshoots, as the guide to optimisers says."""
    manifold = GLQuotientMix(20, 15)
    x = geoopt.ManifoldParameter(deviation * torch.randn(35, 3), manifold=manifold)
    target = torch.randn(20, 3) @ torch.randn(3, 15)
    optimizer, losses = geoopt.optim.RiemannianAdam([x], lr=0.01), []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (manifold.to_matrix(x) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert (max(losses) > 100 * losses[0]) == explodes
    assert explodes or losses[-1] < losses[0]


# -- checks -----------------------------------------------------------------------------------------------------------


@metrics
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.randn(8, 2), ["5 + 4", "(8, 2)"]),
        (lambda: torch.randn(9, 5), ["(9, 5)", "full column rank", "h ≤ min(n, m) = 4"]),
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
    with pytest.raises(ValueError, match="n must be a whole number of at least 1"):
        GLQuotientInv(0, 3)
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


@pytest.mark.parametrize("rows", [5.7, True, "5", -1, None])
def test_row_counts_are_whole_numbers(rows):
    with pytest.raises(ValueError, match=r"GLQuotientInv: n must be a whole number of at least 1, got"):
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


def test_sizes_are_whole_numbers_of_python_or_numpy():
    manifold = GLQuotientInv(5, 4)
    assert manifold.random(np.int64(3), np.int32(9), 2).shape == (3, 9, 2)
    for bad in ((9.0, 2), (True, 2), ("9", 2), (np.float64(9), 2), (-9, 2)):
        with pytest.raises(ValueError, match="a size must be a whole number of at least 0, got"):
            manifold.random(*bad)


# -- manifold ---------------------------------------------------------------------------------------------------------


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
    manifold = MANIFOLDS[metric](8, 7)
    torch.manual_seed(0)
    s = torch.logspace(0, -3, 3)
    G = (torch.linalg.qr(torch.randn(8, 3)).Q * s) @ torch.linalg.qr(torch.randn(3, 3)).Q
    H = (torch.linalg.qr(torch.randn(7, 3)).Q * s**1.3) @ torch.linalg.qr(torch.randn(3, 3)).Q
    x = torch.cat([G, H]).float()
    manifold.assert_check_point_on_manifold(x)
    u = manifold.proju(x, torch.randn(15, 3).float())
    assert manifold.retr(x, 1e-3 * u).isfinite().all()


@pytest.mark.parametrize("manifold", ALL[:2], ids=str)
def test_no_tensor_is_made_on_another_device(manifold):
    """With another default device, whatever does not follow its arguments meets a tensor without numbers."""
    x, u = two_points(manifold)
    y = x + 0.005 * torch.randn_like(x)
    with torch.device("meta"):
        assert torch.ones(1).is_meta
        for name in ("inner", "norm", "proju", "egrad2rgrad", "retr", "acceleration", "expmap"):
            assert not getattr(manifold, name)(x, u).is_meta
        for name in ("logmap", "dist"):
            assert not getattr(manifold, name)(x, y).is_meta
        assert not manifold.tangent_space_at(x).exit_time(u).is_meta
        assert not manifold.geodesic(x, u, 0.5)[0].is_meta
        assert not manifold.geodesic_between(x, y, 0.5).is_meta
        assert not manifold.mean(torch.stack([x, y])).is_meta


@pytest.mark.parametrize("manifold", ALL[:2], ids=str)
def test_batches_without_points(manifold):
    none = torch.zeros(0, 7, 2)
    for name in ("proju", "retr", "expmap", "acceleration"):
        assert getattr(manifold, name)(none, none).shape == (0, 7, 2)
    assert manifold.norm(none, none).shape == (0,)
    with pytest.raises(ValueError, match="with k ≥ 1"):
        manifold.mean(torch.zeros(0, 7, 2))


@pytest.mark.parametrize("kind", [GLQuotientInv, GLQuotientMix])
def test_a_product_that_overflows_is_named(kind):
    """The length of a point as a vector is √(2h) with inv, whatever the point; with mix it is of the product's size."""
    manifold = kind(5, 4)
    for seed in range(20):
        torch.manual_seed(seed)
        x = 1e20 * manifold.random(9, 2, dtype=torch.float32)
        if kind is GLQuotientInv:
            assert float(manifold.norm(x, x)) == pytest.approx(2, rel=1e-5)
        else:
            with pytest.raises(ValueError, match=r"^GLQuotientMix.*norm gives numbers that its dtype does not hold"):
                manifold.norm(x, x)
        for name in ("proju", "retr", "canonical"):
            assert getattr(manifold, name)(*(x, x)[: 1 if name == "canonical" else 2]).isfinite().all()


@pytest.mark.parametrize("kind", [GLQuotientInv, GLQuotientMix])
def test_the_canonical_representative_is_differentiated(kind):
    """Where singular values are distinct; elsewhere it is not unique, and whoever asks for a derivative is told."""
    manifold = kind(5, 4)
    x = manifold.random(9, 2).requires_grad_()
    weights = torch.randn(9, 2)

    def value(x):
        return (weights * manifold.canonical(x)).sum()

    (grad,) = torch.autograd.grad(value(x), x)
    step = torch.randn(9, 2)
    with torch.no_grad():
        difference = (value(x + 1e-6 * step) - value(x - 1e-6 * step)) / 2e-6
    assert float((grad * step).sum()) == pytest.approx(float(difference), rel=1e-6)
    small = (2.0**-300 * x.detach()).requires_grad_()
    close(torch.autograd.grad(value(small), small)[0], grad, 1e-9)
    equal = manifold.origin(9, 2).requires_grad_()
    assert torch.equal(manifold.canonical(equal), equal)
    with pytest.raises(ValueError, match="no derivative where singular values are equal"):
        value(equal).backward()


@metrics
def test_coordinates_at_points_of_any_size(metric):
    """A covector pulled back is the derivative of the retraction in coordinates, and lengths are those of vectors."""
    manifold = MANIFOLDS[metric](5, 4)
    c, egrad = 0.1 * torch.randn(9, 2), torch.randn(9, 2)
    x = manifold.random(9, 2)
    for size in (1.0, 2.0**-70, 2.0**70):
        space = manifold.tangent_space_at(size * x)
        u = space.from_coordinates(c)
        close(space.coordinates(u), c, 1e-12)
        close(space.norm(u), torch.linalg.norm(c), 1e-12)
        close((space.to_covector(u) * u).sum(), c.square().sum(), 1e-12)
        close((space.dual_coordinates(egrad) * c).sum(), (egrad * u).sum(), 1e-10)
        horizontal = space.coordinates(space.proju(u))
        close(space.project_coordinates(c), horizontal, 1e-11)
        step = horizontal * min(1.0, size**4) ** (metric == "mix")  # of the size of the point
        close(
            space.retr_coordinates(step), carry(manifold, space.retr(space.from_coordinates(step)), space.gauge.A), 1e-9
        )


# -- the last tangent space is remembered ----------------------------------------------------------------------------


@pytest.fixture
def factorisations(monkeypatch):
    """Count how often a point is factorised."""
    count, original = [], torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *args, **options: count.append(1) or original(*args, **options))
    return count


@metrics
def test_a_step_of_an_optimiser_factorises_twice(metric, factorisations):
    manifold = MANIFOLDS[metric](7, 5)
    x = geoopt.ManifoldParameter(manifold.random(12, 3), manifold=manifold)
    optimizer = geoopt.optim.RiemannianAdam([x], lr=1e-3)
    for _ in range(3):
        manifold.to_matrix(x).square().sum().backward()
        del factorisations[:]
        optimizer.step()
        assert len(factorisations) <= 2


def change(x):
    x.mul_(2)


def change_in_secret(x):
    x.data.mul_(2)


def change_memory(x):
    x.data = 2 * x.data


def change_through_numpy(x):
    x.numpy()[...] *= 2


@pytest.mark.parametrize("manifold", ALL, ids=str)
@pytest.mark.parametrize("how", [change, change_in_secret, change_memory, change_through_numpy])
def test_what_is_remembered_follows_changes(manifold, how):
    x, u = two_points(manifold)
    manifold.acceleration(x, u)
    how(x)
    assert torch.equal(manifold.acceleration(x, u), manifold.acceleration(x.clone(), u))


@metrics
def test_what_is_remembered_knows_no_derivatives_and_no_modes(metric):
    manifold = MANIFOLDS[metric](4, 3)
    x, u = two_points(manifold)
    expected = manifold.norm(x, u)
    x.requires_grad_()
    assert manifold.norm(x, u).requires_grad
    with torch.no_grad():
        assert not manifold.norm(x, u).requires_grad
    assert manifold.norm(x, u).requires_grad
    x.requires_grad_(False)
    assert torch.allclose(torch.func.vmap(manifold.norm)(x, u), expected)
    assert torch.allclose(torch.func.vmap(lambda v: manifold.norm(x[0], v))(u), manifold.norm(x[0], u))
    assert torch.allclose(torch.func.jvp(lambda z: manifold.norm(z, u), (x,), (u,))[0], expected)
    with torch.inference_mode():
        assert torch.equal(manifold.norm(x, u), expected)
    y = x.clone()
    with torch.inference_mode():
        manifold.norm(y, u)
    v = u.clone().requires_grad_()
    assert torch.autograd.grad(manifold.norm(y, v).sum(), v)[0].isfinite().all()


@metrics
def test_what_is_remembered_is_neither_kept_alive_nor_copied(metric):
    manifold = MANIFOLDS[metric](4, 3)
    x, u = two_points(manifold)
    manifold.norm(x, u)
    for other in (copy.deepcopy(manifold), pickle.loads(pickle.dumps(manifold))):
        assert other._last is None
        assert torch.equal(other.norm(x, u), manifold.norm(x, u))
    space = weakref.ref(manifold._last[-1])
    del x
    gc.collect()
    assert manifold._last is None
    assert space() is None


@metrics
def test_threads_do_not_mix_their_points(metric):
    manifold = MANIFOLDS[metric](4, 3)
    pairs = [two_points(manifold) for _ in range(4)]
    expected = [manifold.norm(x, u) for x, u in pairs]

    def work(k):
        return all(torch.equal(manifold.norm(*pairs[k]), expected[k]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_vector_with_nan_is_named_by_the_check_of_vectors():
    manifold = GLQuotientInv(4, 3)
    x = manifold.random(7, 2)
    with pytest.raises(ValueError, match=r"the vector u of shape .* has NaN"):
        manifold.check_vector_on_tangent(x, torch.full_like(x, torch.nan))
