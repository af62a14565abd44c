import numpy as np
import pytest
import torch

from quotient_manifolds.gl.path import Path, Preconditioner, energy, first_path, flat, unflat
from tests.geodesics import METRICS, field, metric, problem


def some_path(name, dtype=torch.float64, count=4):
    manifold, x, u = problem(name, 6, 5, 2, dtype=dtype, batch=(3,))
    y = manifold.act(manifold.expmap(x, 0.5 * u), torch.randn(3, 2, 2, dtype=dtype))
    path = first_path(manifold.metric, 6, x, y, count)
    return manifold, path.moved(0.05 * flat(torch.randn_like(path.c), torch.zeros(3, 2, 2, dtype=dtype)))


@metric
@field
def test_the_energy_is_that_of_the_metric_and_its_gradient_is_one(name, dtype):
    manifold, path = some_path(name, dtype)
    value, g = energy(path)
    x, v = path.nodes()
    expected = manifold.inner(x.movedim(1, 0), v.movedim(1, 0)).movedim(0, 1) @ path.rule()[0]
    torch.testing.assert_close(value, expected)
    d = torch.randn_like(g)
    ends = [energy(path.moved(s * 1e-6 * d))[0] for s in (1, -1)]
    torch.testing.assert_close((g.conj() * d).real.sum(1), (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-6)


def test_a_geodesic_is_a_path_of_which_the_gradient_vanishes():
    """Fitted at many times: the coefficients of the velocity of an exact geodesic."""
    manifold, x, u = problem("inv", 6, 5, 2, batch=(3,))
    path = first_path(manifold.metric, 6, x, manifold.expmap(x, u), 12)
    w, phi, *_ = path.rule()
    t = (torch.tensor(np.polynomial.legendre.leggauss(14)[0]) + 1) / 2
    velocity = manifold.geodesic(x, u, t)[1].movedim(0, 1)
    c = torch.einsum("q,qk,bqij->bkij", w, phi, velocity)[:, 1:]
    value, g = energy(Path(path.metric, 6, x, path.y, c))
    torch.testing.assert_close(value, manifold.inner(x, u), rtol=1e-9, atol=0)
    assert g.abs().max() < 1e-8
    assert energy(path)[1].abs().max() > 1e-2  # the straight path is none
    torch.testing.assert_close(Path(path.metric, 6, x, path.y, c).start_velocity(), u, rtol=1e-7, atol=1e-7)


@metric
def test_the_preconditioner_is_symmetric_and_near_the_inverse(name):
    _, path = some_path(name)
    pc = Preconditioner(path)
    a, b = (torch.randn_like(energy(path)[1]) for _ in range(2))
    torch.testing.assert_close((pc(a, path) * b).sum(1), (a * pc(b, path)).sum(1), rtol=1e-8, atol=1e-8)
    assert bool(((pc(a, path) * a).sum(1) > 0).all())

    if name == "inv":  # near the inverse where the path is a geodesic, nearly
        manifold, x, u = problem(name, 6, 5, 2, batch=(3,))
        path = first_path(manifold.metric, 6, x, manifold.expmap(x, 0.5 * u), 4)
        pc = Preconditioner(path)

        def product(d):
            return (energy(path.moved(1e-5 * d))[1] - energy(path.moved(-1e-5 * d))[1]) / 2e-5

        d = torch.randn(20, *a.shape)
        ratios = torch.stack([(v * product(v)).sum(1) / (v * v).sum(1) for v in d])
        # The same quotients in coordinates that the preconditioner makes: P⁻¹ d for d.
        ours = torch.stack([(pc(v, path) * product(pc(v, path))).sum(1) / (v * pc(v, path)).sum(1) for v in d])
        assert ours.min() > 0.3
        assert ours.log().abs().median() < 0.3 * ratios.log().abs().median()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_square_factors_turn_without_losing_rank(dtype):
    manifold = METRICS["inv"](4, 4)
    x, y = (manifold.random(8, 8, 4, dtype=dtype) for _ in range(2))
    if dtype == torch.float64:
        for part in (slice(0, 4), slice(4, 8)):
            wrong = torch.linalg.det(x[:, part]) * torch.linalg.det(y[:, part]) < 0
            y[wrong, part.start] = -y[wrong, part.start]
    path = first_path(manifold.metric, 4, x, y, 4)
    found = path.nodes()[0]
    lowest = torch.linalg.svdvals(found[:, :, :4])[..., -1].amin(1) / torch.linalg.svdvals(x[:, :4])[..., -1]
    straight = path.nodes()[0] * 0 + x[:, None] + torch.linspace(0, 1, 10)[:, None, None] * (y - x)[:, None]
    assert lowest.median() > 0.2
    if dtype == torch.float64:
        signs = torch.linalg.det(straight[:, :, :4]).sign()
        assert bool((signs != signs[:, :1]).any())
    c, L = unflat(flat(path.c, torch.ones(8, 4, 4, dtype=dtype)), path)
    assert torch.equal(c, path.c)
    assert bool((L == 1).all())
