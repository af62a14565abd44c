import numpy as np
import pytest
import torch
from hypothesis import given

from quotient_manifolds import canonical_gauge, from_matrix
from tests.points import MANIFOLDS, carry, cases, close, metrics


@metrics
def test_tangent_space_at_a_known_gauge(metric):
    manifold = MANIFOLDS[metric](5, 4)
    x, u = manifold.random(9, 3), torch.randn(9, 3)
    gauge = canonical_gauge(*manifold.unpack_tensor(x))
    close(manifold.at_gauge(gauge, x).proju(u), manifold.proju(x, u), 1e-12)
    canonical = manifold.at_gauge(gauge)
    close(canonical.x, manifold.canonical(x), 1e-12)
    close(canonical.norm(carry(manifold, u, gauge.A)), manifold.norm(x, u), 1e-12)


@given(cases())
def test_canonical_representative(case):
    manifold, x, A, _, _ = case
    c = manifold.canonical(x)
    close(manifold.to_matrix(c), manifold.to_matrix(x))
    G, H = manifold.unpack_tensor(c)
    M, N = G.mH @ G, H.mH @ H
    close(M, N)
    close(M, torch.diag_embed(M.diagonal(dim1=-2, dim2=-1)))
    sigma = M.diagonal(dim1=-2, dim2=-1).real
    gaps = (sigma[..., :-1] - sigma[..., 1:]).min() if sigma.shape[-1] > 1 else torch.tensor(1.0)
    if gaps > 1e-2:
        close(manifold.canonical(manifold.act(x, A)), c, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_from_matrix(dtype):
    W = torch.randn(2, 6, 5, dtype=dtype)
    x = from_matrix(W, 3)
    G, H = x.split([6, 5], dim=-2)
    U, s, Vh = torch.linalg.svd(W, full_matrices=False)
    assert torch.allclose(G @ H.mH, (U[..., :3] * s[..., None, :3]) @ Vh[..., :3, :])
    assert torch.allclose(G.mH @ G, H.mH @ H)
    with pytest.raises(ValueError, match="no point of rank 6"):
        from_matrix(W, 6)
    with pytest.raises(ValueError, match="rank below 2"):
        from_matrix(torch.ones(3, 3), 2)


def test_factors_of_two_precisions_and_numbers_of_numpy():
    with pytest.raises(ValueError, match=r"a pair: G of shape \(4, 2\) has dtype torch.float32 but H"):
        canonical_gauge(torch.randn(4, 2, dtype=torch.float32), torch.randn(3, 2, dtype=torch.float64))
    assert from_matrix(torch.randn(4, 3), np.int64(2)).shape == (7, 2)
    with pytest.raises(ValueError, match="from_matrix: h must be a whole number of at least 1"):
        from_matrix(torch.randn(4, 3), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_factors_of_any_size_have_a_gauge(dtype):
    """What is representable is right to rounding; singular values that are not are one error."""
    G, H = torch.linalg.qr(torch.randn(5, 2)).Q.to(dtype), torch.linalg.qr(torch.randn(4, 2)).Q.to(dtype)
    one, large = canonical_gauge(G, H), 2.0 ** (62 if dtype == torch.float32 else 500)
    for p, q in ((large, 1 / large), (large, 1.0), (1.0, 1 / large), (large, 0.5)):
        gauge, eps = canonical_gauge(p * G, q * H), 50 * torch.finfo(dtype).eps
        close(gauge.x / (p * q) ** 0.5, one.x, eps)
        close(gauge.sigma / p / q, one.sigma, eps)
        close(gauge.A * (q / p) ** 0.5, one.A, eps)
        close(gauge.A @ gauge.A_inv, torch.eye(2).to(dtype), eps)
    for size in (2.0**24 * large, 2.0**-24 / large):
        with pytest.raises(ValueError, match=r"singular values of G Hᴴ over- or underflow in torch.float\d\d; rescale"):
            canonical_gauge(size * G, size * H)
    assert torch.equal(canonical_gauge(0 * G, H).sigma, torch.zeros(2, dtype=dtype))  # an absent factor is no underflow


def test_from_matrix_of_any_size_and_its_derivative():
    X = torch.randn(4, 3)
    for size in (2.0**-1000, 2.0**1000):
        close(from_matrix(size * X, 2) / size**0.5, from_matrix(X, 2), 1e-12)
    X.requires_grad_()
    assert torch.autograd.gradcheck(lambda X: from_matrix(X, 2).square().sum(), X)
    equal = torch.eye(3).requires_grad_()
    with pytest.raises(ValueError, match="no derivative where singular values are equal"):
        from_matrix(equal, 2)[0].sum().backward()
    with pytest.raises(ValueError, match="NaN or infinite"):
        from_matrix(torch.full((3, 3), torch.nan), 1)
