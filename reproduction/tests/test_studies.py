import json

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

import sharpness
from quotient_manifolds import GLQuotientInv, RescaleQuotient
from quotient_manifolds.symmetries import GL, Symmetries, pair, slot
from reproduction import cli, diagonal, toy
from reproduction.trust_region import maximise_quadratic

# -- the trust-region solver ------------------------------------------------------------------------------------------


def constrained(f, gradient, dim, radius, starts=12, seed=0):
    """The best of several constrained maximisations by SciPy."""
    rng = np.random.default_rng(seed)
    best = -np.inf
    for _ in range(starts):
        z = rng.standard_normal(dim)
        found = scipy.optimize.minimize(
            lambda b: -f(b), z * radius / np.linalg.norm(z), jac=lambda b: -gradient(b), method="SLSQP",
            constraints={"type": "ineq", "fun": lambda b: radius**2 - b @ b, "jac": lambda b: -2 * b},
            options={"maxiter": 500, "ftol": 1e-14},
        )  # fmt: skip
        inside = found.x * min(1.0, radius / max(np.linalg.norm(found.x), 1e-300))
        best = max(best, f(inside))
    return best


@pytest.mark.parametrize("kind", ["indefinite", "positive", "negative", "interior", "hard", "flat", "no slope"])
def test_quadratics_over_a_ball(kind):
    rng = np.random.default_rng(3)
    H = rng.standard_normal((7, 7))
    H = H + H.T
    g, radius = rng.standard_normal(7), 0.8
    if kind == "positive":
        H = H @ H
    elif kind == "negative":
        H = -H @ H - np.eye(7)
    elif kind == "interior":
        H, g = -H @ H - np.eye(7), 0.01 * g
    elif kind == "hard":
        top = np.linalg.eigh(H)[1][:, -1]
        g = 0.01 * (g - top * (top @ g))
    elif kind == "flat":
        H = np.zeros((7, 7))
    elif kind == "no slope":
        g = np.zeros(7)
    value, b = maximise_quadratic(g, H, radius)
    assert np.linalg.norm(b) <= radius * (1 + 1e-9)
    assert value == pytest.approx(g @ b + 0.5 * b @ H @ b, rel=1e-9)
    best = constrained(lambda b: g @ b + 0.5 * b @ H @ b, lambda b: g + H @ b, 7, radius)
    assert value == pytest.approx(best, rel=1e-5)
    assert value >= best - 1e-9


# -- diagonal networks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    problem = diagonal.Problem.draw(12, 20, seed=0)
    u, v = diagonal.train(problem, 4, (0.1, 0.5), seed=0)
    return problem, u, v


def test_networks_are_trained_to_the_target(trained):
    problem, u, v = trained
    assert (problem.loss(u * v) <= 1e-5).all()
    assert (np.count_nonzero(problem.beta)) == 2
    with pytest.raises(ValueError, match="did not reach a loss"):
        diagonal.train(problem, 2, (1e-3, 1e-3), seed=0, max_steps=10)


@pytest.mark.parametrize("rho", [0.01, 0.3])
def test_maxima_against_scipy(trained, rho):
    problem, us, vs = trained
    u, v = us[0] + 0.05, vs[0] - 0.05  # away from interpolation too
    beta = u * v
    base = problem.loss(beta)
    found = diagonal.maximised(problem, u, v, rho, steps=200)
    X, y = problem.X, problem.y

    def check(name, product, jacobian, dim, radius, tolerance):
        def f(b):
            return float(np.sum((X @ product(b) - y) ** 2) - base)

        def gradient(b):
            return jacobian(b).T @ (2 * X.T @ (X @ product(b) - y))

        assert found[name] == pytest.approx(constrained(f, gradient, dim, radius), rel=tolerance), name

    r = rho / np.sqrt(2)
    check(
        "inv",
        lambda b: beta * np.exp(np.clip(2 * b, -9, 9)),
        lambda b: np.diag(2 * beta * np.exp(np.clip(2 * b, -9, 9))),
        20,
        r,
        1e-5,
    )
    check("mix", lambda d: beta + d, lambda d: np.eye(20), 20, np.sqrt(2) * rho, 1e-5)
    for name, a, b in (("adaptive", u, v), ("euclidean", 1.0, 1.0)):
        check(
            name,
            lambda z, a=a, b=b: (u + a * z[:20]) * (v + b * z[20:]),
            lambda z, a=a, b=b: np.hstack([np.diag((v + b * z[20:]) * a), np.diag((u + a * z[:20]) * b)]),
            40, rho, 1e-4,
        )  # fmt: skip
    second, _ = maximise_quadratic(
        4 * beta * (X.T @ (X @ beta - y)),
        8 * (np.diag(beta * (X.T @ (X @ beta - y))) + beta[:, None] * (X.T @ X) * beta), r,
    )  # fmt: skip
    assert found["inv second-order"] == second


