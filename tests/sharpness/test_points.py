"""Points of manifolds as parameters: against a slow oracle, on their manifold, the same in every chart."""

import copy
import inspect
import math

import geoopt
import pytest
import torch
from torch import nn

import sharpness
from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient
from sharpness import plots, points
from sharpness.space import WeightSpace
from tests.support import networks
from tests.support.extent import share
from tests.support.manifolds import CASES, Problem, data_of, dense_basis, loss, oracle, point, real, retraction

NAMES = pytest.mark.parametrize("name", CASES)
#: geoopt's ``dist`` is not the length in its ``inner`` here.
OTHER_DISTANCE = {"BoundedDomain"}


def evaluate(problem, data, measure="geodesic-inv", rho=0.3, **options):
    return sharpness.evaluate(problem, [data], loss, measure=measure, rho=rho, progress=False, **options)


def test_points_that_were_drawn_by_a_common_seed_have_a_gradient():
    """By seed 0 they were the very directions in which derivatives at 0 were taken, whose tangential part is 0."""
    for seed in (0, 1, 42):
        torch.manual_seed(seed)
        x = geoopt.ManifoldParameter(torch.randn(3, 5), manifold=geoopt.Sphere())
        x.data /= x.data.norm(dim=-1, keepdim=True)
        patch, out, g = points.PointPatch("x", x, torch.get_default_dtype()), torch.empty(15), torch.randn(3, 5)
        patch.pull_back_(out, {"x": g}, None)
        expected = g - (g * x.data).sum(-1, keepdim=True) * x.data
        assert torch.allclose(out.view(3, 5), expected, atol=1e-6)


def test_every_manifold_of_geoopt_has_a_case():
    found = {name: cls for name, cls in vars(geoopt.manifolds).items() if inspect.isclass(cls)}
    found = {name for name, cls in found.items() if issubclass(cls, geoopt.Manifold)}
    assert found - {"Manifold", "Stiefel"} == set(CASES)  # Stiefel() makes one of two others
    assert all(type(make()).__name__ == name for name, (make, _) in CASES.items())


def check_worst(name, ascent="power"):
    """The largest loss, where it is, and how far away."""
    problem = Problem(point(name))
    x, manifold, data = problem.x.detach().clone(), problem.x.manifold, data_of(problem.x)
    result = evaluate(problem, data, steps=25, restarts=6, ascent=ascent)
    assert float(result) == pytest.approx(oracle(problem, data, 0.3, result.direction(0).tensors["x"]), rel=0.01)
    with sharpness.perturbed(problem, result.direction(0)):
        y = problem.x.detach().clone()
        assert problem(data).item() == pytest.approx(result.batches[0].worst_loss, abs=1e-12)
    assert torch.equal(problem.x, x)
    assert manifold.check_point_on_manifold(y, atol=1e-6, rtol=1e-6)
    try:
        distance = float(manifold.dist(x, y).square().sum().sqrt())
    except NotImplementedError:
        return
    # UpperHalf has no expmap but a straight line, along which the metric grows at most as 1/(1 - length).
    most = -math.log(1 - 0.3) if name == "UpperHalf" else 0.3
    assert (distance <= most * (1 + 1e-6)) == (name not in OTHER_DISTANCE)


@pytest.mark.parametrize("name", share(CASES, 2))
def test_worst_loss_is_that_of_the_oracle_on_the_manifold_and_in_the_ball(name):
    check_worst(name)


@pytest.mark.parametrize("name", ["CanonicalStiefel", "SymmetricPositiveDefinite", "PoincareBall", "BoundedDomain"])
def test_auto_pgd_finds_the_same(name):
    check_worst(name, ascent="apgd")


def without_metric(block):
    return torch.ones(block._shape[0], 1), None


def straight(block, u):
    return block.x + u


def without_retraction(block, at, egrad):
    with torch.enable_grad():
        c = at.detach().requires_grad_()
        return torch.autograd.grad(block._vector(c), c, block._points(points.in_double(egrad)))[0]


