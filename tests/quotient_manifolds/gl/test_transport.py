import pytest
import torch

from quotient_manifolds import GeodesicExitError, GLQuotientInv
from tests.geodesics import field, metric, problem


@metric
@field
def test_parallel_transport(name, dtype):
    manifold, x, u = problem(name, dtype=dtype, batch=(2,))
    u = 0.7 * u
    v, w = (manifold.proju(x, torch.randn_like(x)) for _ in range(2))
    ends, (pv, pw, pu) = manifold.parallel_transport(*(z.expand(3, *z.shape) for z in (x, u)), torch.stack([v, w, u]))
    y, velocity = ends[0], manifold.geodesic(x, u, 1.0)[1]
    torch.testing.assert_close(y, manifold.expmap(x, u), rtol=1e-8, atol=1e-8)
    assert manifold.norm(y, pv - manifold.proju(y, pv)).max() < 1e-8 * manifold.norm(y, pv).max()
    torch.testing.assert_close(manifold.inner(y, pv, pw), manifold.inner(x, v, w), rtol=1e-8, atol=1e-8)
    # The geodesic's own velocity is parallel along it.
    torch.testing.assert_close(pu, velocity, rtol=1e-7, atol=1e-7)
    # Projection, the cheaper transport, does not keep inner products.
    q = manifold.transp(x, y, v)
    assert (manifold.inner(y, q) - manifold.inner(x, v)).abs().max() > 1e-3 * manifold.inner(x, v).max()
    # And back again.
    back = manifold.parallel_transport(y, -velocity, pv)[1]
    torch.testing.assert_close(back, v, rtol=1e-6, atol=1e-6)


@metric
def test_transport_agrees_with_projection_to_first_order(name):
    manifold, x, u = problem(name)
    v = manifold.proju(x, torch.randn_like(x))
    errors = []
    for k in (5, 6, 7):
        y, pv = manifold.parallel_transport(x, u / 2**k, v)
        errors.append(float(manifold.norm(y, pv - manifold.transp(x, y, v))))
    assert 1.8 < errors[0] / errors[1] < 4.5
    assert errors[2] < errors[1] < errors[0]


def test_transport_beyond_the_boundary():
    manifold, x, u = problem("mix", 1, 1, 1, length=0.1)
    u = -x * 0.8  # B = −0.8: the rank falls at t = 0.625
    with pytest.raises(GeodesicExitError) as caught:
        manifold.parallel_transport(x, u, u)
    assert caught.value.time == pytest.approx(0.625, rel=1e-6)


def test_a_transported_vector_has_no_derivative():
    """It had wrong ones, and NaN."""
    manifold = GLQuotientInv(4, 3)
    x = manifold.random(7, 2).requires_grad_()
    u = manifold.proju(x.detach(), 0.1 * torch.randn(7, 2)).requires_grad_()
    assert not any(found.requires_grad for found in manifold.parallel_transport(x, u, u))


def test_long_geodesics_are_cut_into_legs():
    manifold = GLQuotientInv(5, 4)
    generator = torch.Generator().manual_seed(0)
    x = manifold.random(9, 2, dtype=torch.float64, generator=generator)
    u, v, w = (manifold.proju(x, torch.randn(9, 2, dtype=x.dtype, generator=generator)) for _ in range(3))
    u = 30 * u / manifold.norm(x, u)
    (end, _), (a, b) = manifold.parallel_transport(*(z.expand(2, 9, 2) for z in (x, u)), torch.stack([v, w]))
    expected = manifold.to_matrix(manifold.expmap(x, u))
    torch.testing.assert_close(manifold.to_matrix(end), expected, rtol=1e-7, atol=1e-7 * float(expected.norm()))
    assert float(manifold.inner(end, a, b)) == pytest.approx(float(manifold.inner(x, v, w)), rel=1e-6)
