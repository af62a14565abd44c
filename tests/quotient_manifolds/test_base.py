"""geoopt's own checks of a manifold, and its containers and optimisers."""

import collections
import io

import geoopt
import numpy as np
import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient
from tests.extent import EXHAUSTIVE

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


@pytest.fixture(params=[1, 2, 3, 4, 5] if EXHAUSTIVE else [1, 2])
def seed(request):
    torch.manual_seed(request.param)


@pytest.fixture(params=CASES, ids=lambda case: repr(case.manifold))
def unary_case(request, scaled, seed):
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
    target = torch.randn(8, 2, generator=generator) @ torch.randn(2, 6, generator=generator)
    target = target / torch.linalg.matrix_norm(target, 2)
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
optimisers = pytest.mark.parametrize(("optimiser", "options"), OPTIMISERS, ids=lambda o: getattr(o, "__name__", str(o)))
manifolds = pytest.mark.parametrize("manifold", [GLQuotientInv(8, 6), GLQuotientMix(8, 6)], ids=repr)


@optimisers
@manifolds
def test_optimisers_converge(optimiser, options, manifold):
    target, start = low_rank_problem()
    steps = 300 if isinstance(manifold, GLQuotientMix) else 650
    assert descend(optimiser, manifold, start, target, steps, enough=1e-6, **options)[1] < 1e-6


@optimisers
@manifolds
def test_optimisers_follow_equivalent_paths_from_equivalent_starts(optimiser, options, manifold):
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
    x = geoopt.ManifoldParameter(GLQuotientInv(5, 4).origin(9, 2), manifold=GLQuotientInv(5, 4))
    with pytest.raises(ValueError, match="reversible retraction"):
        geoopt.samplers.RSGLD([x])


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