class Diagonal(nn.Module):
    def __init__(self, u, v):
        super().__init__()
        self.u, self.v = nn.Parameter(torch.from_numpy(u.copy())), nn.Parameter(torch.from_numpy(v.copy()))

    def forward(self, X):
        return X @ (self.u * self.v)


@pytest.mark.parametrize("measures", [["geodesic-inv"], ["geodesic-mix"], ["adaptive", "euclidean"]], ids=str)
def test_maxima_against_the_library(trained, measures):
    problem, us, vs = trained
    u, v, rho = us[1], vs[1], 0.05
    if measures[0].startswith("geodesic"):  # where the second-order retraction is the geodesic
        rho = 1e-3
    if measures == ["geodesic-mix"]:  # which leaves the manifold where entries of β are as small as the ball
        sign = np.where(np.arange(20) % 2, -1.0, 1.0)
        u, v = np.linspace(0.7, 1.5, 20), np.linspace(1.2, 0.6, 20) * sign
    model = Diagonal(u, v)
    batch = (torch.from_numpy(problem.X), torch.from_numpy(problem.y))
    own = Symmetries((pair([slot(model, "u")], [slot(model, "v")], GL(20, diagonal=True)),))
    expected = diagonal.maximised(problem, u, v, rho, steps=300)
    for measure in measures:
        found = sharpness.evaluate(
            model, [batch], lambda m, b: (m(b[0]) - b[1]).square().sum(), measure=measure, rho=rho, steps=300,
            restarts=4, symmetries=own,
        )  # fmt: skip
        assert float(found) == pytest.approx(expected[measure.removeprefix("geodesic-")], rel=1e-3)


def test_measures_are_functions_of_the_orbit(trained):
    problem, us, vs = trained
    u, v = us[2], vs[2]
    alpha = np.exp(np.random.default_rng(0).uniform(-1, 1, 20))
    one, two = diagonal.maximised(problem, u, v, 0.1), diagonal.maximised(problem, alpha * u, v / alpha, 0.1)
    for name in diagonal.MAXIMISED:
        if name == "euclidean":
            assert abs(two[name] / one[name] - 1) > 0.01
        else:
            assert two[name] == pytest.approx(one[name], rel=1e-12)
    closed = [diagonal.closed_forms(problem, b, 0.1) for b in (u * v, (alpha * u) * (v / alpha))]
    for name in diagonal.CLOSED_FORMS:
        assert closed[1][name] == pytest.approx(closed[0][name], rel=1e-12)


def test_closed_forms_where_their_assumptions_hold():
    """XᵀX = I and small ρ. (Not at interpolation, where the linear term of inv and mix vanishes.)"""
    rng = np.random.default_rng(1)
    X = np.linalg.qr(rng.standard_normal((12, 6)))[0]
    star = rng.standard_normal(6)
    problem = diagonal.Problem(X, X @ star, star)
    u, v = rng.standard_normal(6), rng.standard_normal(6)
    rho = 1e-6
    closed = {k: float(c[0]) for k, c in diagonal.closed_forms(problem, (u * v)[None], rho).items()}
    found = diagonal.maximised(problem, u, v, rho)
    assert closed["inv"] == pytest.approx(found["inv"], rel=1e-4)
    assert closed["inv"] == pytest.approx(found["adaptive"], rel=1e-4)
    assert closed["mix"] == pytest.approx(found["mix"], rel=1e-4)
    # At interpolation inv and adaptive are both 2ρ² max β².
    u, v = np.sqrt(abs(star)), np.sqrt(abs(star)) * np.sign(star)
    at = diagonal.maximised(problem, u, v, 1e-4)
    expected = 2 * 1e-8 * (star**2).max()
    assert at["inv"] == pytest.approx(expected, rel=1e-3)
    assert at["adaptive"] == pytest.approx(expected, rel=1e-3)
    assert diagonal.closed_forms(problem, star[None], 1e-4)["adaptive"][0] == pytest.approx(expected)
    # The printed constraint ‖B‖ ≤ ρ, without the √2, would be off by as much.
    assert abs(at["inv"] / (4 * 1e-8 * (star**2).max()) - 1) > 0.4


