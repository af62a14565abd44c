"""The quotients in pymanopt: its own checks, the Hessian against exact geodesics, trust regions, errors."""

import pickle

import numpy as np
import pymanopt
import pytest
import torch
from pymanopt.manifolds import Product
from pymanopt.optimizers import ConjugateGradient, TrustRegions
from pymanopt.tools import diagnostics

from quotient_manifolds import GLQuotientInv, GLQuotientMix, RescaleQuotient
from quotient_manifolds.pymanopt import as_pymanopt
from tests.support.points import MANIFOLDS, metrics

N, M = 7, 5


@pytest.fixture(autouse=True)
def seed():
    np.random.seed(0)


def no_correction(manifold, space):
    """Return the Hessian of a flat space."""
    return torch.zeros_like


def other_connection(manifold, space):
    """Return the acceleration of the other metric's geodesics."""
    other = GLQuotientInv if isinstance(manifold, GLQuotientMix) else GLQuotientMix
    return other(*manifold.row_split()).tangent_space_at(space.x).acceleration


#: What takes the place of the acceleration in a Hessian that is wrong.
WRONG = pytest.mark.parametrize("wrong", [no_correction, other_connection])


def quotient(metric, h, n=N, m=M):
    geometry = MANIFOLDS[metric](n, m)
    return geometry, as_pymanopt(geometry, h)


def problem(geometry, manifold, size=1.0):
    """A smooth function of the product."""
    data = size * torch.from_numpy(np.random.standard_normal((geometry.n, geometry.m)))

    @pymanopt.function.pytorch(manifold)
    def cost(x):
        return torch.nn.functional.softplus(data * geometry.to_matrix(x)).sum()

    return pymanopt.Problem(manifold, cost)


def spoil(monkeypatch, geometry, manifold, wrong):
    """Let the Hessian see another acceleration, and the retraction the right one."""
    right = manifold.euclidean_to_riemannian_hessian

    def hessian(point, gradient, second, vector):
        space = manifold._at(point)
        with monkeypatch.context() as patch:
            substitute = wrong(geometry, space)
            patch.setattr(space, "acceleration", lambda u: substitute(u) + 0 * u)
            return right(point, gradient, second, vector)

    monkeypatch.setattr(manifold, "euclidean_to_riemannian_hessian", hessian)


# -- pymanopt's checks ------------------------------------------------------------------------------------------------


@pytest.fixture
def slopes(monkeypatch):
    """The slopes that pymanopt's checks find, in half the steps, and of lengths whose errors are above rounding.

    pymanopt 2.2.1 stores an array of one number as a number, which NumPy 2.4 refuses.
    """
    found, logspace = [], np.logspace

    def piece(x, y, window):
        fits = []
        for k in range(len(x) - window):
            segment = np.arange(k, k + window + 1)
            poly, residual, *_ = np.polyfit(x[segment], y[segment], deg=1, full=True)
            fits.append((residual.item(), segment, poly))
        _, segment, poly = min(fits, key=lambda fit: fit[0])
        found.append(poly[0])
        return segment, poly

    monkeypatch.setattr(diagnostics, "identify_linear_piece", piece)
    monkeypatch.setattr(np, "logspace", lambda *_: logspace(-3, 0, 25))
    monkeypatch.setattr(diagnostics.plt, "show", diagnostics.plt.close)
    return found


def numbers(printed):
    """The residuals that pymanopt prints: whether a vector is tangent, and the Hessian linear and symmetric."""
    lines = [line for line in printed.splitlines() if line.endswith(".") and ("esidual" in line or "differ" in line)]
    return [abs(float(line.rstrip(".").split()[-1])) for line in lines]


@metrics
def test_pymanopts_checks_pass(metric, slopes, capsys):
    geometry, manifold = quotient(metric, 2)
    f = problem(geometry, manifold)
    diagnostics.check_gradient(f)
    diagnostics.check_hessian(f)
    assert slopes == pytest.approx([2, 3], abs=0.1)
    residuals = numbers(capsys.readouterr().out)
    assert len(residuals) == 4
    assert max(residuals) < 1e-13


@metrics
def test_pymanopts_check_of_the_retraction_passes(metric, slopes):
    _, manifold = quotient(metric, 1)
    diagnostics.check_retraction(manifold)
    assert slopes == pytest.approx([3], abs=0.1)


@metrics
def test_pymanopts_check_sees_a_retraction_of_first_order(metric, slopes, monkeypatch):
    _, manifold = quotient(metric, 1)
    monkeypatch.setattr(manifold, "retraction", lambda x, u: x + u)
    diagnostics.check_retraction(manifold)
    assert slopes == pytest.approx([2], abs=0.2)


@metrics
def test_pymanopts_check_sees_a_wrong_hessian(metric, slopes, monkeypatch):
    geometry, manifold = quotient(metric, 2)
    spoil(monkeypatch, geometry, manifold, no_correction)
    diagnostics.check_hessian(problem(geometry, manifold))
    assert slopes[0] < 2.9


# -- the Hessian ------------------------------------------------------------------------------------------------------


