import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sharpness
from sharpness.curvature import HessianOperator, hutchpp_trace, largest_eigenvalues
from sharpness.measures import MEASURES, get_measure


def operator(model, batch, space):
    return HessianOperator(space, lambda: F.cross_entropy(model(batch[0]).logits, batch[1]))


@pytest.mark.parametrize("metric", ["geodesic-inv", "geodesic-mix", "adaptive", "euclidean"])
def test_second_derivative_along_exact_geodesics(trained_small, metric):
    model, _, (x, y) = trained_small
    how = MEASURES[metric]
    space = sharpness.WeightSpace(model, how)
    exact = sharpness.WeightSpace(model, get_measure(how, geodesic="exact") if how.divides else how)
    v = space.random(torch.Generator().manual_seed(1))
    v = v / v.norm()
    with space.attached():
        curvature = float(v @ operator(model, (x, y), space).product(v))
    step = 1e-2 if metric == "geodesic-inv" else 2e-3
    losses = []
    with exact.attached(), torch.no_grad():
        for t in (-2, -1, 0, 1, 2):
            exact.move_to(t * step * v)
            losses.append(float(F.cross_entropy(model(x).logits, y)))
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
            np.testing.assert_allclose(largest_eigenvalues(H, 3, tol=1e-10), values[:3], rtol=1e-8)
            traces = [hutchpp_trace(H, 24, seed=s)[0] for s in range(40)]
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
    assert (found.max_eigenvalue, found.trace) == (0.0, 0.0)
