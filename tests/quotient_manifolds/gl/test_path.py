import torch

from quotient_manifolds.gl.bent import first_path
from quotient_manifolds.gl.metrics import INV
from quotient_manifolds.gl.path import Path, energy, flat, unflat
from tests.geodesics import field, metric, problem


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
    _, factors = path.states()
    x, v = torch.cat(factors, -2).tensor_split(2, 1)
    assert torch.equal(torch.cat(path.points(), -2), x)
    expected = manifold.inner(x.movedim(1, 0), v.movedim(1, 0)).movedim(0, 1) @ path.rule()[0]
    torch.testing.assert_close(value, expected)
    d = torch.randn_like(g)
    ends = [energy(path.moved(s * 1e-6 * d))[0] for s in (1, -1)]
    torch.testing.assert_close((g.conj() * d).real.sum(1), (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-6)


def test_a_geodesic_is_a_path_of_which_the_gradient_vanishes():
    """Fitted at many times: the coefficients of the velocity of an exact geodesic."""
    manifold, x, u = problem("inv", 6, 5, 2, batch=(3,))
    path = first_path(manifold.metric, 6, x, manifold.expmap(x, u), 12)
    w, phi, *_, fit, t = path.rule()
    velocity = manifold.geodesic(x, u, t)[1].movedim(0, 1)
    c = torch.einsum("q,qk,bqij->bkij", w, phi, velocity)[:, 1:]
    value, g = energy(Path(path.metric, 6, x, path.y, c))
    torch.testing.assert_close(value, manifold.inner(x, u), rtol=1e-9, atol=0)
    assert g.abs().max() < 1e-8
    assert energy(Path(path.metric, 6, x, path.y, 0 * c))[1].abs().max() > 1e-2  # the straight path is none
    torch.testing.assert_close(torch.einsum("kq,bqij->bkij", fit, manifold.geodesic(x, u, t)[0].movedim(0, 1)), c)
    torch.testing.assert_close(Path(path.metric, 6, x, path.y, c).start_velocity(), u, rtol=1e-7, atol=1e-7)


def test_vectors_of_coefficients_and_of_the_end():
    _, path = some_path("inv")
    c, L = unflat(flat(path.c, torch.ones(3, 2, 2)), path)
    assert torch.equal(c, path.c)
    assert bool((L == 1).all())


def test_only_well_conditioned_paths_are_rounded_to_single_precision():
    x, y = torch.linalg.qr(torch.randn(2, 3, 6, 2)).Q, torch.linalg.qr(torch.randn(2, 3, 5, 2)).Q
    start, end = torch.cat([x[0], y[0]], -2), torch.cat([x[0] + 0.1 * x[1], y[0] + 0.1 * y[1]], -2)
    path = Path(INV, 6, start, end, 0.1 * torch.randn(3, 3, 11, 2) / 11)
    single = path.in_single()
    assert single.x.dtype == single.y.dtype == single.c.dtype == torch.float32
    torch.testing.assert_close(energy(single)[0].double(), energy(path)[0], rtol=1e-5, atol=0)
    thin = torch.tensor([1.0, 1e-3])
    for bad in (
        Path(path.metric, 6, path.x * thin, path.y, path.c),
        Path(path.metric, 6, path.x, path.y * thin, path.c),
    ):
        assert bad.in_single() is bad