@pytest.mark.parametrize(
    ("attribute", "wrong", "name"),
    [
        ("_frame", property(without_metric), "SymmetricPositiveDefinite"),
        ("_frame", property(without_metric), "Lorentz"),
        ("_frame", property(without_metric), "PoincareBall"),
        ("retract", straight, "EuclideanStiefel"),
        ("retract", straight, "Sphere"),
    ],
)
def test_a_wrong_block_is_noticed(monkeypatch, attribute, wrong, name):
    monkeypatch.setattr(points.PointPatch, attribute, wrong)
    with pytest.raises((AssertionError, ValueError)):
        check_worst(name)


def coordinates(problem, data):
    """The gradient and Hessian of c ↦ ℓ(R(c)) at 0 by autograd and differences, in a dense orthonormal basis."""
    manifold, x = problem.x.manifold, problem.x.detach().clone()
    basis = dense_basis(manifold, x)

    def slope(c):
        c = c.detach().requires_grad_()
        end = retraction(manifold)(x, torch.tensordot(c.to(basis.dtype), basis, 1))
        return torch.autograd.grad((data @ real(end).flatten()).tanh().square().mean(), c)[0]

    h, far = 1e-5, 1e-8  # from 0, where some of geoopt's formulas divide by the length
    sides = [[slope(side * u + far) for side in (h, -h)] for u in torch.eye(len(basis))]
    near = 1e-6 * torch.ones(len(basis))  # far out on a projected sphere 1e-5 is too far
    return (slope(near) + slope(-near)) / 2, torch.stack([(a - b) / (2 * h) for a, b in sides])


@pytest.mark.parametrize("name", share(CASES, 2, 1))
def test_gradient_and_hessian_are_those_in_an_orthonormal_basis(name):
    problem = Problem(point(name))
    data = data_of(problem.x)
    gradient, H = coordinates(problem, data)
    found = sharpness.gradient_norm(problem, [data], loss, progress=False)
    assert float(found) == pytest.approx(float(gradient.norm()), rel=1e-6)
    found = sharpness.hessian(problem, [data], loss, progress=False, num_matvecs=24)
    top = float(torch.linalg.eigvalsh((H + H.T) / 2)[-1])  # on tangent vectors, even if all eigenvalues are negative
    assert float(found) == pytest.approx(top, rel=1e-4, abs=1e-8)
    assert found.trace == pytest.approx(float(H.trace()), rel=1e-3, abs=4 * (found.std_error or 0) + 1e-4)


def test_a_loss_that_does_not_depend_on_one_manifold_of_a_product():
    """Its directions are zero there, where autograd divided 0 by 0."""
    problem = Problem(point("ProductManifold"))  # of a sphere and a ball
    for part in (slice(0, 3), slice(3, 5)):
        data = data_of(problem.x)
        data[:, part] = 0
        H = coordinates(problem, data)[1]
        found = sharpness.hessian(problem, [data], loss, progress=False)
        assert float(found) == pytest.approx(
            max(float(torch.linalg.eigvalsh((H + H.T) / 2)[-1]), 0), rel=1e-4, abs=1e-8
        )
        worst = sharpness.evaluate(problem, [data], loss, rho=0.3, steps=20, progress=False)
        assert 0 < float(worst) < 1


def test_a_gradient_without_the_retraction_is_noticed(monkeypatch):
    monkeypatch.setattr(points.PointPatch, "_pulled", without_retraction)
    problem = Problem(point("Scaled"))  # whose retraction begins at half of the vector
    data = data_of(problem.x)
    found = sharpness.gradient_norm(problem, [data], loss, progress=False)
    assert float(found) != pytest.approx(float(coordinates(problem, data)[0].norm()), rel=1e-2)


# -- equivalent charts ------------------------------------------------------------------------------------------------


