"""Products with the Hessian, its eigenvalues and trace, and lengths of gradients."""

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from quotient_manifolds.symmetries import GL, Symmetries, pair, slot
from reproduction.adaptive_norm import AdaptiveNormMeasure
from sharpness import HessianOperator
from sharpness.measures import MEASURES, divides, get_measure
from sharpness.measuring import direction_of


def operator(model, batch, space):
    return HessianOperator(space, lambda: F.cross_entropy(model(batch[0]), batch[1]))


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix", "adaptive", "euclidean"])
def test_second_derivative_along_exact_geodesics(trained_small, metric):
    model, _, (x, y) = trained_small
    how = MEASURES[metric]
    space = sharpness.WeightSpace(model, how)
    exact = sharpness.WeightSpace(model, get_measure(how, geodesic="exact") if divides(how) else how)
    v = space.random(torch.Generator().manual_seed(1))
    v = v / v.norm()
    with space.attached():
        curvature = float(v @ operator(model, (x, y), space).product(v))
    step = 1e-2 if metric == "geodesic-inv" else 2e-3
    losses = []
    with exact.attached(), torch.no_grad():
        for t in (-2, -1, 0, 1, 2):
            exact.move_to(t * step * v)
            losses.append(float(F.cross_entropy(model(x), y)))
    weights = np.array([-1, 16, -30, 16, -1]) / (12 * step**2)
    assert curvature == pytest.approx(float(weights @ np.array(losses)), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_symmetric_and_zero_off_the_horizontal_space(trained_small, metric):
    model, _, batch = trained_small
    space = sharpness.WeightSpace(model, MEASURES[metric])
    generator = torch.Generator().manual_seed(0)
    with space.attached():
        H = operator(model, batch, space)
        u, v = (space.random(generator) for _ in range(2))
        assert float(u @ H.product(v)) == pytest.approx(float(v @ H.product(u)), rel=1e-9)
        ambient = torch.randn(space.dim, generator=generator)
        off = ambient - space.project(ambient)
        assert off.norm() > 0.1
        assert H.product(off).norm() < 1e-10 * H.product(ambient).norm()
        as_numpy = H.matvec(v.numpy())
        np.testing.assert_allclose(as_numpy, H.product(v).numpy())
        assert H.num_matvecs == 6


def test_eigenvalues_and_trace_of_a_dense_matrix():
    """Against the matrix written out, for a network without attention."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(9, 4), torch.randint(3, (9,))
    for name in ("euclidean", "adaptive"):
        space = sharpness.WeightSpace(model, MEASURES[name])
        with space.attached():
            H = HessianOperator(space, lambda: F.cross_entropy(model(x), y))
            dense = np.stack([H.matvec(e) for e in np.eye(space.dim)])
            values = np.linalg.eigvalsh(dense)[::-1]
            assert H.largest_eigenvalue() == pytest.approx(values[0], rel=1e-4)
            found = scipy.sparse.linalg.eigsh(H, 3, which="LA", tol=1e-10, return_eigenvectors=False)
            np.testing.assert_allclose(np.sort(found)[::-1], values[:3], rtol=1e-8)
            H.product = torch.from_numpy(dense).matmul  # the same, but faster
            traces = [H.trace(24, seed=s)[0] for s in range(40)]
        names = dict(model.named_parameters())

        def loss(p, names=names):
            return F.cross_entropy(torch.func.functional_call(model, p, (x,)), y)

        blocks = torch.func.hessian(loss)({n: p.detach() for n, p in names.items()})
        scale = {n: torch.ones_like(p) if name == "euclidean" else p.detach() for n, p in names.items()}
        expected = sum(
            float((blocks[n][n].reshape(p.numel(), p.numel()).diagonal() * scale[n].reshape(-1) ** 2).sum())
            for n, p in names.items()
        )
        np.testing.assert_allclose(np.trace(dense), expected, rtol=1e-9)
        error = np.std(traces, ddof=1) / np.sqrt(len(traces))
        assert abs(np.mean(traces) - expected) < 4 * error + 1e-9
        assert np.std(traces) < 0.5 * np.std(
            [float(g @ dense @ g) for g in np.random.default_rng(0).normal(size=(99, len(dense)))]
        )


def test_a_loss_without_curvature():
    """ARPACK refuses the zero matrix."""
    model, x = nn.Linear(40, 3), torch.randn(9, 40)
    found = sharpness.hessian(model, [x], lambda f, x: f(x).sum(), measure="euclidean")
    assert (float(found), found.trace) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "h", "m"), [(1, 1, 1), (3, 2, 4), (6, 3, 5)])
@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_the_largest_of_negative_eigenvalues(metric, n, h, m, dtype):
    """At the maximum of −|GHᵀ − T|²/2 the Hessian is −JᵀJ, J the derivative of GHᵀ, and 0 off the horizontal space."""
    model = nn.Sequential(nn.Linear(m, h, bias=False), nn.Linear(h, n, bias=False)).to(dtype)
    for p in model.parameters():
        p.data = torch.linspace(1, 4, p.numel(), dtype=dtype).square().cos().view(p.shape)
    H, G = (layer.weight.detach() for layer in model)
    own, T = pair([slot(model, "1.weight")], [slot(model, "0.weight", transpose=True)], GL(h)), G @ H

    def loss(model, batch):
        return -(model[1].weight @ model[0].weight - T).square().sum() / 2

    space = sharpness.WeightSpace(model, MEASURES[metric], Symmetries((own,)))
    with space.attached():
        found = HessianOperator(space, lambda: loss(model, None)).largest_eigenvalue()
        values, vectors = torch.linalg.eigh(
            torch.stack([space.project(e) for e in torch.eye(space.dim, dtype=dtype)]).double()
        )
        tangents = [direction_of(space, v.to(dtype)).tensors for v in vectors[:, values > 0.5].T]
    assert len(tangents) == (n + m - h) * h < space.dim
    J = torch.stack([(u["1.weight"] @ H + G @ u["0.weight"]).flatten().double() for u in tangents])
    bound = 1e-3 if dtype == torch.float32 else 2e-4  # that of the search is 1e-4, of the largest eigenvalue in size
    assert found == pytest.approx(-float(torch.linalg.svdvals(J)[-1] ** 2), rel=bound)
    result = sharpness.hessian(model, [torch.zeros(1)], loss, symmetries=Symmetries((own,)), measure=metric)
    assert float(result) == pytest.approx(found, rel=bound)


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix"])
def test_spectrum_is_invariant_also_where_the_gradient_is_not_zero(trained_small, metric):
    model, twin, batch = trained_small

    def of(m, measure):
        return sharpness.hessian(m, [batch], measure=measure, num_matvecs=3)

    one, two = (of(m, metric) for m in (model, twin))
    assert float(one) == pytest.approx(float(two), rel=1e-6)
    assert one.trace == pytest.approx(two.trace, rel=1e-6)
    baseline = {"geodesic-inv": "euclidean", "geodesic-mix": "adaptive"}[metric]
    plain, moved = (of(m, baseline) for m in (model, twin))
    assert abs(float(moved) / float(plain) - 1) > 0.1
    assert abs(moved.trace / plain.trace - 1) > 0.1
    # Without the acceleration the second derivative along straight lines depends on the representative.
    straight = AdaptiveNormMeasure(**vars(sharpness.get_measure(metric, geodesic="first-order")))
    one, two = (float(of(m, straight)) for m in (model, twin))
    assert abs(two / one - 1) > 1e-3


def test_results_and_pieces(trained_small):
    model, _, batch = trained_small
    result = sharpness.hessian(model, [batch], num_matvecs=9)
    assert str(result).startswith(f"largest eigenvalue {float(result):.3g}, trace ")
    assert result.to_dict()["batches"][0]["trace"] == result.trace is not None
    twice = sharpness.hessian(model, [batch, batch], num_matvecs=9)
    assert result.std_error == result.batches[0].std_error > 0
    assert f"trace {result.trace:.3g} ± {result.std_error:.2g} (geodesic-inv)" in str(result)
    assert twice.std_error == pytest.approx(result.std_error)  # of the same vectors
    pieces = sharpness.hessian(model, [batch], num_matvecs=9, micro_batch=5)
    assert float(pieces) == pytest.approx(float(result), rel=1e-9)
    assert pieces.trace == pytest.approx(result.trace, rel=1e-9)
    assert sharpness.hessian(model, [batch], num_matvecs=9, measure="euclidean").trace != result.trace
    exact = sharpness.get_measure("geodesic-inv", geodesic="exact")
    assert sharpness.hessian(model, [batch], measure=exact, num_matvecs=9).trace == result.trace
    with pytest.raises(ValueError, match="num_matvecs must be a whole number of at least 1, got 0"):
        sharpness.hessian(model, [batch], num_matvecs=0)


def test_gradient_norms(trained_small):
    model, _, batch = trained_small
    result = sharpness.gradient_norm(model, [batch, batch])
    assert str(result) == f"gradient norm {float(result):.3g}, mean over 2 batches (geodesic-inv)"
    assert [b.passes for b in result.batches] == [1, 1]
    assert result.trace is result.std_error is None


def test_the_scalar_network():
    """ℓ = (βx − y)² with β = gh, along β e^{2Bt} (inv) and β (1 + 2Bt) (mix), with unit speed."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    g, h, x, y = 1.5, -0.8, 0.7, 0.4
    with torch.no_grad():
        model[0].weight.fill_(h)
        model[1].weight.fill_(g)
    only = pair([slot(model, "1.weight")], [slot(model, "0.weight", transpose=True)], GL(1))
    batch = (torch.tensor([[x]]), torch.tensor([[y]]))

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    beta, r = g * h, g * h * x - y
    # d²/dt² (βe^{2Bt}x − y)² at 0 with 2B² = 1: 2 (2Bβx)² + 2 r (2B)² β x.
    inv = sharpness.hessian(model, [batch], loss, symmetries=Symmetries((only,)))
    assert float(inv) == pytest.approx(4 * (beta * x) ** 2 + 4 * r * beta * x, rel=1e-9)
    # β(1 + 2Bt) with 2β²B² = 1: 2 (2Bβx)² = 4x².
    mix = sharpness.hessian(model, [batch], loss, measure="geodesic-mix", symmetries=Symmetries((only,)))
    assert float(mix) == pytest.approx(4 * x**2, rel=1e-9)
    assert mix.trace == pytest.approx(4 * x**2, rel=1e-6)
