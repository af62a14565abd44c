import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix
from reproduction.additive import AdditiveTangentSpace

field = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])

EPSILON = 0.3


@pytest.mark.parametrize("cls", [GLQuotientInv, GLQuotientMix])
@field
def test_the_metric_and_its_projection(cls, dtype):
    torch.manual_seed(0)
    manifold = cls(7, 5)
    x = manifold.random(3, 12, 4, dtype=dtype)
    G, H = manifold.unpack_tensor(x)
    space = AdditiveTangentSpace(manifold, x, EPSILON)
    u, w = torch.randn_like(x), torch.randn_like(x)
    # The metric as it is defined.
    M, N = (X.mH @ X + EPSILON * torch.eye(4) for X in (G, H))
    W_G, W_H = (M.inverse(), N.inverse()) if cls is GLQuotientInv else (N, M)
    (a, b), (c, d) = manifold.unpack_tensor(u), manifold.unpack_tensor(w)
    expected = torch.einsum("bij,bji->b", W_G, a.mH @ c).real + torch.einsum("bij,bji->b", W_H, b.mH @ d).real
    torch.testing.assert_close(space.inner(u, w), expected)
    # The projection is idempotent, and orthogonal to vertical vectors.
    p = space.proju(u)
    torch.testing.assert_close(space.proju(p), p)
    L = torch.randn(3, 4, 4, dtype=dtype)
    assert space.inner(p, manifold.vertical(x, L)).abs().max() < 1e-10
    torch.testing.assert_close(space.proju(manifold.vertical(x, L)), torch.zeros_like(x))
    # The gradient represents the covector on horizontal vectors.
    g = space.egrad2rgrad(w)
    torch.testing.assert_close(space.inner(g, p), (w.conj() * p).real.sum((-2, -1)))
    # Coordinates make the metric the identity.
    torch.testing.assert_close(space.coordinates(u).abs().square().sum((-2, -1)), space.inner(u))
    torch.testing.assert_close(space.from_coordinates(space.coordinates(u)), u)
    torch.testing.assert_close(
        (space.dual_coordinates(w).conj() * space.coordinates(u)).real.sum((-2, -1)), (w.conj() * u).real.sum((-2, -1))
    )
    torch.testing.assert_close(space.project_coordinates(space.coordinates(u)), space.coordinates(p))
    r = space.random(torch.Generator().manual_seed(0))
    torch.testing.assert_close(space.proju(r), r)
    # It is not the metric without relaxation, and tends to it.
    exact = manifold.tangent_space_at(x)
    assert (exact.proju(u) - p).abs().max() > 1e-3
    near = AdditiveTangentSpace(manifold, x, 1e-12)
    for name in ("proju", "egrad2rgrad", "acceleration"):
        torch.testing.assert_close(getattr(near, name)(u), getattr(exact, name)(u), rtol=1e-7, atol=1e-7)


def test_bad_input():
    manifold = GLQuotientInv(3, 3)
    with pytest.raises(ValueError, match="additive relaxation must be positive"):
        AdditiveTangentSpace(manifold, manifold.origin(6, 2), 0.0)


def test_working_precision():
    manifold = GLQuotientMix(3, 3)
    space = AdditiveTangentSpace(manifold, manifold.random(6, 2), 0.1, torch.float32)
    assert space.proju(torch.randn(6, 2, dtype=torch.float32)).dtype == torch.float32