def isometries():
    """By the name of the manifold: an isometry, and its inverse."""
    torch.manual_seed(5)
    Q = torch.linalg.qr(torch.randn(4, 4)).Q
    B, A, a = (
        torch.eye(3) + 0.3 * torch.randn(3, 3),
        torch.tensor([[1.0, 0.4], [-0.3, 0.8]]),
        torch.tensor([0.2, -0.3, 0.1]),
    )
    # U Z Uᵀ with a unitary U is an isometry of the bounded domain, but geoopt's ``inner`` is only that of a real one.
    S, U = torch.tensor([[0.5, 0.2], [0.2, -0.3]]), torch.linalg.qr(torch.randn(2, 2)).Q + 0j
    cosh, sinh = math.cosh(0.7), math.sinh(0.7)
    boost, back = torch.eye(4), torch.eye(4)
    boost[:2, :2], back[:2, :2] = (
        torch.tensor([[cosh, sinh], [sinh, cosh]]),
        torch.tensor([[cosh, -sinh], [-sinh, cosh]]),
    )
    order = torch.tensor([2, 0, 1])
    rotated = (lambda x: x @ Q.T, lambda y: y @ Q)
    moved = (lambda x: Q @ x, lambda y: Q.T @ y)

    def translation(manifold):
        return lambda x: manifold.mobius_add(a.expand_as(x), x), lambda y: manifold.mobius_add(-a.expand_as(y), y)

    return {
        "Euclidean": (lambda x: x.flip(-1) + a, lambda y: (y - a).flip(-1)),
        "Sphere": rotated,
        "Scaled": rotated,
        "EuclideanStiefel": moved,
        "CanonicalStiefel": moved,
        "PoincareBall": translation(geoopt.PoincareBall()),
        "SphereProjection": translation(geoopt.SphereProjection()),
        "SymmetricPositiveDefinite": (
            lambda x: B @ x @ B.T, lambda y: torch.linalg.solve(B, torch.linalg.solve(B, y).mT).mT
        ),
        "Lorentz": (lambda x: x @ boost.T, lambda y: torch.linalg.solve(boost, y.T).T),
        "BirkhoffPolytope": (lambda x: x[order], lambda y: y[order.argsort()]),
        "UpperHalf": (
            lambda x: (A + 0j) @ x @ (A + 0j).T + S,
            lambda y: (A.inverse() + 0j) @ (y - S) @ (A.inverse() + 0j).T,
        ),
        "BoundedDomain": (lambda x: U @ x @ U.T, lambda y: U.mT @ y @ U),
    }  # fmt: skip


@pytest.mark.parametrize("name", isometries())
def test_equivalent_charts_give_the_same_number(name):
    forward, back = isometries()[name]
    one = Problem(point(name))
    there = geoopt.ManifoldParameter(forward(one.x.detach()), manifold=one.x.manifold)
    two, data = Problem(there, back), data_of(one.x)
    assert two(data).item() == pytest.approx(one(data).item(), rel=1e-12)
    assert float(evaluate(two, data, steps=8)) == pytest.approx(float(evaluate(one, data, steps=8)), rel=1e-8)
    norms = [float(sharpness.gradient_norm(p, [data], loss, progress=False)) for p in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-8)


QUOTIENTS = {
    "inv": (GLQuotientInv(5, 4), (2, 9, 3)),
    "mix": (GLQuotientMix(5, 4), (9, 3)),
    "complex": (GLQuotientInv(5, 4), (9, 2)),
    "rescale": (RescaleQuotient("inv"), (3, 2, 4)),
    "rescale mix": (RescaleQuotient("mix"), (2, 4)),
}


class Product(nn.Module):
    """A point of a quotient beside a Stiefel matrix and a plain weight."""

    def __init__(self, name):
        super().__init__()
        manifold, shape = QUOTIENTS[name]
        torch.manual_seed(2)
        x = torch.randn(shape, dtype=torch.complex128 if name == "complex" else torch.float64)
        self.x = geoopt.ManifoldParameter(x, manifold=manifold)
        self.stiefel = geoopt.ManifoldParameter(geoopt.Stiefel().random(5, 3))
        self.plain = nn.Parameter(torch.randn(3))

    def forward(self, data):
        product = real(self.x.manifold.to_matrix(self.x))
        other = (self.stiefel @ self.plain).tanh().sum()
        return (data @ product.flatten() + other).tanh().square().mean()


def product_and_data(name):
    model = Product(name)
    size = real(model.x.manifold.to_matrix(model.x.detach())).numel()
    return model, torch.randn(6, size) / size**0.5


