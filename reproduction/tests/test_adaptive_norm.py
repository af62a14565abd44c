import pytest
import torch

from quotient_manifolds import GLQuotientInv, GLQuotientMix
from reproduction.adaptive_norm import AdaptiveNorm
from tests.support.geodesics import field
from tests.support.oracle import from_real, to_real


@pytest.mark.parametrize("cls", [GLQuotientInv, GLQuotientMix])
@field
def test_projection_against_least_squares(cls, dtype):
    """Orthogonal projection on the horizontal vectors in coordinates ξ/w, by a basis of them."""
    torch.manual_seed(0)
    manifold = cls(4, 3)
    x = manifold.random(7, 2, dtype=dtype)
    frame = AdaptiveNorm(manifold.tangent_space_at(x))
    size = to_real(x).numel()
    horizontal = torch.stack([to_real(manifold.proju(x, from_real(e, x))) for e in torch.eye(size)])
    basis = torch.linalg.svd(horizontal / to_real(x))  # rows: coordinates of horizontal vectors
    rank = size - (4 if dtype == torch.float64 else 8)
    B = basis.Vh[:rank]
    c = torch.randn_like(x)
    found = frame.project_coordinates(c)
    torch.testing.assert_close(to_real(found), B.T @ (B @ to_real(c)), rtol=1e-8, atol=1e-8)
    u = frame.from_coordinates(found)
    torch.testing.assert_close(manifold.proju(x, u), u, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(frame.coordinates(u), found)
    assert (frame.project_coordinates(found) - found).abs().max() < 1e-10
    # Projecting in the metric instead gives other coordinates.
    assert (frame.coordinates(manifold.proju(x, frame.from_coordinates(c))) - found).abs().max() > 1e-2


def test_random_vectors_and_zero_weights():
    manifold = GLQuotientInv(5, 4)
    x = manifold.random(3, 9, 2)
    x[:, 1, 0] = 0
    frame = AdaptiveNorm(manifold.tangent_space_at(x))
    u = frame.random(torch.Generator().manual_seed(0))
    torch.testing.assert_close(manifold.proju(x, u), u, rtol=1e-7, atol=1e-7)
    assert (u[:, 1, 0] == 0).all()
    assert frame.coordinates(u).isfinite().all()
    again = frame.random(torch.Generator().manual_seed(0))
    assert torch.equal(u, again)