def test_the_diagonal_command(tmp_path, capsys):
    arguments = ["--n", "10", "--d", "20", "--models", "8", "--seeds", "2", "--alpha-min", "0.1", "--rho", "0.01"]
    arguments += ["--workers", "1"]
    assert cli.main(["diagonal", *arguments, "--out", str(tmp_path / "d"), "--quiet"]) == 0
    found = json.loads((tmp_path / "d" / "diagonal.json").read_text(encoding="utf-8"))
    lines = (tmp_path / "d" / "diagonal.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 17
    table = found["correlations with the test loss"]
    assert set(table) == {
        "closed adaptive",
        "closed inv",
        "closed mix",
        *(f"max {m} rho=0.01" for m in diagonal.MAXIMISED),
    }
    assert all(len(entry["taus"]) == 2 for entry in table.values())
    assert (tmp_path / "d" / "diagonal.png").read_bytes().startswith(b"\x89PNG")
    assert "true maximisation over the ball, ρ = 0.01" in capsys.readouterr().out
    assert cli.main(["diagonal", "--models", "2", "--out", str(tmp_path / "e")]) == 2
    assert "models at least 3" in capsys.readouterr().err
    assert cli.main(["diagonal", "--alpha-min", "2", "--out", str(tmp_path / "e")]) == 2
    assert "alpha-min and alpha-max" in capsys.readouterr().err


# -- the toy network --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifold", [RescaleQuotient("inv"), GLQuotientInv(1, 1)], ids=repr)
def test_toy_quantities_against_closed_forms(manifold):
    x, y = 0.9, 1.3

    def f(p):
        return (p[1, 0] * p[0, 0] * x - y) ** 2

    points = torch.randn(6, 2, 1)
    beta, star = points[:, 0, 0] * points[:, 1, 0], y / x
    size = points.square().sum((1, 2))
    gradient = 2 * x**2 * (beta - star).abs()
    torch.testing.assert_close(toy.euclidean_gradient_norm(f, points), gradient * size.sqrt())
    torch.testing.assert_close(toy.euclidean_hessian_trace(f, points), 2 * x**2 * size)
    torch.testing.assert_close(toy.riemannian_gradient_norm(manifold, f, points), 2**0.5 * gradient * beta.abs())
    trace = 4 * x**2 * beta * (2 * beta - star)
    torch.testing.assert_close(toy.riemannian_hessian_trace(manifold, f, points), trace)
    # Second derivative along the exact geodesic β e^{√2 t}, by finite differences.
    h = 1e-4

    def loss(t):
        return (beta * torch.exp(torch.tensor(2**0.5 * t)) * x - y) ** 2

    torch.testing.assert_close(trace, (loss(h) - 2 * loss(0.0) + loss(-h)) / h**2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("theta", [(0.5, 0.6), (1.0, 1.0), (-0.8, 1.0), (3.0, 0.7)])
def test_toy_sharpness_against_its_closed_form(theta):
    x, y = 1.2, 0.9
    model = toy.Toy(*theta)
    batch = (torch.tensor([x]), torch.tensor([y]))
    for rho in (0.01, 0.2):
        closed = toy.closed_forms(*theta, x, y, rho)
        found = sharpness.evaluate(
            model, [batch], lambda m, b: (m(b[0]) - b[1]).square().sum(), rho=rho, steps=80, restarts=2,
            symmetries=Symmetries((model.pair(),)),
        )  # fmt: skip
        assert float(found) == pytest.approx(closed["retraction"], rel=1e-6)
        assert closed["second order"] == pytest.approx(closed["exact"], rel=3 * rho)
        if rho == 0.01:
            assert float(found) == pytest.approx(closed["exact"], rel=1e-3)


def test_the_toy_command(tmp_path, capsys):
    assert cli.main(["toy", "--out", str(tmp_path / "t"), "--quiet"]) == 0
    found = json.loads((tmp_path / "t" / "toy.json").read_text(encoding="utf-8"))
    for manifold in found["variation along the orbit of the first point (relative)"].values():
        for quantity, variation in manifold.items():
            assert variation > 0.1 if quantity.startswith("Euclidean") else variation < 1e-10
    assert found["at the minimum (1, y/x)"]["Riemannian Hessian trace"] == pytest.approx(4.0)
    assert (tmp_path / "t" / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["toy", "--x", "0", "--out", str(tmp_path / "t")]) == 2
    assert "x must lie between 1e-3 and 1e3" in capsys.readouterr().err