@pytest.mark.parametrize(
    ("name", "measure"), [*((name, "geodesic-inv") for name in QUOTIENTS), ("inv", "geodesic-mix")]
)
def test_points_of_the_quotient_are_measured_as_orbits(name, measure):
    """In the metric that they state, whatever the measure's, by every statistic."""
    model, data = product_and_data(name)
    x, manifold = model.x.detach().clone(), model.x.manifold
    A = 0.7 * torch.randn_like(x[..., :1, :] if name.startswith("rescale") else x[..., : x.shape[-1], :])
    A = A.exp() if name.startswith("rescale") else torch.eye(x.shape[-1]) + A

    def values():
        options = [{}, {"ascent": "apgd", "restarts": 1}]
        yield from (float(evaluate(model, data, measure, steps=2, **o)) for o in options)
        mean = sharpness.average(model, [data], loss, measure=measure, rho=0.3, num_samples=3, progress=False)
        yield float(mean)
        yield float(sharpness.gradient_norm(model, [data], loss, measure=measure, progress=False))
        yield float(sharpness.hessian(model, [data], loss, measure=measure, num_matvecs=3, progress=False))

    before = list(values())
    none = sharpness.get_measure(measure, symmetry="none")  # of the pairs that are found in weights
    assert float(evaluate(model, data, none, steps=2)) == before[0]
    model.x.data = manifold.act(x, A[..., 0, :] if name.startswith("rescale") else A)
    assert (model.x - x).abs().max() > 0.1
    assert list(values()) == pytest.approx(before, rel=1e-8)
    result = evaluate(model, data, measure, steps=6)
    drawn = plots.plot_profile(model, data, result.direction(0), points=5, loss_fn=loss)
    assert drawn.axes[0].lines[-1].get_ydata()[3] == pytest.approx(result.batches[0].worst_loss, rel=1e-10)
    assert sum(s.share for s in result.by_layer()) == pytest.approx(1)
    with sharpness.perturbed(model, result.direction(0)):
        assert model(data).item() == pytest.approx(result.batches[0].worst_loss, rel=1e-10)
        assert model.stiefel.manifold.check_point_on_manifold(model.stiefel, atol=1e-6, rtol=1e-6)
        assert manifold.check_point_on_manifold(model.x)


def test_points_measured_as_flat_weights_would_depend_on_the_representative(monkeypatch):
    model, data = product_and_data("inv")
    monkeypatch.setattr("quotient_manifolds.symmetries.discovery.point_pairs", lambda *_: [])
    monkeypatch.setattr("sharpness.patches.ManifoldParameter", ())
    before = float(evaluate(model, data, steps=6))
    model.x.data = model.x.manifold.act(model.x.detach(), torch.tensor([[2.0, 1, 0], [0, 1, 0], [0, 0, 0.5]]))
    assert float(evaluate(model, data, steps=6)) != pytest.approx(before, rel=1e-3)


# -- other measures, sizes, training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["adaptive", "euclidean", "complete-inv", "complete-mix"])
def test_measures_of_flat_weights_refuse_points_by_name(measure):
    model, data = product_and_data("inv")
    with pytest.raises(ValueError, match=r"'x' is a point of the manifold GLQuotientInv.*'geodesic-inv'.*freeze"):
        evaluate(model, data, measure)
    with (
        networks.training(model, "stiefel|plain"),
        pytest.raises(ValueError, match="'stiefel' is a point of the manifold Stiefel"),
    ):
        evaluate(model, data, measure)
    if not measure.startswith("complete"):
        model.x.requires_grad_(False), model.stiefel.requires_grad_(False)
        assert float(evaluate(model, data, measure)) > 0
        model.x.requires_grad_(True)
        with pytest.raises(ValueError, match="is a point of the manifold"):
            sharpness.GeodesicSAM(model, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, measure=measure)