def along(geometry, f, x, u):
    """The second derivative of f along the exact geodesic, by five values of it."""
    t = 5e-3 * torch.arange(-2, 3)
    points = geometry.geodesic(torch.from_numpy(x), torch.from_numpy(u), t)[0]
    values = np.array([f.cost(point.numpy()) for point in points])
    return values @ [-1, 16, -30, 16, -1] / (12 * 5e-3**2)


def error(geometry, manifold, f, x):
    """The largest error of ⟨Hess[u], v⟩, by polarisation, beside the norm of the Hessian on five vectors."""
    vectors = [manifold.random_tangent_vector(x) / 2 for _ in range(5)]
    images = [f.riemannian_hessian(x, u) for u in vectors]
    for image in images:
        assert manifold.norm(x, image - manifold.projection(x, image)) < 1e-12 * manifold.norm(x, image)
    found = np.array([[manifold.inner_product(x, a, u) for a in images] for u in vectors])
    alone = np.array([along(geometry, f, x, u) for u in vectors])
    sums = np.array([[along(geometry, f, x, u + v) for u in vectors] for v in vectors])
    return np.abs(found - (sums - alone - alone[:, None]) / 2).max() / np.abs(found).max()


@metrics
@pytest.mark.parametrize("h", [1, 3])
@pytest.mark.parametrize("kind", ["as it is", "another representative", "small"])
def test_the_hessian_is_the_second_derivative_along_geodesics(metric, h, kind):
    geometry, manifold = quotient(metric, h)
    f, x = problem(geometry, manifold), manifold.random_point()
    if kind == "another representative":
        x = act(geometry, x, conditioned(h))
    if kind == "small":
        x, f = x * 2.0**-12, problem(geometry, manifold, size=2.0**24)
        if metric == "mix":  # whose vectors have the size of the product
            draw = manifold.random_tangent_vector
            manifold.random_tangent_vector = lambda x: draw(x) * 2.0**-24
    assert error(geometry, manifold, f, x) < 1e-6


@metrics
@WRONG
def test_a_wrong_hessian_is_seen(metric, wrong, monkeypatch):
    geometry, manifold = quotient(metric, 3)
    f, x = problem(geometry, manifold), manifold.random_point()
    spoil(monkeypatch, geometry, manifold, wrong)
    assert error(geometry, manifold, f, x) > 1e-2


# -- optimisers -------------------------------------------------------------------------------------------------------


def completion(metric, n=20, m=15, h=2):
    """Find a matrix from 70 % of its entries, which have noise."""
    geometry, manifold = quotient(metric, h, n, m)
    target = torch.from_numpy(np.random.standard_normal((n, h)) @ np.random.standard_normal((h, m)))
    target += 0.1 * torch.from_numpy(np.random.standard_normal((n, m)))
    known = torch.from_numpy(np.random.random((n, m)) < 0.7)

    @pymanopt.function.pytorch(manifold)
    def cost(x):
        return (geometry.to_matrix(x) - target)[known].square().sum() / 2

    return geometry, manifold, pymanopt.Problem(manifold, cost)


def visited(monkeypatch, manifold, optimizer, f, start):
    """The points at which the optimiser asks for a gradient, and its norms."""
    points, norms, gradient = [], [], manifold.euclidean_to_riemannian_gradient

    def see(point, euclidean):
        found = gradient(point, euclidean)
        points.append(point)
        norms.append(manifold.norm(point, found))
        return found

    monkeypatch.setattr(manifold, "euclidean_to_riemannian_gradient", see)
    optimizer.run(f, initial_point=start)
    monkeypatch.undo()
    return points, np.array(norms)


def superlinear(norms):
    """Whether the last norms above rounding fall by ever larger factors."""
    last = np.flatnonzero(norms < 1e-7)[:1]
    falls = [norms[k - 1] / norms[k] for end in last for k in (end - 2, end - 1, end)]
    return bool(falls) and falls[2] > 10 * falls[1] > 10 * falls[0] > 10


@metrics
def test_trust_regions_converge_faster_than_linearly(metric, monkeypatch):
    _, manifold, f = completion(metric)
    start, options = manifold.random_point(), {"min_gradient_norm": 1e-9, "verbosity": 0}
    _, norms = visited(monkeypatch, manifold, TrustRegions(**options), f, start)
    assert norms[-1] < 1e-9
    assert superlinear(norms)
    _, norms = visited(monkeypatch, manifold, ConjugateGradient(max_iterations=100, **options), f, start)
    assert norms[-1] < 1e-5
    assert not superlinear(norms)


def conditioned(h, condition=100):
    """A random matrix of a given condition number."""
    U, V = (np.linalg.qr(np.random.standard_normal((h, h))).Q for _ in range(2))
    return torch.from_numpy(U * condition ** np.linspace(-0.5, 0.5, h) @ V)


def act(geometry, x, A):
    return geometry.act(torch.from_numpy(x), A).numpy()


