import pytest
import torch

from quotient_manifolds import GLQuotientMix, canonical_gauge
from tests.points import MANIFOLDS, carry, close, metrics


@metrics
def test_the_floor_is_gauge_invariant_and_the_projection_stays_one(metric):
    manifold = MANIFOLDS[metric](6, 5)
    floored = MANIFOLDS[metric](6, 5, relaxation=0.3)
    Q, R = torch.linalg.qr(torch.randn(6, 3)).Q, torch.linalg.qr(torch.randn(5, 3)).Q
    s = torch.tensor([1.0, 0.5, 0.01]).sqrt()
    x = manifold.pack_point(Q * s, R * s)
    u = torch.randn(11, 3)
    A = torch.randn(3, 3)
    y, moved = manifold.act(x, A), carry(manifold, u, A)
    assert not torch.allclose(floored.proju(x, u), manifold.proju(x, u), rtol=1e-3)
    close(floored.proju(y, moved), carry(manifold, floored.proju(x, u), A))
    close(floored.retr(y, moved), manifold.act(floored.retr(x, u), A))
    close(floored.norm(y, moved), floored.norm(x, u))
    p = floored.proju(x, u)
    close(floored.proju(x, p), p, 1e-12)
    assert abs(floored.inner(x, p, manifold.vertical(x, torch.randn(3, 3)))) < 1e-12
    G, _ = manifold.unpack_tensor(y)  # the paper's GᵀG + εI, in contrast, is not a function of the orbit
    additive = torch.eye(3)
    assert not torch.allclose(
        torch.linalg.eigvalsh(G.T @ G + 0.1 * additive), torch.linalg.eigvalsh(torch.diag(s**2) + 0.1 * additive)
    )


def test_a_rank_deficient_point_counts_its_missing_directions_as_absent():
    manifold = GLQuotientMix(6, 5)
    Q, R = torch.linalg.qr(torch.randn(6, 3)).Q, torch.linalg.qr(torch.randn(5, 3)).Q
    s = torch.tensor([1.0, 0.5, 0.0])
    space = manifold.at_gauge(canonical_gauge(Q * s, R * s))
    c = space.project_coordinates(torch.randn(11, 3))
    assert torch.isfinite(c).all()
    assert c[:, 2].abs().max() == 0
    assert torch.isfinite(space.retr(space.from_coordinates(c))).all()


@metrics
def test_vertical_moment(metric):
    manifold = MANIFOLDS[metric](7, 5)
    x = manifold.random(12, 3)
    space = manifold.tangent_space_at(x)
    u, L = torch.randn_like(x), torch.randn(3, 3)
    A = space.gauge.A
    vertical = manifold.vertical(x, space.gauge.A_inv @ L @ A)  # (GΛ, −HΛᴴ) of the canonical representative
    torch.testing.assert_close((space.vertical_moment(u) * L).sum(), space.inner(u, vertical))
    torch.testing.assert_close((space.vertical_covector(L) * u).sum(), space.inner(u, vertical))
    assert space.vertical_moment(space.proju(u)).abs().max() < 1e-10


@metrics
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_derivatives_where_the_floor_is_active(metric, dtype):
    """Singular values 1, 0.9, 0.3, 0.2 under a floor of 0.5: metric, projection and gradient against differences."""
    manifold = MANIFOLDS[metric](6, 5, relaxation=0.5)
    G, H = (torch.linalg.qr(torch.randn(2, n, 4, dtype=dtype)).Q for n in (6, 5))
    root = torch.tensor([1.0, 0.9, 0.3, 0.2]).sqrt()
    A = torch.randn(2, 4, 4, dtype=dtype)
    x = manifold.act(torch.cat([G * root, H * root], -2), A).requires_grad_()
    a, b, d = (torch.randn_like(x) for _ in range(3))
    d = manifold.act(d, A)  # as small a step for a point that lies far out on its orbit
    for f in (
        lambda x: manifold.inner(x, a, b),
        lambda x: (manifold.proju(x, a) * b.conj()).real.sum((-1, -2)),
        lambda x: (manifold.egrad2rgrad(x, a) * b.conj()).real.sum((-1, -2)),
        lambda x: (manifold.acceleration(x, a) * b.conj()).real.sum((-1, -2)),
    ):
        (g,) = torch.autograd.grad(f(x).sum(), x)
        with torch.no_grad():
            expected = (f(x + 1e-5 * d) - f(x - 1e-5 * d)) / 2e-5
        assert torch.allclose((g.conj() * d).real.sum((-1, -2)), expected, rtol=1e-5)
    (first,) = torch.autograd.grad(manifold.inner(x, a, b).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.real.sum().backward()