def test_a_point_of_euclidean_space_is_a_plain_weight_to_measures_of_such():
    one, two = (nn.Linear(3, 2, bias=False) for _ in range(2))
    two.weight = geoopt.ManifoldParameter(one.weight.detach().clone(), manifold=geoopt.Euclidean())
    data = torch.randn(5, 3), torch.arange(5) % 2
    for measure in ("adaptive", "euclidean"):
        values = [float(sharpness.evaluate(m, [data], measure=measure, progress=False)) for m in (one, two)]
        assert values[0] == values[1]
    flat = float(sharpness.evaluate(one, [data], measure="euclidean", rho=0.1, progress=False))
    stated = float(sharpness.evaluate(two, [data], measure="geodesic-inv", rho=0.1, progress=False))
    assert stated == pytest.approx(flat, rel=1e-8)  # the metric that it states


def test_large_points_need_a_metric_of_a_known_form():
    manifold = geoopt.SymmetricPositiveDefinite()
    problem = Problem(geoopt.ManifoldParameter(torch.linspace(1, 2, 46).diag(), manifold=manifold))
    with pytest.raises(
        ValueError, match=r"'x' has 1 points of 2116 numbers on SymmetricPositiveDefinite.*2116².*split it"
    ):
        evaluate(problem, data_of(problem.x))
    table = geoopt.ManifoldParameter(0.01 * torch.randn(3000, 16), manifold=geoopt.PoincareBall())
    problem = Problem(table)
    assert float(evaluate(problem, data_of(table) / 50, steps=2)) > 0


def test_points_without_a_gradient_stay_where_they_are():
    problem = Problem(point("Sphere"), chart=lambda x: x[:1].repeat(2, 1))
    data, before = data_of(problem.x), problem.x.detach().clone()
    result = evaluate(problem, data, steps=5)
    with sharpness.perturbed(problem, result.direction(0)):
        assert torch.equal(problem.x[1], before[1])
        assert not torch.equal(problem.x[0], before[0])
    assert all(p.isfinite().all() for p in result.direction(0).tensors.values())


@NAMES
def test_single_precision(name):
    wide = Problem(point(name))
    data = data_of(wide.x)
    exact = float(evaluate(wide, data, steps=5))
    torch.set_default_dtype(torch.float32)  # that of the manifold's own numbers
    x = wide.x.detach().to(torch.complex64 if wide.x.is_complex() else torch.float32)
    problem = Problem(geoopt.ManifoldParameter(x, manifold=CASES[name][0]()))
    assert float(evaluate(problem, data.float(), steps=5)) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("name", ["inv", "mix", "rescale"])
def test_sam_moves_points_along_the_first_step_of_the_measure(name):
    model, data = product_and_data(name)
    plain = [p.detach().clone() for p in model.parameters()]

    def weights():
        product = model.x.manifold.to_matrix(model.x.detach())
        return [product, model.stiefel.detach().clone(), model.plain.detach().clone()]

    space = WeightSpace(model, sharpness.MEASURES["geodesic-inv"])
    with space.attached():
        gradient = space.gradient(model(data))
        space.move_to(0.05 * gradient / gradient.norm())
        expected = [
            model.x.manifold.to_matrix(model.x.detach()),
            model.stiefel.detach().clone(),
            model.plain.detach().clone(),
        ]
    optimizer = geoopt.optim.RiemannianSGD(model.parameters(), lr=0.1)
    sam = sharpness.GeodesicSAM(model, optimizer, rho=0.05)
    model(data).backward()
    with sam.perturbed():
        found = [
            model.x.manifold.to_matrix(model.x.detach()),
            model.stiefel.detach().clone(),
            model.plain.detach().clone(),
        ]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain, strict=True))

    twin = copy.deepcopy(model)  # whose gradients are those of the model where it was perturbed
    sam.zero_grad()
    model(data).backward()
    with sam.perturbed(zero_grad=True):
        model(data).backward()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    sam.step()
    geoopt.optim.RiemannianSGD(twin.parameters(), lr=0.1).step()
    for p, q, before in zip(twin.parameters(), model.parameters(), plain, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-14)
        assert not torch.equal(q, before)
    assert model.stiefel.manifold.check_point_on_manifold(model.stiefel, atol=1e-6, rtol=1e-6)