@metrics
@pytest.mark.parametrize("optimizer", [TrustRegions, ConjugateGradient])
def test_iterates_depend_on_the_product_alone(metric, optimizer, monkeypatch):
    geometry, manifold, f = completion(metric, h=3)
    start = manifold.random_point()
    runs = []
    for x in (start, act(geometry, start, conditioned(3))):
        points, _ = visited(monkeypatch, manifold, optimizer(max_iterations=12, verbosity=0), f, x)
        runs.append([geometry.to_matrix(torch.from_numpy(point)) for point in points[:11]])
    assert len(runs[0]) == len(runs[1]) > 5
    assert (runs[0][-1] - runs[0][0]).norm() > 1
    for one, other in zip(*runs, strict=True):
        assert (one - other).norm() < 1e-8 * one.norm()


def test_two_quotients_in_a_product():
    """Of two matrices of different ranks and metrics."""
    geometries = GLQuotientMix(N, M), GLQuotientInv(4, 6)
    manifold = Product([as_pymanopt(geometries[0], 2), as_pymanopt(geometries[1], 3)])
    targets = [torch.from_numpy(np.random.standard_normal((g.n, g.m))) for g in geometries]

    @pymanopt.function.pytorch(manifold)
    def cost(x, y):
        products = (g.to_matrix(z) for g, z in zip(geometries, (x, y), strict=True))
        return sum((p - t).square().sum() for p, t in zip(products, targets, strict=True))

    result = TrustRegions(verbosity=0, min_gradient_norm=1e-8).run(pymanopt.Problem(manifold, cost))
    tails = [torch.linalg.svdvals(t)[h:].square().sum() for t, h in zip(targets, (2, 3), strict=True)]
    assert result.cost == pytest.approx(float(sum(tails)), rel=1e-12)  # Eckart and Young


# -- the other methods ------------------------------------------------------------------------------------------------


@metrics
def test_exponential_logarithm_distance_and_mean(metric):
    geometry, manifold = quotient(metric, 2)
    assert manifold.dim == (N + M - 2) * 2
    x = manifold.random_point()
    u = manifold.random_tangent_vector(x) / 3
    assert manifold.norm(x, u) == pytest.approx(1 / 3)
    np.testing.assert_allclose(u, manifold.to_tangent_space(x, u), atol=1e-14)
    y = manifold.exp(x, u)
    np.testing.assert_allclose(manifold.log(x, y), u, atol=1e-7)
    assert manifold.dist(x, y) == pytest.approx(1 / 3)
    middle = torch.from_numpy(manifold.pair_mean(x, y))
    np.testing.assert_allclose(geometry.to_matrix(middle), geometry.to_matrix(torch.tensor(manifold.exp(x, u / 2))))
    moved = manifold.transport(x, y, u)
    np.testing.assert_allclose(moved, manifold.projection(y, u))
    assert manifold.norm(y, manifold.zero_vector(y)) == 0


def test_random_points_follow_numpys_seed():
    manifold = quotient("mix", 2)[1]
    draws = []
    for _ in range(2):
        np.random.seed(3)
        x = manifold.random_point()
        draws.append((x, manifold.random_tangent_vector(x)))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.abs(manifold.random_point() - draws[0][0]).max() > 0.1


def test_a_point_that_changes_in_place_is_seen():
    manifold = quotient("inv", 2)[1]
    x, u = manifold.random_point(), np.ones((N + M, 2))
    before = manifold.norm(x, u)
    x *= 2
    assert manifold.norm(x, u) == pytest.approx(before / 2)
    assert pickle.loads(pickle.dumps(manifold)).norm(x, u) == pytest.approx(before / 2)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(RescaleQuotient(), "got RescaleQuotient"), (GLQuotientMix, "got GLQuotientMix"), ("mix", "got str")],
)
def test_another_manifold_is_refused(wrong, said):
    with pytest.raises(TypeError, match=r"needs a GLQuotientInv\(n, m\) or a GLQuotientMix\(n, m\), " + said):
        as_pymanopt(wrong, 2)


@pytest.mark.parametrize("h", [0, 6, 2.0, True])
def test_ranks_that_do_not_fit(h):
    with pytest.raises(ValueError, match="as_pymanopt: h must be a whole number of at least 1 and below 6"):
        as_pymanopt(GLQuotientMix(N, M), h)


def test_points_that_are_none():
    manifold = quotient("mix", 2)[1]
    x = manifold.random_point()
    with pytest.raises(TypeError, match="real arrays, got complex128; for complex ones use the optimisers of geoopt"):
        manifold.norm(x.astype(complex), x)
    with pytest.raises(TypeError, match="real arrays, got complex128"):
        manifold.norm(x, 1j * x)
    for other in (torch.ones(N + M, 2), (np.ones((N, 2)), np.ones((M, 2)))):
        with pytest.raises(
            TypeError, match=rf"are NumPy arrays, got a {type(other).__name__}; for a tensor pass x.numpy"
        ):
            manifold.norm(other, x)
    with pytest.raises(ValueError, match=r"have the shape \(12, 2\), got \(12, 3\)"):
        manifold.norm(np.ones((N + M, 3)), x)
    with pytest.raises(ValueError, match="does not have full column rank"):
        manifold.norm(np.zeros((N + M, 2)), x)
